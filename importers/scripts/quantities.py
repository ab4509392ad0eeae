"""Read the quantities that the calls of a script state, such as noise, lot size and epochs."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Any

from affidavit.importers.directives import DIRECTIVE_FIELDS
from affidavit.importers.libraries import Call, Library
from affidavit.importers.names import NAMES
from affidavit.importers.partial_plan import SourceSpan, is_number, not_imported
from affidavit.importers.scripts.conditions import exclude_each_other
from affidavit.importers.scripts.options import READERS
from affidavit.importers.scripts.step_count import fits_alone, optimizer_steps, passes_around
from affidavit.importers.scripts.syntax import Script, keywords_of, last_name, names_in, unpacks
from affidavit.importers.scripts.values import Evaluator, Unreadable, source_text
from affidavit.plan import MalformedPlan

PLAN_POINTERS = {key: "/" + "/".join(path) for key, path in DIRECTIVE_FIELDS.items()} | {
    "noise_multiplier": "/releases/0/noise_multiplier", "clip_norm": "/releases/0/clip_norm",
    "expected_rate": "/sampling/probability",
}  # fmt: skip
"""The plan field of each quantity, as a JSON pointer."""
LENGTH_QUANTITIES = ("steps", "epochs")
WORD = re.compile(r"\w+")


class Quantities:
    """Read the quantities that a library's private call, and related calls, state."""

    def __init__(self, library: Library, script: Script, call: ast.Call) -> None:
        self.library, self.script, self.call = library, script, call
        self.kind = f"{library.name} script"
        self.values = Evaluator(script, READERS)
        whole = self.values.with_unpacked_keywords(call)
        self.arguments = arguments_of(whole, library.private, self.kind)
        self.lines: list[tuple[str, int]] = [("", call.lineno)]
        self.unread: dict[str, str] = {}
        self.read_literals: dict[str, SourceSpan] = {}
        self.uncounted: Unreadable | None = None
        """Why the text does not show how often it trains, if that is more than a number."""

    def refusal(self, message: str, remedy: str, line: int | None = None) -> MalformedPlan:
        """Return the error for this script, at the private call unless ``line`` is given."""
        return not_imported(self.kind, message, remedy, line or self.call.lineno)

    def quantity(self, name: str) -> Any:
        """Return a quantity of the private call, or of a related one; raises ``MalformedPlan``."""
        read: list[tuple[Any, int]] = []
        running = 0
        try:
            for call, node in self._stating_calls(name):
                if call.accounts and call is not self.library.private:
                    settles = name in NAMES["settled_by_accounting"]
                    settled = settles and PLAN_POINTERS[name] not in self.unread
                    if (running and name == "target_delta") or not (running or settled):
                        break  # an accountant may be asked at another δ, and not know what runs
                value = self._evaluated(call, node, name)
                if value is not None:
                    read.append((value, node.lineno))
                    running += not call.accounts
        except Unreadable as reason:
            self.unread[PLAN_POINTERS[name]] = reason.why
            return None
        if not read:
            return None
        if name == "steps" and running > 1:
            self.unread[PLAN_POINTERS[name]] = "several calls set the number of steps."
            return None
        value, line = read[0]
        for other, where in read[1:]:
            if other != value:
                message = f"{name} is {value} on line {line}, and {other} on line {where}."
                remedy = "Make them the same, so that the accounting matches the run."
                raise self.refusal(message, remedy, where)
        return value

    def _stating_calls(self, name: str) -> Iterator[tuple[Call, ast.Call]]:
        """Yield the calls that state a quantity: training first, accounting last."""
        calls = [self.library.private, *self.library.beside, *self.library.samplers]
        for call in sorted(calls, key=lambda item: item.accounts):
            if name in call.replaces and (use := self._other_use(call, [])) is not None:
                line = getattr(use, "lineno", "?")
                raise Unreadable(use, f"line {line}: {source_text(use)} may replace it.")
            if name not in call.quantities:
                continue
            if not (call is self.library.private or call.trains or call.accounts):
                self._require_unset(call, name)
            own = call is self.library.private
            nodes = [self.call] if own else list(self._matching_calls(call))
            if call.trains and (why := self._not_one_training(call, nodes)) is not None:
                raise Unreadable(nodes[0] if nodes else self.call, why)
            yield from ((call, node) for node in nodes)

    def _require_unset(self, call: Call, name: str) -> None:
        """Raise ``Unreadable`` if the script changes a setting after it is made."""
        of_it = LENGTH_QUANTITIES if name in LENGTH_QUANTITIES else (name,)
        for text in (call.quantities[key] for key in of_it if key in call.quantities):
            for part in WORD.findall(text):
                for store in self.script.stored_attributes.get(part, ()):
                    if getattr(store.value, "id", "") != "self":
                        why = f"line {store.lineno}: {part} is set while it runs."
                        raise Unreadable(store, why)

    def _not_one_training(self, call: Call, nodes: list[ast.Call]) -> str | None:
        """Explain why training may happen outside of one call, or return None."""
        if not exclude_each_other(self.script, *nodes):
            lines = ", ".join(str(node.lineno) for node in nodes)
            return f"{call.names[0]} is called {len(nodes)} times (lines {lines})."
        other = self._other_use(call, nodes, NAMES["other_training"])
        if other is None:
            return None
        return f"line {getattr(other, 'lineno', '?')}: {source_text(other)} may train too."

    def _other_use(
        self, call: Call, nodes: list[ast.Call], others: tuple[str, ...] = ()
    ) -> ast.AST | None:
        """Find a use of these methods other than the calls ``nodes``."""
        called, names = {node.func for node in nodes}, (*call.names, *others)
        used = (node for node in self.script.nodes
                if isinstance(node, ast.Attribute) and node.attr in names
                and node not in called and not fits_alone(self.script, node)
                and not self.script.comes_from(node, ("re",)))  # fmt: skip
        return next(used, None)

    def _matching_calls(self, call: Call) -> Iterator[ast.Call]:
        """Yield the calls with these names, except of methods of this file's own classes."""
        for node in self.script.calls_to(*call.names):
            owner = getattr(node.func, "value", None)
            made = self.script.value_of(owner) if isinstance(owner, ast.Name) else owner
            bound = self.script.binding_of(getattr(made, "func", None))
            own = getattr(getattr(bound, "node", None), "body", [])
            alone = call.trains and fits_alone(self.script, node.func)
            if not (alone or any(getattr(item, "name", "") in call.names for item in own)):
                yield node

    def settings(self, argument: str) -> Iterator[ast.expr]:
        """Yield what the private call, or else related calls, pass for an argument."""
        if argument in self.arguments:
            yield self.arguments[argument]
            return
        for call in self.library.beside:
            if not call.accounts:
                named = (keywords_of(node) for node in self._matching_calls(call))
                yield from (item[argument] for item in named if argument in item)

    def trainings(self) -> Iterator[ast.Call]:
        """Yield the calls that train."""
        for call in self.library.beside:
            if call.trains:
                yield from self._matching_calls(call)

    def _evaluated(self, call: Call, node: ast.Call, name: str) -> Any:
        """Return what ``node`` states of a quantity, or None if that is not known."""
        whole = self.values.with_unpacked_keywords(node)
        own = node is self.call
        arguments = self.arguments if own else arguments_of(whole, call, self.kind)
        expression = ast.parse(call.quantities[name], mode="eval").body
        if names_in(expression) - arguments.keys() - call.defaults.keys():
            if call.trains and name == "steps" and passes_around(self.values, node)[1] != 1:
                raise Unreadable(node, f"line {node.lineno}: a loop repeats it.")
            return None
        filled = _ArgumentSubstitution(arguments, call.defaults).visit(expression)
        value = self.read(filled, PLAN_POINTERS[name], call.quantities[name], line=node.lineno)
        if value is not None and name in ("epochs", "steps") and not call.accounts:
            return self._repeated(node, name, value)
        return value

    def _repeated(self, node: ast.Call, name: str, count: Any) -> Any:
        """Return ``count`` times the loops around a call, or around the run it configures."""
        pointer = PLAN_POINTERS[name]
        if keywords_of(node).keys() & {"steps_per_epoch", "initial_epoch"}:
            self.unread[pointer] = "steps_per_epoch or initial_epoch changes its length."
            return None
        draws, own = self.script.calls_to(self.library.draws or ""), optimizer_steps(self.values)
        shown = not self.library.draws or draws or not (own or self.library.scheme == "shuffled")
        if len(draws) > 1 or not shown:
            self.unread[pointer] = f"its lots are drawn {len(draws)} times."
            return None
        around_it: ast.AST = draws[0] if draws else node
        for outer in self.script.ancestors(around_it) if draws else ():
            if isinstance(outer, ast.For) and draws[0] in ast.walk(outer.iter):
                around_it = outer  # its turns are the lots
        try:
            length, times, _ = passes_around(self.values, around_it)
        except Unreadable as reason:
            at = getattr(reason.node, "lineno", node.lineno)
            self.unread[pointer] = f"line {at}: {reason.why}."
            self.uncounted = reason
            return None
        return None if length == "epochs" else count * times

    def read(
        self, node: ast.expr | None, pointer: str, name: str, kind: type = float,
        line: int | None = None,
    ) -> Any:  # fmt: skip
        """Return the value of an expression, or None with the reason in ``unread``."""
        if node is None:
            return None
        line = getattr(node, "lineno", None) or line or self.call.lineno
        self.values.read_literals.clear()
        try:
            value = self.values.evaluate(node)
        except Unreadable as reason:
            at = getattr(reason.node, "lineno", line)
            self.unread[pointer] = f"{name}={source_text(node)}: {reason.why} (line {at})."
            return None
        if value is None or (name == "max_steps" and value == -1):
            return None
        if not (isinstance(value, bool) if kind is bool else is_number(value)):
            self.unread[pointer] = f"{name}={source_text(node)} is not a {kind.__name__}."
            return None
        self.lines.append((pointer, line))
        self.note_literal(pointer, value)
        return value

    def note_literal(self, pointer: str, value: Any) -> None:
        """Record the only literal in the text that has the value just read."""
        literals = (item for item in self.values.read_literals if hasattr(item, "lineno"))
        same = [item for item in literals if item.value == value]
        if len(same) == 1:
            end = same[0].end_lineno or 0, same[0].end_col_offset or 0
            self.read_literals[pointer] = (same[0].lineno, same[0].col_offset, *end)


