"""Follow private records through a script: from loaders to the names that hold them.

This is a taint analysis of the text: names that hold records are tainted, and assignments, calls
and loops pass the taint on.
"""

from __future__ import annotations

import ast
import bisect
import itertools
from collections.abc import Callable, Iterable, Iterator

from affidavit.importers.names import NAMES
from affidavit.importers.scripts.conditions import exclude_each_other
from affidavit.importers.scripts.syntax import Script, assigned_to, keywords_of, last_name
from affidavit.importers.scripts.values import Evaluator

WRAPPERS = frozenset({"tqdm", "trange", "enumerate", "track", "notebook_tqdm"})
MODELS = NAMES["models"]
Tainted = set[str | ast.AST]
"""Names whose values depend on records, and calls that read records."""
STEP_METHODS = ("step", "virtual_step")
MAX_NESTED_LOOPS = 4
"""Depth of nested loops that are followed for a second iteration; bounds the running time."""
SIZE_ATTRIBUTES = NAMES["form_not_content"]
DATA_WRAPPERS = WRAPPERS.union(NAMES["of_records"])
DATA_SPLITTERS = NAMES["data_parts"]


def names_assigned_in(place: ast.AST) -> set[str]:
    """Return the names that statements inside ``place`` assign."""
    return {
        node.id
        for node in ast.walk(place)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }


def unwrap_iterable(node: ast.expr) -> ast.expr:
    """Strip ``enumerate``, ``iter`` and progress bars from an iterable."""
    while isinstance(node, ast.Call) and node.args and last_name(node.func) in (*WRAPPERS, "iter"):
        node = node.args[0]
    return node


def innermost_loop(script: Script, node: ast.AST) -> ast.AST | None:
    """Return the innermost loop around ``node`` in its scope."""
    around_it = ancestors_within(script, node, script.scope_of(node))
    return next((outer for outer in around_it if isinstance(outer, ast.For | ast.While)), None)


def taint_at(
    values: Evaluator,
    place: ast.AST,
    seen: Tainted,
    reads: Callable[[ast.AST, Tainted], bool],
    within: ast.AST | None = None,
) -> dict[ast.AST, Tainted]:
    """Return the tainted names at each statement of a scope, starting from ``seen``.

    An assignment of an untainted value clears a name. Names that one iteration of a loop taints are
    tainted in the next iteration.
    """
    script, scope = values.script, values.script.scope_of(place)
    loop = innermost_loop(script, place)
    made = set() if loop is None else names_assigned_in(loop)
    statements = [
        node
        for node in ast.walk(within or scope)
        if isinstance(node, ast.stmt | ast.NamedExpr)
        and script.scope_of(node) is scope
        and not _iterates_other_records(values, node, place, made)
    ]
    statements.sort(key=lambda node: (node.lineno, node.col_offset))
    at: dict[ast.AST, Tainted] = {}
    initial = seen
    for node in _execution_order(statements) * 2:
        at[node] = at[node] | seen if node in at else seen
        leads = script.parents.get(place) is node and place not in seen
        gained = initial if leads else _propagated(node, seen, reads) - script.functions.keys()
        gained -= script.imported
        if isinstance(node, ast.Assign) and not any(
            isinstance(outer, ast.If | ast.Try | ast.Match)
            for outer in ancestors_within(script, node, scope)
        ):
            lost = {n.id for t in node.targets for n in ast.walk(t) if isinstance(n, ast.Name)}
            seen = seen if lost & seen <= gained else seen - lost
        seen = seen if gained <= seen else seen | gained
    return at


def _execution_order(
    statements: list[ast.stmt | ast.NamedExpr], depth: int = 0
) -> list[ast.stmt | ast.NamedExpr]:
    """Return statements in execution order, with two iterations of each outer loop."""
    order, done = list[ast.stmt | ast.NamedExpr](), -1
    for i, node in enumerate(statements):
        if i > done:
            order.append(node)
            if isinstance(node, ast.For | ast.While):
                end = bisect.bisect(statements, node.end_lineno or 0, key=lambda item: item.lineno)
                inner = statements[i + 1 : end]
                order += _execution_order(inner, depth + 1) * (2 if depth < MAX_NESTED_LOOPS else 1)
                done = i + len(inner)
    return order


