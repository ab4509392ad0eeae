"""A run's events as they happen, as server-sent events, with the ε spent so far.

An event is ``state`` (a numbered event of the run) or ``progress`` (steps so far, and what they
have spent). Its id is ``SEQ-STEPS``, the last numbered event and the steps reported so far: a
client that reconnects with the last id it saw misses no ``state``, gets none twice, and gets
``progress`` if there was any.

The stream ends after the event that ended the run; after ``LONGEST`` seconds, so that
authentication is repeated; and when the service stops. A comment every ``QUIET`` seconds keeps the
connection open.

A stream that asked the database by itself would cost a connection each, so one task looks for all
watched runs every ``PERIOD`` seconds (``RunWatcher``). Any process may change a run, so only the
database can tell.

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
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Self

from sqlalchemy.exc import SQLAlchemyError
from starlette.concurrency import run_in_threadpool

from affidavit.client import ResponseModel, RunCharge, RunProgress, StepsSpent
from affidavit.service.errors import AccountingUnavailable, DomainError
from affidavit.service.ledger.models import charge_of
from affidavit.service.ledger.service import LedgerService
from affidavit.service.ledger.store import LedgerStore
from affidavit.service.runs.models import event_of
from affidavit.service.runs.queue import RunQueue
from affidavit.service.runs.repository import ENDED, STATES, StoredRun, StoredRunEvent
from affidavit.service.teams import TEAM

QUIET = 15.0
LONGEST = 300.0
RETRY_MS = 2000
EVENT_ID_PATTERN = r"^(0|[1-9][0-9]{0,8})-(0|[1-9][0-9]{0,9})$"
PERIOD = 0.5
MOST_WATCHERS = 1000
"""Streams of one process."""
PARTS = 100
PATIENCE = 5.0
"""Seconds to wait for an accounting; a longer one is there at the next request."""

log = logging.getLogger("affidavit.service.runs")

Progress = tuple[int, int]
"""How far a run is: the number of its last event, and the steps that were reported."""
Look = Callable[[Collection[str]], Mapping[str, Progress]]


class RunWatcher:
    """The watched runs of one process; belongs to one event loop."""

    def __init__(self, look: Look) -> None:
        self._look = look
        self._watched: Counter[str] = Counter()
        self._seen: dict[str, Progress] = {}
        self._looked = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.stopping = False

    @property
    def full(self) -> bool:
        """Whether this process serves no more watchers."""
        return self._watched.total() >= MOST_WATCHERS

    @contextmanager
    def watched(self, run_id: str) -> Iterator[None]:
        """Watch a run."""
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

    async def change(self, run_id: str, known: Progress | None, patience: float) -> Progress | None:
        """The progress of a watched run once it differs from ``known``.

        None if it does not within ``patience`` seconds, or the process stops.
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
        TEAM.set(None)  # it looks for the watchers of every team
        while self._watched and not self.stopping:
            try:
                progress = await run_in_threadpool(self._look, tuple(self._watched))
            except SQLAlchemyError as error:
                log.warning("watched runs cannot be read now: %s", error)
            else:
                self._seen = {run: progress[run] for run in self._watched if run in progress}
                self._wake()
            await asyncio.sleep(PERIOD)


class PrivacySpent:
    """ε of the steps that a run reported so far; belongs to one event loop.

    Steps are rounded up to the next hundredth of the certified ones, so that ε is never less than
    what was spent, and a run costs at most a hundred accountings, whoever watches. Runs that are
    charged in full once a step was run have spent everything with their first step.
    """

    def __init__(self, ledger: LedgerService, ledger_store: LedgerStore) -> None:
        self._ledger = ledger
        self._ledger_store = ledger_store
        self._tasks: dict[tuple[str, int], asyncio.Task[RunCharge | None]] = {}

    async def after(self, run: StoredRun, steps: int) -> StepsSpent | None:
        """ε and δ of ``steps`` steps; None if not known yet."""
        rounded = rounded_up(steps, run.certified_steps)
        key = (run.reservation_id, rounded)
        task = self._tasks.get(key)
        if task is None:
            task = self._tasks[key] = asyncio.create_task(self._charge(*key))
            task.add_done_callback(lambda _: self._tasks.pop(key))
        done, _ = await asyncio.wait([task], timeout=PATIENCE)
        charge = task.result() if done else None
        if charge is None:
            return None
        return StepsSpent(steps=rounded, epsilon=charge.epsilon, delta=charge.delta)

    async def _charge(self, reservation_id: str, steps: int) -> RunCharge | None:
        try:
            reservation = await run_in_threadpool(self._ledger_store.reservation, reservation_id)
            cost = await self._ledger.cost_of_steps(reservation, steps)
        except (AccountingUnavailable, DomainError):
            return None
        return charge_of(reservation.cost if cost is None else cost)


