"""Decide which parts of a script can run together, from the conditions around them."""

from __future__ import annotations

import ast
from itertools import combinations

from affidavit.importers.scripts.syntax import Script, last_name


def exclude_each_other(script: Script, *nodes: ast.AST) -> bool:
    """Whether at most one of several nodes can run, by the conditions around them."""
    return all(_excludes(script, first, second) for first, second in combinations(nodes, 2))


def _excludes(script: Script, first: ast.AST, second: ast.AST) -> bool:
    """Whether two nodes are on opposite sides of one condition."""
    around = set(script.ancestors(second))
    both = (outer for outer in script.ancestors(first) if outer in around)
    return any(
        {branch(script, outer, first), branch(script, outer, second)} == {"body", "orelse"}
        for outer in both
        if isinstance(outer, ast.If | ast.IfExp)
    )


def branch(script: Script, outer: ast.AST, node: ast.AST) -> str:
    """Return the field of ``outer`` that contains ``node``, such as ``body`` or ``orelse``."""
    inner = node
    for place in script.ancestors(node):
        if place is outer:
            break
        inner = place
    for name, value in ast.iter_fields(outer):
        if value is inner or (isinstance(value, list) and inner in value):
            return name
    return ""


def is_reached(script: Script, node: ast.AST, inside: tuple[ast.AST, ...] = ()) -> bool:
    """Whether a statement of the module runs ``node``, or mentions what encloses it."""
    for outer in script.ancestors(node):
        if isinstance(outer, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            if outer.decorator_list or (isinstance(outer, ast.ClassDef) and outer.bases):
                return True  # what decorates or registers it may call it
            if outer in inside:
                return False
            if isinstance(script.parents[outer], ast.ClassDef):
                continue  # a method: others may call it by the object
            names = (outer.name,)
            mentions = (
                use
                for use in script.nodes
                if last_name(use) in names or _constant_value(use) in names
            )
            return any(is_reached(script, use, (*inside, outer)) for use in mentions)
    return True


def _constant_value(node: ast.AST) -> object:
    return node.value if isinstance(node, ast.Constant) else None
