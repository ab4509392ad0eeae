"""Follow what a private call returns: an engine, an optimiser, a loader.

``make_private`` returns new objects. A script that steps its original optimiser trains without
noise; one that iterates its original loader draws no Poisson lots.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from functools import cached_property

from affidavit.importers.libraries import FAULTS
from affidavit.importers.names import NAMES
from affidavit.importers.partial_plan import BrokenObligation
from affidavit.importers.scripts.conditions import branch, exclude_each_other
from affidavit.importers.scripts.data_flow import (
    Tainted,
    find_lot,
    is_private_loader,
    reads_records,
    taint_at,
    unwrap_iterable,
)
from affidavit.importers.scripts.record_isolation import (
    KERAS,
    Lot,
    find_other_learners,
    loss_statements,
    reads_tainted_content,
    training_lots,
)
from affidavit.importers.scripts.step_count import enclosing_loops, optimizer_steps
from affidavit.importers.scripts.syntax import Binding, Script, assigned_to, keywords_of, last_name
from affidavit.importers.scripts.values import Evaluator

PARAMETER_METHODS = NAMES["weights"][:2]


def is_result_unused(script: Script, call: ast.Call) -> bool:
    """Whether nothing reads the name that the result of a call is bound to."""
    statement = script.parents[call]
    if not isinstance(statement, ast.Assign) or not isinstance(statement.targets[0], ast.Name):
        return False
    name, scope = statement.targets[0].id, script.scope_of(statement)
    block = script.parents[statement]
    side = branch(script, block, statement)
    others = [
        _line(item)
        for item in script.bindings[(scope, name)]
        if _line(item) > statement.lineno and script.scope_of(item.node) is scope
        and script.parents.get(script.parents[item.node]) is block
        and branch(script, block, item.node) == side
    ]  # fmt: skip
    return not any(
        script.scope_of(node) is not scope or not any(line < node.lineno for line in others)
        for node in script.reads_of(name)
    )


def is_model_compiled_elsewhere(script: Script, call: ast.Call) -> bool:
    """Whether every model is last compiled with another optimiser than the private one.

    Private models, and private settings, are compiled with a plain optimiser.
    """
    if (last_name(call.func) or "").endswith(("Model", "Sequential", "Config")):
        return False
    targets = {last_name(target) for target in getattr(script.parents[call], "targets", ())}
    compiled = {
        last_name(owner): keywords_of(node).get("optimizer") or next(iter(node.args), None)
        for node, owner in script.method_calls("compile")
        if not exclude_each_other(script, call, node)
    }
    return bool(compiled) and all(
        isinstance(item, ast.Constant)
        or (isinstance(item, ast.Call) and script.comes_from(item.func, KERAS) and item is not call)
        or (
            isinstance(item, ast.Name) and bool(targets) and _is_plain_optimizer(script, item, call)
        )
        for item in compiled.values()
    )


def _is_plain_optimizer(script: Script, name: ast.Name, call: ast.Call) -> bool:
    """Whether a name is only bound to Keras' own optimisers."""
    bindings = script.bindings_of(name)
    return bool(bindings) and all(
        isinstance(item.value, ast.Call)
        and item.value is not call
        and script.comes_from(item.value.func, KERAS)
        for item in bindings
    )


def is_engine_attached_elsewhere(values: Evaluator, call: ast.Call) -> bool:
    """Whether a step that learns from a lot is not of an optimiser with an engine attached."""
    script = values.script
    attached = [last_name(item.args[0]) for item, _ in script.method_calls("attach") if item.args]
    steps = [
        item.func.value for item in optimizer_steps(values) if isinstance(item.func, ast.Attribute)
    ]
    scope = script.scope_of(call)
    own = steps and all(isinstance(s, ast.Name) and script.scope_of(s) is scope for s in steps)
    if attached and any(
        last_name(getattr(step.func, "value", step)) in attached
        and last_name(getattr(other.func, "value", other)) not in attached
        for step, other in find_other_learners(values)
    ):
        return True
    return bool(attached and own) and not {last_name(step) for step in steps} & set(attached)


def find_update_beside(values: Evaluator) -> ast.AST | None:
    """Find what updates the parameters from a lot, beside the private updates of JAX."""
    for step in values.updates:
        lot = find_lot(values, step, reads_tainted_content)
        at = {} if lot is None else taint_at(values, step, lot[1], reads_tainted_content, lot[2])
        moved = {
            last_name(target)
            for node in at
            if isinstance(node, ast.Assign)
            and any(
                call in values.updates or last_name(call.func) == "apply_updates"
                for call in ast.walk(node.value)
                if isinstance(call, ast.Call)
            )
            for target in node.targets
        }
        for node, seen in at.items():
            call = node.value if isinstance(node, ast.Expr) else None
            if (
                isinstance(call, ast.Call)
                and call not in values.updates
                and last_name(call.func) in ("apply_gradients", "minimize", "assign_sub")
                and any(reads_tainted_content(arg, seen) for arg in call.args)
            ) or (
                isinstance(node, ast.Assign)
                and values.script.parents.get(step) is not node
                and reads_tainted_content(node.value, seen - moved)
                and any(last_name(target) in moved - {None} for target in node.targets)
            ):
                return node
    return None


