"""Accounting in processes that can be killed.

``certify`` refuses plans whose estimated cost is too high, but an estimate can be wrong and a
foreign library can hang. Therefore each accounting runs in its own process under a time limit. A
process that exceeds the limit is killed and replaced, while the event loop and other requests
continue.

A fork server that has imported the accountants starts the processes: forking the service itself
would copy the locks of its threads in an arbitrary state. A broken pool, for example after the
kernel killed an idle worker, is replaced when the next plan arrives.

Long plans, and those of callers with much recent use, have processes of their own with a lower
priority, so that no ordinary plan waits for them. Use is the processor time that a process measures
of its work, or that is measured of a process before it is killed. What a process that died had used
is not known, and counts as the time since it began.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import multiprocessing
import os
import resource
import signal
import time
from collections.abc import Callable, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from itertools import pairwise
from multiprocessing.context import BaseContext
from threading import Lock, Thread
from typing import Any, ParamSpec, TypeVar

from pebble import ProcessExpired, ProcessPool
from starlette.concurrency import run_in_threadpool

from affidavit.assessment import Assessment, certify
from affidavit.plan import Plan
from affidavit.replay.process_limits import processor_time_of
from affidavit.service.core.concurrency import Batcher
from affidavit.service.core.errors import AccountingFailed, AccountingTimeout
from affidavit.service.core.fair_queue import (
    CALLER,
    SERVICE,
    FairQueue,
    RecentUse,
    leave_turn,
)

UNSAMPLED = frozenset({"full_batch", "cyclic"})
MAX_QUICK = 16
"""Quick plans sent to a process together, and releases of a quick plan."""
QUICK_SECONDS = 1.0
"""Processor seconds of quick plans together; one that takes longer alone is no quick plan."""
ORDINARY_SECONDS = 5.0
"""A plan that takes longer is long, and so are the plans of a caller with more recent use."""
SUSTAINED_SHARE = 1 / 6
"""Share of a process that a caller may use all the time."""
MAX_RECENT_SECONDS = ORDINARY_SECONDS + 60 * SUSTAINED_SHARE
"""A caller with this use, or with a long plan, may use the ordinary processes after a minute."""
NICENESS, LONG_NICENESS = 5, 19
"""Of the accounting processes; the service's own is 0."""

P = ParamSpec("P")
T = TypeVar("T")

log = logging.getLogger("affidavit.service")


class _RecentUseExceeded(Exception):
    """The caller's recent use exceeds the limit of these processes."""


class _TakesLong(Exception):
    """The work used as many processor seconds as these processes allow."""


_USED = "affidavit_processor_seconds"
_BEGUN: list[Any] = []
"""In a worker, what it shares with the service: when each process began its work, and its id."""


def _measure(
    place: int, most: float | None, work: Callable[..., T], args: Any, kwargs: Any
) -> tuple[T, float]:
    """Do ``work`` in a worker process; return its result and the processor seconds it used.

    On a busy host, a clock would also measure how long others used the processors. ``SIGPROF`` ends
    the process after ``most`` processor seconds, in foreign code too. An exception of ``work`` has
    the seconds as an attribute. At ``place`` stands where to measure what is killed before.
    """
    began = _spent()
    _BEGUN[0][place : place + 2] = [time.process_time(), os.getpid()]
    signal.setitimer(signal.ITIMER_PROF, most or 0.0)
    try:
        return work(*args, **kwargs), _spent() - began
    except Exception as error:
        setattr(error, _USED, _spent() - began)
        raise
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)


