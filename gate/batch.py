"""``affidavit batch``: a result a line for a plan a line."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, BinaryIO

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from affidavit.gate.answering import answers
from affidavit.gate.console import err, require_engine, stop
from affidavit.gate.exits import Exit, worst
from affidavit.gate.files import print_json
from affidavit.gate.options import EngineOption
from affidavit.gate.reading import lines_as_they_come


def batch(
    plans: Annotated[str, typer.Argument(help="One JSON plan a line; - reads stdin.")],
    engine: EngineOption = None,
    jobs: Annotated[int, typer.Option("--jobs", min=1, help="Processes to use.")] = os.cpu_count()
    or 1,
    second_opinion: Annotated[
        bool, typer.Option("--second-opinion", help="Ask a second engine about each plan.")
    ] = False,
) -> None:
    """One result a line, in the order of the plans; a bad line stops nothing."""
    require_engine(engine)
    exits: set[Exit] = set()
    with _open(plans) as lines, _progress() as progress:
        total = None if plans == "-" else _count_lines(plans)
        task = progress.add_task("plans", total=total)
        found = answers(
            lines_as_they_come(lines),
            jobs=jobs,
            engine=engine,
            second_opinion=second_opinion,
            directory=Path() if plans == "-" else Path(plans).parent,
        )
        for result, code in found:
            print_json(result)
            exits.add(code)
            progress.advance(task)
    if not exits:
        err.print(f"{escape(plans)}: no plan in it, so nothing was checked.")
    raise typer.Exit(worst(exits))


def _open(name: str) -> BinaryIO:
    try:
        return sys.stdin.buffer if name == "-" else Path(name).open("rb")
    except OSError as error:
        stop(f"{name} cannot be read: {error.strerror}.")


def _count_lines(name: str) -> int:
    with Path(name).open("rb") as lines:
        return sum(1 for _ in lines)


def _progress() -> Progress:
    """A bar on the terminal; silent where stderr is not one."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=not sys.stderr.isatty(),
    )
