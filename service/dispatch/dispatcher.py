"""The loop that compares runs with the engine's jobs, and reservations with their age.

A run is committed first and handed over afterwards, by whichever process looks next: one that dies
in between loses nothing, and two that hand over the same run submit the same job. The engine's
word only decides how soon a lost worker's run goes on. What may be charged and trained is decided
by the lease: a job that an engine lost, doubled or revived holds no lease, and is refused.

=======================  =======================  =========================================
lease                    job                      what follows
=======================  =======================  =========================================
waits                    unknown                  it is submitted; where the engine refuses it,
                                                  again after pauses that double, for a day
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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import Engine as Database
from sqlalchemy import Row, or_, select
from sqlalchemy.exc import SQLAlchemyError

from affidavit.service.database import reader
from affidavit.service.dispatch.engines import (
    JOB,
    Engine,
    EngineUnavailable,
    Job,
    JobRefused,
    JobState,
    job_id_of,
    others_go_on,
)
from affidavit.service.dispatch.kubernetes_jobs import AdmissionCheck
from affidavit.service.identity.actor import CommandContext
from affidavit.service.ledger.store import LedgerStore
from affidavit.service.runs.queue import LockedRun, RunQueue
from affidavit.service.runs.repository import StoredRun, run_leases

PERIOD = 2.0
"""Seconds between two rounds."""
EXPIRY_PERIOD = 600.0
MAX_WAITING = 500
"""Jobs that wait in the engine; those that it did not start for ``PATIENCE`` do not count."""
PATIENCE = timedelta(minutes=10)
LONGEST_PAUSE = timedelta(hours=1)
MAX_REFUSED = timedelta(days=1)
"""How long an engine may refuse a run's job before the run has failed."""
ACTOR = "service:dispatcher"

log = logging.getLogger("affidavit.service.dispatch")


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why the engine refused a run's job, at first ``since`` and last ``at``."""

    why: str
    since: datetime
    at: datetime

    @property
    def until(self) -> datetime:
        """When to submit the job again."""
        pause = max(self.at - self.since, timedelta(seconds=PERIOD))
        return self.at + min(pause, LONGEST_PAUSE)


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
        self._ledgers = LedgerStore(database)
        self._queue = RunQueue(database)
        self.engine = engine
        self._refusals: dict[str, Refusal] = {}
        self._waiting: dict[str, datetime] = {}
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

    def refusal(self, run: StoredRun) -> str | None:
        """Why the engine refused the job of a waiting run when it was last submitted."""
        refusal = self._refusals.get(run.id)
        return None if refusal is None or run.state != "queued" else refusal.why

    def _loop(self) -> None:
        rounds = 0
        while not self._stopping.wait(PERIOD):
            try:
                if rounds * PERIOD % EXPIRY_PERIOD == 0:
                    self._ledgers.expire(self._now())
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
        numbers = {lease.run_id: lease.job for lease in leases}
        self._refusals = {run: item for run, item in self._refusals.items() if run in numbers}
        waiting = (job_id for job_id, state in jobs.items() if state == "waiting")
        self._waiting = {job_id: self._waiting.get(job_id, at) for job_id in waiting}
        room = MAX_WAITING - sum(at - since < PATIENCE for since in self._waiting.values())
        for lease in sorted(leases, key=lambda lease: lease.run_id in self._refusals):
            if lease.state == "queued" and job_id_of(lease.run_id, lease.job) not in jobs:
                refusal = self._refusals.get(lease.run_id)
                if room <= 0 or (refusal is not None and at < refusal.until):
                    continue
                room -= 1
            with others_go_on():
                self._compare(self.engine, lease, jobs, call)
        for job_id in self._needless(jobs, numbers, at):
            with others_go_on():
                self.engine.cancel(job_id)
        if self._admission is not None:
            self._admission.round(at)

    def _open_leases(self) -> Sequence[Row[Any]]:
        """Those of runs that are not over, the oldest first."""
        table = run_leases.c
        columns = (table[name] for name in ("run_id", "state", "job", "fence", "worker"))
        unfinished = table.state.in_(["queued", "claimed", "running"])
        query = select(*columns).where(unfinished).order_by(table.requested_at)
        with self._reader.connect() as connection:
            return connection.execute(query).all()

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
            self._submit(engine, run, call)

    def _submit(self, engine: Engine, run: StoredRun, call: CommandContext) -> None:
        """Submit the job of a run; raises ``JobRefused``, and gives up after ``MAX_REFUSED``."""
        try:
            engine.submit(
                Job(run=run.id, number=run.job, queue=run.queue, **run.request["requirements"])
            )
        except JobRefused as error:
            why, earlier = str(error), self._refusals.get(run.id)
            refusal = Refusal(why, call.at if earlier is None else earlier.since, call.at)
            self._refusals[run.id] = refusal
            if refusal.at - refusal.since >= MAX_REFUSED:
                self._queue.change(run.id, call, LockedRun.next_job, run.job, refusal=why)
            raise
        self._refusals.pop(run.id, None)

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
