"""Work shared by callers that come at the same time; each class belongs to one event loop.

``Batcher``
    What comes while a batch is being done makes up the next one. A caller alone waits for
    nobody. Under load a transaction, and the flush to the disk that ends it, serve all who
    came during the one before, and each is answered only after it.
``SingleFlight``
    One computation for callers that need the same result.
``ComputationCache``
    The same, with the latest results cached in memory.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Generic, TypeVar

from starlette.concurrency import run_in_threadpool

from affidavit.service.fair_queue import leave_turn
from affidavit.service.teams import TEAM

A = TypeVar("A")
B = TypeVar("B")
T = TypeVar("T")

MAX_BATCH = 64
"""Callers in one batch."""

BatchWork = Callable[[Sequence[A]], Awaitable[Sequence[B]]]


def in_thread_pool(work: Callable[[Sequence[A]], Sequence[B]]) -> BatchWork[A, B]:
    """``work``, which waits for the database, as the event loop can wait for it."""

    async def run(items: Sequence[A]) -> Sequence[B]:
        return await run_in_threadpool(work, items)

    return run


class Batcher(Generic[A, B]):
    """``work`` gives an answer for each of its questions, or fails and has done nothing.

    A batch that fails is done again one question at a time, so that nobody fails for
    another's question. As many as ``lanes`` are done at a time, which share what waits. A batch is
    of callers who see the same team's rows, and so does ``work``. Belongs to one event loop,
    which ``work`` must not block.
    """

    def __init__(self, work: BatchWork[A, B], most: int = MAX_BATCH, lanes: int = 1) -> None:
        self._work = work
        self._most = most
        self._lanes = lanes
        self._working = 0
        self._waiting: list[tuple[A, asyncio.Future[B], str | None]] = []
        self._running: set[asyncio.Task[None] | None] = set()

    async def __call__(self, request: A) -> B:
        """The answer to ``asked``; raises what ``work`` raises."""
        answer: asyncio.Future[B] = asyncio.get_running_loop().create_future()
        self._waiting.append((request, answer, TEAM.get()))
        if len(self._running) < self._lanes:
            self._running.add(asyncio.create_task(self._run()))
        return await answer

    async def _run(self) -> None:
        try:
            while self._waiting:
                await self._next(self._share())
        finally:
            # Before anything else runs, so that whoever comes now finds that a lane is free.
            self._running.remove(asyncio.current_task())

    def _share(self) -> list[tuple[A, asyncio.Future[B]]]:
        """A lane's part of what waits, rounded up; the other lanes that are free take the rest.

        Only callers who see the rows of one team, the team of whoever waits longest.
        """
        team = self._waiting[0][2]
        places = [place for place, entry in enumerate(self._waiting) if entry[2] == team]
        del places[min(self._most, -(-len(places) // (self._lanes - self._working))) :]
        share = [self._waiting[place][:2] for place in places]
        for place in reversed(places):
            del self._waiting[place]
        TEAM.set(team)  # of this lane's task
        return share

    async def _next(self, batch: Sequence[tuple[A, asyncio.Future[B]]]) -> None:
        self._working += 1
        try:
            if not await self._do(batch, last=len(batch) == 1):
                for entry in batch:
                    await self._do([entry], last=True)
        finally:
            self._working -= 1

    async def _do(self, batch: Sequence[tuple[A, asyncio.Future[B]]], *, last: bool) -> bool:
        """Answer ``batch``; False where it failed and is to be tried in parts."""
        try:
            results = await self._work([request for request, _ in batch])
        except Exception as error:
            if not last:
                return False
            for _, answer in batch:
                if not answer.done():  # its caller may have gone away
                    answer.set_exception(error)
            return True
        for (_, answer), result in zip(batch, results, strict=True):
            if not answer.done():
                answer.set_result(result)
        return True


class SingleFlight(Generic[T]):
    """Runs ``work`` once per key at a time; callers that come meanwhile get the same outcome.

    The computation goes on while any of them waits, and is cancelled with the last that goes away.
    """

    def __init__(self) -> None:
        self._flights: dict[str, asyncio.Task[T]] = {}
        self._callers: Counter[asyncio.Task[T]] = Counter()

    def __len__(self) -> int:
        return len(self._flights)

    def __contains__(self, key: str) -> bool:
        return key in self._flights

    async def run(self, key: str, work: Callable[[], Awaitable[T]]) -> tuple[T, bool]:
        """The outcome of ``work`` for ``key``, and whether this caller started it."""
        flight = self._flights.get(key)
        started = flight is None
        if flight is None:
            flight = asyncio.create_task(self._fly(key, work))
            self._flights[key] = flight
        self._callers[flight] += 1
        leave_turn()
        try:
            return await asyncio.shield(flight), started
        finally:
            self._callers[flight] -= 1
            if not self._callers[flight]:
                del self._callers[flight]
                if not flight.done():
                    self._remove(key, flight)  # whoever comes now starts another
                    flight.cancel()

    async def _fly(self, key: str, work: Callable[[], Awaitable[T]]) -> T:
        try:
            return await work()
        finally:
            self._remove(key, asyncio.current_task())

    def _remove(self, key: str, flight: asyncio.Task[Any] | None) -> None:
        if self._flights.get(key) is flight:
            del self._flights[key]


class ComputationCache(Generic[T]):
    """The latest ``max_results`` results by name, each computed once at a time."""

    def __init__(self, max_results: int) -> None:
        self._max_results = max_results
        self._flights: SingleFlight[T] = SingleFlight()
        self._results: OrderedDict[str, T] = OrderedDict()

    def get(self, name: str) -> T | None:
        """The result of that name, if it is still in memory."""
        return self._results.get(name)

    async def __call__(self, name: str, work: Callable[[], Awaitable[T]]) -> T:
        """The result of ``work``, which is computed unless it is in memory.

        Raises what ``work`` raises.
        """
        if name not in self._results:
            self._results[name], _ = await self._flights.run(name, work)
        self._results.move_to_end(name)
        while len(self._results) > self._max_results:
            self._results.popitem(last=False)
        return self._results[name]
