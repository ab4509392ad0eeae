"""The loop that compares runs with the engine's jobs, and reservations with their age.

A run is committed first and handed over afterwards, by whichever process looks next: one that dies
in between loses nothing, and two that hand over the same run submit the same job. The engine's
word only decides how soon a lost worker's run goes on. What may be charged and trained is decided
by the lease: a job that an engine lost, doubled or revived holds no lease, and is refused.

=======================  =======================  =========================================
lease                    job                      what follows
=======================  =======================  =========================================
waits                    unknown                  it is submitted
waits                    waits or runs            nothing: it is about to claim the run
waits                    runs, and lost its       it is cancelled, and another is submitted
                         lease
waits                    ended                    another is submitted; given up after a
                                                  few that never claimed the run
held by the job          ended                    the lease is lost
held                     anything else            nothing: the lease ends by itself
over, and expired        waits or runs            it is cancelled
the run has a later job  waits or runs            it is cancelled
=======================  =======================  =========================================
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import Engine as Database
from sqlalchemy import Row, or_, select
from sqlalchemy.exc import SQLAlchemyError

from affidavit.service.command import CommandContext
from affidavit.service.database import reader, writer
from affidavit.service.dispatch.admission_check import AdmissionCheck
from affidavit.service.dispatch.engine import (
    JOB,
    Engine,
    EngineUnavailable,
    Job,
    JobState,
    job_id_of,
    others_go_on,
)
from affidavit.service.ledger.expiry import expire_reservations
from affidavit.service.runs.locked_run import LockedRun
from affidavit.service.runs.queue import RunQueue
from affidavit.service.runs.repository import StoredRun
from affidavit.service.runs.run_tables import run_leases

PERIOD = 2.0
"""Seconds between two rounds."""
EXPIRY_PERIOD = 600.0
MOST_WAITING = 500
"""Runs that are handed over before they are claimed, the oldest first."""
ACTOR = "service:dispatcher"

log = logging.getLogger("affidavit.service.dispatch")


class Dispatcher:
    """The loop of one process; without an engine it only ends leases and reservations."""

    def __init__(
        self,
        database: Database,
        engine: Engine | None,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
        admission: AdmissionCheck | None = None,
    ) -> None:
        self._now, self._admission = now, admission
        self._reader = reader(database)
        self._writer = writer(database)
        self._queue = RunQueue(database)
        self.engine = engine
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to look, in a thread."""
        self._thread = threading.Thread(target=self._loop, name="dispatcher", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread after its round."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()

    def page(self, run: StoredRun) -> str | None:
        """A URL of the engine's dashboard about the latest job of a run."""
        return None if self.engine is None else self.engine.page(job_id_of(run.id, run.job))

    def _loop(self) -> None:
        rounds = 0
        while not self._stopping.wait(PERIOD):
            try:
                if rounds * PERIOD % EXPIRY_PERIOD == 0:
                    expire_reservations(self._writer, self._reader, self._now())
                self.reconcile(self._now())
            except (EngineUnavailable, SQLAlchemyError) as error:
                log.warning("runs cannot be dispatched now: %s", error)
            except Exception:
                log.exception("dispatching failed")
            rounds += 1

    def reconcile(self, at: datetime) -> None:
        """Compare once; raises ``EngineUnavailable``."""
        call = CommandContext(actor=ACTOR, at=at)
        self._queue.reap(call)
        if self.engine is None:
            return
        jobs = self.engine.jobs()  # before the leases: what has ended cannot hold one afterwards
        leases = self._open_leases()
        for lease in leases:
            with others_go_on():
                self._compare(self.engine, lease, jobs, call)
        numbers = {lease.run_id: lease.job for lease in leases}
        for job_id in self._needless(jobs, numbers, at):
            with others_go_on():
                self.engine.cancel(job_id)
        if self._admission is not None:
            self._admission.round(at)

    def _open_leases(self) -> list[Row[Any]]:
        """Those that workers hold, and of those that wait the oldest."""
        table = run_leases.c
        held = select(run_leases).where(table.state.in_(["claimed", "running"]))
        waiting = select(run_leases).where(table.state == "queued").order_by(table.requested_at)
        with self._reader.connect() as connection:
            return [*connection.execute(held), *connection.execute(waiting.limit(MOST_WAITING))]

    def _compare(
        self, engine: Engine, lease: Row[Any], jobs: Mapping[str, JobState], call: CommandContext
    ) -> None:
        job_id = job_id_of(lease.run_id, lease.job)
        state, claimed = jobs.get(job_id), lease.worker == job_id
        if lease.state != "queued":
            if state == "ended" and claimed:
                why = f"its job {job_id} ended."
                self._queue.change(lease.run_id, call, LockedRun.lose, lease.fence, why)
            return
        if state in ("waiting", "running") and not claimed:
            return
        run: StoredRun | None = self._queue.find(lease.run_id)
        if state is not None:
            if state != "ended":
                engine.cancel(job_id)
            run = self._queue.change(lease.run_id, call, LockedRun.next_job, lease.job)
        if run is not None and run.state == "queued":
            engine.submit(Job(run=run.id, number=run.job, queue=run.queue, **run.requirements))

    def _needless(
        self, jobs: Mapping[str, JobState], numbers: Mapping[str, int], at: datetime
    ) -> list[str]:
        """The jobs that no run needs: earlier ones of a run, and those of one long over."""
        ours = (JOB.fullmatch(job_id) for job_id, state in jobs.items() if state != "ended")
        active = [(match[0], match[1], int(match[2])) for match in ours if match is not None]
        lease = run_leases.c
        # The worker of a run that just ended is about to end by itself.
        over = select(lease.run_id).where(
            lease.state == "ended",
            or_(lease.expires_at.is_(None), lease.expires_at < at),
            lease.run_id.in_([run for _, run, _ in active if run not in numbers]),
        )
        with self._reader.connect() as connection:
            ended = set(connection.execute(over).scalars())
        return [
            job_id
            for job_id, run, number in active
            if run in ended or number < numbers.get(run, number)
        ]
