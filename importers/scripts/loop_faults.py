"""Name well-known faults of a training loop: summed lots, repeated noise, joining layers.

Each is told by the form of a few lines. What these do not name is an open use.
"""

from __future__ import annotations

import ast

from affidavit.importers.names import NAMES
from affidavit.importers.scripts.conditions import branch, exclude_each_other
from affidavit.importers.scripts.step_count import (
    enclosing_loops,
    may_be_optimizer_step,
    optimizer_steps,
    unwrap_iterable,
)
from affidavit.importers.scripts.syntax import (
    Script,
    ancestors_within,
    calls_any,
    find_import,
    innermost_loop,
    keywords_of,
    last_name,
    names_assigned_in,
)
from affidavit.importers.scripts.values import Evaluator, is_left_out

LOT_SPLITTERS = ("BatchMemoryManager", "wrap_data_loader")
LOT_LOSSES = NAMES["lot_losses"]
TRAINERS = ("Trainer", "Fabric", "Accelerator", "Arguments")
HALF_PRECISION = {
    "precision": (16, "16", "16-mixed"),
    "mixed_precision": ("fp16",),
    "fp16": (True,),
}
"""Trainer arguments that turn on a ``GradScaler``."""


def _owner(call: ast.Call) -> str | None:
    return last_name(call.func.value) if isinstance(call.func, ast.Attribute) else None


def find_repeated_noise(values: Evaluator) -> ast.AST | None:
    """Find what resets a random generator to the same state during training."""
    script = values.script
    steps = [*optimizer_steps(values), *script.calls_to("fit")]
    loops = {loop for step in steps for loop in enclosing_loops(values, step)}
    for call in script.calls_to(*NAMES["seeding"]):
        own = loops & set(enclosing_loops(values, call))
        names = {
            node.id for arg in call.args for node in ast.walk(arg) if isinstance(node, ast.Name)
        }
        set_anew = {name for loop in own for name in names_assigned_in(loop)}
        if own and not names & set_anew and not is_left_out(values, call):
            return call
    for step in values.updates:
        around = set(enclosing_loops(values, step))
        for call in script.calls_to("init"):  # the first state again, with the key that is in it
            again = not around.isdisjoint(enclosing_loops(values, call))
            if again or step in script.ancestors(call):
                return call
    around_steps = {outer for step in steps for outer in script.ancestors(step)}
    forks = (call for call in script.calls_to("fork_rng") for outer in script.ancestors(call)
             if isinstance(outer, ast.With) and outer in around_steps)  # fmt: skip
    return next(forks, None)


def find_accumulated_lots(values: Evaluator) -> ast.AST | None:
    """Find what lets one step release several lots, such as a step that some lots skip."""
    script = values.script
    for node in script.nodes:
        match node:
            case ast.Attribute(attr="signal_skip_step" | "virtual_step"):
                return node
            case ast.keyword(
                arg="accumulate_grad_batches" | "gradient_accumulation_steps" as name, value=value
            ) if values.known_value(value) != 1:
                call = getattr(script.parents[node], "func", node)
                if name[0] == "a" or (last_name(call) or "").endswith(TRAINERS):
                    return node
    for step in set(optimizer_steps(values)) - values.other_steps:
        scope, inside = script.scope_of(step), list(script.ancestors(step))
        loops = [outer for outer in inside if isinstance(outer, ast.For | ast.While)]
        steps = [*optimizer_steps(values), *script.calls_to("microbatch_step")]
        alike = [item for item in steps if _owner(item) == _owner(step)]
        stepping = [
            innermost_loop(script, item) for item in alike
        ]  # each with gradients of its own
        for call, _ in script.method_calls("backward"):
            if script.scope_of(call) is not scope or innermost_loop(script, call) in stepping:
                continue
            if _completes_before(script, call, values.private_statement) or _completes_before(
                script, step, call
            ):
                continue
            beside = [outer for outer in script.ancestors(call) if isinstance(outer, ast.For)]
            if any(loop not in loops for loop in beside):
                return call  # backward() in a loop that ends before the step
        for outer in inside:
            if outer in loops or outer is scope:
                break
            if isinstance(outer, ast.If | ast.Match | ast.Try) and _may_skip_gradients(
                values, outer, step, scope
            ):
                return outer
        if loops and (skip := _continue_between(script, loops[0], step)) is not None:
            return skip
    return None


def _completes_before(script: Script, first: ast.Call, second: ast.AST | None) -> bool:
    """Whether ``first`` runs before ``second`` in one scope, and not again after it."""
    if second is None or script.scope_of(first) is not script.scope_of(second):
        return False
    around_it = set(ancestors_within(script, second, script.scope_of(second)))
    return first.lineno < getattr(second, "lineno", 0) and not any(
        isinstance(outer, ast.For | ast.While) and outer in around_it
        for outer in script.ancestors(first)
    )


def _may_skip_gradients(values: Evaluator, outer: ast.AST, step: ast.AST, scope: ast.AST) -> bool:
    """Whether gradients of this scope are computed where a condition skips the step."""
    if isinstance(outer, ast.If) and values.known_value(outer.test) is True:
        return False
    body = branch(values.script, outer, step)
    formed = [
        call
        for call, _ in values.script.method_calls("backward")
        if values.script.scope_of(call) is scope
    ]
    return not formed or any(
        outer not in values.script.ancestors(call) or branch(values.script, outer, call) != body
        for call in formed
    )


def _continue_between(script: Script, loop: ast.AST, step: ast.Call) -> ast.AST | None:
    """Find a ``continue`` between the computation of gradients and the step."""
    formed = [
        call.lineno for call, _ in script.method_calls("backward") if loop in script.ancestors(call)
    ]
    for node in ast.walk(loop):
        if isinstance(node, ast.Continue) and any(
            line < node.lineno < step.lineno for line in formed
        ):
            return node
    return None


