"""``affidavit batch``: certify one JSON plan per line, and print one result per line.

A pool of processes works a bounded number of lines ahead of the output, so that a sweep of any
length streams. A result is printed as soon as it and all earlier ones are known, even while the
next line has not arrived. A line that is malformed, whose accounting dies, or that triggers an
internal error yields a result of its own and does not stop the batch.

Over the nodes of a Ray cluster, whose Python has Affidavit (``affidavit[ray]``), lines go out in
chunks, a bounded number ahead of the output, to workers that Ray keeps between chunks, so that an
accountant is warm on each node. Ray repeats the chunks of a node that dies. Results come back in
the order of the lines."""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as Timeout
from contextlib import contextmanager, nullcontext
from io import FileIO
from multiprocessing import forkserver
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import typer
from pebble import ProcessExpired, ProcessPool
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from affidavit.certificate import certify, malformed_result, write_all
from affidavit.gate.console import err, print_json, stop, stop_unwritable
from affidavit.gate.exit_codes import OF_VERDICT, Exit, worst
from affidavit.gate.options import EngineOption, SecondOpinionOption
from affidavit.gate.plan_io import poll_lines
from affidavit.mechanisms import load_noise_files
from affidavit.plan import MalformedPlan, Reason, parse_plan

TIMEOUT = 120.0
"""Seconds for one line."""
AHEAD = 8
"""Lines in flight per process."""

HERE = Path()
Result = tuple[dict[str, Any], Exit]


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
    ray: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Use the nodes of a Ray cluster.")
    ] = None,
) -> None:
    """Certify one plan per line, in order; a bad line does not stop the batch."""
    exits: set[Exit] = set()
    directory = HERE if plans == "-" else Path(plans).parent.resolve()
    options: dict[str, Any] = {"second_opinion": second_opinion, "directory": directory}
    with _open(plans) as lines, _progress() as progress:
        total = _count_lines(plans) if Path(plans).is_file() else None  # a pipe is read once
        task = progress.add_task("plans", total=total)
        written, done = (None, []) if output is None else _resume(output)
        exits.update(done)
        progress.advance(task, len(done))
        remaining = _after(_read_to_the_end(plans, poll_lines(lines)), len(done))
        if ray is None:
            results = certify_lines(remaining, jobs=jobs, engine=engine, **options)
        else:
            results = certify_on(ray, remaining, engine=engine, **options)
        with nullcontext() if written is None else written:
            try:
                for result, code in results:
                    if written is None:
                        print_json(result)
                    else:
                        _append(written, result)
                    exits.add(code)
                    progress.advance(task)
            except MalformedPlan as error:
                stop(f"{plans}: {error.reasons[0].message}")
    if not exits:
        err.print(f"{escape(plans)}: no plans found, nothing was checked.")
    raise typer.Exit(worst(exits))


def _append(stream: FileIO, result: dict[str, Any]) -> None:
    """Write a result as a whole line."""
    try:
        write_all(stream.fileno(), json.dumps(result, ensure_ascii=False).encode() + b"\n")
    except OSError as error:
        stop_unwritable(str(stream.name), error)


def _resume(output: Path) -> tuple[FileIO, list[Exit]]:
    """``output``, to append to, and the exit codes of its whole lines; what follows is cut off."""
    codes = []
    try:
        if output.is_file():
            with output.open("r+b") as stream:
                codes = _whole(stream)
        return output.open("ab", buffering=0), codes
    except OSError as error:
        stop_unwritable(output, error)


def _whole(stream: BinaryIO) -> list[Exit]:
    codes, length = [], 0
    for line in stream:
        if not line.endswith(b"\n"):
            break
        try:
            codes.append(_exit_of(json.loads(line)))
        except (ValueError, KeyError, TypeError, RecursionError):
            place = f"{stream.name}, line {len(codes) + 1}"
            stop(f"{place}: not a result of affidavit batch; name another file.")
        length += len(line)
    stream.truncate(length)
    return codes


def _exit_of(result: dict[str, Any]) -> Exit:
    malformed = result["verdict"] == "refused" and result["plan_digest"] is None
    return Exit.USAGE if malformed else OF_VERDICT[result["verdict"]]


def _after(lines: Iterable[bytes | None], count: int) -> Iterator[bytes | None]:
    """``lines`` without the first ``count``."""
    for line in lines:
        if line is not None and count > 0:
            count -= 1
        else:
            yield line


