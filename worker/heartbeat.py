"""The heartbeat of a run: renew its lease, request steps for the trainer, and enforce limits.

The run record is read as it grows. The lease is renewed every third of its length, and sooner if
the trainer is about to run out of granted steps: each request is for the steps of two thirds of a
lease, and at least ``MIN_STEPS``. No step is requested before this attempt wrote a checkpoint, so
that another worker always has something to resume from. The time limit counts from that
checkpoint. A trainer that must stop earlier ends its record, which shows that no step was taken.
"""

from __future__ import annotations

import math
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from affidavit.client import Unreachable
from affidavit.worker.checkpoint_transfer import has_checkpoint
from affidavit.worker.lease import Job, LeaseLost, Refused
from affidavit.worker.service_client import RunQueueClient
from affidavit.worker.trainer_process import Stop

MIN_STEPS = 2
DIGEST = re.compile(rb'"digest":"(sha256:[0-9a-f]{64})"')


@contextmanager
def renewing(renew: Callable[[], object], lease: float) -> Iterator[None]:
    """Renew a lease of so many seconds from a thread, whatever else takes long meanwhile."""
    done = threading.Event()

    def repeat() -> None:
        while not done.wait(lease / 3):
            with suppress(LeaseLost, Refused, Unreachable):  # what comes after it learns of it
                renew()

    thread = threading.Thread(target=repeat, name="lease")
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


@dataclass
class Heartbeat:
    """The heartbeat of one run; ``lease`` is in seconds.

    ``steps`` counts the steps charged in the record so far, ``reason`` is why the trainer was
    asked to stop, and ``lost`` is set once another worker holds the run.
    """

    source: RunQueueClient
    job: Job
    record: Path
    allowance: Path
    lease: float
    steps: int = 0
    reason: str | None = None
    lost: LeaseLost | None = None
    _granted: int = 0
    _exhausted: bool = False
    _finished: bool = False
    _ready_at: float | None = None
    _first: str | None = None
    _heads: list[str] = field(default_factory=list)
    _renewed: float = field(default_factory=time.monotonic)
    _offset: int = 0

    def __post_init__(self) -> None:
        """Count the steps of an earlier attempt, whose checkpoint is not this attempt's."""
        self._read_record()
        self._ready_at = None

    def __call__(self) -> Stop | None:
        """Whether to stop the trainer now, and how."""
        now = time.monotonic()
        self._read_record()
        if now - self._renewed > self.lease / 3 or self._is_short(now):
            self.renew()
        if self.lost is not None:
            return "kill"
        limit = self.job.time_limit
        if limit is not None and self._ready_at is not None and now - self._ready_at > limit:
            self.reason = self.reason or "time_limit"
        return None if self.reason is None else "ask"

    def keep_alive(self) -> AbstractContextManager[None]:
        """Keep renewing the lease while a long record is checked; no more steps are requested."""
        self._finished = True
        self.renew()
        return renewing(self.renew, self.lease)

    def renew(self) -> None:
        """Report progress, and learn how many steps the trainer may charge."""
        self._read_record()
        now = time.monotonic()
        requests_steps = self._ready_at is not None and not self._finished
        wants = self.steps + self._ahead(now) if requests_steps else 0
        # A charge is durable once another one was written after it, the first line once a
        # checkpoint was. The service logs the first line before it grants a step.
        head = self._heads[0] if len(self._heads) > 1 else self._first if requests_steps else None
        self._renewed = now
        try:
            renewal = self.source.renew(self.job, self.steps, wants=wants, head=head)
        except LeaseLost as lost:
            self.lost = lost
            return
        except (Unreachable, Refused):
            return  # the lease and the allowance still limit the trainer
        if renewal.cancel:
            self.reason = self.reason or "cancelled"
        self._exhausted = renewal.granted < wants
        if self.reason is None and requests_steps and renewal.granted > self._granted:
            draft = self.allowance.with_suffix(".part")
            with suppress(OSError):  # disk full: the trainer waits, and we try again
                draft.write_text(str(renewal.granted), "ascii")
                draft.replace(self.allowance)
                self._granted = renewal.granted

    def _is_short(self, now: float) -> bool:
        """Whether the trainer needs more steps soon."""
        if self._ready_at is None or self._exhausted or self.reason is not None:
            return False
        return self._granted - self.steps <= self._ahead(now) // 2

    def _ahead(self, now: float) -> int:
        """Steps taken in two thirds of a lease at the present rate."""
        if self._ready_at is None or now <= self._ready_at:
            return MIN_STEPS
        rate = max(0, self.steps - self.job.granted) / (now - self._ready_at)
        return max(MIN_STEPS, math.ceil(rate * self.lease * 2 / 3))

    def _read_record(self) -> None:
        """Count the steps charged in the complete lines written since the last read."""
        try:
            with self.record.open("rb") as stream:
                stream.seek(self._offset)
                whole = stream.read().rpartition(b"\n")[0]
        except OSError:
            return
        if self._offset == 0 and (match := DIGEST.search(whole.partition(b"\n")[0])) is not None:
            self._first = match[1].decode()
        self._offset += len(whole) + 1 if whole else 0
        if self._ready_at is None and has_checkpoint(whole):
            self._ready_at = time.monotonic()
        charges = [line for line in whole.split(b"\n") if b'"type":"charge"' in line]
        self.steps += len(charges)
        for line in charges[-2:]:
            if (match := DIGEST.search(line)) is not None:
                self._heads = [*self._heads, match[1].decode()][-2:]
