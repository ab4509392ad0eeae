"""Ask about code of the script that prepares single records, and may take or keep others.

That is what is passed as a transform or mapped over the records, and what a data set of the
script's own does. Only functions of packages are understood.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from affidavit.importers.names import NAMES
from affidavit.importers.scripts.object_kinds import ObjectKinds
from affidavit.importers.scripts.syntax import Script, package_of
from affidavit.importers.scripts.use_table import SECRETS

WHY = "a row may be made of other records than its own"


def open_uses_of_row_code(kinds: ObjectKinds) -> Iterator[tuple[ast.AST, str]]:
    """Yield what in the code that prepares records is not understood, with the reason."""
    script = kinds.script
    todo = [
        item.value
        for call in script.calls
        for item in call.keywords
        if (item.arg or "").endswith(("transform", "transforms"))
    ]
    todo += [
        item
        for call in script.calls_to(*NAMES["row_code_takers"])
        if isinstance(call.func, ast.Attribute)
        or any(kinds.kinds(item) & SECRETS for item in call.args)
        for item in call.args
    ]
    todo += [
        value
        for name, stores in script.stored_attributes.items()
        if name.endswith(("transform", "transforms"))
        for store in stores
        if (value := getattr(script.parents[store], "value", None)) is not None
    ]
    todo += (read := [item for call in kinds.sources.calls for item in call.args])
    of_sources = {part for item in read for part in ast.walk(item)}
    seen = set[ast.AST]()
    while todo:
        for part in ast.walk(todo.pop()):
            if part in seen:
                continue
            seen.add(part)
            if isinstance(part, ast.Lambda):
                yield part, WHY
            if not isinstance(part, ast.Name) or not _is_code(script, part):
                continue
            for bound in script.bindings_of(part):
                origin = package_of(script.import_origin(bound)[0] or "")
                if isinstance(bound.node, ast.FunctionDef | ast.ClassDef):
                    yield part, WHY
                elif part in of_sources:
                    continue
                elif isinstance(bound.node, ast.alias):
                    if origin not in NAMES["transform_packages"]:
                        yield part, WHY
                elif bound.value is not None:
                    todo.append(bound.value)
    for method in script.functions.get("__getitem__", ()):
        yield method, WHY


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