class PrivateObjects:
    """The module, optimiser and loader that a private call takes and returns."""

    def __init__(self, values: Evaluator, arguments: dict[str, ast.expr]) -> None:
        self.values, self.script = values, values.script
        self.call = getattr(values.private_statement, "value", None)
        self.optimizer, self.loader = arguments.get("optimizer"), arguments.get("data_loader")
        self.module = arguments.get("module")
        self.names: list[ast.expr] = []
        match values.private_statement:
            case ast.Assign(targets=[ast.Tuple(elts=names)]) if len(names) in (3, 4):
                self.names = names

    def faults(self) -> Iterator[BrokenObligation]:
        """Yield the obligations that the script breaks with these objects."""
        steps = optimizer_steps(self.values)
        if not self.names or not (steps or self._is_for_a_trainer()):
            return
        if (
            self._is_unused(self.names[1])
            or any(
                isinstance(step.func, ast.Attribute)
                and (
                    self._is_original(step.func.value, self.optimizer)
                    or self._moves_the_module(step.func.value)
                )
                for step in steps
            )
            or any(_steps_by_gradient(self.script, node) for node in self.script.nodes)
            or any(map(self._moves_the_module, self._handed_over()))
            or any(map(self._tunes_the_module, training_lots(self.values)))
            or any(map(self._tunes_a_copy, steps))
            or any(
                self._is_private(step) and self.is_of_another(other)
                for step, other in find_other_learners(self.values)
            )
        ):
            yield FAULTS["other_optimizer"]
        drawn = any(last_name(node) in NAMES["poisson_data_modules"] for node in self.script.nodes)
        if (self._is_unused(self.names[-1]) and not drawn) or any(
            self._is_original(unwrap_iterable(loop.iter), self.loader)
            for step in steps
            for loop in enclosing_loops(self.values, step)
            if isinstance(loop, ast.For)
        ):
            yield FAULTS["other_loader"]

    def _tunes_the_module(self, lot: Lot) -> bool:
        """Whether another optimiser trains the private module on the private loader."""
        step, loop, at = lot
        if step is None:
            return False
        beside = (
            item for item in optimizer_steps(self.values) if loop in self.script.ancestors(item)
        )
        if not (self.is_of_another(step) and isinstance(loop, ast.For)) or any(
            map(self._is_private, beside)
        ):
            return False
        module: Tainted = {last_name(self.names[0]) or ""}
        return is_private_loader(self.values, unwrap_iterable(loop.iter)) and any(
            reads_tainted_content(statement, module) for statement in loss_statements(loop, at)
        )

    def _tunes_a_copy(self, step: ast.Call) -> bool:
        """Whether another optimiser trains a copy of the private module on its records."""
        loops = [loop for loop in enclosing_loops(self.values, step) if isinstance(loop, ast.For)]
        own = any(reads_records(self.values, unwrap_iterable(loop.iter)) for loop in loops)
        binding = self.script.binding_of(getattr(step.func, "value", step))
        made = None if binding is None else binding.value
        return own and self.is_of_another(step) and self._is_given(made, self._copies)

    @cached_property
    def _copies(self) -> set[object]:
        """Places of names that hold the private module or its weights."""
        script = self.script

        def places_in(nodes: Sequence[ast.AST]) -> set[object]:
            parts = (part for node in nodes for part in ast.walk(node))
            named = (part for part in parts if isinstance(part, ast.Name | ast.Attribute))
            return {place for part in named for place in self._places(part)}

        moves = [(places_in(node.targets), places_in([node.value]))
                 for node in script.nodes if isinstance(node, ast.Assign)]  # fmt: skip
        loads = script.method_calls("load_state_dict")
        moves += [(places_in([owner]), places_in(call.args)) for call, owner in loads]
        places, before = places_in(self.names[:1]), 0
        while len(places) > before:
            before = len(places)
            for targets, sources in moves:
                places |= set() if places.isdisjoint(sources) else targets
        return places

    def _is_private(self, step: ast.Call) -> bool:
        """Whether a step is of the optimiser that the private call returns."""
        owner = step.func.value if isinstance(step.func, ast.Attribute) else step
        named = isinstance(owner, ast.Name) and owner.id == last_name(self.names[1])
        return named or any(map(self.values.is_set_by_private_call, self._bound(owner)))

    def is_of_another(self, step: ast.Call) -> bool:
        """Whether a step is certainly of another optimiser than the private one."""
        if not self.names:
            return False
        owner = step.func.value if isinstance(step.func, ast.Attribute) else step
        made = [getattr(self.script.parents[node], "value", None) for node in self._bound(owner)]
        private = last_name(self.names[1])
        return bool(made) and all(
            isinstance(item, ast.Call)
            and item is not self.call
            and not any(last_name(part) == private for part in ast.walk(item))
            for item in made
        )

    def _bound(self, owner: ast.expr, seen: frozenset[ast.AST] = frozenset()) -> list[ast.AST]:
        """Return where a name or attribute gets its value, also in callers of its function."""
        if isinstance(owner, ast.Attribute):
            return list(self.script.stored_attributes.get(owner.attr, ()))
        bindings = self.script.bindings_of(owner) if isinstance(owner, ast.Name) else []
        places: list[ast.AST] = []
        for item in bindings:
            if item.node in seen:
                continue
            if isinstance(item.node, ast.arg) and isinstance(owner, ast.Name):
                for argument in self.values.known_arguments(owner, item.node):
                    places += self._bound(argument, seen | {item.node})
            else:
                places.append(item.node)
        return places

    def _moves_the_module(self, node: ast.expr) -> bool:
        """Whether ``node`` is an optimiser of the private module that is not the private one."""
        own = self.optimizer is not None and last_name(self.optimizer) == last_name(node)
        stores = self.script.stored_attributes.get(getattr(node, "attr", ""), [])
        binding = self.script.binding_of(node)
        made = binding.value if binding is not None and not own else node
        made = assigned_to(self.script, stores[0]) if len(stores) == 1 and not own else made
        modules = [item for item in (self.module, self.names[0]) if item is not None]
        return self._is_given(made, {place for item in modules for place in self._places(item)})

    def _is_given(self, made: ast.expr | None, places: set[object]) -> bool:
        """Whether an optimiser receives parameters of an object at one of these places."""
        return isinstance(made, ast.Call) and any(
            last_name(part) in PARAMETER_METHODS and not places.isdisjoint(self._owners(part.value))
            for part in ast.walk(made)
            if isinstance(part, ast.Attribute)
        )

    def _places(self, node: ast.expr) -> list[object]:
        """Return where a name or attribute gets its value, else where it is looked up."""
        places: list[object] = [*self._bound(node)]
        if places or not isinstance(node, ast.Name):
            return places
        return [(node.id, self.script.resolve(node.id, self.script.scope_of(node))[0])]

    def _owners(self, node: ast.expr) -> Iterator[object]:
        """Yield the places of an expression and of the objects that it is part of."""
        yield from self._places(node)
        if isinstance(node, ast.Attribute | ast.Subscript):
            yield from self._owners(node.value)

    def _handed_over(self) -> Iterator[ast.expr]:
        """Yield what ``configure_optimizers`` returns to a trainer."""
        scope: ast.AST = self.script.scope_of(self.names[0])
        hands_over = getattr(scope, "name", "") == "configure_optimizers"
        for node in ast.walk(scope) if hands_over else ():
            if isinstance(node, ast.Return) and node.value is not None:
                yield from (p for p in ast.walk(node.value) if isinstance(p, ast.Name | ast.Call))

    def _is_for_a_trainer(self) -> bool:
        """Whether a trainer, such as Lightning's, runs the steps."""
        around = (
            self.script.ancestors(self.values.private_statement)
            if self.values.private_statement
            else ()
        )
        named = (getattr(outer, "name", None) for outer in around)
        calls = (last_name(call.func) or "" for call in self.script.calls)
        return "configure_optimizers" in named or any(
            name == "fit" or "Trainer" in name for name in calls
        )

    def _is_unused(self, name: ast.expr) -> bool:
        """Whether nothing in the file reads a name that the private call returns."""
        if isinstance(name, ast.Attribute) and not optimizer_steps(self.values):
            uses = (node for node in self.script.nodes if isinstance(node, ast.Attribute))
            return not any(n.attr == name.attr and isinstance(n.ctx, ast.Load) for n in uses)
        return isinstance(name, ast.Name) and all(
            map(self.values.is_set_by_private_call, self.script.reads_of(name.id))
        )

    def _is_original(self, node: ast.expr, original: ast.expr | None, depth: int = 0) -> bool:
        """Whether ``node`` is an argument of the private call, or replaced after it."""
        if isinstance(node, ast.Attribute):
            stores = self.script.stored_attributes.get(node.attr, [])
            own = isinstance(original, ast.Attribute) and original.attr == node.attr
            made = assigned_to(self.script, stores[0]) if len(stores) == 1 and not own else None
            if isinstance(made, ast.Name) and depth <= 20:
                return self._is_original(made, original, depth + 1)
            return node.attr == "original_optimizer" or (
                own and not any(map(self._gets_returned, stores))
            )
        if not isinstance(node, ast.Name) or depth > 20:
            return False
        scope, bindings = self.script.resolve(node.id, self.script.scope_of(node))
        if scope is self.script.scope_of(node):
            bindings = [item for item in bindings if _line(item) < node.lineno] or bindings
        private = [item for item in bindings if self.values.is_set_by_private_call(item.node)]
        later = [item for item in bindings if private and self._follows(item, private[-1])]
        if later:
            return self._is_other(node.id, later[-1].value, original, depth)
        if private:
            return False
        if isinstance(original, ast.Name):
            other_scope, _ = self.script.resolve(original.id, self.script.scope_of(original))
            if (other_scope, original.id) == (scope, node.id):
                return True
        if len(bindings) != 1:
            return False
        if isinstance(bindings[0].node, ast.arg):
            passed = self.values.known_arguments(node, bindings[0].node)
            return any(
                self._is_original(item, original, depth + 1)
                for item in passed
                if not exclude_each_other(self.script, self.names[0], item)
            )
        opened = getattr(self.script.parents[bindings[0].node], "context_expr", None)
        value = unwrap_iterable(opened) if opened is not None else bindings[0].value
        return isinstance(value, ast.Name | ast.Attribute) and self._is_original(
            value, original, depth + 1
        )

    def _gets_returned(self, store: ast.AST) -> bool:
        """Whether an attribute is set to an object that the private call returned."""
        returned = {last_name(name) for name in self.names}
        value = getattr(self.script.parents[store], "value", None)
        named = isinstance(value, ast.Name) and value.id in returned
        return named or self.values.is_set_by_private_call(store)

    def _is_other(
        self, name: str, value: ast.expr | None, original: ast.expr | None, depth: int
    ) -> bool:
        """Whether a name of a returned object is later bound to a different object."""
        if isinstance(value, ast.Call):
            owner = value.func.value if isinstance(value.func, ast.Attribute) else value.func
            given_to = [*value.args, *keywords_of(value).values(), owner]
            return not any(_is_same_object(item, name) for item in given_to)
        return value is not None and self._is_original(value, original, depth + 1)

    def _follows(self, item: Binding, private: Binding) -> bool:
        """Whether a binding comes after the private one, in a compatible branch."""
        around = set(self.script.ancestors(private.node))
        return _line(item) > _line(private) and not any(
            isinstance(outer, ast.If | ast.Try)
            and outer in around
            and branch(self.script, outer, item.node) != branch(self.script, outer, private.node)
            for outer in self.script.ancestors(item.node)
        )


