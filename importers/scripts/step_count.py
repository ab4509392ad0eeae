"""Count how often a script steps its private optimiser, from the loops around ``optimizer.step()``.

A loop over a loader is one pass over the data. What cannot be followed is an open question.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any, Literal

from affidavit.importers.names import NAMES
from affidavit.importers.scripts.syntax import FUNCTIONS, Script, keywords_of, last_name, root_of
from affidavit.importers.scripts.values import Evaluator, Unreadable, is_left_out, source_text

WRAPPERS = frozenset({"tqdm", "trange", "enumerate", "track", "notebook_tqdm"})
COUNTED_ITERABLES = WRAPPERS | {"range"}
MAX_DEPTH = 5
Passes = tuple[Literal["epochs", "steps"], float, int]
"""Passes over the data, or steps if no loop iterates a loader, their number, and its line."""


class UnreadNumber(Unreadable):
    """Only a number is not in the text: the turns of the one loop around a pass."""


def count_passes(values: Evaluator) -> Passes:
    """Count the passes that the script makes; raises ``Unreadable``."""
    script = values.script
    for node in script.nodes:
        names = ("step", "train_step", "fit")
        if isinstance(node, ast.Attribute) and node.attr in names and not _counts(script, node):
            called = getattr(script.parents[node], "func", None) is node
            counts = called if node.attr == "step" else node.attr in script.functions
            step = script.parents[node] if called else node
            if not (counts or fits_alone(script, node)) and may_be_optimizer_step(script, step):
                raise Unreadable(node, "training may also step elsewhere")
    others = {*values.other_steps, *values.updates}
    steps = [step for step in optimizer_steps(values) if step not in others]
    if len(steps) == 1:
        return passes_around(values, steps[0])
    lines = ", ".join(str(step.lineno) for step in steps)
    several = f"step() is called in several places (lines {lines})"
    why = several if steps else "no step of the private optimiser is in this file"
    raise Unreadable([*steps, script.tree][0], why)


def _counts(script: Script, node: ast.Attribute) -> bool:
    """Whether an attribute of ``self`` only holds numbers, as in ``self.step += 1``."""
    holders = [script.parents[item] for item in script.stored_attributes.get(node.attr, ())]
    numbers = (isinstance(getattr(item, "value", None), ast.Constant) for item in holders)
    return last_name(node.value) == "self" and bool(holders) and all(numbers)


def find_resumed_run(values: Evaluator) -> ast.AST | None:
    """Find what resumes an earlier run, whose steps count too."""
    for node in values.script.nodes:
        counts = False
        match node:
            case ast.Attribute(attr="load_checkpoint" | "load_state"):
                counts = True
            case ast.Attribute(attr="load_state_dict", value=owner):
                name = (last_name(owner) or "").lower()
                counts = name == "accountant" or "optim" in name
            case ast.keyword(arg="resume_from_checkpoint" | "ckpt_path", value=value):
                call = getattr(values.script.parents[node], "func", node)
                counts = last_name(call) in ("fit", "train") and bool(values.known_value(value))
        if counts and not is_left_out(values, node):
            return node
    return None


def optimizer_steps(values: Evaluator) -> list[ast.Call]:
    """Return the calls that step an optimiser, or that apply private updates."""
    script = values.script
    steps = [
        call for call, owner in script.method_calls("step") if may_be_optimizer_step(script, call)
        and not is_left_out(values, call)
        and not ("step" in script.functions and getattr(owner, "id", "") == "self")
    ]  # fmt: skip
    return [*steps, *values.updates]


def enclosing_loops(
    values: Evaluator, node: ast.AST, depth: int = 0
) -> Iterator[ast.For | ast.While]:
    """Yield the loops around a node and around the calls of its function."""
    for outer in values.script.ancestors(node):
        if isinstance(outer, ast.For | ast.While):
            yield outer
        elif isinstance(outer, ast.FunctionDef) and depth < 5:
            for call in values.attempt(values.calls_of, outer) or ():
                if call in values.script.parents:
                    yield from enclosing_loops(values, call, depth + 1)


def unwrap_iterable(node: ast.expr) -> ast.expr:
    """Strip ``enumerate``, ``iter`` and progress bars from an iterable."""
    while isinstance(node, ast.Call) and node.args and last_name(node.func) in (*WRAPPERS, "iter"):
        node = node.args[0]
    return node


def runs_once(values: Evaluator, iterable: ast.expr) -> bool:
    """Whether a loop has exactly one iteration."""
    return bool(values.attempt(_iterations, values, iterable) == 1)


def may_be_optimizer_step(script: Script, step: ast.AST) -> bool:
    """Whether a call of ``step`` may be an optimiser's, by what makes the object, or its name."""
    if isinstance(step, ast.Call) and "noise_multiplier" in keywords_of(step):
        return False
    function = getattr(step, "func", step)
    owner = getattr(function, "value", step)
    makers = set(_made_by(script, owner))
    if schedules := {o for o in makers if "lr_scheduler" in o or o.startswith("transformers.get_")}:
        return schedules != makers
    if any("make_private" in maker or ".optim." in maker for maker in makers):
        return True
    name = (last_name(owner) or "").lower()
    return not any(part in name for part in NAMES["other_steps"]) or "optim" in name


