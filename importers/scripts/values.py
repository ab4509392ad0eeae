"""Evaluate the expressions of a script, where its text determines their values.

A value is known if the text shows every way to reach it. Everything else raises ``Unreadable``,
which names the expression: no value is guessed.

>>> import ast
>>> values = Evaluator(Script(ast.parse("SIGMA = 1.4\\ndef f(C=2.0): g(SIGMA / C)\\nf()")))
>>> values.evaluate(values.script.calls[1].args[0])
0.7
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from affidavit.importers.names import NAMES
from affidavit.importers.scripts.aliases import find_change
from affidavit.importers.scripts.conditions import branch
from affidavit.importers.scripts.launches import option_name
from affidavit.importers.scripts.syntax import (
    FUNCTIONS,
    Binding,
    Scope,
    Script,
    assigned_to,
    keywords_of,
    last_name,
    unpacks,
)

MAX_DEPTH = 40
MAX_EXPONENT = 64
MAX_BITS = 2048
"""Size of an integer; each product or power of such ones takes microseconds."""
OPERATORS: dict[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Mod: operator.mod,
    ast.Div: operator.truediv, ast.FloorDiv: operator.floordiv, ast.Pow: operator.pow,
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le,
    ast.Gt: operator.gt, ast.GtE: operator.ge, ast.Is: operator.is_, ast.IsNot: operator.is_not,
}  # fmt: skip
BUILTINS = {item.__name__: item for item in (float, int, bool, abs, min, max)}
MATH = {item.__name__: item for item in (math.sqrt, math.ceil, math.floor, math.exp, math.log)}


class Unreadable(Exception):
    """The value of an expression cannot be determined from the text; ``why`` gives the reason."""

    def __init__(self, node: ast.AST, why: str) -> None:
        super().__init__(why)
        self.node, self.why = node, why


class NotSet(Unreadable):
    """An option that has no value unless the command line gives it one."""


@dataclass(frozen=True)
class Record:
    """An object whose attributes or items are known expressions or values."""

    kind: str
    fields: dict[str, Any] = field(default_factory=dict)
    """Values by name. An ``Unreadable`` stands for an unknown value."""


Reader = Callable[["Evaluator", ast.Call], Any]
"""Return the value of a call that the reader recognises, else None."""


@dataclass(eq=False)
class Evaluator:
    """Evaluate the expressions of a script; ``readers`` recognise calls that produce records."""

    script: Script
    readers: tuple[Reader, ...] = ()
    defaults: set[str] = field(default_factory=set)
    """Command-line options whose default was read."""
    private_statement: ast.AST | None = None
    """The statement of the private call, which rebinds its arguments. Its bindings do not count."""
    alternatives: tuple[ast.AST, ...] = ()
    """Statements of other private calls, in other branches of a condition."""
    elsewhere: tuple[ast.Call, ...] = ()
    """Other private calls that may run too, whose plans are read by themselves."""
    updates: tuple[ast.Call, ...] = ()
    """Calls that apply private updates, if the private call returns no ``step()``."""
    other_steps: frozenset[ast.AST] = frozenset()
    """Steps of other optimisers, such as a GAN's generator's, which release nothing private."""
    is_private_loader: Callable[[ast.expr], bool] = lambda _: False
    """Whether a loop over a name is one pass over the private records."""
    read_literals: set[ast.Constant] = field(default_factory=set)
    """Literals that were read since the set was cleared."""
    assumed: dict[str, Any] = field(default_factory=dict)
    """Values of options where the private call runs, whatever their defaults are."""
    sides: dict[ast.AST, bool] = field(default_factory=dict)
    """Conditions around the private call, with the results that let it run."""
    follows_conditions: bool = True
    """Whether the private call runs where known conditions hold."""
    _decided: dict[ast.AST, bool | None] = field(default_factory=dict)
    _depth: int = 0

    def evaluate(self, node: ast.expr) -> Any:
        """Return the value of an expression; raises ``Unreadable``."""
        if self._depth > MAX_DEPTH:
            raise Unreadable(node, "it refers to itself, or through too many names")
        self._depth += 1
        try:
            return self._evaluate(node)
        finally:
            self._depth -= 1

    @staticmethod
    def attempt(read: Callable[..., Any], *arguments: Any) -> Any:
        """Return what a function reads in the text, or None if the text does not determine it."""
        try:
            return read(*arguments)
        except Unreadable:
            return None

    def known_value(self, node: ast.expr | None) -> Any:
        """Return the value of an expression, or None if it cannot be determined."""
        return None if node is None else self.attempt(self.evaluate, node)

    def _evaluate(self, node: ast.expr) -> Any:
        match node:
            case ast.Constant(value=Unreadable() as reason):
                raise reason
            case ast.Constant(value=value):
                self.read_literals.add(node)
                return _require_small(node, value)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -self._number(operand)
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                if isinstance(value := self.evaluate(operand), list | Record):
                    raise Unreadable(node, "whether it has items may change")
                return not value
            case ast.BinOp(left=left, op=op, right=right):
                return self._operation(node, op, self._number(left), self._number(right))
            case ast.List(elts=items) | ast.Tuple(elts=items):
                return [self.evaluate(item) for item in items]
            case ast.Dict():
                return self._dict(node)
            case ast.IfExp(test=test, body=body, orelse=other):
                if (holds := self.decided(test)) is None:
                    raise Unreadable(test, "it depends on a condition whose value is unknown")
                return self.evaluate(body if holds else other)
            case ast.Compare(left=left, ops=[op], comparators=[right]):
                return self._operation(node, op, self.evaluate(left), self.evaluate(right))
            case ast.Name():
                return self._name(node)
            case ast.Attribute():
                return self._attribute(node, node.value, node.attr)
            case ast.Subscript(value=value) | ast.Call(func=ast.Attribute(value=value)) if (
                last_name(value) in ("environ", "argv")
            ):
                raise Unreadable(node, "its value comes from the command line or the environment")
            case ast.Subscript(value=value, slice=ast.expr() as inside):
                record, key = self.evaluate(value), self.evaluate(inside)
                self._require_unchanged(node, value, str(key), record)
                return self._item(node, record, key)
            case ast.Call():
                return self._call(node)
        raise Unreadable(node, "it is not a literal, a name or arithmetic on them")

    def _number(self, node: ast.expr) -> Any:
        value = self.evaluate(node)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise Unreadable(node, "it is not a number")
        return value

    def _operation(self, node: ast.expr, op: ast.AST, left: Any, right: Any) -> Any:
        plain = all(isinstance(item, int | float | str | None) for item in (left, right))
        large = isinstance(op, ast.Pow) and abs(right) > MAX_EXPONENT
        if type(op) not in OPERATORS or not plain or large:
            raise Unreadable(node, "its operation is not supported")
        return self.apply(node, OPERATORS[type(op)], [left, right])

    def _dict(self, node: ast.Dict) -> Record:
        fields: dict[str, Any] = {}
        for key, value in zip(node.keys, node.values, strict=True):
            if not isinstance(key, ast.Constant):
                raise Unreadable(node, "its keys are not all literals")
            fields[key.value] = self.try_evaluate(value)  # type: ignore[index]
        return Record("dict", fields)

    def try_evaluate(self, node: ast.expr) -> Any:
        """Return the value of an expression, or the ``Unreadable`` error that it raises."""
        try:
            return self.evaluate(node)
        except Unreadable as reason:
            return reason

    def decided(self, test: ast.expr) -> bool | None:
        """Return whether a condition holds, or None if the text does not determine it."""
        if test in self.sides or not self.follows_conditions:
            return self.sides.get(test)
        if test not in self._decided:
            self._decided[test] = None  # while it is being decided
            self._decided |= {test: self._decide(test)}
        return self._decided[test]

    def _decide(self, test: ast.expr) -> bool | None:
        match test:
            case ast.BoolOp(op=op, values=parts):
                results, whole = set(map(self.decided, parts)), isinstance(op, ast.Or)
                return whole if whole in results else None if None in results else not whole
            case ast.Compare(
                ast.BinOp(turn, ast.Mod(), every), [ast.Eq() | ast.NotEq() as op], [ast.Constant(0)]
            ) if self.known_value(every) == 1 and self._is_turn(turn):
                return isinstance(op, ast.Eq)
        value = self.try_evaluate(test)
        return None if isinstance(value, Unreadable | Record | list) else bool(value)

    def _is_turn(self, node: ast.expr) -> bool:
        """Whether a number is that of a loop's turn, or of a later one."""
        if isinstance(node, ast.BinOp) and isinstance(self.known_value(node.right), int):
            node = node.left if isinstance(node.op, ast.Add) else node
        place = getattr(self.script.binding_of(node), "node", node)
        loop, name = self.script.parents.get(place), "range"
        if isinstance(loop, ast.Tuple) and loop.elts[0] is place:
            loop, name = self.script.parents[loop], "enumerate"
        function = getattr(getattr(loop, "iter", None), "func", None)
        return last_name(function or node) == name and not self.script.places_of(function)

    def assume_runs(self, call: ast.AST, depth: int = 0) -> bool:
        """Assume the options and conditions with which a call runs; return whether it runs once."""
        sides, defaults, once = dict[ast.AST, bool](), self.defaults, True
        for outer in self.script.ancestors(call):
            if isinstance(outer, ast.If | ast.IfExp):
                test, holds = outer.test, branch(self.script, outer, call) == "body"
                sides[test] = holds
                while isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
                    test, holds = test.operand, not holds
                self.defaults = set()
                if self.decided(test) is (not holds):
                    exact = self.known_value(test) if isinstance(test, ast.Attribute) else None
                    unknown = Unreadable(test, "what it is for the private call is not known")
                    value = holds if isinstance(exact, bool) else unknown
                    self.assumed |= dict.fromkeys(self.defaults, value)
                self._decided.clear()
            elif isinstance(outer, (*FUNCTIONS, ast.For, ast.While)):
                calls = self.attempt(self.calls_of, outer) if isinstance(outer, FUNCTIONS) else None
                only = calls[0].func if calls and len(calls) == 1 and depth < MAX_DEPTH else None
                once &= only is not None and self.assume_runs(only, depth + 1)
                sides = sides if once else {}  # another turn or call may take the other side
        self.defaults = defaults
        self.follows_conditions &= not is_left_out(self, call)
        self.sides |= sides
        self._decided.clear()
        return once

    # ---- names --------------------------------------------------------------------------

    def _name(self, node: ast.Name) -> Any:
        scope, binding = self._binding(node)
        if isinstance(binding.node, ast.arg) and isinstance(scope, FUNCTIONS):
            return self._parameter(node, scope, binding.node)
        if isinstance(binding.node, ast.alias):
            return self._try_readers(ast.Call(node, [], []), node, f"{node.id} is imported")
        if binding.value is None:
            return self._unpacked_name(node, binding)
        return self.evaluate(binding.value)

    def _binding(self, node: ast.Name) -> tuple[Scope, Binding]:
        """Return the only binding of a name, if it always runs first; raises ``Unreadable``."""
        scope, bindings = self.script.resolve(node.id, self.script.scope_of(node))
        private = self.private_statement
        bindings = [b for b in bindings if {private}.isdisjoint(self.script.ancestors(b.node))]
        bindings = self._running(bindings)
        line = getattr(bindings[0].node, "lineno", 0) if bindings else 0
        stars = self.script.bindings.get((scope, "*"), ())
        if any(getattr(star.node, "lineno", 0) > line for star in stars):
            raise Unreadable(node, f"a star import may bind {node.id}")
        if len(bindings) != 1:
            count = f"{len(bindings)} times" if bindings else "nowhere in this file"
            raise Unreadable(node, f"{node.id} is bound {count}")
        binding = bindings[0]
        stores = self.script.stored_attributes.get(node.id, ())
        if scope is self.script.tree and any(last_name(item.value) != "self" for item in stores):
            raise Unreadable(node, f"an attribute {node.id} is set too, which may be this module's")
        if binding.value is not None and not self.always_runs(node, scope, binding.node):
            raise Unreadable(node, f"{node.id} is bound under a condition")
        return scope, binding

    def _running(self, bindings: list[Binding]) -> list[Binding]:
        """Return one of equal bindings, or those that no known condition leaves out."""
        if _is_one(bindings):
            return bindings[:1]
        return [item for item in bindings if not is_left_out(self, item.node)]

    def is_set_by_private_call(self, node: ast.AST) -> bool:
        """Whether the statement of the private call, or of an alternative one, sets ``node``."""
        private = {self.private_statement, *self.alternatives}
        return any(outer in private for outer in self.script.ancestors(node))

    def with_unpacked_keywords(self, call: ast.Call) -> ast.Call:
        """Return the call with ``**`` arguments expanded where the text shows them."""
        keywords = [inner for item in call.keywords for inner in self._unpacked_items(item)]
        return ast.copy_location(ast.Call(call.func, call.args, keywords), call)

    def _unpacked_items(self, item: ast.keyword) -> list[ast.keyword]:
        """Return the items of a literal dictionary that is only unpacked, or gets other items."""
        made: ast.expr | None = item.value if item.arg is None else None
        others, items = list[ast.keyword](), dict[str | None, ast.expr]()
        for use in self.script.reads_of(made.id) if isinstance(made, ast.Name) else ():
            outer = self.script.parents[use]
            match outer, self.script.parents[outer]:
                case ast.keyword(arg=None), _:
                    pass
                case ast.Call(func=ast.Attribute(attr="update"), args=[_]), _:
                    pass
                case ast.Attribute(attr="update"), ast.Call(args=[other], keywords=[]):
                    others += self._unpacked_items(ast.keyword(None, other))
                case _:
                    return [item]
        if isinstance(made, ast.Name):
            made = getattr((self.attempt(self._binding, made) or [None])[-1], "value", None)
        match made:
            case ast.Dict(keys=keys, values=values):
                names = [getattr(key, "value", None) for key in keys]
                texts = all(isinstance(name, str) for name in names)
                items = dict(zip(names, values, strict=True)) if texts else {None: made}
            case ast.IfExp(body=body, orelse=other):
                either = (self._unpacked_items(ast.keyword(None, part)) for part in (body, other))
                others += (one for part in either for one in part)
            case _:
                return [item]
        for again in others:
            parts = [items.get(again.arg, ast.Constant(None)), again.value]
            items[again.arg] = ast.BoolOp(ast.Or(), parts)  # which nobody evaluates
        return [item] if None in items else list(map(ast.keyword, items, items.values()))

    def always_runs(self, use: ast.AST, scope: Scope, target: ast.AST) -> bool:
        """Whether ``target`` runs whenever ``use`` does, under the same conditions."""
        around = set(self.script.ancestors(use))
        for outer in self.script.ancestors(target):
            if outer is scope:
                return True
            side = branch(self.script, outer, target)
            if isinstance(outer, ast.If):
                starts = ast.unparse(outer.test) == "__name__ == '__main__'"
                if (side == "body") is (starts or self.decided(outer.test)):
                    continue
            if isinstance(outer, ast.If | ast.For | ast.While | ast.Try | ast.Match) and not (
                outer in around and branch(self.script, outer, use) == side
            ):
                return False
        return True

    def _unpacked_name(self, node: ast.Name, binding: Binding) -> Any:
        """Return the value of a name that an assignment unpacks or a ``with`` opens."""
        parent = self.script.parents[binding.node]
        match parent, self.script.parents.get(parent):
            case (ast.Tuple(elts=names), ast.Assign(targets=[only], value=value)) if only is parent:
                items = self.evaluate(value)
                if isinstance(items, list) and len(items) == len(names):
                    item = items[names.index(binding.node)]  # type: ignore[arg-type]
                    if not isinstance(item, Unreadable):
                        return item
            case ast.withitem(context_expr=value), _:
                return self.evaluate(value)
            case ast.For(), _:
                raise Unreadable(node, f"{node.id} takes several values in a loop")
        raise Unreadable(node, f"{node.id} is not bound by a plain assignment")

    def _try_readers(self, call: ast.Call, node: ast.expr, otherwise: str | None = None) -> Any:
        """Return what a reader, or else a function, gives for a call; raises ``Unreadable``."""
        for reader in self.readers:
            value = reader(self, call)
            if value is not None:
                return value
        if otherwise is None and (made := self.returned_expression(call)) is not call:
            return self.evaluate(made)
        raise Unreadable(node, otherwise or "it is the result of a call that cannot be evaluated")

    def _parameter(self, node: ast.Name, function: Scope, arg: ast.arg) -> Any:
        """Return the value that every call in the file gives a parameter."""
        around = function, self.script.parents.get(function)
        decorated = any(getattr(item, "decorator_list", ()) for item in around)
        if decorated or isinstance(function, ast.Lambda):
            raise Unreadable(node, f"{node.id} is a parameter of a decorated function or class")
        first, *others = [self.evaluate(passed) for passed in self.arguments_for(node, arg)]
        if any(type(first) is not type(other) or first != other for other in others):
            raise Unreadable(node, f"{node.id} is a parameter with several values")
        return first

    def arguments_for(self, node: ast.Name, arg: ast.arg) -> list[ast.expr]:
        """Return the argument of each call for a parameter; raises ``Unreadable``."""
        function = self.script.function_around(arg)
        calls = [call for call in self.calls_of(function) if not is_left_out(self, call.func)]
        if not calls:
            raise Unreadable(node, f"{node.id} is a parameter of a function that nothing calls")
        return [self._argument(node, function, arg, call) for call in calls]

    def launch_override(self, *names: str) -> Unreadable | None:
        """Return which file of the repository may set an option, if one does."""
        tree, launches = self.script.tree, self.script.launches
        if launches.unread is not None:
            return Unreadable(tree, f"{launches.unread} may set {names[0]}")
        for key in filter(launches.settings.get, map(option_name, names)):
            return Unreadable(tree, f"{launches.settings[key]} names {key} and may set it")
        return None

    def use_default(self, name: str, value: Any) -> Any:
        """Return and record the default of an option; raises ``Unreadable`` if it is overridden."""
        assumed = name in self.assumed and not isinstance(value, Unreadable)
        value = self.assumed[name] if assumed else self.launch_override(name) or value
        if isinstance(value, Unreadable):
            raise value
        self.defaults |= {name} - self.assumed.keys()
        return value

    def calls_of(self, function: ast.AST) -> list[ast.Call]:
        """Return the calls of a function; raises ``Unreadable`` if it is used in another way."""
        calls = []
        for use in self.script.references_to(function):
            call = self.script.parents[use]
            if isinstance(call, ast.Call) and call.func is use:
                calls.append(call)
            elif self.is_called_once(use):
                calls.append(ast.Call(func=use, args=[], keywords=[]))
            else:
                raise Unreadable(use, f"{ast.unparse(use)} is passed on")
        name = getattr(function, "name", "")
        if self.script.shared_definitions & {function, self.script.parents.get(function)}:
            raise Unreadable(function, f"other files may call {name}")
        owner = self.script.scope_of(function)
        if len(self.script.bindings.get((owner, name), ())) != 1:
            raise Unreadable(function, f"{name} is defined several times")
        return calls

    def is_never_called(self, function: ast.FunctionDef) -> bool:
        """Whether known conditions leave out all calls of a function, which nothing else runs."""
        if function not in self._decided:
            self._decided[function] = False  # while it is being decided
            method = isinstance(self.script.parents[function], ast.ClassDef)
            own = [] if method or function.decorator_list else self.attempt(self.calls_of, function)
            self._decided[function] = bool(own) and all(is_left_out(self, o.func) for o in own)
        return bool(self._decided[function])

    def is_called_once(self, use: ast.expr) -> bool:
        """Whether a function is passed to what calls it once, as absl's ``app.run(main)``."""
        call = self.script.parents[use]
        return (
            isinstance(call, ast.Call)
            and last_name(call.func) in ("run", "Fire", "main")
            and keywords_of(call).keys() <= {*NAMES["run_once"]}
        ) or getattr(call, "arg", None) == "server_fn"

    def _argument(self, node: ast.Name, function: Scope, arg: ast.arg, call: ast.Call) -> ast.expr:
        if unpacks(call):
            raise Unreadable(node, f"{node.id} is a parameter, and a call unpacks its arguments")
        if (passed := dict(self.script.passed_arguments(function, call)).get(arg.arg)) is not None:
            return passed
        if (default := default_of(function, arg.arg)) is not None:
            if call not in self.script.parents and call.func in self.script.parents:
                self.use_default(arg.arg, self.try_evaluate(default))  # of what Fire or absl runs
            return default
        raise Unreadable(node, f"{node.id} is a parameter that a call does not pass")

    # ---- attributes, items and calls -------------------------------------------------------

    def _attribute(self, node: ast.expr, value: ast.expr, name: str) -> Any:
        if isinstance(value, ast.Name) and value.id == "self":
            return self._own_attribute(node, name)
        if name == "FLAGS":
            flags = ast.Call(ast.Name(name), [], [])
            return self._try_readers(flags, node, "it is not absl's FLAGS")
        record = self.evaluate(value)
        if not isinstance(record, Record):
            raise Unreadable(node, "it is an attribute of an unknown object")
        self._require_unchanged(node, value, name, record)
        return self._item(node, record, name)

    def _require_unchanged(self, node: ast.expr, value: ast.expr, name: str, record: Any) -> None:
        script = self.script
        kind = getattr(record, "kind", "class")
        stored = set(script.stored_attributes.get(name, ()))
        if kind == "options":  # which no class of the script sets of itself
            stored = {store for store in stored if getattr(store.value, "id", "") != "self"}
        if stored:
            raise Unreadable(node, f"an attribute {name} is set while the script runs")
        if (where := find_change(script, value, name, items=kind != "class")) is not None:
            place = f"line {getattr(where, 'lineno', '?')}: {source_text(where)}"
            raise Unreadable(node, f"{place} may change {source_text(value)}")

    def _own_attribute(self, node: ast.expr, name: str) -> Any:
        stores = self.script.stored_attributes.get(name, ())
        if len(stores) != 1:
            times = f"{len(stores)} times" if stores else "nowhere in this file"
            raise Unreadable(node, f"self.{name} is set {times}")
        value = assigned_to(self.script, stores[0])
        owner = self.script.scope_of(stores[0])
        if getattr(owner, "name", "") != "__init__" or value is None:
            raise Unreadable(node, f"self.{name} is set outside of __init__")
        if self.script.scope_of(owner) not in self.script.ancestors(node):
            raise Unreadable(node, f"self.{name} is set by another class")
        return self.evaluate(value)

    def _item(self, node: ast.expr, record: Any, key: Any) -> Any:
        fields = record.fields if isinstance(record, Record) else {}
        if isinstance(key, list | Record) or key not in fields:
            raise Unreadable(node, "it is not a known field")
        value = record.fields[key]
        if record.kind == "options":
            value = self.use_default(str(key), value)
        if isinstance(value, Unreadable):
            raise value
        return value

    def _call(self, node: ast.Call) -> Any:
        match node.func, node.args:
            case ast.Name(id=name) as function, args if name in BUILTINS and args:
                if not (node.keywords or self.script.bindings_of(function)):
                    return self.apply(node, BUILTINS[name], [self.evaluate(arg) for arg in args])
            case ast.Name("len"), [ast.Name() as of] if self._is_only_read(of):
                return len(self.evaluate(of))
            case ast.Attribute(value, "get"), [inside, *other] if not (node.keywords or other[1:]):
                record = self.try_evaluate(value)
                if isinstance(record, Record) and record.kind in ("dict", "file"):
                    key = self.evaluate(inside)
                    self._require_unchanged(node, value, str(key), record)
                    default = other[0] if other else ast.Constant(None)
                    fields = {key: self.try_evaluate(default)} | record.fields
                    return self._item(node, Record(record.kind, fields), key)
            case ast.Attribute(value=ast.Name() as module, attr=name), args if name in MATH:
                if self.script.module_path(module) in ("math", "numpy"):
                    return self.apply(node, MATH[name], [self._number(arg) for arg in args])
        return self._try_readers(node, node)

    def _is_only_read(self, name: ast.Name) -> bool:
        """Whether a literal list is only indexed, iterated and told, so that its length stays."""
        script, binding = self.script, self.script.binding_of(name)
        listed = isinstance(getattr(binding, "value", None), ast.List | ast.Tuple)
        uses = (use for use in script.reads_of(name.id) if binding in script.bindings_of(use))
        return listed and all(
            isinstance(outer, ast.For | ast.FormattedValue)
            or (isinstance(outer, ast.Subscript) and isinstance(outer.ctx, ast.Load))
            or (isinstance(outer, ast.Call) and not script.places_of(outer.func)
                and ast.unparse(outer.func) in NAMES["reading_builtins"])
            or last_name(getattr(outer, "func", name)) in {"get_epsilon"} - script.functions.keys()
            for outer in map(script.parents.get, uses)
        )  # fmt: skip

    def apply(self, node: ast.expr, function: Callable[..., Any], values: list[Any]) -> Any:
        """Return what a function gives for some values; raises ``Unreadable`` if it fails."""
        try:
            return _require_small(node, function(*values))
        except (ArithmeticError, ValueError, TypeError) as error:
            raise Unreadable(node, f"it fails: {error}") from None

    def origin_of(self, node: ast.expr | None, depth: int = 0) -> ast.expr | None:
        """Return what a name, or an attribute of ``self``, is made by before private calls."""
        script, target = self.script, None
        if depth > MAX_DEPTH:
            return None
        of_self = isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "self"
        if not (of_self or isinstance(node, ast.Name)):
            inner = None if node is None else self.returned_expression(node)
            return node if inner is node else self.origin_of(inner, depth + 1)
        every = script.resolve(getattr(node, "id", ""), script.scope_of(node or script.tree))[1]
        places = script.places_of(node), [item.node for item in every]
        own = next(filter(None, ([place for place in some if not self.is_set_by_private_call(place)]
                                 for some in places)), [])  # fmt: skip
        made = [Binding(place, assigned_to(script, place)) for place in own]
        target = made[0].node if _is_one(made := self._running(made)) else None
        if isinstance(target, ast.arg) and isinstance(node, ast.Name):
            passed = self.attempt(self.arguments_for, node, target)
            return self.origin_of(passed[0], depth + 1) if passed and len(passed) == 1 else None
        if target is None:
            return None
        outer = script.parents[target]
        statement = script.parents.get(outer)
        if isinstance(outer, ast.Tuple) and isinstance(statement, ast.Assign):
            whole = self.returned_expression(statement.value)
            if isinstance(whole, ast.Tuple) and len(whole.elts) == len(outer.elts):
                return self.origin_of(whole.elts[outer.elts.index(target)], depth + 1)  # type: ignore[arg-type]
            return None
        return self.origin_of(assigned_to(script, target), depth + 1)

    def returned_expression(self, node: ast.expr) -> ast.expr:
        """Return what a call of a function with one final ``return`` returns, else the node."""
        function = self.script.function_of(node.func) if isinstance(node, ast.Call) else None
        if function is not None and not function.decorator_list:
            yields = any(isinstance(o, ast.Yield | ast.YieldFrom) for o in ast.walk(function))
            match [] if yields else self.script.returns_of(function):
                case [ast.Return(value=value) as only]:
                    outer = self.script.parents[only]
                    while isinstance(outer, ast.With):
                        outer = self.script.parents[outer]
                    return (value or ast.Constant(None)) if outer is function else node
        return node


