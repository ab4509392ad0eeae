"""Sharing work among concurrent callers; each object belongs to one event loop.

``Batcher``
    Requests that arrive while a batch is processed form the next batch. A single caller does not
    wait. Under load, one transaction, with one flush to the disk, serves all requests that arrived
    during the previous one; each is answered after it.
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

from affidavit.service.core.fair_queue import leave_turn
from affidavit.service.core.teams import TEAM

A = TypeVar("A")
B = TypeVar("B")
T = TypeVar("T")

MAX_BATCH = 64
"""Requests in one batch."""

BatchWork = Callable[[Sequence[A]], Awaitable[Sequence[B]]]


def in_thread_pool(work: Callable[[Sequence[A]], Sequence[B]]) -> BatchWork[A, B]:
    """Return ``work``, which blocks, as a coroutine function that runs it in a thread."""

    async def run(items: Sequence[A]) -> Sequence[B]:
        return await run_in_threadpool(work, items)

    return run


class Batcher(Generic[A, B]):
    """Runs ``work`` on batches of requests; it returns one result for each, or fails as a whole.

    The requests of a batch that fails are repeated one at a time, so that no request fails because
    of another. ``lanes`` batches run at a time and share the waiting requests. All requests of a
    batch have the same team.
    """

    def __init__(self, work: BatchWork[A, B], max_batch: int = MAX_BATCH, lanes: int = 1) -> None:
        self._work = work
        self._max_batch = max_batch
        self._lanes = lanes
        self._working = 0
        self._waiting: list[tuple[A, asyncio.Future[B], str | None]] = []
        self._running: set[asyncio.Task[None] | None] = set()

    async def __call__(self, request: A) -> B:
        """Return the result for ``request``; raises what ``work`` raises."""
        answer: asyncio.Future[B] = asyncio.get_running_loop().create_future()
        self._waiting.append((request, answer, TEAM.get()))
        if len(self._running) < self._lanes:
            self._running.add(asyncio.create_task(self._run()))
        return await answer

    async def _run(self) -> None:
        try:
            while self._waiting:
                await self._run_batch(self._take_batch())
        finally:
            # Without awaiting, so that the next request finds a free lane.
            self._running.remove(asyncio.current_task())

    def _take_batch(self) -> list[tuple[A, asyncio.Future[B]]]:
        """Remove this lane's share of the waiting requests, rounded up, from the queue.

        All are of one team: the team of the request that has waited longest.
        """
        team = self._waiting[0][2]
        of_team = [entry for entry in self._waiting if entry[2] == team]
        batch = of_team[: min(self._max_batch, -(-len(of_team) // (self._lanes - self._working)))]
        taken = {answer for _, answer, _ in batch}
        self._waiting = [entry for entry in self._waiting if entry[1] not in taken]
        TEAM.set(team)  # of this lane's task
        return [(request, answer) for request, answer, _ in batch]

    async def _run_batch(self, batch: Sequence[tuple[A, asyncio.Future[B]]]) -> None:
        self._working += 1
        try:
            if not await self._try_batch(batch, last=len(batch) == 1):
                for entry in batch:
                    await self._try_batch([entry], last=True)
        finally:
            self._working -= 1

    async def _try_batch(self, batch: Sequence[tuple[A, asyncio.Future[B]]], *, last: bool) -> bool:
        """Set the results of ``batch``; returns False if it failed and its parts remain to try."""
        try:
            results = await self._work([request for request, _ in batch])
        except Exception as error:
            if not last:
                return False
            for _, answer in batch:
                if not answer.done():  # its caller may be gone
                    answer.set_exception(error)
            return True
        for (_, answer), result in zip(batch, results, strict=True):
            if not answer.done():
                answer.set_result(result)
        return True


class SingleFlight(Generic[T]):
    """Runs ``work`` once per key at a time; concurrent callers get the same result.

    The computation continues while any caller waits, and is cancelled with the last one.
    """

    def __init__(self) -> None:
        self._flights: dict[str, asyncio.Task[T]] = {}
        self._callers: Counter[asyncio.Task[T]] = Counter()

    def __len__(self) -> int:
        return len(self._flights)

    def __contains__(self, key: str) -> bool:
        return key in self._flights

    async def run(self, key: str, work: Callable[[], Awaitable[T]]) -> tuple[T, bool]:
        """Return the result of ``work`` for ``key``, and whether this call started it."""
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
                    self._remove(key, flight)  # the next caller starts another
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
    """A cache of the last ``max_results`` results by name, each computed once at a time."""

    def __init__(self, max_results: int) -> None:
        self._max_results = max_results
        self._flights: SingleFlight[T] = SingleFlight()
        self._results: OrderedDict[str, T] = OrderedDict()

    def get(self, name: str) -> T | None:
        """Return the cached result of that name, or None."""
        return self._results.get(name)

    async def __call__(self, name: str, work: Callable[[], Awaitable[T]]) -> T:
        """Return the cached result, or that of ``work``; raises what ``work`` raises."""
        if name not in self._results:
            result, _ = await self._flights.run(name, lambda: self._compute(name, work))
            return result
        self._results.move_to_end(name)
        return self._results[name]

    async def _compute(self, name: str, work: Callable[[], Awaitable[T]]) -> T:
        # Cached before the flight ends: a caller between the two would start another.
        result = self._results[name] = await work()
        while len(self._results) > self._max_results:
            self._results.popitem(last=False)
        return result
