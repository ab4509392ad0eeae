"""Turns at the accounting processes: each caller gets a share, however many plans it sends.

Start-time fair queueing: a caller's next plan is tagged with the time that its plans before took,
or with the tag served last where that is later, and the lowest tag is next. So whoever sends
one plan at a time waits for no other's queue, and a caller alone has all that there is, but for
one slot. Nor do long plans, of however many callers, take the last of several slots: what
has begun keeps its slot, and an ordinary plan is not to wait for that.

References: P. Goyal, H. Vin and H. Cheng, "Start-time Fair Queueing", SIGCOMM 1996.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import NamedTuple

from affidavit.service.errors import TooBusy

MOST_WAITING = 256
"""Computations that wait, of all callers."""
MOST_WAITING_EACH = 64
"""Those of one caller, so that nobody fills the queue alone."""

NOBODY = "service"
"""Whoever works for no caller in particular, or for many at once; may hold every process."""
CALLER: ContextVar[str] = ContextVar("affidavit_caller", default=NOBODY)
"""For whom the current task works; requests set it once they are authenticated."""


class Lane(NamedTuple):
    """Where a computation waits: in the order of its caller's, those that take long aside."""

    caller: str
    is_long: bool


class FairQueue:
    """Who may use one of ``slots`` processes next; belongs to one event loop."""

    def __init__(self, slots: int) -> None:
        self._slots = self._free = slots
        self._running: Counter[str] = Counter()
        self._long = 0
        self._waiting: dict[Lane, deque[asyncio.Future[None]]] = {}
        self._tags: dict[str, float] = {}
        self._now = 0.0

    def __len__(self) -> int:
        """How many wait."""
        return sum(map(len, self._waiting.values()))

    @asynccontextmanager
    async def turn(self, *, is_long: bool = False) -> AsyncIterator[None]:
        """A slot, for the length of a block; raises ``TooBusy`` where too many wait."""
        lane = Lane(CALLER.get(), is_long)
        await self._enter(lane)
        started_at = time.monotonic()
        try:
            yield
        finally:
            self._leave(lane, time.monotonic() - started_at)

    async def _enter(self, lane: Lane) -> None:
        own = sum(len(self._waiting.get(Lane(lane.caller, kind), ())) for kind in (False, True))
        if len(self) >= MOST_WAITING or own >= MOST_WAITING_EACH:
            raise TooBusy
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(lane, deque()).append(turn)
        self._tags[lane.caller] = max(self._tags.get(lane.caller, 0.0), self._now)
        self._serve()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._leave(lane, 0.0)
            else:
                self._forget(lane, turn)
            raise

    def _serve(self) -> None:
        while self._free:
            ready = [lane for lane in self._waiting if self._may_run(lane)]
            if not ready:
                return
            lane = min(ready, key=lambda one: (self._tags[one.caller], self._running[one.caller]))
            turn = self._waiting[lane][0]
            self._forget(lane, turn)
            if turn.cancelled():
                continue
            self._now = max(self._now, self._tags[lane.caller])
            self._free -= 1
            self._running[lane.caller] += 1
            self._long += lane.is_long
            turn.set_result(None)

    def _may_run(self, lane: Lane) -> bool:
        most = max(1, self._slots - 1)
        if lane.is_long and self._long >= most:
            return False
        return lane.caller == NOBODY or self._running[lane.caller] < most

    def _leave(self, lane: Lane, seconds: float) -> None:
        self._free += 1
        self._running[lane.caller] -= 1
        self._long -= lane.is_long
        self._tags[lane.caller] = self._tags.get(lane.caller, self._now) + seconds
        self._serve()
        waiting = {lane.caller for lane in self._waiting}
        for name in [name for name, tag in self._tags.items() if tag <= self._now]:
            if name not in waiting and not self._running[name]:
                del self._tags[name], self._running[name]

    def _forget(self, lane: Lane, turn: asyncio.Future[None]) -> None:
        queue = self._waiting[lane]
        queue.remove(turn)
        if not queue:
            del self._waiting[lane]
