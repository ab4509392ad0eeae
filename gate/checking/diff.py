"""Which single change of a plan moved ε: every changed field, put into the former plan alone.

::

    /releases/0/noise_multiplier   1.1 -> 0.9    alone: ε ≤ 2.41 (before ≤ 1.71)
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from affidavit.accountants import decimal_up
from affidavit.certificate import Assessment, certify
from affidavit.plan import PlanError, plan_from, pointer_to

ABSENT = object()
"""Stands for the value of a field that is not there."""

DIGITS = 6
Tokens = tuple[str | int, ...]
_Field = tuple[Tokens, Any, Any]


@dataclass(frozen=True, slots=True)
class Change:
    """One field that differs, and ε of the former plan with this change alone."""

    pointer: str
    before: str
    after: str
    alone: str


@dataclass(frozen=True, slots=True)
class Difference:
    """ε before and after, in words, and the changes; the one that moved it most comes first."""

    before: str
    after: str
    changes: tuple[Change, ...]


def difference(before: Any, after: Any) -> Difference:
    """From the plan document ``before`` to ``after``; neither need be valid."""
    former = _assessed(before)
    single: list[_Field] = []
    together: list[_Field] = []
    for change in _changes(before, after):
        # What is no plan alone, like epochs that become steps, is taken together.
        whole = not isinstance(_assessed(_with(before, change)), str)
        (single if whole else together).append(change)
    groups = [[item] for item in single] + ([together] if together else [])
    measured = [(_assessed(_with(before, *group)), group) for group in groups]
    measured.sort(key=lambda one: -_moved(former, one[0]))
    changes = tuple(_told(alone, group) for alone, group in measured)
    return Difference(_epsilon(former), _epsilon(_assessed(after)), changes)


def _told(alone: Assessment | str, group: list[_Field]) -> Change:
    return Change(
        pointer=", ".join(pointer_to(*tokens) or "/" for tokens, _, _ in group),
        before=", ".join(_shown(old) for _, old, _ in group),
        after=", ".join(_shown(new) for _, _, new in group),
        alone=_epsilon(alone),
    )


def _changes(before: Any, after: Any, path: Tokens = ()) -> Iterator[_Field]:
    if isinstance(before, dict) and isinstance(after, dict):
        for key in (*before, *(key for key in after if key not in before)):
            yield from _changes(before.get(key, ABSENT), after.get(key, ABSENT), (*path, key))
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for index, (old, new) in enumerate(zip(before, after, strict=True)):
            yield from _changes(old, new, (*path, index))
    elif not _same(before, after):
        yield path, before, after


def _same(before: Any, after: Any) -> bool:
    """Whether two values are one to a plan, in which 1 and 1.0 are one number and true is none."""
    return bool(before == after) and isinstance(before, bool) == isinstance(after, bool)


def _with(document: Any, *changes: _Field) -> Any:
    changed = copy.deepcopy(document)
    for tokens, _, value in changes:
        if not tokens:
            return value
        inside = changed
        for token in tokens[:-1]:
            inside = inside[token]
        if value is ABSENT:
            del inside[tokens[-1]]
        else:
            inside[tokens[-1]] = value
    return changed


def _assessed(document: Any) -> Assessment | str:
    try:
        return certify(plan_from(document), second_opinion=False)
    except PlanError as error:
        return f"is no plan ({error.reasons[0].code})"


def _epsilon(found: Assessment | str) -> str:
    if isinstance(found, str):
        return found
    if found.epsilon is None:
        return f"refused ({found.reasons[0].code})" if found.reasons else "refused"
    return f"ε ≤ {decimal_up(found.epsilon.upper, DIGITS)}"


def _moved(former: Assessment | str, alone: Assessment | str) -> float:
    """How far ε moved; without a number on one side it moved further than any."""
    numbers = [
        None if isinstance(item, str) or item.epsilon is None else item.epsilon.upper
        for item in (former, alone)
    ]
    if numbers[0] is None or numbers[1] is None:
        return float("inf") if numbers[0] != numbers[1] else 0.0
    return abs(numbers[1] - numbers[0])


def _shown(value: Any) -> str:
    return "nothing" if value is ABSENT else str(value)