def _is_same_object(node: ast.expr, name: str) -> bool:
    """Whether a wrapper receives the named object, or is a method of it."""
    while isinstance(node, ast.Starred | ast.Call):
        node = node.value if isinstance(node, ast.Starred) else next(iter(node.args), node.func)
    return last_name(node) == name or (
        isinstance(node, ast.Attribute) and node.attr == "batch_sampler"
    )


def _steps_by_gradient(script: Script, node: ast.AST) -> bool:
    """Whether a statement updates something by a gradient, as an optimiser would."""
    match node:
        case ast.Call(func=ast.Attribute(attr="grad") as function, args=[_, of, *_]):
            weights = [of, *([script.value_of(of)] if isinstance(of, ast.Name) else [])]
            return script.comes_from(function, ("torch",)) and any(
                isinstance(part, ast.Attribute) and part.attr in PARAMETER_METHODS
                for item in weights if item is not None for part in ast.walk(item)
            )  # fmt: skip
        case ast.AugAssign(target=target, value=value):
            parts = [value]
        case ast.Assign(targets=[ast.Attribute(attr="data") as target], value=value):
            parts = [value]
        case ast.Call(func=ast.Attribute(attr=name), args=[target, *parts]) if name.startswith(
            "_foreach_"
        ):
            pass
        case ast.Call(func=ast.Attribute(value=target, attr=name), args=parts) if name.endswith(
            "_"
        ):
            pass
        case _:
            return False
    return not _is_gradient(script, target) and any(
        _is_gradient(script, item) for part in parts for item in ast.walk(part)
    )


def _is_gradient(script: Script, node: ast.AST) -> bool:
    """Whether an expression is a gradient, or a name of one."""
    while isinstance(node, ast.Attribute) and node.attr == "data":
        node = node.value
    if isinstance(node, ast.ListComp):
        node = node.elt
    made = script.value_of(node) if isinstance(node, ast.Name) else node
    return isinstance(made, ast.Attribute) and made.attr in NAMES["gradients"]


def _line(item: Binding) -> int:
    return getattr(item.node, "lineno", 0)
