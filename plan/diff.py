"""The differences between two plans, field by field, each a change that can be made alone.

Plans are compared in their canonical form, defaults filled in, so that what is only written
differently is no difference. A *change* is the least that leads from one plan towards the
other and still says something whole: a field; two fields of which a plan gives one (steps or
epochs); or a part whose kind is another (a bidiagonal noise has no bands to be changed). Lists
of one length are compared item by item, others as a whole; one field that differs in several
items, such as the noise of every block, is one change, because blocks share it.

``apply_changes`` edits the first plan and validates the result like any plan. A change that cannot
be made alone is refused.

>>> from affidavit.plan.parse import plan_from
>>> one = {"version": 1, "adjacency": "add_remove", "sampling": {"scheme": "full_batch"},
...        "steps": 10, "releases": [{"name": "all", "clip_norm": 1, "noise_multiplier": 5}],
...        "target": {"delta": 1e-5}}
>>> first, second = plan_from(one), plan_from({**one, "steps": 20, "notes": "longer"})
>>> [(each.pointer, each.before, each.after) for each in find_changes(first, second)]
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

KIND_OF = {
    "sampling": "scheme",
    "noise": "kind",
    "optimizer": "name",
    "participation": "schema",
    "workload": "kind",
}
"""Parts whose other fields mean something only under one value of this one."""
EITHER = (("steps", "epochs"), ("lot_size", "probability"), ("noise_multiplier", "noise_std"))
"""Fields of which one is given: going from the one to the other is one change."""
WORDS = frozenset({"/name", "/notes"})
"""Where a plan speaks to people; nothing that is proved depends on it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """One change: where it is, what stood there, and what stands there after it.

    ``edits`` are the paths that it sets, or removes where the value is ``ABSENT``. Of a pair
    of fields ``before`` and ``after`` are the one that is given, with its name. A field of
    several items of a list has ``*`` in its pointer, and the value that all of them have, or
    each item's value by its name.
    """

    pointer: str
    before: Any
    after: Any
    edits: tuple[tuple[Path, Any], ...]

    @property
    def is_text_only(self) -> bool:
        """Whether only a name or a note differs, which no guarantee depends on."""
        return self.pointer in WORDS

    def texts(self, longest: int) -> tuple[str | None, str | None]:
        """Both values as text of at most ``longest`` characters; None if absent."""
        return _text(self.before, longest), _text(self.after, longest)


def find_changes(first: Plan, second: Plan) -> tuple[Change, ...]:
    """What leads from ``first`` to ``second``, in the order of the fields' names."""
    documents = _in_one_shape(as_document(first), as_document(second))
    fields: dict[Path, list[Change]] = {}
    for change in _between((), *documents):
        place = change.edits[-1][0]
        field = tuple("*" if isinstance(token, int) else token for token in place)
        fields.setdefault(field, []).append(change)
    return tuple(_together(field, each, documents[0]) for field, each in fields.items())


def apply_changes(plan: Plan, *made: Change) -> Plan:
    """``plan`` after the changes; raises ``MalformedPlan`` where they cannot stand alone."""
    document = copy.deepcopy(as_document(plan))
    edits = [edit for change in made for edit in change.edits]
    if any(path[:1] == ("phases",) for path, _ in edits):
        document = with_phases(document)
    for path, value in edits:
        _set(document, path, value)
    return plan_from(document)


def split_into_steps(first: Plan, second: Plan) -> tuple[tuple[tuple[Change, ...], Plan], ...]:
    """The way from ``first`` to ``second``, some changes after others, each a plan.

    Each step makes the first change that is left and can be made, or the first two that only
    make sense together, or all that are left. The last plan guarantees what ``second`` does.
    """
    left = [change for change in find_changes(first, second) if not change.is_text_only]
    result: list[tuple[tuple[Change, ...], Plan]] = []
    plan = first
    while left:
        made, plan = _step(plan, left)
        left = [change for change in left if change not in made]
        result.append((made, plan))
    return tuple(result)