def fits_alone(script: Script, method: ast.AST) -> bool:
    """Whether a method is of a scaler, or another estimator that steps no optimiser."""
    owner: Any = getattr(method, "value", method)
    bound = script.bindings_of(owner) if isinstance(owner, ast.Name) else []
    made = [getattr(item.value, "func", owner) for item in bound] or [getattr(owner, "func", owner)]
    return {script.module_path(item).rpartition(".")[0] for item in made} <= {*NAMES["own_fits"]}


def _made_by(script: Script, owner: ast.AST, depth: int = 0) -> Iterator[str]:
    """Yield the functions that make what a name holds, also in the calls that pass it."""
    for item in script.bindings_of(owner) if isinstance(owner, ast.Name) else []:
        outer = script.parents[item.node]
        value = item.value or getattr(script.parents.get(outer), "value", None)
        own = script.function_of(value.func) if isinstance(value, ast.Call) else None
        for made in [value] if own is None else [end.value for end in script.returns_of(own)]:
            if isinstance(made, ast.Call):
                yield script.module_path(made.func) or last_name(made.func) or ""
        if isinstance(item.node, ast.arg) and depth < MAX_DEPTH:
            function = script.function_around(item.node)
            for call in script.calls_to(getattr(function, "name", "")):
                for key, passed in script.passed_arguments(function, call):
                    if key == item.node.arg:
                        yield from _made_by(script, passed, depth + 1)


def passes_around(values: Evaluator, node: ast.AST) -> Passes:
    """Count the turns around ``node``, through the calls of functions; raises ``Unreadable``."""
    count, is_epochs, line = 1.0, False, getattr(node, "lineno", 0)
    unread: list[tuple[ast.AST, UnreadNumber]] = []
    for outer in _around(values, node):
        match outer:
            case ast.While():
                raise Unreadable(outer, "how often this loop runs cannot be determined")
            case ast.For() | ast.AsyncFor():
                try:
                    times = _iterations(values, outer.iter)
                except UnreadNumber as reason:
                    unread.append((outer, reason))
                    continue
                line = outer.lineno
                if times is None and is_epochs:
                    raise Unreadable(outer, "loops over loaders are nested")
                is_epochs = is_epochs or times is None
                count *= 1 if times is None else times
            case ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
                raise Unreadable(outer, "a comprehension steps the optimiser")
    if len(unread) == 1 and count == 1:
        raise unread[0][1]
    for loop, unknown in unread:
        raise Unreadable(loop, f"{unknown.why}, and another loop repeats it")
    return "epochs" if is_epochs else "steps", count, line


