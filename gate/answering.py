"""Batches: one plan a line in, one result a line out, in order.

Lines are assessed by a pool of processes, a bounded number ahead of what has been
printed, so that a sweep of any length streams; an answer is given as soon as it and those
before it are known, even while the next line is still awaited. A line that is not a plan, whose
accounting dies, or that meets a fault of ours, yields a result of its own and stops nothing.
"""

from __future__ import annotations

import multiprocessing
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as Late
from pathlib import Path
from typing import Any

from pebble import ProcessExpired, ProcessPool

from affidavit.certificate import certify, malformed_result
from affidavit.gate.exits import OF_VERDICT, Exit
from affidavit.mechanisms import attach
from affidavit.plan import MalformedPlan, Reason, parse_plan

SECONDS_A_LINE = 120.0
AHEAD = 8
"""Lines in flight a process."""

HERE = Path()
Answer = tuple[dict[str, Any], Exit]


def answer(line: bytes, engine: str | None, second_opinion: bool, directory: Path = HERE) -> Answer:
    """The result document of one line and the exit code it stands for; nothing is raised."""
    try:
        plan = parse_plan(line, "json")
        attach(plan, directory)
        assessment = certify(plan, engine=engine, second_opinion=second_opinion)
        return assessment.as_result(), OF_VERDICT[assessment.verdict]
    except MalformedPlan as error:
        return malformed_result(error.reasons), Exit.USAGE
    except Exception as fault:  # whatever it is, the other lines are judged
        reason = Reason(
            code="internal_error",
            pointer="",
            message=f"the gate met a fault of its own ({fault!r}).",
            remedy="Please report the plan.",
        )
        return _undecided(reason)


def answers(
    lines: Iterable[bytes | None],
    *,
    jobs: int,
    engine: str | None,
    second_opinion: bool,
    directory: Path = HERE,
) -> Iterator[Answer]:
    """The answers to ``lines``, in order; a None among them only says that time has passed.

    Files that a plan names are looked for below ``directory``.
    """
    if jobs == 1:
        for line in lines:
            if line is not None:
                yield answer(line, engine, second_opinion, directory)
        return
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["affidavit.gate.batch"])
    waiting: deque[Future[Answer]] = deque()
    with ProcessPool(max_workers=jobs, context=context) as pool:
        try:
            for line in lines:
                if line is not None:
                    waiting.append(
                        pool.schedule(
                            answer,
                            args=(line, engine, second_opinion, directory),
                            timeout=SECONDS_A_LINE,
                        )
                    )
                while waiting and (waiting[0].done() or len(waiting) >= AHEAD * jobs):
                    yield _outcome(waiting.popleft())
            while waiting:
                yield _outcome(waiting.popleft())
        finally:
            for future in waiting:
                future.cancel()


def _outcome(future: Future[Answer]) -> Answer:
    try:
        return future.result()
    except Late:
        return _failed(f"accounting did not finish in {SECONDS_A_LINE:g} s.")
    except ProcessExpired:
        return _failed("the accounting process died.")


def _failed(message: str) -> Answer:
    reason = Reason(
        code="accounting_failed",
        pointer="",
        message=message,
        remedy="Certify this plan alone, with --engine to choose a cheaper accountant.",
    )
    return _undecided(reason)


def _undecided(reason: Reason) -> Answer:
    return {**malformed_result((reason,)), "verdict": "undecided"}, Exit.UNDECIDED
