"""Work for many callers in one go: what comes while a batch is done makes up the next one.

A caller alone waits for nobody. Under load a transaction, and the flush to the disk that
ends it, serve all who came during the one before, and each is answered only after it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

from starlette.concurrency import run_in_threadpool

A = TypeVar("A")
B = TypeVar("B")

MOST = 64
"""Callers in one batch."""

Work = Callable[[Sequence[A]], Awaitable[Sequence[B]]]


def in_thread_pool(work: Callable[[Sequence[A]], Sequence[B]]) -> Work[A, B]:
    """``work``, which waits for the database, as the event loop can wait for it."""

    async def run(asked: Sequence[A]) -> Sequence[B]:
        return await run_in_threadpool(work, asked)

    return run


class Batcher(Generic[A, B]):
    """``work`` gives an answer for each of its questions, or fails and has done nothing.

    A batch that fails is done again one question at a time, so that nobody fails for
    another's question. As many as ``lanes`` are done at a time, which share what waits. Belongs
    to one event loop, which ``work`` must not block.
    """

    def __init__(self, work: Work[A, B], most: int = MOST, lanes: int = 1) -> None:
        self._work = work
        self._most = most
        self._lanes = lanes
        self._working = 0
        self._waiting: list[tuple[A, asyncio.Future[B]]] = []
        self._running: set[asyncio.Task[None] | None] = set()

    async def __call__(self, asked: A) -> B:
        """The answer to ``asked``; raises what ``work`` raises."""
        answer: asyncio.Future[B] = asyncio.get_running_loop().create_future()
        self._waiting.append((asked, answer))
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
        """A lane's part of what waits, rounded up; the other lanes that are free take the rest."""
        size = min(self._most, -(-len(self._waiting) // (self._lanes - self._working)))
        share, self._waiting = self._waiting[:size], self._waiting[size:]
        return share

    async def _next(self, batch: Sequence[tuple[A, asyncio.Future[B]]]) -> None:
        self._working += 1
        try:
            if not await self._do(batch, last=len(batch) == 1):
                for item in batch:
                    await self._do([item], last=True)
        finally:
            self._working -= 1

    async def _do(self, batch: Sequence[tuple[A, asyncio.Future[B]]], *, last: bool) -> bool:
        """Answer ``batch``; False where it failed and is to be tried in parts."""
        try:
            found = await self._work([asked for asked, _ in batch])
        except Exception as error:
            if not last:
                return False
            for _, answer in batch:
                if not answer.done():  # its caller may have gone away
                    answer.set_exception(error)
            return True
        for (_, answer), each in zip(batch, found, strict=True):
            if not answer.done():
                answer.set_result(each)
        return True
