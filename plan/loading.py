"""Strict reading of JSON and YAML: the text says one thing, or it is refused.

Stock parsers accept NaN, duplicate keys, numbers that overflow to infinity or vanish to
zero, lone surrogates, and (in YAML) aliases that expand without bound. Any of these can
make two readers see two plans, so all of them are refused here, each naming the field
and, where there is text to point at, its line and column.

JSON is RFC 8259. YAML is the 1.2 core schema: ``yes`` is a string and ``1e-5`` a number.
Numbers are read as IEEE doubles; integers must be exact in one (at most 2^53 - 1).

>>> load_yaml(b"target: {delta: 1e-5}").data
{'target': {'delta': 1e-05}}
>>> load_json(b'{"steps": 1, "steps": 2}')
Traceback (most recent call last):
affidavit.plan.reasons.MalformedPlan: duplicate_key at /steps: ...
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.events import (
    AliasEvent,
    DocumentEndEvent,
    DocumentStartEvent,
    Event,
    MappingEndEvent,
    MappingStartEvent,
    ScalarEvent,
    SequenceEndEvent,
    SequenceStartEvent,
    StreamEndEvent,
    StreamStartEvent,
)

from affidavit.plan.reasons import MalformedPlan, Reason, pointer_to
from affidavit.plan.types import LARGEST_INTEGER

MAX_JSON_BYTES = 1024 * 1024
MAX_YAML_BYTES = 64 * 1024
"""YAML is parsed in Python, at about 100 kB a second; a larger plan belongs in JSON."""
MAX_DEPTH = 32

Path = tuple[str, ...]
"""Where a field stands: keys and indices, both as text, because a key may be digits too."""
Position = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Document:
    """The tree that a text stands for, and where each of its fields stands in the text."""

    data: Any
    positions: Mapping[Path, Position] = field(default_factory=dict)

    def locate(self, reason: Reason, path: Path) -> Reason:
        """``reason`` with the line and column of ``path``, or of its nearest parent."""
        for length in range(len(path), -1, -1):
            if (found := self.positions.get(path[:length])) is not None:
                return _placed(reason, found)
        return reason


def load_json(raw: bytes, limit: int = MAX_JSON_BYTES) -> Document:
    """Read one JSON document of at most ``limit`` bytes strictly; raises ``MalformedPlan``."""
    text = _text(raw, limit, "JSON")
    try:
        parsed = json.loads(
            text,
            object_pairs_hook=_Pairs,
            parse_int=lambda literal: _number(literal, integral=True),
            parse_float=lambda literal: _number(literal, integral=False),
            parse_constant=lambda name: _BadNumber("not_finite", f"{name} is not a finite number"),
        )
    except json.JSONDecodeError as error:
        raise MalformedPlan(
            Reason(
                code="syntax",
                pointer="",
                message=f"this is not JSON: {error.msg}.",
                remedy="Mend the text at the position given.",
                line=error.lineno,
                column=error.colno,
            )
        ) from None
    except RecursionError:
        raise MalformedPlan(_placed(_too_deep(()), (1, 1))) from None
    try:
        return Document(_checked(parsed, ()))
    except _At as found:
        # JSON is (but for details that no plan uses) YAML, whose parser knows positions.
        raise MalformedPlan(_positions_in_json(text).locate(found.reason, found.path)) from None


def locate_in_json(raw: bytes) -> Document:
    """Positions of the fields of a JSON text that ``load_json`` accepted."""
    return _positions_in_json(raw.decode("utf-8"))


def load_yaml(raw: bytes) -> Document:
    """Read one YAML 1.2 document strictly; raises ``MalformedPlan``."""
    text = _text(raw, MAX_YAML_BYTES, "YAML")
    reader = _YamlReader(text)
    try:
        parsed = reader.read()
        document = Document(_checked(parsed, ()), reader.positions)
    except _At as found:
        where = Document(None, reader.positions)
        raise MalformedPlan(where.locate(found.reason, found.path)) from None
    return document


# ---- what both readers share -------------------------------------------------------


class _At(Exception):
    """A reason with the path at which it was found; never leaves this module."""

    def __init__(self, path: Path, code: str, message: str, remedy: str) -> None:
        super().__init__(message)
        self.path = path
        self.reason = Reason(code=code, pointer=pointer_to(*path), message=message, remedy=remedy)


@dataclass(frozen=True, slots=True)
class _BadNumber:
    code: str
    message: str


class _Pairs(list[tuple[str, Any]]):
    """An object's members in order, before duplicates are looked for."""


