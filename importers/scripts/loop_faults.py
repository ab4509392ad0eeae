"""Find faults of a training loop that break its claim: reused lots, skipped steps, early stops."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from affidavit.importers.names import NAMES
from affidavit.importers.scripts.conditions import branch, exclude_each_other
from affidavit.importers.scripts.data_flow import (
    MODELS,
    Tainted,
    ancestors_within,
    calls_any,
    find_lot,
    innermost_loop,
    is_private_loader,
    names_assigned_in,
    names_drawn_by,
    reads_records,
    reads_tainted,
    taint_at,
    tainted_targets,
    unwrap_iterable,
)
from affidavit.importers.scripts.step_count import (
    enclosing_loops,
    may_be_optimizer_step,
    optimizer_steps,
    runs_once,
)
from affidavit.importers.scripts.syntax import Script, find_import, keywords_of, last_name
from affidavit.importers.scripts.values import Evaluator, is_left_out

LOT_SPLITTERS = ("BatchMemoryManager", "wrap_data_loader")
SAVE_FUNCTIONS = NAMES["saving"]
LOSS_METHODS = NAMES["loss_methods"]
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
        loop = next(enclosing_loops(values, step), None)
        for call in script.calls_to("init"):  # the first state again, with the key that is in it
            again = loop is not None and loop in enclosing_loops(values, call)
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


def find_reused_lots(values: Evaluator) -> ast.AST | None:
    """Find what takes several steps on one lot."""
    places = (
        _find_reusing_loop(values, step) or _find_replaying_loop(values, step)
        for step in optimizer_steps(values)
    )
    return next((place for place in places if place is not None), _find_cycle(values))


def _find_replaying_loop(values: Evaluator, step: ast.AST) -> ast.AST | None:
    """Find the loop around ``step`` over a list of lots that an outer loop repeats."""
    script = values.script
    for loop in script.ancestors(step):
        binding = (
            script.binding_of(unwrap_iterable(loop.iter)) if isinstance(loop, ast.For) else None
        )
        match binding and binding.value:
            case ast.Call(func=ast.Name(id="list" | "tuple"), args=[lots]) if binding is not None:
                if is_private_loader(values, unwrap_iterable(lots)):
                    beyond = set(script.ancestors(loop)) - set(script.ancestors(binding.node))
                    if any(isinstance(outer, ast.For | ast.While) for outer in beyond):
                        return loop
    return None


def _find_cycle(values: Evaluator) -> ast.AST | None:
    """Find an ``itertools.cycle`` of the loader, which repeats its first lots."""
    for call in values.script.calls_to("cycle"):
        own = values.script.comes_from(call.func, ("itertools",))
        if own and call.args and is_private_loader(values, unwrap_iterable(call.args[0])):
            return call
    return None


def _find_reusing_loop(
    values: Evaluator, place: ast.AST, inner: ast.AST | None = None, depth: int = 0
) -> ast.AST | None:
    """Find the loop around ``place`` that uses a lot of an outer loop repeatedly."""
    script, used = values.script, place
    for outer in script.ancestors(place):
        counts = isinstance(outer, ast.For) and calls_any(outer.iter, "range", "trange")
        if isinstance(outer, ast.For) and not counts:
            return inner if reads_tainted(used, names_drawn_by(outer)) else None
        if not isinstance(outer, ast.For | ast.While | ast.FunctionDef):
            continue
        if depth > 20 or calls_any(outer, "next"):
            return None  # it draws lots of its own
        if isinstance(outer, ast.FunctionDef):
            calls = [c for c in values.known_calls(outer) if c in script.parents]
            reused = (_find_reusing_loop(values, call, inner, depth + 1) for call in calls)
            return next((loop for loop in reused if loop is not None), None)
        used = outer
        if not (isinstance(outer, ast.For) and runs_once(values, outer.iter)):
            inner = inner or outer
    drawn = (call for call in script.calls_to("next") if calls_any(call, "iter"))
    return inner if any(script.scope_of(c) is script.scope_of(place) for c in drawn) else None


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
    for call in values.script.calls_to("Softmax", "LogSoftmax", "Softmin"):
        axis = keywords_of(call).get("dim", next(iter(call.args), None))
        called += [call] if values.known_value(axis) == 0 else []
    return next((call for call in called if not is_left_out(values, call)), None)


def find_skipped_lots(values: Evaluator) -> ast.AST | None:
    """Find what skips the step of some lots on a condition that depends on records.

    A condition is public if it only names what is bound before the loop, and counters in it.
    """
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
            return step  # GradScaler skips the step where a gradient overflows
        outers = ancestors_within(values.script, step, values.script.scope_of(step))
        loops = [outer for outer in outers if isinstance(outer, ast.For | ast.While)]
        lot = None if loops else find_lot(values, step, reads_tainted)
        if not loops and lot is None:
            continue
        loop: ast.AST = loops[0] if lot is None else lot[0]
        made: Tainted = {*_names_changed_in(loop), *(() if lot is None else lot[1])}
        outers = outers if loops else [*outers, loop]
        for outer in outers[: outers.index(loop)]:
            if isinstance(outer, ast.If) and not _is_public(values, outer.test, made):
                return outer
            if isinstance(outer, ast.Try) and not all(
                _leaves(item.body) for item in outer.handlers
            ):
                return outer
        for node in ast.walk(loop):
            leaves = isinstance(node, ast.Return) and values.script.scope_of(node) is loop
            if (leaves or isinstance(node, ast.Continue)) and getattr(
                node, "lineno", 0
            ) < step.lineno:
                around_it = ancestors_within(values.script, node, loop)
                if not leaves and any(isinstance(o, ast.For | ast.While) for o in around_it):
                    continue  # of another loop
                tests = [outer.test for outer in around_it if isinstance(outer, ast.If)]
                if not tests or not all(_is_public(values, test, made) for test in tests):
                    return node
    for method, drawn in loss_methods(values):
        made = {*_names_changed_in(method), *drawn}
        for node in ast.walk(method):
            if (
                isinstance(node, ast.Return)
                and values.known_value(node.value) is None
                and (node.value is None or isinstance(node.value, ast.Constant))
            ):
                tests = [
                    o.test
                    for o in ancestors_within(values.script, node, method)
                    if isinstance(o, ast.If)
                ]
                if not all(_is_public(values, test, made) for test in tests):
                    return node
    return None


def collate_functions(values: Evaluator) -> Iterator[tuple[ast.FunctionDef, Tainted]]:
    """Yield the functions of this file that receive whole lots, and their lot parameters.

    These are collate functions, and losses that Keras models are compiled with.
    """
    for node in lot_functions(values):
        function = values.script.function_of(node)
        if function is not None and function.args.args:
            yield function, {arg.arg for arg in function.args.args}


def lot_functions(values: Evaluator) -> Iterator[ast.expr]:
    """Yield the ``collate_fn`` of each loader, and the ``loss`` of each compiled Keras model."""
    for call in values.script.calls_to("DataLoader", "compile"):
        keywords = keywords_of(call)
        yield from (keywords[key] for key in ("collate_fn", "loss") if key in keywords)


def loss_methods(values: Evaluator) -> Iterator[tuple[ast.FunctionDef, Tainted]]:
    """Yield the methods whose loss a trainer differentiates, each with its lot parameter."""
    for method in (item for name in LOSS_METHODS for item in values.script.functions.get(name, ())):
        owner = values.script.parents[method]
        bases = [last_name(base) or "" for base in getattr(owner, "bases", ())]
        lots = [a.arg for a in method.args.args[1:] if not a.arg.lower().endswith(MODELS)]
        if lots and any(base.endswith(("Module", "Trainer")) for base in bases):
            yield method, {lots[0]}


def find_data_dependent_stop(values: Evaluator) -> ast.AST | None:
    """Find what stops, schedules or saves the training depending on its lots."""
    for step in optimizer_steps(values):
        lot = find_lot(values, step, reads_tainted)
        drawn = set[str | ast.AST]() if lot is None else lot[1]
        if (end := _find_dependent_end(values, step, drawn, 0)) is not None:
            return end
    fits = (_find_dependent_end(values, fit, {fit}, 0) for fit in values.script.calls_to("fit"))
    return next((end for end in fits if end is not None), None) or _find_model_selection(values)


def _find_model_selection(values: Evaluator) -> ast.AST | None:
    """Find what selects among models by their results on the training records."""
    for call in values.script.calls_to(*NAMES["choosing"]):
        named = (values.script.value_of(node) for node in call.args if isinstance(node, ast.Name))
        for node in (
            part for item in (call, *named) if item is not None for part in ast.walk(item)
        ):
            loops = getattr(node, "generators", [])
            of_each = [loop.target for loop in loops if not reads_records(values, loop.iter)]
            of_each += node.args.args if isinstance(node, ast.Lambda) else []
            names = {getattr(item, "arg", None) or last_name(item) for item in of_each}
            for part in ast.walk(node) if names else ():
                args = part.args if isinstance(part, ast.Call) else []
                if any(last_name(item) in names for item in args) and any(
                    reads_records(values, item) for item in args
                ):
                    return call
    return None


def _find_dependent_end(
    values: Evaluator, place: ast.AST, seen: Tainted, depth: int
) -> ast.AST | None:
    """Find a loop exit, schedule or saved model that depends on tainted names."""
    script, scope = values.script, values.script.scope_of(place)
    at = taint_at(values, place, seen | _evaluation_calls(values, scope, place), reads_tainted)

    def depends(node: ast.AST) -> bool:
        outer = node if node in at else next((o for o in script.ancestors(node) if o in at), node)
        return reads_tainted(node, at.get(outer, set()))

    for call, schedule in script.method_calls("step"):
        own = script.scope_of(call) is scope and "sched" in (last_name(schedule) or "").lower()
        if own and any(map(depends, (*call.args, *keywords_of(call).values()))):
            return call
    for node in at:
        if isinstance(node, ast.If) and depends(node.test) and calls_any(node, *SAVE_FUNCTIONS):
            return node
        for part in ast.walk(node) if isinstance(node, ast.Expr | ast.Assign) else ():
            if isinstance(part, ast.Call) and last_name(part.func) in SAVE_FUNCTIONS:
                chosen = (n for n in ast.walk(part) if isinstance(n, ast.Subscript))
                if any(depends(item.slice) for item in chosen):
                    return node
        if _sets_hyperparameter(node):
            tests = [o.test for o in ancestors_within(script, node, scope) if isinstance(o, ast.If)]
            if any(map(depends, (getattr(node, "value", node), *tests))):
                return node
        for part in ast.walk(node) if isinstance(node, ast.Expr) and depth <= 5 else ():
            function = script.function_of(part.func) if isinstance(part, ast.Call) else None
            if not isinstance(part, ast.Call) or function is None:
                continue
            if not any(map(_sets_hyperparameter, ast.walk(function))):
                continue
            tainted: Tainted = {
                key for key, item in script.passed_arguments(function, part) if depends(item)
            }
            if (
                tainted
                and (end := _find_dependent_end(values, function.body[0], tainted, depth + 1))
                is not None
            ):
                return end
    loops = [
        o for o in ancestors_within(script, place, scope) if isinstance(o, ast.For | ast.While)
    ]
    for loop in loops:
        if isinstance(loop, ast.While) and depends(loop.test):
            return loop
        for node in ast.walk(loop):
            exits = isinstance(node, ast.Call) and last_name(node.func) in ("exit", "_exit", "quit")
            leaves = exits or isinstance(node, ast.Break | ast.Return)
            if leaves and script.scope_of(node) is scope:
                around_it = ancestors_within(script, node, loop)
                tests = [outer.test for outer in around_it if isinstance(outer, ast.If)]
                own = not any(isinstance(outer, ast.For | ast.While) for outer in around_it)
                if (own or not isinstance(node, ast.Break)) and any(map(depends, tests)):
                    return node
    if not isinstance(scope, ast.FunctionDef) or depth > 5:
        return None
    returned = [node for node in at if isinstance(node, ast.Return)]
    for call in values.known_calls(scope):
        outer = script.parents.get(call)
        targets = outer.targets if isinstance(outer, ast.Assign) else []
        passed_up: Tainted = {
            name
            for item in returned
            for target in targets
            if item.value is not None
            for name in tainted_targets(target, item.value, at[item], reads_tainted)
        }
        if not targets and any(reads_tainted(item, at[item]) for item in returned):
            passed_up.add(call)
        if (
            outer is not None
            and (end := _find_dependent_end(values, call, passed_up, depth + 1)) is not None
        ):
            return end
    return None


def _sets_hyperparameter(node: ast.AST) -> bool:
    """Whether a statement sets the learning rate or the clip norm of an optimiser."""
    targets = getattr(node, "targets", [getattr(node, "target", None)])
    return isinstance(node, ast.Assign | ast.AugAssign) and any(
        ast.unparse(item).endswith((".max_grad_norm", "['lr']")) for item in targets
    )


def _evaluation_calls(values: Evaluator, scope: ast.AST, place: ast.AST) -> Tainted:
    """Return the calls in ``scope`` that evaluate the model on its training records."""
    script, trains = values.script, last_name(getattr(place, "func", place))
    return {
        call
        for call in script.calls
        if script.scope_of(call) is scope
        and last_name(call.func) != trains
        and (_evaluates_model(values, call) or _reads_records_itself(values, call))
    }


def _evaluates_model(values: Evaluator, call: ast.Call) -> bool:
    """Whether a call uses the model on its training records."""
    return any(
        (last_name(item) or "").lower().endswith(MODELS)
        for item in (call.func, getattr(call.func, "value", call), *call.args)
    ) and any(reads_records(values, item) for item in call.args)


def _reads_records_itself(values: Evaluator, call: ast.Call) -> bool:
    """Whether a call runs a function of this file that reads the records without a step."""
    function = values.script.function_of(call.func)
    return (
        function is not None
        and not calls_any(function, "step")
        and any(reads_records(values, statement) for statement in function.body)
    )


def _names_changed_in(loop: ast.AST) -> set[str]:
    """Return the names and attributes that a loop sets, except counters of its turns."""
    made: set[str] = set()
    for node in ast.walk(loop):
        if isinstance(node, ast.Name | ast.Attribute) and not isinstance(node.ctx, ast.Load):
            made.add(last_name(node) or "")
    counts = {
        last_name(node.target)
        for node in ast.walk(loop)
        if isinstance(node, ast.AugAssign) and isinstance(node.value, ast.Constant)
    }
    match loop:
        case ast.For(target=ast.Tuple(elts=[ast.Name(id=name), *_]), iter=ast.Call() as data):
            called = (node for node in ast.walk(data) if isinstance(node, ast.Call))
            if any(last_name(call.func) == "enumerate" for call in called):
                counts.add(name)
    return made - counts


def _is_public(values: Evaluator, test: ast.expr, made: Tainted) -> bool:
    """Whether a condition is known, or depends on nothing that the loop sets or calls."""
    if values.known_value(test) is not None:
        return True
    for node in ast.walk(test):
        if isinstance(node, ast.Name | ast.Attribute) and last_name(node) in made:
            return False
        if isinstance(node, ast.Call) and last_name(node.func) not in ("len", "int", "min", "max"):
            return False
    return True


def _leaves(body: list[ast.stmt]) -> bool:
    """Whether a block ends with ``raise`` or ``return``."""
    return isinstance(body[-1], ast.Raise | ast.Return)


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
