"""Link a script with the code of its repository: what it imports, and the file that runs it.

Functions and classes that take steps, make loaders or are models are copied into the script under
their imported names, together with the definitions that they use, as ``module.name``. Lines of
copied code sort after the script's own, and are reported with their file.

A script that another file runs is read as that file, which imports it.
"""

from __future__ import annotations

import ast
import copy
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from affidavit.importers.partial_plan import ForeignLine
from affidavit.importers.scripts.modules import definition_of, module_of, parsed_file
from affidavit.importers.scripts.options import READERS
from affidavit.importers.scripts.syntax import (
    Binding,
    Definition,
    Script,
    last_name,
    replace_child,
)
from affidavit.importers.scripts.values import Evaluator, is_left_out
from affidavit.plan import read_inside

MAX_FILES = 5_000
MAX_FILE = 1 << 20
IMPORT = re.compile(r"^[ \t]*+(?:from|import)\b[^\n(]*+", re.MULTILINE)
WORD = re.compile(r"\w++")
SKIPPED = frozenset({"test", "tests", "node_modules", "__pycache__", "venv", "site-packages"})


def find_callers(script: Script, nodes: list[ast.expr]) -> dict[Script, list[ast.expr]]:
    """Find the scripts that run these nodes, with the nodes that do so in each.

    That is the script itself, or other files that import from it. If there are several, the
    definitions on the way are marked as ``shared_definitions``.
    """
    tops = [top for top in script.tree.body if isinstance(top, ast.FunctionDef | ast.ClassDef)]
    others = [top for top in script.tree.body if top not in tops]
    names: set[str] = set()
    leading = {outer for node in nodes for outer in script.ancestors(node)}
    while not names.issuperset(more := {top.name for top in tops if top in leading}):
        names |= more
        leading |= {top for top in tops if _mentions_any(top, names)}
    runs = any(top in leading or _mentions_any(top, names) for top in others)
    running: dict[Script, list[ast.expr]] = {script: nodes} if runs else {}
    for values, node in _uses_in_other_files(script, names) if names else ():
        running.setdefault(values.script, []).append(node)
    script.shared_definitions = leading - {script.tree} if len(running) > 1 else set()
    return running


def _mentions_any(part: ast.AST, names: set[str]) -> bool:
    return any(isinstance(node, ast.Name) and node.id in names for node in ast.walk(part))


def _uses_in_other_files(script: Script, names: set[str]) -> Iterator[tuple[Evaluator, ast.expr]]:
    """Yield where other files use definitions of the script, with their evaluators."""
    own = file_path(script)
    words = {*names, Path(own or "").stem}
    for file, imported in _imported_words_by_file() if own is not None else ():
        if words.isdisjoint(imported) or file.lower() == own:
            continue
        other = parsed_file(_text_of(file), Path(file))
        if other is None:
            continue
        values = Evaluator(other, READERS)
        known_as = {node.asname: node.name for node in other.nodes if isinstance(node, ast.alias)}
        for node in other.nodes:
            if not isinstance(node, ast.Name | ast.Attribute) or isinstance(node.ctx, ast.Store):
                continue
            if known_as.get(last_name(node), last_name(node)) in names:
                origin = definition_of(values, node)
                if origin and origin[1].name in names and file_path(origin[0].script) == own:
                    yield values, node


def file_path(script: Script) -> str | None:
    """Return the lower-case path of a script's file."""
    if script.folder is None or script.name is None:
        return None
    return (script.folder.resolve() / script.name).as_posix().lower()


def _imported_words_by_file() -> Iterator[tuple[str, frozenset[str]]]:
    """Yield the Python files of the current folder, with the words of their imports."""
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
            yield file, _imported_words(file, state.st_mtime_ns, state.st_size)


@lru_cache(maxsize=MAX_FILES)
def _imported_words(file: str, _: int, size: int) -> frozenset[str]:
    if size > MAX_FILE:
        return frozenset()
    return frozenset(
        word for part in _import_statements(_text_of(file)) for word in WORD.findall(part)
    )


def _text_of(file: str) -> str:
    """Return the text of a file of the repository, empty if it is none."""
    try:
        return read_inside(file, Path.cwd(), MAX_FILE).decode("utf-8", "replace")
    except OSError:
        return ""


