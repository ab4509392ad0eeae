"""The queue of runs in the service's own tables: leases, fencing, and a reaper.

Every change is one transaction: the lease's row is locked, what is claimed of it checked, and
the lease, the event, its log entry and what the ledger must say of it are written together.
A worker claims the oldest run of its queue, or the one that an engine handed it; two that ask at
once skip what the other has locked (``FOR UPDATE SKIP LOCKED``; SQLite has one writer at a time).
Each claim has a secret of its own, without which nobody reports on the run.

An expired lease is recovered by the next claims in any queue (``completion``). A run that is over
without a record is charged in full.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime, timedelta
from hmac import compare_digest
from typing import Any

from sqlalchemy import Connection, Engine, Row, bindparam, select
from sqlalchemy.exc import IntegrityError

from affidavit.accountants.privacy_filter import Cost
from affidavit.certificate import SearchOpening
from affidavit.service.command import CommandContext
from affidavit.service.cursors import cursor_at, read_cursor
from affidavit.service.database import reader, writer
from affidavit.service.errors import DomainError, WrongState
from affidavit.service.ledger import transitions
from affidavit.service.ledger.transitions import CostedRun
from affidavit.service.runs import completion, repository
from affidavit.service.runs.conformance import ConformanceResult
from affidavit.service.runs.enqueue import ReservationNotUsable, enqueue, repeated
from affidavit.service.runs.models import RunRequest
from affidavit.service.runs.repository import Kind, StoredRun
from affidavit.service.runs.run_tables import run_leases
from affidavit.service.store import current
from affidavit.service.store import hold as hold_certificate
from affidavit.service.tables import UtcDateTime
from affidavit.service.teams import acting_for
from affidavit.worker import ClaimRequest, Renewal

MOST_REAPED = 16
"""Leases that one claim takes back at most."""

# Built once: putting a statement together takes as long as running it.
_lease = run_leases.c
_AT = bindparam("at", type_=UtcDateTime)
_NEXT = (
    select(run_leases)
    .where(
        _lease.queue == bindparam("queue"),
        _lease.state == "queued",
    )
    .order_by(_lease.requested_at, _lease.run_id)
    .limit(1)
)
_NAMED = _NEXT.where(_lease.run_id == bindparam("run"))
_EXPIRED = (
    select(run_leases)
    .where(_lease.state.in_(["claimed", "running"]), _lease.expires_at < _AT)
    .limit(1)
)
_TAKE_EXPIRED = _EXPIRED.with_for_update(skip_locked=True)


class LeaseLost(DomainError):
    """The run is held under another fencing token, by another, or is over."""

    code = "lease_lost"


class RunNotStarted(DomainError):
    """The run may not begin any more, and is over."""

    code = "run_not_started"


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldLease:
    """The fencing token and the secret under which an actor reports on a run."""

    run: str
    fence: int
    secret: str
    actor: str
    at: datetime

    @property
    def call(self) -> CommandContext:
        """The same, for the ledger."""
        return CommandContext(actor=self.actor, at=self.at)


class RunQueue:
    """The queue behind one engine; safe to use from several threads and processes."""

    def __init__(self, engine: Engine) -> None:
        self._reader = reader(engine)
        self._writer = writer(engine)

    # ---- people ----------------------------------------------------------------------

    def find(self, run_id: str) -> StoredRun:
        """The run of that id; raises ``UnknownRun``."""
        with self._reader.connect() as connection:
            return repository.find(connection, run_id)

    def history(self, run_id: str) -> tuple[StoredRun, list[repository.StoredRunEvent]]:
        """A run and all that happened to it; raises ``UnknownRun``."""
        with self._reader.connect() as connection:
            happened = repository.history(connection, run_id)
            return repository.find(connection, run_id), happened

    def progress(self, run_ids: Collection[str]) -> dict[str, tuple[int, int]]:
        """The last event's number and the reported steps of those of these runs that exist."""
        with self._reader.connect() as connection:
            return repository.progress(connection, run_ids)

    def page(
        self, filters: repository.Filters, cursor: str | None, limit: int
    ) -> tuple[list[StoredRun], str | None]:
        """Runs, latest first, and the cursor of the next page; raises ``InvalidCursor``."""
        after = None if cursor is None else read_cursor(cursor, str)
        with self._reader.connect() as connection:
            runs = repository.page(connection, filters, after, limit + 1)
        if len(runs) <= limit:
            return runs, None
        last = runs[limit - 1]
        return runs[:limit], cursor_at(last.requested_at, last.id)

    def repeated(self, call: CommandContext) -> StoredRun | None:
        """The run of an earlier request with this key; raises ``IdempotencyKeyReused``."""
        with self._reader.connect() as connection:
            return repeated(connection, call)

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
                earlier = repeated(connection, call)
                if earlier is not None:
                    return earlier, False
                if isinstance(reservation, CostedRun):
                    # The run has the key; its reservation is no request of its own.
                    unkeyed = CommandContext(actor=call.actor, at=call.at)
                    reservation = transitions.reserve_usable(connection, reservation, unkeyed).id
                return enqueue(connection, request, reservation, call), True
        except IntegrityError:
            with self._reader.connect() as connection:
                earlier = repeated(connection, call)
            if earlier is not None:
                return earlier, False
            raise ReservationNotUsable(
                f"reservation {reservation} belongs to another run.", "Reserve for each run."
            ) from None

    def cancel(self, run_id: str, reason: str, call: CommandContext) -> StoredRun:
        """End a run that waits; tell the worker of one that does not. Raises ``WrongState``."""
        with self._writer.begin() as connection:
            lease = repository.lock(connection, run_id)
            run = repository.find(connection, run_id)
            body = {"code": "cancelled", "message": reason}
            if run.state == "cancelled" or (run.cancel_asked and lease.state != "ended"):
                return run
            if lease.state == "ended":
                raise WrongState(
                    f"run {run_id} is {run.state}.",
                    "Only a run that has not ended can be cancelled.",
                )
            if lease.state == "queued":
                completion.give_up(connection, run, "cancelled", body, call, None)
            else:
                repository.change_lease(connection, run_id, cancel=True)
                repository.add_event(
                    connection, run_id, "cancel_asked", body, actor=call.actor, at=call.at
                )
            return repository.find(connection, run_id)

    # ---- workers ---------------------------------------------------------------------

    def claim(
        self, request: ClaimRequest, actor: str, at: datetime
    ) -> tuple[StoredRun, str] | None:
        """The oldest run, or the one named, under a new fencing token; and the claim's secret."""
        self.reap(at)
        query = _NEXT if request.run is None else _NAMED
        parameters = {"queue": request.queue, "run": request.run}
        with self._reader.connect() as connection:
            if connection.execute(query, parameters).first() is None:
                return None
        with self._writer.begin() as connection:
            taken = query.with_for_update(skip_locked=True)
            lease = connection.execute(taken, parameters).first()
            if lease is None:
                return None
            secret = secrets.token_hex(32)
            repository.change_lease(
                connection,
                lease.run_id,
                state="claimed",
                fence=lease.fence + 1,
                secret=_digest(secret),
                holder=actor,
                worker=request.worker,
                seconds=request.seconds,
                expires_at=at + timedelta(seconds=request.seconds),
            )
            body = {"fence": lease.fence + 1, "worker": request.worker}
            repository.add_event(
                connection,
                lease.run_id,
                "claimed",
                body,
                actor=actor,
                at=at,
                fence=lease.fence + 1,
            )
            return repository.find(connection, lease.run_id), secret

    def start(self, held: HeldLease, plan_digest: str, wants: int | None = None) -> StoredRun:
        """Start or continue a run: check everything again, in one transaction.

        The first time its budget is committed; the number of trials of a search is drawn then, and
        the digest of what was drawn stands in the log before any of them. ``wants`` as in
        ``renew``; without it every step is granted, and the run is not handed over. Raises
        ``LeaseLost``, or ``RunNotStarted`` once the run was ended for what was found.
        """
        with self._writer.begin() as connection:
            lease = _held(connection, held, "claimed", "running")
            run = repository.find(connection, held.run)
            if lease.state == "running":
                return run  # it was begun under this token, and the answer was lost
            why = _obstacle(connection, run, plan_digest, held, cancelled=lease.cancel)
            if why is None:
                # Trials that a lost worker ran cannot be taken up, nor another number drawn.
                opening = _drawn(run)
                whole = wants is None or opening is not None
                granted = run.certified_steps if whole else _granted(run, wants or 0)
                repository.change_lease(
                    connection,
                    run.id,
                    state="running",
                    granted=granted,
                    previous=held.fence,
                    head=None,
                    search=None if opening is None else json.dumps(opening.as_document()),
                )
                body = {"fence": held.fence, "plan_digest": plan_digest, "granted": granted}
                if opening is not None:
                    body["search"] = opening.digest
                repository.add_event(
                    connection,
                    run.id,
                    "resumed" if run.begun else "running",
                    body,
                    actor=held.actor,
                    at=held.at,
                    fence=held.fence,
                    follows="running" if run.begun else "queued",
                )
                return repository.find(connection, run.id)
            kind: Kind = "cancelled" if lease.cancel else "failed"
            completion.give_up(connection, run, kind, why, held.call, held.fence)
        raise RunNotStarted(f"{why['code']}: {why['message']}", "Claim another run.")

    def renew(
        self, held: HeldLease, steps: int, *, wants: int = 0, head: str | None = None
    ) -> Renewal:
        """Hold the run longer, having charged ``steps``; raises ``LeaseLost``.

        ``wants`` is how many steps it asks to have charged by the next time, and ``head`` the
        digest of a line of its record: first of the first line, which is logged. Whatever is
        granted here is spent if another has to continue the run.
        """
        with self._writer.begin() as connection:
            lease = _held(connection, held, "claimed", "running")
            granted = lease.granted
            if lease.state == "running" and head is not None and lease.head is None:
                attempts = repository.find(connection, held.run).attempts
                # Logged only as long as this attempt was granted no step.
                if granted == max((attempt.granted for attempt in attempts), default=0):
                    repository.log_record(
                        connection, held.run, held.fence, head, actor=held.actor, at=held.at
                    )
            if lease.state == "running" and max(steps, wants) > granted:
                granted = _granted(repository.find(connection, held.run), max(steps, wants))
            repository.change_lease(
                connection,
                held.run,
                expires_at=held.at + timedelta(seconds=lease.seconds),
                steps=max(lease.steps, steps),
                granted=granted,
                head=head or lease.head,
            )
            return Renewal(cancel=bool(lease.cancel), granted=granted)

    def add_record_part(self, held: HeldLease, part: int, content: bytes) -> None:
        """Store a part of the run's record, and renew the lease.

        Raises ``LeaseLost`` or ``RecordRefused``.
        """
        with self._writer.begin() as connection:
            lease = _held(connection, held, "running")
            repository.add_record_part(connection, held.run, held.fence, part, content)
            expires_at = held.at + timedelta(seconds=lease.seconds)
            repository.change_lease(connection, held.run, expires_at=expires_at)

    def records(self, run_id: str) -> dict[int, list[bytes]]:
        """The parts of the run's records, by fencing token."""
        with self._reader.connect() as connection:
            return repository.records_of(connection, run_id)

    def logged_records(self, run_id: str) -> frozenset[str]:
        """The digests with which the log says that records of the run began."""
        with self._reader.connect() as connection:
            return repository.logged_records(connection, run_id)

    def complete(
        self,
        held: HeldLease,
        result: ConformanceResult,
        envelope: dict[str, Any],
        cost: Cost | None,
    ) -> StoredRun:
        """Settle a run on what its record comes to, and keep its provenance.

        ``cost`` is that of ``result.steps`` steps, None for all that were certified. A run that
        does not conform has failed, and keeps its charge. A report that came before is
        answered as it was. Raises ``LeaseLost``.
        """
        with self._writer.begin() as connection:
            lease = repository.lock(connection, held.run)
            run = repository.find(connection, held.run)
            if run.outcome is not None and run.outcome.get("provenance") == envelope:
                return run
            _require_held(lease, held, "running")
            steps = None if cost is None else result.steps
            charged = completion.settle(connection, run, steps, result.record, cost, held.call)
            kind, code = completion.verdict(result, run, held.at, cancelled=lease.cancel)
            body = {
                "code": code,
                "message": result.summary,
                "fence": held.fence,
                "steps_charged": charged,
                "record": result.record,
                "provenance": envelope,
            }
            completion.end(connection, run, kind, body, held.call, fence=held.fence)
            return repository.find(connection, held.run)

    def fail(self, held: HeldLease, code: str, message: str, *, again: bool = False) -> StoredRun:
        """End a run: free if it was not begun, charged in full if it was.

        With ``again`` it is given back instead, for another worker to continue it, unless it is
        over anyhow. Raises ``LeaseLost``.
        """
        with self._writer.begin() as connection:
            lease = _held(connection, held, "claimed", "running")
            run = repository.find(connection, held.run)
            body = {"code": code, "message": message, "fence": held.fence}
            if again and not completion.is_over(run, lease):
                completion.requeue(connection, run, lease, body, held.call)
            else:
                kind: Kind = "cancelled" if lease.cancel else "failed"
                completion.give_up(connection, run, kind, body, held.call, held.fence)
            return repository.find(connection, held.run)

    def reap(self, at: datetime) -> int:
        """Recover expired leases, ``MOST_REAPED`` at most; returns how many.

        Whoever claims next takes back further ones: were each to try all, a pause of the
        service would end in as many transactions as the square of the workers.
        """
        with acting_for(None):
            return self._reap(at)

    def _reap(self, at: datetime) -> int:
        with self._reader.connect() as connection:
            if connection.execute(_EXPIRED, {"at": at}).first() is None:
                return 0
        for taken in range(MOST_REAPED):
            with self._writer.begin() as connection:
                lease = connection.execute(_TAKE_EXPIRED, {"at": at}).first()
                if lease is None:
                    return taken
                completion.recover(connection, lease, at)
        return MOST_REAPED


