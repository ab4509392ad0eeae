"""Find modules of the script's repository, and read the values that it imports from them."""

from __future__ import annotations

import ast
import os
from collections.abc import Collection
from functools import lru_cache
from pathlib import Path
from typing import Any

from affidavit.importers.directives import read_harmless_lines
from affidavit.importers.scripts.aliases import find_escape, holder_names
from affidavit.importers.scripts.launches import SEARCH_FOLDERS
from affidavit.importers.scripts.settings_files import read_nearby_text
from affidavit.importers.scripts.syntax import Script, package_of, parse_script
from affidavit.importers.scripts.values import Evaluator, Record, Unreadable

MAX_MODULES = 100


def module_of(values: Evaluator, function: ast.expr) -> tuple[Evaluator, str] | None:
    """Return the evaluator of the repository's module that defines a name, and the name there."""
    name = function.attr if isinstance(function, ast.Attribute) else None
    base = function.value if isinstance(function, ast.Attribute) else function
    alias = getattr(values.script.binding_of(base), "node", None)
    if not isinstance(alias, ast.alias):
        return None
    whole = _module(values, values.script, alias)
    if whole is None:
        return None
    module, is_whole = whole
    if is_whole == (name is None):
        return None
    return _inside(values, module), name or alias.name


def leaves_unchanged(values: Evaluator, call: ast.Call, name: str) -> bool:
    """Whether a call is of a module of this repository, of which none sets such an attribute."""
    origin = module_of(values, call.func)
    if origin is None or not origin[0].script.defines_once(origin[1]):
        return False
    scripts = [script for script in modules_of(values) if script is not values.script]
    return all(
        script.dynamic is None and name not in script.stored_attributes for script in scripts
    )


def _inside(values: Evaluator, module: Script) -> Evaluator:
    """Return the evaluator of a module of the script."""
    main = values.main_script or values.script
    return Evaluator(
        module,
        values.readers,
        values.defaults,
        main_script=main,
        leaves_unchanged=values.leaves_unchanged,
        _depth=values._depth,
    )


def read_local_import(values: Evaluator, call: ast.Call) -> Any:
    """Read what a module of this repository defines: a value, an instance or a result.

    Raises ``Unreadable`` if any module of the script may change it while it runs.
    """
    if (origin := module_of(values, call.func)) is None:
        return _whole_module(values, call)
    inner, name = origin
    module = inner.script
    bound = module.bindings.get((module.tree, name), [])
    if any(isinstance(item, ast.Starred) for item in call.args):
        raise Unreadable(call, "it has arguments without a name")
    passed = ast.Call(  # with values, as its arguments belong to another file
        ast.Name(name, ast.Load()),
        [ast.Constant(values.try_evaluate(item)) for item in call.args],
        [
            ast.keyword(item.arg, ast.Constant(values.try_evaluate(item.value)))
            for item in call.keywords
        ],
    )
    if len(bound) == 1 and isinstance(bound[0].node, ast.alias):
        return read_local_import(inner, passed)  # what another module defines
    changed = _changed(values, name)
    if module.defines_once(name):
        made = inner.evaluate(passed)
        if not isinstance(made, Record):
            return made
        returned = inner.returned_expression(passed)
        where = find_escape(module, holder_names(returned), methods=made.kind != "class")
        if where is not None:
            raise Unreadable(call, f"the module of {name} may change what it returns")
        fields = {
            key: Unreadable(call, f"{key} is set while the script runs")
            if key in changed
            else value
            for key, value in made.fields.items()
        }
        return Record(made.kind, fields)
    if call.args or call.keywords:
        return None
    if name in changed:
        raise Unreadable(call.func, f"{name} is set while the script runs")
    value = inner.try_evaluate(ast.Name(name, ast.Load()))
    if isinstance(value, Unreadable):
        raise Unreadable(call.func, f"{value.why}, in the module that {name} comes from")
    return value


