"""Text of others, made safe to print on a terminal."""

from __future__ import annotations

import json
from typing import Any

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


def printable_json(document: Any, indent: int | None = None) -> str:
    """Return ``document`` as JSON with a line break, in which no text controls a terminal.

    Other characters than ASCII are as they are. Raises ``ValueError`` for NaN and infinities.

    >>> print(printable_json(["\\x9b2J ε \\u202e"]), end="")
    ["\\u009b2J ε \\u202e"]
    """
    text = json.dumps(document, ensure_ascii=False, allow_nan=False, indent=indent)
    return "".join(c if c.isprintable() or c == "\n" else json.dumps(c)[1:-1] for c in text) + "\n"
