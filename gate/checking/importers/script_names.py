"""What names and command line options of a script stand for, where its text leaves no doubt.

A name is known if the whole file binds it once, by a plain assignment of a literal at the top
level. An option is known by its default if one parser of the file declares it once, the file
binds its namespace once, by that parser's ``parse_args()``, and nothing in the file changes
either. Scopes, branches and the order of statements are not followed: whatever else binds a
name anywhere makes it unknown.

>>> import ast
>>> known = Known.of(ast.parse("SIGMA = 0.7\\nC = 1.0\\ndef f(C): ..."))
>>> known.look_up(ast.Name("SIGMA")), known.look_up(ast.Name("C"))
(0.7, None)
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

BINDS_UNSEEN = frozenset({"setattr", "delattr", "globals", "locals", "vars", "exec", "eval"})
STORES_UNSEEN = frozenset({"__dict__", "__setattr__", "__delattr__"})
PARSES = ("parse_args", "parse_known_args")
DESCRIBES_A_PARSER = frozenset(
    {"prog", "usage", "description", "epilog", "formatter_class", "add_help", "allow_abbrev"}
)
"""What an ArgumentParser may be made with: nothing that brings other defaults."""
LEAVES_DEFAULTS = frozenset(
    {"add_argument", "add_argument_group", "add_mutually_exclusive_group", "error", "exit"}
    | {"print_help", "print_usage", "format_help", "format_usage", *PARSES}
)


@dataclass(frozen=True, slots=True)
class Known:
    """Values by name, and of options by namespace and name."""

    constants: dict[str, Any] = field(default_factory=dict)
    options: dict[tuple[str, str], Any] = field(default_factory=dict)

    @classmethod
    def of(cls, tree: ast.Module) -> Known:
        """What is known of a script's names."""
        text = _Text(tree)
        if text.may_bind_unseen:
            return cls()
        return cls(constants=text.constants(), options=text.options())

    def look_up(self, node: ast.expr) -> Any:
        """The value of an argument, or None."""
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
    """How often each name is bound in the whole of a file, in whatever way."""
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
    """A script's nodes, by what the questions about its names need."""

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
    def may_bind_unseen(self) -> bool:
        """Whether names may be bound, or attributes stored, that the text does not spell."""
        named = {attribute.attr for attribute in self.attributes}
        return "*" in self.bound or bool(BINDS_UNSEEN & self.read.keys() or STORES_UNSEEN & named)

    def constants(self) -> dict[str, Any]:
        """Names that are bound once, to a literal, at the top level."""
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
        """Defaults of options, by the namespace that they are read from and their name."""
        declared = [
            (item.func.value, destination(item), item)
            for item in self.calls
            if isinstance(item.func, ast.Attribute) and item.func.attr == "add_argument"
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
        """Names of namespaces, with the name of the parser that each is from."""
        found = {}
        for target, value in self.assigned:
            match target, value:
                case (
                    ast.Name(id=name),
                    ast.Call(func=ast.Attribute() as made, args=[], keywords=[]),
                ) if made.attr == "parse_args":
                    pass
                case (
                    ast.Tuple(elts=[ast.Name(id=name), ast.Name()]),
                    ast.Call(func=ast.Attribute() as made, args=[], keywords=[]),
                ) if made.attr == "parse_known_args":
                    pass
                case _:
                    continue
            parser = made.value
            if (
                isinstance(parser, ast.Name)
                and self._is_parser(parser.id)
                and self.bound[name] == 1
                and self._stays_here(name)
            ):
                found[name] = parser.id
        return found

    def _is_parser(self, name: str) -> bool:
        """Whether this is an ArgumentParser that nothing else has in its hands."""
        made = [value for target, value in self.assigned if _is_name(target, name)]
        used = sum(_is_name(item.value, name) for item in self.attributes)
        kept = {attribute.attr for attribute in self.attributes if _is_name(attribute.value, name)}
        return (
            self.bound[name] == len(made) == 1
            and self._makes_a_parser(made[0])
            and self.read[name] == used
            and kept <= LEAVES_DEFAULTS
        )

    def _makes_a_parser(self, node: ast.expr) -> bool:
        origin: tuple[str | None, str, str | None]
        match node:
            case ast.Call(func=ast.Name(id="ArgumentParser"), args=[], keywords=given):
                origin = ("argparse", "ArgumentParser", None)
            case ast.Call(
                func=ast.Attribute(value=ast.Name(id="argparse"), attr="ArgumentParser"),
                args=[],
                keywords=given,
            ):
                origin = (None, "argparse", None)
            case _:
                return False
        return (
            origin in self.imported
            and self.bound[origin[1]] == 1
            and {item.arg for item in given} <= DESCRIBES_A_PARSER
        )

    def _stays_here(self, name: str) -> bool:
        """Whether a namespace is only read from and printed, as far as the file goes."""
        used = sum(_is_name(attribute.value, name) for attribute in self.attributes)
        printed = sum(
            _is_name(arg, name)
            for call in self.calls
            if _is_name(call.func, "print")
            for arg in call.args
        )
        return self.read[name] == used + printed


def destination(call: ast.Call) -> str | None:
    """The attribute that an ``add_argument`` sets, or None where the text does not say."""
    names = [literal(arg) for arg in call.args]
    said = {keyword.arg: literal(keyword.value) for keyword in call.keywords}
    if None in said or not names or not all(isinstance(item, str) for item in names):
        return None
    if "dest" in said:
        return said["dest"] if isinstance(said["dest"], str) else None
    long = next((name for name in names if name.startswith("--")), names[0])
    return str(long).lstrip("-").replace("-", "_")


def default(call: ast.Call) -> Any:
    """The default of an option as ``add_argument`` leaves it, or None."""
    said = {keyword.arg: keyword.value for keyword in call.keywords}
    optional = all(str(literal(arg)).startswith("-") for arg in call.args)
    required = "required" in said and literal(said["required"]) is not False
    return literal(said.get("default")) if optional and not required else None


def _is_name(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name
