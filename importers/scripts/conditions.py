"""Decide which parts of a script can run together, from the conditions around them."""

from __future__ import annotations

import ast
from itertools import combinations

from affidavit.importers.scripts.syntax import Script, last_name


def exclude_each_other(script: Script, *nodes: ast.AST) -> bool:
    """Whether at most one of several nodes can run, by the conditions around them."""
    return all(any(
        {branch(script, outer, first), branch(script, outer, second)} == {"body", "orelse"}
        for outer in script.ancestors(first) if isinstance(outer, ast.If | ast.IfExp)
    ) for first, second in combinations(nodes, 2))  # fmt: skip


def branch(script: Script, outer: ast.AST, node: ast.AST) -> str:
    """Return the field of ``outer`` that contains ``node``, such as ``body`` or ``orelse``."""
    around = {node, *script.ancestors(node)}
    for name, value in ast.iter_fields(outer):
        if not around.isdisjoint(value if isinstance(value, list) else [value]):
            return name
    return ""


def is_reached(script: Script, node: ast.AST, inside: tuple[ast.AST, ...] = ()) -> bool:
    """Whether a statement of the module runs ``node``, or mentions what encloses it."""
    for outer in script.ancestors(node):
        if isinstance(outer, ast.ClassDef) and script.scope_of(node) is outer:
            continue  # its body runs where it stands
        if isinstance(outer, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            if outer.decorator_list or (isinstance(outer, ast.ClassDef) and outer.bases):
                return True  # what decorates or registers it may call it
            if outer in inside:
                return False
            if isinstance(script.parents[outer], ast.ClassDef):
                continue  # a method: others may call it by the object
            name = outer.name
            return any(is_reached(script, use, (*inside, outer)) for use in script.nodes
                       if name in (last_name(use), getattr(use, "value", None)))  # fmt: skip
    return True
