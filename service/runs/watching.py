"""Watching runs: one look at the database for all who watch, and a wake-up for each.

A stream of events that asked the database by itself would cost a connection each. Here one
task looks, every ``PERIOD`` seconds while anybody watches, how far all watched runs are, and wakes
their watchers. A database that does not answer is asked again; the watchers wait meanwhile.

The runs may be changed by any process, so that nothing but the database can tell; how late a
change is seen is ``PERIOD`` and the look itself.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from sqlalchemy.exc import SQLAlchemyError
from starlette.concurrency import run_in_threadpool

PERIOD = 0.5
MOST = 1000
"""Watchers of one process."""

log = logging.getLogger("affidavit.service.runs")


@dataclass(frozen=True, slots=True)
class Sight:
    """How far a run is: the number of its last event, and the steps that were reported."""

    seq: int
    steps: int


Look = Callable[[Collection[str]], Mapping[str, Sight]]


class Watching:
    """The watched runs of one process; belongs to one event loop."""

    def __init__(self, look: Look) -> None:
        self._look = look
        self._watched: Counter[str] = Counter()
        self._seen: dict[str, Sight] = {}
        self._looked = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.stopping = False

    @property
    def full(self) -> bool:
        """Whether as many watch as this process serves."""
        return self._watched.total() >= MOST

    @contextmanager
    def watched(self, run_id: str) -> Iterator[None]:
        """Keep an eye on a run."""
        self._watched[run_id] += 1
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._keep_looking())
        try:
            yield
        finally:
            self._watched[run_id] -= 1
            if not self._watched[run_id]:
                del self._watched[run_id]
                self._seen.pop(run_id, None)

    async def change(self, run_id: str, known: Sight | None, patience: float) -> Sight | None:
        """What is seen of a watched run once that is not ``known``.

        None if nothing is seen within ``patience`` seconds, or the process stops.
        """
        try:
            async with asyncio.timeout(patience):
                while not self.stopping:
                    looked = self._looked
                    seen = self._seen.get(run_id)
                    if seen is not None and seen != known:
                        return seen
                    await looked.wait()
        except TimeoutError:
            pass
        return None

    def stop(self) -> None:
        """Let every watcher come to its end."""
        self.stopping = True
        self._wake()

    def _wake(self) -> None:
        looked, self._looked = self._looked, asyncio.Event()
        looked.set()

    async def _keep_looking(self) -> None:
        while self._watched and not self.stopping:
            try:
                found = await run_in_threadpool(self._look, tuple(self._watched))
            except SQLAlchemyError as error:
                log.warning("watched runs cannot be looked at now: %s", error)
            else:
                self._seen = {run: found[run] for run in self._watched if run in found}
                self._wake()
            await asyncio.sleep(PERIOD)