def _step(plan: Plan, left: Sequence[Change]) -> tuple[tuple[Change, ...], Plan]:
    for made in chain(combinations(left, 1), combinations(left, 2)):
        try:
            return made, apply_changes(plan, *made)
        except MalformedPlan:
            continue
    return tuple(left), apply_changes(plan, *left)


def _together(field: Path, single: Sequence[Change], document: Any) -> Change:
    """One change of a field in one place, or in several items of a list."""
    if len(single) == 1:
        return single[0]
    names = [_name_of(change.edits[-1][0], document) for change in single]
    return Change(
        pointer=pointer_to(*field),
        before=_one_value(names, [change.before for change in single]),
        after=_one_value(names, [change.after for change in single]),
        edits=tuple(edit for change in single for edit in change.edits),
    )


def _one_value(names: Sequence[str], values: Sequence[Any]) -> Any:
    if all(value == values[0] for value in values):
        return values[0]
    return {
        name: None if value is ABSENT else value for name, value in zip(names, values, strict=True)
    }


def _name_of(place: Path, document: Any) -> str:
    """The items of lists that a path leads through, by their names or numbers from 1."""
    names = []
    for token in place:
        document = document.get(token) if isinstance(document, dict) else document[token]
        if isinstance(token, int):
            name = document.get("name") if isinstance(document, dict) else None
            names.append(str(name or token + 1))
    return "/".join(names)


def _text(value: Any, longest: int) -> str | None:
    if value is ABSENT:
        return None
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= longest else f"{text[: longest - 1]}…"


def _in_one_shape(
    first: dict[str, Any], second: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Both with a list of phases where one of them has several."""
    if "phases" in first or "phases" in second:
        return with_phases(first), with_phases(second)
    return first, second


def _between(path: Path, first: Any, second: Any) -> Iterator[Change]:
    if first == second and type(first) is type(second):
        return
    if isinstance(first, dict) and isinstance(second, dict) and _is_one_kind(path, first, second):
        yield from _of_mappings(path, first, second)
    elif (
        isinstance(first, list)
        and isinstance(second, list)
        and len(first) == len(second)
        and all(isinstance(item, dict) for item in (*first, *second))
    ):
        for place, (one, other) in enumerate(zip(first, second, strict=True)):
            yield from _between((*path, place), one, other)
    else:
        yield Change(pointer=pointer_to(*path), before=first, after=second, edits=((path, second),))


def _is_one_kind(path: Path, first: dict[str, Any], second: dict[str, Any]) -> bool:
    kind = KIND_OF.get(str(path[-1])) if path else None
    return kind is None or first.get(kind) == second.get(kind)


def _of_mappings(path: Path, first: dict[str, Any], second: dict[str, Any]) -> Iterator[Change]:
    done: set[str] = set()
    for key in sorted(first.keys() | second.keys()):
        if key in done:
            continue
        pair = next((pair for pair in EITHER if key in pair), ())
        swapped = _swapped(pair, first, second)
        if swapped is not None:
            old, new = swapped
            done.update(pair)
            yield Change(
                pointer=pointer_to(*path, new),
                before={old: first[old]},
                after={new: second[new]},
                edits=(((*path, old), ABSENT), ((*path, new), second[new])),
            )
            continue
        yield from _between((*path, key), first.get(key, ABSENT), second.get(key, ABSENT))


def _swapped(
    pair: tuple[str, ...], first: dict[str, Any], second: dict[str, Any]
) -> tuple[str, str] | None:
    """Which of a pair the first gives and which the second, where that is not the same one."""
    for old, new in (pair, pair[::-1]) if pair else ():
        if old in first and old not in second and new in second and new not in first:
            return old, new
    return None


def _set(document: Any, path: Path, value: Any) -> None:
    *way, last = path
    for token in way:
        document = document[token]
    if value is ABSENT:
        document.pop(last, None)
    else:
        document[last] = copy.deepcopy(value)
