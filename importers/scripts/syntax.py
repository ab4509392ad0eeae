"""Parse a script, and index its scopes, the bindings of each name, and its calls.

``getattr`` and ``setattr`` with a constant name are attributes; other dynamic code is a question.
"""

from __future__ import annotations

import ast
import builtins
import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from affidavit.importers.names import NAMES
from affidavit.importers.scripts.launches import Launches, read_launches

Scope = ast.Module | ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
LAYER_PACKAGES = ("torch", "torchvision", "tensorflow", "keras", "timm", "transformers", "sklearn")
"""Packages of layers, losses and optimisers, which never step one themselves."""
KNOWN_PACKAGES = (
    *NAMES["transform_packages"], *NAMES["numerical_packages"], *NAMES["training_packages"],
)  # fmt: skip


@dataclass(frozen=True, eq=False, slots=True)
class Binding:
    """A place where a name gets a value. ``value`` is None if the text does not show it."""

    node: ast.AST
    value: ast.expr | None = None


@dataclass(eq=False)
class Script:
    """A parsed script with its scopes, bindings and calls, its folder and lower-case name."""

    tree: ast.Module
    folder: Path | None = None
    name: str | None = None
    harmless: dict[int, str] = field(default_factory=dict)
    """Lines that comments say are harmless, with the reasons that they give."""
    nodes: list[ast.AST] = field(init=False)
    """All nodes of the syntax tree, without the contexts of names, which Python shares."""
    parents: dict[ast.AST, ast.AST] = field(init=False)
    _reaching: dict[ast.AST | None, list[Binding]] = field(init=False, default_factory=dict)
    shared_definitions: set[ast.AST] = field(init=False, default_factory=set)
    """Definitions that lead to the private call, if several files run it."""

    def __post_init__(self) -> None:
        self.nodes, self.parents = _nodes_and_parents(self.tree)

    @cached_property
    def launches(self) -> Launches:
        """Options that files of the repository set when they run this script."""
        return read_launches(self.folder, self.name)

    @cached_property
    def calls(self) -> list[ast.Call]:
        """All calls in the script."""
        return [node for node in self.nodes if isinstance(node, ast.Call)]

    def ancestors(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yield the nodes that enclose ``node``, innermost first."""
        while (node := self.parents.get(node, self.tree)) is not self.tree:
            yield node
        yield self.tree

    def scope_of(self, node: ast.AST) -> Scope:
        """Return the function, class or module in which ``node`` is evaluated."""
        inner = node
        for outer in self.ancestors(node):
            if isinstance(outer, (*FUNCTIONS, ast.ClassDef)):
                body = outer.body if isinstance(outer.body, list) else [outer.body]
                if inner in body:
                    return outer
            inner = outer
        return self.tree

    @cached_property
    def shared(self) -> dict[tuple[Scope, str], None]:
        """The names that functions share with other scopes, with the functions."""
        nodes = (node for node in self.nodes if isinstance(node, ast.Global | ast.Nonlocal))
        return dict.fromkeys((self.scope_of(node), name) for node in nodes for name in node.names)

    @cached_property
    def bindings(self) -> dict[tuple[Scope, str], list[Binding]]:
        """The bindings of each name, by scope and name."""
        table: dict[tuple[Scope, str], list[Binding]] = defaultdict(list)
        for node in self.nodes:
            for name, value in _bound_by(node, self.parents):
                scope = self.scope_of(node)
                if isinstance(node, ast.arg):
                    scope = self.function_around(node)
                if (scope, name) in self.shared:
                    # A name that a function shares is bound at several levels: nothing is known.
                    table[(self.tree, name)].append(Binding(node))
                table[(scope, name)].append(Binding(node, value))
        for scope, name in self.shared:
            for outer in itertools.islice(self._scopes(scope), 1, None):
                if (outer, name) in table and outer is not self.tree:
                    own = table[(scope, name)]
                    table[(outer, name)] += [Binding(item.node) for item in own]
                    break
        return table

    def function_around(self, arg: ast.AST) -> ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda:
        """Return the innermost function that encloses a node, as that of a parameter."""
        return next(node for node in self.ancestors(arg) if isinstance(node, FUNCTIONS))

    @cached_property
    def stored_attributes(self) -> dict[str, list[ast.Attribute]]:
        """Attributes that the script sets or deletes, of any object, by attribute name."""
        table: dict[str, list[ast.Attribute]] = defaultdict(list)
        for node in self.nodes:
            if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
                table[node.attr].append(node)
        return table

    @cached_property
    def type_nodes(self) -> set[ast.AST]:
        """Nodes that only name a type: in annotations and base classes."""
        roots = [getattr(node, "annotation", getattr(node, "returns", None)) for node in self.nodes]
        roots += [base for node in self.nodes for base in getattr(node, "bases", ())]
        return {node for root in roots if root is not None for node in ast.walk(root)}

    @cached_property
    def functions(self) -> dict[str, list[ast.FunctionDef]]:
        """Functions by name. Constructors are also listed under the name of their class."""
        table: dict[str, list[ast.FunctionDef]] = defaultdict(list)
        for node in self.nodes:
            if isinstance(node, ast.FunctionDef):
                table[node.name].append(node)
                owner = self.parents[node]
                if node.name == "__init__" and isinstance(owner, ast.ClassDef):
                    table[owner.name].append(node)
        return table

    @cached_property
    def imported(self) -> set[str]:
        """Names that imports bind, and the original names of renamed imports."""
        aliases = [node for node in self.nodes if isinstance(node, ast.alias)]
        return {name for item in aliases for name in (item.name, item.asname) if name}

    @cached_property
    def dynamic(self) -> list[ast.AST]:
        """What may bind names, or read or set attributes, that the text does not show."""
        return [node for node in self.nodes if self._is_dynamic(node)]

    def _is_dynamic(self, node: ast.AST) -> bool:
        match node:
            case ast.Name(id="getattr"):
                call = self.parents[node]
                passed = call.args if isinstance(call, ast.Call) else []
                return not (passed and self.comes_from(passed[0], LAYER_PACKAGES))
            case ast.Name(id="vars" | "locals" | "globals" as name):
                call = self.parents[node]
                match self.parents.get(call):
                    case ast.Compare(comparators=[inside]):
                        return inside is not call or getattr(call, "func", None) is not node
                return name != "vars" or not self._is_printed(call)
            case ast.Name(id=name):
                return name in NAMES["dynamic_functions"] and not self._is_own(node)
            case ast.Attribute(attr="__dict__"):
                return not self._is_printed(node)
            case ast.Attribute(attr="modules", value=base):
                return self.comes_from(base, ("sys",))
            case ast.Attribute(attr=name):
                return name in NAMES["dynamic_attributes"]
            case ast.alias(name="*"):
                statement = self.parents[node]
                package = package_of(getattr(statement, "module", None) or "")
                return package not in KNOWN_PACKAGES or self.parents[statement] is not self.tree
            case ast.alias(name=name):
                return name in NAMES["dynamic_functions"]
        return False

    def _is_own(self, name: ast.Name) -> bool:
        """Whether a name is a parameter's, or a function's that is always defined before."""
        places = self.places_of(name)
        return bool(places) and all(
            isinstance(place, ast.arg)
            or (isinstance(place, ast.FunctionDef)
                and self.parents[place] is self.tree and place.lineno < name.lineno)
            for place in places
        )  # fmt: skip

    def _is_printed(self, names: ast.AST) -> bool:
        """Whether the attributes of an object, as of ``vars(...)``, are only read or unpacked."""
        outer = self.parents[names]
        if isinstance(outer, ast.Attribute):
            return outer.attr in NAMES["reading_methods"]
        if isinstance(outer, ast.keyword) and outer.arg is None:
            return True
        while isinstance(outer, ast.keyword | ast.Dict | ast.List | ast.Tuple):
            outer = self.parents[outer]
        if isinstance(outer, ast.Call):
            return names is not outer.func and last_name(outer.func) in {*NAMES["printers"]}
        return isinstance(outer, ast.FormattedValue)

    def resolve(self, name: str, scope: Scope) -> tuple[Scope, list[Binding]]:
        """Return the scope that binds ``name`` as seen from ``scope``, and its bindings there."""
        for place in self._scopes(scope):
            seen = place is scope or not isinstance(place, ast.ClassDef)
            if seen and (place, name) in self.bindings:
                return place, self.bindings[(place, name)]
        return self.tree, []

    def bindings_of(self, name: ast.AST | None) -> list[Binding]:
        """Return the bindings that a name may have where it stands; none of another expression."""
        if not isinstance(name, ast.Name) or name in self._reaching:
            return self._reaching.get(name, [])
        scope, bindings = self.resolve(name.id, self.scope_of(name))
        changes = isinstance(self.parents.get(name), ast.AugAssign)
        shared = any(name.id == other for _, other in self.shared)
        sets = isinstance(getattr(name, "ctx", None), ast.Store | ast.Del) and not changes
        if len(bindings) > 1 and scope is self.scope_of(name) and not shared and not sets:
            places = {item.node for item in bindings}
            region = {*_region_of(name, [*self.ancestors(name)], scope, places)}
            around = {place: {place, *self.ancestors(place)} for place in places}
            bindings = [item for item in bindings if around[item.node] & region] or bindings
        self._reaching[name] = bindings
        return bindings

    def places_of(self, node: ast.AST | None) -> list[ast.AST]:
        """Return where a name or an attribute gets its values."""
        if isinstance(node, ast.Attribute):
            return [*self.stored_attributes.get(node.attr, ())]
        return [item.node for item in self.bindings_of(node)]

    def binding_of(self, name: ast.AST | None) -> Binding | None:
        """Return the binding of a name that is bound exactly once, else None."""
        bindings = self.bindings_of(name)
        return bindings[0] if len(bindings) == 1 else None

    def value_of(self, name: ast.AST | None) -> ast.expr | None:
        """Return what a name is bound to, if it is bound once and the text shows it."""
        return getattr(self.binding_of(name), "value", None)

    def reads_of(self, name: str | None) -> list[ast.Name]:
        """Return every place where a name is read, in any scope."""
        return self._reads[name]

    @cached_property
    def _reads(self) -> dict[str | None, list[ast.Name]]:
        table: dict[str | None, list[ast.Name]] = defaultdict(list)
        for node in self.nodes:
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                table[node.id].append(node)
        return table

    def calls_to(self, *names: str) -> list[ast.Call]:
        """Return the calls of functions and methods with these names."""
        places = [place for name in {*names} for place in self._calls_by_name[name]]
        return [self.calls[place] for place in sorted(places)]

    @cached_property
    def _calls_by_name(self) -> dict[str | None, list[int]]:
        table: dict[str | None, list[int]] = defaultdict(list)
        for place, call in enumerate(self.calls):
            table[last_name(call.func)].append(place)
        return table

    def method_calls(self, *names: str) -> list[tuple[ast.Call, ast.expr]]:
        """Return the calls of methods with these names, each with its object."""
        calls = self.calls_to(*names)
        return [(one, one.func.value) for one in calls if isinstance(one.func, ast.Attribute)]

    def function_of(self, name: ast.expr) -> ast.FunctionDef | None:
        """Return the function of this file that a name refers to, if it is bound once."""
        node = getattr(self.binding_of(name), "node", None)
        return node if isinstance(node, ast.FunctionDef) else None

    def returns_of(self, function: ast.AST) -> list[ast.Return]:
        """Return the ``return`` statements of a function, in the order of the text."""
        inside = (part for part in ast.walk(function) if isinstance(part, ast.Return))
        return [part for part in inside if self.scope_of(part) is function]

    def _scopes(self, scope: Scope) -> Iterator[Scope]:
        yield scope
        while scope is not self.tree:
            scope = self.scope_of(scope)
            yield scope

    def passed_arguments(self, function: ast.AST, call: ast.Call) -> list[tuple[str, ast.expr]]:
        """Return the arguments that a call passes to a function, with their parameter names."""
        spec: ast.arguments = function.args  # type: ignore[attr-defined]
        names = [arg.arg for arg in (*spec.posonlyargs, *spec.args)]
        # A method of an object gets the object first; of a class, or a static one, it gets none.
        method = isinstance(self.parents.get(function), ast.ClassDef)
        marks = {last_name(item) for item in getattr(function, "decorator_list", ())}
        if method and "classmethod" not in marks:
            owner = call.func.value if isinstance(call.func, ast.Attribute) else None
            of_class = any(isinstance(item.node, ast.ClassDef) for item in self.bindings_of(owner))
            method = "staticmethod" not in marks and not of_class
        return [*zip(names[method:], call.args, strict=False), *keywords_of(call).items()]

    def import_origin(self, binding: Binding) -> tuple[str | None, str | None]:
        """Return the module, and the name in it, that an import binds."""
        alias = binding.node
        if not isinstance(alias, ast.alias):
            return None, None
        match self.parents[alias]:
            case ast.ImportFrom(module=module, level=0):
                return module, alias.name
            case ast.Import():
                whole = alias.name if alias.asname else alias.name.partition(".")[0]
                return whole, None
        return None, None

    def paths_of(self, node: ast.expr) -> list[str]:
        """Return the paths in packages that imports give a name, or a part of what it names."""
        root = root_of(node)
        bindings = self.bindings_of(root)
        origins = [self.import_origin(o) for o in bindings if isinstance(o.node, ast.alias)]
        if isinstance(root, ast.Name) and not (bindings or hasattr(builtins, root.id)):
            stars = (self.parents[star.node] for star in self.bindings.get((self.tree, "*"), ()))
            origins = [(getattr(star, "module", None), root.id) for star in stars]
        rest = ast.unparse(node).split(".")[1:] if origins else []
        return [".".join(part for part in (*origin, *rest) if part) for origin in origins]

    def module_path(self, node: ast.expr) -> str:
        """Return the path of a package's function or class, as ``torch.optim.SGD``, or ""."""
        bindings = self.bindings_of(root_of(node))
        shown = bindings and all(self.import_origin(item)[0] for item in bindings)
        paths = {*self.paths_of(node)} if shown else set()
        return paths.pop() if len(paths) == 1 else ""

    def comes_from(self, node: ast.expr, modules: tuple[str, ...]) -> bool:
        """Whether a name, or the module it is looked up in, is imported from these packages."""
        made = map(self.import_origin, self.bindings_of(root_of(node)))
        return any(package_of(module or "") in modules for module, _ in made)

    def is_imported(self, node: ast.expr) -> bool:
        """Whether an expression is, or is a part of, what an import binds."""
        return any(isinstance(item, ast.alias) for item in self.places_of(root_of(node)))

    def references_to(self, function: ast.AST) -> list[ast.expr]:
        """Return all references to a function or method, or to a constructor's class."""
        name = getattr(function, "name", None)
        owner = self.parents.get(function)
        if isinstance(owner, ast.ClassDef) and name == "__init__":
            return self.references_to(owner)  # and not as a base class, which is no call
        method = isinstance(owner, ast.ClassDef)
        bound: list[ast.expr] = [node for node in self.reads_of(name)
                                 if function in (self.places_of(node) or [function])]  # fmt: skip
        named = (node for node in self.nodes if isinstance(node, ast.Attribute) and method)
        return bound + [node for node in named if node.attr == name and (
            last_name(node.value) == "self" or function not in self.ancestors(node))]  # fmt: skip


def parse_script(source: str | bytes) -> ast.Module:
    """Parse a script into a normalized syntax tree; raises what ``ast.parse`` raises."""
    tree = ast.parse(source)
    nodes, parents = _nodes_and_parents(tree)
    own = any(name == "dict" for node in nodes for name, _ in _bound_by(node, parents))
    for node in reversed(nodes):
        other = _normalized(node) if isinstance(node, ast.Call | ast.Expr) else node
        if other is not node and not (own and isinstance(other, ast.Dict)):
            replace_child(parents[node], node, other)
    return tree


def _nodes_and_parents(tree: ast.AST) -> tuple[list[ast.AST], dict[ast.AST, ast.AST]]:
    """Walk a tree as ``ast.walk`` does, in a third of its time."""
    nodes, parents = [tree], {}
    for node in nodes:
        for name in node._fields:
            value = getattr(node, name, None)
            if isinstance(value, list):
                inner = [item for item in value if isinstance(item, ast.AST)]
            elif isinstance(value, ast.AST) and name != "ctx":
                inner = [value]
            else:
                continue
            nodes += inner
            parents.update(dict.fromkeys(inner, node))
    return nodes, parents


def names_in(target: ast.AST) -> set[str]:
    """Return the names that an expression holds, as those that a target binds."""
    return {part.id for part in ast.walk(target) if isinstance(part, ast.Name)}


def replace_child(outer: ast.AST, node: ast.AST, other: ast.AST) -> None:
    """Replace ``node``, a child of ``outer``, by another node."""
    for name, value in ast.iter_fields(outer):
        if value is node:
            setattr(outer, name, other)
        elif isinstance(value, list):
            value[:] = [other if item is node else item for item in value]


def _normalized(node: ast.AST) -> ast.AST:
    """Rewrite ``getattr``, ``setattr`` and ``dict`` as attributes, assignments and literals."""
    match node:
        case ast.Call(func=ast.Name(id="dict"), args=[], keywords=items) if not unpacks(node):
            keys: list[ast.expr | None] = [ast.Constant(item.arg) for item in items]
            return ast.copy_location(ast.Dict(keys, [item.value for item in items]), node)
        case ast.Call(ast.Name("vars"), [ast.Call(ast.Attribute(attr="parse_args")) as made]):
            return made  # by whose names nothing else holds the options
        case ast.Call(ast.Name("getattr"), [of, ast.Constant(str(key)), *_]) if key.isidentifier():
            return ast.copy_location(ast.Attribute(of, key, ast.Load()), node)
        case ast.Expr(ast.Call(ast.Name("setattr"), [base, ast.Constant(str(name)), value])) if (
            name.isidentifier()
        ):
            target = ast.Attribute(base, name, ast.Store())
        case _:
            return node
    ast.copy_location(target, node)
    return ast.copy_location(ast.Assign([target], value, lineno=node.lineno), node)


def assigned_to(script: Script, target: ast.AST) -> ast.expr | None:
    """Return the value that an assignment gives to one target, also if it unpacks a tuple."""
    outer = script.parents[target]
    match outer, script.parents.get(outer):
        case ast.Assign(value=value) | ast.AnnAssign(value=value), _:
            return value
        case ast.Tuple(elts=names), ast.Assign(value=ast.Tuple(elts=own)) if len(names) == len(own):
            return own[names.index(target)]  # type: ignore[arg-type]
    return None


def _region_of(
    use: ast.Name, around: list[ast.AST], scope: Scope, places: set[ast.AST]
) -> list[ast.AST]:
    """Return what holds the bindings of a name that may reach a use, or nothing if all may."""
    inner: ast.AST = use
    first = next((outer for outer in around if isinstance(outer, ast.stmt)), None)
    for outer in around:
        heads = [loop.target for loop in getattr(outer, "generators", ())]
        if heads and outer.generators[0].iter not in (use, *around) and _binds(heads, places):  # type: ignore[attr-defined]
            return heads
        consumer = last_name(getattr(outer, "func", outer))
        if isinstance(inner, ast.GeneratorExp) and consumer not in NAMES["consumers"]:
            return []  # it may run later
        if isinstance(inner, ast.stmt):
            fields = [getattr(outer, key) for key in outer._fields]
            block = next(item for item in fields if isinstance(item, list) and inner in item)
            before, own = block[: block.index(inner)], [inner]
            binds_last = isinstance(inner, ast.Assign | ast.AugAssign | ast.For) and inner is first
            if binds_last and not any(isinstance(part, ast.NamedExpr) for part in ast.walk(inner)):
                own = []  # as of the use in ``x = f(x)``
            last = (at for at in range(len(before))[::-1] if _always_sets(before[at], places))
            region: list[ast.AST] = [*before[max(start := next(last, -1), 0) :], *own]
            if start >= 0:
                return region
            if block is getattr(outer, "body", None):  # what is bound before it starts
                bound = [getattr(outer, "target", None), getattr(outer, "args", None)]
                bound += [item.optional_vars for item in getattr(outer, "items", ())]
                region += (heads := [item for item in bound if item is not None])
            if outer is scope or _binds(heads, places):
                return region
        inner = outer
    return []


def _binds(parts: Iterable[ast.AST], places: set[ast.AST]) -> bool:
    return any(part in places for item in parts for part in ast.walk(item))


def _always_sets(node: ast.AST, places: set[ast.AST]) -> bool:
    """Whether a statement binds a name whenever it ends and what follows it runs."""
    match node:
        case ast.Assign(targets=parts) | ast.Import(names=parts) | ast.ImportFrom(names=parts):
            return _binds(parts, places)
        case ast.AnnAssign(target=target):
            return target in places
        case ast.If(body=body, orelse=[_, *_] as other):
            leaves = ast.Return | ast.Raise | ast.Continue | ast.Break
            return all(isinstance(block[-1], leaves) or any(_always_sets(item, places)
                       for item in block) for block in (body, other))  # fmt: skip
    return node in places


def root_of(node: ast.expr) -> ast.expr:
    """Return the first name of a dotted expression: ``a`` of ``a.b.c``."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node


def last_name(node: ast.AST) -> str | None:
    """Return the last part of a dotted name: ``d`` of ``a.b.d``."""
    return getattr(node, "attr", None) or getattr(node, "id", None)


def keywords_of(call: ast.Call) -> dict[str, ast.expr]:
    """Return the keyword arguments of a call."""
    return {item.arg: item.value for item in call.keywords if item.arg is not None}


def unpacks(call: ast.Call) -> bool:
    """Whether a call unpacks arguments with ``*`` or ``**``."""
    starred = any(isinstance(item, ast.Starred) for item in call.args)
    return starred or any(item.arg is None for item in call.keywords)


def find_import(script: Script, modules: tuple[str, ...]) -> ast.stmt | None:
    """Find the first statement that imports one of these packages."""
    for node in script.nodes:
        match node:
            case ast.Import(names=names) if any(package_of(item.name) in modules for item in names):
                return node
            case ast.ImportFrom(module=str(source), level=0) if package_of(source) in modules:
                return node
    return None


def innermost_loop(script: Script, node: ast.AST) -> ast.AST | None:
    """Return the innermost loop around ``node`` in its scope."""
    return next(loops_around(script, node), None)


def loops_around(script: Script, node: ast.AST) -> Iterator[ast.AST]:
    """Yield the loops around ``node`` in its scope, innermost first."""
    scope = script.scope_of(node)
    around_it = itertools.takewhile(lambda outer: outer is not scope, script.ancestors(node))
    return (outer for outer in around_it if isinstance(outer, ast.For | ast.While))


def calls_any(node: ast.AST, *names: str) -> bool:
    """Whether a node calls a function or method with one of these names."""
    return any(isinstance(n, ast.Call) and last_name(n.func) in names for n in ast.walk(node))


def package_of(module: str) -> str:
    """Return the top-level package of a module."""
    return module.partition(".")[0]


def _bound_by(
    node: ast.AST, parents: dict[ast.AST, ast.AST]
) -> Iterator[tuple[str, ast.expr | None]]:
    """Yield the names that a node binds, with their values where the text shows them."""
    match node:
        case ast.Name(id=name, ctx=ast.Store()):
            parent = parents[node]
            match parent:
                case ast.Assign(targets=[only], value=value) if only is node:
                    yield name, value
                case ast.AnnAssign(value=value):
                    if value is not None:
                        yield name, value
                case _:
                    yield name, None
        case ast.Name(id=name, ctx=ast.Del()) | ast.arg(arg=name):
            yield name, None
        case ast.alias(name=name, asname=short):
            yield short or name.partition(".")[0], None
        case ast.MatchMapping(rest=str(name)):
            yield name, None
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            yield node.name, None
        case _:
            # except-as, patterns and type parameters.
            if isinstance(other := getattr(node, "name", None), str):
                yield other, None
