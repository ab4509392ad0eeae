"""Find the other Python files of a repository that run a script's private call, or it imports."""

from __future__ import annotations

import ast
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from affidavit.importers.scripts.launches import forget_files
from affidavit.importers.scripts.syntax import Script, package_of, parse_script
from affidavit.plan import OutsideFolder, read_inside

MAX_FILES = 5_000
MAX_FILE = 1 << 20
MAX_PARTS = 5
IMPORT = re.compile(r"^[ \t]*+(?:from|import)\b[^\n(]*+(?:\([^)]{0,5000}+\))?", re.MULTILINE)
NAME = re.compile(r"[\w.]++|\*")
SKIPPED = frozenset({"test", "tests", "node_modules", "__pycache__", "venv", "site-packages"})


@dataclass(frozen=True)
class Module:
    """A Python file, its ``names`` for others, and its words, all of them if it is ``whole``."""

    file: str
    names: frozenset[str]
    imported: frozenset[str]
    words: frozenset[str]
    whole: bool


def file_of_package(script: Script, package: str) -> str | None:
    """Return the file or folder that Python imports in place of an installed package, if any."""
    if script.folder is None:
        return None
    places = [script.folder]
    for call, base in script.method_calls("insert"):
        if script.module_path(base) == "sys.path" and len(call.args) == 2:
            text = getattr(call.args[1], "value", None)
            if isinstance(text, str) and not text.startswith("/") and ".." not in text:
                places.append(script.folder / text)
    for place in places:
        if os.path.isfile(place / f"{package}.py"):
            return f"{package}.py"
        if os.path.isfile(place / package / "__init__.py"):
            return f"{package}/"
    return None


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
    """Return another file that imports one of these definitions of a script, or may do so."""
    if script.folder is None or script.name is None:
        return None
    stem = Path(script.name).stem.lower()
    others, unread = _others(script)
    for module in others if names else ():
        parts = {part for name in module.imported for part in name.split(".")}
        known = module.whole and "*" not in parts and module.words.isdisjoint(names)
        if stem in parts and not known:
            return os.path.relpath(module.file)
    return unread


def modules_of(script: Script, beside: tuple[str, ...]) -> tuple[list[Script], list[str]]:
    """Return the modules that a script may import, not ``beside`` it, and files too large."""
    if script.folder is None:
        return [], []
    statements = [node for node in script.nodes if isinstance(node, ast.Import | ast.ImportFrom)]
    names = frozenset(_imported("\n".join(map(ast.unparse, statements))))
    others, modules = _others(script)[0] if names else [], dict[str, Module]()
    while more := {
        item.file: item for item in others if item.file not in modules
        and any(package_of(name) not in beside for name in item.names & names)
    }:  # fmt: skip
        modules |= more
        names = names.union(*(item.imported for item in more.values()))
    scripts = (_parsed(file) for file in modules)
    large = [os.path.relpath(item.file) for item in modules.values() if not item.whole]
    return [item for item in scripts if item is not None], large


def _imported(text: str) -> Iterator[str]:
    """Yield the dotted names that the statements of a text may import, in lower case."""
    for statement in IMPORT.findall(text.lower()):
        words = NAME.findall(statement)
        source = words[1].strip(".") if words[0] == "from" and len(words) > 1 else ""
        names = words[words.index("import") + 1 :] if "import" in words else []
        yield source
        yield from (f"{source}.{name}".strip(".") for name in names)


@lru_cache(maxsize=256)
def _parsed(file: str) -> Script | None:
    """Parse a file; return None if it is not Python."""
    try:
        text = _text(file)
        return Script(parse_script(text), Path(file).parent, os.path.basename(file).lower())
    except (SyntaxError, ValueError):
        return None


@contextmanager
def one_walk() -> Iterator[None]:
    """Read each file of the current folder once for all scripts that are read inside."""
    if not _running:
        for cached in (_walk, _parsed):
            cached.cache_clear()
        forget_files()
    _running.append(None)
    try:
        yield
    finally:
        _running.pop()


Walk = tuple[list[Module], str | None]
"""Python files, and what else may be there and is not read."""
_running: list[None] = []
"""As many items as ``one_walk`` runs inside of itself."""


@lru_cache(maxsize=1)
def _walk(root: Path) -> Walk:
    """Find the Python files of a folder."""
    modules: list[Module] = []
    for place, folders, names in os.walk(root, onerror=_raise):
        folders[:] = sorted(name for name in folders if name[0] != "." and name not in SKIPPED)
        for name in sorted(names):
            file = os.path.join(place, name)
            if not name.endswith(".py") or name.startswith("test_"):
                continue
            state = os.lstat(file)
            if not stat.S_ISREG(state.st_mode):  # a pipe may have no end
                continue
            if len(modules) == MAX_FILES:
                return modules, f"one of more than {MAX_FILES:,} Python files"
            text = _text(file)
            parts = [part for part in Path(file).with_suffix("").parts if part != "__init__"]
            ends = range(1, min(MAX_PARTS, len(parts)))
            known = frozenset(".".join(parts[-count:]).lower() for count in ends)
            imported = frozenset(_imported(text))
            words = frozenset(re.findall(r"\w++", text))
            modules.append(Module(file, known, imported, words, state.st_size <= MAX_FILE))
    return modules, None


def _others(script: Script) -> Walk:
    """Return the Python files of the current folder without the script itself."""
    if script.folder is None:
        return [], None
    own = (script.folder.resolve() / (script.name or "")).as_posix().lower()
    modules, unread = _walk(Path.cwd().resolve())
    return [item for item in modules if item.file.lower() != own], unread


def _raise(error: OSError) -> None:
    raise error


def _text(file: str) -> str:
    """Return the text of a file of the repository, empty if it is none; raises ``OSError``."""
    try:
        return read_inside(file, Path.cwd(), MAX_FILE).decode("utf-8", "replace")
    except (OutsideFolder, FileNotFoundError):
        return ""
