"""Find what may change an object that holds settings: its other names, and who is passed it.

Two objects that ever share a name, in any scope, count as one.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from affidavit.importers.names import NAMES
from affidavit.importers.scripts.syntax import LAYER_PACKAGES, Script, last_name

Reference = ast.Name | ast.Attribute | ast.Subscript


def find_change(script: Script, holder: ast.expr, key: str, *, items: bool) -> ast.AST | None:
    """Find what may set the part ``key`` of an object, or one of its ``items``, or hides it."""
    chain = [holder]
    while isinstance(chain[-1], ast.Attribute | ast.Subscript):
        chain.append(chain[-1].value)
    made = _function(script, chain[-1]) if isinstance(chain[-1], ast.Call) else None
    inside = ast.walk(made) if made is not None else ()
    chain += [part.value for part in inside if isinstance(part, ast.Return) and part.value]
    names = {name for part in chain if (name := _name(part)) is not None}
    pairs = list(_connected(script))
    while more := {name for pair in pairs if not names.isdisjoint(pair) for name in pair} - names:
        names |= more
    for node in script.nodes:
        if isinstance(node, Reference) and isinstance(node.ctx, ast.Load) and _name(node) in names:
            maker: ast.AST = getattr(script.value_of(node), "func", node)
            if isinstance(maker, ast.Attribute) and script.comes_from(maker, LAYER_PACKAGES):
                continue
            if (change := _change_at(script, node, names | {key}, items)) is not None:
                return change
    return None


def _name(node: ast.AST | None) -> str | None:
    """Return the last part of a name, attribute, or item with a constant key."""
    if isinstance(node, ast.Subscript):
        return str(node.slice.value) if isinstance(node.slice, ast.Constant) else None
    return None if node is None else last_name(node)


def _connected(script: Script) -> Iterator[tuple[str, str]]:
    """Yield the pairs of names that hold one object: by assignment, as arguments, or returned."""
    for node in script.nodes:
        pairs: list[tuple[ast.AST | None, ast.AST | None]] = []
        match node:
            case ast.Assign(targets=targets, value=value):
                got = getattr(value, "func", value)  # as of ``settings.get("a")``
                base = getattr(got, "value", value) if last_name(got) == "get" else value
                pairs = [(base, target) for target in targets]
            case ast.For(target=target, iter=ast.Call(func=ast.Attribute(value=base))):
                pairs = [(base, part) for part in ast.walk(target)]
            case ast.Return(value=value):
                calls = script.calls_to(getattr(script.scope_of(node), "name", ""))
                takers = (getattr(script.parents[call], "targets", ()) for call in calls)
                pairs = [(value, target) for targets in takers for target in targets]
            case ast.Call() if (function := _function(script, node)) is not None:
                passed = script.passed_arguments(function, node)
                pairs = [(item, ast.Name(name)) for name, item in passed]
        for one, other in pairs:
            if (first := _name(one)) is not None and (second := _name(other)) is not None:
                yield first, second


def _change_at(script: Script, node: Reference, keys: set[str], items: bool) -> ast.AST | None:
    """Return what may change an object where it is named, or lets it escape."""
    outer = script.parents[node]
    own = _name(node) == "self"
    call = script.parents[outer] if isinstance(outer, ast.keyword) else outer
    match outer:
        case ast.keyword(arg=None):
            return None
        case ast.Call() | ast.keyword() if isinstance(call, ast.Call) and node is not call.func:
            function = _function(script, call)
            if function is None:
                return None if last_name(call.func) in NAMES["read_only"] else call
            spec = function.args
            declared = {item.arg for item in (*spec.posonlyargs, *spec.args, *spec.kwonlyargs)}
            passed = script.passed_arguments(function, call)
            key = next((key for key, item in passed if item is node), None)
            return None if key in declared else call
        case ast.List() | ast.Tuple() | ast.Dict() | ast.Set() | ast.Starred() | ast.Yield():
            return None if isinstance(script.parents[outer], ast.Compare) else outer
        case ast.Assign(targets=targets) if any(_name(target) is None for target in targets):
            return outer
        case ast.Subscript(value=base, ctx=ast.Store() | ast.Del()) if items and base is node:
            return outer if _name(outer) in {None, *keys} else None
        case ast.Attribute(attr=name, ctx=ast.Store() | ast.Del()) if items and name in keys:
            # The constructor's own, as of ``self.args = args``, changes nothing.
            once = own and len(script.stored_attributes[name]) == 1
            return None if once else outer
        case ast.Attribute(attr=name) if items and name not in NAMES["reading_methods"]:
            if own and (name in script.functions or name in script.stored_attributes):
                return None  # what it changes stands in this file
            called = script.parents[outer]
            return called if isinstance(called, ast.Call) and called.func is outer else None
    return None


def _function(script: Script, call: ast.Call) -> ast.FunctionDef | None:
    """Return the function of this file that a call runs, if there is exactly one."""
    name = last_name(call.func) or ""
    functions = script.functions.get(name, ())
    return functions[0] if len(functions) == 1 and name not in script.imported else None
