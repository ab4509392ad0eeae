"""Slots: how many runs a worker does at once, each in a thread that asks for the next.

The first SIGTERM or SIGINT lets runs that began come to their end, because a run that is broken
off is charged in full; no other is claimed. A second one ends the worker, and its trainers.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, field

from affidavit.worker.job import Site, work
from affidavit.worker.queue import LeaseLost, Refused, Unreachable, Wanting

log = logging.getLogger("affidavit.worker")

WAIT = 2.0
LONGEST_WAIT = 30.0

REFUSED = 2
UNREACHABLE = 3


@dataclass(frozen=True, kw_only=True)
class Slots:
    """The slots of one worker; with ``once`` they end as soon as nothing waits."""

    site: Site
    wanting: Wanting
    count: int
    wait: float = WAIT
    once: bool = False
    codes: set[int] = field(default_factory=set)

    def run(self, stop: threading.Event) -> int:
        """Work until ``stop`` is set, or once nothing waits where ``once`` is; the exit code.

        It is ``REFUSED`` where the service takes nothing from this worker, and ``UNREACHABLE``
        where it could not be asked for long and ``once`` is set.
        """
        threads = [
            threading.Thread(target=self._slot, args=(stop,), name=f"slot {number}")
            for number in range(self.count)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            # Not without end: a signal that another thread took is handled when this one wakes.
            while thread.is_alive():
                thread.join(0.5)
        return max(self.codes, default=0)

    def _slot(self, stop: threading.Event) -> None:
        wait = self.wait
        while not stop.is_set():
            try:
                job = self.site.source.claim(self.wanting)
            except (Unreachable, LeaseLost) as error:
                log.warning("no run can be claimed now: %s", error)
                if self.once and wait >= LONGEST_WAIT:
                    self.codes.add(UNREACHABLE)
                    return
                stop.wait(wait)
                wait = min(2 * wait, LONGEST_WAIT)
                continue
            except Refused as error:
                log.error("no run can be claimed: %s: %s", error.code, error)
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
                log.info("run %s: %s", job.run, work(self.site, job))
            except LeaseLost as error:
                log.warning("run %s: the lease is lost, nothing is reported: %s", job.run, error)
            except Refused as error:
                log.error("run %s: %s: %s", job.run, error.code, error)
            except Exception:
                # One run's fault must not end the slot; its lease will run out.
                log.exception("run %s: an error of the worker", job.run)
