"""The dispatcher: submits runs to an engine, and ends expired leases and reservations.

A run is committed first and submitted afterwards by any process, so a process that dies in between
loses nothing, and two processes that submit the same run submit the same job. The engine's report
only determines how soon a lost worker's run continues. The lease determines charges and training: a
job that an engine lost, doubled or revived holds no lease and is refused.

=======================  =======================  =========================================
lease                    job                      action
=======================  =======================  =========================================
queued                   unknown                  submit it; after a refusal again with
                                                  doubling pauses, for a day
queued                   waiting or running       none: it is about to claim the run
queued                   running, lost its lease  cancel it and submit another
queued                   ended                    submit another; give up after a few that
                                                  never claimed the run
held by the job          ended                    end the lease
held                     any other                none: the lease expires
ended and expired        waiting or running       cancel it
the run has a later job  waiting or running       cancel it
=======================  =======================  =========================================
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import Engine as Database
from sqlalchemy import Row, or_, select
from sqlalchemy.exc import SQLAlchemyError

from affidavit.service.core.database import reader
from affidavit.service.dispatch.engine import (
    JOB_ID,
    Engine,
    EngineUnavailable,
    Job,
    JobRefused,
    JobState,
    job_id_of,
    log_refusal,
)
from affidavit.service.identity.actor import CommandContext
from affidavit.service.ledger.store import LedgerStore
from affidavit.service.runs.queue import LockedRun, RunQueue
from affidavit.service.runs.repository import StoredRun
from affidavit.service.tables.runs import run_leases

PERIOD_SECONDS = 2.0
EXPIRY_PERIOD_SECONDS = 600.0
MAX_WAITING = 500
"""Jobs waiting in the engine, without those that have waited longer than ``STUCK_AFTER``."""
STUCK_AFTER = timedelta(minutes=10)
MAX_PAUSE = timedelta(hours=1)
"""Pause between two submissions of a job that the engine refuses."""
GIVE_UP_AFTER = timedelta(days=1)
"""Time for which an engine may refuse a run's job before the run fails."""
ACTOR = "service:dispatcher"

log = logging.getLogger("affidavit.service.dispatch")


@dataclass(frozen=True, slots=True)
class Refusal:
    """The engine's refusal of a run's job, first at ``since`` and last at ``at``."""

    message: str
    since: datetime
    at: datetime

    @property
    def retry_at(self) -> datetime:
        """The time to submit the job again."""
        pause = max(self.at - self.since, timedelta(seconds=PERIOD_SECONDS))
        return self.at + min(pause, MAX_PAUSE)


