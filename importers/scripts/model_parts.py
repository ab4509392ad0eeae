"""Ask about every part of a model that is not a listed layer, or code of the script.

Of what ``uses.toml`` lists, "parts" are arguments that may be layers, or code that runs on rows.
From each model on, all that these and the names in them may be is followed to what a package has.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator

from affidavit.importers.names import NAMES
from affidavit.importers.scripts.object_kinds import ObjectKinds
from affidavit.importers.scripts.repository import file_of_package
from affidavit.importers.scripts.row_code import is_of_one
from affidavit.importers.scripts.syntax import find_import, last_name, package_of, unpacks
from affidavit.importers.scripts.use_table import arguments_of, find_function, use_of
from affidavit.importers.scripts.values import default_of

NOT_READ = "a layer of its own, or that is not read, may join the records of a lot"
PARTIAL = "functools.partial"
PLAIN = ("Module", "Model", "Layer")
"""Ends of the names of bases that run no part of an object by themselves."""

Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
Part = tuple[ast.AST, ast.Call | None]
"""What a part of a model may be, and the call that runs it, whose result is the part."""


class ModelParts:
    """What the models of a script are made of."""

    def __init__(self, kinds: ObjectKinds) -> None:
        self.kinds, self.script, self.values = kinds, kinds.script, kinds.values
        self.keras = kinds.library.key.startswith(("tensorflow", "jax_keras"))
        self.refuses = find_import(self.script, ("opacus", "torchdp")) is not None
        """Whether the library refuses models with layers that join records."""
        self.todo, self.followed = list[Part](), set[Part]()
        self.runs: dict[ast.AST, dict[ast.Call, None]] = defaultdict(dict)
        """The calls that make parts, by the function that they run."""
        self.parameters: dict[ast.AST, list[tuple[ast.arg, ast.Call | None]]] = defaultdict(list)
        """The parameters of functions that were followed."""
        self.of_classes: dict[str, list[ast.expr]] = defaultdict(list)
        """What the bodies of classes give a name."""
        for (scope, name), bindings in self.script.bindings.items():
            if isinstance(scope, ast.ClassDef):
                self.of_classes[name] += (o for item in bindings for o in self._stored(item.node))
        self.put: dict[str | None, list[ast.expr]] = defaultdict(list)
        """What is put into an object, by the last part of its name."""
        for call, base in self.script.method_calls(*NAMES["mutators"]):
            self.put[last_name(base)] += [item for _, item in arguments_of(call)]
        for node in self.script.nodes:
            if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
                self.put[last_name(node.value)] += self._stored(node)

    def questions(self) -> Iterator[tuple[ast.AST, str]]:
        """Yield what is not understood of what models are made of, with the reason or the fault."""
        self.todo += ((node, None) for node in self._models())
        while self.todo:
            if (part := self.todo.pop()) in self.followed:
                continue
            self.followed.add(part)
            self.todo += self._parts_of(*part)
            for decorator in getattr(part[0], "decorator_list", ()):
                name = last_name(getattr(decorator, "func", decorator))
                self.todo += [] if name in NAMES["known_decorators"] else [(decorator, None)]
            match part:
                case ast.Name() | ast.Attribute() as node, call:
                    reasons = [self._of_path(path, call) for path in self.script.paths_of(node)]
                    yield from ((node, why) for why in reasons if why is not None)
                case ast.FunctionDef() | ast.Lambda() as node, None:
                    known = self._result_of(node) is not None or is_of_one(self.kinds, node)
                    yield from [] if known else [(node, NOT_READ)]

    def _models(self) -> Iterator[ast.AST]:
        """Yield what is a model, or becomes a part of one."""
        yield from self.kinds.models
        for call in self.script.calls:
            use, base = find_function(self.script, call), getattr(call.func, "value", None)
            if self.kinds.is_private(call):
                yield from (item for key, item in arguments_of(call) if key in ("module", "model"))
            elif self.keras and last_name(call.func) in ("fit", "compile") and base is not None:
                yield base
            elif use is not None and "model" in use.gives and (use.why or use.parts):
                yield call
        for node in self.script.nodes:
            if isinstance(node, ast.Attribute | ast.Subscript) and isinstance(node.ctx, ast.Store):
                of_model = "model" in self.kinds.kinds(node.value) and not _is_self(node.value)
                settings = {*NAMES["settings"]} & {last_name(part) for part in ast.walk(node)}
                yield from self._stored(node) if of_model and not settings else ()

    def _of_path(self, path: str, call: ast.Call | None) -> str | None:
        """Say why what a package has under a path, or a call of it makes, is no known part."""
        use, package = use_of(path), package_of(path)
        if path.rpartition(".")[2] in NAMES["lot_statistics"]:
            held = self.refuses and not (call and self._is_applied(call))
            return None if held else "joined_records"
        if package in NAMES["packages_without_layers"] or path == PARTIAL:
            return None
        if use is None or not use.why or not use.gives or (self.keras and use.checks_layers) or (
            file_of_package(self.script, package)
        ):  # fmt: skip
            return NOT_READ
        if call is None:
            return None if use.gives in ("model", "criterion", "each", "width") else NOT_READ
        passed = {str(place): item for place, item in arguments_of(call)}
        for key in passed.keys() & {*NAMES["joining_options"]}:
            if self.values.try_evaluate(passed[key]) not in (False, None):
                return f"its option {key} is not one that is understood"
        for place in passed.keys() & {*use.axis.split()}:
            axis = self.values.known_value(passed[place])
            axes = axis if isinstance(axis, list) else [axis]
            if not all(isinstance(item, int) and (item > 0 or item == -1) for item in axes):
                return "joined_records" if 0 in axes else "its axis may be that of the records"
        return None

    def _is_applied(self, layer: ast.Call) -> bool:
        """Whether a layer is called where no model holds it, so that the library finds none."""
        called = [call.func for call in self.script.calls]
        items = {last_name(item.value) for item in called if isinstance(item, ast.Subscript)}
        for outer in self.script.ancestors(layer):
            match outer:
                case ast.Call(func=function) if layer in ast.walk(function):
                    return True
                case ast.Assign(targets=[ast.Name(id=name)], value=value):
                    return name in items or (value is layer and bool(self.script.calls_to(name)))
                case ast.Assign(targets=[ast.Attribute()], value=value):
                    return not isinstance(value, ast.Call | ast.IfExp)
        return False

    # ---- what a part may be ------------------------------------------------------------------

    def _parts_of(self, node: ast.AST, call: ast.Call | None) -> Iterable[Part]:
        """Return what a part may be, or is made of."""
        match node:
            case ast.Call():
                return self._of_call(node)
            case ast.Name() | ast.Attribute():
                return self._of_name(node, call)
            case ast.ClassDef():
                return self._of_class(node, call)
            case ast.arg():
                function = self.script.function_around(node)
                self.parameters[function].append((node, call))
                return [(item, call) for item in self._passed_for(function, node)]
            case ast.FunctionDef() | ast.Lambda():
                self._run(node, call)
                made = [self._result_of(node)] if call is None else self._results_of(node)
                return [(item, None) for item in made if item is not None]
            case ast.Subscript(value=value):
                return [(value, call)]
            case ast.IfExp(body=one, orelse=other):
                return [(one, call), (other, call)]
            case ast.Compare() | ast.JoinedStr() | ast.UnaryOp():
                return []
        inner = (part for part in ast.iter_child_nodes(node) if isinstance(part, ast.expr))
        return [(part, call) for part in inner]

    def _of_call(self, call: ast.Call) -> Iterator[Part]:
        function, name = call.func, last_name(call.func)
        passed = [item for _, item in arguments_of(call)]
        if isinstance(function, ast.Attribute) and not self.script.paths_of(function):
            yield from ((item, call) for item in (function, *self.kinds.functions(function)))
            yield from ((i, None) for i in passed if name in NAMES["wrappers_of_the_same"])
            return
        yield function, call
        if isinstance(function, ast.Name) and not self.script.bindings_of(function):
            if name == "map":
                yield passed[0], ast.Call(passed[0], passed[1:], [])
            held = passed[name in ("map", "filter") :]
            yield from ((item, None) for item in held if name in NAMES["passing_builtins"])
        elif not isinstance(function, ast.Name | ast.Attribute):
            # It is applied to what other layers give.
            yield from ((item, None) for item in passed if "model" in self.kinds.kinds(item))

    def _of_name(self, node: ast.Name | ast.Attribute, call: ast.Call | None) -> Iterator[Part]:
        if isinstance(self.values.known_value(node), int | float | str):
            return
        paths = self.script.paths_of(node)
        if call is not None:
            yield from (part for path in paths for part in self._passed_parts(path, call))
        for place in self.script.places_of(node):
            known = isinstance(place, ast.ClassDef | ast.FunctionDef | ast.arg)
            if not self.values.is_set_by_private_call(place):
                yield from ((item, call) for item in ([place] if known else self._stored(place)))
        yield from ((item, None) for item in self.put[last_name(node)])
        if isinstance(node, ast.Attribute) and not (paths or _is_self(node.value)):
            yield from ((item, call) for item in self.of_classes[node.attr])
            made = self.values.origin_of(node.value)
            if not (isinstance(made, ast.Call) and self.kinds.functions(made.func)):
                yield node.value, None

    def _passed_parts(self, path: str, call: ast.Call) -> Iterator[Part]:
        """Yield the arguments of a call of what a package has that may be parts."""
        if path == PARTIAL and call.args:
            yield call.args[0], ast.Call(call.args[0], call.args[1:], call.keywords)
        known = getattr(use_of(path), "parts", "*" if path == PARTIAL else "").split()
        for place, item in arguments_of(call) if known else ():
            unpacked = place == "**" or isinstance(item, ast.Starred)
            if unpacked or str(place) in known or ("*" in known and isinstance(place, int)):
                yield item, None

    def _of_class(self, owner: ast.ClassDef, call: ast.Call | None) -> Iterator[Part]:
        """Yield the bases of a class, and what its methods, or its bases, run of an object."""
        own_init = any(getattr(part, "name", "") == "__init__" for part in owner.body)
        run = None if own_init else call
        yield from ((base, run) for base in owner.bases)
        yield from ((item.value, None) for item in owner.keywords)
        if run is not None and not owner.bases:  # as a dataclass
            yield from ((item, None) for _, item in arguments_of(run))
        plain = all((last_name(base) or "").endswith(PLAIN) for base in owner.bases)
        for part in ast.walk(owner):
            match part:
                case ast.FunctionDef(name="__init__"):
                    self._run(part, call)
                case ast.Call(func=ast.Attribute(attr="__init__")):
                    yield from ((base, part) for base in owner.bases)
                case ast.Call(func=ast.Name() as function):
                    own = self.script.function_of(function) or self.script.paths_of(function)
                    yield from [] if own else [(function, part)]
                case ast.Call(func=function):
                    called = (item for item in ast.walk(function) if isinstance(item, ast.Attribute)
                              and item.attr not in self.script.functions)  # fmt: skip
                    yield from ((item, None) for item in called if _is_self(item.value))
                case ast.Name("forward" | "call" | "__call__", ctx=ast.Store()):
                    yield from ((item, None) for item in self._stored(part))
                case ast.Attribute(ast.Name("self"), ctx=ast.Store()) if not plain:
                    yield from ((item, None) for item in self._stored(part))

    def _results_of(self, function: ast.FunctionDef | ast.Lambda) -> list[ast.expr | None]:
        """Return what a function may return or yield."""
        if isinstance(function, ast.Lambda):
            return [function.body]
        ends = (ast.Return, ast.Yield, ast.YieldFrom)
        return [part.value for part in ast.walk(function)
                if isinstance(part, ends) and self.script.scope_of(part) is function]  # fmt: skip

    def _result_of(self, function: ast.FunctionDef | ast.Lambda) -> ast.expr | None:
        """Return the layer that a function makes, which has nothing to run it here."""
        made = self._results_of(function)
        makes = (
            len(made) == 1
            and isinstance(made[0], ast.Call)
            and "model" in self.kinds.kinds(made[0])
        )
        return made[0] if makes else None

    def _run(self, function: Function, call: ast.Call | None) -> None:
        """Note a call of a function that makes parts, and follow what it passes."""
        if call is not None and call not in self.runs[function]:
            self.runs[function][call] = None
            for arg, run in self.parameters[function]:
                self.todo += ((item, run) for item in self._passed(function, arg, call))

    def _passed_for(self, function: Function, arg: ast.arg) -> Iterator[ast.expr]:
        """Yield what may be passed for a parameter, or is its default."""
        constructs = getattr(function, "name", "") == "__init__"
        named = self.script.parents[function] if constructs else function
        for call in (*self.runs[function], *self.script.calls_to(getattr(named, "name", ""))):
            yield from self._passed(function, arg, call)
        yield from filter(None, [default_of(function, arg.arg)])

    def _passed(self, function: Function, arg: ast.arg, call: ast.Call) -> Iterator[ast.expr]:
        """Yield what a call may pass for a parameter."""
        every = unpacks(call) or arg in (function.args.vararg, function.args.kwarg)
        passed = arguments_of(call) if every else self.script.passed_arguments(function, call)
        yield from (item for key, item in passed if every or key == arg.arg)

    def _stored(self, target: ast.AST) -> list[ast.expr]:
        """Return the value that a target gets."""
        value = self.kinds.sources.holder_of(target)[1]
        return [] if value is None else [value]


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"
