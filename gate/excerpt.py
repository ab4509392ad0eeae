"""The line of a file that a diagnostic is about, with carets below, in the form of rustc.

>>> print(*framed("rate: {q: 1}  # of a lot", 3, 1, "unknown_field"), sep="\\n")
  |
3 | rate: {q: 1}  # of a lot
  | ^^^^
>>> print(*framed("steps: ten  # soon", 14, 1, "wrong_type"), sep="\\n")
   |
14 | steps: ten  # soon
   | ^^^^^^^^^^
"""

from __future__ import annotations

import re
from pathlib import Path

from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape

LARGEST = 1 << 20
"""Bytes of a file that is read again for an excerpt."""
WIDEST = 100
"""Characters of a line that are shown."""
LACKING = ("missing_field", "incomplete")
"""Codes of what stands nowhere."""
NAMES = ("unknown_field", "conflict")
"""Codes that are about a field's name alone."""
_NAME = re.compile(r'"(?:[^"\\]|\\.)*"|[\w.-]+')
_END = re.compile(r"\s+#.*|[\s,{\[]+$")


def print_excerpt(
    console: Console, file: str, line: int | None, column: int | None, code: str
) -> None:
    """Print the lines that show the place; nothing where it is not in a text file."""
    for shown in _excerpt(file, line, column, code):
        console.print(escape(shown), style="dim")


def _excerpt(file: str, line: int | None, column: int | None, code: str) -> list[str]:
    path = Path(file)
    if line is None or code in LACKING or path.suffix == ".ipynb":
        return []
    try:
        if not path.is_file() or path.stat().st_size > LARGEST:
            return []
        lines = path.read_text("utf-8", "replace").split("\n")
    except (OSError, ValueError):
        return []
    return framed(lines[line - 1], line, column or 1, code) if 0 < line <= len(lines) else []


def framed(text: str, line: int, column: int, code: str) -> list[str]:
    """``text``, which is ``line`` of its file, with carets from ``column`` on."""
    text = "".join(char if char.isprintable() else " " for char in text).rstrip()
    start = min(column - 1, len(text))
    start += len(text[start:]) - len(text[start:].lstrip())
    name = _NAME.match(text, start) if code in NAMES else None
    end = len(_END.sub("", text)) if name is None else name.end()
    first = 0 if end <= WIDEST else max(0, start - WIDEST // 4)
    shown = text[first : first + WIDEST]
    carets = max(1, cell_len(text[start : min(end, first + WIDEST)]))
    margin = " " * len(str(line))
    return [
        f"{margin} |",
        f"{line} | {shown}".rstrip(),
        f"{margin} | {' ' * cell_len(text[first:start])}{'^' * carets}",
    ]
