"""The heartbeat of a run: renew its lease, request steps for the trainer, and enforce limits.

The run record is read as it grows. The lease is renewed every third of its length, and earlier if
the trainer needs steps: each request covers two thirds of a lease, and at least ``MIN_STEPS``. No
step is requested before this attempt has written a checkpoint, from which another worker can
resume. The time limit counts from that checkpoint. A trainer that is stopped earlier ends its
record, which shows that it took no step.
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
from affidavit.worker.lease import Job, LeaseLost, Refused
from affidavit.worker.service_client import RunQueueClient
from affidavit.worker.trainer_process import Stop

MIN_STEPS = 2
DIGEST = re.compile(rb'"digest":"(sha256:[0-9a-f]{64})"')


@contextmanager
def renew_in_background(renew: Callable[[], object], lease: float) -> Iterator[None]:
    """Renew a lease of ``lease`` seconds in a thread during the block."""
    done = threading.Event()

    def repeat() -> None:
        while not done.wait(lease / 3):
            with suppress(LeaseLost, Refused, Unreachable):  # the caller's next request fails
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

    ``steps`` counts the steps charged in the record, ``reason`` says why the trainer must stop, and
    ``lost`` is set when another worker holds the run.
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
    _first_digest: str | None = None
    _last_digests: list[str] = field(default_factory=list)
    _renewed_at: float = field(default_factory=time.monotonic)
    _bytes_read: int = 0

    def __post_init__(self) -> None:
        """Count the steps of an earlier attempt, and ignore its checkpoint."""
        self._read_record()
        self._ready_at = None

    def __call__(self) -> Stop | None:
        """Return how to stop the trainer now, or None."""
        now = time.monotonic()
        self._read_record()
        if now - self._renewed_at > self.lease / 3 or self._needs_steps(now):
            self.renew()
        if self.lost is not None:
            return "kill"
        limit = self.job.time_limit
        if limit is not None and self._ready_at is not None and now - self._ready_at > limit:
            self.reason = self.reason or "time_limit"
        return None if self.reason is None else "ask"

    def keep_alive(self) -> AbstractContextManager[None]:
        """Renew the lease during the block, in which a record is checked, and request no steps."""
        self._finished = True
        self.renew()
        return renew_in_background(self.renew, self.lease)

    def renew(self) -> None:
        """Report progress, and receive the number of steps that the trainer may charge."""
        self._read_record()
        now = time.monotonic()
        requests_steps = self._ready_at is not None and not self._finished
        wants = self.steps + self._steps_ahead(now) if requests_steps else 0
        # A charge is durable when a later one is written, the first line when a checkpoint is.
        # The service logs the first line before it grants a step.
        if len(self._last_digests) > 1:
            head: str | None = self._last_digests[0]
        else:
            head = self._first_digest if requests_steps else None
        self._renewed_at = now
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

    def _needs_steps(self, now: float) -> bool:
        """Whether the trainer will soon run out of granted steps."""
        if self._ready_at is None or self._exhausted or self.reason is not None:
            return False
        return self._granted - self.steps <= self._steps_ahead(now) // 2

    def _steps_ahead(self, now: float) -> int:
        """Return the steps of two thirds of a lease at the present rate."""
        if self._ready_at is None or now <= self._ready_at:
            return MIN_STEPS
        rate = max(0, self.steps - self.job.granted) / (now - self._ready_at)
        return max(MIN_STEPS, math.ceil(rate * self.lease * 2 / 3))

    def _read_record(self) -> None:
        """Count the steps charged in the complete lines since the last read."""
        try:
            with self.record.open("rb") as stream:
                stream.seek(self._bytes_read)
                text = stream.read().rpartition(b"\n")[0]
        except OSError:
            return
        if self._bytes_read == 0 and (match := DIGEST.search(text.partition(b"\n")[0])) is not None:
            self._first_digest = match[1].decode()
        self._bytes_read += len(text) + 1 if text else 0
        if self._ready_at is None and has_checkpoint(text):
            self._ready_at = time.monotonic()
        charges = [line for line in text.split(b"\n") if b'"type":"charge"' in line]
        self.steps += len(charges)
        for line in charges[-2:]:
            if (match := DIGEST.search(line)) is not None:
                self._last_digests = [*self._last_digests, match[1].decode()][-2:]


def has_checkpoint(record: bytes) -> bool:
    """Whether the record names a checkpoint."""
    return b'"type":"checkpoint"' in record