def _text(raw: bytes, limit: int, kind: str) -> str:
    if len(raw) > limit:
        raise MalformedPlan(
            Reason(
                code="too_large",
                pointer="",
                message=f"the {kind} text has {len(raw)} bytes; the limit is {limit}.",
                remedy="Give large matrices by file and sha256, or use JSON for a long plan.",
            )
        )
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise MalformedPlan(
            Reason(
                code="bad_text",
                pointer="",
                message=f"the text is not UTF-8 at byte {error.start}.",
                remedy="Save it as UTF-8.",
            )
        ) from None
    if not text.strip():
        raise MalformedPlan(
            Reason(
                code="empty",
                pointer="",
                message="the document is empty.",
                remedy="Give a plan, such as one of examples/.",
            )
        )
    return text


def _number(literal: str, *, integral: bool) -> int | float | _BadNumber:
    """The value of a decimal literal, or why it has none that two readers agree on."""
    short = literal if len(literal) <= 40 else literal[:37] + "..."
    if integral:
        digits = literal.lstrip("+-").lstrip("0")
        if len(digits) > 16 or int(digits or "0") > LARGEST_INTEGER:
            return _BadNumber("number_out_of_range", f"{short} is beyond 2^53 - 1")
        if literal.startswith("-") and not digits:
            return _BadNumber("negative_zero", f"{short} is a negative zero")
        return -int(digits) if literal.startswith("-") else int(digits or "0")
    value = float(literal)
    if math.isinf(value):
        return _BadNumber("number_out_of_range", f"{short} is beyond the range of a double")
    if value == 0 and literal.startswith("-"):
        return _BadNumber("negative_zero", f"{short} is a negative zero")
    mantissa = re.split("[eE]", literal)[0]
    if abs(value) < sys.float_info.min and mantissa.strip("+-0."):
        return _BadNumber("number_out_of_range", f"{short} is below the smallest normal double")
    return value


def _checked(node: Any, path: Path) -> Any:
    """``node`` as plain dicts and lists, or the first thing in it that is not allowed."""
    if len(path) > MAX_DEPTH:
        reason = _too_deep(path)
        raise _At(path, reason.code, reason.message, reason.remedy)
    match node:
        case _Pairs():
            return _checked_object(node, path)
        case list():
            return [_checked(item, (*path, str(index))) for index, item in enumerate(node)]
        case str():
            return _checked_text(node, path)
        case _BadNumber(code=code, message=message):
            raise _At(path, code, message + ".", "Give a plain decimal number in range.")
        case _:
            return node


