"""The mutants of a file: small changes of its code that some test should notice.

The changes are mutmut's (numbers, operators, comparisons, keywords, arguments dropped or
``None``, assignments of ``None``, arms of a ``match``, short texts such as keys and codes). Left
out is what no test should hold: annotations, decorators, imports, docstrings, and texts written
for people, which are the ones with a space in them. Constants of a module and of a class are
changed as well, which mutmut by itself does not do.
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import libcst as cst
from libcst.metadata import MetadataWrapper, PositionProvider
from mutmut.mutation.mutators import mutation_operators

NOT_MUTATED = (cst.Annotation, cst.Decorator, cst.Import, cst.ImportFrom)
NOT_CALLED_OTHERWISE = frozenset({"len", "isinstance", "cast", "assert_never", "super", "TypeVar"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Mutant:
    """One change: where it is, what stood there and what stands there now."""

    file: str
    line: int
    last_line: int
    operator: str
    was: str
    now: str
    source: str

    def as_record(self) -> dict[str, Any]:
        """The mutant without the file's text, as the results keep it."""
        return {key: value for key, value in asdict(self).items() if key != "source"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """A node of a file's tree, and another to put in its place."""

    node: cst.CSTNode
    by: cst.CSTNode
    operator: str


class Mutations:
    """All changes of one file, in the order of its text."""

    def __init__(self, path: Path) -> None:
        self.file = path.as_posix()
        self.text = path.read_text()
        self._wrapper = MetadataWrapper(cst.parse_module(self.text), unsafe_skip_copy=True)

    @cached_property
    def changes(self) -> list[Change]:
        """Every change that may be made; some turn out to change nothing."""
        return [
            Change(node=node, by=by, operator=operator.__name__.removeprefix("operator_"))
            for node in _mutable(self._wrapper.module)
            for kind, operator in mutation_operators
            if isinstance(node, kind)
            for by in _kept(operator.__name__, list(operator(node)))
            if not _only_for_people(node, by)
        ]

    def mutant(self, change: Change) -> Mutant | None:
        """The file with ``change`` made; None where the code stays the same or cannot be read."""
        source = self._wrapper.module.deep_replace(change.node, change.by).code
        try:
            if ast.dump(ast.parse(source)) == ast.dump(ast.parse(self.text)):
                return None
        except SyntaxError:
            return None
        where = self._positions[change.node]
        lines = list(difflib.unified_diff(self.text.splitlines(), source.splitlines(), n=0))[2:]
        return Mutant(
            file=self.file,
            line=where.start.line,
            last_line=where.end.line,
            operator=change.operator,
            was=" ".join(line[1:].strip() for line in lines if line.startswith("-")),
            now=" ".join(line[1:].strip() for line in lines if line.startswith("+")),
            source=source,
        )

    @cached_property
    def _positions(self) -> Any:
        return self._wrapper.resolve(PositionProvider)


def _mutable(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    yield node
    for child in node.children:
        if not isinstance(child, NOT_MUTATED) and not _is_left_out(child):
            yield from _mutable(child)


def _kept(operator: str, made: list[cst.CSTNode]) -> list[cst.CSTNode]:
    """One change of a short text is enough: its other ones are noticed by the same tests."""
    return made[:1] if operator == "operator_string" else made


def _is_left_out(node: cst.CSTNode) -> bool:
    match node:
        case cst.Assign(targets=[cst.AssignTarget(target=cst.Name("__all__"))]):
            return True
        case cst.Call(func=cst.Name(name)):
            return name in NOT_CALLED_OTHERWISE
        case cst.FormattedString():
            return _is_prose(node)
        case _:
            return _is_docstring(node)


def _is_docstring(node: cst.CSTNode) -> bool:
    return isinstance(node, cst.Expr) and isinstance(
        node.value, cst.SimpleString | cst.ConcatenatedString
    )


def _is_prose(node: cst.CSTNode) -> bool:
    match node:
        case cst.SimpleString():
            return " " in node.value
        case cst.FormattedString():
            return any(
                isinstance(p, cst.FormattedStringText) and " " in p.value for p in node.parts
            )
        case cst.ConcatenatedString():
            return _is_prose(node.left) or _is_prose(node.right)
        case _:
            return False


def _only_for_people(node: cst.CSTNode, by: cst.CSTNode) -> bool:
    """Whether all that goes is a text for people."""
    if isinstance(node, cst.Call) and isinstance(by, cst.Call):
        stored = {id(argument) for argument in by.args}
        gone = [argument for argument in node.args if id(argument) not in stored]
        return any(_is_prose(argument.value) for argument in gone)
    if isinstance(node, cst.Assign | cst.AnnAssign):
        return node.value is not None and _is_prose(node.value)
    return _is_prose(node)
