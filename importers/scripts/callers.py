"""Find the files of the repository that import from a script what leads to its private call."""

from __future__ import annotations

import ast
import os
import re
import stat
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from affidavit.importers.scripts.syntax import Script
from affidavit.plan import read_inside

MAX_FILES = 5_000
MAX_FILE = 1 << 20
IMPORT = re.compile(
    r"^[ \t]*+(?:from\b([^\n]*?)\b)?import\b([^\n(]*+(?:\([^)]{0,5000}+\))?)", re.MULTILINE
)
WORD = re.compile(r"\w++|\*")
Imports = tuple[tuple[frozenset[str], frozenset[str]], ...]
"""The words of the modules that statements import from, and of what they import."""
SKIPPED = frozenset({"test", "tests", "node_modules", "__pycache__", "venv", "site-packages"})


def leading_definitions(script: Script, node: ast.AST) -> list[ast.AST]:
    """Return the functions and classes of a module that lead to a node: they hold or name it."""
    tops = [top for top in script.tree.body if isinstance(top, ast.FunctionDef | ast.ClassDef)]
    leading = {outer for outer in script.ancestors(node) if outer in tops}
    while more := [
        top for top in tops if top not in leading
        and not {part.id for part in ast.walk(top) if isinstance(part, ast.Name)}.isdisjoint(
            getattr(item, "name", "") for item in leading)
    ]:  # fmt: skip
        leading |= set(more)
    return list(leading)


def find_caller(script: Script, names: set[str]) -> str | None:
    """Return another file that imports one of these definitions of a script, if there is one."""
    if not names or script.folder is None or script.name is None:
        return None
    own = (script.folder.resolve() / script.name).as_posix().lower()
    stem, anyone = Path(own).stem, "|".join(map(re.escape, sorted(names)))
    for file, imports in _imports_by_file():
        if file.lower() == own:
            continue
        for source, imported in imports:
            whole = stem in {word.lower() for word in imported}
            if not whole and stem not in {word.lower() for word in source}:
                continue
            used = rf"\.(?:{anyone})\b" if whole else rf"\b(?:{anyone})\b"
            if names & imported or (
                (whole or "*" in imported) and re.search(used, _text_of(file)) is not None
            ):
                return os.path.relpath(file)
    return None


def _imports_by_file() -> Iterator[tuple[str, Imports]]:
    """Yield the Python files of the current folder, with what they import."""
    count = 0
    for place, folders, names in os.walk(Path.cwd().resolve()):
        folders[:] = sorted(name for name in folders if name[0] != "." and name not in SKIPPED)
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
            yield file, _imports(file, state.st_mtime_ns, state.st_size)


@lru_cache(maxsize=MAX_FILES)
def _imports(file: str, _: int, size: int) -> Imports:
    text = _text_of(file) if size <= MAX_FILE else ""
    return tuple(
        (frozenset(WORD.findall(source)), frozenset(WORD.findall(imported)))
        for source, imported in IMPORT.findall(text)
    )


def _text_of(file: str) -> str:
    """Return the text of a file of the repository, empty if it is none."""
    try:
        return read_inside(file, Path.cwd(), MAX_FILE).decode("utf-8", "replace")
    except OSError:
        return ""
