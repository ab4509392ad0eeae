"""A run's events as server-sent events, with the ε spent so far.

An event is ``state`` (a numbered event of the run) or ``progress`` (the steps so far and their
cost). Its id is ``SEQ-STEPS``: the last numbered event and the last reported step. A client that
reconnects with its last id receives every ``state`` exactly once, and ``progress`` if there was
any.

A stream polls the run, because any process may change it. It ends after the event that ended the
run, after ``MAX_STREAM_SECONDS`` so that authentication is repeated, and when the service stops. A
comment every ``KEEPALIVE_SECONDS`` keeps the connection open.

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
from affidavit.service.core.errors import AccountingUnavailable, DomainError
from affidavit.service.ledger.service import LedgerService
from affidavit.service.ledger.state import charge_of
from affidavit.service.runs.queue import RunQueue
from affidavit.service.runs.repository import StoredRun, round_up_steps

KEEPALIVE_SECONDS = 15.0
MAX_STREAM_SECONDS = 300.0
RETRY_MS = 2000
EVENT_ID_PATTERN = r"^(0|[1-9][0-9]{0,8})-(0|[1-9][0-9]{0,9})$"
POLL_SECONDS = 1.0
MAX_WATCHERS = 100
"""Streams of one process."""
MAX_WATCHERS_EACH = 50
"""Streams of one caller in one process."""
ACCOUNTING_SECONDS = 10.0
"""Time limit of the accounting; if it is exceeded, progress omits the cost."""

log = logging.getLogger("affidavit.service.runs")


class EventId(NamedTuple):
    """The part of a run that a client has seen."""

    seq: int = 0
    steps: int = 0

    @classmethod
    def read(cls, text: str) -> Self:
        """Parse an id that matches ``EVENT_ID_PATTERN``."""
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

    def is_full_for(self, caller: str) -> bool:
        """Return whether the caller cannot open another stream in this process."""
        watchers = self._watchers
        return watchers.total() >= MAX_WATCHERS or watchers[caller] >= MAX_WATCHERS_EACH

    def stop(self) -> None:
        """End every stream."""
        self._stopping = True

    def is_over(self, run_id: str, last: EventId) -> bool:
        """Return whether the run has ended and all events were sent; raises ``UnknownRun``."""
        run = self._queue.find(run_id)
        return run.has_ended and last.seq >= run.events[-1].seq

    async def stream(self, run_id: str, last: EventId, caller: str) -> AsyncIterator[bytes]:
        """Yield the events of a run after ``last``, for ``caller``."""
        began = sent_at = time.monotonic()
        self._watchers[caller] += 1
        try:
            yield f"retry: {RETRY_MS}\n\n".encode()
            while not self._stopping and time.monotonic() - began < MAX_STREAM_SECONDS:
                try:
                    run = await run_in_threadpool(self._queue.find, run_id)
                except SQLAlchemyError as error:
                    log.warning("watched runs cannot be read now: %s", error)
                else:
                    async for event_id, kind, data in self._new_events(run, last):
                        last, sent_at = event_id, time.monotonic()
                        # Escaped to ASCII, so that it contains no line end.
                        text = json.dumps(data.model_dump(mode="json"))
                        yield f"id: {event_id}\nevent: {kind}\ndata: {text}\n\n".encode("ascii")
                    if run.has_ended:
                        return
                if time.monotonic() - sent_at > KEEPALIVE_SECONDS:
                    sent_at = time.monotonic()
                    yield b": \n\n"
                await asyncio.sleep(POLL_SECONDS)
        finally:
            self._watchers[caller] -= 1
            self._watchers += Counter()  # removes callers without streams

    async def _new_events(
        self, run: StoredRun, last: EventId
    ) -> AsyncIterator[tuple[EventId, str, ResponseModel]]:
        """Yield the events after ``last``: states, progress, and the end."""
        steps = max([run.steps.reported, *(attempt.granted for attempt in run.attempts)])
        before = run.events[:-1] if run.has_ended else run.events
        for event in before:
            if event.seq > last.seq:
                last = last._replace(seq=event.seq)
                yield last, "state", event
        if run.has_begun and steps > last.steps:
            last = last._replace(steps=steps)
            yield last, "progress", await self.progress(run, steps)
        for event in run.events[len(before) :]:
            if event.seq > last.seq:
                yield last._replace(seq=event.seq), "state", event

    async def progress(self, run: StoredRun, steps: int) -> RunProgress:
        """Return the cost of ``steps`` steps, rounded up."""
        charged, spent = round_up_steps(steps, run.steps.certified), None
        with suppress(AccountingUnavailable, DomainError, TimeoutError):
            async with asyncio.timeout(ACCOUNTING_SECONDS):
                find = self._ledger.store.reservation
                reservation = await run_in_threadpool(find, run.reservation)
                cost = await self._ledger.cost_of_steps(reservation, charged)
                charge = charge_of(reservation.cost if cost is None else cost)
                spent = StepsSpent(steps=charged, epsilon=charge.epsilon, delta=charge.delta)
        return RunProgress(steps=steps, certified=run.steps.certified, spent=spent)
