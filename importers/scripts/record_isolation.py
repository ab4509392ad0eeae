"""Follow private records until a step clips them: rows, lots and losses.

A claim rests on three facts. Each row is one record, and each record is in one row. The gradient
that the step clips as a row's comes from that row alone. Only the private step learns from the
rows. Names are followed backwards from the loader to what its rows are made of, and forwards from
a lot to its loss. What functions outside of the repository do with records is assumed.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import lru_cache

from affidavit.importers.names import NAMES
from affidavit.importers.scripts.data_flow import (
    MODELS,
    Tainted,
    ancestors_within,
    binding_places,
    content_parts,
    find_lot,
    names_assigned_in,
    names_drawn_by,
    reads_records,
    taint_at,
)
from affidavit.importers.scripts.loop_faults import (
    LOSS_METHODS,
    collate_functions,
    loss_methods,
    lot_functions,
)
from affidavit.importers.scripts.row_axes import (
    JOINING_ROWS,
    REPEAT_FUNCTIONS,
    RowLayout,
    RowTracker,
    enclosing_conditions,
    is_along_rows,
    multiplies_rows,
)
from affidavit.importers.scripts.step_count import enclosing_loops, optimizer_steps
from affidavit.importers.scripts.syntax import Script, keywords_of, last_name, root_of
from affidavit.importers.scripts.values import Evaluator

Loop = ast.For | ast.While
KERAS = ("tensorflow", "keras", "tf_keras")
Lot = tuple[ast.Call | None, ast.AST, dict[ast.AST, Tainted]]
"""A step (None for a trainer's), the loop or function with its lots, and the tainted names at each
statement."""


# ---- backwards: what rows are made of ---------------------------------------------------------


def lot_sources(values: Evaluator, loader: ast.expr | None) -> list[ast.expr]:
    """Return the iterables that lots are drawn from: loaders, and what loops and fits iterate."""
    loops = (outer for step in optimizer_steps(values) for outer in enclosing_loops(values, step))
    starts = [loop.iter for loop in loops if isinstance(loop, ast.For)]
    for call in values.script.calls:
        starts += call.args[:2] if last_name(call.func) == "fit" else []
        fits = ("x", "y") if last_name(call.func) == "fit" else ()
        named = (*fits, "train_dataset", "train_dataloaders")
        starts += [value for key, value in keywords_of(call).items() if key in named]
    starts += [rows for rows, _ in manual_draws(values)]
    return [*starts, *([] if loader is None else [loader])]


def manual_draws(values: Evaluator) -> Iterator[tuple[ast.Subscript, ast.Call | ast.Compare]]:
    """Yield the lots that a loop draws by a random index or mask, with the draw."""
    loops = [list(enclosing_loops(values, step)) for step in optimizer_steps(values)]
    own = [outer for around in loops if not any(map(names_drawn_by, around)) for outer in around]
    for node in {node: None for loop in own for node in ast.walk(loop)}:
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
            index = node.slice
            made = values.script.value_of(index) if isinstance(index, ast.Name) else index
            match made:
                case ast.Call(func=function) if last_name(function) in NAMES["draws"]:
                    yield node, made
                case ast.Compare(left=ast.Call(func=function), ops=[ast.Lt() | ast.LtE()]) if (
                    last_name(function) in NAMES["numbers"]
                ):
                    yield node, made


def expression_sources(values: Evaluator, starts: Iterable[ast.expr]) -> list[ast.AST]:
    """Return every expression that ``starts`` depend on, following names of this file."""
    script, sources = values.script, dict[ast.AST, None]()
    todo: list[ast.AST] = list(starts)
    names = set[tuple[ast.AST, str | None]]()
    place: tuple[ast.AST, str | None]
    while todo:
        node = todo.pop()
        if node in sources or isinstance(node, ast.Lambda):
            continue
        if isinstance(node, ast.keyword) and (node.arg or "").endswith(NAMES["of_each_record"]):
            continue
        sources[node] = None
        todo += ast.iter_child_nodes(node)
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load):
            place = node, last_name(node)
            if isinstance(node, ast.Name):
                place = script.resolve(node.id, script.scope_of(node))[0], node.id
            todo += () if place in names else _value_sources(values, node)
            names.add(place)
        elif isinstance(node, ast.Call) and (own := script.function_of(node.func)) is not None:
            todo += [item.value for item in ast.walk(own)
                     if isinstance(item, ast.Return) and item.value is not None]  # fmt: skip
        elif isinstance(node, ast.Call) and (owner := _class_of(values, node)) is not None:
            todo += [item for item in owner.body if getattr(item, "name", "") == "__init__"]
    return list(sources)


def _class_of(values: Evaluator, call: ast.Call) -> ast.ClassDef | None:
    """Return the class of this file that a call instantiates."""
    owner = getattr(values.script.binding_of(call.func), "node", None)
    return owner if isinstance(owner, ast.ClassDef) else None


def _value_sources(values: Evaluator, node: ast.Name | ast.Attribute) -> Iterator[ast.AST]:
    """Yield what gives a name, or an attribute of ``self``, its content."""
    script = values.script
    if isinstance(node, ast.Attribute):
        if getattr(node.value, "id", "") == "self":
            for store in script.stored_attributes.get(node.attr, ()):
                if not values.is_set_by_private_call(store):
                    yield from _assigned_values(script, store)
        return
    for binding in script.bindings_of(node):
        if isinstance(binding.node, ast.arg):
            yield from values.known_arguments(node, binding.node)
        elif not values.is_set_by_private_call(binding.node):
            yield from _assigned_values(script, binding.node)
    for call, owner in script.method_calls("append", "extend"):
        if isinstance(owner, ast.Name) and owner.id == node.id:
            yield from call.args
    for store in (item for stores in script.stored_attributes.values() for item in stores):
        if getattr(store.value, "id", "") == node.id != "self":
            yield from _assigned_values(script, store)


def _assigned_values(script: Script, target: ast.AST) -> Iterator[ast.AST]:
    """Yield what an assignment, a loop or a ``with`` gives to its target."""
    outer = script.parents[target]
    while isinstance(outer, ast.Tuple | ast.List | ast.Starred):
        outer = script.parents[outer]
    for name in ("value", "iter", "context_expr"):
        part = getattr(outer, name, None)
        if isinstance(part, ast.AST) and part is not target:
            yield part


def find_repeated_records(values: Evaluator, data: list[ast.AST]) -> ast.AST | None:
    """Find what puts a record into several rows."""
    again = (node for node in data if _repeats_rows(values, node))
    return next(again, None) or _find_other_item(values, data)


def _item_getters(values: Evaluator, data: list[ast.AST]) -> Iterator[ast.FunctionDef]:
    """Yield the ``__getitem__`` methods of data sets of this file."""
    classes = (_class_of(values, node) for node in data if isinstance(node, ast.Call))
    for owner in filter(None, classes):
        for method in owner.body:
            if isinstance(method, ast.FunctionDef) and method.name == "__getitem__":
                yield method


def _find_other_item(values: Evaluator, data: list[ast.AST]) -> ast.AST | None:
    """Find a ``__getitem__`` that reads another row than that of its index.

    The other index is drawn at random, or is a part of the index: ``i // 4``, ``i % len(self.x)``.
    """
    for method in _item_getters(values, data):
        nodes = list(ast.walk(method))
        index = method.args.args[-1].arg
        parts = [node for node in nodes if isinstance(node, ast.BinOp)
                 and isinstance(node.op, ast.Mod | ast.FloorDiv)
                 and last_name(node.left) == index]  # fmt: skip
        other: list[ast.AST] = [node for node in nodes if isinstance(node, ast.Call)
                                and last_name(node.func) in NAMES["draws"]]  # fmt: skip
        other += parts if len({type(node.op) for node in parts}) == 1 else []
        made = (node for node in nodes if isinstance(node, ast.Assign)
                and any(part in other for part in ast.walk(node.value)))  # fmt: skip
        names = {last_name(target) for node in made for target in node.targets}
        for node in nodes:
            if isinstance(node, ast.Subscript) and getattr(root_of(node.value), "id", "") == "self":
                first = node.slice.elts[0] if isinstance(node.slice, ast.Tuple) else node.slice
                if any(part in other or last_name(part) in names for part in ast.walk(first)):
                    return node
    return None


def _repeats_rows(values: Evaluator, node: ast.AST) -> bool:
    """Whether an expression repeats rows of a data set."""
    match node:
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return isinstance(left, ast.Name) and ast.dump(left) == ast.dump(right)
        case ast.BinOp(left=ast.List(elts=parts), op=ast.Mult()):
            return not all(isinstance(part, ast.Constant) for part in parts)
        case ast.BinOp(left=ast.Call(func=ast.Name(id="list" | "sorted")), op=ast.Mult()):
            return True
        case ast.Subscript(value=ast.Attribute(attr="r_"), slice=ast.Tuple(elts=parts)):
            return _share_records(parts)
        case ast.Subscript(slice=index):
            return _draws_with_replacement(values, index)
        case ast.Call():
            name = last_name(node.func)
            if name == "concatenate" and isinstance(node.func, ast.Attribute):
                own = ast.dump(node.func.value)
                if any(ast.dump(item) == own for item in node.args):
                    return True
            if name in REPEAT_FUNCTIONS:
                return multiplies_rows(values, node)
            if name in JOINING_ROWS:
                parts = getattr(node.args[0] if node.args else None, "elts", [])
                return is_along_rows(values, node) and _share_records(parts)
            if name in ("Subset", "select", "take", "index_select"):
                return any(_draws_with_replacement(values, item) for item in node.args)
            replaced = keywords_of(node).get("replace")
            default = name == "resample" and values.script.comes_from(node.func, ("sklearn",))
            return (values.known_value(replaced) is not False) if replaced is not None else default
    return False


def _draws_with_replacement(values: Evaluator, index: ast.AST) -> bool:
    """Whether an index is drawn with replacement."""
    nodes = [index]
    if isinstance(index, ast.Name):
        nodes = [b.value for b in values.script.bindings_of(index) if b.value is not None]
    for node in nodes:
        match node:
            case ast.Call(func=function, args=args) if last_name(function) == "choice":
                several = len(args) > 1 or "size" in keywords_of(node)
                replace = keywords_of(node).get("replace", args[2] if len(args) > 2 else None)
                if several and values.known_value(replace) is not False:
                    return True
            case ast.Call(func=function) if last_name(function) in ("choices", "randint"):
                return True
    return False


def _share_records(parts: list[ast.expr]) -> bool:
    """Whether two of the parts that are concatenated hold the same records."""
    names = [
        {
            ast.unparse(node)
            for node in content_parts(part)
            if isinstance(node, ast.Name | ast.Attribute)
        }
        for part in parts
    ]
    made = [ast.dump(part) for part in parts if isinstance(part, ast.Call)
            and last_name(part.func) not in ("zeros", "ones", "full")]  # fmt: skip
    return len(set(made)) < len(made) or any(
        isinstance(part, ast.Name | ast.Attribute) and ast.unparse(part) in other
        for i, part in enumerate(parts)
        for j, other in enumerate(names)
        if i != j
    )


def find_record_splitting(values: Evaluator, data: list[ast.AST]) -> ast.AST | None:
    """Find what may split a record into several rows: windows of a series, parts of a text."""
    script = values.script
    for method in _item_getters(values, data):
        index = method.args.args[-1].arg
        for node in ast.walk(method):
            match node:
                case ast.Subscript(value=ast.Attribute(), slice=index_of) if (
                    isinstance(first := getattr(index_of, "upper", index_of), ast.BinOp)
                    and isinstance(first.op, ast.Add | ast.Sub)
                    and last_name(first.left) == index
                ):
                    return node
    for node in data:
        match node:
            case ast.Call(func=function, keywords=keywords):
                if last_name(function) in NAMES["cutting"] or any(
                    item.arg == "return_overflowing_tokens" for item in keywords
                ):
                    return node
                if last_name(function) == "map" and node.args and any(
                    item.arg == "batched" and values.known_value(item.value) for item in keywords
                ):  # fmt: skip
                    mapped = script.function_of(node.args[0])
                    calls = [n for n in ast.walk(mapped or node) if isinstance(n, ast.Call)]
                    if last_name(node.args[0]) == "group_texts" or any(
                        last_name(call.func) in ("chain", "from_iterable")
                        or (last_name(call.func) == "sum" and len(call.args) == 2)
                        for call in calls
                    ):
                        return node
            case ast.ListComp(generators=[_, _, *_]) | ast.GeneratorExp(generators=[_, _, *_]):
                return node
            case ast.Subscript(
                slice=ast.Slice(lower=ast.Name(id=at), upper=ast.BinOp(op=ast.Add(), right=width))
            ):
                for outer in values.script.ancestors(node):
                    for loop in (outer, *getattr(outer, "generators", ())):
                        turns = getattr(loop, "iter", None)
                        own = getattr(getattr(loop, "target", None), "id", None) == at
                        if own and isinstance(turns, ast.Call) and not (
                            len(turns.args) == 3 and ast.dump(turns.args[2]) == ast.dump(width)
                        ):  # fmt: skip
                            return node
    return None


def find_statistics(values: Evaluator, data: list[ast.AST]) -> list[ast.Call]:
    """Find calls outside the training that compute something from all records together."""
    named = [node for node in data if isinstance(node, ast.Name | ast.Attribute)]
    names = {ast.unparse(node) for node in named}
    places = {place for node in named for place in binding_places(values.script, node)}
    loops = {outer for step in optimizer_steps(values) for outer in values.script.ancestors(step)}
    return [
        call
        for call in values.script.calls_to(*NAMES["statistics"])
        if not any(isinstance(o, Loop) and o in loops for o in values.script.ancestors(call))
        and not _fits_model(call)
        and any(
            ast.unparse(part) in names
            and places.issuperset(binding_places(values.script, part))
            and not _is_module(values, part)
            for item in (getattr(call.func, "value", call.func), *call.args)
            for part in ast.walk(item)
            if isinstance(part, ast.Name | ast.Attribute)
        )
    ]


def find_used_statistics(
    values: Evaluator, computed: list[ast.Call]
) -> Iterator[tuple[str, ast.AST]]:
    """Yield each fault where statistics of all records affect the training or the model."""

    def holds(node: ast.AST, depth: int = 0) -> bool:
        for part in content_parts(node):
            if part in computed:
                return True
            if isinstance(part, ast.Name) and depth < 3:
                if part.id in fitted:
                    return True
                bound = (item.value for item in values.script.bindings_of(part))
                if any(item is not None and holds(item, depth + 1) for item in bound):
                    return True
        return False

    fits = [call for call in computed if (last_name(call.func) or "").startswith("fit")]
    fitted = {last_name(getattr(call.func, "value", call)) for call in fits} - {None}
    for call in values.script.calls_to("fit", "add_loss", "adapt", "update_bn", *NAMES["keeping"]):
        name, keywords = last_name(call.func), keywords_of(call)
        args = [*call.args, *keywords.values()]
        if name == "fit":
            weights = [
                keywords[key] for key in ("class_weight", "sample_weight") if key in keywords
            ]
            yield from (("joined_records", call) for item in weights if holds(item))
        elif name == "add_loss":
            yield from (("joined_records", call) for item in args if reads_records(values, item))
        elif name in ("adapt", "update_bn"):
            yield from (("written_weight", call) for item in args if reads_records(values, item))
        elif any(holds(item) or reads_records(values, item) for item in args) and any(
            last_name(part) == "state_dict"
            or (last_name(part) or "").lower().endswith(MODELS[:2])
            or last_name(part) in fitted
            for item in args
            for part in content_parts(item)
        ):
            yield "written_weight", call


def _fits_model(call: ast.Call) -> bool:
    """Whether a ``fit`` trains a model."""
    owner = last_name(call.func.value) if isinstance(call.func, ast.Attribute) else None
    named = (owner or "").lower().endswith(MODELS) or "trainer" in (owner or "").lower()
    return last_name(call.func) == "fit" and named


def _is_module(values: Evaluator, node: ast.Name | ast.Attribute) -> bool:
    """Whether an expression names an imported module."""
    root = root_of(node)
    bindings = values.script.bindings_of(root) if isinstance(root, ast.Name) else []
    return bool(bindings) and all(isinstance(item.node, ast.alias) for item in bindings)


# ---- forwards: from a lot to its loss ---------------------------------------------------------


def reads_tainted_content(node: ast.AST, seen: Tainted) -> bool:
    """Whether an expression reads the content of a tainted name."""
    return any(
        isinstance(part, ast.Name | ast.Attribute) and last_name(part) in seen
        for part in content_parts(node)
        if getattr(part, "id", "") != "self"
    )


def training_lots(values: Evaluator) -> tuple[Lot, ...]:
    """Return the lots of each step."""
    return _training_lots(values, values.plain_loaders)


@lru_cache(maxsize=1)
def _training_lots(values: Evaluator, _: bool) -> tuple[Lot, ...]:
    lots: list[Lot] = []
    for step in optimizer_steps(values):
        if (lot := find_lot(values, step, reads_tainted_content)) is not None:
            region, drawn, widest = lot
            lots.append(
                (step, region, taint_at(values, step, drawn, reads_tainted_content, widest))
            )
    for method, drawn in (*loss_methods(values), *collate_functions(values)):
        lots.append((None, method, taint_at(values, method.body[0], drawn, reads_tainted_content)))
    return tuple(lots)


def loss_statements(loop: ast.AST, at: dict[ast.AST, Tainted]) -> list[ast.stmt]:
    """Return the statements of a loop that its loss is computed by."""
    body = [node for node in ast.walk(loop) if isinstance(node, ast.stmt) and node in at]
    body.sort(key=lambda node: (-node.lineno, -node.col_offset))
    needed, statements = set[str](), list[ast.stmt]()
    own = getattr(loop, "name", "")
    returns = own and (own in LOSS_METHODS or not any(map(differentiated_loss, body)))
    for node in body * 2:
        value = differentiated_loss(node)
        if isinstance(node, ast.Return) and returns:
            value = _returned_loss(node.value) if own in LOSS_METHODS else node.value
        if value is None and isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            parts = (part for target in targets for part in ast.walk(target))
            stored = {last_name(getattr(part, "value", part) if isinstance(part, ast.Subscript)
                                else part) for part in parts
                      if isinstance(getattr(part, "ctx", None), ast.Store)}  # fmt: skip
            value = node.value if stored & needed else None
        match node:
            case ast.Expr(value=ast.Call(func=ast.Attribute(value=base, attr=method)) as call) if (
                method.endswith("_") and last_name(base) in needed
            ):
                value = call  # set in place
        if value is not None:
            called = {id(part.func) for part in ast.walk(value) if isinstance(part, ast.Call)}
            parts = (part for part in ast.walk(value) if id(part) not in called)
            needed |= {name for part in parts if (name := last_name(part))}
            statements.append(node)
    return [node for node in body if node in statements]


def differentiated_loss(node: ast.AST) -> ast.expr | None:
    """Return the loss of ``loss.backward()``, ``fabric.backward(loss)`` or ``step(loss=loss)``.

    For optax' ``update(gradients, state)`` and Flax' ``apply_gradients``, return the gradients.
    """
    match node:
        case ast.Call(func=ast.Attribute(attr=name), args=[loss, *_]) if name.lstrip("_") in (
            "compute_gradients",
            "minimize",
        ):
            return loss
        case ast.Call(func=ast.Attribute(attr="update"), args=[gradients, _, *_]):
            return gradients
        case ast.Call(func=ast.Attribute(attr="apply_gradients")):
            return keywords_of(node).get("grads")
        case ast.Call(func=ast.Attribute(attr="step" | "virtual_step")):
            return keywords_of(node).get("loss")
        case ast.Expr(value=call) | ast.Assign(value=ast.Call() as call):
            parts = (differentiated_loss(part) for part in ast.walk(call))
            return next((loss for loss in parts if loss is not None), None)
        case ast.Call(func=ast.Attribute(value=owner, attr="backward"), args=args):
            return args[0] if args else owner
    return None


def _returned_loss(node: ast.expr | None) -> ast.expr | None:
    """Return the loss that a method returns: alone, first in a tuple, or by its name."""
    match node:
        case ast.IfExp(orelse=other):
            return _returned_loss(other)
        case ast.Tuple(elts=[first, *_]):
            return first
        case ast.Dict(keys=keys, values=values):
            named = zip(keys, values, strict=True)
            return next((v for k, v in named if getattr(k, "value", None) == "loss"), None)
    return node


def loss_reductions(values: Evaluator) -> Iterator[str]:
    """Yield how the losses of lots are reduced, where known: ``sum``, ``mean`` or ``none``."""
    for _, loop, at in training_lots(values):
        for statement in loss_statements(loop, at):
            match getattr(statement, "value", None):
                case ast.Call(
                    func=ast.Attribute(attr="sum" | "mean" as name), args=[], keywords=[]
                ):
                    yield name
            calls = [node for node in ast.walk(statement) if isinstance(node, ast.Call)]
            yield from filter(None, (_loss_reduction(values, call) for call in calls))


def _loss_reduction(values: Evaluator, call: ast.Call) -> str | None:
    """Return the ``reduction`` of a loss function or of its constructor, if it is known."""
    made = values.script.value_of(call.func) if isinstance(call.func, ast.Name) else None
    stated = (keywords_of(item).get("reduction") for item in (call, made)
            if isinstance(item, ast.Call))  # fmt: skip
    known = next(
        (value for item in stated if (value := values.known_value(item)) is not None), None
    )
    return known if isinstance(known, str) else None


def find_record_interactions(values: Evaluator) -> dict[str, ast.AST]:
    """Find where the records of a lot interact before they are clipped, by fault.

    ``mixed`` means several rows of one record, or one row of several. All else is ``joined``.
    """
    faults: dict[str, ast.AST] = {}
    for joins in lot_functions(values):
        if isinstance(joins, ast.Lambda):
            lot = RowTracker(values)
            lot.run(ast.Expr(joins.body), {arg.arg for arg in joins.args.args})
            faults |= lot.faults
    for step, region, at in training_lots(values):
        drawn = names_drawn_by(region) if isinstance(region, Loop) else set()
        lot = RowTracker(values, checks_totals=isinstance(region, ast.For) and bool(drawn))
        parts = (node for node in ast.walk(getattr(region, "target", region)))
        tuples = (node.elts for node in parts if isinstance(node, ast.Tuple) and drawn)
        lot.bound = {name.id: RowLayout() for elts in tuples for name in elts
                     if isinstance(name, ast.Name) and name.id in drawn}  # fmt: skip
        uses = _uses_by_name(region)
        for statement in reversed(loss_statements(region, at)):
            if _carries_over(values, region, statement, at[statement], uses):
                faults.setdefault("mixed", statement)
            lot.tainted = at[statement]
            for outer in reversed(ancestors_within(values.script, statement, region)):
                if isinstance(outer, ast.For):
                    lot.enter_loop(outer)
            loss = differentiated_loss(statement)
            if isinstance(statement, ast.Return):
                loss = _returned_loss(statement.value)
            lot.run(statement if loss is None else ast.Return(loss), at[statement])
            conditions = (
                ()
                if isinstance(loss, ast.Constant)
                else enclosing_conditions(values, statement, region)
            )
            beside, lot.checks_totals = lot.checks_totals, False
            for test in conditions:
                if lot.layout_of(test) is not None:
                    faults.setdefault("joined", test)
            lot.checks_totals = beside
        of_rows = (
            "loss" in keywords_of(step) or step in values.updates
            if step is not None
            else getattr(region, "name", "") not in LOSS_METHODS
        )
        for loss in lot.returned_values:
            if not of_rows:
                lot.require_linear(loss)
            elif (made := lot.layouts.get(loss)) is not None and made.form == "sum":
                faults.setdefault("joined", loss)  # one loss, by which no record is clipped alone
        for code, node in lot.faults.items():
            faults.setdefault(code, node)
    for setting in filter(_changes_sample_gradients, values.script.nodes):
        lot = RowTracker(values)
        lot.bound["grad_sample"] = RowLayout()
        lot.run(setting, {"grad_sample"})
        for code, node in lot.faults.items():
            faults.setdefault(code, node)
    return faults


def _changes_sample_gradients(node: ast.AST) -> bool:
    """Whether a statement changes per-record gradients before they are clipped."""
    match node:
        case ast.Assign(targets=[target, *_]) | ast.AugAssign(target=target):
            pass
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=target, attr=name))) if name.endswith(
            "_"
        ):
            pass
        case _:
            return False
    while isinstance(target, ast.Subscript):
        target = target.value
    return isinstance(target, ast.Attribute) and target.attr == "grad_sample"


def find_joining_model(values: Evaluator, module: ast.expr | None) -> ast.AST | None:
    """Find what joins the records of a lot in a private model of this file.

    If the library's call takes no model, any Keras model of the file may be the private one.
    """
    keras = [call for call in values.script.calls if module is None]
    classes, parts = (
        list[ast.ClassDef](),
        expression_sources(values, [] if module is None else [module]),
    )
    for call in keras:
        match call:
            case ast.Call(args=[ast.Lambda(args=spec, body=body), *_]) if last_name(
                call.func
            ) == "Lambda" and values.script.comes_from(call.func, KERAS):
                lot = RowTracker(values, inside_model=True)
                lot.run(ast.Expr(body), {arg.arg for arg in spec.args})
                if lot.faults:
                    return call
    parts += keras
    while parts:
        part = parts.pop()
        if isinstance(part, ast.Call) and isinstance(part.func, ast.Name):
            for binding in values.script.bindings_of(part.func):
                if isinstance(owner := binding.node, ast.ClassDef) and owner not in classes:
                    classes.append(owner)
                    parts += ast.walk(owner)
    for owner in classes:
        methods = {item.name: item for item in owner.body if isinstance(item, ast.FunctionDef)}
        runs = ["forward"] if module is not None else ["call"]
        for forward in (methods[name] for name in runs if name in methods):
            drawn: Tainted = {arg.arg for arg in forward.args.args[1:]}
            lot = RowTracker(values, inside_model=True)
            for statement, seen in taint_at(
                values, forward.body[0], drawn, reads_tainted_content
            ).items():
                lot.run(statement, seen)
                used = {n.attr for n in ast.walk(statement) if isinstance(n, ast.Attribute)}
                runs += sorted(used - {*runs})
            if lot.faults:
                return next(iter(lot.faults.values()))
    return None


def _uses_by_name(region: ast.AST) -> dict[str, list[ast.Name | ast.Attribute]]:
    """Return the uses of each variable, and of each attribute of one, in a region."""
    uses: dict[str, list[ast.Name | ast.Attribute]] = defaultdict(list)
    for node in ast.walk(region):
        if isinstance(node, ast.Name):
            uses[node.id].append(node)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            uses[f".{node.attr}"].append(node)
    return uses


def _carries_over(
    values: Evaluator,
    loop: ast.AST,
    statement: ast.stmt,
    seen: Tainted,
    uses: dict[str, list[ast.Name | ast.Attribute]],
) -> bool:
    """Whether a part of the loss comes from records of earlier iterations of the loop.

    Such a part is read before it is set, or is never reset.
    """
    value = differentiated_loss(statement) or getattr(statement, "value", None)
    for part in content_parts(value) if isinstance(value, ast.AST) else ():
        name = last_name(part)
        if name not in seen - {"loss"} or not isinstance(part, ast.Name | ast.Attribute):
            continue
        own = uses[f".{name}" if isinstance(part, ast.Attribute) else name]
        setting = [
            next(outer for outer in values.script.ancestors(node) if isinstance(outer, ast.stmt))
            for node in own
            if isinstance(node.ctx, ast.Store)
        ]
        if isinstance(part, ast.Attribute):
            end = min(((s.end_lineno, s.end_col_offset) for s in setting), default=(0, 0))
            first = any(isinstance(n.ctx, ast.Load) and (n.lineno, n.col_offset) < end for n in own)
            if part in own and statement not in setting and first:
                return True
        elif isinstance(loop, Loop) and not any(
            other.lineno < statement.lineno or isinstance(statement, ast.AugAssign)
            for other in setting
        ):
            bindings = values.script.bindings.get((values.script.scope_of(loop), part.id), [])
            bound = [item.node for item in bindings if not isinstance(item.node, ast.arg)]
            if any(getattr(node, "lineno", loop.lineno) < loop.lineno for node in bound):
                return True
    return False


# ---- who else learns from the lots ------------------------------------------------------------


def find_written_weight(values: Evaluator) -> ast.AST | None:
    """Find what sets a model weight from records, outside of the private step."""
    lots = [at for _, _, at in training_lots(values)]
    for step in optimizer_steps(values):
        if (lot := find_lot(values, step, reads_tainted_content)) is not None:
            end = getattr(lot[0], "end_lineno", 0)
            after = taint_at(values, step, lot[1], reads_tainted_content)
            lots.append({n: seen for n, seen in after.items() if getattr(n, "lineno", 0) > end})
    for loop in values.script.nodes:
        if isinstance(loop, ast.For) and reads_records(values, loop.iter):
            lots.append(
                taint_at(values, loop.body[0], names_drawn_by(loop), reads_tainted_content, loop)
            )
    for node in values.script.nodes:
        statement: ast.AST = node
        match node:
            case (
                ast.Assign(targets=[ast.Attribute() as target])
                | ast.AugAssign(target=ast.Attribute() as target)
            ):
                made = (
                    values.script.value_of(node.value) if isinstance(node.value, ast.Name) else None
                )
                args = [item for item in (node.value, made) if item is not None]
                if target.attr not in ("data", "weight", "bias"):
                    args = [
                        item
                        for item in args
                        if any(isinstance(part, ast.Call) for part in content_parts(item))
                    ]
            case ast.Call(func=ast.Attribute(attr=name) as target, args=args) if (
                name in NAMES["writing"]
            ):
                statement = values.script.parents[node]
            case _:
                continue
        owner: ast.AST = target
        owners = list[str]()
        while isinstance(owner, ast.Attribute | ast.Subscript):
            owner = owner.value
            owners.append((last_name(owner) or "").lower())
        inputs: list[tuple[ast.AST, ast.AST]] = [(item, statement) for item in args]
        for loop in values.script.ancestors(node):
            if isinstance(loop, ast.For) and last_name(owner) in names_assigned_in(loop.target):
                over = [last_name(part) for part in ast.walk(loop.iter)]
                owners += ["model" for name in over if name in NAMES["weights"]]
                inputs.append((loop.iter, loop))
        if any(name.endswith(MODELS[:3]) for name in owners) and any(
            reads_records(values, item)
            or any(reads_tainted_content(item, at[place]) for at in lots if place in at)
            for item, place in inputs
        ):
            return node
    return None


def find_other_learners(values: Evaluator) -> Iterator[tuple[ast.Call, ast.Call]]:
    """Yield other steps in the loop of a step that learn from its lots, with that step.

    A step learns from the losses computed before it, unless it or its model cleared the gradients.
    """
    script = values.script
    steps = optimizer_steps(values)
    for step, loop, at in training_lots(values):
        if step is None:
            continue
        formed, cleared = False, set[str]()
        calls = [c for c, _ in script.method_calls("backward", "step", "zero_grad")]
        for call in sorted(calls, key=lambda item: (item.lineno, item.col_offset)):
            around = [outer for outer in script.ancestors(call) if outer in at]
            owner = call.func.value if isinstance(call.func, ast.Attribute) else call
            name = last_name(owner) or ""
            if loop not in script.ancestors(call) or not around:
                continue
            if last_name(call.func) == "zero_grad":
                cleared.add(name)
                formed = formed and not name.lower().endswith(MODELS)
            elif last_name(call.func) == "backward":
                loss = differentiated_loss(call) or owner
                formed, cleared = reads_tainted_content(loss, at[around[0]]), set()
            elif call in steps and call is not step and formed and name not in cleared:
                yield step, call
