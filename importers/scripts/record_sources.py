"""Find what holds the records of a script: names, attributes, and the calls that read them."""

from __future__ import annotations

import ast
import builtins
import posixpath
from functools import cached_property

from affidavit.importers.names import NAMES
from affidavit.importers.scripts.repository import file_of_package
from affidavit.importers.scripts.syntax import (
    KNOWN_PACKAGES,
    assigned_to,
    keywords_of,
    last_name,
    package_of,
    root_of,
)
from affidavit.importers.scripts.use_table import arguments_of, find_function, find_method
from affidavit.importers.scripts.values import Evaluator


class RecordSources:
    """The places of a script that hold its records."""

    def __init__(self, values: Evaluator) -> None:
        self.values, self.script = values, values.script
        self.places: set[ast.AST] = set()
        """What is bound to the records."""
        self.names: set[str] = set()
        """Names of the records that the script uses without setting them."""
        self.calls: dict[ast.Call, None] = {}
        """The calls that read the records."""
        self.imports: dict[ast.alias, None] = {}
        """What imports the records."""

    def add(self, node: ast.AST | None, depth: int = 0) -> None:
        """Mark what holds the records that an expression is made of."""
        if depth > 20:
            return
        match node:
            case ast.Name(id=name) if not self.script.bindings_of(node):
                if not hasattr(builtins, name):
                    self.names.add(name)
            case ast.Name() | ast.Attribute():
                self.imports |= dict.fromkeys(self.imported(node))
                places = self.script.places_of(node)
                if isinstance(node, ast.Attribute) and not (places or self.imported(node)):
                    self.add(node.value, depth + 1)  # x.values
                for place in places:
                    known = place in self.places or self.values.is_set_by_private_call(place)
                    if known or isinstance(place, ast.FunctionDef | ast.ClassDef):
                        continue
                    self.places.add(place)
                    if isinstance(place, ast.arg) and isinstance(node, ast.Name):
                        passed = self.values.attempt(self.values.arguments_for, node, place)
                        for item in passed or ():
                            self.add(item, depth + 1)
                    else:
                        self.add(value := self.value_at(place), depth + 1)
                        for part in ast.walk(value or place):
                            if last_name(part) == last_name(node):  # as of ``x = f(x)``
                                self.add(part, depth + 1)
            case ast.Call():
                for item in self._parts(node):
                    self.add(item, depth + 1)
            case ast.Subscript(value=value):
                self.add(value, depth + 1)
                made = self.values.origin_of(value)
                if isinstance(made, ast.Dict) or last_name(getattr(made, "func", value)) == "dict":
                    for use in self.script.reads_of(last_name(value)):  # what is put into it
                        outer = self.script.parents[use]
                        if isinstance(outer, ast.Subscript) and isinstance(outer.ctx, ast.Store):
                            self.add(self.value_at(outer), depth + 1)
            case ast.BinOp() | ast.List() | ast.Tuple() | ast.Starred() | ast.Dict():
                for part in ast.iter_child_nodes(node):
                    self.add(part, depth + 1)
            case ast.ListComp(generators=loops) | ast.GeneratorExp(generators=loops):
                for loop in filter(lambda loop: self._may_hold_records(loop.iter), loops):
                    self.add(loop.iter, depth + 1)
            case ast.IfExp(body=body, orelse=other):
                for part in (body, other):
                    self.add(part, depth + 1)

    def _parts(self, call: ast.Call) -> list[ast.expr]:
        """Return what the records that a call returns are made of; else note that it reads them."""
        use, name, function = find_function(self.script, call), last_name(call.func), call.func
        if use is not None and "data" in use.gives:
            named = keywords_of(call)
            keys = [key for key in ("dataset", "data_loader", "train_dataset") if key in named]
            literal = not any(isinstance(part, ast.Name | ast.Call)
                              for item in call.args[:1] for part in ast.walk(item))  # fmt: skip
            if call.args and literal:
                self.calls[call] = None
            whole = name not in ("Subset", "random_split")
            return [*call.args[: None if whole else 1], *(named[key] for key in keys)]
        if use is not None and use.gives in ("same", "each"):
            return call.args[:1]
        if use is not None and "transform" in use.takes.get("code", ""):
            self.calls[call] = None  # of a path
            return []
        if (made := self.values.returned_expression(call)) is not call:
            return [made]
        if isinstance(code := self.values.origin_of(function), ast.Lambda):
            return [code.body]
        owners = [place for place in self.script.places_of(function)
                  if isinstance(place, ast.ClassDef)]  # fmt: skip
        inits = [part for owner in owners for part in ast.walk(owner)
                 if isinstance(part, ast.Call) and last_name(part.func) == "__init__"]  # fmt: skip
        if isinstance(function, ast.Attribute) and (
            not self._is_defined(_start_of(function))
            or any(map(self._may_hold_records, getattr(function.value, "args", ())))
            or (isinstance(function.value, ast.Call) and find_method("data", name or "") is None)
        ):
            # x.float(), torch.tensor(x).float(), read_csv("x").ffill(), and Scaler().transform(x)
            passed = call.args if self._is_constructed(function.value) else []
            return [function.value, *filter(self._may_hold_records, passed)]
        if name in ("range", "len", "trange"):
            return []
        passed = [*call.args, *(item for init in inits for item in init.args)]
        parts = list(filter(self._may_hold_records, passed))
        if not parts:
            self.calls[call] = None
        return parts

    def _may_hold_records(self, node: ast.AST) -> bool:
        """Whether an argument of what makes the data may itself be data: no option or path."""
        match node:
            case ast.Name():
                made = [self.value_at(place) for place in self.script.places_of(node)]
                made.append(self.values.origin_of(node))
                names = {last_name(getattr(value, "func", node)) for value in made}
                return not (names & {*NAMES["option_parsers"]} or self.values.known_value(node))
            case ast.Call(func=function, args=args):
                parts = [*args, *([function.value] if isinstance(function, ast.Attribute) else [])]
                imported = self.script.comes_from(function, ("os", "pathlib"))
                own = (part for part in parts if not self._is_defined(root_of(part)))
                return not imported and any(map(self._may_hold_records, own))
            case ast.List(elts=items) | ast.Tuple(elts=items):
                return any(isinstance(item, ast.Name | ast.Call | ast.Subscript) for item in items)
            case ast.ListComp(generators=loops) | ast.GeneratorExp(generators=loops):
                return any(self._may_hold_records(loop.iter) for loop in loops)
            case ast.Attribute(value=value, attr="values"):
                return self._may_hold_records(value)
            case ast.Attribute() | ast.Lambda():
                return False
        return any(map(self._may_hold_records, ast.iter_child_nodes(node)))

    def _is_constructed(self, node: ast.expr) -> bool:
        """Whether a class, and no function, makes an object, or what is called on it."""
        made = self.values.origin_of(node)
        function = getattr(made, "func", ast.Constant(None))
        inner = isinstance(function, ast.Attribute) and self._is_constructed(function.value)
        return inner or (last_name(function) or "")[:1].isupper()

    def _is_defined(self, root: ast.expr) -> bool:
        """Whether no value is assigned to a name: it is imported, defined or not bound."""
        if not isinstance(root, ast.Name):
            return False
        bindings = self.script.bindings_of(root)
        known = (ast.alias, ast.FunctionDef, ast.ClassDef)
        return not bindings or any(isinstance(item.node, known) for item in bindings)

    def value_at(self, place: ast.AST) -> ast.AST | None:
        """Return the expression whose value a place takes, or a part of it."""
        return assigned_to(self.script, place) or self.holder_of(place)[1]

    def holder_of(self, place: ast.AST) -> tuple[ast.AST, ast.expr | None]:
        """Return the statement or clause that gives a place its value, and the whole value."""
        around = self.script.ancestors(place)
        outer = next(o for o in around if not isinstance(o, ast.Tuple | ast.List | ast.Starred))
        held = (getattr(outer, key, None) for key in ("value", "iter", "context_expr"))
        return outer, next(filter(None, held), None)

    def made_of(self, node: ast.AST) -> set[ast.AST]:
        """Return the parts of an expression, and of all that its names may be given."""
        script, parts, todo, names = self.script, set[ast.AST](), [node], set[str | None]()
        while todo:
            for part in [part for part in ast.walk(todo.pop()) if part not in parts]:
                parts.add(part)
                methods = script.functions.get(getattr(part, "attr", ""), ())
                for place in (*script.places_of(part), *methods):
                    function = script.function_around(place) if isinstance(place, ast.arg) else None
                    owner = getattr(script.parents.get(function or place), "name", "")
                    calls = script.calls_to(getattr(function, "name", ""), owner)
                    todo += [item for call in calls for _, item in arguments_of(call)]
                    todo += [self.value_at(place) or place]
                name = getattr(part, "id", None)
                for use in script.reads_of(name) if name not in names else ():
                    held = isinstance(outer := script.parents[use], ast.Attribute | ast.Subscript)
                    todo += [script.parents[outer]] if held and not script.is_imported(use) else []
                names.add(name)
        return parts

    def imported(self, node: ast.expr) -> list[ast.alias]:
        """Return what imports a name, or what it is an attribute of, from another file."""
        aliases = []
        for item in self.script.bindings_of(root_of(node)):
            package = package_of(self.script.import_origin(item)[0] or "")
            known = package in NAMES["data_packages"] or package in KNOWN_PACKAGES
            is_own = not known or file_of_package(self.script, package)
            if isinstance(item.node, ast.alias) and is_own:
                aliases.append(item.node)
        return aliases

    @cached_property
    def unread(self) -> list[ast.Call | ast.alias]:
        """The calls of other files' code that give the records in any result, and imports."""
        calls = [call for call in self.calls if self.imported(call.func)]
        return [*calls, *self.imports]

    @cached_property
    def folders(self) -> list[str]:
        """The texts of the paths that the records are read from."""
        keys = ("root", "data_dir", "data_files")
        calls = [call for call in self.calls if _takes_root(call) or last_name(call.func) == "load"
                 or (last_name(call.func) or "").startswith("read_")]  # fmt: skip
        paths = [item for call in calls for item in (*call.args[:1], *(
            value for key, value in keywords_of(call).items() if key in keys))]  # fmt: skip
        texts = (_text_of(item).rstrip("/") for item in paths)
        return [text for text in texts if text not in ("", "'", "'.")]

    def names_folder(self, node: ast.AST) -> bool:
        """Whether an expression is a path of the records, or of a file below."""
        if isinstance(node, ast.Call) and last_name(node.func) not in NAMES["paths"]:
            return False
        text = _text_of(node)
        return (
            any(f"{text}/".startswith(f"{item}/") for item in self.folders)
            or any(cache in text for cache in NAMES["caches"])
            or any(map(self.names_folder, ast.iter_child_nodes(node)))
        )

    def reads(self, call: ast.Call) -> bool:
        """Whether a call reads the records: it is one of the sources, or not evidently another."""
        if call in self.calls:
            outer = self.script.parents.get(call)
            targets = getattr(outer, "targets", ())
            parts = any(isinstance(item, ast.Tuple) for item in targets)
            return not parts or call in self.unread
        return any(self._reads_the_same(call, other) for other in self.calls)

    def _reads_the_same(self, call: ast.Call, other: ast.Call) -> bool:
        if last_name(call.func) != last_name(other.func):
            return False
        if not self.script.comes_from(call.func, NAMES["data_packages"]):
            return False
        first, second = _settings(call), _settings(other)
        return all(first[key] == second[key] for key in first.keys() & second.keys())


def _start_of(chain: ast.expr) -> ast.expr:
    """Return what a chain of attributes, calls and items starts with."""
    while (inner := getattr(chain, "value", getattr(chain, "func", None))) is not None:
        chain = inner
    return chain


def _text_of(path: ast.AST) -> str:
    if isinstance(path, ast.Constant):
        return "'" + str(path.value)
    return ast.unparse(path) if isinstance(path, ast.Name | ast.Attribute) else ""


def _settings(call: ast.Call) -> dict[str, object]:
    """Return the constant arguments that choose among data sets."""
    first = _takes_root(call)
    named = {str(i): item for i, item in enumerate(call.args) if i >= first} | keywords_of(call)
    made: dict[str, object] = {key: _plain(item.value) for key, item in named.items() if isinstance(
        item, ast.Constant) and key not in ("download", "root", "transform")}  # fmt: skip
    if first:
        made.setdefault("train", made.pop("1", True))
    return made


def _plain(value: object) -> object:
    return posixpath.normpath(value) if isinstance(value, str) and "/" in value else value


def _takes_root(call: ast.Call) -> bool:
    """Whether a class of torchvision's reads a split of a folder."""
    return (last_name(call.func) or "")[:1].isupper()