def _held(connection: Connection, held: HeldLease, *states: str) -> Row[Any]:
    """The lease, if it is still under that token; raises ``LeaseLost``."""
    lease = repository.lock(connection, held.run)
    _require_held(lease, held, *states)
    return lease


def _require_held(lease: Row[Any], held: HeldLease, *states: str) -> None:
    genuine = lease.secret is not None and compare_digest(lease.secret, _digest(held.secret))
    current_claim = (lease.fence, lease.holder) == (held.fence, held.actor)
    if not (genuine and current_claim and lease.state in states):
        raise LeaseLost(
            f"fencing token {held.fence} of run {held.run} is no longer valid, or not in "
            "this state.",
            "Stop the run: further work does not count.",
        )


def _digest(secret: str) -> str:
    return "sha256:" + hashlib.sha256(secret.encode()).hexdigest()


def _obstacle(
    connection: Connection, run: StoredRun, plan_digest: str, held: HeldLease, *, cancelled: bool
) -> dict[str, str] | None:
    """Why the run must not begin or go on; commits its budget if nothing stands against it."""
    if cancelled:
        return {"code": "cancelled", "message": "it was cancelled before it began."}
    if plan_digest != run.plan_digest:
        return {"code": "other_plan", "message": "the plan at hand is not the certified one."}
    hold_certificate(connection, run.certificate_id)
    ledger, reservation = transitions.hold_reservation(connection, run.reservation_id)
    certificate = current(connection, run.certificate_id)
    if run.begun and reservation.state != "committed":
        return {"code": "reservation_not_usable", "message": f"it is {reservation.state}."}
    try:
        transitions.require_usable(
            certificate, reservation.scope.dataset, allow_untrusted=run.untrusted
        )
        assert certificate is not None
        if (certificate.issue, certificate.untrusted) != (run.issue, run.untrusted):
            return {
                "code": "certificate_not_usable",
                "message": "it was reissued since the run was requested.",
            }
        if run.begun:
            return None
        taken = transitions.commit(connection, ledger, reservation, held.call)
    except DomainError as refusal:
        return {"code": refusal.code, "message": refusal.message}
    if not taken:
        return {"code": "reservation_not_usable", "message": "the reservation was used already."}
    return None


def _drawn(run: StoredRun) -> SearchOpening | None:
    """The opening of a search that begins, which nobody could know before."""
    search = run.wanted.get("search")
    if search is None:
        return None
    return SearchOpening.drawn(run.certificate_id, search["choices"], search["score"])


def _granted(run: StoredRun, wants: int) -> int:
    """How many steps may have been charged from now on: never fewer, and none uncertified."""
    return max(run.granted, min(wants, run.certified_steps))