def _import_statements(text: str) -> Iterator[str]:
    """Yield the import statements of a script, to the end of their names in parentheses."""
    end, is_closed = 0, True
    for match in IMPORT.finditer(text):
        if match.start() < end:
            continue
        end = match.end()
        if is_closed and text[end : end + 1] == "(":
            closing = text.find(")", end)
            is_closed = closing >= 0  # if none follows, none follows a later line
            end = max(end, closing)
        yield text[match.start() : end]


LINK_TARGETS = ("step", "virtual_step", "DataLoader", "BatchMemoryManager")
"""Calls that make a function or class worth linking."""


@dataclass(slots=True)
class ScriptLinker:
    """Copy the definitions that a script imports from its repository into the script.

    Findings in copied code are reported at ``line`` of the script.
    """

    script: Script
    line: int
    beside: tuple[str, ...] = ()
    """Packages that are not linked: the library's own, whose repository this may be."""
    way: list[str | None] = field(default_factory=list)
    """The files from the script that is read to the one that runs it."""
    files: list[str] = field(default_factory=list)
    names: dict[tuple[Script, str], str] = field(default_factory=dict)
    """The name in this script of each linked definition."""
    imports: dict[str, tuple[tuple[str | None, str | None], ...]] = field(default_factory=dict)
    """The import origins that were added for linked definitions."""
    sources: dict[Script, tuple[str, int]] = field(default_factory=dict)
    """The modules that the script imports directly, with their import path and level."""

    answered: dict[int, str] = field(default_factory=dict)
    """The lines of all files that comments answer."""

    def __post_init__(self) -> None:
        self._link()
        self.script.harmless = self.answered | ({} if self.way else self.script.harmless)

    def _link(self) -> None:
        """Copy what the script imports."""
        tree, values = self.script.tree, Evaluator(self.script, READERS)
        if self.way:
            self._tell(tree, self.script)
        for alias in [node for node in self.script.nodes if isinstance(node, ast.alias)]:
            self._link_import(values, alias)
        for origin in list(self.names):
            self._add(*origin)
        origins: dict[str, tuple[Script, str] | None] = {}
        for node in self.script.nodes:
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                name = f"{node.value.id}.{node.attr}"
                if name not in origins:
                    origins[name] = self._defined(values, node)
                if (used := origins[name]) is not None and self._links(used, name):
                    other = ast.Name(self.names[used], ast.Load())
                    ast.copy_location(other, node)
                    replace_child(self.script.parents[node], node, other)
        if self.names:
            known = self.script.modules
            self.script = Script(tree, self.script.folder, self.script.name, self.script.harmless)
            self.script.modules = known

    def _link_import(self, values: Evaluator, alias: ast.alias) -> None:
        """Link the definition that an import names, under its imported name."""
        statement, name = self.script.parents[alias], alias.asname or alias.name
        node = ast.Name(name, ast.Load())
        level, parent = getattr(statement, "level", 0), getattr(statement, "module", None)
        if (whole := module_of(values, ast.Attribute(node, ""))) is not None:
            path = f"{parent}.{alias.name}" if parent else alias.name
            self.sources[whole[0].script] = path, level
        elif (part := module_of(values, node)) is not None:
            self.sources[part[0].script] = parent or "", level
        origin = self._defined(values, node)
        if origin is None or not self._is_worth(*origin):
            return
        uses = self.script.reads_of(name)
        if file_path(origin[0]) in self.way or any(not is_left_out(values, use) for use in uses):
            alias.name = alias.asname = f"{name}."
            for use in uses:
                use.id = self.names.setdefault(origin, name)

    def _links(self, origin: tuple[Script, str], name: str) -> bool:
        """Whether a definition is linked, or can be added under this name."""
        if origin not in self.names and self._is_worth(*origin):
            self.names[origin] = name
            self._add(*origin)
        return origin in self.names

    def _add(self, module: Script, name: str) -> None:
        """Add a definition to the script, with the definitions of its module that it uses."""
        node = _definition(module, name)
        for other in _definitions_used(module, node):
            if (module, other) not in self.names:
                self.names[module, other] = _qualified_name(module, other)
                self._add(module, other)
        self.script.tree.body.insert(0, self._copy(module, node, self.names[module, name]))

    def _copy(self, module: Script, node: Definition, name: str) -> Definition:
        """Copy a definition, with names of its module qualified where the script has the same."""
        other = copy.deepcopy(node)
        for old, new in zip(ast.walk(node), ast.walk(other), strict=True):
            if isinstance(old, ast.Name) and isinstance(new, ast.Name):
                scope, bindings = module.resolve(old.id, module.scope_of(old))
                if scope is module.tree and bindings:
                    new.id = self._name(module, old.id, bindings[0].node)
                elif not bindings and (self.script.tree, old.id) in self.script.bindings:
                    new.id = _qualified_name(module, old.id)
        other.name = name
        if [file_path(module)] != self.way[:1]:
            self._tell(other, module)
        else:
            self.answered |= module.harmless
        return other

    def _defined(self, values: Evaluator, node: ast.expr) -> tuple[Script, str] | None:
        """Return the module of the repository that defines ``node``, and its name there."""
        if values.script.comes_from(node, self.beside):
            return None
        defined = definition_of(values, node)
        return None if defined is None else (defined[0].script, defined[1].name)

    def _is_worth(self, module: Script, name: str) -> bool:
        """Whether a definition leads to a step, a loader or a model, and is fully readable."""
        names, todo, worth = set[str](), {name}, file_path(module) in self.way
        while todo:
            names |= todo
            nodes = [_definition(module, item) for item in todo]
            todo = {other for node in nodes for other in _definitions_used(module, node)} - names
            for node in nodes:
                parts = list(ast.walk(node))
                worth = worth or any(
                    (isinstance(part, ast.Call) and last_name(part.func) in LINK_TARGETS)
                    or getattr(part, "name", "") == "forward"
                    for part in parts
                )
                if any(isinstance(part, ast.Global | ast.Nonlocal) for part in parts):
                    return False
        return worth and module.dynamic is None

    def _tell(self, node: ast.AST, module: Script) -> None:
        """Mark the lines of a node with the file of its module."""
        file = module.name or "?"
        if file not in self.files:
            self.files.append(file)
        for part in ast.walk(node):
            for key in {"lineno", "end_lineno"} & vars(part).keys():
                line = ForeignLine(getattr(part, key), file, self.files.index(file), self.line)
                setattr(part, key, line)
        for number, reason in module.harmless.items():
            line = ForeignLine(number, file, self.files.index(file), self.line)
            self.answered[line] = reason

    def _name(self, module: Script, name: str, bound: ast.AST) -> str:
        """Return the name in the script for a name of a module."""
        if isinstance(bound, ast.FunctionDef | ast.ClassDef):
            return self.names[module, name]
        if isinstance(bound, ast.alias):
            defined = self._defined(Evaluator(module), ast.Name(name, ast.Load()))
            if defined is not None and self._links(defined, _qualified_name(*defined)):
                return self.names[defined]
            origin = module.import_origin(Binding(bound))
            own = self.script.bindings.get((self.script.tree, name), [])
            known = [*map(self.script.import_origin, own), *self.imports.get(name, ())]
            if origin[0] is not None and all(item == origin for item in known):
                if not known:
                    self.script.tree.body.insert(0, _import_of(module, bound))
                    self.imports[name] = (origin,)
                return name
        other = _qualified_name(module, name)
        if module in self.sources and other not in self.imports:
            path, level = self.sources[module]
            self.imports[other] = ()
            statement = ast.ImportFrom(path, [ast.alias(name, other)], level)
            self.script.tree.body.insert(0, ast.fix_missing_locations(statement))
        return other


def _qualified_name(module: Script, name: str) -> str:
    """Return ``module.name``, which no name of the script can equal."""
    return f"{Path(module.name or '?').stem}.{name}"


def _definition(module: Script, name: str) -> Definition:
    node = module.bindings[module.tree, name][0].node
    assert isinstance(node, ast.FunctionDef | ast.ClassDef)
    return node


def _definitions_used(module: Script, node: ast.AST) -> set[str]:
    """Return the functions and classes of a module that a node uses."""
    names = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
    return {name for name in names if module.defines_once(name)}


def _import_of(script: Script, alias: ast.alias) -> ast.stmt:
    """Return a statement that imports in this script what another file imports."""
    statement = copy.deepcopy(script.parents[alias])
    assert isinstance(statement, ast.Import | ast.ImportFrom)
    statement.names = [copy.deepcopy(alias)]
    return statement
