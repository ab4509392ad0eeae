"""The differences between two plans, as changes that can be made one by one.

Plans are compared in canonical form with defaults filled in, so formatting is no difference. A
*change* is the smallest meaningful step from one plan to the other: one field; two fields of which
a plan gives one (steps or epochs); or a whole part whose kind differs (a bidiagonal noise has no
bands to change). Lists of equal length are compared item by item, others as a whole. A field that
differs in several items, such as the noise of every block, is one change.

``apply_changes`` edits the first plan and validates the result like any plan. A change that cannot
be made alone is refused.

>>> from affidavit.plan.parse import plan_from
>>> one = {"version": 1, "adjacency": "add_remove", "sampling": {"scheme": "full_batch"},
...        "steps": 10, "releases": [{"name": "all", "clip_norm": 1, "noise_multiplier": 5}],
...        "target": {"delta": 1e-5}}
>>> first, second = plan_from(one), plan_from({**one, "steps": 20, "notes": "longer"})
>>> [(change.pointer, change.before, change.after) for change in find_changes(first, second)]
[('/notes', ABSENT, 'longer'), ('/steps', 10, 20)]
>>> apply_changes(first, find_changes(first, second)[1]).phases[0].steps
20
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import chain, combinations
from typing import Any, Final

from affidavit.plan.diagnostics import MalformedPlan, pointer_to
from affidavit.plan.document import with_phases
from affidavit.plan.parse import Plan, plan_from
from affidavit.plan.serialization import as_document

Path = tuple[str | int, ...]


class Absent(Enum):
    """The value of a field that is missing."""

    ABSENT = "absent"

    def __repr__(self) -> str:
        return "ABSENT"


ABSENT: Final = Absent.ABSENT

KIND_FIELDS = {
    "sampling": "scheme",
    "noise": "kind",
    "optimizer": "name",
    "participation": "schema",
    "workload": "kind",
}
"""For each part, the field whose value decides the meaning of its other fields."""
ALTERNATIVES = (("steps", "epochs"), ("lot_size", "probability"), ("noise_multiplier", "noise_std"))
"""Pairs of fields of which a plan gives one; replacing one by the other is one change."""
TEXT_POINTERS = frozenset({"/name", "/notes"})
"""Text for readers, which no guarantee depends on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """One change, with the values before and after it.

    ``edits`` are the paths that it sets, or removes if the value is ``ABSENT``. For a pair of
    alternative fields, ``before`` and ``after`` map the name of the given field to its value. A
    field of several list items has ``*`` in its pointer, and one common value or the values by
    item name.
    """

    pointer: str
    before: Any
    after: Any
    edits: tuple[tuple[Path, Any], ...]

    @property
    def is_text_only(self) -> bool:
        """Whether only a name or note differs, which no guarantee depends on."""
        return self.pointer in TEXT_POINTERS

    def texts(self, max_length: int) -> tuple[str | None, str | None]:
        """Return both values as text of at most ``max_length`` characters; None if absent."""
        return _text(self.before, max_length), _text(self.after, max_length)


def find_changes(first: Plan, second: Plan) -> tuple[Change, ...]:
    """Return the changes from ``first`` to ``second``, ordered by field name."""
    documents = _align_phases(as_document(first), as_document(second))
    fields: dict[Path, list[Change]] = {}
    for change in _compare((), *documents):
        place = change.edits[-1][0]
        field = tuple("*" if isinstance(token, int) else token for token in place)
        fields.setdefault(field, []).append(change)
    return tuple(_merge(field, changes, documents[0]) for field, changes in fields.items())


def apply_changes(plan: Plan, *changes: Change) -> Plan:
    """Return ``plan`` with the changes; raises ``MalformedPlan`` if they contradict the rest."""
    document = copy.deepcopy(as_document(plan))
    edits = [edit for change in changes for edit in change.edits]
    if any(path[:1] == ("phases",) for path, _ in edits):
        document = with_phases(document)
    for path, value in edits:
        _set(document, path, value)
    return plan_from(document)


def split_into_steps(first: Plan, second: Plan) -> tuple[tuple[tuple[Change, ...], Plan], ...]:
    """Return steps from ``first`` to ``second``, each with its changes and the resulting plan.

    Each step makes the first remaining change that is valid by itself, or the first two that are
    valid together, or all remaining ones. The last plan has the guarantee of ``second``.
    """
    remaining = [change for change in find_changes(first, second) if not change.is_text_only]
    result: list[tuple[tuple[Change, ...], Plan]] = []
    plan = first
    while remaining:
        made, plan = _next_step(plan, remaining)
        remaining = [change for change in remaining if change not in made]
        result.append((made, plan))
    return tuple(result)


