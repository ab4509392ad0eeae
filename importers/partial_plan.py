"""Partial plans from other libraries' documents, and the validation of their fields.

An imported document is a record of a run: a missing, null, misspelt or ill-typed field is refused
by name, and never becomes an unknown for the plan to solve.
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
    """An obligation that the document's library is known not to fulfil.

    ``adjacencies`` and ``schemes`` are those under which it matters; None stands for all. A plan
    to which it applies is not certified.
    """

    code: str
    message: str
    remedy: str
    adjacencies: tuple[str, ...] | None = None
    schemes: tuple[str, ...] | None = None

    def applies(self, adjacency: str, schemes: Collection[str]) -> bool:
        """Whether it matters under this adjacency, where lots are drawn by ``schemes``."""
        return (self.adjacencies is None or adjacency in self.adjacencies) and (
            self.schemes is None or not set(self.schemes).isdisjoint(schemes)
        )


FOREIGN_LINE_OFFSET = 1 << 40
"""More than the lines of any file."""
SourceSpan = tuple[int, int, int, int]
"""First line and column, last line and column; lines count from 1, columns are bytes from 0."""
NoiseCalibration = Callable[..., float]
"""The noise that a library's own calibration gives, from the keywords of ``opacus_noise_multiplier``."""


@dataclass(frozen=True, slots=True)
class MinimumLength:
    """The epochs that a script makes at least, and the ``whole`` passes that nothing cuts short.

    Fewer epochs, or fewer steps than those passes have, are not given to it.
    """

    epochs: float
    line: int
    why: str
    whole_passes: int = 0

    def require(self, plan: dict[str, Any], name: str) -> None:
        """Raise ``MalformedPlan`` where the ``plan`` of the document ``name`` has fewer."""
        epochs: Any = plan.get("epochs")
        if is_number(epochs) and epochs < self.epochs:
            message = f"epochs is given as {epochs:g}, but {self.why}."
            raise _conflict(("epochs",), message, name, self.line)
        steps: Any = plan.get("steps")
        fewest = self.whole_passes * _lots_per_pass(plan)
        if is_number(steps) and steps < fewest:
            message = f"steps is given as {steps:g}, but the script makes at least {fewest}."
            raise _conflict(("steps",), message, name, self.line)


class ForeignLine(int):
    """A line of another ``file`` that a script is read with: after the script's own, by files.

    It is told with its file. What is reported of it stands at ``own``, a line of the script.
    """

    file: str
    own: int

    def __new__(cls, number: int, file: str, place: int, own: int) -> ForeignLine:
        """The line of this number in the file at this place among those read."""
        line = super().__new__(cls, number + FOREIGN_LINE_OFFSET * (1 + place))
        line.file, line.own = file, own
        return line

    def __format__(self, _: str) -> str:
        """The number and the file."""
        return f"{self % FOREIGN_LINE_OFFSET} of {self.file}"

    def __str__(self) -> str:
        """The number and the file."""
        return format(self)


def line_in_script(line: int) -> int:
    """The line of the script itself at which one is reported."""
    return line.own if isinstance(line, ForeignLine) else line


def unchanged(plan: dict[str, Any], _: NoiseCalibration | None) -> dict[str, Any]:
    """A plan that needs no finish."""
    return plan


@dataclass(frozen=True, kw_only=True, slots=True)
class PartialPlan:
    """Plan fields of a document of ``kind``; ``assumed`` lists its assumptions as sentences.

    ``lines`` maps JSON pointers to lines of the file, and ``literals`` to the place of a number.
    ``excluded`` has the values that the document rules out for the adjacency or the sampling
    ``scheme``. ``unread`` says, by JSON pointer, which expression could not be read. ``finish``
    completes the merged plan. ``least`` bounds the epochs that may be given.
    """

    kind: str
    data: dict[str, Any]
    assumed: tuple[str, ...] = ()
    lines: tuple[tuple[str, int], ...] = ()
    literals: tuple[tuple[str, SourceSpan], ...] = ()
    excluded: tuple[tuple[str, tuple[str, ...]], ...] = ()
    broken: tuple[BrokenObligation, ...] = ()
    unread: tuple[tuple[str, str], ...] = ()
    least: MinimumLength | None = None
    finish: Callable[[dict[str, Any], NoiseCalibration | None], dict[str, Any]] = unchanged

    def completed(
        self, given: dict[str, Any], name: str, calibrate: NoiseCalibration | None = None
    ) -> dict[str, Any]:
        """The complete plan document; raises ``MalformedPlan`` if ``given`` contradicts it.

        ``calibrate`` computes noise that a library solves for while its script runs.
        """
        phases = self.data.get("phases")
        shared = {key: value for key, value in given.items() if key not in PHASE_FIELDS}
        if phases is None or "phases" in given:
            whole = _merge(self.data, given, (), name)
        else:
            # Given phase fields apply to all phases: a sampler has only one rate.
            for_phases = {key: value for key, value in given.items() if key in PHASE_FIELDS}
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
        if self.least is not None:
            self.least.require(whole, name)
        return {"version": 1, **self.finish(whole, calibrate)}


