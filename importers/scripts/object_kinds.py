"""Give each expression of a script the kinds of private objects that it may be.

Kinds are those of ``uses.toml``. A name, attribute, parameter or result has the kinds of all values
that may reach it. What a condition on records decides is a value of records too. What ``uses`` asks
about passes on the kinds that it has if nothing is wrong with it, so that it is asked about once.
"""

from __future__ import annotations

import ast
import builtins
from collections import defaultdict
from collections.abc import Iterator
from functools import cached_property
from typing import Any

from affidavit.importers.libraries import OPACUS, Library
from affidavit.importers.names import NAMES
from affidavit.importers.scripts.conditions import exclude_each_other
from affidavit.importers.scripts.record_sources import RecordSources
from affidavit.importers.scripts.row_kinds import (
    COUNTS,
    NOTHING,
    VALUE,
    Kinds,
    applied,
    arithmetic,
    as_value,
    computed,
    is_key,
    keeps_rows,
    loss_of,
    shape_of,
    size_at,
)
from affidavit.importers.scripts.step_count import enclosing_loops, optimizer_steps
from affidavit.importers.scripts.syntax import (
    LAYER_PACKAGES,
    Binding,
    keywords_of,
    last_name,
    names_in,
    unpacks,
)
from affidavit.importers.scripts.use_table import (
    HANDLES,
    SECRETS,
    Use,
    arguments_of,
    find_function,
    find_method,
)
from affidavit.importers.scripts.values import Evaluator, default_of

RETURNED = {3: ("model", "private", "lots"), 4: ("model", "private", "criterion", "lots")}
"""What Opacus' private call returns, in order."""
PLOTS = ("matplotlib", "seaborn")
MAX_PASSES = 30
MAX_JOINS = 12
MAX_DEPTH = 5
OF_LOTS = SECRETS - {"data", "lots"}