def rounded_up(steps: int, certified: int) -> int:
    """``steps`` rounded up to a hundredth of ``certified``, in whole steps.

    >>> [rounded_up(steps, 1000) for steps in (0, 1, 10, 11, 995, 1000, 2000)]
    [0, 10, 10, 20, 1000, 1000, 1000]
    >>> rounded_up(7, 50)
    7
    """
    part = max(1, certified // PARTS)
    return min(certified, -(-steps // part) * part)


@dataclass(frozen=True, slots=True)
class EventId:
    """How much of a run a client has seen."""

    seq: int = 0
    steps: int = 0

    @classmethod
    def read(cls, text: str) -> Self:
        """Parse an id; ``text`` matches ``EVENT_ID_PATTERN``."""
        seq, steps = text.split("-")
        return cls(int(seq), int(steps))

    def __str__(self) -> str:
        return f"{self.seq}-{self.steps}"


@dataclass(frozen=True, kw_only=True, slots=True)
class RunEvents:
    """The events of runs, for any number of clients."""

    queue: RunQueue
    watcher: RunWatcher
    privacy_spent: PrivacySpent

    def is_over(self, run_id: str, last: EventId) -> bool:
        """Whether the run has ended and all its events were sent; raises ``UnknownRun``."""
        run, history = self.queue.history(run_id)
        return run.state in ENDED and last.seq >= history[-1].seq

    async def stream(self, run_id: str, last: EventId) -> AsyncIterator[bytes]:
        """The events of a watched run after ``last``."""
        end = time.monotonic() + LONGEST
        known: Progress | None = None
        yield f"retry: {RETRY_MS}\n\n".encode()
        while not self.watcher.stopping and (left := end - time.monotonic()) > 0:
            seen = await self.watcher.change(run_id, known, min(QUIET, left))
            if seen is None:
                yield b": \n\n"
                continue
            known = seen
            try:
                run, history = await run_in_threadpool(self.queue.history, run_id)
            except SQLAlchemyError:
                known = None  # looked at again once the database answers
                continue
            async for event_id, kind, data in self._news(run, history, last):
                last = event_id
                yield _framed(event_id, kind, data)
            if run.state in ENDED:
                return

    async def _news(
        self, run: StoredRun, history: list[StoredRunEvent], last: EventId
    ) -> AsyncIterator[tuple[EventId, str, ResponseModel]]:
        """What came after ``last``: states, progress, and the end."""
        state, steps = "queued", _steps_of(run)
        for event in history:
            state = STATES.get(event.kind, state)
            if event.kind in ENDED and run.begun and steps > last.steps:
                last = replace(last, steps=steps)
                yield last, "progress", await self._progress(run, steps)
            if event.seq > last.seq:
                last = replace(last, seq=event.seq)
                yield last, "state", event_of(event, state)
        if run.begun and steps > last.steps:
            yield replace(last, steps=steps), "progress", await self._progress(run, steps)

    async def _progress(self, run: StoredRun, steps: int) -> RunProgress:
        spent = await self.privacy_spent.after(run, steps)
        return RunProgress(steps=steps, certified=run.certified_steps, spent=spent)


def _steps_of(run: StoredRun) -> int:
    """The steps charged so far: those reported, and all that a worker before was granted."""
    return max([run.steps, *(attempt.granted for attempt in run.attempts)])


def _framed(event_id: EventId, kind: str, data: ResponseModel) -> bytes:
    # Escaped to ASCII: no text of a run can hold the line ends that separate events.
    text = json.dumps(data.model_dump(mode="json"))
    return f"id: {event_id}\nevent: {kind}\ndata: {text}\n\n".encode("ascii")
