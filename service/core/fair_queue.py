"""Fair shares of the processors among callers, however many requests each sends.

Start-time fair queueing: a caller's next task is tagged with how long its previous tasks held their
slots, or with the tag served last if that is later, and the lowest tag is served next. A caller
that sends one plan at a time therefore never waits behind another's queue, and a caller alone may
use all slots but one. When the queue is full, the caller with the most waiting tasks is rejected.
``RecentUse`` tracks how much processor time a caller used recently.

References: P. Goyal, H. Vin and H. Cheng, "Start-time Fair Queueing", SIGCOMM 1996.

``Turns`` applies this to requests in the service's own process. A request takes a turn once its
caller is known. It releases the turn while it waits for anything but the processor (its body,
accounting, a client that reads slowly), so that no request holds one for long. A caller alone has
nearly all turns. Recently active callers divide the turns among them, and each that has used
``BURST_SECONDS`` gets a share of the time, which leaves the process nearly free for others.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from contextvars import ContextVar

from affidavit.service.core.errors import TooBusy

MAX_WAITING = 256
"""Waiting computations of all callers."""
MAX_WAITING_EACH = 64
"""Waiting computations of one caller, so that no caller fills the queue alone."""

SERVICE = "service"
"""The caller of work for no single caller. It may use every process."""
CALLER: ContextVar[str] = ContextVar("affidavit_caller", default=SERVICE)
"""The caller for whom the current task works; set once a request is authenticated."""


class RecentUse:
    """The processor seconds that each caller used recently.

    They are capped at ``max_seconds`` and decay by ``decay_rate`` per second.
    """

    def __init__(self, decay_rate: float, max_seconds: float) -> None:
        self._decay_rate, self._max_seconds = decay_rate, max_seconds
        self._used: dict[str, tuple[float, float]] = {}

    def add(self, caller: str, seconds: float) -> None:
        """Add seconds that a caller has just used."""
        if caller == SERVICE:
            return
        self._used = {name: entry for name, entry in self._used.items() if self.of(name) > 0}
        self._used[caller] = min(self._max_seconds, self.of(caller) + seconds), time.monotonic()

    def of(self, caller: str) -> float:
        """Return the seconds that a caller used recently."""
        now = time.monotonic()
        seconds, at = self._used.get(caller, (0.0, now))
        return max(0.0, seconds - self._decay_rate * (now - at))


class FairQueue:
    """A queue for ``slots`` processors; belongs to one event loop.

    At most ``max_waiting`` tasks wait, and ``max_waiting_each`` of one caller.
    """

    def __init__(
        self,
        slots: int,
        *,
        max_waiting: int = MAX_WAITING,
        max_waiting_each: int = MAX_WAITING_EACH,
    ) -> None:
        self._free = slots
        self._max_waiting, self._max_waiting_each = max_waiting, max_waiting_each
        self._max_running_each = max(1, slots - 1)
        self._running: Counter[str] = Counter()
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        self._tags: dict[str, float] = {}
        self._now = 0.0

    def __len__(self) -> int:
        """Return the number of waiting tasks."""
        return sum(map(len, self._waiting.values()))

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Hold a slot during a block; raises ``TooBusy`` if too many tasks wait."""
        caller = CALLER.get()
        await self.enter(caller)
        started_at = time.monotonic()
        try:
            yield
        finally:
            self.leave(caller, time.monotonic() - started_at)

    async def enter(self, caller: str) -> None:
        """Wait for a slot; raises ``TooBusy`` if too many tasks wait."""
        self._reject_excess(caller)
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
            elif turn in self._waiting.get(caller, ()):  # unless it was rejected meanwhile
                self._remove(caller, turn)
            raise

    def _reject_excess(self, caller: str) -> None:
        """If the queue is full, reject the newest task of the caller with most waiting tasks."""
        count = len(self._waiting.get(caller, ()))
        if count >= self._max_waiting_each:
            raise TooBusy
        if len(self) < self._max_waiting:
            return
        busiest = max(self._waiting, key=lambda name: len(self._waiting[name]))
        if len(self._waiting[busiest]) <= count + 1:
            raise TooBusy
        last = self._waiting[busiest][-1]
        self._remove(busiest, last)
        if not last.done():
            last.set_exception(TooBusy())

    def _serve(self) -> None:
        while self._free:
            ready = [caller for caller in self._waiting if self._may_run(caller)]
            if not ready:
                return
            caller = min(ready, key=lambda name: (self._tags[name], self._running[name]))
            turn = self._waiting[caller][0]
            self._remove(caller, turn)
            if turn.cancelled():
                continue
            self._now = max(self._now, self._tags[caller])
            self._free -= 1
            self._running[caller] += 1
            turn.set_result(None)

    def _may_run(self, caller: str) -> bool:
        return caller == SERVICE or self._running[caller] < self._max_running_each

    def leave(self, caller: str, seconds: float) -> None:
        """Release a slot that the caller used for ``seconds``."""
        self._free += 1
        self._running[caller] -= 1
        self._tags[caller] = self._tags.get(caller, self._now) + seconds
        self._serve()
        for name in [name for name, tag in self._tags.items() if tag <= self._now]:
            if name not in self._waiting and not self._running[name]:
                del self._tags[name], self._running[name]

    def _remove(self, caller: str, turn: asyncio.Future[None]) -> None:
        queue = self._waiting[caller]
        queue.remove(turn)
        if not queue:
            del self._waiting[caller]


