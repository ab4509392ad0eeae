"""Accounting in processes that can be killed.

``certify`` refuses a plan whose estimated cost is too high, but an estimate can be wrong
and a foreign library can hang. So it runs in a process of its own under a wall-clock
limit, and a process that passes it is killed and replaced; the event loop and the other
requests never wait for it.

Processes come from a fork server that has imported the accountants once: forking the
service itself would copy its threads' locks in whatever state they are in. A pool that
broke (a worker that was killed while idle, say by the kernel for want of memory) is
discarded and replaced for the next plan.

Long plans, and those of callers who account much, have processes of their own, to which the
operating system gives what the others leave: no ordinary plan waits for them.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.context import BaseContext
from threading import Lock, Thread
from typing import Any, ParamSpec, TypeVar

from pebble import ProcessExpired, ProcessPool
from starlette.concurrency import run_in_threadpool

from affidavit.certificate import Assessment, certify
from affidavit.plan import Plan
from affidavit.service.concurrency import Batcher
from affidavit.service.errors import AccountingFailed, AccountingTimeout
from affidavit.service.fair_queue import CALLER, NOBODY, FairQueue, Use, leave_turn

UNSAMPLED = frozenset({"full_batch", "shuffled", "cyclic"})
MAX_QUICK = 16
"""Plans handed over at once, and releases of one of them."""
ORDINARY_SECONDS = 5.0
"""What takes longer is a long plan, and so are the plans of a caller who used more of late."""
SHARE = 1 / 6
"""Of a process that a caller may use all the time."""
MAX_USE = ORDINARY_SECONDS + 60 * SHARE
"""Whoever used as much, or sent a long plan, is back among the ordinary after a minute."""
NICENESS, LONG_NICENESS = 5, 19
"""Of the processes that account, beside the service's own."""

P = ParamSpec("P")
T = TypeVar("T")

log = logging.getLogger("affidavit.service")


class _UsedMuch(Exception):
    """The caller used more of late than whoever these processes are for."""


class _Processes:
    """``number`` processes, at which callers take turns who used less than ``most_use`` of late."""

    def __init__(
        self, number: int, niceness: int, context: BaseContext, most_use: float = math.inf
    ) -> None:
        self.number = number
        self._most_use = most_use
        self._niceness = niceness
        self._context = context
        self._turns = FairQueue(number)
        self._lock = Lock()
        self._pool = self._new()

    async def run(
        self, seconds: float, use: Use, work: Callable[..., T], *args: Any, **kwargs: Any
    ) -> T:
        """What ``work`` returns within ``seconds``, counted as the caller's ``use``.

        Raises ``_UsedMuch`` where the caller's plans before took too long meanwhile.
        """
        async with self._turns.turn():
            if use.of(CALLER.get()) >= self._most_use:
                raise _UsedMuch
            # A pool that broke is replaced, for which a thread has to wait.
            pool = self._pool if self._pool.active else await run_in_threadpool(self.usable)
            began = time.monotonic()
            try:
                future = pool.schedule(work, args=args, kwargs=kwargs, timeout=seconds)
                result: T = await asyncio.wrap_future(future)
            finally:
                use.add(CALLER.get(), time.monotonic() - began)
        return result

    def usable(self) -> ProcessPool:
        """The pool, another one if it broke."""
        with self._lock:
            if not self._pool.active:
                log.warning("the accounting pool broke; starting another")
                self._stop()
                self._pool = self._new()
            return self._pool

    def close(self) -> None:
        """Stop the processes; what they are computing is lost."""
        with self._lock:
            self._stop()

    def _stop(self) -> None:
        self._pool.stop()  # type: ignore[no-untyped-call]
        self._pool.join()

    def _new(self) -> ProcessPool:
        return ProcessPool(
            max_workers=self.number,
            initializer=_end_with_the_service,
            initargs=(self._niceness,),
            context=self._context,
        )


