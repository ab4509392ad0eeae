"""Ask about code that prepares single records and may keep one for another.

That is what is code as a transform or mapped over the records, and what the methods of a data set
of the script's own do. Each row must be made of the record of its index alone, so such code may
store nothing outside of its own names, and must take the record of its own index.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from affidavit.importers.names import NAMES
from affidavit.importers.scripts.object_kinds import ObjectKinds
from affidavit.importers.scripts.syntax import (
    FUNCTIONS,
    Script,
    last_name,
    package_of,
    root_of,
)
from affidavit.importers.scripts.use_table import SECRETS

KEEPS = "it may keep a record for another"
OTHER_ROW = "a row may be of another record than that of its index"


def open_uses_of_row_code(kinds: ObjectKinds) -> Iterator[tuple[ast.AST, str]]:
    """Yield what in the code that prepares records is not understood, with the reason."""
    code, unknown = _given_code(kinds)
    for node in unknown:
        yield node, "what it keeps of a record is not known"
    for function in code:
        yield from _stores(kinds, function)
    for function in kinds.script.functions.get("__getitem__", ()):
        yield from _rows(kinds, function, function)
        for method in getattr(kinds.script.parents[function], "body", ()):
            if isinstance(method, ast.FunctionDef) and method.name not in ("__init__", "__len__"):
                yield from _stores(kinds, method)
                if method is not function:
                    yield from _rows(kinds, method, function)


def _given_code(kinds: ObjectKinds) -> tuple[list[ast.AST], list[ast.AST]]:
    """Return the functions that are applied to records, and names of unknown packages."""
    script = kinds.script
    todo: list[ast.AST] = [
        item.value
        for call in script.calls
        for item in call.keywords
        if (item.arg or "").endswith(("transform", "transforms"))
    ]
    todo += [item for call in script.calls_to(*NAMES["row_code_takers"]) for item in call.args]
    read = [item for call in kinds.sources.calls for item in call.args]
    of_sources = {part for item in read for part in ast.walk(item)}
    todo += read
    todo += [
        value
        for name, stores in script.stored_attributes.items()
        if name.endswith(("transform", "transforms"))
        for store in stores
        if (value := getattr(script.parents[store], "value", None)) is not None
    ]
    code, unknown = dict[ast.AST, None](), dict[ast.AST, None]()
    seen = set[ast.AST]()
    while todo:
        for part in ast.walk(todo.pop()):
            if part in seen:
                continue
            seen.add(part)
            if isinstance(part, ast.Lambda):
                code[part] = None
            if not isinstance(part, ast.Name) or not _is_code(script, part):
                continue
            for bound in script.bindings_of(part):
                match bound.node:
                    case ast.FunctionDef():
                        code[bound.node] = None
                        todo.append(bound.node)
                    case ast.ClassDef(body=body):
                        methods = [item for item in body if isinstance(item, ast.FunctionDef)]
                        code |= dict.fromkeys(m for m in methods if m.name != "__init__")
                        todo += methods
                    case ast.alias() if part not in of_sources:
                        module = script.import_origin(bound)[0]
                        if package_of(module or "") not in NAMES["transform_packages"]:
                            unknown[part] = None
                    case _ if bound.value is not None and part not in of_sources:
                        todo.append(bound.value)
    return list(code), list(unknown)


def _is_code(script: Script, name: ast.Name) -> bool:
    """Whether a name may be that of code, and not of a setting, as in ``args.size``."""
    outer: ast.AST = name
    while isinstance(script.parents[outer], ast.Attribute):
        outer = script.parents[outer]
    call = script.parents[outer]
    called = isinstance(call, ast.Call) and call.func is outer
    return isinstance(name.ctx, ast.Load) and (
        called or (outer is name and not isinstance(call, ast.Subscript))
    )


def _stores(kinds: ObjectKinds, function: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    """Yield what a function stores outside of its own names."""
    script = kinds.script

    def is_own(node: ast.expr) -> bool:
        root = node
        while isinstance(root, ast.Attribute | ast.Subscript):
            root = root.value
        if not isinstance(root, ast.Name):
            return False
        scope, bindings = script.resolve(root.id, script.scope_of(root))
        return scope in _scopes(function) and not any(isinstance(item.node, ast.arg) and
               item.node.arg == "self" for item in bindings)  # fmt: skip

    for part in ast.walk(function):
        match part:
            case ast.Name(ctx=ast.Load()) if kinds.kinds(part) & SECRETS and (
                script.resolve(part.id, script.scope_of(part))[0] not in _scopes(function)
            ):
                yield part, "a row may be made of other records"
            case ast.Global() | ast.Nonlocal():
                yield part, KEEPS
            case ast.Attribute(ctx=ast.Store()) | ast.Subscript(ctx=ast.Store()) if not is_own(
                part
            ):
                yield part, KEEPS
            case ast.Call(func=ast.Attribute(value=base, attr=name)) if name in NAMES[
                "mutators"
            ] and not is_own(base):
                yield part, KEEPS


def _scopes(function: ast.AST) -> set[ast.AST]:
    return {part for part in ast.walk(function) if isinstance(part, FUNCTIONS)}


def _holds_records(kinds: ObjectKinds, base: ast.expr) -> bool:
    root, own = root_of(base), kinds.kinds(base)
    of_self = isinstance(root, ast.Name) and root.id == "self" and "value" in own
    return "data" in own or of_self


def _rows(
    kinds: ObjectKinds, method: ast.FunctionDef, getter: ast.FunctionDef
) -> Iterator[tuple[ast.AST, str]]:
    """Yield rows of the records that a method takes by another index than its own."""
    index = getter.args.args[1].arg if len(getter.args.args) > 1 and method is getter else ""
    for again in kinds.script.bindings.get((method, index), [])[1:]:
        made = getattr(again.value, "func", None)
        if made is None or last_name(made) not in ("tolist", "item", "int"):
            yield again.node, OTHER_ROW
    for part in ast.walk(method):
        first: ast.expr | None = None
        match part:
            case ast.Subscript(value=base, slice=place) if _holds_records(kinds, base):
                first = place.elts[0] if isinstance(place, ast.Tuple) and place.elts else place
            case ast.Call(func=ast.Attribute(attr="__getitem__"), args=[place]):
                first = place
        if first is None or (isinstance(first, ast.Name) and first.id == index):
            continue
        if not (isinstance(first, ast.Constant) and isinstance(first.value, str)):
            yield part, OTHER_ROW
