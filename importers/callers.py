"""The calls of a script's functions and constructors in other files of its repository.

A parameter has what every call gives it, in whichever file: what a call elsewhere gives is a value,
or the reason why it is none. Files of tests do not count.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from affidavit.importers.script import Script, last_name
from affidavit.importers.script_files import module_of, parsed_file
from affidavit.importers.script_options import READERS
from affidavit.importers.script_values import Unreadable, Values

MOST_FILES = 5_000
LARGEST_FILE = 1 << 20
IMPORT = re.compile(r"^[ \t]*(?:from|import)\b[^\n(]*(?:\([^)]*\))?", re.MULTILINE)
WORD = re.compile(r"\w+")
SKIPPED = re.compile(r"^(\..*|tests?|node_modules|__pycache__|venv|site-packages)$")


def callers(script: Script, function: ast.AST) -> list[ast.Call]:
    """The calls of a function or constructor of the script in other files.

    Raises ``Unreadable`` if a file does something else with it.
    """
    if function not in script.elsewhere:
        owner = script.parents.get(function)
        made = owner if getattr(function, "name", "") == "__init__" else None
        top = made if isinstance(made, ast.ClassDef) else function
        named = isinstance(top, ast.ClassDef | ast.FunctionDef)
        outermost = named and script.parents.get(top) is script.tree
        name = getattr(top, "name", "")
        script.elsewhere[function] = list(_calls(script, name)) if outermost else []
    return script.elsewhere[function]


def _calls(script: Script, name: str) -> Iterator[ast.Call]:
    own = _place(script)
    if own is None:
        return
    words = {name, Path(own).stem}
    for file, named in _imports():
        if not words.isdisjoint(named) and file.lower() != own:
            other = parsed_file(Path(file).read_text("utf-8", "replace"), Path(file))
            if other is not None:
                yield from _calls_in(Values(other, READERS), own, name)


def _calls_in(values: Values, own: str, name: str) -> Iterator[ast.Call]:
    script = values.script
    for node in script.nodes:
        if isinstance(node, ast.Name | ast.Attribute) and _is_it(values, node, own, name):
            call = script.parents[node]
            if isinstance(call, ast.Call) and call.func is node:
                yield _valued(values, call)
            elif node not in script.types:
                raise Unreadable(node, f"{name} is passed on in {script.name}")


def _is_it(values: Values, node: ast.expr, own: str, name: str) -> bool:
    """Whether a name or attribute is the function ``name`` of the file ``own``."""
    if last_name(node) != name and not isinstance(node, ast.Name):
        return False
    origin = module_of(values, node) if isinstance(node.ctx, ast.Load) else None  # type: ignore[attr-defined]
    while origin is not None:
        inner, named = origin
        if named == name and _place(inner.script) == own:
            return True
        origin = module_of(inner, ast.Name(named, ast.Load()))
    return False


def _place(script: Script) -> str | None:
    """The path of a script's file, in lower case."""
    if script.folder is None or script.name is None:
        return None
    return (script.folder.resolve() / script.name).as_posix().lower()


def _valued(values: Values, call: ast.Call) -> ast.Call:
    """A call with values in place of its arguments, which belong to another file."""
    return ast.Call(
        ast.Name(last_name(call.func) or "", ast.Load()),
        [item if isinstance(item, ast.Starred) else _value(values, item) for item in call.args],
        [ast.keyword(item.arg, _value(values, item.value)) for item in call.keywords],
    )


def _value(values: Values, node: ast.expr) -> ast.expr:
    return ast.Constant(values.attempt(node))


def _imports() -> Iterator[tuple[str, frozenset[str]]]:
    """The Python files of the current folder, with the words of their imports."""
    count = 0
    for place, folders, names in os.walk(Path.cwd().resolve()):
        folders[:] = sorted(name for name in folders if not SKIPPED.match(name))
        for name in sorted(names):
            file = os.path.join(place, name)
            if not name.endswith(".py") or name.startswith("test_") or os.path.islink(file):
                continue
            count += 1
            if count > MOST_FILES:
                return
            state = os.stat(file)
            yield file, _imported(file, state.st_mtime_ns, state.st_size)


@lru_cache(maxsize=MOST_FILES)
def _imported(file: str, _: int, size: int) -> frozenset[str]:
    if size > LARGEST_FILE:
        return frozenset()
    with open(file, encoding="utf-8", errors="replace") as stream:
        text = stream.read()
    return frozenset(word for line in IMPORT.findall(text) for word in WORD.findall(line))