class _ArgumentSubstitution(ast.NodeTransformer):
    """Replace argument names in an expression by the arguments of a call."""

    def __init__(self, arguments: dict[str, ast.expr], defaults: Any) -> None:
        self.arguments, self.defaults = arguments, defaults

    def visit_Name(self, node: ast.Name) -> ast.expr:
        """Return the argument with this name, or its default."""
        return self.arguments.get(node.id) or ast.Constant(self.defaults.get(node.id))


def arguments_of(call: ast.Call, meaning: Call, kind: str) -> dict[str, ast.expr]:
    """Return the arguments of a call by name; raises ``MalformedPlan`` if some have no name."""
    if unpacks(call) or (len(call.args) > len(meaning.positional) and not meaning.accounts):
        name = last_name(call.func)
        message = f"{name} has arguments without a name."
        remedy = "Name each argument in the call, or write a plan."
        raise not_imported(kind, message, remedy, call.lineno)
    return dict(zip(meaning.positional, call.args, strict=False)) | keywords_of(call)


def attributes_used_of(script: Script, call: ast.Call) -> list[ast.Attribute]:
    """Return the attributes used of a call's result, of its names, or of a ``chain`` with it."""
    names, made = set[str | None](), [call]
    for part in made:
        outer = script.parents[part]
        if isinstance(outer, ast.Attribute):
            return [outer]
        for target in getattr(outer, "targets", ()):
            names |= {last_name(part) for part in ast.walk(target)} - {None}
        for chain in script.calls_to("chain"):
            own = part in chain.args or any(last_name(arg) in names for arg in chain.args)
            made += [chain] if own and chain not in made else []
    uses = (node for node in script.nodes if isinstance(node, ast.Attribute))
    return [node for node in uses if last_name(node.value) in names - {"self"}]
