"""Exit codes of the command line. A command that checked nothing never exits with 0."""

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

_WORST_FIRST = (Exit.USAGE, Exit.BLOCKED, Exit.UNDECIDED, Exit.CERTIFIED)


def worst(exits: Iterable[Exit]) -> Exit:
    """Return the worst exit code: malformed input, then blocked, then undecided."""
    codes = set(exits)
    return next((code for code in _WORST_FIRST if code in codes), Exit.USAGE)
