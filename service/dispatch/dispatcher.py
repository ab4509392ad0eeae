"""The loop that compares runs with the engine's jobs, and reservations with their age.

A run is committed first and handed over afterwards, by whichever process looks next: one that dies
in between loses nothing, and two that hand over the same run submit the same job. The engine's
word only decides how soon a lost worker's run goes on. What may be charged and trained is decided
by the lease: a job that an engine lost, doubled or revived holds no lease, and is refused.

=====================  =======================  ===========================================
lease                  job                      what follows
=====================  =======================  ===========================================
waits                  unknown                  it is submitted
waits                  waits or runs            nothing: it is about to claim the run
waits                  runs, and lost its lease  it is cancelled, and another is submitted
waits                  ended                    another is submitted; given up after a few
                                                that never claimed the run
held by the job        ended                    the lease is lost
held                   anything else            nothing: the lease ends by itself
over, or another job   waits, or is another's   it is cancelled
=====================  =======================  ===========================================
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from sqlalchemy import Connection, or_, select
from sqlalchemy import Engine as Database
from sqlalchemy.exc import SQLAlchemyError

from affidavit.service.command import CommandContext
from affidavit.service.database import reader, writer
from affidavit.service.dispatch.admission_check import AdmissionCheck
from affidavit.service.dispatch.engine import JOB, Engine, EngineUnavailable, Job, JobState
from affidavit.service.ledger.expiry import expire_reservations
from affidavit.service.runs import completion, repository
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


@dataclass(frozen=True, kw_only=True, slots=True)
class _Lease:
    """Where a run stands that is not over."""

    run: str
    state: str
    fence: int
    number: int
    worker: str | None


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
        return None if self.engine is None else self.engine.page(_job_id(run.id, run.job))

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
        self._queue.reap(at)
        if self.engine is None:
            return
        jobs = self.engine.jobs()  # before the leases: what has ended cannot hold one afterwards
        with self._reader.connect() as connection:
            leases = _open_leases(connection)
        for lease in leases:
            self._compare(self.engine, lease, jobs, at)
        self._cancel_others(self.engine, jobs, {lease.run: lease for lease in leases})
        if self._admission is not None:
            self._admission.round(at)

    def _compare(
        self, engine: Engine, lease: _Lease, jobs: Mapping[str, JobState], at: datetime
    ) -> None:
        job_id = _job_id(lease.run, lease.number)
        state, claimed = jobs.get(job_id), lease.worker == job_id
        if lease.state != "queued":
            if state == "ended" and claimed:
                self._lose(lease, job_id, at)
            return
        if state in ("waiting", "running") and not claimed:
            return
        if state is not None:
            if state != "ended":
                engine.cancel(job_id)
            if not self._next_job(lease, job_id, at):
                return
        with self._reader.connect() as connection:
            run = repository.find(connection, lease.run)
        if run.state == "queued":
            engine.submit(_job(run))

    def _lose(self, lease: _Lease, job_id: str, at: datetime) -> None:
        """Take back the lease of a worker whose job ended."""
        with self._writer.begin() as connection:
            row = repository.lock(connection, lease.run)
            if (row.fence, row.worker) == (lease.fence, job_id) and row.state in _HELD:
                completion.recover(connection, row, at, f"its job {job_id} ended.")

    def _next_job(self, lease: _Lease, job_id: str, at: datetime) -> bool:
        """Count the next job of a waiting run; whether there may be one."""
        with self._writer.begin() as connection:
            row = repository.lock(connection, lease.run)
            if (row.state, row.job) != ("queued", lease.number):
                return False
            if row.job - row.fence < completion.MOST_FAILED_ATTEMPTS:
                repository.change_lease(connection, lease.run, job=row.job + 1)
                return True
            run, call = repository.find(connection, lease.run), CommandContext(actor=ACTOR, at=at)
            message = f"{row.job - row.fence} jobs ended and never claimed it, {job_id} the last."
            body = {"code": "job_failed", "message": message}
            completion.give_up(connection, run, "failed", body, call, row.fence or None)
        return False

    def _cancel_others(
        self, engine: Engine, jobs: Mapping[str, JobState], leases: Mapping[str, _Lease]
    ) -> None:
        """Cancel jobs that no run needs."""
        for job_id, state in jobs.items():
            match = JOB.fullmatch(job_id)
            if match is None or state == "ended":
                continue
            lease = leases.get(match[1])
            if lease is not None:
                needless = int(match[2]) < lease.number
            else:
                needless = state == "waiting" and self._is_over(match[1])
            if needless:
                engine.cancel(job_id)

    def _is_over(self, run: str) -> bool:
        query = select(run_leases.c.state).where(run_leases.c.run_id == run)
        with self._reader.connect() as connection:
            return connection.execute(query).scalar() == "ended"


_HELD = ("claimed", "running")


def _open_leases(connection: Connection) -> list[_Lease]:
    table = run_leases.c
    held = select(run_leases).where(or_(*(table.state == state for state in _HELD)))
    waiting = select(run_leases).where(table.state == "queued").order_by(table.requested_at)
    rows = [*connection.execute(held), *connection.execute(waiting.limit(MOST_WAITING))]
    return [
        _Lease(run=row.run_id, state=row.state, fence=row.fence, number=row.job, worker=row.worker)
        for row in rows
    ]


def _job_id(run: str, number: int) -> str:
    return Job(run=run, number=number, queue="", gpus=0, memory=0).id


def _job(run: StoredRun) -> Job:
    return Job(run=run.id, number=run.job, queue=run.queue, **run.requirements)