def _checked_object(pairs: _Pairs, path: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        _checked_text(key, path)
        if key in found:
            raise _At(
                (*path, key),
                "duplicate_key",
                f"the key {key!r} is given twice.",
                "Keep one of the two.",
            )
        found[key] = _checked(value, (*path, key))
    return found


def _checked_text(text: str, path: Path) -> str:
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise _At(path, "bad_text", "the text has a lone surrogate.", "Use valid Unicode.")
    return text


def _too_deep(path: Path) -> Reason:
    return Reason(
        code="too_deep",
        pointer=pointer_to(*path[:4]),
        message=f"the document is nested deeper than {MAX_DEPTH} levels.",
        remedy="A plan needs no more than seven.",
    )


def _placed(reason: Reason, position: Position) -> Reason:
    return Reason(
        code=reason.code,
        pointer=reason.pointer,
        message=reason.message,
        remedy=reason.remedy,
        line=position[0],
        column=position[1],
    )


# ---- YAML --------------------------------------------------------------------------

_NULL = re.compile(r"|~|null|Null|NULL")
_BOOLEAN = re.compile(r"true|True|TRUE|false|False|FALSE")
_INTEGER = re.compile(r"[-+]?[0-9]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_NOT_FINITE = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")


def _plain_scalar(text: str) -> Any:
    """Resolve an unquoted scalar by the core schema (YAML 1.2.2, section 10.3.2)."""
    if _NULL.fullmatch(text):
        return None
    if _BOOLEAN.fullmatch(text):
        return text.lower() == "true"
    if _INTEGER.fullmatch(text):
        return _number(text, integral=True)
    if _FLOAT.fullmatch(text):
        return _number(text, integral=False)
    if _NOT_FINITE.fullmatch(text):
        return _BadNumber("not_finite", f"{text} is not a finite number")
    return text


class _YamlReader:
    """Builds the tree from parser events, so that nothing is expanded before it is allowed."""

    def __init__(self, text: str) -> None:
        self.positions: dict[Path, Position] = {}
        self._events: Iterator[Event] = YAML(typ="safe", pure=True).parse(text)

    def read(self) -> Any:
        try:
            self._expect(StreamStartEvent)
            start = self._expect(DocumentStartEvent)
            if start.version not in (None, (1, 2)) or start.tags:
                self.positions[()] = _mark(start)
                raise _At(
                    (),
                    "yaml_directive",
                    "the document has a YAML directive.",
                    "Remove the %YAML or %TAG line; plans are YAML 1.2.",
                )
            tree = self._node(next(self._events), ())
            self._expect(DocumentEndEvent)
            if not isinstance(next(self._events), StreamEndEvent):
                raise _At(
                    (), "syntax", "the text holds more than one document.", "Keep one plan a file."
                )
            return tree
        except MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            raise MalformedPlan(
                Reason(
                    code="syntax",
                    pointer="",
                    message=f"this is not YAML: {error.problem or error.context}.",
                    remedy="Mend the text at the position given.",
                    line=mark.line + 1 if mark else None,
                    column=mark.column + 1 if mark else None,
                )
            ) from None
        except (YAMLError, StopIteration) as error:
            raise self._not_yaml(str(error).partition("\n")[0] or "it ends too early") from None
        except (ValueError, OverflowError):
            raise self._not_yaml("an escape stands for no character") from None

    def _not_yaml(self, message: str) -> MalformedPlan:
        line, column = max(self.positions.values(), default=(1, 1))
        return MalformedPlan(
            Reason(
                code="syntax",
                pointer="",
                message=f"this is not YAML: {message}.",
                remedy="Mend the text after the position given.",
                line=line,
                column=column,
            )
        )

    def _expect(self, kind: type[Event]) -> Any:
        event = next(self._events)
        if not isinstance(event, kind):
            raise _At((), "syntax", "this is not one YAML document.", "Keep one plan a file.")
        return event

    def _node(self, event: Event, path: Path) -> Any:
        self.positions.setdefault(path, _mark(event))
        if len(path) > MAX_DEPTH:
            reason = _too_deep(path)
            raise _At(path, reason.code, reason.message, reason.remedy)
        if isinstance(event, AliasEvent) or getattr(event, "anchor", None):
            raise _At(
                path,
                "yaml_alias",
                "the document uses an anchor or an alias.",
                "Write the value out where it is used.",
            )
        if getattr(event, "ctag", None) is not None or getattr(event, "tag", None) is not None:
            raise _At(path, "yaml_tag", "the document uses a YAML tag.", "Remove the tag.")
        match event:
            case ScalarEvent():
                quoted = event.style in ("'", '"', "|", ">")
                return event.value if quoted else _plain_scalar(event.value)
            case SequenceStartEvent():
                items = iter(self._until(SequenceEndEvent))
                return [self._node(item, (*path, str(index))) for index, item in enumerate(items)]
            case MappingStartEvent():
                return self._mapping(path)
            case _:
                raise _At(path, "syntax", "this is not a plan.", "Give a mapping of fields.")

    def _mapping(self, path: Path) -> _Pairs:
        pairs = _Pairs()
        for key in self._until(MappingEndEvent):
            if not isinstance(key, ScalarEvent) or key.anchor or key.tag is not None:
                raise _At(
                    path,
                    "syntax",
                    "a key of a mapping is not a plain word.",
                    "Use field names as keys.",
                )
            here = (*path, key.value)
            self.positions[here] = _mark(key)
            pairs.append((key.value, self._node(next(self._events), here)))
        return pairs

    def _until(self, end: type[Event]) -> Iterator[Event]:
        for event in self._events:
            if isinstance(event, end):
                return
            yield event


def _mark(event: Event) -> Position:
    mark = event.start_mark
    return (mark.line + 1, mark.column + 1) if mark is not None else (1, 1)


def _positions_in_json(text: str) -> Document:
    if len(text) > MAX_YAML_BYTES:
        return Document(None)
    reader = _YamlReader(text)
    with contextlib.suppress(MalformedPlan, _At):  # what was read so far has its positions
        reader.read()
    return Document(None, reader.positions)
