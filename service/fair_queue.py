"""Turns at the processors: each caller gets a share, however much it sends.

Start-time fair queueing: a caller's next plan is tagged with the time that its plans before took,
or with the tag served last where that is later, and the lowest tag is next. So whoever sends
one plan at a time waits for no other's queue, and a caller alone has all that there is, but for
one slot. Where the queue is full, whoever has most waiting is turned away. ``Use`` is how much a
caller used of late.

References: P. Goyal, H. Vin and H. Cheng, "Start-time Fair Queueing", SIGCOMM 1996.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from contextvars import ContextVar

from affidavit.service.errors import TooBusy

MOST_WAITING = 256
"""Computations that wait, of all callers."""
MOST_WAITING_EACH = 64
"""Those of one caller, so that nobody fills the queue alone."""

NOBODY = "service"
"""Whoever works for no caller in particular, or for many at once; may hold every process."""
CALLER: ContextVar[str] = ContextVar("affidavit_caller", default=NOBODY)
"""For whom the current task works; requests set it once they are authenticated."""


class Use:
    """Seconds that each caller used, up to ``most``; of them ``share`` is forgotten each second."""

    def __init__(self, share: float, most: float) -> None:
        self._share, self._most = share, most
        self._of: dict[str, tuple[float, float]] = {}

    def add(self, caller: str, seconds: float) -> None:
        """Add what a caller used just now."""
        if caller == NOBODY:
            return
        now = time.monotonic()
        self._of = {name: entry for name, entry in self._of.items() if self._left(entry, now) > 0}
        self._of[caller] = min(self._most, self.of(caller) + seconds), now

    def of(self, caller: str) -> float:
        """What a caller used of late."""
        now = time.monotonic()
        return self._left(self._of.get(caller, (0.0, now)), now)

    def _left(self, entry: tuple[float, float], now: float) -> float:
        used, at = entry
        return max(0.0, used - self._share * (now - at))


class FairQueue:
    """Who may use one of ``slots`` next; belongs to one event loop.

    ``most_waiting`` and ``most_waiting_each`` bound what waits, of all and of one caller.
    """

    def __init__(
        self,
        slots: int,
        *,
        most_waiting: int = MOST_WAITING,
        most_waiting_each: int = MOST_WAITING_EACH,
    ) -> None:
        self._free = slots
        self._most_waiting, self._most_waiting_each = most_waiting, most_waiting_each
        self._most_each = max(1, slots - 1)
        self._running: Counter[str] = Counter()
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        self._tags: dict[str, float] = {}
        self._now = 0.0

    def __len__(self) -> int:
        """How many wait."""
        return sum(map(len, self._waiting.values()))

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """A slot, for the length of a block; raises ``TooBusy`` where too many wait."""
        caller = CALLER.get()
        await self.enter(caller)
        started_at = time.monotonic()
        try:
            yield
        finally:
            self.leave(caller, time.monotonic() - started_at)

    async def enter(self, caller: str) -> None:
        """Wait for a slot; raises ``TooBusy`` where too many wait."""
        self._make_room(caller)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(caller, deque()).append(turn)
        self._tags[caller] = max(self._tags.get(caller, 0.0), self._now)
        self._serve()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                if turn.exception() is None:
                    self.leave(caller, 0.0)
            elif turn in self._waiting.get(caller, ()):  # unless it was passed over since
                self._forget(caller, turn)
            raise

    def _make_room(self, caller: str) -> None:
        """Raise ``TooBusy`` in whoever has most waiting, if the queue is full."""
        own = len(self._waiting.get(caller, ()))
        if own >= self._most_waiting_each:
            raise TooBusy
        if len(self) < self._most_waiting:
            return
        greediest = max(self._waiting, key=lambda name: len(self._waiting[name]))
        if len(self._waiting[greediest]) <= own + 1:
            raise TooBusy
        last = self._waiting[greediest][-1]
        self._forget(greediest, last)
        if not last.done():
            last.set_exception(TooBusy())

    def _serve(self) -> None:
        while self._free:
            ready = [caller for caller in self._waiting if self._may_run(caller)]
            if not ready:
                return
            caller = min(ready, key=lambda one: (self._tags[one], self._running[one]))
            turn = self._waiting[caller][0]
            self._forget(caller, turn)
            if turn.cancelled():
                continue
            self._now = max(self._now, self._tags[caller])
            self._free -= 1
            self._running[caller] += 1
            turn.set_result(None)

    def _may_run(self, caller: str) -> bool:
        return caller == NOBODY or self._running[caller] < self._most_each

    def leave(self, caller: str, seconds: float) -> None:
        """Give back a slot that the caller used for as many seconds."""
        self._free += 1
        self._running[caller] -= 1
        self._tags[caller] = self._tags.get(caller, self._now) + seconds
        self._serve()
        for name in [name for name, tag in self._tags.items() if tag <= self._now]:
            if name not in self._waiting and not self._running[name]:
                del self._tags[name], self._running[name]

    def _forget(self, caller: str, turn: asyncio.Future[None]) -> None:
        queue = self._waiting[caller]
        queue.remove(turn)
        if not queue:
            del self._waiting[caller]