def find_repeated_gradients(values: Evaluator) -> ast.AST | None:
    """Find what makes one step sum several gradients of a record, for any sampling scheme.

    That is a second ``backward()`` before the step, or leaving the loop of a ``BatchMemoryManager``
    within a lot, whose gradients then stay for the next lot.
    """
    script = values.script
    for node in script.nodes:
        if isinstance(node, ast.Break | ast.Return):
            inner = innermost_loop(script, node)
            if (
                isinstance(inner, ast.For)
                and _iterates_lot_parts(values, inner.iter)
                and not _runs_after_last_part(node, inner)
            ):
                return node
    for step in optimizer_steps(values):
        scope, loop = script.scope_of(step), innermost_loop(script, step)
        for call in script.calls_to("virtual_step"):
            if innermost_loop(script, call) is loop and not exclude_each_other(script, call, step):
                return call
        formed: ast.Call | None = None
        calls = script.calls_to("backward", "zero_grad", "step")
        for call in sorted(calls, key=lambda item: (item.lineno, item.col_offset)):
            if script.scope_of(call) is not scope or innermost_loop(script, call) is not loop:
                continue
            if call is step:
                break
            if last_name(call.func) != "backward":
                formed = (
                    formed
                    if last_name(call.func) == "step" and not may_be_optimizer_step(script, call)
                    else None
                )
            elif formed is not None and not exclude_each_other(script, formed, call):
                return call
            else:
                formed = call
    return None


def _runs_after_last_part(node: ast.AST, loop: ast.For) -> bool:
    """Whether ``node`` only runs after the last part of a lot."""
    return any(
        isinstance(item, ast.If)
        and last_name(item.test) == "_is_last_step_skipped"
        and isinstance(item.body[-1], ast.Continue)
        and item.lineno < getattr(node, "lineno", 0)
        for item in loop.body
    )


def _iterates_lot_parts(values: Evaluator, node: ast.expr, depth: int = 0) -> bool:
    """Whether an iterable yields the parts of lots that a ``BatchMemoryManager`` makes."""
    node = unwrap_iterable(node)
    bindings = values.script.bindings_of(node) if isinstance(node, ast.Name) and depth < 20 else []
    for binding in bindings:
        opened = getattr(values.script.parents[binding.node], "context_expr", binding.value)
        if opened is not None and (
            calls_any(opened, *LOT_SPLITTERS) or _iterates_lot_parts(values, opened, depth + 1)
        ):
            return True
        if isinstance(binding.node, ast.arg) and isinstance(node, ast.Name):
            passed = values.known_arguments(node, binding.node)
            if any(_iterates_lot_parts(values, item, depth + 1) for item in passed):
                return True
    return False


def find_mixing_call(values: Evaluator) -> ast.AST | None:
    """Find a call of a function that is known to mix several records into a row."""
    for call in values.script.calls:
        name = (last_name(call.func) or "").lower()
        if any(part in name for part in NAMES["mixers"]) and not is_left_out(values, call):
            return call
    return None


def find_joining_layer(values: Evaluator) -> ast.AST | None:
    """Find a layer or loss that joins the records of a lot.

    Opacus refuses such layers itself, and its validator replaces them.
    """
    refused = find_import(values.script, ("opacus", "torchdp")) is not None
    names = LOT_LOSSES if refused else LOT_LOSSES + NAMES["lot_statistics"]
    called = values.script.calls_to(*names)
    if refused:  # but not what no model holds
        called += [
            call for call in values.script.calls_to(*NAMES["lot_statistics"])
            if _is_applied(values.script, call)
        ]  # fmt: skip
    for call in values.script.calls_to(*NAMES["axis_layers"]):
        named = keywords_of(call)
        axis = next(
            (named[key] for key in ("dim", "axis", "start_dim") if key in named),
            next(iter(call.args), None),
        )
        called += [call] if values.known_value(axis) == 0 else []
    return next((call for call in called if not is_left_out(values, call)), None)


def _is_applied(script: Script, layer: ast.Call) -> bool:
    """Whether a layer is called where it is made or by its name, or is in an object's list.

    No model holds such a layer, so that Opacus does not find it.
    """
    for outer in script.ancestors(layer):
        match outer:
            case ast.Call(func=function) if layer in ast.walk(function):
                return True
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if value is layer:
                return bool(script.calls_to(name))
            case ast.Assign(targets=[ast.Attribute()], value=ast.List() | ast.Tuple()):
                return True
    return False


def find_skipped_lots(values: Evaluator) -> ast.AST | None:
    """Find a GradScaler, which skips the step where a gradient overflows, or an error that does."""
    for call in values.script.calls:
        named = keywords_of(call) if (last_name(call.func) or "").endswith(TRAINERS) else {}
        for name in named.keys() & HALF_PRECISION.keys():
            if values.known_value(named[name]) in HALF_PRECISION[name]:
                return call
    scales = any(
        values.known_value(keywords_of(call).get("enabled")) is not False
        for call in values.script.calls_to("GradScaler")
    )
    for step in optimizer_steps(values):
        if scales and step.args and not isinstance(step.args[0], ast.Lambda):
            return step
        loop = innermost_loop(values.script, step)
        for outer in [] if loop is None else ancestors_within(values.script, step, loop):
            if isinstance(outer, ast.Try) and not all(
                isinstance(item.body[-1], ast.Raise | ast.Return) for item in outer.handlers
            ):
                return outer
    return None