def _around(values: Evaluator, node: ast.AST) -> Iterator[ast.AST]:
    """Yield what encloses a node, then what encloses the only call of its function, and so on."""
    for _ in range(20):
        for outer in values.script.ancestors(node):
            yield outer
            if isinstance(outer, FUNCTIONS):
                node = _only_call(values, outer)
                break
        else:
            return
    raise Unreadable(node, "its calls are recursive")


def _only_call(values: Evaluator, function: ast.AST) -> ast.AST:
    """Return the only call of a function; raises ``Unreadable``."""
    name = getattr(function, "name", "a lambda")
    decorators = getattr(function, "decorator_list", [])
    names = {last_name(getattr(item, "func", item)) for item in decorators}
    if not names <= {*NAMES["plain_decorators"]}:
        raise Unreadable(function, f"{name} is decorated")
    calls = values.calls_of(function) if not isinstance(function, ast.Lambda) else []
    calls = [call for call in calls if not is_left_out(values, call.func)]
    if decorators and not calls:
        return function  # its decorator runs it, as Flower's app.main() does
    if len(calls) != 1:
        how = f"{len(calls)} calls of {name} are" if calls else f"no call of {name} is"
        raise Unreadable(function, f"{how} in this file")
    # A call that app.run(main) stands for has no place of its own.
    return calls[0] if calls[0] in values.script.parents else calls[0].func


def _iterations(values: Evaluator, iterable: ast.expr) -> float | None:
    """Return the iterations of a loop, or None for one pass over the private loader."""
    match iterable:
        case ast.Call(function, [first, *rest]) if last_name(function) in COUNTED_ITERABLES:
            root, builtin = root_of(function), last_name(function) in ("range", "enumerate")
            places = values.script.places_of(root) if isinstance(root, ast.Name) else [root]
            if any(builtin or not isinstance(place, ast.alias) for place in places):
                raise Unreadable(function, f"{source_text(function)} may not be what its name says")
            if last_name(function) in ("range", "trange"):
                return _range_length(values, iterable, [first, *rest])
            return _iterations(values, first)
        case ast.List(elts=items) | ast.Tuple(elts=items):
            if not any(isinstance(item, ast.Starred) for item in items):
                return len(items)
        case ast.Name() | ast.Attribute():
            if values.is_private_loader(iterable):
                return None
            if (binding := values.script.binding_of(iterable)) is not None:
                # What ``with`` opens is a progress bar.
                opened = getattr(values.script.parents[binding.node], "context_expr", None)
                made = binding.value or opened
                if (isinstance(made, ast.Call) and last_name(made.func) in COUNTED_ITERABLES) or (
                    isinstance(made, ast.List | ast.Tuple) and _is_only_read(values, iterable)
                ):
                    return _iterations(values, made)
    raise Unreadable(iterable, f"the number of iterations over {source_text(iterable)} is unknown")


def _is_only_read(values: Evaluator, name: ast.Name | ast.Attribute) -> bool:
    """Whether a list is only iterated, indexed and passed to functions that change nothing."""
    around = [values.script.parents[read] for read in values.script.reads_of(last_name(name))]
    return isinstance(name, ast.Name) and all(
        isinstance(outer, ast.For | ast.comprehension)
        or (isinstance(outer, ast.Subscript) and isinstance(outer.ctx, ast.Load))
        or (isinstance(outer, ast.Call) and isinstance(outer.func, ast.Name)
            and outer.func.id in NAMES["reading_builtins"]
            and not values.script.bindings_of(outer.func))
        for outer in around
    )  # fmt: skip


def _range_length(values: Evaluator, call: ast.expr, arguments: list[ast.expr]) -> float:
    """Return the length of a ``range``; raises ``Unreadable``."""
    try:
        numbers = [values.evaluate(argument) for argument in arguments]
    except Unreadable as reason:
        raise UnreadNumber(reason.node, reason.why) from None
    return float(values.apply(call, lambda *parts: len(range(*parts)), numbers))