def malformed_plan(
    code: str, message: str, remedy: str, line: int | None = None, pointer: str = ""
) -> MalformedPlan:
    """The error about a line of a document, or about all of it."""
    column = None if line is None else 1
    line = None if line is None else line_in_script(line)
    return MalformedPlan(
        Reason(code=code, pointer=pointer, message=message, remedy=remedy, line=line, column=column)
    )


def not_imported(kind: str, message: str, remedy: str, line: int | None = None) -> MalformedPlan:
    """The error for a document of ``kind`` that cannot be imported."""
    return malformed_plan("not_imported", f"{kind}: {message}", remedy, line)


def _merge(
    own: dict[str, Any], given: dict[str, Any], path: tuple[str | int, ...], name: str
) -> dict[str, Any]:
    merged = dict(own)
    for key, value in given.items():
        mine = merged.get(key)
        if isinstance(mine, dict) and isinstance(value, dict):
            merged[key] = _merge(mine, value, (*path, key), name)
        elif mine is None or mine == value:
            merged[key] = value
        else:
            message = f"{key} is given as {value}, but {name} has {mine}."
            raise _conflict((*path, key), message, name)
    return merged


def _lots_per_pass(plan: dict[str, Any]) -> int:
    """The lots of one pass over the records, rounded down; 0 if the plan does not tell."""
    size: Any = next(_values_of_key(plan, "size"), None)
    rate: Any = next(_values_of_key(plan, "probability"), None)
    lot: Any = next(_values_of_key(plan, "lot_size"), None)
    if is_number(rate) and 1e-15 < rate <= 1:
        return int(1 / rate * (1 - 1e-9))
    if isinstance(size, int) and isinstance(lot, int) and 0 < lot <= size:
        return size // lot
    return 0


def _values_of_key(part: Any, key: str) -> Iterator[Any]:
    """The values of ``key`` in a plan document, at any depth."""
    if isinstance(part, dict):
        for name, value in part.items():
            yield from (value,) if name == key else _values_of_key(value, key)
    elif isinstance(part, list):
        for element in part:
            yield from _values_of_key(element, key)


def _conflict(
    path: tuple[str | int, ...], message: str, name: str, line: int | None = None
) -> MalformedPlan:
    remedy = f'Correct [tool.affidavit.given."{name}"] or the file.'
    return malformed_plan("given_conflict", message, remedy, line, pointer_to(*path))


def require_known_fields(kind: str, document: dict[str, Any], known: Collection[str]) -> None:
    """Refuse unknown fields; raises ``MalformedPlan``."""
    other = next((field for field in document if field not in known), None)
    if other is not None:
        raise not_imported(
            kind, f"{other[:80]} is an unknown field.", "Correct its name, or remove it."
        )


def is_number(value: Any) -> bool:
    """Whether this is a number in the range of a double; booleans are not."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return -sys.float_info.max <= value <= sys.float_info.max


def require_positive(kind: str, field: str, value: Any) -> float:
    """A positive number; raises ``MalformedPlan``."""
    if not is_number(value) or value <= 0:
        raise _wrong_field(kind, field, value, "a positive number")
    return float(value)


def require_probability(kind: str, field: str, value: Any) -> float:
    """A number above 0 and at most 1; raises ``MalformedPlan``."""
    if not is_number(value) or not 0 < value <= 1:
        raise _wrong_field(kind, field, value, "a number above 0 and at most 1")
    return float(value)


def require_positive_integer(kind: str, field: str, value: Any, most: int = MAX_INTEGER) -> int:
    """A positive whole number up to ``most``; raises ``MalformedPlan``."""
    if not is_number(value) or not 0 < value <= most or value != int(value):
        raise _wrong_field(kind, field, value, "a positive whole number in range")
    return int(value)


def _wrong_field(kind: str, field: str, value: Any, expected: str) -> MalformedPlan:
    state = "is missing" if value is None else f"is not {expected}"
    return not_imported(kind, f"{field} {state}.", "Give the value that was used.")
