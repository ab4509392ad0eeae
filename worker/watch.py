"""Watch: what happens to a run from outside while it trains, and how far it may go.

The record is read as it grows. The lease is renewed every third of its length, and sooner
where the trainer is about to need more steps than it was granted: it is granted what it
does in two thirds of a lease, and at least ``LEAST`` steps. No step is asked for before the
record names a checkpoint, so that whoever goes on with the run has something to go on from.
"""

from __future__ import annotations

import math
import re
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from affidavit.worker import executor
from affidavit.worker.handover import has_checkpoint
from affidavit.worker.queue import Job, LeaseLost, Queue, Refused, Renewal, Unreachable

LEAST = 2
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
    _ready_at: float | None = None
    _heads: list[str] = field(default_factory=list)
    _began: float = field(default_factory=time.monotonic)
    _renewed: float = field(default_factory=time.monotonic)
    _read: int = 0

    def __call__(self) -> executor.Stop | None:
        """What to do with the trainer now."""
        now, limit = time.monotonic(), self.job.time_limit
        self._see()
        if now - self._renewed > self.lease / 3 or self._is_short(now):
            self.renew()
        if self.lost is not None:
            return "kill"
        if self.reason is None and limit is not None and now - self._began > limit:
            self.reason = "time_limit"
        return None if self.reason is None else "ask"

    def renew(self) -> None:
        """Say how far the run is, and hear how far it may go."""
        self._see()
        now = time.monotonic()
        wants = 0 if self._ready_at is None else self.steps + self._ahead(now)
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
        if said.cancel and self.reason is None:
            self.reason = "cancelled"
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