class AccountingPool:
    """``workers`` processes, each accounting one plan for at most ``time_limit`` seconds.

    Beside them one less, and one at least, for long plans, which start with the first of these.
    ``unanswered`` are the computations handed to them so far and not yet answered.
    """

    def __init__(self, workers: int, time_limit: float) -> None:
        self.time_limit = time_limit
        self.workers = workers
        self.unanswered = 0
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["affidavit.service.accounting_preload", certify.__module__])
        self._ordinary = _Processes(workers, NICENESS, context, ORDINARY_SECONDS)
        self._long = _Processes(max(1, workers - 1), LONG_NICENESS, context)
        self._use = Use(SHARE, MAX_USE)
        self._quick: Batcher[Plan, Assessment] = Batcher(self._together, MAX_QUICK, lanes=workers)

    async def assess(self, plan: Plan) -> Assessment:
        """What ``certify`` finds; raises like ``run``.

        Plans of which one takes less than handing it over go to a process several at once.
        """
        if is_quick(plan):
            return await self._quick(plan)
        return await (self.run_long if is_long(plan) else self.run)(certify, plan)

    async def _together(self, plans: Sequence[Plan]) -> list[Assessment]:
        CALLER.set(NOBODY)  # of this task: these are plans of many, and take milliseconds
        return await self.run(each_of, certify, plans)

    async def run(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """What ``work`` returns; raises ``AccountingTimeout``, ``AccountingFailed`` or ``TooBusy``.

        Callers take turns (``FairQueue``). Time spent waiting for a free process does not count
        against the limit. Cancelled, the work ends in its process too. What takes longer than
        ``ORDINARY_SECONDS`` begins again as a long plan.
        """
        if self._use.of(CALLER.get()) < ORDINARY_SECONDS:
            seconds = min(ORDINARY_SECONDS, self.time_limit)
            try:
                return await self._run(False, seconds, work, *args, **kwargs)
            except _UsedMuch:
                pass
            except AccountingTimeout:
                if seconds == self.time_limit:
                    raise
                self._use.add(CALLER.get(), MAX_USE)
        return await self.run_long(work, *args, **kwargs)

    async def run_long(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """``run`` for what is known to take long, and for what shows rather than decides."""
        return await self._run(True, self.time_limit, work, *args, **kwargs)

    async def _run(
        self, is_long: bool, seconds: float, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        self.unanswered += 1
        leave_turn()
        processes = self._long if is_long else self._ordinary
        try:
            return await processes.run(seconds, self._use, work, *args, **kwargs)
        except TimeoutError:
            raise AccountingTimeout(f"killed after {seconds:g} s") from None
        except (ProcessExpired, BrokenProcessPool) as error:
            raise AccountingFailed(f"the accounting process died: {error}") from error
        finally:
            self.unanswered -= 1

    def warm_up(self) -> None:
        """Start the processes now, so that the first plan need not wait for imports."""
        for _ in range(self.workers):
            self._ordinary.usable().schedule(_ready)

    def close(self) -> None:
        """Stop the processes; what they are computing is lost."""
        self._ordinary.close()
        self._long.close()


def is_quick(plan: Plan) -> bool:
    """Whether ``certify`` takes milliseconds: the run is one Gaussian, and nothing is sought."""
    phase = plan.phases[0]
    return (
        len(plan.phases) == 1
        and phase.sampling.scheme in UNSAMPLED
        and phase.noise.kind == "independent"
        and len(phase.releases) <= MAX_QUICK
        and not (plan.extra or plan.claim or plan.is_open)
    )


def is_long(plan: Plan) -> bool:
    """Whether ``certify`` takes seconds or minutes: it samples the bounds of correlated noise."""
    return any(
        phase.sampling.scheme == "balls_in_bins" and phase.noise.kind != "independent"
        for phase in plan.phases
    )


def each_of(work: Callable[[Plan], T], plans: Sequence[Plan]) -> list[T]:
    """In a worker: what ``work`` returns for each of ``plans``."""
    return [work(plan) for plan in plans]


def _end_with_the_service(niceness: int) -> None:
    """In a worker: watch the service, and end when it is gone, even if it was killed.

    A worker that is computing would notice only when it is done, which a runaway never is. It
    gives way to the service itself, which answers what needs no accounting.
    """
    os.nice(niceness)
    gc.freeze()  # what was imported is not looked through for garbage between two plans
    Thread(target=_watch, daemon=True).start()


def _watch() -> None:
    service = multiprocessing.parent_process()
    if service is not None:
        service.join()
        os._exit(1)


def _ready() -> None:
    """Nothing; that a worker can run it shows that it is up."""
