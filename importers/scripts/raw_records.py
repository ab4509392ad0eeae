"""Tell records themselves, in whatever form, from what is computed of them."""

from __future__ import annotations

import ast

from affidavit.importers.names import NAMES
from affidavit.importers.scripts.object_kinds import ObjectKinds
from affidavit.importers.scripts.row_kinds import NOTHING, Kinds
from affidavit.importers.scripts.syntax import (
    Script,
    last_name,
    names_in,
    root_of,
)
from affidavit.importers.scripts.use_table import (
    SECRETS,
)


def is_raw(
    kinds: ObjectKinds, node: ast.AST, rows: frozenset[str] = frozenset(), depth: int = 0
) -> bool:
    """Whether an expression is records themselves, in whatever form.

    ``rows`` are names of single records in a comprehension.
    """
    match node:
        case ast.Name(id=name):
            if name in rows or kinds.kinds(node) & {"data", "lots", "lot", "rows"}:
                return True
            if depth > 5 or not kinds.kinds(node) & SECRETS:
                return False
            made = [
                getattr(kinds.script.parents[item.node], "iter", item.value)
                for item in kinds.script.bindings_of(node)
            ]
            return any(item is not None and is_raw(kinds, item, depth=depth + 1)
                       for item in made)  # fmt: skip
        case ast.Attribute(value=base, attr=name):
            held = isinstance(node, ast.expr) and kinds.kinds(node) & {"data", "lots", "lot"}
            return name not in NAMES["sizes"] and (bool(held) or is_raw(kinds, base, rows, depth))
        case ast.Call(func=function, args=args):
            own = [function.value] if isinstance(function, ast.Attribute) else []
            return last_name(function) in NAMES["forms"] and any(
                is_raw(kinds, item, rows, depth) for item in [*own, *args]
            )
        case ast.Subscript(value=base):
            return is_raw(kinds, base, rows, depth)
        case (
            ast.ListComp(elt=element, generators=[loop])
            | ast.GeneratorExp(elt=element, generators=[loop])
        ) if is_raw(kinds, loop.iter, rows, depth):
            return is_raw(kinds, element, rows | names_in(loop.target), depth)
        case ast.Compare() | ast.Lambda():
            return False
    return any(is_raw(kinds, part, rows, depth) for part in ast.iter_child_nodes(node))


def is_own(kinds: ObjectKinds, call: ast.Call) -> bool:
    """Whether a call runs functions or classes of this file alone, whose uses are read."""
    function = call.func
    if isinstance(function, ast.Name):
        made = [item.node for item in kinds.script.bindings_of(function)]
        return bool(made) and all(isinstance(item, ast.FunctionDef | ast.ClassDef) for item in made)
    base = kinds.kinds(function.value) if isinstance(function, ast.Attribute) else NOTHING
    return bool(kinds.functions(function)) and base <= {"model", "holder", "data"}


def is_imported(script: Script, nodes: list[ast.expr]) -> bool:
    """Whether one of several expressions is, or is a part of, what an import binds."""
    roots = [root_of(node) for node in nodes]
    return any(
        isinstance(item.node, ast.alias)
        for root in roots
        if isinstance(root, ast.Name)
        for item in script.bindings_of(root)
    )


WORDS = {"private": "private optimiser", "optimizer": "optimiser", "data": "records",
         "lots": "private loader", "lot": "lot", "rows": "lot", "value": "values of records",
         "count": "size of a lot", "code": "function"}  # fmt: skip


def words_of(kinds: Kinds) -> str:
    """Return the names of kinds in words."""
    return " and ".join(dict.fromkeys(WORDS.get(kind, kind) for kind in sorted(kinds)))
