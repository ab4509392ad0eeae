"""``affidavit batch``: certify one JSON plan per line, and print one result per line.

A pool of processes works a bounded number of lines ahead of the output, so that a sweep of any
length streams. A result is printed as soon as it and all earlier ones are known, even if the next
line has not arrived. A line that is malformed, crashes its process or triggers an internal error
has a result of its own and does not stop the batch.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as Timeout
from contextlib import closing, contextmanager, nullcontext
from io import FileIO
from itertools import chain, islice
from multiprocessing import forkserver
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, TypeVar

import typer
from rich.markup import escape

from affidavit import assessment, mechanisms
from affidavit.gate.console import err, print_json, stop, stop_unwritable
from affidavit.gate.exit_codes import Exit, exit_of_verdict, worst
from affidavit.gate.options import EngineOption, SecondOpinionOption
from affidavit.gate.plan_io import poll_lines
from affidavit.plan import MalformedPlan, Reason
from affidavit.trust import write_all

if TYPE_CHECKING:
    from rich.progress import Progress

TIMEOUT_SECONDS = 120.0
"""Limit for one line."""
LINES_PER_PROCESS = 8
"""Lines in flight."""
CURRENT_FOLDER = Path()
PRELOADED = ["affidavit.gate.batch", "affidavit.assessment.certification"]
"""Modules that processes of the pool share; help and a resumed batch import none of them."""
Result = tuple[dict[str, Any], Exit]
Item = TypeVar("Item")


def batch(
    plans: Annotated[
        str, typer.Argument(help="File with one JSON plan per line; - reads standard input.")
    ],
    engine: EngineOption = None,
    jobs: Annotated[int, typer.Option("--jobs", min=1, help="Number of processes.")] = (
        os.cpu_count() or 1
    ),
    second_opinion: SecondOpinionOption = False,
    output: Annotated[
        Path | None,
        typer.Option(help="File for the results; an interrupted batch resumes at its end."),
    ] = None,
) -> None:
    """Certify one plan per line, in order; a bad line does not stop the batch."""
    exits: set[Exit] = set()
    directory = CURRENT_FOLDER if plans == "-" else Path(plans).parent.resolve()
    options: dict[str, Any] = {"second_opinion": second_opinion, "directory": directory}
    with _open(plans) as stream, _progress() as progress:
        total = _count_lines(plans) if Path(plans).is_file() else None  # a pipe is read once
        task = progress.add_task("plans", total=total)
        file, earlier_exits = (None, []) if output is None else _resume(output)
        exits.update(earlier_exits)
        progress.advance(task, len(earlier_exits))
        if total is not None:  # more processes than plans only take time to start
            jobs = max(1, min(jobs, total - len(earlier_exits)))
        lines = _remaining_lines(plans, stream, len(earlier_exits))
        results = certify_lines(lines, jobs=jobs, engine=engine, **options)
        with nullcontext() if file is None else file:
            try:
                for result, code in results:
                    if file is None:
                        print_json(result)
                    else:
                        _append(file, result)
                    exits.add(code)
                    progress.advance(task)
            except MalformedPlan as error:
                stop(f"{plans}: {error.reasons[0].message}")
    if not exits:
        err.print(f"{escape(plans)}: no plans found, nothing was checked.")
    raise typer.Exit(worst(exits))


def _append(file: FileIO, result: dict[str, Any]) -> None:
    try:
        write_all(file.fileno(), json.dumps(result, ensure_ascii=False).encode() + b"\n")
    except OSError as error:
        stop_unwritable(str(file.name), error)


def _resume(output: Path) -> tuple[FileIO, list[Exit]]:
    """Open ``output`` for appending, and return the exit codes of its complete lines.

    An incomplete last line is removed.
    """
    codes = []
    try:
        if output.is_file():
            with output.open("r+b") as stream:
                codes = _complete_lines(stream)
        return output.open("ab", buffering=0), codes
    except OSError as error:
        stop_unwritable(output, error)


def _complete_lines(stream: BinaryIO) -> list[Exit]:
    codes, length = [], 0
    for line in stream:
        if not line.endswith(b"\n"):
            break
        try:
            result = json.loads(line)
            malformed = result["verdict"] == "refused" and result["plan_digest"] is None
            reasons = [reason["code"] for reason in result["reasons"]]
            code = Exit.USAGE if malformed else exit_of_verdict(result["verdict"], reasons)
            codes.append(code)
        except (ValueError, KeyError, TypeError, RecursionError):
            place = f"{stream.name}, line {len(codes) + 1}"
            stop(f"{place}: not a result of affidavit batch; name another file.")
        length += len(line)
    stream.truncate(length)
    return codes


def _remaining_lines(name: str, stream: BinaryIO, skipped: int) -> Iterator[bytes | None]:
    """Yield the lines of ``stream`` after the first ``skipped``, and None while none arrives."""
    with _reading(name):
        for line in poll_lines(stream):
            if line is not None and skipped > 0:
                skipped -= 1
            else:
                yield line


def certify_line(
    line: bytes, engine: str | None, second_opinion: bool, directory: Path = CURRENT_FOLDER
) -> Result:
    """Certify one line; return its result document and exit code. Never raises."""
    from affidavit.plan import parse_plan

    try:
        plan = parse_plan(line, "json")
        mechanisms.load_noise_files(plan, directory)
        result = assessment.certify(plan, engine=engine, second_opinion=second_opinion)
        return result.as_result(), exit_of_verdict(result.verdict, result.codes)
    except MalformedPlan as error:
        return assessment.malformed_result(error.reasons), Exit.USAGE
    except Exception as error:  # the other lines must still be certified
        return _undecided(
            "internal_error", f"internal error ({error!r}).", "Please report the plan."
        )


def certify_lines(
    lines: Iterable[bytes | None],
    *,
    jobs: int,
    engine: str | None,
    second_opinion: bool,
    directory: Path = CURRENT_FOLDER,
) -> Iterator[Result]:
    """Yield the results of ``lines`` in order; a None among the lines lets ready results pass.

    Files that a plan names are relative to ``directory``.
    """
    options = (engine, second_opinion, directory)
    lines = iter(lines)
    first = list(_first_lines(lines)) if jobs > 1 else []
    if jobs == 1 or len(first) == 1:  # a pool takes longer to start than one plan
        alone = chain(first, lines)
        yield from (certify_line(line, *options) for line in alone if line is not None)
        return
    from pebble import ProcessPool

    forks = "forkserver" in multiprocessing.get_all_start_methods()
    context = multiprocessing.get_context("forkserver" if forks else "spawn")
    context.set_forkserver_preload(PRELOADED)
    if forks:
        with _without_stderr():  # or each process prints a traceback if Ctrl-C ends its start
            forkserver.ensure_running()
    with (
        ProcessPool(max_workers=jobs, context=context) as pool,
        closing(  # cancels pending plans before the pool waits for them
            _in_order(
                chain(first, lines),
                lambda line: pool.schedule(
                    certify_line, args=(line, *options), timeout=TIMEOUT_SECONDS
                ),
                LINES_PER_PROCESS * jobs,
            )
        ) as futures,
    ):
        yield from map(_result_of, futures)


def _first_lines(lines: Iterator[bytes | None]) -> Iterator[bytes | None]:
    """Yield the first line, and what follows it: a line, None if none arrives, or nothing."""
    for line in lines:
        if line is not None:
            yield line
            yield from islice(lines, 1)
            return


def _in_order(
    items: Iterable[Item | None], submit: Callable[[Item], Future[Any]], max_pending: int
) -> Generator[Future[Any]]:
    """Submit items up to ``max_pending`` ahead, and yield their futures in order.

    A None among the items yields the futures that are done.
    """
    pending: deque[Future[Any]] = deque()
    try:
        for item in items:
            if item is not None:
                pending.append(submit(item))
            while pending and (pending[0].done() or len(pending) >= max_pending):
                yield pending.popleft()
        while pending:
            yield pending.popleft()
    finally:
        for future in pending:
            future.cancel()


@contextmanager
def _without_stderr() -> Iterator[None]:
    """Start processes without a standard error in this block."""
    saved, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(null)


def _result_of(future: Future[Result]) -> Result:
    from pebble import ProcessExpired

    remedy = "Certify this plan alone, with --engine to choose a cheaper accountant."
    try:
        return future.result()
    except Timeout:
        message = f"accounting did not finish within {TIMEOUT_SECONDS:g} s."
    except ProcessExpired:
        message = "the accounting process crashed."
    return _undecided("accounting_failed", message, remedy)


def _undecided(code: str, message: str, remedy: str) -> Result:
    reason = Reason(code=code, message=message, remedy=remedy)
    return {**assessment.malformed_result((reason,)), "verdict": "undecided"}, Exit.UNDECIDED


def _open(name: str) -> BinaryIO:
    with _reading(name):
        return sys.stdin.buffer if name == "-" else Path(name).open("rb")


def _count_lines(name: str) -> int:
    with _reading(name), Path(name).open("rb") as lines:
        return sum(1 for _ in lines)


@contextmanager
def _reading(name: str) -> Iterator[None]:
    """Report that ``name`` cannot be read and exit."""
    try:
        yield
    except OSError as error:
        stop(f"cannot read {name}: {error.strerror}.")


def _progress() -> Progress:
    """Return a progress bar, shown only if standard error is a terminal."""
    from rich import progress

    return progress.Progress(
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TimeElapsedColumn(),
        console=err,
        transient=True,
        disable=not sys.stderr.isatty(),
    )
