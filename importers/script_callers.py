"""The files of a repository that run what a script defines. Files of tests do not count."""

from __future__ import annotations

import ast
import os
import re
import stat
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from affidavit.importers.script_ast import Script, last_name
from affidavit.importers.script_files import definition_of, parsed_file
from affidavit.importers.script_options import READERS
from affidavit.importers.script_values import Values

MAX_FILES = 5_000
MAX_FILE = 1 << 20
IMPORT = re.compile(r"^[ \t]*(?:from|import)\b[^\n(]*(?:\([^)]*\))?", re.MULTILINE)
WORD = re.compile(r"\w+")
SKIPPED = re.compile(r"^(\..*|tests?|node_modules|__pycache__|venv|site-packages)$")


def runners(script: Script, nodes: list[ast.expr]) -> dict[Script, list[ast.expr]]:
    """The scripts that run what leads to these nodes, and where: itself, or others that name it.

    Where they are several, what leads to them is noted as ``shared``.
    """
    tops = [top for top in script.tree.body if isinstance(top, ast.FunctionDef | ast.ClassDef)]
    others = [top for top in script.tree.body if top not in tops]
    names: set[str] = set()
    leading = {outer for node in nodes for outer in script.above(node)}
    while not names.issuperset(more := {top.name for top in tops if top in leading}):
        names |= more
        leading |= {top for top in tops if _mentions(top, names)}
    runs = any(top in leading or _mentions(top, names) for top in others)
    running: dict[Script, list[ast.expr]] = {script: nodes} if runs else {}
    for values, node in _uses(script, names) if names else ():
        running.setdefault(values.script, []).append(node)
    script.shared = leading - {script.tree} if len(running) > 1 else set()
    return running


def _mentions(part: ast.AST, names: set[str]) -> bool:
    return any(isinstance(node, ast.Name) and node.id in names for node in ast.walk(part))


def _uses(script: Script, names: set[str]) -> Iterator[tuple[Values, ast.expr]]:
    """Where other files name what the script defines by one of these names, with their values."""
    own = place(script)
    words = {*names, Path(own or "").stem}
    for file, imported in _imports() if own is not None else ():
        if words.isdisjoint(imported) or file.lower() == own:
            continue
        other = parsed_file(Path(file).read_text("utf-8", "replace"), Path(file))
        if other is None:
            continue
        values = Values(other, READERS)
        known_as = {node.asname: node.name for node in other.nodes if isinstance(node, ast.alias)}
        for node in other.nodes:
            if not isinstance(node, ast.Name | ast.Attribute) or isinstance(node.ctx, ast.Store):
                continue
            if known_as.get(last_name(node), last_name(node)) in names:
                origin = definition_of(values, node)
                if origin and origin[1].name in names and place(origin[0].script) == own:
                    yield values, node


def place(script: Script) -> str | None:
    """The path of a script's file, in lower case."""
    if script.folder is None or script.name is None:
        return None
    return (script.folder.resolve() / script.name).as_posix().lower()


def _imports() -> Iterator[tuple[str, frozenset[str]]]:
    """The Python files of the current folder, with the words of their imports."""
    count = 0
    for place, folders, names in os.walk(Path.cwd().resolve()):
        folders[:] = sorted(name for name in folders if not SKIPPED.match(name))
        for name in sorted(names):
            file = os.path.join(place, name)
            if not name.endswith(".py") or name.startswith("test_"):
                continue
            state = os.lstat(file)
            if not stat.S_ISREG(state.st_mode):  # a pipe may have no end
                continue
            count += 1
            if count > MAX_FILES:
                return
            yield file, _imported(file, state.st_mtime_ns, state.st_size)


@lru_cache(maxsize=MAX_FILES)
def _imported(file: str, _: int, size: int) -> frozenset[str]:
    if size > MAX_FILE:
        return frozenset()
    with open(file, encoding="utf-8", errors="replace") as stream:
        text = stream.read()
    return frozenset(word for line in IMPORT.findall(text) for word in WORD.findall(line))
