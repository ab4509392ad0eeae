"""Exit codes of the command line; a command that checked nothing never exits with 0."""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum


class Exit(IntEnum):
    """Exit code of a command."""

    CERTIFIED = 0
    BLOCKED = 1
    USAGE = 2
    UNDECIDED = 3
    FAULT = 4
    """Affidavit itself failed, or its output could not be written."""
    INTERRUPTED = 130


OF_VERDICT = {
    "certified": Exit.CERTIFIED,
    "under_noised": Exit.BLOCKED,
    "unproved": Exit.BLOCKED,
    "refused": Exit.BLOCKED,
    "undecided": Exit.UNDECIDED,
}

_SEVERITY = (Exit.USAGE, Exit.BLOCKED, Exit.UNDECIDED, Exit.CERTIFIED)


def worst(exits: Iterable[Exit]) -> Exit:
    """The exit code of several checks: malformed input, then blocked, then undecided."""
    codes = set(exits)
    return next((code for code in _SEVERITY if code in codes), Exit.USAGE)