def _whole_module(values: Evaluator, call: ast.Call) -> Any:
    """Return a module of this repository that is imported whole, as a record."""
    alias = getattr(values.script.binding_of(call.func), "node", None)
    origin = _module(values, values.script, alias) if isinstance(alias, ast.alias) else None
    if origin is None or not origin[1] or call.args or call.keywords:
        return None
    module, changed = origin[0], _changed(values)
    inner = _inside(values, module)
    names = [key for scope, key in module.bindings if scope is module.tree]
    return Record("class", {
        key: Unreadable(call.func, f"{key} is set while the script runs")
        if key in changed
        else inner.try_evaluate(ast.Name(key, ast.Load()))
        for key in names
    })  # fmt: skip


def _changed(values: Evaluator, owner: str | None = None) -> dict[str, set[ast.AST]]:
    """Return the attributes that any module of the script sets, and where.

    Attributes of ``self`` only count for the class ``owner``.
    """
    changed: dict[str, set[ast.AST]] = {}
    for script in modules_of(values):
        for name, stores in script.stored_attributes.items():
            for store in stores:
                own = isinstance(store.value, ast.Name) and store.value.id == "self"
                classes = [c.name for c in script.ancestors(store) if isinstance(c, ast.ClassDef)]
                if not own or owner in classes:
                    changed.setdefault(name, set()).add(store)
    return changed


def _module(values: Evaluator, script: Script, alias: ast.alias) -> tuple[Script, bool] | None:
    """Return the module of this repository that an import loads, and whether it binds it whole."""
    known = (values.main_script or values.script).modules
    if (script, alias) not in known:
        known[script, alias] = _imported(values, script, alias)
    return known[script, alias]


def _imported(values: Evaluator, script: Script, alias: ast.alias) -> tuple[Script, bool] | None:
    match script.parents[alias]:
        case ast.ImportFrom(module=module, level=level):
            start = [".", *[".."] * (level - 1)] if level else None
            inner = _file(values, script, alias, start, f"{module or '.'}/{alias.name}")
            if inner is not None:
                return inner, True
            own = None if module is None else _file(values, script, alias, start, module)
            return None if own is None else (own, False)
        case ast.Import() if alias.asname or "." not in alias.name:
            whole = _file(values, script, alias, None, alias.name)
            return None if whole is None else (whole, True)
    return None


def _file(
    values: Evaluator, script: Script, node: ast.AST, start: list[str] | None, module: str
) -> Script | None:
    """Return the parsed file of a module, if there is exactly one."""
    if script.folder is None:
        return None
    path = module.replace(".", "/") if module[0] != "." else module
    files = []
    for place in ["/".join(start)] if start else SEARCH_FOLDERS:
        for file in (f"{place}/{path}.py", f"{place}/{path}/__init__.py"):
            if not os.path.isfile(whole := os.path.join(script.folder, file)):
                continue  # most are not there, and telling why takes time
            try:
                text = read_nearby_text(values, node, file, script.folder)
            except Unreadable:
                continue
            # Without "..", so that a circle of imports comes back to the same module.
            files.append((text, Path(os.path.normpath(whole))))
    return parsed_file(*files[0]) if len(files) == 1 else None


@lru_cache(maxsize=256)
def parsed_file(text: str, file: Path) -> Script | None:
    """Parse the text of a file; return None if it is not Python."""
    try:
        tree = parse_script(text)
        return Script(tree, file.parent, file.name.lower(), read_harmless_lines(text))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def modules_of(values: Evaluator, beside: Collection[str] = ()) -> list[Script]:
    """Return the script and all modules of its repository that it imports, at any depth.

    Packages ``beside`` are not followed, since they may belong to a library.
    """
    scripts = [values.script]
    for script in scripts:
        for node in script.aliases:
            if _package(script, node) in beside:
                continue
            origin = _module(values, script, node)
            if origin is not None and origin[0] not in scripts and len(scripts) < MAX_MODULES:
                scripts.append(origin[0])
    return scripts


def _package(script: Script, alias: ast.alias) -> str:
    return package_of(getattr(script.parents[alias], "module", None) or alias.name)
