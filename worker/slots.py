"""Slots: the threads of a worker, each of which claims and executes one run at a time.

The first SIGTERM or SIGINT stops claiming and lets started runs finish, because an aborted run is
charged in full. The second one ends the worker and its trainers.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, field

from affidavit.worker.job import WorkerConfig, run_job
from affidavit.worker.lease import ClaimRequest, LeaseLost, Refused, Unreachable

log = logging.getLogger("affidavit.worker")

WAIT = 2.0
MAX_WAIT = 30.0

REFUSED = 2
UNREACHABLE = 3


@dataclass(frozen=True, kw_only=True)
class Slots:
    """The slots of one worker; with ``once`` they end when the queue is empty."""

    config: WorkerConfig
    request: ClaimRequest
    count: int
    wait: float = WAIT
    once: bool = False
    codes: set[int] = field(default_factory=set)

    def run(self, stop: threading.Event) -> int:
        """Work until ``stop`` is set, or with ``once`` until the queue is empty; the exit code.

        ``REFUSED`` means that the service refuses this worker; ``UNREACHABLE`` that with ``once``
        the service could not be reached for a long time.
        """
        threads = [
            threading.Thread(target=self._slot, args=(stop,), name=f"slot {number}")
            for number in range(self.count)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            # With a timeout, because the main thread must wake up to handle signals.
            while thread.is_alive():
                thread.join(0.5)
        return max(self.codes, default=0)

    def _slot(self, stop: threading.Event) -> None:
        wait = self.wait
        while not stop.is_set():
            try:
                job = self.config.source.claim(self.request)
            except (Unreachable, LeaseLost) as error:
                log.warning("cannot claim a run at the moment: %s", error)
                if self.once and wait >= MAX_WAIT:
                    self.codes.add(UNREACHABLE)
                    return
                stop.wait(wait)
                wait = min(2 * wait, MAX_WAIT)
                continue
            except Refused as error:
                log.error("cannot claim runs: %s: %s", error.code, error)
                self.codes.add(REFUSED)
                stop.set()
                return
            wait = self.wait
            if job is None:
                if self.once:
                    return
                stop.wait(wait)
                continue
            log.info("run %s: claimed under fencing token %d", job.run, job.fence)
            try:
                log.info("run %s: %s", job.run, run_job(self.config, job))
            except LeaseLost as error:
                log.warning("run %s: the lease is lost, so nothing is reported: %s", job.run, error)
            except Refused as error:
                log.error("run %s: %s: %s", job.run, error.code, error)
            except Exception:
                # One failure must not end the slot; the lease of the run will expire.
                log.exception("run %s: internal error", job.run)
