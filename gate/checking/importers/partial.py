"""As much of a plan as a foreign document says, and what is given beside it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from affidavit.plan import PHASE_FIELDS, MalformedPlan, Reason, pointer_to


@dataclass(frozen=True, kw_only=True, slots=True)
class Partial:
    """Fields of a plan as a document of ``kind`` has them; ``assumed`` in sentences.

    ``lines`` says where in the file a field came from, by its JSON pointer. ``excluded`` has
    the values that the document rules out for the adjacency or a ``scheme`` of sampling.
    """

    kind: str
    data: dict[str, Any]
    assumed: tuple[str, ...] = ()
    lines: tuple[tuple[str, int], ...] = ()
    excluded: tuple[tuple[str, tuple[str, ...]], ...] = ()

    def completed(self, given: dict[str, Any], name: str) -> dict[str, Any]:
        """The plan's document; raises ``MalformedPlan`` where ``given`` contradicts it."""
        phases = self.data.get("phases")
        shared = {key: value for key, value in given.items() if key not in PHASE_FIELDS}
        if phases is None or "phases" in given:
            whole = _merged(self.data, given, (), name)
        else:
            # What is given for a phase holds for all of them: a sampler has no other rates.
            each = {key: value for key, value in given.items() if key in PHASE_FIELDS}
            whole = _merged(self.data, shared, (), name)
            whole["phases"] = [
                _merged(phase, each, ("phases", index), name) for index, phase in enumerate(phases)
            ]
        for key, values in self.excluded:
            said = next((item for item in _said(whole, key) if item in values), None)
            if said is not None:
                raise _conflict((key,), f"{key} is given as {said}, which {name} rules out.", name)
        return {"version": 1, **whole}


def not_taken(kind: str, message: str, remedy: str) -> MalformedPlan:
    """A document of ``kind`` that cannot be made a plan."""
    return MalformedPlan(
        Reason(code="not_imported", pointer="", message=f"{kind}: {message}", remedy=remedy)
    )


def _merged(
    own: dict[str, Any], given: dict[str, Any], path: tuple[str | int, ...], name: str
) -> dict[str, Any]:
    found = dict(own)
    for key, value in given.items():
        mine = found.get(key)
        if isinstance(mine, dict) and isinstance(value, dict):
            found[key] = _merged(mine, value, (*path, key), name)
        elif mine is None or mine == value:
            found[key] = value
        else:
            message = f"{key} is given as {value}, and {name} says {mine}."
            raise _conflict((*path, key), message, name)
    return found


def _said(part: Any, key: str) -> Iterator[Any]:
    """What is said of ``key`` in a plan's document, at any depth."""
    if isinstance(part, dict):
        for name, value in part.items():
            yield from (value,) if name == key else _said(value, key)
    elif isinstance(part, list):
        for item in part:
            yield from _said(item, key)


def _conflict(path: tuple[str | int, ...], message: str, name: str) -> MalformedPlan:
    return MalformedPlan(
        Reason(
            code="given_conflict",
            pointer=pointer_to(*path),
            message=message,
            remedy=f'Correct [tool.affidavit.given."{name}"] or the file.',
        )
    )