def find_lot(
    values: Evaluator, place: ast.AST, reads: Callable[[ast.AST, Tainted], bool], depth: int = 0
) -> tuple[ast.AST, Tainted, ast.AST] | None:
    """Find the loop around ``place`` that draws its lots, or the function that receives them.

    The result also has the names that hold records there, and the outermost loop or the function.
    """
    script, scope = values.script, values.script.scope_of(place)
    loops = [
        o for o in ancestors_within(script, place, scope) if isinstance(o, ast.For | ast.While)
    ]
    for loop in loops:
        if drawn := names_drawn_by(loop):
            return loop, drawn, loops[-1]
    passed: Tainted = set()
    followed = isinstance(scope, ast.FunctionDef) and depth <= 5
    for call in values.known_calls(scope) if followed else ():
        outer = find_lot(values, call, reads, depth + 1) if call in script.parents else None
        if outer is None:
            continue
        at = taint_at(values, call, outer[1], reads, outer[2])
        statement = next((node for node in (call, *script.ancestors(call)) if node in at), call)
        seen = at.get(statement, set())
        passed |= {name for name, item in script.passed_arguments(scope, call) if reads(item, seen)}
    return (scope, passed, scope) if passed else None


def _iterates_other_records(
    values: Evaluator, node: ast.AST, place: ast.AST, made: set[str]
) -> bool:
    """Whether a loop around ``node``, but not around ``place``, iterates another loader.

    A loop over one of the names ``made`` in the loop around ``place`` iterates rows of its lot.
    """
    around_it = set(values.script.ancestors(place))
    return any(
        isinstance(outer, ast.For)
        and outer not in around_it
        and not calls_any(outer.iter, "range", "trange")
        and last_name(outer.iter) != "param_groups"
        and not is_private_loader(values, unwrap_iterable(outer.iter))
        and made.isdisjoint(getattr(part, "id", None) for part in ast.walk(outer.iter))
        for outer in values.script.ancestors(node)
    )