def _spent() -> float:
    """Return the processor seconds of this process, and of its children that ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


class _Processes:
    """``number`` processes, for callers whose recent use is below ``max_use`` seconds."""

    def __init__(
        self, number: int, niceness: int, context: BaseContext, max_use: float = math.inf
    ) -> None:
        self.number = number
        self._max_use = max_use
        self._niceness = niceness
        self._context = context
        self._turns = FairQueue(number)
        self._begun = context.RawArray("d", 2 * number)
        self._places = list(range(0, 2 * number, 2))
        self._lock = Lock()
        self._pool = self._new_pool()

    async def run(
        self,
        seconds: float,
        most: float | None,
        use: RecentUse,
        work: Callable[..., T],
        *args: Any,
        **kwargs: Any,
    ) -> T:
        """Return the result of ``work``, which may take ``seconds``, and add to ``use``.

        It may use ``most`` processor seconds. Raises ``_RecentUseExceeded`` if the caller reached
        the limit while it waited, and ``_TakesLong`` after ``most``.
        """
        async with self._turns.turn():
            if use.of(CALLER.get()) >= self._max_use:
                raise _RecentUseExceeded
            # Replacing a broken pool blocks, so it happens in a thread.
            pool = self._pool if self._pool.active else await run_in_threadpool(self.usable)
            started_at = time.monotonic()
            used: float | None = None
            place = self._places.pop()
            self._begun[place : place + 2] = [0.0, 0.0]
            try:
                measured = (place, most, work, args, kwargs)
                future = pool.schedule(_measure, args=measured, timeout=seconds)
                answer: tuple[T, float] = await asyncio.wrap_future(future)
                used = answer[1]
            except asyncio.CancelledError:
                used = self._used_at(place)
                raise
            except ProcessExpired as error:
                if error.exitcode != -signal.SIGPROF:
                    raise
                used = most
                raise _TakesLong from None
            except Exception as error:
                used = getattr(error, _USED, None)
                raise
            finally:
                self._places.append(place)
                # Nobody measured what died, and it kept the process from others until then.
                use.add(CALLER.get(), time.monotonic() - started_at if used is None else used)
        return answer[0]

    def _used_at(self, place: int) -> float | None:
        """Return what the work at ``place`` used so far; None if the system does not tell."""
        began, process = self._begun[place : place + 2]
        if not process:
            return 0.0  # it has not begun
        total = processor_time_of(int(process))
        return max(0.0, total - began) if total else None

    def usable(self) -> ProcessPool:
        """Return the pool, after replacing a broken one."""
        with self._lock:
            if not self._pool.active:
                log.warning("the accounting pool broke; starting another")
                self._stop()
                self._pool = self._new_pool()
            return self._pool

    def close(self) -> None:
        """Stop the processes and discard their computations."""
        with self._lock:
            self._stop()

    def _stop(self) -> None:
        self._pool.stop()  # type: ignore[no-untyped-call]
        self._pool.join()

    def _new_pool(self) -> ProcessPool:
        return ProcessPool(
            max_workers=self.number,
            initializer=_initialise_worker,
            initargs=(self._niceness, self._begun),
            context=self._context,
        )


class AccountingPool:
    """``workers`` processes, each accounting one plan for at most ``time_limit`` seconds.

    Long plans have ``workers - 1`` more processes, at least one, which start when they are needed.
    ``unanswered`` counts the computations in progress or waiting.
    """

    def __init__(self, workers: int, time_limit: float) -> None:
        self.time_limit = time_limit
        self.workers = workers
        self.unanswered = 0
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(
            ["affidavit.service.core.accounting_preload", certify.__module__]
        )
        self._ordinary = _Processes(workers, NICENESS, context, ORDINARY_SECONDS)
        self._long = _Processes(max(1, workers - 1), LONG_NICENESS, context)
        self._use = RecentUse(SUSTAINED_SHARE, MAX_RECENT_SECONDS)
        self._quick: Batcher[tuple[str, Plan], Assessment] = Batcher(
            self._assess_quick, MAX_QUICK, lanes=workers
        )

    async def assess(self, plan: Plan) -> Assessment:
        """Return the assessment by ``certify``; raises like ``run``.

        Quick plans cost less than sending them to a process, so several are sent together. Each is
        charged to its caller.
        """
        if is_quick(plan) and self._use.of(CALLER.get()) < ORDINARY_SECONDS:
            with suppress(_TakesLong):  # though it looks like others that do not
                return await self._quick((CALLER.get(), plan))
        return await (self.run_long if is_long(plan) else self.run)(certify, plan)

    async def _assess_quick(self, requests: Sequence[tuple[str, Plan]]) -> list[Assessment]:
        """Assess plans of several callers together; one that fails is charged when it is alone."""
        CALLER.set(SERVICE)
        plans = [plan for _, plan in requests]
        try:
            measured = await self._run(False, QUICK_SECONDS, map_plans, certify, plans)
        except Exception as error:
            if len(requests) == 1:
                self._use.add(requests[0][0], getattr(error, _USED, QUICK_SECONDS))
            raise
        for (caller, _), (_, seconds) in zip(requests, measured, strict=True):
            self._use.add(caller, seconds)
        return [assessment for assessment, _ in measured]

    async def run(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return the result of ``work``.

        Callers take turns (``FairQueue``). Waiting for a process does not count against the time
        limit. Cancelling the task also ends the work in its process. Work that uses
        ``ORDINARY_SECONDS`` of a processor starts again as a long plan.
        Raises ``AccountingTimeout``, ``AccountingFailed`` or ``TooBusy``.
        """
        if self._use.of(CALLER.get()) < ORDINARY_SECONDS:
            try:
                return await self._run(False, ORDINARY_SECONDS, work, *args, **kwargs)
            except _RecentUseExceeded:
                pass
            except _TakesLong:
                self._use.add(CALLER.get(), MAX_RECENT_SECONDS)
        return await self.run_long(work, *args, **kwargs)

    async def run_long(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run ``work`` as a long plan; also used for charts and other work that is not urgent."""
        return await self._run(True, None, work, *args, **kwargs)

    async def _run(
        self,
        is_long: bool,
        most: float | None,
        work: Callable[P, T],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        self.unanswered += 1
        leave_turn()
        processes = self._long if is_long else self._ordinary
        try:
            return await processes.run(self.time_limit, most, self._use, work, *args, **kwargs)
        except TimeoutError:
            raise AccountingTimeout(f"killed after {self.time_limit:g} s") from None
        except (ProcessExpired, BrokenProcessPool) as error:
            raise AccountingFailed(f"the accounting process died: {error}") from error
        finally:
            self.unanswered -= 1

    def warm_up(self) -> None:
        """Start the processes, so that the first plan does not wait for imports."""
        for _ in range(self.workers):
            self._ordinary.usable().schedule(_do_nothing)

    def close(self) -> None:
        """Stop the processes and discard their computations."""
        self._ordinary.close()
        self._long.close()


def is_quick(plan: Plan) -> bool:
    """Return whether ``certify`` takes milliseconds: one Gaussian, and nothing to solve for."""
    phase = plan.phases[0]
    return (
        len(plan.phases) == 1
        and phase.sampling.scheme in UNSAMPLED
        and phase.noise.kind == "independent"
        and len(phase.releases) <= MAX_QUICK
        and not (plan.extra or plan.claim or plan.is_open)
    )


def is_long(plan: Plan) -> bool:
    """Return whether ``certify`` takes seconds or minutes, to sample bounds of correlated noise."""
    return any(
        phase.sampling.scheme == "balls_in_bins" and phase.noise.kind != "independent"
        for phase in plan.phases
    )


def map_plans(work: Callable[[Plan], T], plans: Sequence[Plan]) -> list[tuple[T, float]]:
    """Return the results of ``work`` for several plans, and the seconds of each, in a worker."""
    times = [time.process_time()]
    results = []
    for plan in plans:
        results.append(work(plan))
        times.append(time.process_time())
    seconds = [after - before for before, after in pairwise(times)]
    return list(zip(results, seconds, strict=True))


def _initialise_worker(niceness: int, begun: Any) -> None:
    """Initialise a worker, which exits when the service is gone, even if it was killed.

    A worker that is computing would notice only after its computation, which may never end. Its
    niceness gives the service's own process priority.
    """
    _BEGUN[:] = [begun]
    os.nice(niceness)
    gc.freeze()  # exclude imported modules from garbage collection
    Thread(target=_exit_with_service, daemon=True).start()


def _exit_with_service() -> None:
    service = multiprocessing.parent_process()
    if service is not None:
        service.join()
        os._exit(1)


def _do_nothing() -> None:
    """Do nothing; a worker that runs it has started."""
