"""Constants and command-line defaults of a script, where its text is unambiguous.

A name is known if the file binds it exactly once, by assigning a literal at the top level. An
option has its default value if one parser declares it once, its namespace is bound once by that
parser's ``parse_args()``, and nothing in the file changes either. Scopes, branches and statement
order are ignored: any other binding of a name makes it unknown.

>>> import ast
>>> known = Constants.of(ast.parse("SIGMA = 0.7\\nC = 1.0\\ndef f(C): ..."))
>>> known.look_up(ast.Name("SIGMA")), known.look_up(ast.Name("C"))
(0.7, None)
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

DYNAMIC_FUNCTIONS = frozenset({"setattr", "delattr", "globals", "locals", "vars", "exec", "eval"})
DYNAMIC_ATTRIBUTES = frozenset({"__dict__", "__setattr__", "__delattr__"})
PARSES = ("parse_args", "parse_known_args")
SAFE_PARSER_ARGUMENTS = frozenset(
    {"prog", "usage", "description", "epilog", "formatter_class", "add_help", "allow_abbrev"}
)
"""Arguments of ArgumentParser that do not change defaults."""
SAFE_PARSER_METHODS = frozenset(
    {"add_argument", "add_argument_group", "add_mutually_exclusive_group", "error", "exit"}
    | {"print_help", "print_usage", "format_help", "format_usage", *PARSES}
)


@dataclass(frozen=True, slots=True)
class Constants:
    """Values by name, and option defaults by namespace and name."""

    constants: dict[str, Any] = field(default_factory=dict)
    options: dict[tuple[str, str], Any] = field(default_factory=dict)

    @classmethod
    def of(cls, tree: ast.Module) -> Constants:
        """The constants of a script."""
        text = _Text(tree)
        if text.has_dynamic_bindings:
            return cls()
        return cls(constants=text.constants(), options=text.options())

    def look_up(self, node: ast.expr) -> Any:
        """The value of an argument, or None if unknown."""
        match node:
            case ast.Name(id=name):
                return self.constants.get(name)
            case ast.Attribute(value=ast.Name(id=name), attr=option):
                return self.options.get((name, option))
            case _:
                return literal(node)


def literal(node: ast.AST | None) -> Any:
    """The value of a literal, or None."""
    try:
        return ast.literal_eval(node) if isinstance(node, ast.expr) else None
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None


def bound(tree: ast.AST) -> Counter[str]:
    """How often each name is bound anywhere in a file."""
    return Counter(name for node in ast.walk(tree) for name in _bound_by(node))


def _bound_by(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.Name(id=name, ctx=ast.Store() | ast.Del()) | ast.arg(arg=name):
            yield name
        case ast.alias(name=name, asname=short):
            yield short or name.partition(".")[0]
        case ast.Global(names=names) | ast.Nonlocal(names=names):
            yield from names
        case ast.MatchMapping(rest=str(name)):
            yield name
        case _:
            # Functions, classes, except-as, patterns and type parameters.
            if isinstance(other := getattr(node, "name", None), str):
                yield other


class _Text:
    """The nodes of a script by kind."""

    def __init__(self, tree: ast.Module) -> None:
        nodes = list(ast.walk(tree))
        self.top = tree.body
        self.bound = bound(tree)
        self.calls = [node for node in nodes if isinstance(node, ast.Call)]
        self.assigned = [
            (node.targets[0], node.value)
            for node in nodes
            if isinstance(node, ast.Assign) and len(node.targets) == 1
        ]
        self.attributes = [node for node in nodes if isinstance(node, ast.Attribute)]
        self.stored = {
            attribute.attr
            for attribute in self.attributes
            if not isinstance(attribute.ctx, ast.Load)
        }
        self.imported = {
            (node.module if isinstance(node, ast.ImportFrom) else None, name.name, name.asname)
            for node in nodes
            if isinstance(node, ast.Import | ast.ImportFrom)
            for name in node.names
        }
        self.read = Counter(
            node.id
            for node in nodes
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
        )

    @property
    def has_dynamic_bindings(self) -> bool:
        """Whether names may be bound, or attributes set, dynamically."""
        named = {attribute.attr for attribute in self.attributes}
        return "*" in self.bound or bool(
            DYNAMIC_FUNCTIONS & self.read.keys() or DYNAMIC_ATTRIBUTES & named
        )

    def constants(self) -> dict[str, Any]:
        """Names bound once, to a literal, at the top level."""
        return {
            node.targets[0].id: literal(node.value)
            for node in self.top
            if isinstance(node, ast.Assign)
            and len(node.targets) == 1
            and isinstance(node.targets[0], ast.Name)
            and self.bound[node.targets[0].id] == 1
            and node.targets[0].id not in self.stored
        }

    def options(self) -> dict[tuple[str, str], Any]:
        """Defaults of options, by namespace and name."""
        declared = [
            (call.func.value, destination(call), call)
            for call in self.calls
            if isinstance(call.func, ast.Attribute) and call.func.attr == "add_argument"
        ]
        times = Counter(name for _, name, _ in declared)
        named = {attribute.attr for attribute in self.attributes}
        if None in times or "set_defaults" in named or {"default", "dest"} & self.stored:
            return {}
        namespaces = self._namespaces()
        return {
            (namespace, name): default(call)
            for namespace, parser in namespaces.items()
            for on, name, call in declared
            if isinstance(on, ast.Name) and on.id == parser and name is not None
            if times[name] == 1 and name not in self.stored
        }

    def _namespaces(self) -> dict[str, str]:
        """Names of namespaces, with the name of the parser of each."""
        namespaces = {}
        for target, value in self.assigned:
            match target, value:
                case (
                    ast.Name(id=name),
                    ast.Call(func=ast.Attribute() as origin_call, args=[], keywords=[]),
                ) if origin_call.attr == "parse_args":
                    pass
                case (
                    ast.Tuple(elts=[ast.Name(id=name), ast.Name()]),
                    ast.Call(func=ast.Attribute() as origin_call, args=[], keywords=[]),
                ) if origin_call.attr == "parse_known_args":
                    pass
                case _:
                    continue
            parser = origin_call.value
            if (
                isinstance(parser, ast.Name)
                and self._is_parser(parser.id)
                and self.bound[name] == 1
                and self._stays_here(name)
            ):
                namespaces[name] = parser.id
        return namespaces

    def _is_parser(self, name: str) -> bool:
        """Whether this is an ArgumentParser that is not passed elsewhere."""
        origin_call = [value for target, value in self.assigned if _is_name(target, name)]
        used = sum(_is_name(attribute.value, name) for attribute in self.attributes)
        methods = {
            attribute.attr for attribute in self.attributes if _is_name(attribute.value, name)
        }
        return (
            self.bound[name] == len(origin_call) == 1
            and self._makes_a_parser(origin_call[0])
            and self.read[name] == used
            and methods <= SAFE_PARSER_METHODS
        )

    def _makes_a_parser(self, node: ast.expr) -> bool:
        origin: tuple[str | None, str, str | None]
        match node:
            case ast.Call(func=ast.Name(id="ArgumentParser"), args=[], keywords=keywords):
                origin = ("argparse", "ArgumentParser", None)
            case ast.Call(
                func=ast.Attribute(value=ast.Name(id="argparse"), attr="ArgumentParser"),
                args=[],
                keywords=keywords,
            ):
                origin = (None, "argparse", None)
            case _:
                return False
        return (
            origin in self.imported
            and self.bound[origin[1]] == 1
            and {keyword.arg for keyword in keywords} <= SAFE_PARSER_ARGUMENTS
        )

    def _stays_here(self, name: str) -> bool:
        """Whether the file only reads from and prints a namespace."""
        used = sum(_is_name(attribute.value, name) for attribute in self.attributes)
        printed = sum(
            _is_name(arg, name)
            for call in self.calls
            if _is_name(call.func, "print")
            for arg in call.args
        )
        return self.read[name] == used + printed


def destination(call: ast.Call) -> str | None:
    """The attribute that an ``add_argument`` sets, or None if unknown."""
    names = [literal(arg) for arg in call.args]
    arguments = {keyword.arg: literal(keyword.value) for keyword in call.keywords}
    if None in arguments or not names or not all(isinstance(name, str) for name in names):
        return None
    if "dest" in arguments:
        return arguments["dest"] if isinstance(arguments["dest"], str) else None
    long = next((name for name in names if name.startswith("--")), names[0])
    return str(long).lstrip("-").replace("-", "_")


def default(call: ast.Call) -> Any:
    """The default of an option, or None if unknown."""
    arguments = {keyword.arg: keyword.value for keyword in call.keywords}
    optional = all(str(literal(arg)).startswith("-") for arg in call.args)
    required = "required" in arguments and literal(arguments["required"]) is not False
    return literal(arguments.get("default")) if optional and not required else None


def _is_name(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name