# ---- turns at the service's own process ----------------------------------------------

TURNS = 32
"""Requests processed at a time; the service has a few more threads."""
RECENT_SECONDS = 5.0
"""A caller is active for this time after its last request; active callers share the turns."""
BURST_SECONDS, BURST_RECOVERY_RATE = 1.0, 0.25
"""Processor seconds that one of several callers may use at once, and regains per second."""
MIN_RECHECK_SECONDS = 0.001
"""Least time until a caller that used up its share is considered again."""
MAX_REQUESTS = 1024


class Turns(FairQueue):
    """The turns of one process, for at most ``at_once`` requests of each caller."""

    def __init__(self, at_once: int) -> None:
        super().__init__(TURNS, max_waiting=max(MAX_REQUESTS, at_once), max_waiting_each=at_once)
        self._use = RecentUse(BURST_RECOVERY_RATE, 2 * BURST_SECONDS)
        self._active: OrderedDict[str, float] = OrderedDict()
        self._timer: asyncio.TimerHandle | None = None

    async def enter(self, caller: str) -> None:
        """Wait for a turn; raises ``TooBusy`` if too many requests wait."""
        now = time.monotonic()
        self._active[caller] = now
        self._active.move_to_end(caller)
        while next(iter(self._active.values())) < now - RECENT_SECONDS:
            self._active.popitem(last=False)
        await super().enter(caller)

    def leave(self, caller: str, seconds: float) -> None:
        """Release a turn that took ``seconds``."""
        self._use.add(caller, seconds)
        super().leave(caller, seconds)

    def _may_run(self, caller: str) -> bool:
        if caller == SERVICE or len(self._active) == 1:
            return super()._may_run(caller)
        return self._has_room(caller) and self._use.of(caller) <= BURST_SECONDS

    def _has_room(self, caller: str) -> bool:
        return self._running[caller] < max(1, TURNS // len(self._active))

    def _serve(self) -> None:
        super()._serve()
        if self._waiting and self._free and self._timer is None and len(self._active) > 1:
            # Callers that have room wait only until their recent use has decayed.
            excess = [
                self._use.of(name) - BURST_SECONDS for name in self._waiting if self._has_room(name)
            ]
            if excess:
                seconds = max(MIN_RECHECK_SECONDS, min(excess) / BURST_RECOVERY_RATE)
                self._timer = asyncio.get_running_loop().call_later(seconds, self._recheck)

    def _recheck(self) -> None:
        self._timer = None
        self._serve()


class Turn:
    """A request's turn, which the request can release and take again."""

    def __init__(self, turns: Turns) -> None:
        self.turns = turns
        self._caller = CALLER.get()
        self._started_at: float | None = None

    async def take(self) -> None:
        """Wait for the turn; raises ``TooBusy`` if too many requests wait."""
        await self.turns.enter(self._caller)
        self._started_at = time.monotonic()

    def leave(self) -> bool:
        """Release the turn; returns False if it is not taken."""
        if self._started_at is None:
            return False
        seconds, self._started_at = time.monotonic() - self._started_at, None
        self.turns.leave(self._caller, seconds)
        return True


TURN: ContextVar[Turn | None] = ContextVar("affidavit_turn", default=None)
"""The turn of the request that the current task processes."""


def leave_turn() -> None:
    """Release the request's turn; the request continues without one."""
    turn = TURN.get()
    if turn is not None:
        turn.leave()


@asynccontextmanager
async def outside_turn() -> AsyncIterator[None]:
    """Release the request's turn during a block, and take it again afterwards."""
    turn = TURN.get()
    was_taken = turn is not None and turn.leave()
    yield
    if turn is not None and was_taken:
        await turn.take()


@asynccontextmanager
async def another_turn() -> AsyncIterator[None]:
    """Hold another turn during a block, for a request that has released its own."""
    turn = TURN.get()
    if turn is None:
        yield
    else:
        async with turn.turns.turn():
            yield