class ObjectKinds:
    """The kinds of the expressions of a script with one private call."""

    def __init__(
        self, values: Evaluator, library: Library, call: ast.Call, sources: RecordSources
    ) -> None:
        self.values, self.script, self.library, self.call = values, values.script, library, call
        self.bound: dict[ast.AST, Kinds] = defaultdict(frozenset)
        """The kinds of the value that each place gives a name or attribute, and of its parts."""
        self.held: dict[tuple[ast.AST, object], Kinds] = defaultdict(frozenset)
        """The kinds of what is put into the value that a place gets, by the name of the entry."""
        self.returned: dict[ast.AST, Kinds] = defaultdict(frozenset)
        """The kinds of what a function returns."""
        self.assumed = {node.id: frozenset({kind}) for key, kind in (
            ("module", "model"), ("optimizer", "optimizer"),
        ) if isinstance(node := keywords_of(call).get(key), ast.Name)}  # fmt: skip
        """The kinds of names that the script uses without setting them."""
        self.attached: set[tuple[ast.AST, str]] = set()
        """The names of optimisers that an engine makes private, with their scopes."""
        self.sources = sources
        self.joined: dict[ast.expr, int] = {}
        """What computes records of several, with the line that takes them. It is asked about, and
        so counts as one row for each record."""
        self.plots = any({*PLOTS, "pyplot"} & {*name.split(".")} for name in self.script.imported)
        self.assumed |= dict.fromkeys(sources.names, frozenset({"data"}))
        self.memo: dict[ast.AST, Kinds] = {}
        self.private = self.statement(values.private_statement or call)

    # ---- spreading -----------------------------------------------------------------------

    def spread(self) -> None:
        """Pass kinds on until nothing changes, and ask about what computes records together."""
        for _ in range(MAX_JOINS):
            for table in (self.bound, self.held, self.returned, self.attached):
                table.clear()
            for place in self.sources.places:
                self.bound[place] |= {"data"}
            self._give_parameters()
            self._spread()
            if not (joined := self._joined_records()):
                break
            self.joined |= joined
        tables = (self.bound, self.returned)
        if any("model" in kinds and kinds & SECRETS for of in tables for kinds in of.values()):
            # Before a value was known to be one of records, what it is computed with was passed on.
            for of in tables:
                of.update({place: kinds - {"model"} for place, kinds in of.items()})
            self._spread()

    def _spread(self) -> None:
        known = -1
        for _ in range(MAX_PASSES):
            self.memo.clear()
            for node in self.script.nodes:
                self._visit(node)
            tables = (self.bound, self.returned)
            now = len(self.attached) + sum(len(own) for table in tables for own in table.values())
            if now == known:
                break
            known = now
        self.memo.clear()

    def makes_records(self, call: ast.Call) -> bool:
        """Whether a call may make the records that it trains on, from what is given to it."""
        text = ast.unparse(self.statement(call)).lower()
        other = self.library is OPACUS and any(part in text for part in ("test", "val", "eval"))
        return not other or call in self._of_training

    @cached_property
    def _of_training(self) -> set[ast.AST]:
        """What the private call, and the loops around steps, are made of."""
        loops = (loop for step in optimizer_steps(self.values)
                 for loop in enclosing_loops(self.values, step))  # fmt: skip
        iterables = (loop.iter for loop in loops if isinstance(loop, ast.For))
        return set().union(*map(self.sources.made_of, (self.call, *iterables)))

    def _joined_records(self) -> dict[ast.expr, int]:
        """Return what computes values of several records that training takes as records."""
        joined, seen = dict[ast.expr, int](), set[ast.AST]()
        for call in filter(self.makes_records, self.script.calls):
            use = find_function(self.script, call)
            takes = last_name(call.func) in ("fit", "__init__") or (
                use is not None and "data" in use.gives
            )
            todo = [item for _, item in arguments_of(call)] if takes else []
            while todo:
                part = todo.pop()
                if part in seen or part in self.joined or "value" not in self.kinds(part):
                    continue
                seen.add(part)
                inputs = [item for item in self._inputs(part) if "value" in self.kinds(item)]
                todo += inputs
                if not inputs or self._joins(part, inputs):
                    joined[part] = call.lineno
        return joined

    def _joins(self, part: ast.expr, inputs: list[ast.expr]) -> bool:
        """Whether an expression gives a value of several records where its inputs are records."""
        if isinstance(part, ast.Name) or (isinstance(part, ast.Call) and self.functions(part.func)):
            return False
        known: dict[ast.AST, Kinds] = {item: self.memo[item] for item in inputs}
        self.memo |= {item: own - VALUE | {"data"} for item, own in known.items()}
        made = self._kinds(part)
        self.memo |= known
        return "value" in made

    def _inputs(self, part: ast.expr) -> Iterator[ast.expr]:
        """Yield what an expression is computed of, and decided by."""
        script, nodes = self.script, [*ast.iter_child_nodes(part)]
        method = getattr(part, "func", None)
        if isinstance(method, ast.Attribute):
            nodes[0] = method.value
        for place in script.places_of(part):
            nodes += [self.sources.value_at(place) or place, self.deciding(place) or place]
            if isinstance(place, ast.arg):
                calls = script.calls_to(getattr(script.function_around(place), "name", ""))
                nodes += [item for call in calls for _, item in arguments_of(call)]
        for use in script.reads_of(getattr(part, "id", None)):  # what is put into it
            outer = script.parents[use]
            call = script.parents[outer]
            if isinstance(outer, ast.Subscript) and isinstance(outer.ctx, ast.Store):
                nodes += [outer.slice, self.sources.value_at(outer) or outer]
            elif isinstance(call, ast.Call) and last_name(outer) in NAMES["mutators"]:
                nodes += call.args
        for function in self.functions(part.func) if isinstance(part, ast.Call) else ():
            for item in script.returns_of(function):
                nodes += [item.value or item, self.deciding(item) or item]
        return (node for node in nodes if isinstance(node, ast.expr))

    def statement(self, node: ast.AST) -> Any:
        """Return the innermost statement around a node, or the module."""
        around, kinds = (node, *self.script.ancestors(node)), ast.stmt | ast.Module
        return next(outer for outer in around if isinstance(outer, kinds))

    def _visit(self, node: ast.AST) -> None:
        """Pass on the kinds of one statement or call."""
        match node:
            case ast.Assign(targets=targets, value=value):
                for target in targets:
                    self._bind(target, self.kinds(value), value)
            case (
                ast.AnnAssign(target=target, value=ast.expr() as value)
                | ast.NamedExpr(target=target, value=value)
                | ast.withitem(context_expr=value, optional_vars=ast.expr() as target)
            ):
                self._bind(target, self.kinds(value), value)
            case ast.Subscript(value=base, ctx=ast.Del()):
                self._hold(base, self._decided(node))
            case ast.AugAssign(target=target, value=value):
                self._bind(target, computed(self.kinds(target), self.kinds(value)), None)
            case ast.For() | ast.comprehension():
                self._bind_elements(node.target, node.iter)
            case ast.Return(value=ast.expr() as value):
                self.returned[self.script.scope_of(node)] |= self.kinds(value) | self._decided(node)
            case ast.Call():
                self._pass_arguments(node)
            case ast.FunctionDef(args=spec) | ast.Lambda(args=spec):
                for arg in (*spec.posonlyargs, *spec.args, *spec.kwonlyargs):
                    if (default := default_of(node, arg.arg)) is not None:
                        self.bound[arg] |= self.kinds(default)

    def _decided(self, target: ast.AST) -> Kinds:
        return NOTHING if self.deciding(target) is None else VALUE

    def _bind(self, target: ast.expr, kinds: Kinds, value: ast.expr | None) -> None:
        match target:
            case ast.Name() | ast.Attribute():
                kinds = frozenset({"model"}) if self._is_passed_model(target) else kinds
                self.bound[target] |= kinds | self._decided(target)
            case ast.Subscript(value=base, slice=index):
                decided = VALUE if self.kinds(index) & SECRETS else self._decided(target)
                self._hold(base, items_of(kinds) | decided, _key_of(index))
            case ast.Starred(value=inner):
                self._bind(inner, kinds, None)
            case ast.Tuple(elts=targets) | ast.List(elts=targets):
                parts = self._parts(value, len(targets), kinds)
                rows = any(isinstance(item, ast.Starred) for item in targets)
                for item, part in zip(targets, parts, strict=True):
                    name = last_name(item) or ""
                    counts = name in NAMES["sizes"] or name.startswith(("n_", "num_"))
                    if value in self.sources.unread and counts:
                        continue
                    self._bind(item, as_value(part) if rows and "rows" in kinds else part, None)

    def _is_passed_model(self, target: ast.expr) -> bool:
        """Whether a call of another file, which is asked about, returns the model by its name."""
        call = self.sources.holder_of(target)[1]
        if not isinstance(call, ast.Call) or not self.script.is_imported(call.func):
            return False
        same = [o for _, o in arguments_of(call) if ast.unparse(o) == ast.unparse(target)]
        own = find_function(self.script, call) is not None
        return not own and any(self.kinds(item) == {"model"} for item in same)

    def _parts(self, value: ast.expr | None, count: int, kinds: Kinds) -> list[Kinds]:
        """Return the kinds of the parts of a value that is unpacked."""
        made: list[list[ast.expr]] = []
        value = self.values.returned_expression(value) if value is not None else None
        match value:
            case ast.Tuple(elts=elements) | ast.List(elts=elements):
                made = [elements]
            case ast.Call() if self.is_private(value) and self.library is OPACUS:
                return [frozenset({kind}) for kind in RETURNED.get(count, ("value",) * count)]
            case ast.Call(func=function, args=args):
                use = find_function(self.script, value)
                returns = map(self.script.returns_of, self.functions(function))
                made = [getattr(item.value, "elts", []) for own in returns for item in own]
                made = [args] if use is not None and use.gives == "parts" else made
        if made and all(len(parts) == count for parts in made):
            return [frozenset().union(*map(self.kinds, part)) for part in zip(*made, strict=True)]
        if kinds == {"size"}:  # of a shape
            return [kinds, *[NOTHING] * (count - 1)]
        return [frozenset("rows" if kind == "lot" else kind for kind in kinds)] * count

    def is_private(self, call: ast.AST) -> bool:
        """Whether a call is the private call, or one of those of which one runs."""
        others = (getattr(item, "value", None) for item in self.values.alternatives)
        return call in (self.call, *others)

    def is_of_other_call(self, node: ast.expr | None) -> bool:
        """Whether an object is only what another private call returns, which may run too."""
        made = self.script.places_of(node)
        if isinstance(node, ast.Name):
            made = [item.node for item in self.reaching(node)]
        statements = {self.statement(call) for call in self.values.elsewhere}
        around = ({*self.script.ancestors(item)} for item in made)
        return bool(made) and all(statements & outer for outer in around)

    def _bind_elements(self, target: ast.expr, iterable: ast.expr) -> None:
        """Bind the target of a loop to the elements of what it iterates."""
        match iterable, target:
            case ast.Call(func=ast.Name(id="enumerate"), args=[of, *_]), ast.Tuple(elts=[_, item]):
                self._bind_elements(item, of)
            case ast.Call(ast.Name("zip"), of), ast.Tuple(to) if len(of) == len(to):
                for item, inner in zip(to, of, strict=True):
                    self._bind_elements(item, inner)
            case ast.Tuple() | ast.List(), _:
                self._bind(target, self.kinds(iterable), None)
            case ast.Call(func=function, args=[inner, *_]), _ if last_name(function) in NAMES[
                "iterators"
            ] and last_name(function) not in ("enumerate", "zip"):
                self._bind_elements(target, inner)
            case _:
                self._bind(target, self.element(self.kinds(iterable)), None)

    def _hold(
        self, base: ast.expr, kinds: Kinds, key: object = None, *, inside: bool = False
    ) -> None:
        """Note what is put into an object, or ``inside`` a part, by each name that it has."""
        while isinstance(base, ast.Subscript) or (
            isinstance(base, ast.Attribute) and last_name(base.value) != "self"
        ):
            key, inside = _key_of(getattr(base, "slice", None)), True
            base = base.value
        for place in self.script.places_of(base) if last_name(base) != "self" else ():
            if kinds <= self.held[place, key]:
                continue
            self.bound[place] |= kinds
            self.held[place, key] |= kinds
            of_argument, read = isinstance(place, ast.arg), self.values.arguments_for
            passed = of_argument and self.values.attempt(read, base, place)
            of_loop = isinstance(self.sources.holder_of(place)[0], ast.For | ast.comprehension)
            for same in passed or [self.sources.value_at(place)]:
                for part in _parts_of(same, key, inside=inside or of_loop):
                    held = part is not same
                    self._hold(part, kinds, None if held else key, inside=inside or held)

    def _pass_arguments(self, call: ast.Call) -> None:
        """Pass arguments to the functions and methods of this file that a call may run."""
        for function in self.functions(call.func):
            self._pass(function, call)
        if isinstance(call.func, ast.Lambda):
            self._pass(call.func, call)
        match call:
            case ast.Call(func=ast.Attribute(value=base, attr="attach"), args=[ast.Name() as name]):
                if "engine" in self.kinds(base):
                    scope = self.script.resolve(name.id, self.script.scope_of(name))[0]
                    self.attached.add((scope, name.id))
            case ast.Call(func=ast.Attribute(value=base, attr=name)) if name in NAMES["mutators"]:
                if not self.kinds(base) & HANDLES:
                    put = self.of_arguments(call)
                    kinds = items_of(put) if name == "append" else put
                    self._hold(base, kinds | self._decided(call))
        if "model" in self.kinds(call.func):
            for layer in self.layers:
                passed = self.script.passed_arguments(layer, call)
                taken = {key for key, item in passed if self.kinds(item) & SECRETS}
                for arg in (*layer.args.args, *layer.args.kwonlyargs):
                    self.bound[arg] |= {"rows"} if arg.arg in taken else NOTHING

    def _pass(self, function: ast.FunctionDef | ast.Lambda, call: ast.Call) -> None:
        """Pass the arguments of a call on to a function that it may run."""
        spec, every = function.args, self.of_arguments(call)
        passed = self.script.passed_arguments(function, call)
        every_arg = (*spec.posonlyargs, *spec.args, *spec.kwonlyargs, spec.vararg, spec.kwarg)
        for arg in filter(None, every_arg):
            own = frozenset().union(*(self.kinds(item) for key, item in passed if key == arg.arg))
            self.bound[arg] |= every if unpacks(call) or arg in (spec.vararg, spec.kwarg) else own

    def of_arguments(self, call: ast.Call) -> Kinds:
        """Return the kinds of the arguments of a call."""
        return frozenset().union(*(self.kinds(item) for _, item in arguments_of(call)))

    def _give_parameters(self) -> None:
        """Give methods of models ``self``, and layers rows: what has no default."""
        for node in self.script.nodes:
            if isinstance(node, ast.arg) and node.arg == "logs":
                self.bound[node] |= VALUE
        for owner in self.models:
            for method in owner.body:
                if isinstance(method, ast.FunctionDef) and method.args.args:
                    self.bound[method.args.args[0]] |= {"model"}
        for method in self.layers:
            spec = method.args
            for arg in filter(None, (*spec.args[1:], *spec.kwonlyargs, spec.vararg, spec.kwarg)):
                if default_of(method, arg.arg) is None:
                    self.bound[arg] |= {"rows"}

    @cached_property
    def layers(self) -> list[ast.FunctionDef]:
        """The methods of this file that a call of an object runs on the rows of a lot."""
        names = ("forward", "call", "__call__")
        methods = (item for name in names for item in self.script.functions.get(name, ()))
        return [item for item in methods if isinstance(self.script.parents[item], ast.ClassDef)]

    @cached_property
    def models(self) -> list[ast.ClassDef]:
        """The classes of this file whose objects are models."""
        classes = [node for node in self.script.nodes if isinstance(node, ast.ClassDef)]
        return [owner for owner in classes if self._makes_models(owner)]

    def _makes_models(self, owner: ast.AST | None) -> bool:
        for base in getattr(owner, "bases", ()):
            path = self.script.module_path(base)
            other = getattr(self.script.binding_of(base), "node", None)
            layer = path.startswith("torch.nn.") or ".layers." in path
            named = (last_name(base) or "").endswith(NAMES["model_classes"])
            if layer or named or (other is not owner and self._makes_models(other)):
                return True
        return False

    def functions(self, function: ast.expr) -> list[ast.FunctionDef]:
        """Return the functions, methods and constructors of this file that a call may run."""
        owners = {item: self.script.parents[item]
                  for item in self.script.functions.get(last_name(function) or "", ())}  # fmt: skip
        if isinstance(function, ast.Attribute):
            base = self.values.origin_of(function.value) if owners else None
            if isinstance(base, ast.Call) and self.script.comes_from(base.func, LAYER_PACKAGES):
                return []
            return [item for item, owner in owners.items() if isinstance(owner, ast.ClassDef)]
        made = self.script.places_of(function)
        return [item for item, owner in owners.items() if item in made or owner in made]

    def element(self, kinds: Kinds) -> Kinds:
        """Return the kinds of the elements: lots only of a private loader, if one draws them."""
        drawn = "lot" if "lots" in kinds or self.library is not OPACUS else "value"
        passed = {"data": drawn, "lots": "lot", "rows": "value", "lot": "rows", "loss": "value",
                  "size": "count"}  # fmt: skip
        return frozenset(passed.get(kind, kind) for kind in kinds)

    # ---- the kinds of an expression ------------------------------------------------------

    def kinds(self, node: ast.expr) -> Kinds:
        """Return the kinds that an expression may have; none of them if it is public."""
        if node not in self.memo:
            self.memo[node] = NOTHING  # of itself, while it is worked out
            own = self._kinds(node)
            self.memo[node] = own - VALUE | {"data"} if node in self.joined else own
        return self.memo[node]

    def _kinds(self, node: ast.expr) -> Kinds:
        match node:
            case ast.Name():
                return self._of_name(node)
            case ast.Attribute():
                return self._of_attribute(node)
            case ast.Subscript(value=base, slice=index):
                own = self._of_entry(base, _key_of(index))
                if self._is_mask(index) and self.are_shifted([base, index]):
                    return VALUE
                return self._of_item(self.kinds(base), index) if own is None else own
            case ast.Call():
                return self._of_call(node)
            case ast.BinOp(left=left, right=right) if self._is_mask(node):
                if self.are_shifted([left, right]):
                    return VALUE
                return computed(self.kinds(left), self.kinds(right))
            case ast.BinOp(left=left, op=op, right=right):
                return arithmetic(node, op, self.kinds(left), self.kinds(right))
            case ast.UnaryOp(operand=operand):
                return computed(self.kinds(operand))
            case ast.Starred(value=value):
                return self.element(self.kinds(value))
            case ast.Compare(left=left, comparators=others):
                if all(isinstance(op, ast.Is | ast.IsNot) for op in node.ops):
                    return NOTHING
                made = computed(self.kinds(left), *map(self.kinds, others)) & SECRETS
                if self.are_shifted([left, *others]):
                    return VALUE
                return VALUE if made <= {"count", "size"} and made else made
            case ast.IfExp(test=test, body=body, orelse=other):
                decided = VALUE if self.kinds(test) & SECRETS else NOTHING
                return self.kinds(body) | self.kinds(other) | decided
            case ast.ListComp() | ast.GeneratorExp() | ast.SetComp() | ast.DictComp():
                element = node.value if isinstance(node, ast.DictComp) else node.elt
                item, loops = self.kinds(element), node.generators
                over = frozenset().union(*(self.kinds(part) for loop in loops
                    for part in [loop.iter, *loop.ifs] if not isinstance(part, ast.Tuple | ast.List)
                    or any(isinstance(one, ast.Starred) for one in part.elts)))  # fmt: skip
                of_part = any(names_in(loop.target) & names_in(element) for loop in loops)
                apart = item & SECRETS in ({"rows"}, {"loss"}, NOTHING)
                if apart and over & SECRETS <= ({"lot"} if of_part else NOTHING):
                    return frozenset("lot" if kind == "rows" else kind for kind in item)
                return as_value(item | over)
            case ast.Lambda() | ast.Constant():
                return NOTHING
            case ast.JoinedStr(values=parts):
                own = frozenset().union(*map(self.kinds, parts))
                return VALUE if own & SECRETS else NOTHING
        children = (item for item in ast.iter_child_nodes(node) if isinstance(item, ast.expr))
        return frozenset().union(*map(self.kinds, children))

    def _of_name(self, node: ast.Name) -> Kinds:
        if not (own := self.reaching(node)):
            return self.assumed.get(node.id, NOTHING)
        scope = self.script.resolve(node.id, self.script.scope_of(node))[0]
        made = whole(frozenset().union(*(self.bound[item.node] for item in own)))
        return made - {"optimizer"} | {"private"} if (scope, node.id) in self.attached else made

    def reaching(self, use: ast.Name) -> list[Binding]:
        """Return the bindings that may give a name its value at a use."""
        return self._after_private_call(use, self.script.bindings_of(use))

    def _after_private_call(self, use: ast.AST, bindings: list[Binding]) -> list[Binding]:
        """Leave out what the private call replaced before a use."""
        private = [item for item in bindings if self.values.is_set_by_private_call(item.node)]
        if not private or self.runs_before(use):
            return bindings
        script, scope = self.script, self.script.scope_of(self.private)

        def is_replaced(node: ast.AST) -> bool:
            # Also a parameter of the function.
            own = scope in (script.scope_of(node), script.parents.get(script.parents[node]))
            before = own and getattr(node, "lineno", 0) < self.private.lineno
            return before or exclude_each_other(script, node, self.private)

        return [item for item in bindings if item in private or not is_replaced(item.node)]

    def runs_before(self, use: ast.AST, depth: int = 0) -> bool:
        """Whether a use may run before the private call."""
        script, scope = self.script, self.script.scope_of(use)
        if self.call in script.ancestors(use):
            return True
        if scope in (script.scope_of(self.private), script.tree):
            return bool(getattr(use, "lineno", 0) < self.private.lineno)
        owner = script.parents[scope]
        name = getattr(scope, "name", "")
        if isinstance(owner, ast.ClassDef) and name == "__init__":
            name = owner.name
        calls = script.calls_to(name)
        return depth < MAX_DEPTH and any(self.runs_before(call, depth + 1) for call in calls)

    def _of_attribute(self, node: ast.Attribute) -> Kinds:
        base, name = self.kinds(node.value), node.attr
        if name in ("__name__", "__class__"):
            return NOTHING
        made = [*map(Binding, self.script.stored_attributes.get(name, ()))]
        reaching = self._after_private_call(node, made)
        own = whole(frozenset().union(*(self.bound[item.node] for item in reaching)))
        if base == {"model"} and name in (*NAMES["settings"], *NAMES["sizes"]):
            return own
        if base & {"model", "private", "optimizer"} and name in NAMES["gradients"]:
            return VALUE
        if base & {"private", "optimizer"} and name == "param_groups":
            return own | {"scheduler"}
        if base & {"rows", "loss", "value", "lot", "data", "lots"}:
            if name in NAMES["sizes"]:
                chosen = name in ("shape", "size") and self._is_chosen(node.value)
                return own | (VALUE if chosen else shape_of(base, name))
            if name == "loss":
                return own | (VALUE if "value" in base else {"loss"})
            if base & {"data", "lots"}:
                same = name in NAMES["record_fields"] and "value" not in base
                return own | ({"data"} if same else VALUE)
            return own | (base if base == {"lot"} or name in ("logits", "data") else VALUE)
        if "model" in base:
            return own | ({"model"} if not own or name in ("weight", "bias") else NOTHING)
        if "engine" in base:
            return own | {"engine"}
        return own

    def _of_entry(self, base: ast.expr, key: object) -> Kinds | None:
        """Return the kinds of an entry of a dictionary, or of a split, that the text shows."""
        split = last_name(getattr(self.values.origin_of(base), "func", base)) in NAMES["splits"]
        if split and key is not None:
            return self.kinds(base)
        places = self.reaching(base) if isinstance(base, ast.Name) and key is not None else []
        made = [item.value for item in places if isinstance(item.value, ast.Dict)]
        if not made or len(made) < len(places):
            return None
        pairs = [pair for item in made for pair in zip(item.keys, item.values, strict=True)]
        own = [self.kinds(value) for name, value in pairs
               if not isinstance(name, ast.Constant) or name.value == key]  # fmt: skip
        own += [self.held[item.node, name] for item in places for name in (key, None)]
        return whole(frozenset().union(*own))

    def _of_item(self, base: Kinds, index: ast.expr) -> Kinds:
        decided = self.kinds(index) & SECRETS
        if base == {"size"}:
            return size_at(index)
        if not base & SECRETS:
            return base | (VALUE if decided else NOTHING)
        by_name, key = isinstance(index, ast.Constant), is_key(index)
        key |= base == {"data"} and decided == {"data"} and self._is_mask(index)
        whole = isinstance(index, ast.Tuple) and keeps_rows(index.elts) and not decided
        columns = self.values.known_value(index) if "data" in base and not key else None
        key |= isinstance(columns, list) and all(isinstance(item, str) for item in columns)
        return frozenset(
            "rows" if kind == "lot" and by_name
            else kind if kind in HANDLES or whole or (kind == "rows" and key)
            or (kind in ("data", "lots") and key)
            or (kind in ("data", "lots") and isinstance(index, ast.Slice) and not decided & VALUE)
            else "rows" if kind in ("data", "lots") and self.library is not OPACUS
            else "value"
            for kind in base
        )  # fmt: skip

    def _is_chosen(self, part: ast.AST | None, depth: int = 0) -> bool:
        """Whether a condition chooses the rows of a part of the data that is not trained on."""
        places = self.script.places_of(part) if isinstance(part, ast.expr) else []
        if depth > MAX_DEPTH or self.sources.places.intersection(places):
            return False
        match part:
            case ast.Subscript(value=value, slice=index):
                chosen = self._is_mask(index) and bool(self.kinds(index) & SECRETS)
            case ast.Call(func=ast.Attribute(value=value, attr=name)):
                chosen = name in ("dropna", "filter")
            case ast.Attribute(value=value):
                chosen = False
            case _:
                made = [self.sources.value_at(place) for place in places]
                return any(self._is_chosen(item, depth + 1) for item in made)
        return chosen or self._is_chosen(value, depth + 1)

    def are_shifted(self, parts: list[ast.expr]) -> bool:
        """Whether parts of the records that are joined row by row start at different ones."""
        return len({self._start(part) for part in parts if "data" in self.kinds(part)}) > 1

    def _start(self, part: ast.expr | None) -> tuple[str, ...]:
        """Return where the rows of a part of the records start, and their steps."""
        starts: tuple[str, ...] = ()
        for _ in range(MAX_PASSES):
            match part:
                case (
                    ast.Subscript(value=value, slice=ast.Slice() as index)
                    | ast.Subscript(value=value, slice=ast.Tuple(elts=[ast.Slice() as index, *_]))
                ):
                    ends = (index.lower or ast.Constant(0), index.step or ast.Constant(1))
                    own = ":".join(map(ast.unparse, ends))
                    part, starts = value, starts if own == "0:1" else (own, *starts)
                case (
                    ast.Attribute(value=value)
                    | ast.Subscript(value=value)
                    | ast.Compare(left=value)
                ):
                    part = value
                case ast.UnaryOp(operand=value) | ast.BinOp(left=value):
                    part = value
                case ast.Call(func=ast.Attribute(value=value)) if self.kinds(value) & SECRETS:
                    part = value
                case ast.Call(args=[value, *_]):
                    part = value
                case ast.Name() if (made := self.values.origin_of(part)) is not part:
                    part = made
                case _:
                    break
        return starts

    def _is_mask(self, index: ast.expr) -> bool:
        """Whether an index takes those rows of a table that a condition on each holds for."""
        match self.values.origin_of(index) or index:
            case ast.Compare():
                return True
            case ast.UnaryOp(operand=one):
                return self._is_mask(one)
            case ast.BinOp(left=left, op=ast.BitAnd() | ast.BitOr(), right=right):
                return self._is_mask(left) and self._is_mask(right)
            case ast.Call(func=ast.Attribute(value=of, attr=name)):
                return name in NAMES["masks"] or (name in ("all", "any") and self._is_mask(of))
        return False

    def _of_call(self, call: ast.Call) -> Kinds:
        if self.is_private(call):
            return self.returned_by_private_call()
        if call in self.values.elsewhere:
            return NOTHING
        lists = last_name(call.func) in NAMES["listings"] and self.sources.names_folder(call)
        if lists or self.sources.reads(call):
            return frozenset({"data"})
        passed = [self.kinds(item) for _, item in arguments_of(call)]
        function = call.func
        own = self.functions(function)
        base = self.kinds(function.value) if isinstance(function, ast.Attribute) else NOTHING
        owners = [i for i in self.script.places_of(function) if isinstance(i, ast.ClassDef)]
        if owners:
            return self._of_object(owners, passed)
        if isinstance(function, ast.Lambda):
            return self.kinds(function.body)
        callee = self.kinds(function)
        if self.is_part(function, callee):
            return self._of_model(function, passed)
        if own:
            return frozenset().union(*(self.returned[item] for item in own))
        if isinstance(function, ast.Attribute) and base:
            return self._of_method(call, base, passed)
        return self._of_model(function, passed) or self._of_function(call, passed)

    def is_part(self, function: ast.expr, callee: Kinds) -> bool:
        """Whether a called attribute is a layer or loss that the script stored there."""
        stored = self.script.stored_attributes
        held = isinstance(function, ast.Attribute) and bool(stored.get(function.attr))
        return held and bool(callee & {"model", "criterion"})

    def _of_model(self, function: ast.expr, passed: list[Kinds]) -> Kinds:
        """Return the kinds of what a model or loss computes; none if it is neither."""
        callee = self.kinds(function)
        if "model" in callee:
            made = computed(*passed) & SECRETS
            if made <= {"lot", "rows"} and made:
                return frozenset({"lot" if self._gives_parts(function) else "rows"})
            return VALUE if "data" in made else made
        if "criterion" in callee:
            return loss_of(frozenset().union(*passed))
        return NOTHING

    def _gives_parts(self, function: ast.expr) -> bool:
        """Whether a model of this file returns several results, and never one alone."""
        made = self.values.origin_of(function)
        while isinstance(made, ast.Call) and isinstance(made.func, ast.Attribute):
            made = self.values.origin_of(made.func.value)
        owners = self.script.places_of(getattr(made, "func", None))
        results = [item.value for layer in self.layers if self.script.parents[layer] in owners
                 for item in self.script.returns_of(layer)]  # fmt: skip
        return bool(results) and all(isinstance(item, ast.Tuple | ast.List) for item in results)

    def _of_object(self, owners: list[ast.ClassDef], passed: list[Kinds]) -> Kinds:
        """Return the kinds of an object of a class of this file."""
        if any(owner in self.models for owner in owners):
            return frozenset({"model"})
        taken = frozenset().union(*passed)
        names = {item.name for owner in owners for item in owner.body if hasattr(item, "name")}
        if taken & {"data", "value"} and "__getitem__" in names:
            parts = (part for owner in owners for part in ast.walk(owner))
            kinds = (self.bound[part] for part in parts if part in self.bound)
            taken = whole(taken.union(*kinds))
            return frozenset({"data"}) if "value" not in taken else VALUE
        return frozenset({"holder"}) if taken else NOTHING

    def returned_by_private_call(self) -> Kinds:
        """Return the kinds of what the private call returns."""
        name = last_name(self.call.func) or ""
        if self.library is OPACUS:
            return frozenset({"model", "private", "lots"})
        if name.endswith(("Model", "Sequential")):
            return frozenset({"model"})
        return frozenset({"engine" if "Engine" in name else "private"})

    def _of_method(self, call: ast.Call, base: Kinds, passed: list[Kinds]) -> Kinds:
        name = last_name(call.func) or ""
        if name in NAMES["sizes"] and base & SECRETS:
            if name != "size" or not call.args:
                return shape_of(base, name)
            return self._of_item(shape_of(base, "shape"), call.args[0])
        if base in ({"lot"}, {"loss"}) and name in ("items", "values"):
            return base
        if base & SECRETS:  # computed with a parameter, it is a value of records still
            base -= {"model"}
        if "data" in base and find_method("data", name) is None:
            return base  # It is asked what this does with the records.
        uses = [find_method(kind, name) for kind in sorted(base - {"rows"})]
        gives = [item.gives for item in uses if item is not None]
        if "same" in gives:
            return base - {"holder"}
        if base & SECRETS and base <= {"rows", "lot", "loss", "count", "value", "data", "lots"}:
            use = find_method("rows", name)
            return VALUE if use is None else applied(use, call, 0, [base, *passed], self.kinds)
        return frozenset(part for item in gives for part in item.split() if part != "public")

    def _of_function(self, call: ast.Call, passed: list[Kinds]) -> Kinds:
        name, taken = last_name(call.func) or "", frozenset().union(*passed)
        if isinstance(call.func, ast.Name) and not self.script.bindings_of(call.func):
            return self._of_builtin(call, name, passed)
        if name in NAMES["iterators"] and len(call.args) > 0:
            return self.element(taken) if name == "next" else taken
        use = find_function(self.script, call)
        if use is None:
            known = self.script.comes_from(call.func, NAMES["numerical_packages"])
            known |= name in (*NAMES["container_methods"], *NAMES["loggers"])
            known |= self.draws(call.func) or isinstance(whole_of(call.func), ast.Constant)
            made = (taken & SECRETS) - COUNTS
            if made - VALUE and not known:
                # It is asked what this does with the records: here, each gives its own.
                text = ast.unparse(self.statement(call)).lower()
                of_lot = "loss" if "loss" in made or "loss" in text else "rows"
                return frozenset({"data" if "data" in made else of_lot})
            return VALUE if taken & SECRETS else taken & {"model"}
        return self.given_by(use, call, passed)

    def given_by(self, use: Use, call: ast.Call, passed: list[Kinds]) -> Kinds:
        """Return the kinds of the result of a listed function."""
        if use.gives in ("each", "loss") and "value" not in use.takes:
            # It is asked about values of records: here, each is of one record.
            passed = [own - VALUE | {"rows"} if "value" in own else own for own in passed]
        taken = frozenset().union(*passed)
        if self.are_shifted([item for _, item in arguments_of(call)]):
            return VALUE
        match use.gives:
            case "same" | "each" | "along":
                return applied(use, call, 1, passed, self.kinds)
            case "parts":
                return taken
            case "width":
                match call.args[1:2]:
                    case [ast.Tuple([width]) | ast.List([width])] if not self.kinds(width):
                        return computed(*passed)
                return as_value(taken)
            case "loss":
                return loss_of(taken)
            case "value":
                return VALUE if taken & SECRETS else NOTHING
            case "drawn":
                return frozenset({"rows"}) if taken == {"size"} else taken and VALUE
            case "data" | "same data":
                if self._draws_again(call):
                    return as_value(taken) & VALUE
                # It is asked whether values are of one record each.
                return (taken & {"data", "lots"}) | ({"data"} if "value" in taken else NOTHING)
        return frozenset(use.gives.split())

    def _draws_again(self, call: ast.Call) -> bool:
        """Whether a part of the data is chosen by indices that may repeat."""
        if last_name(call.func) != "Subset" or len(call.args) < 2:
            return False
        index = call.args[1]
        for _ in range(MAX_PASSES):
            index = self._taken_from(index) or index
        return not isinstance(index, ast.Call) or last_name(index.func) not in NAMES["distinct"]

    def _taken_from(self, index: ast.expr | None) -> ast.expr | None:
        """Return the indices that some are a part of, each once, or which they are."""
        changes = self.script.method_calls(*NAMES["mutators"])
        match index:
            case ast.Subscript(value=value, slice=ast.Slice()):
                return value
            case ast.Call(func=ast.Attribute(value=inner, attr="tolist" | "numpy")):
                return inner
            case ast.Call(func=function, args=[inner, *_]) if not self.functions(function) and (
                last_name(function) in ("list", *NAMES["splits"])
            ):
                return inner
            case ast.Name(id=name) if all(last_name(base) != name for _, base in changes):
                made = [self.sources.holder_of(item) for item in self.script.places_of(index)]
                split = made[0][1] if [type(outer) for outer, _ in made] == [ast.Assign] else None
                return self.values.origin_of(index) or split
        return None

    def _of_builtin(self, call: ast.Call, name: str, passed: list[Kinds]) -> Kinds:
        taken = frozenset().union(*passed)
        if name in ("isinstance", "hasattr", "type", "print", "id", "callable"):
            return NOTHING
        if name == "len":
            decided = "value" in taken and self._is_decided(call.args[0], VALUE)
            if decided or ("data" in taken and self._is_chosen(call.args[0])):
                return VALUE
            return frozenset({"size"}) if taken & {"lot", "rows"} else NOTHING
        if name == "next":
            return self.element(taken)
        if name == "super":
            around = (o for o in self.script.ancestors(call) if isinstance(o, ast.ClassDef))
            return frozenset({"model"}) if next(around, None) in self.models else NOTHING
        if (
            name in ("list", "tuple", "iter", "enumerate", "zip", "reversed", "dict", "tqdm")
            or (name in ("str", "repr") and taken & {"data", "lots", "lot", "rows"})
            or (name == "sum" and taken & SECRETS == {"loss"})
        ):
            return taken
        if hasattr(builtins, name):
            return as_value(taken)
        return loss_of(taken)  # what a part of a script leaves out

    def draws(self, function: ast.expr, depth: int = 0) -> bool:
        """Whether a function is of a package of plots, or a method of what such a one makes."""
        root = whole_of(function)
        if not self.plots:
            return False
        made = [self.sources.value_at(place) for place in self.script.places_of(root)]
        makers = [getattr(item, "func", root) for item in made] if depth < MAX_DEPTH else []
        of_others = bool(makers) and all(self.draws(maker, depth + 1) for maker in makers)
        display = self.script.module_path(root).startswith("sklearn.metrics.")
        return display or self.script.comes_from(root, PLOTS) or of_others

    # ---- what records decide -------------------------------------------------------------

    def deciding(self, node: ast.AST) -> ast.expr | None:
        """Return the condition on records that decides if a node runs, if there is one."""
        inner = node
        for outer in self.script.ancestors(node):
            if isinstance(outer, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                return None
            tests, secret = _conditions(outer, inner)
            for test in tests:
                if self._is_decided(test, secret):
                    return test
            inner = outer
        return None

    def _is_decided(self, test: ast.expr, secret: Kinds) -> bool:
        """Whether records decide a condition, or the length of a list: not what is put into it."""
        if not self.kinds(test) & secret:
            return False
        while isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            test = test.operand
        bound = [self.bound[place] for place in self.script.places_of(test)]
        held = {"items"} <= frozenset().union(*bound)
        return bool((frozenset().union(*bound) if held else self.kinds(test)) & secret)


def _conditions(outer: ast.AST, inner: ast.AST) -> tuple[list[ast.expr], Kinds]:
    """Return what decides if the part ``inner`` of a node runs, if its kinds are some of these."""
    match outer:
        case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test) if inner is not test:
            return [test], SECRETS
        case ast.BoolOp(values=[first, *_]) if inner is not first:
            return [first], SECRETS
        case ast.For(iter=ast.Call(func=ast.Name(id="range"), args=args)):
            return args, SECRETS - COUNTS
        case ast.For(iter=iterable) if inner is not iterable:  # as ``[1] * hits``
            return [part for part in ast.walk(iterable) if isinstance(part, ast.BinOp)], VALUE
        case ast.Try(body=body) if isinstance(inner, ast.ExceptHandler) and (
            last_name(inner.type or outer) not in NAMES["other_errors"]
        ):
            parts = (part for item in body for part in ast.walk(item))
            may_fail = ast.Call | ast.BinOp | ast.Subscript
            return [part for part in parts if isinstance(part, may_fail)], OF_LOTS
    return [], NOTHING


