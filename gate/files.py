"""What leaves the gate: files that are whole or absent, and JSON on standard output."""

from __future__ import annotations

import json
import os
import sys
from typing import Any, NoReturn

from rich.console import Console

from affidavit.gate.exits import Exit


def as_json_file(document: dict[str, Any]) -> bytes:
    """One JSON document as a file that people may look into."""
    return (json.dumps(document, ensure_ascii=False, indent=2) + "\n").encode()


def print_json(document: dict[str, Any]) -> None:
    """One JSON document on one line, at once."""
    try:
        sys.stdout.write(json.dumps(document, ensure_ascii=False, allow_nan=False) + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        end_unread()


class Output(Console):
    """Standard output for people; ends quietly when nobody reads it any more."""

    def on_broken_pipe(self) -> NoReturn:
        """End without a verdict, because there is nobody to tell."""
        end_unread()


def end_unread() -> NoReturn:
    """End without a verdict, because there is nobody to tell; 1 would mean blocked.

    Raises ``SystemExit``.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    raise SystemExit(Exit.UNDECIDED)
