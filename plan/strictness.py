"""What is refused in any syntax: numbers, texts, keys and depths that two readers may differ on.

A reader builds a tree of ``Pairs``, lists, texts and numbers (``number`` gives a ``BadNumber``
where a literal has no value that every reader agrees on); ``checked`` turns it into plain
data, or raises ``Refused`` with the place of the first thing that is not allowed.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from affidavit.plan.diagnostics import MalformedPlan, Reason, pointer_to
from affidavit.plan.types import LARGEST_INTEGER

MAX_DEPTH = 32
_SURROGATE = re.compile("[\ud800-\udfff]")

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
                return placed(reason, found)
        return reason


class Refused(Exception):
    """A reason with the path at which it was found; never leaves the readers."""

    def __init__(self, path: Path, code: str, message: str, remedy: str) -> None:
        super().__init__(message)
        self.path = path
        self.reason = Reason(code=code, pointer=pointer_to(*path), message=message, remedy=remedy)


@dataclass(frozen=True, slots=True)
class BadNumber:
    """A numeric literal that has no value, and why."""

    code: str
    message: str


class Pairs(list[tuple[str, Any]]):
    """An object's members in order, before duplicates are looked for."""


EMPTY = Reason(
    code="empty",
    pointer="",
    message="the document is empty.",
    remedy="Give a plan, such as one of examples/.",
)


def decoded(raw: bytes, limit: int, kind: str) -> str:
    """The text of ``raw``; raises ``MalformedPlan`` if it is too long, empty or not UTF-8."""
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
        raise MalformedPlan(EMPTY)
    return text


def number(literal: str, *, integral: bool) -> int | float | BadNumber:
    """The value of a decimal literal, or why it has none that two readers agree on."""
    if integral and len(literal) < 16 and (small := int(literal)):
        return small  # nearly all of them; a hostile text has a hundred thousand
    short = literal if len(literal) <= 40 else literal[:37] + "..."
    if integral:
        digits = literal.lstrip("+-").lstrip("0")
        if len(digits) > 16 or int(digits or "0") > LARGEST_INTEGER:
            return BadNumber("number_out_of_range", f"{short} is beyond 2^53 - 1")
        if literal.startswith("-") and not digits:
            return BadNumber("negative_zero", f"{short} is a negative zero")
        return -int(digits) if literal.startswith("-") else int(digits or "0")
    value = float(literal)
    if math.isinf(value):
        return BadNumber("number_out_of_range", f"{short} is beyond the range of a double")
    if value == 0 and literal.startswith("-"):
        return BadNumber("negative_zero", f"{short} is a negative zero")
    mantissa = re.split("[eE]", literal)[0]
    if abs(value) < sys.float_info.min and mantissa.strip("+-0."):
        return BadNumber("number_out_of_range", f"{short} is below the smallest normal double")
    return value


def checked(node: Any, path: Path) -> Any:
    """``node`` as plain dicts and lists; raises ``Refused`` for what may not be in them."""
    if len(path) > MAX_DEPTH:
        reason = too_deep(path)
        raise Refused(path, reason.code, reason.message, reason.remedy)
    match node:
        case Pairs():
            return _checked_object(node, path)
        case list():
            return [checked(item, (*path, str(index))) for index, item in enumerate(node)]
        case str():
            return _checked_characters(node, path)
        case BadNumber(code=code, message=message):
            raise Refused(path, code, message + ".", "Give a plain decimal number in range.")
        case _:
            return node


def _checked_object(pairs: Pairs, path: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        _checked_characters(key, path)
        if key in found:
            raise Refused(
                (*path, key),
                "duplicate_key",
                f"the key {key!r} is given twice.",
                "Keep one of the two.",
            )
        found[key] = checked(value, (*path, key))
    return found


def _checked_characters(text: str, path: Path) -> str:
    if _SURROGATE.search(text):
        raise Refused(path, "bad_text", "the text has a lone surrogate.", "Use valid Unicode.")
    return text


def too_deep(path: Path) -> Reason:
    """The reason for a document nested deeper than ``MAX_DEPTH``."""
    return Reason(
        code="too_deep",
        pointer=pointer_to(*path[:4]),
        message=f"the document is nested deeper than {MAX_DEPTH} levels.",
        remedy="A plan needs no more than seven.",
    )


def placed(reason: Reason, position: Position) -> Reason:
    """``reason`` with a line and a column."""
    return Reason(
        code=reason.code,
        pointer=reason.pointer,
        message=reason.message,
        remedy=reason.remedy,
        line=position[0],
        column=position[1],
    )
