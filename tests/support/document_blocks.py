"""What the tests of the documents read pages with: their fenced blocks, and what commands print.

A block that is not run, and why, is said in a comment in the line above its fence, which
readers of the page do not see: ``<!-- excerpt: needs a service -->``.
"""

from __future__ import annotations

import re
import runpy
import shlex
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import cache
from io import StringIO
from pathlib import Path
from unittest.mock import patch

from typer.testing import CliRunner

from affidavit.gate import app

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
FENCE = re.compile(
    r"(?:^<!-- excerpt: (?P<excerpt>[^>]+) -->\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)


@dataclass(frozen=True, kw_only=True)
class Block:
    """One fenced block; ``excerpt`` is why it is not run, and empty where it is."""

    language: str
    text: str
    excerpt: str
    line: int


def blocks(page: Path) -> list[Block]:
    """Every fenced block of a page, in order."""
    text = page.read_text(encoding="utf-8")
    return [
        Block(
            language=result["language"],
            text=result["text"],
            excerpt=result["excerpt"] or "",
            line=text.count("\n", 0, result.start()) + 1,
        )
        for result in FENCE.finditer(text)
    ]


@dataclass(frozen=True, kw_only=True)
class Ran:
    """What a line of a page did: its output, and whether it ended as the line says it would."""

    line: str
    output: str
    as_told: bool


def commands(text: str) -> Iterator[str]:
    """The lines of a shell block that do something."""
    yield from (line for line in text.splitlines() if line.strip() and line[0] != "#")


@cache
def run(line: str) -> Ran:
    """``perform``, once for each line: for commands that leave nothing behind."""
    return perform(line)


def perform(line: str) -> Ran:
    """Run ``affidavit ...``, ``python FILE`` or ``python -m MODULE`` here, in the current folder.

    ``... || echo`` says that the command is meant to be blocked: an exit code of 1 or more.
    """
    command, _, otherwise = line.partition(" || ")
    program, *words = shlex.split(command.removeprefix(".venv/bin/"), comments=True)
    if program == "python":
        printed = StringIO()
        with redirect_stdout(printed), patch("sys.argv", words):
            if words[0] == "-m":
                sys.modules.pop(words[1], None)  # a test may have imported it
                runpy.run_module(words[1], run_name="__main__")
            else:
                runpy.run_path(words[0], run_name="__main__")
        return Ran(line=line, output=printed.getvalue(), as_told=not otherwise)
    assert program == "affidavit", line
    result = CliRunner().invoke(app, words)
    return Ran(line=line, output=result.output, as_told=(result.exit_code != 0) == bool(otherwise))
