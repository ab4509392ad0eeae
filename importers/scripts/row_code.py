"""Say what in the code that prepares single records may make a row of several."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from affidavit.importers.names import NAMES
from affidavit.importers.scripts.object_kinds import ObjectKinds
from affidavit.importers.scripts.row_kinds import is_key, keeps_rows
from affidavit.importers.scripts.syntax import Script, last_name, names_in, package_of
from affidavit.importers.scripts.use_table import FUNCTIONS, METHODS, SECRETS, find_function

TOKENIZERS = next(use for use in FUNCTIONS if "AutoTokenizer" in use.modules.split())
OF_ITSELF = {*NAMES["row_methods"]}.union(
    *(use.names.split() for use in (*METHODS, *FUNCTIONS) if use.gives in ("same", "each"))
)
"""Functions and methods that are applied to each record by itself."""
OF_OTHER_ROWS = "a row may be made of other records than its own"


def uses_of_row_code(kinds: ObjectKinds) -> Iterator[tuple[ast.AST, str]]:
    """Yield what in transforms and data sets of the script's own may take or keep other records."""
    script, todo, takers = kinds.script, list[ast.expr](), NAMES["row_code_takers"]
    for node in script.nodes:
        match node:
            case ast.keyword(str(name), value) if name == "collate_fn" or _is_transform(name):
                todo.append(value)
            case ast.Attribute(attr=name, ctx=ast.Store()) if _is_transform(name):
                todo += filter(None, [getattr(script.parents[node], "value", None)])
            case ast.Call(func=function, args=args) if last_name(function) in takers and (
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
            if (isinstance(part, ast.Lambda) and not is_of_one(kinds, part)) or (
                isinstance(part, ast.Attribute) and part.attr in script.functions
            ):
                yield part, OF_OTHER_ROWS
            if not isinstance(part, ast.Name) or not _is_code(script, part):
                continue
            for bound in script.bindings_of(part):
                source = part in of_sources
                package = package_of(script.import_origin(bound)[0] or "")
                foreign = isinstance(bound.node, ast.alias) and not source
                own = isinstance(bound.node, ast.FunctionDef | ast.ClassDef)
                joins = own and not is_of_one(kinds, bound.node)
                if joins or (foreign and package not in NAMES["transform_packages"]):
                    yield part, OF_OTHER_ROWS
                elif bound.value is not None and not source:
                    todo.append(bound.value)
    for method in script.functions.get("__getitem__", ()):
        yield method, OF_OTHER_ROWS


def is_of_one(kinds: ObjectKinds, code: ast.AST) -> bool:
    """Whether a function computes with what it is given alone, and no part or mean of it."""
    if not isinstance(code, ast.FunctionDef | ast.Lambda):
        return False
    script, stores = kinds.script, ast.Store | ast.Del
    parts = [part for part in ast.walk(code) if part in script.parents and part is not code]
    own = {part.arg for part in parts if isinstance(part, ast.arg)} - {"self"}
    own |= {part.id for part in parts if isinstance(getattr(part, "ctx", None), ast.Store)
            and isinstance(part, ast.Name)}  # fmt: skip

    def is_listed(function: ast.expr) -> bool:
        name, made = last_name(function) or "", kinds.values.origin_of(function)
        reads = isinstance(made, ast.Call) and find_function(script, made) is TOKENIZERS
        image = script.comes_from(getattr(function, "func", function), ("torchvision", "PIL"))
        return reads or image or name in OF_ITSELF or _is_transform(name)

    def fits(part: ast.AST) -> bool:
        match part:
            case ast.Name(id=name, ctx=ast.Load()) if name not in own:
                package = package_of(script.module_path(part))
                constant = kinds.values.known_value(part) is not None
                return constant or package in NAMES["transform_packages"] or is_listed(part)
            case ast.Subscript(slice=at, ctx=ast.Load()):
                return is_key(at) or (isinstance(at, ast.Tuple) and keeps_rows(at.elts))
            case ast.Call(func=function):
                return is_listed(function)
            case ast.keyword(arg="padding", value=value):
                return getattr(value, "value", True) in (False, "max_length", "do_not_pad")
            case ast.BinOp(left=left, right=right):
                return not (names_in(left) & own and names_in(right) & own)
            case ast.arguments(defaults=values):
                return all(isinstance(item, ast.Constant) for item in values)
            case ast.Attribute(ctx=context) | ast.Subscript(ctx=context):
                return not isinstance(context, stores)
        return not isinstance(part, ast.Global | ast.Nonlocal)

    decorated = getattr(code, "decorator_list", ())
    return not decorated and all(fits(part) for part in parts if part not in script.type_nodes)


def _is_transform(name: str) -> bool:
    return name.endswith(("transform", "transforms"))


def _is_code(script: Script, name: ast.Name) -> bool:
    """Whether a name may be that of code, and not of a setting, as in ``args.size``."""
    outer: ast.AST = name
    while isinstance(script.parents[outer], ast.Attribute):
        outer = script.parents[outer]
    call = script.parents[outer]
    called = isinstance(call, ast.Call) and call.func is outer
    whole = outer is name and not isinstance(call, ast.Subscript)
    return isinstance(name.ctx, ast.Load) and (called or whole)
