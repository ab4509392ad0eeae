"""Recognise the loader of the private training by its name."""

from __future__ import annotations

import ast

from affidavit.importers.scripts.syntax import Script, assigned_to, keywords_of, last_name
from affidavit.importers.scripts.values import Evaluator

WRAPPERS = frozenset({"tqdm", "trange", "enumerate", "track", "notebook_tqdm"})


def unwrap_iterable(node: ast.expr) -> ast.expr:
    """Strip ``enumerate``, ``iter`` and progress bars from an iterable."""
    while isinstance(node, ast.Call) and node.args and last_name(node.func) in (*WRAPPERS, "iter"):
        node = node.args[0]
    return node


def is_private_loader(values: Evaluator, node: ast.expr) -> bool:
    """Whether a name can only be the loader of the private training."""
    if values.plain_loaders:
        return _is_plain_loader(values, node, 0)
    return is_returned_by_private_call(values, node, -1)


def is_returned_by_private_call(
    values: Evaluator, node: ast.expr, place: int, depth: int = 0
) -> bool:
    """Whether a name can only be item ``place`` of what the private call returns."""
    statement, script = values.private_statement, values.script
    if not isinstance(statement, ast.Assign) or depth > 20:
        return False
    binding = None
    if isinstance(node, ast.Attribute):
        targets: list[ast.AST] = [*script.stored_attributes.get(node.attr, [])]
    else:
        bindings = script.bindings_of(node) if isinstance(node, ast.Name) else []
        targets = [item.node for item in bindings]
        binding = bindings[0] if len(bindings) == 1 else None
    own = [target for target in targets if values.is_set_by_private_call(target)]
    if own:
        return any(_is_at_position(script, target, place) for target in own) and all(
            target in own or getattr(target, "lineno", 0) < statement.lineno for target in targets
        )
    if isinstance(node, ast.Attribute):
        made = assigned_to(script, targets[0]) if len(targets) == 1 else None
        return isinstance(made, ast.Name) and is_returned_by_private_call(
            values, made, place, depth + 1
        )
    outer = None if binding is None else script.parents[binding.node]
    if isinstance(outer, ast.withitem) and isinstance(outer.context_expr, ast.Call):
        manager = outer.context_expr
        loader = keywords_of(manager).get("data_loader")
        named = last_name(manager.func) == "BatchMemoryManager"
        return (
            named
            and loader is not None
            and is_returned_by_private_call(values, loader, place, depth + 1)
        )
    if binding is None or not isinstance(binding.node, ast.arg) or not isinstance(node, ast.Name):
        return False
    passed = values.known_arguments(node, binding.node)
    return bool(passed) and all(
        is_returned_by_private_call(values, item, place, depth + 1) for item in passed
    )


def _is_at_position(script: Script, target: ast.AST, place: int) -> bool:
    """Whether a target receives item ``place`` of what the private call returns."""
    outer = script.parents[target]
    return not isinstance(outer, ast.Tuple) or (
        len(outer.elts) > place and outer.elts[place] is target
    )


def _is_plain_loader(values: Evaluator, node: ast.expr, depth: int) -> bool:
    """Whether a name can only be a ``DataLoader``, made here or passed by every caller."""
    binding = values.script.binding_of(node)
    if binding is None or not isinstance(node, ast.Name):
        return False
    if isinstance(binding.node, ast.arg):
        passed = values.known_arguments(node, binding.node)
        return bool(passed) and all(_is_plain_loader(values, item, depth + 1) for item in passed)
    made = None if binding.value is None else values.returned_expression(binding.value)
    if isinstance(made, ast.Name) and depth <= 20:
        return _is_plain_loader(values, made, depth + 1)
    return isinstance(made, ast.Call) and last_name(made.func) == "DataLoader"
