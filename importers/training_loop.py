"""How often a script steps its private optimiser: the loops around ``optimizer.step()``.

The loops are followed outwards through the functions that this file calls. A loop over a loader is
one pass over the data; a loop over ``range(n)`` runs n times. What cannot be followed (several
steps, a ``while``, a function that something else calls) is not read: too few steps would be worse
than none.
"""

from __future__ import annotations

import ast
import bisect
import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeGuard

from affidavit.importers.names import NAMES
from affidavit.importers.script_ast import (
    Script,
    assigned_to,
    imports_of,
    keywords_of,
    last_name,
    root_of,
)
from affidavit.importers.script_values import (
    Unreadable,
    Values,
    branch,
    exclude_each_other,
    is_left_out,
    text_of,
)

WRAPPERS = frozenset({"tqdm", "trange", "enumerate", "track", "notebook_tqdm"})
SPLITTERS = ("BatchMemoryManager", "wrap_data_loader")
REPEATING = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
LOOPED = WRAPPERS | {"range"}
SAVING = NAMES["saving"]
MODELS = NAMES["models"]
Seen = set[str | ast.AST]
"""Names of what records may have set, and calls that look at them."""
STEPPING = ("step", "virtual_step")
NESTED = 4
"""How many loops inside each other have a second turn, so that no script takes long."""
LOSS_METHODS = NAMES["loss_methods"]
LOT_LOSSES = NAMES["lot_losses"]
TRAINERS = ("Trainer", "Fabric", "Accelerator", "Arguments")
HALF_PRECISION = {
    "precision": (16, "16", "16-mixed"),
    "mixed_precision": ("fp16",),
    "fp16": (True,),
}
"""What makes trainers scale their losses by a ``GradScaler``."""
SIZES = NAMES["form_not_content"]
OF_RECORDS = WRAPPERS.union(NAMES["of_records"])
PARTS = NAMES["data_parts"]
OTHER_STEPS = NAMES["other_steps"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Passes:
    """The passes over the data, or the steps if no loop goes over a loader; and their line."""

    count: float
    is_epochs: bool
    line: int


def passes_of(values: Values) -> Passes:
    """The passes that the script makes; raises ``Unreadable``."""
    steps = [step for step in _steps(values) if step not in values.others]
    steps = values.beside_private(steps)
    if len(steps) != 1:
        lines = ", ".join(str(step.lineno) for step in steps)
        raise Unreadable(
            steps[0] if steps else values.script.tree,
            f"step() is called in several places (lines {lines})"
            if steps
            else "no optimizer.step() is called in this file",
        )
    return around(values, steps[0])


def _steps(values: Values) -> list[ast.Call]:
    steps = []
    for node in values.script.nodes:
        if isinstance(node, ast.Attribute) and node.attr in ("step", "train_step", "fit"):
            call = values.script.parents[node]
            if not _optimises(call if getattr(call, "func", None) is node else node):
                continue
            own = node.attr != "step" or getattr(node.value, "id", "") == "self"
            if own and node.attr in values.script.functions:
                continue  # its own steps count
            if node.attr == "fit" and _prepares(values.script, node.value):
                continue
            if node.attr != "step" or not isinstance(call, ast.Call) or call.func is not node:
                raise Unreadable(node, "training may step elsewhere")
            steps.append(call)
    if values.script.hidden is not None:
        raise Unreadable(values.script.hidden, "it may name any method")
    return steps


def _prepares(script: Script, node: ast.expr) -> bool:
    """Whether a name is one of scikit-learn's scalers or the like, which train no model."""
    made = [item.value for item in script.bindings_of(node)] if isinstance(node, ast.Name) else []
    calls = [item for item in (node, *made) if isinstance(item, ast.Call)]
    return any(
        script.is_of(call.func, ("sklearn",))
        and (last_name(call.func) or "").endswith(NAMES["preparers"])
        for call in calls
    )


def continued(values: Values) -> ast.AST | None:
    """What continues an earlier run, whose steps count too, if it may run."""
    for node in values.script.nodes:
        match node:
            case ast.Attribute(attr="load_checkpoint" | "load_state"):
                counts = True
            case ast.Attribute(attr="load_state_dict", value=owner):
                name = (last_name(owner) or "").lower()
                counts = name == "accountant" or "optim" in name
            case ast.keyword(arg="resume_from_checkpoint" | "ckpt_path", value=value):
                call = getattr(values.script.parents[node], "func", node)
                counts = last_name(call) in ("fit", "train") and bool(values.known(value))
            case _:
                counts = False
        if counts and not is_left_out(values, node):
            return node
    return None


def _owner(call: ast.Call) -> str | None:
    return last_name(call.func.value) if isinstance(call.func, ast.Attribute) else None


def steps_of(values: Values) -> list[ast.Call]:
    """The calls of ``step()`` that may be an optimiser's, and what steps privately beside them."""
    script = values.script
    steps = [
        call for call, owner in script.method_calls("step") if _optimises(call)
        and not ("step" in script.functions and getattr(owner, "id", "") == "self")
    ]  # fmt: skip
    return [*steps, *values.updates]


def loops_of(values: Values, node: ast.AST, depth: int = 0) -> Iterator[ast.For | ast.While]:
    """The loops around a node, and around the calls of its function."""
    for outer in values.script.above(node):
        if isinstance(outer, ast.For | ast.While):
            yield outer
        elif isinstance(outer, ast.FunctionDef) and depth < 5:
            for call in values.known_calls(outer):
                if call in values.script.parents:
                    yield from loops_of(values, call, depth + 1)


def names_set_in(place: ast.AST) -> set[str]:
    """The names that statements below ``place`` set."""
    return {
        node.id
        for node in ast.walk(place)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }


def reseeding(values: Values) -> ast.AST | None:
    """What sets a generator to the same state again while the training runs."""
    script = values.script
    steps = [*steps_of(values), *script.called("fit")]
    loops = {loop for step in steps for loop in loops_of(values, step)}
    for call in script.called(*NAMES["seeding"]):
        own = loops & set(loops_of(values, call))
        names = {
            node.id for arg in call.args for node in ast.walk(arg) if isinstance(node, ast.Name)
        }
        set_anew = {name for loop in own for name in names_set_in(loop)}
        if own and not names & set_anew and not is_left_out(values, call):
            return call
    for step in values.updates:
        loop = next(loops_of(values, step), None)
        for call in script.called("init"):  # the first state again, with the key that is in it
            again = loop is not None and loop in loops_of(values, call)
            if again or step in script.above(call):
                return call
    around_steps = {outer for step in steps for outer in script.above(step)}
    forks = (call for call in script.called("fork_rng") for outer in script.above(call)
             if isinstance(outer, ast.With) and outer in around_steps)  # fmt: skip
    return next(forks, None)


def accumulation(values: Values) -> ast.AST | None:
    """What makes one step release several lots, if anything may: a step that some lots skip."""
    script = values.script
    for node in script.nodes:
        match node:
            case ast.Attribute(attr="signal_skip_step" | "virtual_step"):
                return node
            case ast.keyword(
                arg="accumulate_grad_batches" | "gradient_accumulation_steps" as name, value=value
            ) if values.known(value) != 1:
                call = getattr(script.parents[node], "func", node)
                if name[0] == "a" or (last_name(call) or "").endswith(TRAINERS):
                    return node
    for step in set(steps_of(values)) - values.others:
        scope, inside = script.scope_of(step), list(script.above(step))
        loops = [outer for outer in inside if isinstance(outer, ast.For | ast.While)]
        steps = [*steps_of(values), *script.called("microbatch_step")]
        alike = [item for item in steps if _owner(item) == _owner(step)]
        stepping = [_loop_around(script, item) for item in alike]  # each with gradients of its own
        for call, _ in script.method_calls("backward"):
            if script.scope_of(call) is not scope or _loop_around(script, call) in stepping:
                continue
            if _ends_before(script, call, values.ignored) or _ends_before(script, step, call):
                continue
            beside = [outer for outer in script.above(call) if isinstance(outer, ast.For)]
            if any(loop not in loops for loop in beside):
                return call  # backward() in a loop that ends before the step
        for outer in inside:
            if outer in loops or outer is scope:
                break
            if isinstance(outer, ast.If | ast.Match | ast.Try) and _is_skipped(
                values, outer, step, scope
            ):
                return outer
        if loops and (skip := _continue_between(script, loops[0], step)) is not None:
            return skip
    return None


def _ends_before(script: Script, first: ast.Call, second: ast.AST | None) -> bool:
    """Whether ``first`` runs before ``second`` in one scope, and not again after it."""
    if second is None or script.scope_of(first) is not script.scope_of(second):
        return False
    around_it = set(inside(script, second, script.scope_of(second)))
    return first.lineno < getattr(second, "lineno", 0) and not any(
        isinstance(outer, ast.For | ast.While) and outer in around_it
        for outer in script.above(first)
    )


def repeating(values: Values) -> ast.AST | None:
    """What makes one step sum several gradients of a record, however its lots are drawn.

    That is a second ``backward()`` before it, or a way out of the loop of a ``BatchMemoryManager``
    within a lot, whose gradients stay for the next one.
    """
    script = values.script
    for node in script.nodes:
        if isinstance(node, ast.Break | ast.Return):
            inner = _loop_around(script, node)
            if (
                isinstance(inner, ast.For)
                and _goes_over_parts(values, inner.iter)
                and not _ends_a_lot(node, inner)
            ):
                return node
    for step in steps_of(values):
        scope, loop = script.scope_of(step), _loop_around(script, step)
        for call in script.called("virtual_step"):
            if _loop_around(script, call) is loop and not exclude_each_other(script, call, step):
                return call
        formed: ast.Call | None = None
        calls = script.called("backward", "zero_grad", "step")
        for call in sorted(calls, key=lambda item: (item.lineno, item.col_offset)):
            if script.scope_of(call) is not scope or _loop_around(script, call) is not loop:
                continue
            if call is step:
                break
            if last_name(call.func) != "backward":
                formed = formed if last_name(call.func) == "step" and not _optimises(call) else None
            elif formed is not None and not exclude_each_other(script, formed, call):
                return call
            else:
                formed = call
    return None


def _ends_a_lot(node: ast.AST, loop: ast.For) -> bool:
    """Whether a part of a lot that is not its last goes on before it comes to ``node``."""
    return any(
        isinstance(item, ast.If)
        and last_name(item.test) == "_is_last_step_skipped"
        and isinstance(item.body[-1], ast.Continue)
        and item.lineno < getattr(node, "lineno", 0)
        for item in loop.body
    )


def _goes_over_parts(values: Values, node: ast.expr, depth: int = 0) -> bool:
    """Whether a name is bound to the parts of lots that a ``BatchMemoryManager`` makes."""
    node = looped_over(node)
    bindings = values.script.bindings_of(node) if isinstance(node, ast.Name) and depth < 20 else []
    for binding in bindings:
        opened = getattr(values.script.parents[binding.node], "context_expr", binding.value)
        if opened is not None and (
            _goes_over(opened, *SPLITTERS) or _goes_over_parts(values, opened, depth + 1)
        ):
            return True
        if isinstance(binding.node, ast.arg) and isinstance(node, ast.Name):
            passed = values.passed_to(node, binding.node)
            if any(_goes_over_parts(values, item, depth + 1) for item in passed):
                return True
    return False


def looped_over(node: ast.expr) -> ast.expr:
    """What a loop goes over below ``enumerate`` and progress bars."""
    while isinstance(node, ast.Call) and node.args and last_name(node.func) in (*WRAPPERS, "iter"):
        node = node.args[0]
    return node


def reusing(values: Values) -> ast.AST | None:
    """What takes several steps on each lot, if anything does."""
    places = (_reuses(values, step) or _replays(values, step) for step in steps_of(values))
    return next((place for place in places if place is not None), _cycled(values))


def _replays(values: Values, step: ast.AST) -> ast.AST | None:
    """The loop around ``step`` over a list of the loader's lots, made outside of a loop around it.

    That loop goes over the same lots each time.
    """
    script = values.script
    for loop in script.above(step):
        binding = script.binding_of(looped_over(loop.iter)) if isinstance(loop, ast.For) else None
        match binding and binding.value:
            case ast.Call(func=ast.Name(id="list" | "tuple"), args=[lots]) if binding is not None:
                if is_private_loader(values, looped_over(lots)):
                    beyond = set(script.above(loop)) - set(script.above(binding.node))
                    if any(isinstance(outer, ast.For | ast.While) for outer in beyond):
                        return loop
    return None


def _cycled(values: Values) -> ast.AST | None:
    """An ``itertools.cycle`` of the loader, which draws its lots once and repeats them."""
    for call in values.script.called("cycle"):
        own = values.script.is_of(call.func, ("itertools",))
        if own and call.args and is_private_loader(values, looped_over(call.args[0])):
            return call
    return None


def _reuses(
    values: Values, place: ast.AST, inner: ast.AST | None = None, depth: int = 0
) -> ast.AST | None:
    """The loop around ``place``, or already ``inner``, that uses the lots of a loop further out."""
    script, used = values.script, place
    for outer in script.above(place):
        counts = isinstance(outer, ast.For) and _goes_over(outer.iter, "range", "trange")
        if isinstance(outer, ast.For) and not counts:
            return inner if _reads(used, drawn_by(outer)) else None
        if not isinstance(outer, ast.For | ast.While | ast.FunctionDef):
            continue
        if depth > 20 or _goes_over(outer, "next"):
            return None  # it draws lots of its own
        if isinstance(outer, ast.FunctionDef):
            calls = [c for c in values.known_calls(outer) if c in script.parents]
            reused = (_reuses(values, call, inner, depth + 1) for call in calls)
            return next((loop for loop in reused if loop is not None), None)
        used = outer
        if not (isinstance(outer, ast.For) and runs_once(values, outer.iter)):
            inner = inner or outer
    drawn = (call for call in script.called("next") if _goes_over(call, "iter"))
    return inner if any(script.scope_of(c) is script.scope_of(place) for c in drawn) else None


def runs_once(values: Values, iterable: ast.expr) -> bool:
    """Whether a loop has one turn."""
    try:
        return _times(values, iterable) == 1
    except Unreadable:
        return False


def _loop_around(script: Script, node: ast.AST) -> ast.AST | None:
    """The innermost loop around ``node`` in its scope."""
    around_it = inside(script, node, script.scope_of(node))
    return next((outer for outer in around_it if isinstance(outer, ast.For | ast.While)), None)


def mixing(values: Values) -> ast.AST | None:
    """A call of a function known to make rows of several records, if it may run."""
    for call in values.script.calls:
        name = (last_name(call.func) or "").lower()
        if any(part in name for part in NAMES["mixers"]) and not is_left_out(values, call):
            return call
    return None


def joining(values: Values) -> ast.AST | None:
    """A layer or loss in which the records of a lot meet, if it may run.

    Opacus refuses such layers itself, and its validator replaces them.
    """
    refused = imports_of(values.script, ("opacus", "torchdp")) is not None
    names = LOT_LOSSES if refused else LOT_LOSSES + NAMES["lot_statistics"]
    called = values.script.called(*names)
    for call in values.script.called("Softmax", "LogSoftmax", "Softmin"):
        axis = keywords_of(call).get("dim", next(iter(call.args), None))
        called += [call] if values.known(axis) == 0 else []
    return next((call for call in called if not is_left_out(values, call)), None)


def skipping(values: Values) -> ast.AST | None:
    """What lets some lots pass without a step, by a condition on what the loop makes; else None.

    A condition is public if it names only what is bound before the loop, and counters in it.
    """
    for call in values.script.calls:
        named = keywords_of(call) if (last_name(call.func) or "").endswith(TRAINERS) else {}
        for name in named.keys() & HALF_PRECISION.keys():
            if values.known(named[name]) in HALF_PRECISION[name]:
                return call
    scales = any(
        values.known(keywords_of(call).get("enabled")) is not False
        for call in values.script.called("GradScaler")
    )
    for step in steps_of(values):
        if scales and step.args and not isinstance(step.args[0], ast.Lambda):
            return step  # GradScaler skips the step where a gradient overflows
        outers = inside(values.script, step, values.script.scope_of(step))
        loops = [outer for outer in outers if isinstance(outer, ast.For | ast.While)]
        lot = None if loops else lot_of(values, step, _reads)
        if not loops and lot is None:
            continue
        loop: ast.AST = loops[0] if lot is None else lot[0]
        made: Seen = {*_made_in(loop), *(() if lot is None else lot[1])}
        outers = outers if loops else [*outers, loop]
        for outer in outers[: outers.index(loop)]:
            if isinstance(outer, ast.If) and not _is_public(values, outer.test, made):
                return outer
            if isinstance(outer, ast.Try) and not all(_ends(item.body) for item in outer.handlers):
                return outer
        for node in ast.walk(loop):
            leaves = isinstance(node, ast.Return) and values.script.scope_of(node) is loop
            if (leaves or isinstance(node, ast.Continue)) and getattr(
                node, "lineno", 0
            ) < step.lineno:
                around_it = inside(values.script, node, loop)
                if not leaves and any(isinstance(o, ast.For | ast.While) for o in around_it):
                    continue  # of another loop
                tests = [outer.test for outer in around_it if isinstance(outer, ast.If)]
                if not tests or not all(_is_public(values, test, made) for test in tests):
                    return node
    for method, drawn in loss_methods(values):
        made = {*_made_in(method), *drawn}
        for node in ast.walk(method):
            if (
                isinstance(node, ast.Return)
                and values.known(node.value) is None
                and (node.value is None or isinstance(node.value, ast.Constant))
            ):
                tests = [
                    o.test for o in inside(values.script, node, method) if isinstance(o, ast.If)
                ]
                if not all(_is_public(values, test, made) for test in tests):
                    return node
    return None


def collating(values: Values) -> Iterator[tuple[ast.FunctionDef, Seen]]:
    """The functions of this file that get all rows of a lot, each with the names of them.

    They make a lot, or are the loss of a model of Keras'.
    """
    for node in of_lots(values):
        function = values.script.function_of(node)
        if function is not None and function.args.args:
            yield function, {arg.arg for arg in function.args.args}


def of_lots(values: Values) -> Iterator[ast.expr]:
    """What loaders make their lots with, and the losses that models of Keras' are compiled with."""
    for call in values.script.called("DataLoader", "compile"):
        told = keywords_of(call)
        yield from (told[key] for key in ("collate_fn", "loss") if key in told)


def loss_methods(values: Values) -> Iterator[tuple[ast.FunctionDef, Seen]]:
    """The methods whose loss a trainer differentiates, each with the name of its lot."""
    for method in (item for name in LOSS_METHODS for item in values.script.functions.get(name, ())):
        owner = values.script.parents[method]
        bases = [last_name(base) or "" for base in getattr(owner, "bases", ())]
        lots = [a.arg for a in method.args.args[1:] if not a.arg.lower().endswith(MODELS)]
        if lots and any(base.endswith(("Module", "Trainer")) for base in bases):
            yield method, {lots[0]}


def stopping(values: Values) -> ast.AST | None:
    """What stops, schedules or saves the training by what the loop makes of its lots."""
    for step in steps_of(values):
        lot = lot_of(values, step, _reads)
        drawn = set[str | ast.AST]() if lot is None else lot[1]
        if (end := _ends_by(values, step, drawn, 0)) is not None:
            return end
    fits = (_ends_by(values, fit, {fit}, 0) for fit in values.script.called("fit"))
    return next((end for end in fits if end is not None), None) or _chosen(values)


def _chosen(values: Values) -> ast.AST | None:
    """What takes the best of several models by what each makes of the records of the training."""
    for call in values.script.called(*NAMES["choosing"]):
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


def _ends_by(values: Values, place: ast.AST, seen: Seen, depth: int) -> ast.AST | None:
    """What depends on ``seen``: a way out of loops around ``place``, a schedule, a saved model."""
    script, scope = values.script, values.script.scope_of(place)
    at = seen_at(values, place, seen | _measured(values, scope, place), _reads)

    def depends(node: ast.AST) -> bool:
        outer = node if node in at else next((o for o in script.above(node) if o in at), node)
        return _reads(node, at.get(outer, set()))

    for call, schedule in script.method_calls("step"):
        own = script.scope_of(call) is scope and "sched" in (last_name(schedule) or "").lower()
        if own and any(map(depends, (*call.args, *keywords_of(call).values()))):
            return call
    for node in at:
        if isinstance(node, ast.If) and depends(node.test) and _goes_over(node, *SAVING):
            return node
        for part in ast.walk(node) if isinstance(node, ast.Expr | ast.Assign) else ():
            if isinstance(part, ast.Call) and last_name(part.func) in SAVING:
                chosen = (n for n in ast.walk(part) if isinstance(n, ast.Subscript))
                if any(depends(item.slice) for item in chosen):
                    return node
        if _sets_rate(node):
            tests = [o.test for o in inside(script, node, scope) if isinstance(o, ast.If)]
            if any(map(depends, (getattr(node, "value", node), *tests))):
                return node
        for part in ast.walk(node) if isinstance(node, ast.Expr) and depth <= 5 else ():
            function = script.function_of(part.func) if isinstance(part, ast.Call) else None
            if function is None or not any(map(_sets_rate, ast.walk(function))):
                continue
            told: Seen = {key for key, item in script.passed(function, part) if depends(item)}  # type: ignore[arg-type]
            if told and (end := _ends_by(values, function.body[0], told, depth + 1)) is not None:
                return end
    loops = [o for o in inside(script, place, scope) if isinstance(o, ast.For | ast.While)]
    for loop in loops:
        if isinstance(loop, ast.While) and depends(loop.test):
            return loop
        for node in ast.walk(loop):
            exits = isinstance(node, ast.Call) and last_name(node.func) in ("exit", "_exit", "quit")
            leaves = exits or isinstance(node, ast.Break | ast.Return)
            if leaves and script.scope_of(node) is scope:
                around_it = inside(script, node, loop)
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
        passed_up: Seen = {
            name
            for item in returned
            for target in targets
            if item.value is not None
            for name in _receivers(target, item.value, at[item], _reads)
        }
        if not targets and any(_reads(item, at[item]) for item in returned):
            passed_up.add(call)
        if outer is not None and (end := _ends_by(values, call, passed_up, depth + 1)) is not None:
            return end
    return None


def _sets_rate(node: ast.AST) -> bool:
    """Whether a statement sets the learning rate or the clip norm of an optimiser."""
    targets = getattr(node, "targets", [getattr(node, "target", None)])
    return isinstance(node, ast.Assign | ast.AugAssign) and any(
        ast.unparse(item).endswith((".max_grad_norm", "['lr']")) for item in targets
    )


def seen_at(
    values: Values,
    place: ast.AST,
    seen: Seen,
    reads: Callable[[ast.AST, Seen], bool],
    within: ast.AST | None = None,
) -> dict[ast.AST, Seen]:
    """What of ``seen``, and of what it is passed on to, each statement of a scope finds.

    A name that is set to something else no longer counts, and what one turn of a loop leaves
    counts in the next.
    """
    script, scope = values.script, values.script.scope_of(place)
    loop = _loop_around(script, place)
    made = set() if loop is None else names_set_in(loop)
    statements = [
        node
        for node in ast.walk(within or scope)
        if isinstance(node, ast.stmt | ast.NamedExpr)
        and script.scope_of(node) is scope
        and not _is_of_other_records(values, node, place, made)
    ]
    statements.sort(key=lambda node: (node.lineno, node.col_offset))
    at: dict[ast.AST, Seen] = {}
    told = seen
    for node in _in_turns(statements) * 2:
        at[node] = at[node] | seen if node in at else seen
        leads = script.parents.get(place) is node and place not in seen
        gained = told if leads else _passed_on(node, seen, reads) - script.functions.keys()
        gained -= script.imported
        if isinstance(node, ast.Assign) and not any(
            isinstance(outer, ast.If | ast.Try | ast.Match) for outer in inside(script, node, scope)
        ):
            lost = {n.id for t in node.targets for n in ast.walk(t) if isinstance(n, ast.Name)}
            seen = seen if lost & seen <= gained else seen - lost
        seen = seen if gained <= seen else seen | gained
    return at


def _in_turns(
    statements: list[ast.stmt | ast.NamedExpr], depth: int = 0
) -> list[ast.stmt | ast.NamedExpr]:
    """Statements in the order in which they run, those of each of the first loops twice."""
    order, done = list[ast.stmt | ast.NamedExpr](), -1
    for i, node in enumerate(statements):
        if i > done:
            order.append(node)
            if isinstance(node, ast.For | ast.While):
                end = bisect.bisect(statements, node.end_lineno or 0, key=lambda item: item.lineno)
                inner = statements[i + 1 : end]
                order += _in_turns(inner, depth + 1) * (2 if depth < NESTED else 1)
                done = i + len(inner)
    return order


def lot_of(
    values: Values, place: ast.AST, reads: Callable[[ast.AST, Seen], bool], depth: int = 0
) -> tuple[ast.AST, Seen, ast.AST] | None:
    """The loop around ``place`` that draws its lots, or the function that is given them.

    With it come the names that hold records there, and the outermost loop or the function.
    """
    script, scope = values.script, values.script.scope_of(place)
    loops = [o for o in inside(script, place, scope) if isinstance(o, ast.For | ast.While)]
    for loop in loops:
        if drawn := drawn_by(loop):
            return loop, drawn, loops[-1]
    passed: Seen = set()
    followed = isinstance(scope, ast.FunctionDef) and depth <= 5
    for call in values.known_calls(scope) if followed else ():
        outer = lot_of(values, call, reads, depth + 1) if call in script.parents else None
        if outer is None:
            continue
        at = seen_at(values, call, outer[1], reads, outer[2])
        statement = next((node for node in (call, *script.above(call)) if node in at), call)
        seen = at.get(statement, set())
        passed |= {name for name, item in script.passed(scope, call) if reads(item, seen)}
    return (scope, passed, scope) if passed else None


def _is_of_other_records(values: Values, node: ast.AST, place: ast.AST, made: set[str]) -> bool:
    """Whether a loop around ``node`` and not around ``place`` goes over another loader.

    One that goes over what is ``made`` in the loop around ``place`` goes over rows of its lot.
    """
    around_it = set(values.script.above(place))
    return any(
        isinstance(outer, ast.For)
        and outer not in around_it
        and not _goes_over(outer.iter, "range", "trange")
        and last_name(outer.iter) != "param_groups"
        and not is_private_loader(values, looped_over(outer.iter))
        and made.isdisjoint(getattr(part, "id", None) for part in ast.walk(outer.iter))
        for outer in values.script.above(node)
    )


def _measured(values: Values, scope: ast.AST, place: ast.AST) -> Seen:
    """The calls in ``scope``, but for training, that measure the model on its own records."""
    script, trains = values.script, last_name(getattr(place, "func", place))
    return {
        call
        for call in script.calls
        if script.scope_of(call) is scope
        and last_name(call.func) != trains
        and (_is_of_records(values, call) or _looks_at_records(values, call))
    }


def _is_of_records(values: Values, call: ast.Call) -> bool:
    """Whether a call is of or with the model, and is given its own records."""
    return any(
        (last_name(item) or "").lower().endswith(MODELS)
        for item in (call.func, getattr(call.func, "value", call), *call.args)
    ) and any(reads_records(values, item) for item in call.args)


def _looks_at_records(values: Values, call: ast.Call) -> bool:
    """Whether a function of this file that takes no step reads them by names of its own."""
    function = values.script.function_of(call.func)
    return (
        function is not None
        and not _goes_over(function, "step")
        and any(reads_records(values, statement) for statement in function.body)
    )


def content_of(node: ast.AST) -> Iterator[ast.AST]:
    """The parts of an expression whose content counts, and not only their size."""
    parts = [node]
    while parts:
        part = parts.pop()
        told = part.func if isinstance(part, ast.Call) else part
        if last_name(told) not in SIZES or (isinstance(told, ast.Name) and part is told):
            yield part
            parts += ast.iter_child_nodes(part)


def reads_records(values: Values, node: ast.AST) -> bool:
    """Whether an expression names what holds all records of the training, beside their number."""
    return any(
        isinstance(part, ast.Name | ast.Attribute)
        and bool(places := stored_at(values.script, part))
        and values.records.issuperset(places)
        for part in content_of(node)
    )


def stored_at(script: Script, node: ast.AST) -> list[ast.AST]:
    """Where a name, or an attribute of ``self``, is set."""
    if isinstance(node, ast.Attribute):
        own = getattr(node.value, "id", "") == "self"
        return list(script.stored_attributes.get(node.attr, ())) if own else []
    return [item.node for item in script.bindings_of(node)] if isinstance(node, ast.Name) else []


def records_at(values: Values, starts: Iterable[ast.AST | None]) -> frozenset[ast.AST]:
    """Where names are set to what holds the records of these loaders, arrays or data sets.

    They are followed back along names, to what is a part of other data.
    """
    script, told, packaged = values.script, set[ast.AST](), set[str]()
    todo = list(starts)
    while todo:
        node = todo.pop()
        packaged.add(_of_a_package(script, node))
        match node:
            case ast.Name() | ast.Attribute() if places := stored_at(script, node):
                own = [place for place in places if not values.is_rebound(place)]
                if told.issuperset(places) or not _are_of_one(script, node, own):
                    continue
                told.update(places)
                for place in own:
                    if isinstance(place, ast.arg) and isinstance(node, ast.Name):
                        todo += values.passed_to(node, place)
                    outer = script.parents[place]
                    todo.append(getattr(outer, "value", getattr(outer, "context_expr", None)))
            case ast.Call(func=function, args=args) if last_name(function) in OF_RECORDS:
                keywords = keywords_of(node)
                todo += args[1:] if last_name(function) == "Subset" else args
                todo += [keywords.get("dataset"), keywords.get("data_loader")]
            case ast.Call() if (made := values.returned(node)) is not node:
                todo.append(made)
            case ast.Call(func=ast.Attribute(value=ast.Name() as base), args=[]):
                todo.append(base)  # x.float()
            case ast.List(elts=parts) | ast.Tuple(elts=parts):
                todo += parts
    while True:  # other names, and loaders beside the training's own
        others = {
            part
            for item in script.nodes
            if isinstance(item, ast.Assign)
            and (
                not told.isdisjoint(stored_at(script, held := _held(script, item.value)))
                or _of_a_package(script, held) in packaged - {""}
            )
            for target in item.targets
            for part in ast.walk(target)
            if isinstance(part, ast.Name | ast.Attribute) and isinstance(part.ctx, ast.Store)
        }
        if told >= others:
            return frozenset(told)
        told |= others


def _of_a_package(script: Script, node: ast.AST | None) -> str:
    """What makes a data set of a package: the same call makes the same records of it again."""
    if not isinstance(node, ast.Call) or not script.is_of(node.func, ("torchvision", "torchtext")):
        return ""
    told = keywords_of(node)
    same = {key: ast.dump(told[key]) for key in sorted(told) if "transform" not in key}
    return ast.dump(node.func) + str(same | {"": [ast.dump(item) for item in node.args]})


def _are_of_one(script: Script, name: ast.AST, places: list[ast.AST]) -> bool:
    """Whether a name that is set at several places is made of what it was, or set at one of them.

    ``x = x / 255`` is of the same records, and so is each side of a condition.
    """
    anew = []
    for place in places:
        statement = next((o for o in script.above(place) if isinstance(o, ast.stmt)), place)
        value = getattr(statement, "value", None)
        made = isinstance(statement, ast.AugAssign) or (
            isinstance(value, ast.AST)
            and ast.unparse(name) in {ast.unparse(part) for part in content_of(value)}
        )
        anew += [] if made else [place]
    return exclude_each_other(script, *anew)


def _held(script: Script, node: ast.expr) -> ast.expr:
    """What a loader or data set is made of, if it is the whole or a part of one other.

    ``x[i : i + 9]`` is the lot of a turn, and a name that is set again may lose the part.
    """
    match node:
        case ast.Call(
            func=ast.Name(id="next"), args=[ast.Call(func=ast.Name(id="iter"), args=[inner])]
        ) if not any(isinstance(outer, ast.For | ast.While) for outer in script.above(node)):
            return _held(script, inner)
        case ast.Call(func=function, args=args) if last_name(function) in ("DataLoader", *PARTS):
            whole = keywords_of(node).get("dataset") or next(iter(args), function)
            parts = last_name(function) in PARTS
        case ast.Subscript(value=whole, slice=ast.Slice(lower=lower, upper=upper)) if (
            lower is None or upper is None
        ):
            parts = True
        case _:
            return node
    return node if parts and len(stored_at(script, whole)) > 1 else _held(script, whole)


def drawn_by(loop: ast.For | ast.While) -> Seen:
    """The names that a loop binds to its records: its targets, but for ``enumerate``'s count."""
    counted = isinstance(loop, ast.For) and _goes_over(loop.iter, "enumerate")
    if isinstance(loop, ast.For) and not _goes_over(loop.iter, "range", "trange"):
        target = loop.target
        parts = target.elts[1:] if counted and isinstance(target, ast.Tuple) else [target]
        return {node.id for part in parts for node in ast.walk(part) if isinstance(node, ast.Name)}
    return {
        name.id
        for node in ast.walk(loop)
        if isinstance(node, ast.Assign) and _goes_over(node.value, "next")
        for target in node.targets
        for name in ast.walk(target)
        if isinstance(name, ast.Name)
    }


def _goes_over(node: ast.AST, *names: str) -> bool:
    return any(isinstance(n, ast.Call) and last_name(n.func) in names for n in ast.walk(node))


def _reads(node: ast.AST, seen: Seen) -> bool:
    parts: list[ast.AST] = [node]
    while parts:
        part = parts.pop()
        key = getattr(part.slice, "value", "") if isinstance(part, ast.Subscript) else ""
        if str(key).startswith(("val", "test", "eval")):
            continue  # of other records
        if part in seen or _held_by(part) in seen:
            return True
        parts += ast.iter_child_nodes(part)
    return False


def _held_by(node: ast.AST) -> str | None:
    """The last part of a name, or an item of it: ``b["c"]`` of ``a.b["c"]``."""
    if isinstance(node, ast.Subscript):
        whole = last_name(node.value)
        return f"{whole}[{node.slice.value!r}]" if isinstance(node.slice, ast.Constant) else whole
    return last_name(node)


def _passed_on(node: ast.AST, seen: Seen, reads: Callable[[ast.AST, Seen], bool]) -> Seen:
    """The names that a statement gives something of what is in ``seen``."""
    match node:
        case ast.Assign(targets=targets, value=value):
            return {name for target in targets for name in _receivers(target, value, seen, reads)}
        case ast.AugAssign(target=target, value=value) | ast.NamedExpr(target=target, value=value):
            return _receivers(target, value, seen, reads)
        case ast.Expr(value=ast.Call(func=function, args=arguments) as call):
            named = keywords_of(call) if last_name(function) not in STEPPING else {}
            told = [*arguments, *named.values()] if last_name(function) != "backward" else []
            owner = function.value if isinstance(function, ast.Attribute) else function
            return {_held_by(owner) or ""} if any(reads(item, seen) for item in told) else set()
    return set()


def _receivers(
    target: ast.expr, value: ast.expr, seen: Seen, reads: Callable[[ast.AST, Seen], bool]
) -> Seen:
    """The names of ``target`` that get something of ``seen`` from ``value``."""
    match target, value:
        case ast.Tuple(elts=names), ast.Tuple(elts=values) if len(names) == len(values):
            pairs = zip(names, values, strict=True)
            return {name for one, other in pairs for name in _receivers(one, other, seen, reads)}
    parts = target.elts if isinstance(target, ast.Tuple) else [target]
    chosen = (part for part in parts if isinstance(part, ast.Subscript) and reads(part.slice, seen))
    return {_held_by(part) or "" for part in (parts if reads(value, seen) else chosen)}


def inside(script: Script, node: ast.AST, end: ast.AST) -> list[ast.AST]:
    """What stands around ``node`` inside of ``end``, from the inside out."""
    return list(itertools.takewhile(lambda outer: outer is not end, script.above(node)))


def _made_in(loop: ast.AST) -> set[str]:
    """The names and attributes that a loop sets, but for those that only count its turns."""
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


def _is_public(values: Values, test: ast.expr, made: Seen) -> bool:
    """Whether a condition is settled, or names nothing that the loop makes and calls nothing."""
    if values.known(test) is not None:
        return True
    for node in ast.walk(test):
        if isinstance(node, ast.Name | ast.Attribute) and last_name(node) in made:
            return False
        if isinstance(node, ast.Call) and last_name(node.func) not in ("len", "int", "min", "max"):
            return False
    return True


def _ends(body: list[ast.stmt]) -> bool:
    return isinstance(body[-1], ast.Raise | ast.Return)


def _is_skipped(values: Values, outer: ast.AST, step: ast.AST, scope: ast.AST) -> bool:
    """Whether gradients of this scope are formed where a condition skips the step."""
    if isinstance(outer, ast.If) and values.known(outer.test) is True:
        return False
    body = branch(values.script, outer, step)
    formed = [
        call
        for call, _ in values.script.method_calls("backward")
        if values.script.scope_of(call) is scope
    ]
    return not formed or any(
        outer not in values.script.above(call) or branch(values.script, outer, call) != body
        for call in formed
    )


def _continue_between(script: Script, loop: ast.AST, step: ast.Call) -> ast.AST | None:
    """A ``continue`` of the step's loop after gradients are formed and before the step."""
    formed = [
        call.lineno for call, _ in script.method_calls("backward") if loop in script.above(call)
    ]
    for node in ast.walk(loop):
        if isinstance(node, ast.Continue) and any(
            line < node.lineno < step.lineno for line in formed
        ):
            return node
    return None


def _optimises(step: ast.AST) -> bool:
    """Whether a call of ``step``, or a method of this name, may be an optimiser's.

    It is not if its object is named otherwise, or is told the noise, as an accountant is.
    """
    if isinstance(step, ast.Call) and "noise_multiplier" in keywords_of(step):
        return False
    function = getattr(step, "func", step)
    name = (last_name(getattr(function, "value", step)) or "").lower()
    return not any(part in name for part in OTHER_STEPS) or "optim" in name


def around(values: Values, node: ast.AST, depth: int = 0) -> Passes:
    """The loops around ``node``, out to the module, through the calls of each function.

    Raises ``Unreadable``.
    """
    count, is_epochs, line = 1.0, False, getattr(node, "lineno", 0)
    if depth > 20:
        raise Unreadable(node, "its calls are recursive")
    for outer in values.script.above(node):
        match outer:
            case ast.While():
                raise Unreadable(
                    outer, "the number of iterations of this loop cannot be determined"
                )
            case ast.For() | ast.AsyncFor():
                times = _times(values, outer.iter)
                line = outer.lineno
                if times is None and is_epochs:
                    raise Unreadable(outer, "loops over loaders are nested")
                is_epochs = is_epochs or times is None
                count *= 1 if times is None else times
            case ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
                raise Unreadable(outer, "a comprehension steps the optimiser")
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda():
                called = _calls(values, outer)
                rest = around(values, called, depth + 1)
                if rest.is_epochs and is_epochs:
                    raise Unreadable(outer, "loops over loaders are nested")
                whole = count * rest.count
                line = rest.line if rest.count != 1 else line
                return Passes(count=whole, is_epochs=is_epochs or rest.is_epochs, line=line)
    return Passes(count=count, is_epochs=is_epochs, line=line)


def at_least(
    values: Values, node: ast.AST, passes: float | None, depth: int = 0
) -> tuple[float | None, ast.AST | None]:
    """The passes that the loops around ``node`` make at least, and what may repeat them.

    How often that runs is not settled: a loop, or what a function is passed on to. The innermost
    loop that is not counted is a pass.
    """
    repeats: ast.AST | None = None
    for outer in values.script.above(node):
        if isinstance(outer, ast.For):
            try:
                times = _times(values, outer.iter)
            except Unreadable:
                times = None
            ends = any(isinstance(inner, ast.Break | ast.Return) for inner in ast.walk(outer))
            if times is not None and passes is not None and not ends:
                passes *= times
            elif times is None and passes is not None and passes > 1:
                repeats = repeats or outer
            elif times is None:
                passes = 1
        elif isinstance(outer, REPEATING) and passes is not None and passes > 1:
            repeats = repeats or outer
        elif isinstance(outer, ast.FunctionDef | ast.Lambda) and depth < 20:
            places = _places(values, outer)
            if places:
                counts = [at_least(values, place, passes, depth + 1) for place in places]
                passes = sum(count for count, _ in counts if count is not None) or None
                repeats = next((further for _, further in counts if further), repeats)
            elif passes is not None and passes > 1:
                repeats = repeats or _passed_to_a_call(values, outer)
            break
    return passes, repeats


def _passed_to_a_call(values: Values, function: ast.FunctionDef | ast.Lambda) -> ast.AST | None:
    """Where a function is not called but handed over, as to ``study.optimize``, ``map``, ``spawn``.

    How often it runs is then settled elsewhere.
    """
    script = values.script
    uses = [function] if isinstance(function, ast.Lambda) else script.uses(function)
    return next(
        (
            use
            for use in uses
            if getattr(script.parents[use], "func", None) is not use and not values.runs_once(use)
        ),
        None,
    )


def is_whole_pass(values: Values, step: ast.AST) -> bool:
    """Whether the loops around ``step`` in its function go to the end of the private loader."""
    goes_over = False
    for outer in values.script.above(step):
        if isinstance(outer, ast.FunctionDef):
            break
        if isinstance(outer, ast.For):
            if any(isinstance(inner, ast.Break | ast.Return) for inner in ast.walk(outer)):
                return False
            with suppress(Unreadable):
                goes_over = goes_over or _times(values, outer.iter) is None
    return goes_over


def _places(values: Values, function: ast.AST) -> list[ast.AST]:
    """Calls of a function that all run: its only one, or several that exclude no other."""
    try:
        only = _calls(values, function)
    except Unreadable:
        calls = values.known_calls(function)
        pairs = itertools.combinations(calls, 2)
        inside = all(call in values.script.parents for call in calls)
        if not inside or any(exclude_each_other(values.script, *pair) for pair in pairs):
            return []
        return [call for call in calls if not is_left_out(values, call)]
    return [] if only is function else [only]


def _calls(values: Values, function: ast.AST) -> ast.AST:
    """The only call of a function; raises ``Unreadable``."""
    name = getattr(function, "name", "a lambda")
    decorators = getattr(function, "decorator_list", [])
    if any(
        last_name(getattr(item, "func", item)) not in NAMES["plain_decorators"]
        for item in decorators
    ):
        raise Unreadable(function, f"{name} is decorated")
    calls = values.calls_of(function) if not isinstance(function, ast.Lambda) else []
    if decorators and not calls:
        return function  # its decorator runs it, as Flower's app.main() does
    if len(calls) != 1:
        how = f"{len(calls)} calls of {name} are" if calls else f"no call of {name} is"
        raise Unreadable(function, f"{how} in this file")
    # A call that app.run(main) stands for has no place of its own.
    return calls[0] if calls[0] in values.script.parents else calls[0].func


def _times(values: Values, iterable: ast.expr) -> float | None:
    """How often a loop runs; None if it goes over the private loader once."""
    match iterable:
        case ast.Call(func=function, args=[first, *rest]) if last_name(function) in LOOPED:
            _require_own_name(values, function)
            if last_name(function) in ("range", "trange"):
                counted = values.script.value_of(first) if isinstance(first, ast.Name) else first
                match counted, rest:
                    case ast.Call(func=ast.Name(id="len"), args=[loader]), []:
                        if is_private_loader(values, loader):
                            return None
                return _length(values, iterable, [first, *rest])
            return _times(values, first)
        case ast.Call(func=ast.Name(id="zip"), args=parts):  # as long as the shortest
            _require_own_name(values, iterable.func)
            own = [part for part in parts if is_private_loader(values, part)]
            if len(own) == 1 == sum(reads_records(values, part) for part in parts):
                return None
        case ast.List(elts=items) | ast.Tuple(elts=items):
            if not any(isinstance(item, ast.Starred) for item in items):
                return len(items)
        case ast.Name() | ast.Attribute():
            if is_private_loader(values, iterable):
                return None
            made = _bound_value(values, iterable)
            if isinstance(made, ast.Call) or _is_only_looped_over(made, values, iterable):
                return _times(values, made)
    raise Unreadable(iterable, f"what {text_of(iterable)} goes over is not settled")


def _require_own_name(values: Values, function: ast.expr) -> None:
    """Refuse a ``tqdm`` that the file itself defines, and a ``range`` that it binds at all."""
    root, own = root_of(function), last_name(function) in ("range", "enumerate")
    bindings = values.script.bindings_of(root) if isinstance(root, ast.Name) else [None]
    if any(own or not isinstance(getattr(item, "node", None), ast.alias) for item in bindings):
        raise Unreadable(function, f"{text_of(function)} may not be what its name says")


def is_private_loader(values: Values, node: ast.expr) -> bool:
    """Whether a name is the loader of the private training, and nothing else."""
    if values.plain_loaders:
        return _is_plain_loader(values, node, 0)
    return is_returned(values, node, -1)


def is_returned(values: Values, node: ast.expr, place: int, depth: int = 0) -> bool:
    """Whether a name or attribute is what the private call returns at a place, and nothing else."""
    statement, script = values.ignored, values.script
    if not isinstance(statement, ast.Assign) or depth > 20:
        return False
    binding = None
    if isinstance(node, ast.Attribute):
        targets: list[ast.AST] = [*script.stored_attributes.get(node.attr, [])]
    else:
        bindings = script.bindings_of(node) if isinstance(node, ast.Name) else []
        targets = [item.node for item in bindings]
        binding = bindings[0] if len(bindings) == 1 else None
    own = [target for target in targets if values.is_rebound(target)]
    if own:
        return any(_stands_at(script, target, place) for target in own) and all(
            target in own or getattr(target, "lineno", 0) < statement.lineno for target in targets
        )
    if isinstance(node, ast.Attribute):
        made = assigned_to(script, targets[0]) if len(targets) == 1 else None
        return isinstance(made, ast.Name) and is_returned(values, made, place, depth + 1)
    outer = None if binding is None else script.parents[binding.node]
    if isinstance(outer, ast.withitem) and isinstance(outer.context_expr, ast.Call):
        manager = outer.context_expr
        loader = keywords_of(manager).get("data_loader")
        named = last_name(manager.func) == "BatchMemoryManager"
        return named and loader is not None and is_returned(values, loader, place, depth + 1)
    if binding is None or not isinstance(binding.node, ast.arg) or not isinstance(node, ast.Name):
        return False
    passed = values.passed_to(node, binding.node)
    return bool(passed) and all(is_returned(values, item, place, depth + 1) for item in passed)


def _stands_at(script: Script, target: ast.AST, place: int) -> bool:
    """Whether a private call returns what is at a place for this target."""
    outer = script.parents[target]
    return not isinstance(outer, ast.Tuple) or (
        len(outer.elts) > place and outer.elts[place] is target
    )


def _is_plain_loader(values: Values, node: ast.expr, depth: int) -> bool:
    """Whether a name is bound to a ``DataLoader`` alone, here or by what calls this function."""
    binding = values.script.binding_of(node)
    if binding is None or not isinstance(node, ast.Name):
        return False
    if isinstance(binding.node, ast.arg):
        passed = values.passed_to(node, binding.node)
        return bool(passed) and all(_is_plain_loader(values, item, depth + 1) for item in passed)
    made = None if binding.value is None else values.returned(binding.value)
    if isinstance(made, ast.Name) and depth <= 20:
        return _is_plain_loader(values, made, depth + 1)
    return isinstance(made, ast.Call) and last_name(made.func) == "DataLoader"


def _bound_value(values: Values, name: ast.expr) -> ast.expr | None:
    """What a name is bound to alone."""
    binding = values.script.binding_of(name)
    if binding is None:
        return None
    match values.script.parents[binding.node]:
        case ast.withitem(context_expr=ast.Call() as bar) if last_name(bar.func) in WRAPPERS:
            return bar  # a progress bar is what it opens
    return binding.value


def _is_only_looped_over(
    made: ast.expr | None, values: Values, name: ast.expr
) -> TypeGuard[ast.expr]:
    """Whether a name is bound to a list that is written out, and that nothing can lengthen."""
    script = values.script
    return (
        isinstance(made, ast.List | ast.Tuple)
        and isinstance(name, ast.Name)
        and len(getattr(script.parents[made], "targets", ())) == 1
        and script.dynamic is None
        and all(
            getattr(script.parents[node], "iter", None) is node
            or (isinstance(made, ast.Tuple) and isinstance(script.parents[node], ast.Call))
            for node in script.reads_of(name.id)
        )
    )


def _length(values: Values, call: ast.expr, arguments: list[ast.expr]) -> float:
    numbers = [values.of(argument) for argument in arguments]
    if not numbers or not all(isinstance(number, int) for number in numbers):
        raise Unreadable(call, "the ends of the range are not whole numbers")
    try:
        return float(len(range(*numbers)))
    except (ValueError, OverflowError) as error:
        raise Unreadable(call, f"it fails: {error}") from None
