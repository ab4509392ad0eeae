"""Fields of other libraries' documents, of the kinds that they must have.

What they hold is a record: a field that is missing, null, misspelt or of another type is
refused by its name, and never becomes a question that the plan would have answered.
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from typing import Any

from affidavit.gate.checking.importers.partial import not_taken
from affidavit.plan import LARGEST_INTEGER, MalformedPlan


def only(kind: str, document: dict[str, Any], known: Collection[str]) -> None:
    """Refuse fields that nobody reads; raises ``MalformedPlan``."""
    other = next((field for field in document if field not in known), None)
    if other is not None:
        raise not_taken(
            kind, f"{other[:80]} is not a field that is read.", "Correct its name, or remove it."
        )


def is_number(value: Any) -> bool:
    """Whether this is a number that a double holds; a boolean is none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return -sys.float_info.max <= value <= sys.float_info.max


def positive(kind: str, field: str, value: Any) -> float:
    """A positive number; raises ``MalformedPlan``."""
    if not is_number(value) or value <= 0:
        raise _wrong(kind, field, value, "a positive number")
    return float(value)


def share(kind: str, field: str, value: Any) -> float:
    """A number above 0 and at most 1; raises ``MalformedPlan``."""
    if not is_number(value) or not 0 < value <= 1:
        raise _wrong(kind, field, value, "a number above 0 and at most 1")
    return float(value)


def whole(kind: str, field: str, value: Any, most: int = LARGEST_INTEGER) -> int:
    """A positive whole number up to ``most``; raises ``MalformedPlan``."""
    if not is_number(value) or not 0 < value <= most or value != int(value):
        raise _wrong(kind, field, value, "a positive whole number in range")
    return int(value)


def _wrong(kind: str, field: str, value: Any, wanted: str) -> MalformedPlan:
    state = "is missing" if value is None else f"is not {wanted}"
    return not_taken(kind, f"{field} {state}.", "Write what was run.")