def _next_step(plan: Plan, remaining: Sequence[Change]) -> tuple[tuple[Change, ...], Plan]:
    for made in chain(combinations(remaining, 1), combinations(remaining, 2)):
        try:
            return made, apply_changes(plan, *made)
        except MalformedPlan:
            continue
    return tuple(remaining), apply_changes(plan, *remaining)


def _merge(field: Path, changes: Sequence[Change], document: Any) -> Change:
    """Return one change for a field that changes in one place, or in several list items."""
    if len(changes) == 1:
        return changes[0]
    names = [_item_name(change.edits[-1][0], document) for change in changes]
    return Change(
        pointer=pointer_to(*field),
        before=_common_value(names, [change.before for change in changes]),
        after=_common_value(names, [change.after for change in changes]),
        edits=tuple(edit for change in changes for edit in change.edits),
    )


def _common_value(names: Sequence[str], values: Sequence[Any]) -> Any:
    if all(value == values[0] for value in values):
        return values[0]
    return {
        name: None if value is ABSENT else value for name, value in zip(names, values, strict=True)
    }


def _item_name(place: Path, document: Any) -> str:
    """Return the names, or numbers from 1, of the list items on a path."""
    names = []
    for token in place:
        document = document.get(token) if isinstance(document, dict) else document[token]
        if isinstance(token, int):
            name = document.get("name") if isinstance(document, dict) else None
            names.append(str(name or token + 1))
    return "/".join(names)


def _text(value: Any, max_length: int) -> str | None:
    if value is ABSENT:
        return None
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    if isinstance(value, float):
        text = text.replace("e-0", "e-")  # as all numbers that are shown
    return text if len(text) <= max_length else f"{text[: max_length - 1]}…"


def _align_phases(
    first: dict[str, Any], second: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return both documents with a list of phases if either has several phases."""
    if "phases" in first or "phases" in second:
        return with_phases(first), with_phases(second)
    return first, second


def _compare(path: Path, first: Any, second: Any) -> Iterator[Change]:
    if first == second and type(first) is type(second):
        return
    if isinstance(first, dict) and isinstance(second, dict) and _has_same_kind(path, first, second):
        yield from _compare_mappings(path, first, second)
    elif (
        isinstance(first, list)
        and isinstance(second, list)
        and len(first) == len(second)
        and all(isinstance(item, dict) for item in (*first, *second))
    ):
        for place, (one, other) in enumerate(zip(first, second, strict=True)):
            yield from _compare((*path, place), one, other)
    else:
        yield Change(pointer=pointer_to(*path), before=first, after=second, edits=((path, second),))


def _has_same_kind(path: Path, first: dict[str, Any], second: dict[str, Any]) -> bool:
    kind = KIND_FIELDS.get(str(path[-1])) if path else None
    return kind is None or first.get(kind) == second.get(kind)


def _compare_mappings(
    path: Path, first: dict[str, Any], second: dict[str, Any]
) -> Iterator[Change]:
    done: set[str] = set()
    for key in sorted(first.keys() | second.keys()):
        if key in done:
            continue
        pair = next((pair for pair in ALTERNATIVES if key in pair), ())
        replaced = _replaced_alternative(pair, first, second)
        if replaced is not None:
            old, new = replaced
            done.update(pair)
            yield Change(
                pointer=pointer_to(*path, new),
                before={old: first[old]},
                after={new: second[new]},
                edits=(((*path, old), ABSENT), ((*path, new), second[new])),
            )
            continue
        yield from _compare((*path, key), first.get(key, ABSENT), second.get(key, ABSENT))


def _replaced_alternative(
    pair: tuple[str, ...], first: dict[str, Any], second: dict[str, Any]
) -> tuple[str, str] | None:
    """Return the fields of a pair that the first and the second give, if they differ."""
    for old, new in (pair, pair[::-1]) if pair else ():
        if old in first and old not in second and new in second and new not in first:
            return old, new
    return None


def _set(document: Any, path: Path, value: Any) -> None:
    *parents, last = path
    for token in parents:
        document = document[token]
    if value is ABSENT:
        document.pop(last, None)
    else:
        document[last] = copy.deepcopy(value)