def content_parts(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the parts of an expression that read content, not only sizes or shapes."""
    parts = [node]
    while parts:
        part = parts.pop()
        named = part.func if isinstance(part, ast.Call) else part
        if last_name(named) not in SIZE_ATTRIBUTES or (
            isinstance(named, ast.Name) and part is named
        ):
            yield part
            parts += ast.iter_child_nodes(part)


def reads_records(values: Evaluator, node: ast.AST) -> bool:
    """Whether an expression reads the content of the whole training data."""
    return any(
        isinstance(part, ast.Name | ast.Attribute)
        and bool(places := binding_places(values.script, part))
        and values.record_places.issuperset(places)
        for part in content_parts(node)
    )


def binding_places(script: Script, node: ast.AST) -> list[ast.AST]:
    """Return where a name, or an attribute of ``self``, is set."""
    if isinstance(node, ast.Attribute):
        own = getattr(node.value, "id", "") == "self"
        return list(script.stored_attributes.get(node.attr, ())) if own else []
    return [item.node for item in script.bindings_of(node)] if isinstance(node, ast.Name) else []


def find_record_places(values: Evaluator, starts: Iterable[ast.AST | None]) -> frozenset[ast.AST]:
    """Find the places that set names to the records of these loaders, arrays or data sets.

    Names are followed back to the data that they are part of.
    """
    script, record_places, packaged = values.script, set[ast.AST](), set[str]()
    todo = list(starts)
    while todo:
        node = todo.pop()
        packaged.add(_packaged_dataset(script, node))
        match node:
            case ast.Name() | ast.Attribute() if places := binding_places(script, node):
                own = [place for place in places if not values.is_set_by_private_call(place)]
                if record_places.issuperset(places) or not _hold_same_records(script, node, own):
                    continue
                record_places.update(places)
                for place in own:
                    if isinstance(place, ast.arg) and isinstance(node, ast.Name):
                        todo += values.known_arguments(node, place)
                    outer = script.parents[place]
                    todo.append(getattr(outer, "value", getattr(outer, "context_expr", None)))
            case ast.Call(func=function, args=args) if last_name(function) in DATA_WRAPPERS:
                keywords = keywords_of(node)
                todo += args[1:] if last_name(function) == "Subset" else args
                todo += [keywords.get("dataset"), keywords.get("data_loader")]
            case ast.Call() if (made := values.returned_expression(node)) is not node:
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
                not record_places.isdisjoint(
                    binding_places(script, held := _underlying_data(script, item.value))
                )
                or _packaged_dataset(script, held) in packaged - {""}
            )
            for target in item.targets
            for part in ast.walk(target)
            if isinstance(part, ast.Name | ast.Attribute) and isinstance(part.ctx, ast.Store)
        }
        if record_places >= others:
            return frozenset(record_places)
        record_places |= others


def _packaged_dataset(script: Script, node: ast.AST | None) -> str:
    """Return a key for a packaged data set; equal calls load the same records."""
    if not isinstance(node, ast.Call) or not script.comes_from(
        node.func, ("torchvision", "torchtext")
    ):
        return ""
    keywords = keywords_of(node)
    same = {key: ast.dump(keywords[key]) for key in sorted(keywords) if "transform" not in key}
    return ast.dump(node.func) + str(same | {"": [ast.dump(item) for item in node.args]})


def _hold_same_records(script: Script, name: ast.AST, places: list[ast.AST]) -> bool:
    """Whether all bindings of a name hold the same records.

    Examples are ``x = x / 255`` and the two sides of a condition.
    """
    new_places = []
    for place in places:
        statement = next((o for o in script.ancestors(place) if isinstance(o, ast.stmt)), place)
        value = getattr(statement, "value", None)
        made = isinstance(statement, ast.AugAssign) or (
            isinstance(value, ast.AST)
            and ast.unparse(name) in {ast.unparse(part) for part in content_parts(value)}
        )
        new_places += [] if made else [place]
    return exclude_each_other(script, *new_places)


def _underlying_data(script: Script, node: ast.expr) -> ast.expr:
    """Return the data that a loader, data set or slice is made from.

    ``x[i : i + 9]`` is a lot, not the data. A name that is set again may hold other data.
    """
    match node:
        case ast.Call(
            func=ast.Name(id="next"), args=[ast.Call(func=ast.Name(id="iter"), args=[inner])]
        ) if not any(isinstance(outer, ast.For | ast.While) for outer in script.ancestors(node)):
            return _underlying_data(script, inner)
        case ast.Call(func=function, args=args) if last_name(function) in (
            "DataLoader",
            *DATA_SPLITTERS,
        ):
            whole = keywords_of(node).get("dataset") or next(iter(args), function)
            parts = last_name(function) in DATA_SPLITTERS
        case ast.Subscript(value=whole, slice=ast.Slice(lower=lower, upper=upper)) if (
            lower is None or upper is None
        ):
            parts = True
        case _:
            return node
    return (
        node
        if parts and len(binding_places(script, whole)) > 1
        else _underlying_data(script, whole)
    )


def names_drawn_by(loop: ast.For | ast.While) -> Tainted:
    """Return the names that a loop binds to records, without the counter of ``enumerate``."""
    counted = isinstance(loop, ast.For) and calls_any(loop.iter, "enumerate")
    if isinstance(loop, ast.For) and not calls_any(loop.iter, "range", "trange"):
        target = loop.target
        parts = target.elts[1:] if counted and isinstance(target, ast.Tuple) else [target]
        return {node.id for part in parts for node in ast.walk(part) if isinstance(node, ast.Name)}
    return {
        name.id
        for node in ast.walk(loop)
        if isinstance(node, ast.Assign) and calls_any(node.value, "next")
        for target in node.targets
        for name in ast.walk(target)
        if isinstance(name, ast.Name)
    }


def calls_any(node: ast.AST, *names: str) -> bool:
    """Whether a node calls a function or method with one of these names."""
    return any(isinstance(n, ast.Call) and last_name(n.func) in names for n in ast.walk(node))


def reads_tainted(node: ast.AST, seen: Tainted) -> bool:
    """Whether a node reads a tainted name. Items with keys such as "val" do not count."""
    parts: list[ast.AST] = [node]
    while parts:
        part = parts.pop()
        key = getattr(part.slice, "value", "") if isinstance(part, ast.Subscript) else ""
        if str(key).startswith(("val", "test", "eval")):
            continue  # of other records
        if part in seen or _holder_name(part) in seen:
            return True
        parts += ast.iter_child_nodes(part)
    return False


def _holder_name(node: ast.AST) -> str | None:
    """Return the last part of a name, or an item of it: ``b["c"]`` of ``a.b["c"]``."""
    if isinstance(node, ast.Subscript):
        whole = last_name(node.value)
        return f"{whole}[{node.slice.value!r}]" if isinstance(node.slice, ast.Constant) else whole
    return last_name(node)


def _propagated(node: ast.AST, seen: Tainted, reads: Callable[[ast.AST, Tainted], bool]) -> Tainted:
    """Return the names that a statement taints."""
    match node:
        case ast.Assign(targets=targets, value=value):
            return {
                name for target in targets for name in tainted_targets(target, value, seen, reads)
            }
        case ast.AugAssign(target=target, value=value) | ast.NamedExpr(target=target, value=value):
            return tainted_targets(target, value, seen, reads)
        case ast.Expr(value=ast.Call(func=function, args=arguments) as call):
            named = keywords_of(call) if last_name(function) not in STEP_METHODS else {}
            inputs = [*arguments, *named.values()] if last_name(function) != "backward" else []
            owner = function.value if isinstance(function, ast.Attribute) else function
            return (
                {_holder_name(owner) or ""} if any(reads(item, seen) for item in inputs) else set()
            )
    return set()


def tainted_targets(
    target: ast.expr, value: ast.expr, seen: Tainted, reads: Callable[[ast.AST, Tainted], bool]
) -> Tainted:
    """Return the names in ``target`` that get a tainted value."""
    match target, value:
        case ast.Tuple(elts=names), ast.Tuple(elts=values) if len(names) == len(values):
            pairs = zip(names, values, strict=True)
            return {
                name for one, other in pairs for name in tainted_targets(one, other, seen, reads)
            }
    parts = target.elts if isinstance(target, ast.Tuple) else [target]
    chosen = (part for part in parts if isinstance(part, ast.Subscript) and reads(part.slice, seen))
    return {_holder_name(part) or "" for part in (parts if reads(value, seen) else chosen)}


def ancestors_within(script: Script, node: ast.AST, end: ast.AST) -> list[ast.AST]:
    """Return the nodes around ``node`` up to ``end``, innermost first."""
    return list(itertools.takewhile(lambda outer: outer is not end, script.ancestors(node)))


def is_private_loader(values: Evaluator, node: ast.expr) -> bool:
    """Whether a name can only be the loader of the private training."""
    if values.plain_loaders:
        return _is_plain_loader(values, node, 0)
    return is_returned_by_private_call(values, node, -1)


def is_returned_by_private_call(
    values: Evaluator, node: ast.expr, place: int, depth: int = 0
) -> bool:
    """Whether a name can only be item ``place`` of what the private call returns."""
    statement, script = values.private_statement, values.script
    if not isinstance(statement, ast.Assign) or depth > 20:
        return False
    binding = None
    if isinstance(node, ast.Attribute):
        targets: list[ast.AST] = [*script.stored_attributes.get(node.attr, [])]
    else:
        bindings = script.bindings_of(node) if isinstance(node, ast.Name) else []
        targets = [item.node for item in bindings]
        binding = bindings[0] if len(bindings) == 1 else None
    own = [target for target in targets if values.is_set_by_private_call(target)]
    if own:
        return any(_is_at_position(script, target, place) for target in own) and all(
            target in own or getattr(target, "lineno", 0) < statement.lineno for target in targets
        )
    if isinstance(node, ast.Attribute):
        made = assigned_to(script, targets[0]) if len(targets) == 1 else None
        return isinstance(made, ast.Name) and is_returned_by_private_call(
            values, made, place, depth + 1
        )
    outer = None if binding is None else script.parents[binding.node]
    if isinstance(outer, ast.withitem) and isinstance(outer.context_expr, ast.Call):
        manager = outer.context_expr
        loader = keywords_of(manager).get("data_loader")
        named = last_name(manager.func) == "BatchMemoryManager"
        return (
            named
            and loader is not None
            and is_returned_by_private_call(values, loader, place, depth + 1)
        )
    if binding is None or not isinstance(binding.node, ast.arg) or not isinstance(node, ast.Name):
        return False
    passed = values.known_arguments(node, binding.node)
    return bool(passed) and all(
        is_returned_by_private_call(values, item, place, depth + 1) for item in passed
    )


def _is_at_position(script: Script, target: ast.AST, place: int) -> bool:
    """Whether a target receives item ``place`` of what the private call returns."""
    outer = script.parents[target]
    return not isinstance(outer, ast.Tuple) or (
        len(outer.elts) > place and outer.elts[place] is target
    )


def _is_plain_loader(values: Evaluator, node: ast.expr, depth: int) -> bool:
    """Whether a name can only be a ``DataLoader``, made here or passed by every caller."""
    binding = values.script.binding_of(node)
    if binding is None or not isinstance(node, ast.Name):
        return False
    if isinstance(binding.node, ast.arg):
        passed = values.known_arguments(node, binding.node)
        return bool(passed) and all(_is_plain_loader(values, item, depth + 1) for item in passed)
    made = None if binding.value is None else values.returned_expression(binding.value)
    if isinstance(made, ast.Name) and depth <= 20:
        return _is_plain_loader(values, made, depth + 1)
    return isinstance(made, ast.Call) and last_name(made.func) == "DataLoader"
