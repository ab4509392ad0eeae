"""Turns of requests at the service's own process, which one caller's requests would fill.

A request takes its turn once its caller is known. It leaves it while it waits for what takes no
processor (its body, accounting, a client that reads slowly), so that nobody holds one for long.
A caller alone has nearly all turns. Beside others of late it has a part of them, and
a share of the time once it used ``BURST``: whoever comes next finds the process nearly free.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from contextvars import ContextVar

from affidavit.service.fair_queue import CALLER, NOBODY, FairQueue, Use

TURNS = 32
"""Requests at a time; the service has a few more threads."""
LATELY = 5.0
"""Callers of as many seconds share them."""
BURST, SHARE = 1.0, 0.25
"""Seconds that a caller may use beside others at once, and of each second then."""
MOST_WAITING = 1024


class Turns(FairQueue):
    """The turns of one process, for up to ``at_once`` requests of each caller."""

    def __init__(self, at_once: int) -> None:
        super().__init__(TURNS, most_waiting=max(MOST_WAITING, at_once), most_waiting_each=at_once)
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
        share = max(1, TURNS // len(self._seen))
        return self._running[caller] < share and self._use.of(caller) <= BURST

    def _serve(self) -> None:
        super()._serve()
        if self._waiting and self._free and self._timer is None:
            rests = ((self._use.of(caller) - BURST) / SHARE for caller in self._waiting)
            seconds = min((rest for rest in rests if rest > 0), default=None)
            if seconds is not None:
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
