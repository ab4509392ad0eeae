"""Find the change of a plan that moved ε: apply every changed field to the former plan alone.

The former plan comes from a commit or another file.

::

    /releases/0/noise_multiplier   1.1 -> 0.9    alone: ε ≤ 2.41 (before ≤ 1.71)
"""

from __future__ import annotations

import copy
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from affidavit.accountants import decimal_up
from affidavit.certificate import Assessment, certify
from affidavit.plan import PlanError, plan_from, pointer_to

ABSENT = object()
"""The value of a missing field."""

DIGITS = 6
Tokens = tuple[str | int, ...]
_Field = tuple[Tokens, Any, Any]


@dataclass(frozen=True, slots=True)
class Change:
    """A changed field, and ε of the former plan with only this change."""

    pointer: str
    before: str
    after: str
    alone: str


@dataclass(frozen=True, slots=True)
class Difference:
    """ε before and after as text, and the changes, largest effect first."""

    before: str
    after: str
    changes: tuple[Change, ...]


def difference(before: Any, after: Any) -> Difference:
    """Compare two plan documents, which may be invalid."""
    former = _assessed(before)
    single: list[_Field] = []
    together: list[_Field] = []
    for change in _changes(before, after):
        # Changes that are invalid alone, like epochs becoming steps, are grouped.
        valid = not isinstance(_assessed(_with(before, change)), str)
        (single if valid else together).append(change)
    groups = [[change] for change in single] + ([together] if together else [])
    results = [(_assessed(_with(before, *group)), group) for group in groups]
    results.sort(key=lambda result: -_moved(former, result[0]))
    changes = tuple(_change(alone, group) for alone, group in results)
    return Difference(_epsilon(former), _epsilon(_assessed(after)), changes)


def _change(alone: Assessment | str, group: list[_Field]) -> Change:
    return Change(
        pointer=", ".join(pointer_to(*tokens) or "/" for tokens, _, _ in group),
        before=", ".join(_text(old) for _, old, _ in group),
        after=", ".join(_text(new) for _, _, new in group),
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
    """Whether two values are equal in a plan: 1 equals 1.0 but not true."""
    return bool(before == after) and isinstance(before, bool) == isinstance(after, bool)


def _with(document: Any, *changes: _Field) -> Any:
    changed = copy.deepcopy(document)
    for tokens, _, value in changes:
        if not tokens:
            return value
        parent = changed
        for token in tokens[:-1]:
            parent = parent[token]
        if value is ABSENT:
            del parent[tokens[-1]]
        else:
            parent[tokens[-1]] = value
    return changed


def _assessed(document: Any) -> Assessment | str:
    try:
        return certify(plan_from(document), second_opinion=False)
    except PlanError as error:
        return f"not a valid plan ({error.reasons[0].code})"


def _epsilon(assessment: Assessment | str) -> str:
    if isinstance(assessment, str):
        return assessment
    if assessment.epsilon is None:
        return f"refused ({assessment.reasons[0].code})" if assessment.reasons else "refused"
    return f"ε ≤ {decimal_up(assessment.epsilon.upper, DIGITS)}"


def _moved(former: Assessment | str, alone: Assessment | str) -> float:
    """How far ε moved; infinitely far if one side has no ε."""
    numbers = [
        None if isinstance(result, str) or result.epsilon is None else result.epsilon.upper
        for result in (former, alone)
    ]
    if numbers[0] is None or numbers[1] is None:
        return float("inf") if numbers[0] != numbers[1] else 0.0
    return abs(numbers[1] - numbers[0])


def _text(value: Any) -> str:
    return "nothing" if value is ABSENT else str(value)


class NoBase(Exception):
    """The base cannot be read; the message says why."""


def read_base(file: str, base: str) -> bytes | None:
    """The bytes of ``file`` at ``base``; None if it did not exist. Raises ``NoBase``."""
    if Path(base).is_file():
        return Path(base).read_bytes()
    if base.startswith("-"):
        raise NoBase(f"{base} is neither a file nor a commit")
    folder = Path(file).resolve().parent
    commit = _git(
        folder, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{base}^{{commit}}"
    )
    if commit.returncode != 0:
        raise NoBase(f"{base} is neither a file nor a commit of the repository of {file}")
    name = f"{commit.stdout.decode().strip()}:./{Path(file).name}"
    content = _git(folder, "show", "--end-of-options", name)
    return content.stdout if content.returncode == 0 else None


def _git(folder: Path, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    try:
        return subprocess.run(["git", *arguments], cwd=folder, capture_output=True, check=False)
    except OSError as error:
        raise NoBase(f"cannot run git: {error.strerror}") from None