def _key_of(index: ast.expr | None) -> object:
    """Return the constant that names an entry, or None if it may be any."""
    return index.value if isinstance(index, ast.Constant) else None


def _parts_of(value: ast.AST | None, key: object, *, inside: bool) -> list[ast.expr]:
    """Return the names of the objects that a value may be, or that its entry may hold."""
    items: list[ast.expr] = []
    match value:
        case ast.Name() | ast.Attribute() | ast.Subscript():
            return [value]
        case ast.IfExp(body=one, orelse=other) | ast.BoolOp(values=[one, other]):
            items = [one, other]
        case ast.List(elts=items) | ast.Tuple(elts=items) if inside:
            pass
        case ast.Dict(keys=keys, values=values) if inside:
            pairs = zip(keys, values, strict=True)
            items = [o for name, o in pairs if None in (key, own := _key_of(name)) or own == key]
    return [part for item in items for part in _parts_of(item, None, inside=inside)]


def items_of(kinds: Kinds) -> Kinds:
    """Return the kinds of a list that something is put into: its length tells no value of it."""
    return kinds - VALUE | {"items"} if "value" in kinds else kinds


def whole(kinds: Kinds) -> Kinds:
    """Return the kinds of a list with its items."""
    return kinds - {"items"} | VALUE if "items" in kinds else kinds


def whole_of(part: ast.expr) -> ast.expr:
    """Return the object that an expression is a part of, as ``a`` of ``a.b[0]``."""
    while isinstance(part, ast.Attribute | ast.Subscript):
        part = part.value
    return part


def is_own(kinds: ObjectKinds, call: ast.Call) -> bool:
    """Whether a call runs functions or classes of this file alone, whose uses are read."""
    function = call.func
    if isinstance(function, ast.Name):
        made = kinds.script.places_of(function)
        return bool(made) and all(isinstance(item, ast.FunctionDef | ast.ClassDef) for item in made)
    base = kinds.kinds(function.value) if isinstance(function, ast.Attribute) else NOTHING
    return bool(kinds.functions(function)) and base <= {"model", "holder", "data"}
