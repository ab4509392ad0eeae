"""Partial plans from other libraries' documents, and validators for their fields.

An imported document records a run. A missing, null, misspelt or ill-typed field is refused by
name, and never becomes an unknown for the plan to solve.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

from affidavit.plan import (
    MAX_INTEGER,
    PHASE_FIELDS,
    MalformedPlan,
    Reason,
    StrictModel,
    pointer_to,
)


class BrokenObligation(StrictModel):
    """An obligation that the library or script is known not to fulfil.

    It only applies under these ``adjacencies`` and ``schemes``; None stands for all. A plan that
    it applies to is not certified. ``line`` is that of the fault, None for the private call's.
    """

    code: str
    message: str
    remedy: str
    adjacencies: tuple[str, ...] | None = None
    schemes: tuple[str, ...] | None = None
    line: int | None = None

    def applies(self, adjacency: str | None, schemes: Collection[str]) -> bool:
        """Whether it applies to a plan with this adjacency and these sampling schemes."""
        return (self.adjacencies is None or adjacency in self.adjacencies) and (
            self.schemes is None or not set(self.schemes).isdisjoint(schemes)
        )

    def reason(self) -> Reason:
        """Return why a plan that it applies to is not certified."""
        column = None if self.line is None else 1
        return Reason(
            code=self.code, message=self.message, remedy=self.remedy, line=self.line, column=column
        )


class OpenUse(StrictModel):
    """A use of a private object that is not known to be harmless, at a line of the script."""

    line: int
    message: str


SourceSpan = tuple[int, int, int, int]
"""First line and column, last line and column. Lines count from 1, columns are bytes from 0."""
NoiseCalibration = Callable[..., float]
"""Compute a library's own calibrated noise, by keywords of ``opacus_noise_multiplier``."""


def unchanged(plan: dict[str, Any], _: NoiseCalibration | None) -> dict[str, Any]:
    """Return a plan that needs no completion."""
    return plan


@dataclass(frozen=True, kw_only=True, slots=True)
class PartialPlan:
    """Plan fields of a document of ``kind``, with its assumptions.

    - ``assumed``: assumptions, as sentences.
    - ``lines``, ``literals``: line, and position of the number, of each field by JSON pointer.
    - ``excluded``: values that the document rules out for the adjacency or the sampling scheme.
    - ``open_uses``: uses of private objects that must be answered before anything is certified.
    - ``unread``: reasons why expressions could not be read, by JSON pointer.
    - ``finish``: completes the merged plan.
    - ``pointer``, ``others``: its place among the plans of the document, if there are several, and
      the others.
    - ``adds_to``: lines of private calls whose ε adds up with its own for the same records.
    """

    kind: str
    data: dict[str, Any]
    assumed: tuple[str, ...] = ()
    lines: tuple[tuple[str, int], ...] = ()
    literals: tuple[tuple[str, SourceSpan], ...] = ()
    excluded: tuple[tuple[str, tuple[str, ...]], ...] = ()
    broken: tuple[BrokenObligation, ...] = ()
    open_uses: tuple[OpenUse, ...] = ()
    unread: tuple[tuple[str, str], ...] = ()
    finish: Callable[[dict[str, Any], NoiseCalibration | None], dict[str, Any]] = unchanged
    pointer: str = ""
    others: tuple[PartialPlan, ...] = ()
    adds_to: tuple[int, ...] = ()

    def completed(
        self, given_fields: dict[str, Any], name: str, calibrate: NoiseCalibration | None = None
    ) -> dict[str, Any]:
        """Return the complete plan document; raises ``MalformedPlan`` on a contradiction.

        ``given_fields`` come from pyproject.toml. ``calibrate`` computes noise that a library
        calibrates while its script runs.
        """
        phases = self.data.get("phases")
        shared = {key: value for key, value in given_fields.items() if key not in PHASE_FIELDS}
        if phases is None or "phases" in given_fields:
            whole = _merge(self.data, given_fields, (), name)
        else:
            # Given phase fields apply to all phases: a sampler has only one rate.
            for_phases = {key: value for key, value in given_fields.items() if key in PHASE_FIELDS}
            whole = _merge(self.data, shared, (), name)
            whole["phases"] = [
                _merge(phase, for_phases, ("phases", index), name)
                for index, phase in enumerate(phases)
            ]
        for key, values in self.excluded:
            excluded = next(
                (value for value in _values_of_key(whole, key) if value in values), None
            )
            if excluded is not None:
                message = f"{key} is given as {excluded}, which {name} rules out."
                raise _conflict((key,), message, name)
        return {"version": 1, **self.finish(whole, calibrate)}


