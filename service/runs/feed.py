"""A run's events as they happen, in the form of server-sent events.

An event is ``state`` (a numbered event of the run) or ``progress`` (steps so far, and what they
have spent). Its id is ``SEQ-STEPS``, the last numbered event and the steps reported by then:
whoever comes back with the last id that they saw misses no ``state``, gets none twice, and is
told of progress if there was any.

The stream ends after the event that ended the run; after ``LONGEST`` seconds, so that whoever
comes back is asked again who they are; and when the service stops. A comment every ``QUIET``
seconds keeps the connection open.

References: WHATWG HTML, section 9.2, "Server-sent events".

>>> Place.read("3-120")
Place(seq=3, steps=120)
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Any, Self

from sqlalchemy.exc import SQLAlchemyError
from starlette.concurrency import run_in_threadpool

from affidavit.service.runs.document import event_document
from affidavit.service.runs.queue import RunQueue
from affidavit.service.runs.rows import ENDED, STATES, Happened, Run
from affidavit.service.runs.spent import Spending
from affidavit.service.runs.watching import Sight, Watching

QUIET = 15.0
LONGEST = 300.0
RETRY_MS = 2000
ID_PATTERN = r"^(0|[1-9][0-9]{0,8})-(0|[1-9][0-9]{0,9})$"


@dataclass(frozen=True, slots=True)
class Place:
    """How much of a run somebody was told."""

    seq: int = 0
    steps: int = 0

    @classmethod
    def read(cls, text: str) -> Self:
        """The place that an event's id is; ``text`` matches ``ID_PATTERN``."""
        seq, steps = text.split("-")
        return cls(int(seq), int(steps))

    def __str__(self) -> str:
        return f"{self.seq}-{self.steps}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Feed:
    """The events of runs, for as many as watch."""

    queue: RunQueue
    watching: Watching
    spending: Spending

    def is_over(self, run_id: str, told: Place) -> bool:
        """Whether the run has ended and everything about it was told; raises ``UnknownRun``."""
        run, happened = self.queue.history(run_id)
        return run.state in ENDED and told.seq >= happened[-1].seq

    async def events(self, run_id: str, told: Place) -> AsyncIterator[bytes]:
        """What happens to a run that is watched, from ``told`` on."""
        end = time.monotonic() + LONGEST
        known: Sight | None = None
        yield f"retry: {RETRY_MS}\n\n".encode()
        while not self.watching.stopping and (left := end - time.monotonic()) > 0:
            seen = await self.watching.change(run_id, known, min(QUIET, left))
            if seen is None:
                yield b": \n\n"
                continue
            known = seen
            try:
                run, happened = await run_in_threadpool(self.queue.history, run_id)
            except SQLAlchemyError:
                known = None  # looked at again once the database answers
                continue
            async for place, kind, data in self._news(run, happened, told):
                told = place
                yield _framed(place, kind, data)
            if run.state in ENDED:
                return

    async def _news(
        self, run: Run, happened: list[Happened], told: Place
    ) -> AsyncIterator[tuple[Place, str, dict[str, Any]]]:
        """What ``told`` does not cover: how the run went, how far it is, and how it ended."""
        state, steps = "queued", _steps_of(run)
        for item in happened:
            state = STATES.get(item.kind, state)
            if item.kind in ENDED and run.begun and steps > told.steps:
                told = replace(told, steps=steps)
                yield told, "progress", await self._progress(run, steps)
            if item.seq > told.seq:
                told = replace(told, seq=item.seq)
                yield told, "state", event_document(item, state)
        if run.begun and steps > told.steps:
            yield replace(told, steps=steps), "progress", await self._progress(run, steps)

    async def _progress(self, run: Run, steps: int) -> dict[str, Any]:
        return {
            "steps": steps,
            "certified": run.certified_steps,
            "spent": await self.spending.after(run, steps),
        }


def _steps_of(run: Run) -> int:
    """The steps charged so far: those reported, and all that a worker before was granted."""
    return max([run.steps, *(attempt.granted for attempt in run.attempts)])


def _framed(place: Place, kind: str, data: dict[str, Any]) -> bytes:
    # Escaped to ASCII: no text of a run can hold the line ends that part events.
    return f"id: {place}\nevent: {kind}\ndata: {json.dumps(data)}\n\n".encode("ascii")
