"""Strict parsing of JSON and YAML: a text has one meaning, or it is refused.

Stock parsers accept NaN, duplicate keys, numbers that overflow to infinity or vanish to zero, lone
surrogates, and (in YAML) aliases that expand without bound. Two readers may disagree about any of
these, so they are refused, with the field and, if there is one, its line and column.

JSON is RFC 8259. YAML is the 1.2 core schema without anchors, aliases, tags, directives or several
documents; ``yes`` is a string and ``1e-5`` a number. Its tree is built from the events of the
parser, so nothing is expanded before it is validated, and the line and column of each field are
recorded. Numbers are IEEE doubles; integers must be exact in one (at most 2^53 - 1).

Both readers build a tree of ``Pairs``, lists, texts and numbers, with a ``BadNumber`` for a literal
on whose value readers disagree. ``validate_tree`` returns it as plain data, or raises ``Refused``
with the place of the first error.

>>> load_yaml(b"target: {delta: 1e-5}").data
{'target': {'delta': 1e-05}}
>>> load_json(b'{"steps": 1, "steps": 2}')
Traceback (most recent call last):
affidavit.plan.diagnostics.MalformedPlan: duplicate_key at /steps: ...
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.events import (
    AliasEvent,
    DocumentStartEvent,
    Event,
    MappingEndEvent,
    MappingStartEvent,
    ScalarEvent,
    SequenceEndEvent,
    SequenceStartEvent,
    StreamEndEvent,
)

from affidavit.plan.diagnostics import MalformedPlan, Reason, pointer_to
from affidavit.plan.limits import MAX_INTEGER, MAX_JSON_BYTES

MAX_YAML_BYTES = 64 * 1024
"""YAML is parsed at about 100 kB per second; a larger plan belongs in JSON."""
MAX_DEPTH = 32
"""Levels of nesting; a plan has at most seven."""

Syntax = Literal["json", "yaml"]
Path = tuple[str, ...]
"""The path of a field: keys and indices, both as text, because a key may be digits."""
Position = tuple[int, int]
"""Line and column, from 1."""


@dataclass(frozen=True)
class Document:
    """The tree of a text, and the position of each field in the text.

    ``places`` are the positions, or the JSON text that is searched when a position is needed. The
    text begins after ``lines_before`` lines of a larger file.
    """

    data: Any
    places: Mapping[Path, Position] | str
    lines_before: int = 0

    @cached_property
    def positions(self) -> Mapping[Path, Position]:
        """Line and column of each field, if known."""
        places = self.places
        return _find_json_positions(places) if isinstance(places, str) else places

    def locate(self, reason: Reason, path: Path) -> Reason:
        """Return ``reason`` with the line and column of ``path``, or of its nearest parent."""
        for length in range(len(path), -1, -1):
            if (position := self.positions.get(path[:length])) is not None:
                line, column = position
                return replace(reason, line=line + self.lines_before, column=column)
        return reason


class Refused(Exception):
    """A reason with its path; never leaves this module."""

    def __init__(
        self, path: Path, code: str, message: str, remedy: str, pointer: str | None = None
    ) -> None:
        super().__init__(message)
        self.path = path
        at = pointer_to(*path) if pointer is None else pointer
        self.reason = Reason(code=code, pointer=at, message=message, remedy=remedy)


@dataclass(frozen=True, slots=True)
class BadNumber:
    """A numeric literal without a valid value, and the reason."""

    code: str
    message: str


class Pairs(list[tuple[str, Any]]):
    """The members of an object in order, before duplicates are refused."""


def syntax_of(name: str, raw: bytes) -> Syntax:
    """Return the syntax of a file by its suffix, or else by its first character."""
    if name.endswith((".yaml", ".yml")):
        return "yaml"
    return "json" if name.endswith(".json") or raw.lstrip()[:1] in (b"{", b"[") else "yaml"


def load_json(raw: bytes, limit: int = MAX_JSON_BYTES) -> Document:
    """Parse one JSON document of at most ``limit`` bytes; raises ``MalformedPlan``."""
    text = _decode(raw, limit, "JSON")
    try:
        parsed = json.loads(
            text,
            object_pairs_hook=Pairs,
            parse_int=lambda literal: parse_number(literal, integral=True),
            parse_float=lambda literal: parse_number(literal, integral=False),
            parse_constant=lambda name: BadNumber("not_finite", f"{name} is not a finite number"),
        )
    except json.JSONDecodeError as error:
        raise _malformed(
            "syntax",
            f"this is not JSON: {error.msg}.",
            "Correct the text at this position.",
            line=error.lineno,
            column=error.colno,
        ) from None
    except RecursionError:
        raise MalformedPlan(replace(_too_deep(()).reason, line=1, column=1)) from None
    try:
        return Document(validate_tree(parsed, ()), text)
    except Refused as refusal:
        raise MalformedPlan(Document(None, text).locate(refusal.reason, refusal.path)) from None


def load_yaml(raw: bytes) -> Document:
    """Parse one YAML 1.2 document; raises ``MalformedPlan``."""
    reader = YamlReader(_decode(raw, MAX_YAML_BYTES, "YAML"))
    try:
        return Document(validate_tree(reader.read(), ()), reader.positions)
    except Refused as refusal:
        positions = Document(None, reader.positions)
        raise MalformedPlan(positions.locate(refusal.reason, refusal.path)) from None


def _find_json_positions(text: str) -> Mapping[Path, Position]:
    """Find positions with the YAML parser, which reads JSON (except details that no plan uses)."""
    if len(text) > MAX_YAML_BYTES:
        return {}
    reader = YamlReader(text)
    with contextlib.suppress(MalformedPlan, Refused):  # keeps the positions before the error
        reader.read()
    return reader.positions


def _decode(raw: bytes, limit: int, kind: str) -> str:
    """Return the text; raises ``MalformedPlan`` if it is too long, empty or not UTF-8."""
    if len(raw) > limit:
        raise _malformed(
            "too_large",
            f"the {kind} text has more than {limit} bytes.",
            "Give large matrices by file and sha256, or use JSON for a long plan.",
        )
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _malformed(
            "bad_text", f"the text is not UTF-8 at byte {error.start}.", "Save it as UTF-8."
        ) from None
    if not text.strip():
        raise _empty()
    return text


def _too_deep(path: Path) -> Refused:
    return Refused(
        path,
        "too_deep",
        f"the document is nested deeper than {MAX_DEPTH} levels.",
        "A plan needs no more than seven.",
        pointer=pointer_to(*path[:4]),
    )


def _malformed(
    code: str, message: str, remedy: str, line: int | None = None, column: int | None = None
) -> MalformedPlan:
    return MalformedPlan(
        Reason(code=code, message=message, remedy=remedy, line=line, column=column)
    )


def _empty() -> MalformedPlan:
    return _malformed(
        "empty", "the document is empty.", "Write a first plan with `affidavit init`."
    )


def parse_number(literal: str, *, integral: bool) -> int | float | BadNumber:
    """Return the value of a decimal literal, or why readers disagree about it."""
    if integral and len(literal) < 16 and (small := int(literal)):
        return small  # a fast path: a hostile text has a hundred thousand integers
    short = literal if len(literal) <= 40 else literal[:37] + "..."
    if integral:
        digits = literal.lstrip("+-").lstrip("0")
        if len(digits) > 16 or int(digits or "0") > MAX_INTEGER:
            return BadNumber("number_out_of_range", f"{short} is beyond 2^53 - 1")
        return (-1 if literal.startswith("-") else 1) * int(digits or "0")
    value = float(literal)
    if math.isinf(value):
        return BadNumber("number_out_of_range", f"{short} is beyond the range of a double")
    mantissa = re.split("[eE]", literal)[0]
    if abs(value) < sys.float_info.min and mantissa.strip("+-0."):
        return BadNumber("number_out_of_range", f"{short} is below the smallest normal double")
    return value + 0.0  # -0.0 is 0.0


def validate_tree(node: Any, path: Path) -> Any:
    """Return ``node`` as plain dicts and lists; raises ``Refused`` for anything not allowed."""
    if len(path) > MAX_DEPTH:
        raise _too_deep(path)
    match node:
        case Pairs():
            return _validate_object(node, path)
        case list():
            return [validate_tree(item, (*path, str(index))) for index, item in enumerate(node)]
        case str():
            return _validate_characters(node, path)
        case BadNumber(code=code, message=message):
            raise Refused(path, code, message + ".", "Give a plain decimal number in range.")
        case _:
            return node


def _validate_object(pairs: Pairs, path: Path) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        _validate_characters(key, path)
        if key in result:
            raise Refused(
                (*path, key),
                "duplicate_key",
                f"the key {key!r} is given twice.",
                "Keep one of the two.",
            )
        result[key] = validate_tree(value, (*path, key))
    return result


def _validate_characters(text: str, path: Path) -> str:
    if _SURROGATE.search(text):
        raise Refused(path, "bad_text", "the text has a lone surrogate.", "Use valid Unicode.")
    return text


_SURROGATE = re.compile("[\ud800-\udfff]")
_NULL = re.compile(r"|~|null|Null|NULL")
_BOOLEAN = re.compile(r"true|True|TRUE|false|False|FALSE")
_INTEGER = re.compile(r"[-+]?[0-9]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_NOT_FINITE = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")


def _resolve_scalar(text: str) -> Any:
    """Resolve an unquoted scalar by the core schema (YAML 1.2.2, section 10.3.2)."""
    if _NULL.fullmatch(text):
        return None
    if _BOOLEAN.fullmatch(text):
        return text.lower() == "true"
    if _INTEGER.fullmatch(text):
        return parse_number(text, integral=True)
    if _FLOAT.fullmatch(text):
        return parse_number(text, integral=False)
    if _NOT_FINITE.fullmatch(text):
        return BadNumber("not_finite", f"{text} is not a finite number")
    return text


class YamlReader:
    """Reads one document; ``positions`` has all fields up to the end, or up to an error."""

    def __init__(self, text: str) -> None:
        self.positions: dict[Path, Position] = {}
        self._events: Iterator[Event] = YAML(typ="safe", pure=True).parse(text)

    def read(self) -> Any:
        """Return the tree; raises ``Refused`` or ``MalformedPlan``."""
        try:
            next(self._events)  # start of the stream
            start = next(self._events)
            if isinstance(start, StreamEndEvent):  # only comments
                raise _empty()
            assert isinstance(start, DocumentStartEvent)
            if start.version not in (None, (1, 2)) or start.tags:
                self.positions[()] = _position(start)
                raise Refused(
                    (),
                    "yaml_directive",
                    "the document has a YAML directive.",
                    "Remove the %YAML or %TAG line; plans are YAML 1.2.",
                )
            tree = self._node(next(self._events), ())
            next(self._events)  # end of the document
            if not isinstance(next(self._events), StreamEndEvent):
                raise Refused(
                    (),
                    "syntax",
                    "the text holds more than one document.",
                    "Keep one plan per file.",
                )
            return tree
        except MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            raise _malformed(
                "syntax",
                f"this is not YAML: {error.problem or error.context}.",
                "Correct the text at this position.",
                line=mark.line + 1 if mark else None,
                column=mark.column + 1 if mark else None,
            ) from None
        except (YAMLError, StopIteration) as error:
            raise self._not_yaml(str(error).partition("\n")[0] or "it ends too early") from None
        except (ValueError, OverflowError):
            raise self._not_yaml("an escape does not encode a character") from None

    def _not_yaml(self, message: str) -> MalformedPlan:
        line, column = max(self.positions.values(), default=(1, 1))
        return _malformed(
            "syntax",
            f"this is not YAML: {message}.",
            "Correct the text after this position.",
            line=line,
            column=column,
        )

    def _node(self, event: Event, path: Path) -> Any:
        self.positions.setdefault(path, _position(event))
        if len(path) > MAX_DEPTH:
            raise _too_deep(path)
        if isinstance(event, AliasEvent) or getattr(event, "anchor", None):
            raise Refused(
                path,
                "yaml_alias",
                "the document uses an anchor or an alias.",
                "Write the value out where it is used.",
            )
        if getattr(event, "ctag", None) is not None or getattr(event, "tag", None) is not None:
            raise Refused(path, "yaml_tag", "the document uses a YAML tag.", "Remove the tag.")
        match event:
            case ScalarEvent():
                quoted = event.style in ("'", '"', "|", ">")
                return event.value if quoted else _resolve_scalar(event.value)
            case SequenceStartEvent():
                items = iter(self._until(SequenceEndEvent))
                return [self._node(item, (*path, str(index))) for index, item in enumerate(items)]
            case MappingStartEvent():
                return self._mapping(path)
            case _:
                raise Refused(path, "syntax", "this is not a plan.", "Give a mapping of fields.")

    def _mapping(self, path: Path) -> Pairs:
        pairs = Pairs()
        for key in self._until(MappingEndEvent):
            if not isinstance(key, ScalarEvent) or key.anchor or key.tag is not None:
                raise Refused(
                    path, "syntax", "a mapping key is not a plain word.", "Use field names as keys."
                )
            field = (*path, key.value)
            self.positions[field] = _position(key)
            pairs.append((key.value, self._node(next(self._events), field)))
        return pairs

    def _until(self, end: type[Event]) -> Iterator[Event]:
        for event in self._events:
            if isinstance(event, end):
                return
            yield event


def _position(event: Event) -> Position:
    mark = event.start_mark
    return (mark.line + 1, mark.column + 1) if mark is not None else (1, 1)
