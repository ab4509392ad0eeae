"""Text of others, made safe to print on a terminal."""

from __future__ import annotations

MAX_PRINTABLE_CHARACTERS = 2000


def printable(name: str) -> str:
    """Return ``name`` on one line: control characters and invalid bytes are escaped.

    A long name is shortened in the middle.

    >>> printable("a\\nb\\udcff")
    'a\\\\nb\\\\udcff'
    """
    half = MAX_PRINTABLE_CHARACTERS // 2
    shown = name if len(name) <= 2 * half else f"{name[:half]}...{name[-half:]}"
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode("ascii")
        for char in shown
    )