def _is_one(bindings: list[Binding]) -> bool:
    """Whether bindings give a name the same: there is one, or a notebook says it again."""
    try:
        texts = {item if item.value is None else ast.dump(item.value) for item in bindings}
    except ValueError:  # of an integer of many digits
        return len(bindings) == 1
    return len(texts) == 1


def _require_small(node: ast.expr, value: Any) -> Any:
    """Return a value; raises ``Unreadable`` for an integer of more than ``MAX_BITS`` bits."""
    if isinstance(value, complex) or (isinstance(value, int) and value.bit_length() > MAX_BITS):
        raise Unreadable(node, "it is too large, or not real")
    return value


def default_of(function: ast.AST, name: str) -> ast.expr | None:
    """Return the default of a parameter, if it has one."""
    spec: ast.arguments = function.args  # type: ignore[attr-defined]
    every = [*spec.posonlyargs, *spec.args]
    pairs = [
        *zip(every[len(every) - len(spec.defaults) :], spec.defaults, strict=True),
        *zip(spec.kwonlyargs, spec.kw_defaults, strict=True),
    ]
    return next((default for arg, default in pairs if arg.arg == name), None)


def source_text(node: ast.AST) -> str:
    """Return the source of a node on one line of at most 60 characters."""
    try:
        text = " ".join(ast.unparse(node).split())
    except (ValueError, RecursionError):
        return "..."
    return text if len(text) <= 60 else f"{text[:57]}..."


def is_left_out(values: Evaluator, node: ast.AST) -> bool:
    """Whether conditions with known values prevent ``node``, or all calls of it, from running."""
    for outer in values.script.ancestors(node):
        if isinstance(outer, ast.If | ast.IfExp):
            left_out = {True: "orelse", False: "body"}.get(values.decided(outer.test))  # type: ignore[arg-type]
            if branch(values.script, outer, node) == left_out:
                return True
        elif isinstance(outer, ast.FunctionDef) and values.is_never_called(outer):
            return True
    return False
