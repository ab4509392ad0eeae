"""Watch: what happens to a run from outside while it trains, and how far it may go.

The record is read as it grows. The lease is renewed every third of its length, and sooner
where the trainer is about to need more steps than it was granted: it is granted what it
does in two thirds of a lease, and at least ``LEAST`` steps. No step is asked for before this
attempt wrote a checkpoint, so that whoever goes on with the run has something to go on from.
A time limit counts from there, and a trainer that is to stop before is asked to once it hears:
then its record ends, and says that no step was taken.
"""

from __future__ import annotations

import math
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from affidavit.worker import executor
from affidavit.worker.handover import has_checkpoint
from affidavit.worker.queue import Job, LeaseLost, Queue, Refused, Renewal, Unreachable

LEAST = 2
HEARS = 1.0
"""Seconds after its checkpoint in which a trainer comes to hear that it shall stop."""
PATIENCE = 30.0
"""Seconds for which one that is to stop is let come to its checkpoint."""
DIGEST = re.compile(rb'"digest":"(sha256:[0-9a-f]{64})"')


@dataclass
class Watch:
    """The watch over one run; ``lease`` in seconds.

    ``steps`` were charged in its record so far, ``reason`` says why it was asked to stop, and
    ``lost`` that it is not this worker's any more.
    """

    source: Queue
    job: Job
    record: Path
    allowance: Path
    lease: float
    steps: int = 0
    reason: str | None = None
    lost: LeaseLost | None = None
    _granted: int = 0
    _all: bool = False
    _over: bool = False
    _ready_at: float | None = None
    _heads: list[str] = field(default_factory=list)
    _renewed: float = field(default_factory=time.monotonic)
    _stopping_at: float = 0.0
    _read: int = 0

    def __post_init__(self) -> None:
        """Count what another worker wrote, whose checkpoint is not this attempt's."""
        self._see()
        self._ready_at = None

    def __call__(self) -> executor.Stop | None:
        """What to do with the trainer now."""
        now = time.monotonic()
        self._see()
        if now - self._renewed > self.lease / 3 or self._is_short(now):
            self.renew()
        if self.lost is not None:
            return "kill"
        if self._is_late(now):
            self._stop("time_limit")
        return "ask" if self.reason is not None and self._hears(now) else None

    def _stop(self, reason: str) -> None:
        if self.reason is None:
            self.reason, self._stopping_at = reason, time.monotonic()

    def _is_late(self, now: float) -> bool:
        limit, ready_at = self.job.time_limit, self._ready_at
        return limit is not None and ready_at is not None and now - ready_at > limit

    def _hears(self, now: float) -> bool:
        """Whether the trainer ends its record if it is asked to now, or cannot be waited for."""
        if self._ready_at is None:
            return now - self._stopping_at > PATIENCE
        return now - self._ready_at > HEARS

    @contextmanager
    def held(self) -> Iterator[None]:
        """Renew the lease now, and in a thread meanwhile: a long record takes long to be judged.

        No step is asked for any more.
        """
        self._over, done = True, threading.Event()
        self.renew()

        def renew() -> None:
            while self.lost is None and not done.wait(self.lease / 3):
                self.renew()

        thread = threading.Thread(target=renew, name=f"lease of {self.job.run}")
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def renew(self) -> None:
        """Say how far the run is, and hear how far it may go."""
        self._see()
        now = time.monotonic()
        asks = self._ready_at is not None and not self._over
        wants = self.steps + self._ahead(now) if asks else 0
        # What is on the disk for good is what another charge was written after.
        head = self._heads[0] if len(self._heads) > 1 else None
        self._renewed = now
        try:
            self._heard(self.source.renew(self.job, self.steps, wants=wants, head=head), wants)
        except LeaseLost as lost:
            self.lost = lost
        except (Unreachable, Refused):
            pass  # the lease says how long this may go on, and the allowance how far

    def _heard(self, said: Renewal, wants: int) -> None:
        if said.cancel:
            self._stop("cancelled")
        self._all = said.granted < wants
        if said.granted > self._granted and self._ready_at is not None:
            draft = self.allowance.with_suffix(".part")
            with suppress(OSError):  # a full disk: the trainer waits, and we try again
                draft.write_text(str(said.granted), "ascii")
                draft.replace(self.allowance)
                self._granted = said.granted

    def _is_short(self, now: float) -> bool:
        """Whether the trainer needs more steps soon."""
        if self._ready_at is None or self._all or self.reason is not None:
            return False
        return self._granted - self.steps <= self._ahead(now) // 2

    def _ahead(self, now: float) -> int:
        """How many steps it takes in two thirds of a lease, as it went so far."""
        if self._ready_at is None or now <= self._ready_at:
            return LEAST
        rate = max(0, self.steps - self.job.granted) / (now - self._ready_at)
        return max(LEAST, math.ceil(rate * self.lease * 2 / 3))

    def _see(self) -> None:
        """Count the steps charged in the whole lines that were written since."""
        try:
            with self.record.open("rb") as stream:
                stream.seek(self._read)
                whole = stream.read().rpartition(b"\n")[0]
        except OSError:
            return
        self._read += len(whole) + 1 if whole else 0
        if self._ready_at is None and has_checkpoint(whole):
            self._ready_at = time.monotonic()
        charges = [line for line in whole.split(b"\n") if b'"type":"charge"' in line]
        self.steps += len(charges)
        for line in charges[-2:]:
            if (found := DIGEST.search(line)) is not None:
                self._heads = [*self._heads, found[1].decode()][-2:]
