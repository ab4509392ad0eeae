"""Say what in the code that prepares single records may make a row of several."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from affidavit.importers.names import NAMES
from affidavit.importers.scripts.object_kinds import ObjectKinds
from affidavit.importers.scripts.syntax import Script, last_name, package_of
from affidavit.importers.scripts.use_table import SECRETS

OF_OTHER_ROWS = "a row may be made of other records than its own"


def uses_of_row_code(kinds: ObjectKinds) -> Iterator[tuple[ast.AST, str]]:
    """Yield what in the code that prepares single records is not understood, with the reason.

    That is what is passed as a transform or mapped over the records, and what a data set of the
    script's own does, which may take or keep others. Only functions of packages are understood.
    """
    script, todo = kinds.script, list[ast.expr]()
    for node in script.nodes:
        match node:
            case ast.keyword(arg=str(name), value=value) if _is_transform(name) or (
                name == "collate_fn"
            ):
                todo.append(value)
            case ast.Attribute(attr=name, ctx=ast.Store()) if _is_transform(name):
                todo += filter(None, [getattr(script.parents[node], "value", None)])
            case ast.Call(func=function, args=args) if last_name(function) in NAMES[
                "row_code_takers"
            ] and (
                isinstance(function, ast.Attribute)
                or any(kinds.kinds(item) & SECRETS for item in args)
            ):
                todo += args
    todo += (read := [item for call in kinds.sources.calls for item in call.args])
    of_sources = {part for item in read for part in ast.walk(item)}
    seen = set[ast.AST]()
    while todo:
        parts = [part for part in ast.walk(todo.pop()) if part not in seen]
        seen.update(parts)
        for part in parts:
            if isinstance(part, ast.Lambda) or (
                isinstance(part, ast.Attribute) and part.attr in script.functions
            ):
                yield part, OF_OTHER_ROWS
            if not isinstance(part, ast.Name) or not _is_code(script, part):
                continue
            for bound in script.bindings_of(part):
                source = part in of_sources
                package = package_of(script.import_origin(bound)[0] or "")
                foreign = isinstance(bound.node, ast.alias) and not source
                if isinstance(bound.node, ast.FunctionDef | ast.ClassDef) or (
                    foreign and package not in NAMES["transform_packages"]
                ):
                    yield part, OF_OTHER_ROWS
                elif bound.value is not None and not source:
                    todo.append(bound.value)
    for method in script.functions.get("__getitem__", ()):
        yield method, OF_OTHER_ROWS


def _is_transform(name: str) -> bool:
    return name.endswith(("transform", "transforms"))


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