class Dispatcher:
    """The dispatcher of one process; without an engine it only ends leases and reservations."""

    def __init__(
        self,
        database: Database,
        engine: Engine | None,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._now = now
        self._reader = reader(database)
        self._ledgers = LedgerStore(database)
        self._queue = RunQueue(database)
        self.engine = engine
        self._refusals: dict[str, Refusal] = {}
        self._waiting: dict[str, datetime] = {}
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread."""
        self._thread = threading.Thread(target=self._loop, name="dispatcher", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread after its current round."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()

    def dashboard_url(self, run: StoredRun) -> str | None:
        """Return the URL of the latest job of a run in the engine's dashboard."""
        if self.engine is None:
            return None
        return self.engine.dashboard_url(job_id_of(run.id, run.job))

    def with_refusal(self, run: StoredRun) -> StoredRun:
        """Return ``run`` with the engine's last refusal of its job, if it waits."""
        refusal = self._refusals.get(run.id)
        if refusal is None or run.state != "queued":
            return run
        return run.model_copy(update={"refusal": refusal.message})

    def _loop(self) -> None:
        rounds = 0
        while not self._stopping.wait(PERIOD_SECONDS):
            try:
                if rounds * PERIOD_SECONDS % EXPIRY_PERIOD_SECONDS == 0:
                    self._ledgers.expire(self._now())
                self.reconcile(self._now())
            except (EngineUnavailable, SQLAlchemyError) as error:
                log.warning("runs cannot be dispatched now: %s", error)
            except Exception:
                log.exception("dispatching failed")
            rounds += 1

    def reconcile(self, at: datetime) -> None:
        """Compare runs with jobs once, and act on the differences; raises ``EngineUnavailable``."""
        context = CommandContext(actor=ACTOR, at=at)
        self._queue.expire_leases(context)
        if self.engine is None:
            return
        jobs = self.engine.jobs()  # before the leases: an ended job cannot claim one afterwards
        leases = self._open_leases()
        numbers = {lease.run_id: lease.job for lease in leases}
        self._refusals = {run: item for run, item in self._refusals.items() if run in numbers}
        self._waiting = {
            job_id: self._waiting.get(job_id, at)
            for job_id, state in jobs.items()
            if state == "waiting"
        }
        free = MAX_WAITING - sum(at - since < STUCK_AFTER for since in self._waiting.values())
        for lease in sorted(leases, key=lambda lease: lease.run_id in self._refusals):
            if lease.state == "queued" and job_id_of(lease.run_id, lease.job) not in jobs:
                refusal = self._refusals.get(lease.run_id)
                if free <= 0 or (refusal is not None and at < refusal.retry_at):
                    continue
                free -= 1
            with log_refusal():
                self._compare(self.engine, lease, jobs, context)
        for job_id in self._find_obsolete_jobs(jobs, numbers, at):
            with log_refusal():
                self.engine.cancel(job_id)

    def _open_leases(self) -> Sequence[Row[Any]]:
        """Return the leases of unfinished runs, oldest first."""
        table = run_leases.c
        columns = (table[name] for name in ("run_id", "state", "job", "fence", "worker"))
        unfinished = table.state.in_(["queued", "claimed", "running"])
        query = select(*columns).where(unfinished).order_by(table.requested_at)
        with self._reader.connect() as connection:
            return connection.execute(query).all()

    def _compare(
        self, engine: Engine, lease: Row[Any], jobs: Mapping[str, JobState], context: CommandContext
    ) -> None:
        job_id = job_id_of(lease.run_id, lease.job)
        state, claimed = jobs.get(job_id), lease.worker == job_id
        if lease.state != "queued":
            if state == "ended" and claimed:
                reason = f"its job {job_id} ended."
                self._queue.change(lease.run_id, context, LockedRun.end_lease, lease.fence, reason)
            return
        if state in ("waiting", "running") and not claimed:
            return
        run: StoredRun | None = self._queue.find(lease.run_id)
        if state is not None:
            if state != "ended":
                engine.cancel(job_id)
            run = self._queue.change(lease.run_id, context, LockedRun.next_job, lease.job)
        if run is not None and run.state == "queued":
            self._submit(engine, run, context)

    def _submit(self, engine: Engine, run: StoredRun, context: CommandContext) -> None:
        """Submit the job of a run, and fail the run if it is refused for ``GIVE_UP_AFTER``.

        Raises ``JobRefused``.
        """
        try:
            engine.submit(
                Job(run=run.id, number=run.job, queue=run.queue, **dict(run.requirements))
            )
        except JobRefused as error:
            message, earlier = str(error), self._refusals.get(run.id)
            refusal = Refusal(message, context.at if earlier is None else earlier.since, context.at)
            self._refusals[run.id] = refusal
            if refusal.at - refusal.since >= GIVE_UP_AFTER:
                self._queue.change(run.id, context, LockedRun.next_job, run.job, refusal=message)
            raise
        self._refusals.pop(run.id, None)

    def _find_obsolete_jobs(
        self, jobs: Mapping[str, JobState], numbers: Mapping[str, int], at: datetime
    ) -> list[str]:
        """Return the active jobs of ended runs, and the earlier jobs of other runs."""
        matches = (JOB_ID.fullmatch(job_id) for job_id, state in jobs.items() if state != "ended")
        active = [(match[0], match[1], int(match[2])) for match in matches if match is not None]
        lease = run_leases.c
        # The worker of a run that has just ended is about to exit.
        expired = select(lease.run_id).where(
            lease.state == "ended",
            or_(lease.expires_at.is_(None), lease.expires_at < at),
            lease.run_id.in_([run for _, run, _ in active if run not in numbers]),
        )
        with self._reader.connect() as connection:
            ended = set(connection.execute(expired).scalars())
        return [
            job_id
            for job_id, run, number in active
            if run in ended or number < numbers.get(run, number)
        ]
