"""Name well-known faults of a training loop, each by the form of a few lines."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from affidavit.importers.names import NAMES
from affidavit.importers.scripts.conditions import branch, exclude_each_other
from affidavit.importers.scripts.step_count import (
    enclosing_loops,
    may_be_optimizer_step,
    optimizer_steps,
)
from affidavit.importers.scripts.syntax import (
    innermost_loop,
    keywords_of,
    last_name,
    names_in,
)
from affidavit.importers.scripts.values import Evaluator, is_left_out

CLEARING = ("zero_grad", "microbatch_step")
"""Methods after which no gradients are left, of PyVacy's optimisers too."""
OF_ALL_TARGETS = "what the targets of all records of a lot decide"


def find_repeated_noise(values: Evaluator) -> ast.AST | None:
    """Find what may reset a random generator to the same state during training."""
    script = values.script
    steps = [*optimizer_steps(values), *script.calls_to("fit")]
    loops = {loop for step in steps for loop in enclosing_loops(values, step)}
    resets = script.calls_to(*NAMES["seeding"], "fork_rng", *(["init"] if values.updates else []))
    for call in resets:
        own = loops & set(enclosing_loops(values, call))
        new = {name for loop in own if isinstance(loop, ast.For) for name in names_in(loop.target)}
        parts = [part for arg in call.args for part in ast.walk(arg)]
        drawn = (script.module_path(part) in NAMES["entropy"] for part in parts
                 if isinstance(part, ast.Name | ast.Attribute))  # fmt: skip
        passed = {name for arg in call.args for name in names_in(arg)}
        if own and not new & passed and not any(drawn) and not is_left_out(values, call):
            return call
    return None


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
                if name[0] == "a" or (last_name(call) or "").endswith(NAMES["trainers"]):
                    return node
    for step in set(optimizer_steps(values)) - values.other_steps:
        loop, formed = innermost_loop(script, step), _gradients_before(values, step)
        place = formed[-1] if formed else None
        if place is not None and innermost_loop(script, place) is not loop:
            return place  # backward() in a loop that ends before the step
        beside = {script.scope_of(call) for call, _ in script.method_calls("backward")}
        again = place is None and script.scope_of(step) in beside
        if again and not script.calls_to("microbatch_step"):
            return step  # without gradients
        for outer in _conditions_around(values, step, loop):
            if place is None or place not in ast.walk(outer) or (
                branch(script, outer, place) != branch(script, outer, step)
            ):  # fmt: skip
                return outer
        if loop is None or place is None:
            continue
        for node in [item for item in ast.walk(loop) if isinstance(item, ast.Continue)]:
            if place.lineno < node.lineno < step.lineno and not is_left_out(values, node):
                return node
    return None


def _conditions_around(values: Evaluator, step: ast.AST, loop: ast.AST | None) -> list[ast.AST]:
    """Return the conditions around a step in the turn of its loop, innermost first."""
    around: list[ast.AST] = []
    for outer in values.script.ancestors(step):
        if outer is loop or outer is values.script.scope_of(step):
            break
        known = isinstance(outer, ast.If) and values.decided(outer.test) is not None
        if isinstance(outer, ast.If | ast.Match | ast.Try) and not known:
            around.append(outer)
    return around


def _gradients_before(values: Evaluator, step: ast.Call) -> list[ast.Call]:
    """Return the calls of ``backward()`` whose gradients a step of the same scope takes."""
    script, formed = values.script, list[ast.Call]()
    scope, loop = script.scope_of(step), innermost_loop(script, step)
    calls = script.calls_to("backward", *CLEARING, "step")
    for call in sorted(calls, key=lambda item: (item.lineno, item.col_offset)):
        if script.scope_of(call) is not scope or exclude_each_other(script, call, step) or (
            loop is not None and loop not in script.ancestors(call)
        ):  # fmt: skip
            continue
        if call is step:
            break
        if last_name(call.func) == "backward":
            formed = [item for item in formed if not exclude_each_other(script, item, call)]
            formed.append(call)
        elif last_name(call.func) in CLEARING or may_be_optimizer_step(script, call):
            formed = []
    return formed


def find_repeated_gradients(values: Evaluator) -> ast.AST | None:
    """Find a second ``backward()`` before a step, which sums several gradients of a record."""
    several = (_gradients_before(values, step)[1:2] for step in optimizer_steps(values))
    return next((call for calls in several for call in calls), None)


def find_mixed_records(values: Evaluator) -> ast.AST | None:
    """Find a call of a function that is known to mix several records into a row."""
    for call in values.script.calls:
        name = (last_name(call.func) or "").lower()
        if any(part in name for part in NAMES["mixers"]) and not is_left_out(values, call):
            return call
    return None


def find_joined_records(values: Evaluator) -> ast.AST | None:
    """Find a loss that joins the records of a lot."""
    called = values.script.calls_to(*NAMES["lot_losses"])
    return next((call for call in called if not is_left_out(values, call)), None)


def find_skipped_lots(values: Evaluator) -> ast.AST | None:
    """Find a GradScaler, which skips the step where a gradient overflows, or an error that does."""
    for call in values.script.calls:
        name, named = last_name(call.func) or "", keywords_of(call)
        set_to = (values.known_value(named.get(key)) for key in NAMES["precision_arguments"])
        halves = any(str(value) in NAMES["half_precision"] for value in set_to)
        scales = name == "GradScaler" and values.known_value(named.get("enabled")) is not False
        if scales or (halves and name.endswith(NAMES["trainers"])):
            return call
    for step in optimizer_steps(values):
        for outer in _conditions_around(values, step, innermost_loop(values.script, step)):
            ends = [item.body[-1] for item in getattr(outer, "handlers", ())]
            if not all(isinstance(end, ast.Raise | ast.Return) for end in ends):
                return outer
    return None


FAULT_FINDERS = (
    find_accumulated_lots, find_repeated_gradients, find_mixed_records, find_joined_records,
    find_skipped_lots, find_repeated_noise,
)  # fmt: skip
"""Functions that find the node of a script that shows a fault, named by its code."""


def divided_losses(values: Evaluator) -> Iterator[tuple[ast.AST, str]]:
    """Yield means by a sum of weights, or by the number of targets that are not ignored."""
    for call in values.script.calls_to(*NAMES["divided_losses"]):
        named, first = keywords_of(call), 2 if (last_name(call.func) or "").islower() else 0
        reduction = values.known_value(named.get("reduction"))
        chosen = [named.get("weight"), named.get("ignore_index")]
        chosen += [*call.args[first : first + 1], *call.args[first + 2 : first + 3]]
        if reduction not in ("sum", "none") and any(
            values.try_evaluate(item) is not None for item in chosen if item is not None
        ):
            yield call, f"its mean divides by {OF_ALL_TARGETS}"
    for node in values.script.nodes:
        match node:
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=100)):
                yield node, f"a mean loss ignores such targets, and divides by {OF_ALL_TARGETS}"
            case ast.Call(func=function) if last_name(function) in NAMES["ignoring_collators"]:
                yield node, f"a mean loss of its targets divides by {OF_ALL_TARGETS}"
