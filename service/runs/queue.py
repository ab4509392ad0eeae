"""The queue of runs in the service's own tables: leases, fencing, and a reaper.

Every change is one transaction: the lease's row is locked, what is claimed of it checked, and
the lease, the event, its log entry and what the ledger must say of it are written together.
A worker claims the oldest run of its queue, or the one that an engine handed it; two that ask at
once skip what the other has locked (``FOR UPDATE SKIP LOCKED``; SQLite has one writer at a time).
Each claim has a secret of its own: a worker reports on its run under ``fence`` and ``secret``.

The dispatcher takes back leases. A run that is over without a record is charged in full.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Concatenate, ParamSpec, TypeVar

from sqlalchemy import Connection, Engine, bindparam, select
from sqlalchemy.exc import IntegrityError

from affidavit.accountants.privacy_filter import Cost
from affidavit.service.command import CommandContext
from affidavit.service.cursors import cursor_at, read_cursor
from affidavit.service.database import reader, writer
from affidavit.service.errors import DomainError, WrongState
from affidavit.service.ledger import transitions
from affidavit.service.ledger.transitions import CostedRun
from affidavit.service.runs import repository
from affidavit.service.runs.conformance import ConformanceResult
from affidavit.service.runs.enqueue import ReservationNotUsable, enqueue
from affidavit.service.runs.locked_run import HELD, MOST_FAILED_ATTEMPTS, LockedRun, digest_of
from affidavit.service.runs.models import (
    CompletionRequest,
    FailureRequest,
    HeartbeatRequest,
    RecordPart,
    RecordPartRequest,
    RunClaimRequest,
    RunRequest,
    StartRequest,
)
from affidavit.service.runs.repository import StoredRun
from affidavit.service.runs.run_tables import run_leases
from affidavit.worker import Renewal

# Built once: putting a statement together takes as long as running it.
_lease = run_leases.c
_NEXT = (
    select(_lease.run_id)
    .where(_lease.queue == bindparam("queue"), _lease.state == "queued")
    .order_by(_lease.requested_at, _lease.run_id)
    .limit(1)
)
_NAMED = _NEXT.where(_lease.run_id == bindparam("run"))

P = ParamSpec("P")
T = TypeVar("T")


class RunNotStarted(DomainError):
    """The run may not begin any more, and is over."""

    code = "run_not_started"


class RunQueue:
    """The queue behind one engine; safe to use from several threads and processes."""

    def __init__(self, engine: Engine) -> None:
        self._reader = reader(engine)
        self._writer = writer(engine)

    # ---- people ----------------------------------------------------------------------

    def read(
        self, query: Callable[Concatenate[Connection, P], T], *values: P.args, **named: P.kwargs
    ) -> T:
        """The result of ``query`` on a connection of its own."""
        with self._reader.connect() as connection:
            return query(connection, *values, **named)

    def find(self, run_id: str) -> StoredRun:
        """The run of that id; raises ``UnknownRun``."""
        return self.read(repository.find, run_id)

    def page(
        self, filters: repository.Filters, cursor: str | None, limit: int
    ) -> tuple[list[StoredRun], str | None]:
        """Runs, latest first, and the cursor of the next page; raises ``InvalidCursor``."""
        after = None if cursor is None else read_cursor(cursor, str)
        runs = self.read(repository.page, filters, after, limit + 1)
        if len(runs) <= limit:
            return runs, None
        last = runs[limit - 1]
        return runs[:limit], cursor_at(last.requested_at, last.id)

    def enqueue(
        self, request: RunRequest, reservation: str | CostedRun, call: CommandContext
    ) -> tuple[StoredRun, bool]:
        """Queue a run; returns it and whether it was queued now.

        ``reservation`` is the id of one that exists, or what is to be reserved: run and
        reservation are then one transaction. Raises ``ReservationNotUsable``,
        ``CertificateNotUsable`` or ``UnknownReservation``, and what ``transitions.reserve`` does.
        """
        try:
            with self._writer.begin() as connection:
                if isinstance(reservation, CostedRun):
                    transitions.hold_for(connection, reservation)
                earlier = repository.repeated(connection, call)
                if earlier is not None:
                    return earlier, False
                if isinstance(reservation, CostedRun):
                    # The run has the key; its reservation is no request of its own.
                    unkeyed = CommandContext(actor=call.actor, at=call.at)
                    reservation = transitions.reserve_usable(connection, reservation, unkeyed).id
                return enqueue(connection, request, reservation, call), True
        except IntegrityError:
            earlier = self.read(repository.repeated, call)
            if earlier is not None:
                return earlier, False
            raise ReservationNotUsable(
                f"reservation {reservation} belongs to another run.", "Reserve for each run."
            ) from None

    def cancel(self, run_id: str, reason: str, call: CommandContext) -> StoredRun:
        """End a run that waits; tell the worker of one that does not. Raises ``WrongState``."""
        with self._lock(run_id, call) as locked:
            run, body = locked.run, {"code": "cancelled", "message": reason}
            if run.state == "cancelled" or (run.cancel_asked and run.outcome is None):
                return run
            if run.outcome is not None:
                raise WrongState(
                    f"run {run_id} is {run.state}.",
                    "Only a run that has not ended can be cancelled.",
                )
            if run.state == "queued":
                replace(locked, run=replace(run, cancel_asked=True)).give_up(body)
            else:
                locked.add_event("cancel_asked", body, cancel=True)
            return locked.changed()

    # ---- workers ---------------------------------------------------------------------

    def claim(
        self, queue: str, request: RunClaimRequest, call: CommandContext
    ) -> tuple[StoredRun, str] | None:
        """The oldest run, or the one named, under a new fencing token; and the claim's secret."""
        query = _NEXT if request.run is None else _NAMED
        parameters = {"queue": queue, "run": request.run}
        with self._reader.connect() as connection:
            if connection.execute(query, parameters).first() is None:
                return None  # without a lock, for workers that poll
        with self._writer.begin() as connection:
            taken = query.with_for_update(skip_locked=True)
            run_id = connection.execute(taken, parameters).scalar()
            if run_id is None:
                return None
            run, secret = repository.find(connection, run_id), secrets.token_hex(32)
            locked = LockedRun(connection, replace(run, fence=run.fence + 1), call)
            locked.add_event(
                "claimed",
                {"fence": locked.run.fence, "worker": request.worker},
                state="claimed",
                fence=locked.run.fence,
                secret=digest_of(secret),
                holder=call.actor,
                worker=request.worker,
                seconds=request.lease,
                expires_at=call.at + timedelta(seconds=request.lease),
            )
            return locked.changed(), secret

    def start(self, run_id: str, request: StartRequest, call: CommandContext) -> StoredRun:
        """Start or continue a run: check everything again, in one transaction.

        The first time its budget is committed; the number of trials of a search is drawn then, and
        the digest of what was drawn stands in the log before any of them. Without ``wants`` every
        step is granted, and the run is not handed over. Raises ``LeaseLost``, or
        ``RunNotStarted`` once the run was ended for what was found.
        """
        with self._lock(run_id, call) as locked:
            locked.require_held(request)
            if locked.run.state == "running":
                return locked.run  # it was begun under this token, and the answer was lost
            why = locked.obstacle(request.plan_digest)
            if why is None:
                locked.begin(request.plan_digest, request.wants)
                return locked.changed()
            locked.give_up(why)
        raise RunNotStarted(f"{why['code']}: {why['message']}", "Claim another run.")

    def renew(self, run_id: str, report: HeartbeatRequest, call: CommandContext) -> Renewal:
        """Hold the run longer, having charged ``steps``; raises ``LeaseLost``.

        ``wants`` is how many steps it asks to have charged by the next time, and ``head`` the
        digest of a line of its record: first of the first line, which is logged. Whatever is
        granted here is spent if another has to continue the run.
        """
        with self._lock(run_id, call) as locked:
            locked.require_held(report)
            run, granted = locked.run, locked.run.granted
            if run.state == "running":
                # Logged only as long as this attempt was granted no step.
                before = max((attempt.granted for attempt in run.attempts), default=0)
                if report.head is not None and run.head is None and granted == before:
                    repository.log_record(locked.connection, run, report.head, call)
                granted = locked.granted(max(report.steps, report.wants))
            steps, head = max(run.steps, report.steps), report.head or run.head
            locked.renew(steps=steps, granted=granted, head=head)
            return Renewal(cancel=run.cancel_asked, granted=granted)

    def add_record_part(
        self, run_id: str, report: RecordPartRequest, call: CommandContext
    ) -> RecordPart:
        """Store a part of the run's record, and renew the lease.

        Raises ``LeaseLost`` or ``RecordRefused``.
        """
        content = report.lines.encode("utf-8", "surrogatepass")
        with self._lock(run_id, call) as locked:
            locked.require_held(report, "running")
            stored = (locked.connection, run_id, report.fence, report.part)
            repository.add_record_part(*stored, content)
            locked.renew()
            return RecordPart(part=report.part)

    def complete(
        self,
        run_id: str,
        report: CompletionRequest,
        result: ConformanceResult,
        cost: Cost | None,
        call: CommandContext,
    ) -> StoredRun:
        """Settle a run on what its record comes to, and keep its provenance.

        ``cost`` is that of ``result.steps`` steps, None for all that were certified. A run that
        does not conform has failed, and keeps its charge. A report that came before is
        answered as it was. Raises ``LeaseLost``.
        """
        with self._lock(run_id, call) as locked:
            outcome = locked.run.outcome
            if outcome is not None and outcome.get("provenance") == report.provenance:
                return locked.run
            locked.require_held(report, "running")
            locked.complete(result, report.provenance, cost)
            return locked.changed()

    def fail(self, run_id: str, report: FailureRequest, call: CommandContext) -> StoredRun:
        """End a run: free if it was not begun, charged in full if it was.

        With ``again`` it is given back instead, for another worker to continue it, unless it is
        over anyhow. Raises ``LeaseLost``.
        """
        with self._lock(run_id, call) as locked:
            locked.require_held(report)
            body = {"code": report.code, "message": report.message, "fence": report.fence}
            leave = locked.give_back if report.again else locked.give_up
            leave(body)
            return locked.changed()

    # ---- the dispatcher --------------------------------------------------------------

    def reap(self, call: CommandContext) -> int:
        """Take back expired leases, each in a transaction; returns how many."""
        expired = _lease.state.in_(HELD) & (_lease.expires_at < call.at)
        with self._reader.connect() as connection:
            leases = connection.execute(select(_lease.run_id, _lease.fence).where(expired)).all()
        why = "did not renew its lease."
        return sum(self.lose(*lease, why, call, expired=True) for lease in leases)

    def lose(
        self, run_id: str, fence: int, why: str, call: CommandContext, *, expired: bool = False
    ) -> bool:
        """Take a run from its worker, if it still holds it, or if its lease ``expired`` by now."""
        with self._lock(run_id, call) as locked:
            run = locked.run
            renewed = expired and run.expires_at is not None and run.expires_at >= call.at
            if run.fence != fence or run.state not in HELD or renewed:
                return False
            message = f"worker {run.worker}: {why}"
            locked.give_back({"code": "lease_lost", "message": message, "fence": fence})
            return True

    def next_job(self, run_id: str, number: int, call: CommandContext) -> StoredRun | None:
        """Count the next job of a waiting run, whose ``number``-th ended; None if there is none."""
        with self._lock(run_id, call) as locked:
            if (locked.run.state, locked.run.job) != ("queued", number):
                return None
            unclaimed = number - locked.run.fence
            if unclaimed < MOST_FAILED_ATTEMPTS:
                locked.change_lease(job=number + 1)
                return locked.changed()
            message = f"{unclaimed} jobs ended and never claimed it."
            locked.give_up({"code": "job_failed", "message": message})
            return None

    @contextmanager
    def _lock(self, run_id: str, call: CommandContext) -> Iterator[LockedRun]:
        """A transaction that holds the run; raises ``UnknownRun``."""
        with self._writer.begin() as connection:
            yield LockedRun(connection, repository.lock(connection, run_id), call)