def malformed_plan(
    code: str, message: str, remedy: str, line: int | None = None, pointer: str = ""
) -> MalformedPlan:
    """Return the error for a line of a document, or for the whole document."""
    column = None if line is None else 1
    return MalformedPlan(
        Reason(code=code, pointer=pointer, message=message, remedy=remedy, line=line, column=column)
    )


def not_imported(kind: str, message: str, remedy: str, line: int | None = None) -> MalformedPlan:
    """Return the error for a document of ``kind`` that cannot be imported."""
    return malformed_plan("not_imported", f"{kind}: {message}", remedy, line)


def _merge(
    own: dict[str, Any], given_fields: dict[str, Any], path: tuple[str | int, ...], name: str
) -> dict[str, Any]:
    merged = dict(own)
    for key, value in given_fields.items():
        own_value = merged.get(key)
        if isinstance(own_value, dict) and isinstance(value, dict):
            merged[key] = _merge(own_value, value, (*path, key), name)
        elif own_value is None or own_value == value:
            merged[key] = value
        else:
            message = f"{key} is given as {value}, but {name} has {own_value}."
            raise _conflict((*path, key), message, name)
    return merged


def _values_of_key(part: Any, key: str) -> Iterator[Any]:
    """Yield the values of ``key`` in a plan document, at any depth."""
    if isinstance(part, dict):
        for name, value in part.items():
            yield from (value,) if name == key else _values_of_key(value, key)
    elif isinstance(part, list):
        for element in part:
            yield from _values_of_key(element, key)


def _conflict(path: tuple[str | int, ...], message: str, name: str) -> MalformedPlan:
    remedy = f'Correct [tool.affidavit.given."{name}"] or the file.'
    return malformed_plan("given_conflict", message, remedy, None, pointer_to(*path))


def require_known_fields(kind: str, document: dict[str, Any], known: Collection[str]) -> None:
    """Refuse unknown fields; raises ``MalformedPlan``."""
    other = next((field for field in document if field not in known), None)
    if other is not None:
        raise not_imported(
            kind, f"{other[:80]} is an unknown field.", "Correct its name, or remove it."
        )


def is_number(value: Any) -> bool:
    """Whether a value is a finite number; booleans are not."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return -sys.float_info.max <= value <= sys.float_info.max


def require_positive(kind: str, field: str, value: Any) -> float:
    """Return a positive number; raises ``MalformedPlan``."""
    if not is_number(value) or value <= 0:
        raise _wrong_field(kind, field, value, "a positive number")
    return float(value)


def require_probability(kind: str, field: str, value: Any) -> float:
    """Return a number above 0 and at most 1; raises ``MalformedPlan``."""
    if not is_number(value) or not 0 < value <= 1:
        raise _wrong_field(kind, field, value, "a number above 0 and at most 1")
    return float(value)


def require_positive_integer(kind: str, field: str, value: Any, most: int = MAX_INTEGER) -> int:
    """Return a positive whole number up to ``most``; raises ``MalformedPlan``."""
    if not is_number(value) or not 0 < value <= most or value != int(value):
        raise _wrong_field(kind, field, value, "a positive whole number in range")
    return int(value)


def _wrong_field(kind: str, field: str, value: Any, expected: str) -> MalformedPlan:
    state = "is missing" if value is None else f"is not {expected}"
    return not_imported(kind, f"{field} {state}.", "Give the value that was used.")
