"""How every command speaks, reads its plan, writes its files and stops.

What a command found goes to standard output, what went wrong to standard error. With
``--json`` a plan that cannot be read still yields a result document, so that a program
that reads standard output finds the reasons there.
"""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

import typer
from rich.console import Console
from rich.markup import escape

from affidavit.accountants import NAMES
from affidavit.certificate import malformed_result, write_atomically
from affidavit.gate.exits import Exit
from affidavit.gate.files import Output, print_json
from affidavit.gate.reading import PlanFile, read_plan
from affidavit.gate.report import finding
from affidavit.plan import MalformedPlan, Reason

out = Output(soft_wrap=True)
err = Console(stderr=True, soft_wrap=True)


def read(name: str, *, as_json: bool) -> PlanFile:
    """The plan in ``name``; a malformed one is told of and ends the command."""
    try:
        return read_plan(name)
    except MalformedPlan as error:
        refuse(name, error.reasons, Exit.USAGE, as_json=as_json)


def write(path: Path, content: bytes, *, mode: int = 0o644) -> None:
    """Write ``path`` whole with ``mode``, or say why that cannot be done and end the command."""
    try:
        write_atomically(path, content, mode=mode)
    except OSError as error:
        stop(f"{path} cannot be written: {error.strerror}.")


def print_findings(name: str, reasons: tuple[Reason, ...]) -> None:
    """One line a reason, with the place in ``name`` that it speaks of."""
    for reason in reasons:
        err.print(escape(finding(name, reason)), highlight=False)


def refuse(name: str, reasons: tuple[Reason, ...], code: Exit, *, as_json: bool) -> NoReturn:
    """Tell of ``reasons`` and end the command with ``code``."""
    if as_json:
        print_json(malformed_result(reasons))
    else:
        print_findings(name, reasons)
    raise typer.Exit(code)


def require_engine(name: str | None) -> None:
    """End the command unless ``name`` is an accountant, or none was chosen."""
    if name is not None and name not in NAMES:
        stop(f"--engine {name} is not known; choose one of {', '.join(NAMES)}.")


def stop(message: str) -> NoReturn:
    """Say what is wrong with how the command was given, and end it."""
    err.print(f"[red]error[/] {escape(message)}", highlight=False)
    raise typer.Exit(Exit.USAGE)