def certify_line(
    line: bytes, engine: str | None, second_opinion: bool, directory: Path = HERE
) -> Result:
    """The result document and exit code of one line; never raises."""
    try:
        plan = parse_plan(line, "json")
        load_noise_files(plan, directory)
        assessment = certify(plan, engine=engine, second_opinion=second_opinion)
        return assessment.as_result(), OF_VERDICT[assessment.verdict]
    except MalformedPlan as error:
        return malformed_result(error.reasons), Exit.USAGE
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
    directory: Path = HERE,
) -> Iterator[Result]:
    """The results of ``lines``, in order; None among the lines only marks that time has passed.

    Files that a plan names are relative to ``directory``.
    """
    if jobs == 1:
        for line in lines:
            if line is not None:
                yield certify_line(line, engine, second_opinion, directory)
        return
    forks = "forkserver" in multiprocessing.get_all_start_methods()
    context = multiprocessing.get_context("forkserver" if forks else "spawn")
    context.set_forkserver_preload(["affidavit.gate.batch"])
    if forks:
        with _without_stderr():  # or each process tells where Ctrl-C came while it started
            forkserver.ensure_running()
    pending: deque[Future[Result]] = deque()
    with ProcessPool(max_workers=jobs, context=context) as pool:
        try:
            for line in lines:
                if line is not None:
                    arguments = (line, engine, second_opinion, directory)
                    pending.append(pool.schedule(certify_line, args=arguments, timeout=TIMEOUT))
                while pending and (pending[0].done() or len(pending) >= AHEAD * jobs):
                    yield _result_of(pending.popleft())
            while pending:
                yield _result_of(pending.popleft())
        finally:
            for future in pending:
                future.cancel()


@contextmanager
def _without_stderr() -> Iterator[None]:
    """Let processes that begin meanwhile have no standard error."""
    own, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    try:
        yield
    finally:
        os.dup2(own, 2)
        os.close(own)
        os.close(null)


def _result_of(future: Future[Result]) -> Result:
    remedy = "Certify this plan alone, with --engine to choose a cheaper accountant."
    try:
        return future.result()
    except Timeout:
        message = f"accounting did not finish within {TIMEOUT:g} s."
    except ProcessExpired:
        message = "the accounting process crashed."
    return _undecided("accounting_failed", message, remedy)


def _undecided(code: str, message: str, remedy: str) -> Result:
    reason = Reason(code=code, message=message, remedy=remedy)
    return {**malformed_result((reason,)), "verdict": "undecided"}, Exit.UNDECIDED


def _open(name: str) -> BinaryIO:
    with _reading(name):
        return sys.stdin.buffer if name == "-" else Path(name).open("rb")


def _count_lines(name: str) -> int:
    with _reading(name), Path(name).open("rb") as lines:
        return sum(1 for _ in lines)


def _read_to_the_end(name: str, lines: Iterator[bytes | None]) -> Iterator[bytes | None]:
    with _reading(name):
        yield from lines


@contextmanager
def _reading(name: str) -> Iterator[None]:
    """Stop, and say why, where ``name`` cannot be read, or not to its end."""
    try:
        yield
    except OSError as error:
        stop(f"cannot read {name}: {error.strerror}.")


def _progress() -> Progress:
    """A progress bar on standard error, if that is a terminal."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=err,
        transient=True,
        disable=not sys.stderr.isatty(),
    )


CHUNK = 32
CHUNKS_AHEAD = 4
"""Chunks in flight per processor."""


def certify_on(
    address: str,
    lines: Iterable[bytes | None],
    *,
    engine: str | None,
    second_opinion: bool,
    directory: Path,
) -> Iterator[Result]:
    """The results of ``lines``, in order; None among the lines sends what has come so far."""
    try:
        ray: Any = importlib.import_module("ray")
    except ModuleNotFoundError:
        stop("Ray is not installed: pip install 'affidavit[ray]'.")
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except ConnectionError as error:
        stop(f"cannot connect to a Ray cluster at {address}: {error}")
    certify_remote = ray.remote(num_cpus=1, max_retries=-1)(certify_chunk)
    pending: deque[Any] = deque()
    chunk: list[bytes] = []
    ahead = CHUNKS_AHEAD * max(1, int(ray.cluster_resources().get("CPU", 1)))

    def send() -> None:
        if chunk:
            pending.append(certify_remote.remote([*chunk], engine, second_opinion, directory))
            chunk.clear()

    try:
        for line in lines:
            if line is not None:
                chunk.append(line)
            if line is None or len(chunk) == CHUNK:
                send()
            while pending and (len(pending) > ahead or ray.wait([pending[0]], timeout=0)[0]):
                yield from ray.get(pending.popleft())
        send()
        while pending:
            yield from ray.get(pending.popleft())
    finally:
        ray.shutdown()


def certify_chunk(
    lines: list[bytes], engine: str | None, second_opinion: bool, directory: Path
) -> list[Result]:
    """The results of a chunk, in a worker of the cluster."""
    return [certify_line(line, engine, second_opinion, directory) for line in lines]
