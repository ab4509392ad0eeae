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


_OF_VERDICT = {
    "certified": Exit.CERTIFIED,
    "under_noised": Exit.BLOCKED,
    "unproved": Exit.BLOCKED,
    "refused": Exit.BLOCKED,
    "undecided": Exit.UNDECIDED,
}


def exit_of_verdict(verdict: str, codes: Iterable[str] = ()) -> Exit:
    """Return the exit code of a verdict and the codes of its reasons.

    A plan that is unproved because of its claim alone is undecided, not blocked.

    >>> [exit_of_verdict("unproved", [code]).name for code in ("unproved", "claim_not_decided")]
    ['BLOCKED', 'UNDECIDED']
    """
    if verdict == "unproved" and set(codes) == {"claim_not_decided"}:
        return Exit.UNDECIDED
    return _OF_VERDICT[verdict]


_WORST_FIRST = (Exit.USAGE, Exit.BLOCKED, Exit.UNDECIDED, Exit.CERTIFIED)


def worst(exits: Iterable[Exit]) -> Exit:
    """Return the worst exit code: malformed input, then blocked, then undecided."""
    codes = set(exits)
    return next((code for code in _WORST_FIRST if code in codes), Exit.USAGE)
