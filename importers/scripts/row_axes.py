"""Track the record axis of arrays, and find the operations in which records interact.

An operation on single elements, or along another axis than the records', keeps records apart. A
loss may be a sum or mean over the record axis, if it is only added to or scaled by public values.
Any other operation along the record axis, or over all axes, joins records. Functions outside of
the repository are assumed to keep rows apart, or to sum a loss of each.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from affidavit.importers.names import NAMES
from affidavit.importers.scripts.data_flow import (
    MODELS,
    SIZE_ATTRIBUTES,
    WRAPPERS,
    Tainted,
    ancestors_within,
    content_parts,
    reads_records,
)
from affidavit.importers.scripts.syntax import assigned_to, keywords_of, last_name, root_of
from affidavit.importers.scripts.values import Evaluator

ROWS, BATCH, LOSS, SUM = "rows", "batch", "loss", "sum"
SPLIT_ORDER = "parted"
"""The row order of the parts that rows are split into; each part has its own."""
LINEAR = frozenset(NAMES["linear"])
ELEMENTWISE = frozenset(NAMES["elementwise"])
SUMS = frozenset(NAMES["sums"])
EXTREMES = frozenset(NAMES["extremes"])
JOINS = frozenset(NAMES["joins"])
VIEWS = frozenset(NAMES["views"])
AXIS_SECOND = frozenset(NAMES["axis_second"])
RECORD_TOTALS = SUMS | EXTREMES | {"next", "bincount", "value_counts", "Counter"}
"""Functions that combine all records, or draw a lot of their own."""
ARRAY_PACKAGES = ("torch", "tensorflow", "jax", "numpy", "einops")
JOINING_ROWS = (*JOINS, "ConcatDataset", "concatenate_datasets")
REPEAT_FUNCTIONS = ("repeat", "repeat_interleave", "tile")
NETWORKS = MODELS + NAMES["networks"]
"""Suffixes of the names of networks."""


class RowLayout(NamedTuple):
    """How an expression depends on the records of a lot: its form, record axis and row order.

    ``BATCH`` may hold several arrays of rows. ``LOSS`` is one number, or one for each record.
    """

    form: str = ROWS
    axis: int = 0
    order: str = ""


class RowTracker:
    """Track the records of one lot through statements, and collect where they interact.

    ``faults`` maps ``mixed`` (several records in a row) or ``joined`` to the first such node.
    """

    def __init__(
        self, values: Evaluator, *, inside_model: bool = False, checks_totals: bool = False
    ) -> None:
        self.values, self.script = values, values.script
        self.inside_model, self.checks_totals = inside_model, checks_totals
        self.bound: dict[str, RowLayout | None] = {}
        self.tainted: Tainted = set()
        self.layouts: dict[ast.AST, RowLayout | None] = {}
        self.faults: dict[str, ast.AST] = {}
        self.assigned: dict[str, list[ast.expr]] = {}
        self.returned_values: list[ast.expr] = []
        self.inner_calls: dict[ast.AST, RowTracker] = {}
        self.depth = 0

    # ---- statements ---------------------------------------------------------------------

    def run(self, statement: ast.AST, seen: Tainted) -> RowLayout | None:
        """Evaluate one statement, where ``seen`` names hold records."""
        self.tainted = seen
        match statement:
            case ast.Assign(targets=targets, value=value):
                made = self.layout_of(value)
                for target in targets:
                    self._bind(target, value, made)
            case ast.AugAssign(target=ast.Name() | ast.Attribute() as target, op=op, value=value):
                load = ast.copy_location(ast.BinOp(target, op, value), statement)
                self._bind(target, load, self.layout_of(load))
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                self._bind(target, value, self.layout_of(value))
            case ast.Return(value=ast.expr() as value):
                self.returned_values.append(value)
                return self.layout_of(value)
            case ast.Expr(value=value):
                self.layout_of(value)
        return None

    def _bind(self, target: ast.expr, value: ast.expr, made: RowLayout | None) -> None:
        match target, value:
            case (
                (ast.Tuple(elts=names) | ast.List(elts=names)),
                (ast.Tuple(elts=parts) | ast.List(elts=parts)),
            ) if len(names) == len(parts):
                for name, part in zip(names, parts, strict=True):
                    self._bind(name, part, self.layouts.get(part))
                return
            case ((ast.Tuple(elts=names) | ast.List(elts=names)), _):
                whole = made._replace(form=ROWS) if made and made.form == BATCH else made
                for place, name in enumerate(names):
                    if whole is not None and whole.order.startswith(SPLIT_ORDER):
                        whole = whole._replace(order=f"{SPLIT_ORDER} {place}")
                    self._bind(name, value, whole)
                return
            case ast.Subscript(value=base), _:  # a part of the rows is set
                before = self.layout_of(target)
                if before is not None and made is not None:
                    self._combine(target, [before, made])
                made, target = self.layout_of(base) or made, base
        if isinstance(target, ast.Name):
            self.assigned.setdefault(target.id, []).append(value)
        named = last_name(target.value if isinstance(target, ast.Starred) else target)
        if named is not None and (made is not None or named not in self.tainted):
            self.bound[named] = made

    def enter_loop(self, loop: ast.For) -> None:
        """Bind the targets of a loop to what it iterates."""
        self.layout_of(loop.iter)
        target, over = loop.target, loop.iter
        match target, over:
            case ast.Tuple(elts=[_, row]), ast.Call(func=ast.Name(id="enumerate"), args=[first]):
                target, over = row, first
        names, parts = getattr(target, "elts", []), getattr(over, "args", [])
        if last_name(getattr(over, "func", loop)) == "zip" and len(names) == len(parts):
            for name, part in zip(names, parts, strict=True):
                self._bind(name, part, self.layouts.get(part))
        elif (of := self.layouts.get(over)) is not None:
            self._bind(target, over, of)

    # ---- expressions --------------------------------------------------------------------

    def layout_of(self, node: ast.AST | None) -> RowLayout | None:
        """Return the layout of an expression, or None if it does not depend on records."""
        if node is None:
            return None
        made = self._layout_of(node)
        self.layouts[node] = made
        return made

    def _layout_of(self, node: ast.AST) -> RowLayout | None:
        match node:
            case ast.Constant() | ast.Lambda():
                return None
            case ast.Name(id=name):
                return self._layout_of_name(node, name)
            case ast.Attribute(value=base, attr=name):
                if name in SIZE_ATTRIBUTES:
                    return None
                if (own := self._layout_of_name(node, name)) is not None:
                    return own
                of = self.layout_of(base)
                if of is not None and name == "loss":
                    return RowLayout(SUM)  # of a model's outputs
                return of and (of._replace(axis=1 - of.axis) if name == "T" and of.axis < 2 else of)
            case ast.BinOp(left=left, op=op, right=right):
                return self._binary_operation(node, self.layout_of(left), op, self.layout_of(right))
            case ast.Compare(left=left, ops=ops, comparators=others):
                sides = [self.layout_of(side) for side in (left, *others)]
                if not isinstance(ops[0], ast.Eq | ast.NotEq | ast.Lt | ast.LtE | ast.Gt | ast.GtE):
                    return None
                if {side.form for side in sides if side is not None} == {LOSS, SUM}:
                    self._add_fault("joined", node)
                return self._combine(node, sides)
            case ast.Subscript(value=base, slice=index):
                return self._subscript(node, self.layout_of(base), index)
            case ast.Call():
                return self._call(node)
            case ast.NamedExpr(target=target, value=value):
                made = self.layout_of(value)
                self._bind(target, value, made)
                return made
            case ast.ListComp() | ast.SetComp() | ast.GeneratorExp() | ast.DictComp():
                parts = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
                over = [(loop, self.layout_of(loop.iter)) for loop in node.generators]
                for loop, of in over:
                    self._bind(loop.target, loop.iter, None if of == RowLayout() else of)
                    if isinstance(loop.target, ast.Name) and of == RowLayout():
                        self.bound[loop.target.id] = None  # each row by itself
                return self._first_layout(parts) or next(
                    (of for _, of in over if of == RowLayout()), None
                )
        return self._first_layout(ast.iter_child_nodes(node))

    def _first_layout(self, nodes: Iterable[ast.AST]) -> RowLayout | None:
        """Return the most specific layout of several expressions."""
        parts = [part for node in nodes if (part := self.layout_of(node)) is not None]
        return min(parts, key=lambda part: (ROWS, BATCH, LOSS, SUM).index(part.form), default=None)

    def _layout_of_name(self, node: ast.Name | ast.Attribute, name: str) -> RowLayout | None:
        if name in self.bound:
            return self.bound[name]
        if name in self.tainted and name != "self":
            return RowLayout(BATCH)
        bound = self.script.parents.get(getattr(self.script.binding_of(node), "node", node), node)
        bound = self.script.parents[bound] if isinstance(bound, ast.Tuple) else bound
        made = getattr(bound, "value", None) if isinstance(bound, ast.Assign) else None
        totals = [
            part for part in content_parts(made or node)
            if isinstance(part, ast.Call) and last_name(part.func) in RECORD_TOTALS
        ]  # fmt: skip
        if self.checks_totals and any(reads_records(self.values, item) for item in (node, *totals)):
            self._add_fault("joined", node)
        return None

    def _add_fault(self, code: str, node: ast.AST) -> None:
        self.faults.setdefault(code, node)

    def _combine(
        self, node: ast.AST, parts: Iterable[RowLayout | None], *, aligned: bool = True
    ) -> RowLayout | None:
        """Return the layout of an operation that combines its parts row by row."""
        own = [part for part in parts if part is not None]
        rows = [part for part in own if part.form in (ROWS, BATCH)]
        if len({part.order for part in rows}) > 1:
            self._add_fault("mixed", node)
        sums = any(part.form == SUM for part in own)
        if aligned and ((sums and rows) or len({part.axis for part in rows}) > 1):
            self._add_fault("joined", node)
        if not own:
            return None
        return rows[0]._replace(form=ROWS) if rows else RowLayout(SUM if sums else LOSS)

    def _binary_operation(
        self, node: ast.AST, left: RowLayout | None, op: ast.operator, right: RowLayout | None
    ) -> RowLayout | None:
        one = left or right
        if left is None or right is None:
            scales = isinstance(op, ast.Add | ast.Sub | ast.Mult) or (
                isinstance(op, ast.Div) and right is None
            )
            if one is not None and one.form == SUM and not scales:
                self._add_fault("joined", node)
            return one
        if isinstance(op, ast.MatMult):
            if left.axis != right.axis:
                self._add_fault("joined", node)
            return left
        if SUM in (left.form, right.form) and (
            not isinstance(op, ast.Add | ast.Sub)
            or (left.form != right.form and _shares_name(node))
        ):
            self._add_fault("joined", node)
        return self._combine(node, [left, right])

    def _subscript(
        self, node: ast.Subscript, base: RowLayout | None, index: ast.expr
    ) -> RowLayout | None:
        """Return the layout of a subscript: a slice, reordered rows, or one of several arrays."""
        first = index.elts[0] if isinstance(index, ast.Tuple) and index.elts else index
        by = self.layout_of(index)
        if base is None:
            return by
        if base.form not in (ROWS, BATCH) or base.axis != 0:
            moved = 0
            if isinstance(first, ast.Constant) and base.form in (ROWS, BATCH):
                moved = 1 if first.value is None else -(first is index)
            return base._replace(axis=base.axis + moved)
        match first:
            case ast.Constant(value=None):
                return base._replace(axis=1)
            case ast.Slice(lower=lower, upper=upper):
                bounds = [part for part in (lower, upper) if part is not None]
                if any(self.layouts.get(part) for part in bounds) or (
                    base.form == ROWS
                    and (
                        any(isinstance(self.values.known_value(part), int) for part in bounds)
                        or (len(bounds) == 1 and not self._has_rest(node, lower, upper))
                    )
                    and not (lower is None and self.values.known_value(upper) == 0)
                ):
                    self._add_fault("joined", node)
            case ast.Name() | ast.Call() | ast.Compare() if first is index or all(
                isinstance(item, ast.Slice) for item in getattr(index, "elts", [])[1:]
            ):
                made = self.script.value_of(first) if isinstance(first, ast.Name) else first
                drawn = isinstance(made, ast.Call | ast.Compare)
                if self.values.known_value(first) is None and (base.form == ROWS or drawn or by):
                    return base._replace(order=ast.unparse(first))
        return base

    def _has_rest(
        self, node: ast.Subscript, lower: ast.expr | None, upper: ast.expr | None
    ) -> bool:
        """Whether the script also uses what a slice leaves: ``x[n:]`` beside ``x[:n]``."""
        rest = ast.Subscript(node.value, ast.Slice(upper, lower), ast.Load())
        text = ast.dump(rest)
        return any(
            isinstance(other, ast.Subscript) and ast.dump(other) == text
            for other in self.script.nodes
        )

    # ---- calls --------------------------------------------------------------------------

    def _call(self, node: ast.Call) -> RowLayout | None:
        made = self.script.value_of(node.func) if isinstance(node.func, ast.Name) else None
        function = made if isinstance(made, ast.Attribute) else node.func
        name = (last_name(function) or "").rstrip("_")
        if name in SIZE_ATTRIBUTES or name in NAMES["tests"]:
            return None
        keywords, args, space = keywords_of(node), list(node.args), self._namespace(function)
        method = isinstance(node.func, ast.Attribute) and space is None
        base = getattr(node.func, "value", None) if method else None
        base = (args[0] if args else keywords.get("input")) if space else base
        rest = args if method else args[1:]
        owner = self.layout_of(base)
        parts = [
            self.layout_of(arg)
            for arg in (*rest, *keywords.values(), *(args[:1] if not base else ()))
        ]
        if name in WRAPPERS | {"list", "tuple", "zip", "iter", "next", "dict"} and not method:
            return self._first_layout([*args, *keywords.values()])
        if space == "functional":
            place = 1 if name in AXIS_SECOND else 0
            axis = rest[place] if name in NAMES["axes"] and len(rest) > place else None
            return self._functional(
                node, name, owner, parts, keywords.get("dim", keywords.get("axis", axis))
            )
        if space is None and (not method or owner is None or name in self.script.functions):
            return self._unknown_call(node, name, [owner, *parts])
        return self._array_operation(
            node, name.removeprefix("reduce_"), base, owner, parts, rest, keywords
        )

    def _namespace(self, function: ast.expr) -> str | None:
        """Return ``core`` or ``functional`` for a function on arrays, None for any other."""
        root = root_of(function)
        if not isinstance(root, ast.Name):
            return None
        origins = [self.script.import_origin(item) for item in self.script.bindings_of(root)]
        path = ast.unparse(function).split(".")
        module, name = origins[0] if origins else (None, None)
        if module is None:
            return "functional" if path[0] == "F" and not origins else None
        dotted = ".".join([module, *([name] if name else []), *path[1:]]).rpartition(".")[0]
        if dotted in NAMES["core"] or dotted.startswith(("scipy", "sklearn")):
            return "core"
        return "functional" if dotted.startswith(("torch.nn", "tensorflow.nn", "jax.nn")) else None

    def _unknown_call(
        self, node: ast.Call, name: str, parts: list[RowLayout | None]
    ) -> RowLayout | None:
        """Return the layout of a call that is no array operation: rows, or a loss."""
        own = [part for part in parts if part is not None]
        if isinstance(node.func, ast.Name) and name in ("max", "min", "sorted") and own:
            return RowLayout(SUM)
        if own and name.startswith("fit"):
            self._add_fault("joined", node)
        if name == "sum" and own and isinstance(node.args[0], ast.Name | ast.Attribute):
            return RowLayout(SUM) if own[0].form in (ROWS, BATCH) else own[0]
        if own and self._differentiates(node.func):
            return RowLayout(SUM)
        match node:
            case ast.Call(args=[ast.Lambda() as mapped, *rest]) if own and name.endswith("map"):
                return self._call_layout(self.values, mapped, ast.Call(node.func, rest, []))
        function = (
            self._find_definition(node.func, len(own) > 1) if self.depth < 3 and own else None
        )
        if function is not None:
            return self._call_layout(*function, node)
        if any(part.form in (ROWS, BATCH) for part in own):
            made = self._combine(node, [p for p in own if p.form != SUM], aligned=False)
            runs = name.lower().endswith(NETWORKS)
            self.inside_model = self.inside_model or runs
            if runs and made is not None:
                return made._replace(axis=0)
            named = any(part in ast.unparse(node.func).lower() for part in ("loss", "criterion"))
            return RowLayout(LOSS) if named or len(own) > 1 else made
        return own[0] if own else None

    def _differentiates(self, function: ast.expr | None) -> bool:
        """Whether a function is the gradient of one loss: ``jax.grad(...)`` without ``vmap``."""
        made = self.script.value_of(function) if isinstance(function, ast.Name) else function
        while isinstance(made, ast.Call) and last_name(made.func) == "jit" and made.args:
            made = made.args[0]
        return isinstance(made, ast.Call) and last_name(made.func) in NAMES["differentiators"]

    def _find_definition(
        self, name: ast.expr, is_loss: bool, depth: int = 0
    ) -> tuple[Evaluator, ast.FunctionDef | ast.Lambda] | None:
        """Find the called function in the repository; for an object, its ``forward``.

        An object that may be a loss (a call with several arguments) is followed to its callers.
        """
        made, stores = name, list[ast.Attribute]()
        if isinstance(name, ast.Attribute) and getattr(name.value, "id", "") == "self":
            methods = self.script.functions.get(name.attr, [])
            stores = [] if methods else self.script.stored_attributes.get(name.attr, [])
            if not is_loss or len(stores) != 1:
                return (self.values, methods[0]) if len(methods) == 1 else None
        if isinstance(name, ast.Name) or stores:
            target = stores[0] if stores else getattr(self.script.binding_of(name), "node", None)
            sources = [] if target is None else [assigned_to(self.script, target)]
            if is_loss and isinstance(target, ast.arg) and isinstance(name, ast.Name):
                sources = [*self.values.known_arguments(name, target)]
            made = sources[0] if len(sources) == 1 and sources[0] is not None else name
            if is_loss and isinstance(made, ast.Name) and made is not name and depth < 5:
                return self._find_definition(made, is_loss, depth + 1)
        if isinstance(made, ast.Lambda):
            return self.values, made
        maker = made.func if isinstance(made, ast.Call) else name
        own = getattr(self.script.binding_of(maker), "node", None)
        place: tuple[Evaluator, ast.AST] | None = self.values, own or name
        if not isinstance(own, ast.FunctionDef | ast.ClassDef) and self.values.find_definition:
            place = self.values.find_definition(self.values, maker)
        values, node = place or (self.values, name)
        for item in getattr(node, "body", ()) if maker is not name else (node,):
            runs = maker is name or getattr(item, "name", "") in ("forward", "__call__")
            if isinstance(item, ast.FunctionDef) and runs:
                return values, item
        return None

    def _call_layout(
        self, values: Evaluator, function: ast.FunctionDef | ast.Lambda, call: ast.Call
    ) -> RowLayout | None:
        """Return the layout of what a function of the repository returns."""
        passed = values.script.passed_arguments(function, call)
        inner = self.inner_calls[call] = RowTracker(values, inside_model=self.inside_model)
        inner.depth = self.depth + 1
        inner.bound = {name: self.layouts.get(item) for name, item in passed}
        body = [ast.Return(function.body)] if isinstance(function, ast.Lambda) else [
            node for node in _statements(function) if values.script.scope_of(node) is function
        ]  # fmt: skip
        made = [inner.run(node, set()) for node in body]
        for code in inner.faults:
            self._add_fault(code, function if isinstance(function, ast.Lambda) else call)
        return next((of for of in reversed(made) if of is not None), None)

    def _functional(
        self, node: ast.Call, name: str, owner: RowLayout | None, parts: list[RowLayout | None],
        axis: ast.expr | None,
    ) -> RowLayout | None:  # fmt: skip
        """Return the layout of a ``torch.nn.functional`` call, which keeps rows apart."""
        own = [part for part in (owner, *parts) if part is not None]
        if own and (name in NAMES["layers"] or (owner and self._is_along(axis, owner))):
            self._add_fault("joined", node)
        made = self._combine(node, own, aligned=name != "ctc_loss")
        return RowLayout(LOSS) if len(own) > 1 else made

    def _array_operation(
        self, node: ast.Call, name: str, base: ast.expr | None, owner: RowLayout | None,
        parts: list[RowLayout | None], args: list[ast.expr], keywords: dict[str, ast.expr],
    ) -> RowLayout | None:  # fmt: skip
        """Return the layout of an array operation, by the axis that it works along."""
        own = [part for part in (owner, *parts) if part is not None]
        if not own:
            return None
        if name == "einsum":
            return self._einsum(node, own)
        if owner is None or name in ELEMENTWISE:
            if owner is not None and owner.form == SUM:
                self._add_fault("joined", node)
            return self._combine(node, own)
        axis = keywords.get("dim", keywords.get("axis", keywords.get("dims")))
        place = 1 if name in AXIS_SECOND else 0
        if axis is None and len(args) > place and name not in LINEAR - {"squeeze", "flatten"}:
            axis = None if self.layouts.get(args[place]) else args[place]
        if name in NAMES["products"]:
            return self._binary_operation(node, owner, ast.MatMult(), parts[0] if parts else None)
        if (turned := self._transposed(name, owner, args, axis)) is not None:
            return turned
        if name in JOINS or name == "stack":
            return self._concatenated(node, name, base, owner, axis)
        if name in (*REPEAT_FUNCTIONS, "rearrange"):
            if not self.inside_model and multiplies_rows(self.values, node):
                self._add_fault("mixed", node)
            return owner
        if name in ("view", "reshape", "flatten"):
            return self._reshaped(node, name, owner, args, axis)
        if name in LINEAR or owner.form not in (ROWS, BATCH):
            alone = axis is None or self._is_along(axis, owner)
            if owner.form == LOSS and alone and name not in LINEAR | SUMS | EXTREMES:
                self._add_fault("joined", node)
            return RowLayout(SUM) if name in SUMS | EXTREMES and alone else owner
        if axis is not None and not self._is_along(axis, owner):
            known = self.values.known_value(axis)
            fewer = isinstance(known, int) and 0 <= known < owner.axis and "keepdim" not in keywords
            return owner._replace(axis=owner.axis - fewer, form=ROWS)
        if name in SUMS | EXTREMES:
            return RowLayout(SUM)
        literal = all(self.values.known_value(arg) is not None for arg in args)
        method = base is getattr(node.func, "value", None)
        if name in NAMES["parts"]:
            return owner._replace(order=SPLIT_ORDER)
        if axis is None and method and not literal:
            return self._combine(node, own)
        if name in NAMES["reorders"]:
            return owner._replace(order=name)
        self._add_fault("joined", node)
        return owner

    def _is_along(self, axis: ast.expr | None, of: RowLayout) -> bool:
        """Whether a named axis is the record axis."""
        known = self.values.known_value(axis)
        if known is None or of.form == SUM:
            return False
        return of.axis in known if isinstance(known, list) else bool(known == of.axis)

    def _transposed(
        self, name: str, of: RowLayout, args: list[ast.expr], axis: ast.expr | None
    ) -> RowLayout | None:
        """Return the layout after an operation that moves axes, or None for any other."""
        known = [self.values.known_value(arg) for arg in args]
        known = known[0] if len(known) == 1 and isinstance(known[0], list) else known
        match name:
            case "t":
                return of._replace(axis=1 - of.axis) if of.axis < 2 else of
            case "transpose" | "swapaxes" | "movedim" if of.axis in known:
                other = known[1 - known.index(of.axis)] if len(known) == 2 else of.axis
                return of._replace(axis=other if isinstance(other, int) and other >= 0 else of.axis)
            case "transpose" | "swapaxes" | "movedim":
                return of
            case "permute":
                return of._replace(axis=known.index(of.axis)) if of.axis in known else of
            case "unsqueeze" | "expand_dims" | "squeeze":
                at, by = self.values.known_value(axis), -1 if name == "squeeze" else 1
                moved = isinstance(at, int) and 0 <= at < of.axis + (by > 0)
                return of._replace(axis=of.axis + by * moved)
        if name in VIEWS and of.axis == 0:
            first = self.values.known_value(args[0]) if args else -1
            first = first[0] if isinstance(first, list) and first else first
            return of._replace(axis=int(isinstance(first, int) and first != -1))
        return of if name in VIEWS else None

    def _concatenated(
        self, node: ast.Call, name: str, base: ast.expr | None, of: RowLayout, axis: ast.expr | None
    ) -> RowLayout:
        """Return the layout of concatenated or stacked arrays."""
        parts = [self.layouts.get(part) for part in getattr(base, "elts", [])]
        several = sum(part is not None and part.form != LOSS for part in parts) > 1
        known = 0 if axis is None else self.values.known_value(axis)
        if several and known == of.axis and name != "stack" and not self.inside_model:
            self._add_fault("mixed", node)
        if several and name == "stack" and known == 0:
            return of._replace(axis=of.axis + 1, form=ROWS)
        self._combine(node, [part for part in parts if part and part.axis != of.axis] + [of])
        return of

    def _reshaped(
        self, node: ast.Call, name: str, of: RowLayout, args: list[ast.expr], axis: ast.expr | None
    ) -> RowLayout:
        """Return the layout after a reshape, which may split records into several rows."""
        first = args[0] if args else None
        first = first.elts[0] if isinstance(first, ast.Tuple | ast.List) and first.elts else first
        if name == "flatten":
            known = self.values.known_value(axis)
            folds = known == 0 and len(args) > 1 if of.axis == 0 else known in (None, 0)
        else:
            product = isinstance(first, ast.BinOp) and isinstance(first.op, ast.Mult)
            folds = of.axis > 0 and (product or self.values.known_value(first) == -1)
        if folds and of.form in (ROWS, BATCH):
            if not self.inside_model:
                self._add_fault("mixed", node)
            return of._replace(axis=0)
        return of

    def _einsum(self, node: ast.Call, own: list[RowLayout]) -> RowLayout:
        """Return the layout of an ``einsum``, whose records must stay on the first axis."""
        pattern = self.values.known_value(node.args[0])
        if isinstance(pattern, str):
            terms, _, result = pattern.replace(" ", "").partition("->")
            named = zip(terms.split(","), node.args[1:], strict=False)
            axes = {
                term[of.axis : of.axis + 1]
                for term, part in named
                if (of := self.layouts.get(part))
            }
            if result and axes and axes != {result[:1]}:
                self._add_fault("joined", node)
        return own[0]

    # ---- a loss -------------------------------------------------------------------------

    def require_linear(self, node: ast.expr | None, beyond: frozenset[str] = frozenset()) -> None:
        """Add a fault if a scalar loss is not a sum over the records."""
        match node:
            case ast.Name(id=name) if name not in beyond:
                for value in self.assigned.get(name, ()):
                    self.require_linear(value, beyond | {name})
            case ast.UnaryOp(operand=operand) | ast.NamedExpr(value=operand):
                self.require_linear(operand, beyond)
            case ast.BinOp(left=left, op=op, right=right):
                own = [part for part in (left, right) if self.layouts.get(part) is not None]
                scales = isinstance(op, ast.Mult) or (isinstance(op, ast.Div) and own == [left])
                if not isinstance(op, ast.Add | ast.Sub) and own and (len(own) > 1 or not scales):
                    self._add_fault("joined", node)
                for part in own:
                    self.require_linear(part, beyond)
            case ast.IfExp(test=test, body=body, orelse=other):
                if self.layouts.get(test) is not None:
                    self._add_fault("joined", node)
                self.require_linear(body, beyond)
                self.require_linear(other, beyond)
            case ast.Call(func=function, args=args):
                name = last_name(function) or ""
                space = self._namespace(function)
                owner = getattr(function, "value", node) if space is None else (args or [node])[0]
                if (inner := self.inner_calls.get(node)) is not None:
                    for value in inner.returned_values:
                        inner.require_linear(value)
                    for code in inner.faults:
                        self._add_fault(code, node)
                elif name in LINEAR | {"scale"}:
                    self.require_linear(args[0] if name == "scale" and args else owner, beyond)
                elif (
                    name in ELEMENTWISE | EXTREMES
                    and space != "functional"
                    and (name in ("max", "min") or isinstance(function, ast.Attribute))
                    and any(self.layouts.get(part) for part in (owner, *args))
                ):
                    self._add_fault("joined", node)


def multiplies_rows(values: Evaluator, call: ast.Call) -> bool:
    """Whether ``repeat`` or a similar call makes several rows of one."""
    method = isinstance(call.func, ast.Attribute) and not values.script.comes_from(
        call.func, ARRAY_PACKAGES
    )
    args = call.args if method else call.args[1:]
    if isinstance(pattern := values.known_value(args[0]) if args else None, str):  # of einops
        axes = [part.split()[:1] for part in pattern.split("->")]
        return axes[0] != axes[-1]
    made = getattr(call.func, "value", None) if method else next(iter(call.args), None)
    if isinstance(made, ast.List) or last_name(getattr(made, "func", call)) in NAMES["synthetic"]:
        return False
    first = next(iter(getattr(args[0], "elts", args)), None) if args else None
    whole = last_name(call.func) == "tile" or (method and len(args) > 1)
    axis = None if whole or len(args) < 2 else args[1]
    along = axis is None or values.known_value(axis) == 0
    return (
        first is not None
        and values.known_value(first) != 1
        and along
        and is_along_rows(values, call)
    )


def is_along_rows(values: Evaluator, call: ast.Call) -> bool:
    """Whether a call joins or repeats along the first axis, by its ``axis`` or ``dim``."""
    keywords = keywords_of(call)
    joins = last_name(call.func) in JOINING_ROWS and len(call.args) > 1
    axis = keywords.get("axis", keywords.get("dim", call.args[1] if joins else None))
    return axis is None or values.known_value(axis) == 0


def _shares_name(node: ast.AST) -> bool:
    """Whether an operation combines a name with something computed from it: ``x - x.mean()``."""
    sides = getattr(node, "left", None), getattr(node, "right", None)
    return any(
        isinstance(one, ast.Name) and isinstance(other, ast.AST)
        and any(getattr(part, "id", None) == one.id for part in ast.walk(other))
        for one, other in (sides, sides[::-1])
    )  # fmt: skip


def _statements(function: ast.AST) -> Iterator[ast.stmt]:
    """Yield the statements of a function in source order."""
    nodes = [node for node in ast.walk(function) if isinstance(node, ast.stmt)]
    yield from sorted(nodes, key=lambda node: (node.lineno, node.col_offset))


def enclosing_conditions(
    values: Evaluator, statement: ast.AST, region: ast.AST
) -> Iterator[ast.expr]:
    """Yield the conditions of a region under which a statement runs."""
    for outer in ancestors_within(values.script, statement, region):
        if isinstance(outer, ast.If | ast.While):
            yield outer.test
