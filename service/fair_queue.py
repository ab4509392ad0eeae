"""Turns at the processors: each caller gets a share, however much it sends.

Start-time fair queueing: a caller's next plan is tagged with the time that its plans before took,
or with the tag served last where that is later, and the lowest tag is next. So whoever sends
one plan at a time waits for no other's queue, and a caller alone has all that there is, but for
one slot. Where the queue is full, whoever has most waiting is turned away. ``Use`` is how much a
caller used of late.

References: P. Goyal, H. Vin and H. Cheng, "Start-time Fair Queueing", SIGCOMM 1996.

``Turns`` are those of requests at the service's own process, which one caller's requests would
fill. A request takes its turn once its caller is known. It leaves it while it waits for what takes
no processor (its body, accounting, a client that reads slowly), so that nobody holds one for long.
A caller alone has nearly all turns. Beside others of late it has a part of them, and a share of the
time once it used ``BURST``: whoever comes next finds the process nearly free.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from contextvars import ContextVar

from affidavit.service.errors import TooBusy

MAX_WAITING = 256
"""Computations that wait, of all callers."""
MAX_WAITING_EACH = 64
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
        most_waiting: int = MAX_WAITING,
        most_waiting_each: int = MAX_WAITING_EACH,
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


# ---- turns at the service's own process ----------------------------------------------

TURNS = 32
"""Requests at a time; the service has a few more threads."""
LATELY = 5.0
"""Callers of as many seconds share them."""
BURST, SHARE = 1.0, 0.25
"""Seconds that a caller may use beside others at once, and of each second then."""
MIN_REST = 0.001
"""Seconds until a caller who used up its share is looked at again, at least."""
MAX_REQUESTS = 1024


class Turns(FairQueue):
    """The turns of one process, for up to ``at_once`` requests of each caller."""

    def __init__(self, at_once: int) -> None:
        super().__init__(TURNS, most_waiting=max(MAX_REQUESTS, at_once), most_waiting_each=at_once)
        self._use = Use(SHARE, 2 * BURST)
        self._seen: OrderedDict[str, float] = OrderedDict()
        self._timer: asyncio.TimerHandle | None = None

    async def enter(self, caller: str) -> None:
        """Wait for a turn; raises ``TooBusy`` where too many wait."""
        now = time.monotonic()
        self._seen[caller] = now
        self._seen.move_to_end(caller)
        while next(iter(self._seen.values())) < now - LATELY:
            self._seen.popitem(last=False)
        await super().enter(caller)

    def leave(self, caller: str, seconds: float) -> None:
        """Give back a turn that took as many seconds."""
        self._use.add(caller, seconds)
        super().leave(caller, seconds)

    def _may_run(self, caller: str) -> bool:
        if caller == NOBODY or len(self._seen) == 1:
            return super()._may_run(caller)
        return self._has_room(caller) and self._use.of(caller) <= BURST

    def _has_room(self, caller: str) -> bool:
        return self._running[caller] < max(1, TURNS // len(self._seen))

    def _serve(self) -> None:
        super()._serve()
        if self._waiting and self._free and self._timer is None and len(self._seen) > 1:
            # Who has room waits for time alone, of which all may have passed since it was read.
            rests = [self._use.of(who) - BURST for who in self._waiting if self._has_room(who)]
            if rests:
                seconds = max(MIN_REST, min(rests) / SHARE)
                self._timer = asyncio.get_running_loop().call_later(seconds, self._rested)

    def _rested(self) -> None:
        self._timer = None
        self._serve()


class Turn:
    """A request's turn, which it can leave and take again."""

    def __init__(self, turns: Turns) -> None:
        self.turns = turns
        self._caller = CALLER.get()
        self._since: float | None = None

    async def take(self) -> None:
        """Wait for it; raises ``TooBusy`` where too many wait."""
        await self.turns.enter(self._caller)
        self._since = time.monotonic()

    def leave(self) -> bool:
        """Give it back; False where it is not taken."""
        if self._since is None:
            return False
        seconds, self._since = time.monotonic() - self._since, None
        self.turns.leave(self._caller, seconds)
        return True


TURN: ContextVar[Turn | None] = ContextVar("affidavit_turn", default=None)
"""The turn of the request for which the current task works."""


def leave_turn() -> None:
    """Leave the turn of the request, which goes on without."""
    turn = TURN.get()
    if turn is not None:
        turn.leave()


@asynccontextmanager
async def outside_turn() -> AsyncIterator[None]:
    """Leave the request's turn for the length of a block."""
    turn = TURN.get()
    left = turn is not None and turn.leave()
    yield
    if turn is not None and left:
        await turn.take()


@asynccontextmanager
async def another_turn() -> AsyncIterator[None]:
    """A turn for work of a request that left its own."""
    turn = TURN.get()
    if turn is None:
        yield
    else:
        async with turn.turns.turn():
            yield
