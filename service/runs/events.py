"""A run's events as they happen, as server-sent events, with the ε spent so far.

An event is ``state`` (a numbered event of the run) or ``progress`` (steps so far, and what they
have spent). Its id is ``SEQ-STEPS``, the last numbered event and the steps reported so far: a
client that reconnects with the last id it saw misses no ``state``, gets none twice, and gets
``progress`` if there was any.

A stream reads the run every ``PERIOD`` seconds, because any process may change it. It ends after
the event that ended the run; after ``LONGEST`` seconds, so that authentication is repeated; and
when the service stops. A comment every ``QUIET`` seconds keeps the connection open.

References: WHATWG HTML, section 9.2, "Server-sent events".

>>> EventId.read("3-120")
EventId(seq=3, steps=120)
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import NamedTuple, Self

from sqlalchemy.exc import SQLAlchemyError
from starlette.concurrency import run_in_threadpool

from affidavit.client import ResponseModel, RunProgress, StepsSpent
from affidavit.service.errors import AccountingUnavailable, DomainError
from affidavit.service.ledger.models import charge_of
from affidavit.service.ledger.service import LedgerService
from affidavit.service.runs.models import event_of
from affidavit.service.runs.queue import RunQueue
from affidavit.service.runs.repository import ENDED, STATES, StoredRun, rounded_up

QUIET = 15.0
LONGEST = 300.0
RETRY_MS = 2000
EVENT_ID_PATTERN = r"^(0|[1-9][0-9]{0,8})-(0|[1-9][0-9]{0,9})$"
PERIOD = 1.0
MAX_WATCHERS = 100
"""Streams of one process."""
MAX_WATCHERS_EACH = 50
"""Those of one caller, so that nobody takes them all."""
PATIENCE = 10.0
"""Seconds to wait for an accounting; progress does not say what was spent if one takes longer."""

log = logging.getLogger("affidavit.service.runs")


class EventId(NamedTuple):
    """How much of a run a client has seen."""

    seq: int = 0
    steps: int = 0

    @classmethod
    def read(cls, text: str) -> Self:
        """Parse an id; ``text`` matches ``EVENT_ID_PATTERN``."""
        return cls(*map(int, text.split("-")))

    def __str__(self) -> str:
        return f"{self.seq}-{self.steps}"


class RunEvents:
    """The streams of one process; belongs to one event loop."""

    def __init__(self, queue: RunQueue, ledger: LedgerService) -> None:
        self._queue = queue
        self._ledger = ledger
        self._watchers: Counter[str] = Counter()
        self._stopping = False

    def full_for(self, caller: str) -> bool:
        """Whether this process serves that caller no more streams."""
        watchers = self._watchers
        return watchers.total() >= MAX_WATCHERS or watchers[caller] >= MAX_WATCHERS_EACH

    def stop(self) -> None:
        """Let every stream come to its end."""
        self._stopping = True

    def is_over(self, run_id: str, last: EventId) -> bool:
        """Whether the run has ended and all its events were sent; raises ``UnknownRun``."""
        run = self._queue.find(run_id)
        return run.state in ENDED and last.seq >= run.events[-1].seq

    async def stream(self, run_id: str, last: EventId, caller: str) -> AsyncIterator[bytes]:
        """The events of a run after ``last``, for ``caller``."""
        began = quiet_since = time.monotonic()
        self._watchers[caller] += 1
        try:
            yield f"retry: {RETRY_MS}\n\n".encode()
            while not self._stopping and time.monotonic() - began < LONGEST:
                try:
                    run = await run_in_threadpool(self._queue.find, run_id)
                except SQLAlchemyError as error:
                    log.warning("watched runs cannot be read now: %s", error)
                else:
                    async for event_id, kind, data in self._news(run, last):
                        last, quiet_since = event_id, time.monotonic()
                        # Escaped to ASCII, so that it holds none of the line ends between events.
                        text = json.dumps(data.model_dump(mode="json"))
                        yield f"id: {event_id}\nevent: {kind}\ndata: {text}\n\n".encode("ascii")
                    if run.state in ENDED:
                        return
                if time.monotonic() - quiet_since > QUIET:
                    quiet_since = time.monotonic()
                    yield b": \n\n"
                await asyncio.sleep(PERIOD)
        finally:
            self._watchers[caller] -= 1
            self._watchers += Counter()  # forget whoever has none

    async def _news(
        self, run: StoredRun, last: EventId
    ) -> AsyncIterator[tuple[EventId, str, ResponseModel]]:
        """What came after ``last``: states, progress, and the end."""
        state, steps = "queued", max([run.steps, *(attempt.granted for attempt in run.attempts)])
        end = run.events[-1:] if run.state in ENDED else ()
        for event in run.events[: len(run.events) - len(end)]:
            state = STATES.get(event.kind, state)
            if event.seq > last.seq:
                last = last._replace(seq=event.seq)
                yield last, "state", event_of(event, state)
        if run.begun and steps > last.steps:
            last = last._replace(steps=steps)
            yield last, "progress", await self.progress(run, steps)
        for event in end:
            if event.seq > last.seq:
                yield last._replace(seq=event.seq), "state", event_of(event, run.state)

    async def progress(self, run: StoredRun, steps: int) -> RunProgress:
        """What ``steps`` steps have spent; that of all where the first one is charged in full."""
        counted, spent = rounded_up(steps, run.certified_steps), None
        with suppress(AccountingUnavailable, DomainError, TimeoutError):
            async with asyncio.timeout(PATIENCE):
                find = self._ledger.store.reservation
                reservation = await run_in_threadpool(find, run.reservation_id)
                cost = await self._ledger.cost_of_steps(reservation, counted)
                charge = charge_of(reservation.cost if cost is None else cost)
                spent = StepsSpent(steps=counted, epsilon=charge.epsilon, delta=charge.delta)
        return RunProgress(steps=steps, certified=run.certified_steps, spent=spent)
