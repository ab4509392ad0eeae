"""Exit codes of the command line; nothing checked is never 0."""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum


class Exit(IntEnum):
    """What a process of the gate ended with."""

    CERTIFIED = 0
    BLOCKED = 1
    USAGE = 2
    UNDECIDED = 3


OF_VERDICT = {
    "certified": Exit.CERTIFIED,
    "under_noised": Exit.BLOCKED,
    "refused": Exit.BLOCKED,
    "undecided": Exit.UNDECIDED,
}

_SEVERITY = (Exit.USAGE, Exit.BLOCKED, Exit.UNDECIDED, Exit.CERTIFIED)


def worst(exits: Iterable[Exit]) -> Exit:
    """The exit code of several checks: malformed input, then blocked, then undecided."""
    found = set(exits)
    return next((item for item in _SEVERITY if item in found), Exit.USAGE)
