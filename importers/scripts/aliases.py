"""Find who else holds an object: its aliases in a script, and the calls that it escapes to.

Assignments, arguments and returns connect names in both directions and across scopes: two objects
that ever share a name count as one. A call outside the file may change an object that it receives.
"""

from __future__ import annotations

import ast
from collections.abc import Callable

from affidavit.importers.names import NAMES
from affidavit.importers.scripts.syntax import LAYER_PACKAGES, Script, last_name

Reference = ast.Name | ast.Attribute | ast.Subscript


def holder_names(node: ast.expr) -> set[str]:
    """Return the names in a chain of attributes and items: ``{a, b}`` of ``a.b``."""
    holders = set()
    while isinstance(node, ast.Attribute | ast.Subscript):
        holders.add(reference_name(node) or "")
        node = node.value
    return {name for name in {*holders, reference_name(node)} if name}


def reference_name(node: ast.AST) -> str | None:
    """Return the last part of a name, attribute, or item with a constant key."""
    if isinstance(node, ast.Subscript):
        return str(node.slice.value) if isinstance(node.slice, ast.Constant) else None
    return last_name(node)


def find_escape(
    script: Script,
    holders: set[str],
    key: str | None = None,
    *,
    methods: bool = False,
    elsewhere: Callable[[ast.Call], bool] | None = None,
) -> ast.AST | None:
    """Find the first call or container that takes one of the objects out of sight.

    With ``methods``, method calls that may change the object count too, as do assignments to its
    items or attributes (only to ``key``, if one is given). Calls that ``elsewhere`` accepts leave
    it unchanged. All names of the objects are added to ``holders``.
    """
    names = holders
    while True:
        before = len(names)
        for node in script.nodes:
            if reference_name(node) in names and _is_from_layer_package(script, node):
                continue
            if isinstance(node, Reference) and isinstance(node.ctx, ast.Load):
                escaped = _follow_reference(script, node, names)
                if methods and escaped is None and reference_name(node) in names:
                    escaped = _find_change(script, node, None if key is None else {key, *names})
                if escaped is None:
                    continue
                if not (
                    isinstance(escaped, ast.Call) and elsewhere is not None and elsewhere(escaped)
                ):
                    return escaped
            elif isinstance(node, ast.Return) and node.value is not None:
                _returned(script, node, names)
        if len(names) == before:
            return None


def _is_from_layer_package(script: Script, node: ast.AST) -> bool:
    """Whether a node belongs to a package of layers, such as ``torch.optim``."""
    if isinstance(node, ast.Name):
        node = getattr(script.value_of(node), "func", node)
    return isinstance(node, ast.Attribute) and script.comes_from(node, LAYER_PACKAGES)


def _follow_reference(script: Script, node: Reference, names: set[str]) -> ast.AST | None:
    """Add the names that a reference connects; return what lets the object escape, if any."""
    name = reference_name(node)
    parent = script.parents[node]
    tracked = name in names
    match parent:
        case ast.Assign(targets=targets, value=value) if value is node:
            for target in targets:
                other = reference_name(target)
                if other is None and tracked:
                    return parent
                _merge_names(names, name, other)
        case ast.Attribute(attr="get" | "values" | "items"):
            outer = script.parents[script.parents[parent]]
            for target in getattr(outer, "targets", [getattr(outer, "target", node)]):
                for part in ast.walk(target):
                    if isinstance(getattr(part, "ctx", None), ast.Store):
                        _merge_names(names, name, reference_name(part))
        case ast.keyword(arg=None):
            return None
        case ast.Call() if node is not parent.func:
            return _argument(script, parent, node, names)
        case ast.keyword():
            call = script.parents[parent]
            if isinstance(call, ast.Call):
                return _argument(script, call, node, names)
        case ast.List() | ast.Tuple() | ast.Dict() | ast.Set() | ast.Starred() | ast.Yield():
            return (
                parent if tracked and not isinstance(script.parents[parent], ast.Compare) else None
            )
    return None


def _find_change(script: Script, node: Reference, keys: set[str] | None) -> ast.AST | None:
    """Find what sets one of these ``keys`` of ``node``, or calls a method that may change it."""
    stored = script.stored_attributes
    match script.parents[node]:
        case ast.Subscript(value=base, ctx=ast.Store() | ast.Del()) as item if base is node:
            return item if keys is None or reference_name(item) in {None, *keys} else None
        case ast.Attribute(attr=name, ctx=ast.Store() | ast.Del()) as item:
            if (
                keys is not None
                and reference_name(node) == "self"
                and len(script.stores_of_attribute(name, node)) == 1
            ):
                return None  # the constructor's own, as of ``self.args = args``
            return item if keys is None or name in keys else None
        case ast.Attribute(attr=name) as method if name not in NAMES["reading_methods"]:
            if reference_name(node) == "self" and (name in script.functions or name in stored):
                return None  # what it changes stands in this file
            call = script.parents[method]
            return call if isinstance(call, ast.Call) and call.func is method else None
    return None


def _argument(script: Script, call: ast.Call, node: ast.expr, names: set[str]) -> ast.AST | None:
    """Add the parameter that receives ``node``; return the call if the object escapes there."""
    function, name = _function(script, call.func), reference_name(node)
    if function is None:
        return call if name in names and last_name(call.func) not in NAMES["read_only"] else None
    spec = function.args
    declared = {item.arg for item in (*spec.posonlyargs, *spec.args, *spec.kwonlyargs)}
    key = next((key for key, item in script.passed_arguments(function, call) if item is node), None)
    if key not in declared:
        return call if name in names else None
    _merge_names(names, name, key)
    return None


def _function(script: Script, node: ast.expr) -> ast.FunctionDef | None:
    """Return the function of this file that a call names, if there is exactly one."""
    name = last_name(node) or ""
    functions = script.functions.get(name, ())
    return functions[0] if len(functions) == 1 and name not in script.imported else None


def _returned(script: Script, node: ast.Return, names: set[str]) -> None:
    """Connect the names of a returned object with the names that receive it."""
    function = script.scope_of(node)
    source = reference_name(node.value) if node.value is not None else None
    if source is None or not isinstance(function, ast.FunctionDef):
        return
    for use in script.references_to(function):
        target = script.parents[script.parents[use]]
        if isinstance(target, ast.Assign):
            for item in target.targets:
                _merge_names(names, source, reference_name(item))


def _merge_names(names: set[str], first: str | None, second: str | None) -> None:
    if first is not None and second is not None and {first, second} & names:
        names |= {first, second}
