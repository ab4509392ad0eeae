"""The queue of runs in the service's own tables: leases, fencing, and a reaper.

Every change is one transaction: the lease's row is locked, what is claimed of it checked, and
the lease, the event, its log entry and what the ledger must say of it are written together.
Runs wait in order of priority, then age; two workers that ask at once skip what the other
has locked (``FOR UPDATE SKIP LOCKED``; SQLite has one writer at a time).

A lease that ran out is taken back by the next claims in any queue, and the run is handed over
(``affidavit.service.runs.handover``). A run that is over without a record is charged in full.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import Connection, Engine, Row, bindparam, or_, select
from sqlalchemy.exc import IntegrityError

from affidavit.accountants.privacy_filter import Cost
from affidavit.service.command import CommandContext
from affidavit.service.cursors import cursor_at, read_cursor
from affidavit.service.database import reader, writer
from affidavit.service.errors import DomainError, WrongState
from affidavit.service.ledger import transitions
from affidavit.service.runs import asking, ending, handover, records, rows
from affidavit.service.runs.judging import Judged
from affidavit.service.runs.refusals import LeaseLost, ReservationNotUsable, RunNotStarted
from affidavit.service.runs.rows import Run
from affidavit.service.runs.run_tables import run_leases
from affidavit.service.runs.wanted import WantedRun
from affidavit.service.runs.watching import Sight
from affidavit.service.store import current
from affidavit.service.store import hold as hold_certificate
from affidavit.service.tables import UtcDateTime
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
        _lease.memory_mib <= bindparam("memory"),
        _lease.gpu <= bindparam("gpu"),  # false comes before true
        or_(_lease.ready_at.is_(None), _lease.ready_at <= _AT),
        or_(
            _lease.elsewhere_at.is_(None),
            _lease.elsewhere_at <= _AT,
            _lease.place == bindparam("place"),
        ),
    )
    .order_by(_lease.priority.desc(), _lease.requested_at, _lease.run_id)
    .limit(1)
)
_RAN_OUT = (
    select(run_leases)
    .where(_lease.state.in_(["claimed", "running"]), _lease.expires_at < _AT)
    .limit(1)
)
_TAKE_NEXT, _TAKE_RAN_OUT = (query.with_for_update(skip_locked=True) for query in (_NEXT, _RAN_OUT))


@dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """Who speaks of a run, and under which fencing token."""

    run: str
    fence: int
    actor: str
    at: datetime

    @property
    def call(self) -> CommandContext:
        """The same, as the ledger is told."""
        return CommandContext(actor=self.actor, at=self.at)


class RunQueue:
    """The queue behind one engine; safe to use from several threads and processes."""

    def __init__(self, engine: Engine) -> None:
        self._reader = reader(engine)
        self._writer = writer(engine)

    # ---- people ----------------------------------------------------------------------

    def find(self, run_id: str) -> Run:
        """The run of that id; raises ``UnknownRun``."""
        with self._reader.connect() as connection:
            return rows.find(connection, run_id)

    def history(self, run_id: str) -> tuple[Run, list[rows.Happened]]:
        """A run and all that happened to it; raises ``UnknownRun``."""
        with self._reader.connect() as connection:
            happened = rows.history(connection, run_id)
            return rows.find(connection, run_id), happened

    def progress(self, run_ids: Collection[str]) -> dict[str, Sight]:
        """How far those of these runs are that there are."""
        with self._reader.connect() as connection:
            found = rows.progress(connection, run_ids)
        return {run_id: Sight(*each) for run_id, each in found.items()}

    def page(
        self, filters: rows.Filters, cursor: str | None, limit: int
    ) -> tuple[list[Run], str | None]:
        """Runs, latest first, and the cursor of the next page; raises ``InvalidCursor``."""
        after = None if cursor is None else read_cursor(cursor, str)
        with self._reader.connect() as connection:
            found = rows.page(connection, filters, after, limit + 1)
        more = len(found) > limit
        items = found[:limit]
        return items, cursor_at(items[-1].requested_at, items[-1].id) if more else None

    def repeated(self, call: CommandContext) -> Run | None:
        """The run of an earlier request with this key; raises ``IdempotencyKeyReused``."""
        with self._reader.connect() as connection:
            return asking.repeated(connection, call)

    def enqueue(
        self, wanted: WantedRun, reservation_id: str, call: CommandContext
    ) -> tuple[Run, bool]:
        """Queue a run that has a reservation; returns it and whether it was queued now.

        Raises ``ReservationNotUsable``, ``CertificateNotUsable`` or ``UnknownReservation``.
        """
        try:
            with self._writer.begin() as connection:
                known = asking.repeated(connection, call)
                if known is not None:
                    return known, False
                return asking.enqueue(connection, wanted, reservation_id, call), True
        except IntegrityError:
            with self._reader.connect() as connection:
                known = asking.repeated(connection, call)
            if known is not None:
                return known, False
            raise ReservationNotUsable(
                f"reservation {reservation_id} is another run's.", "Reserve for each run."
            ) from None

    def cancel(self, run_id: str, reason: str, call: CommandContext) -> Run:
        """End a run that waits; tell the worker of one that does not. Raises ``WrongState``."""
        with self._writer.begin() as connection:
            lease = rows.lock(connection, run_id)
            run = rows.find(connection, run_id)
            body = {"code": "cancelled", "message": reason}
            if run.state == "cancelled" or (run.cancel_asked and lease.state != "ended"):
                return run
            if lease.state == "ended":
                raise WrongState(f"run {run_id} is {run.state}.", "There is nothing to stop.")
            if lease.state == "queued":
                ending.give_up(connection, run, "cancelled", body, call, None)
            else:
                rows.change_lease(connection, run_id, cancel=True)
                rows.add_event(
                    connection, run_id, "cancel_asked", body, actor=call.actor, at=call.at
                )
            return rows.find(connection, run_id)

    # ---- workers ---------------------------------------------------------------------

    def claim(self, request: ClaimRequest, actor: str, at: datetime) -> Run | None:
        """The next run that fits, held under a new fencing token; None if none does."""
        self.reap(at)
        asked = {
            "queue": request.queue,
            "memory": request.memory_mib,
            "gpu": request.gpu,
            "place": request.place,
            "at": at,
        }
        with self._reader.connect() as connection:
            if connection.execute(_NEXT, asked).first() is None:
                return None
        with self._writer.begin() as connection:
            lease = connection.execute(_TAKE_NEXT, asked).first()
            if lease is None:
                return None
            rows.change_lease(
                connection,
                lease.run_id,
                state="claimed",
                fence=lease.fence + 1,
                holder=actor,
                worker=request.worker,
                seconds=request.seconds,
                expires_at=at + timedelta(seconds=request.seconds),
            )
            body = {"fence": lease.fence + 1, "worker": request.worker}
            rows.add_event(
                connection,
                lease.run_id,
                "claimed",
                body,
                actor=actor,
                at=at,
                fence=lease.fence + 1,
            )
            return rows.find(connection, lease.run_id)

    def start(
        self, held: Held, plan_digest: str, wants: int | None = None, place: str | None = None
    ) -> Run:
        """Begin a run, or go on with it: check everything again, in one transaction.

        The first time its budget is committed. ``wants`` as in ``renew``; without it every
        step is granted, and the run is not handed over. ``place`` is where its checkpoint will
        be. Raises ``LeaseLost``, or ``RunNotStarted`` once the run was ended for what was found.
        """
        with self._writer.begin() as connection:
            lease = _held(connection, held, "claimed", "running")
            run = rows.find(connection, held.run)
            if lease.state == "running":
                return run  # it was begun under this token, and the answer was lost
            why = _obstacle(connection, run, plan_digest, held, cancelled=lease.cancel)
            if why is None:
                granted = run.certified_steps if wants is None else _granted(run, wants)
                rows.change_lease(
                    connection,
                    run.id,
                    state="running",
                    granted=granted,
                    place=place,
                    previous=held.fence,
                    head=None,
                    elsewhere_at=None,
                )
                body = {"fence": held.fence, "plan_digest": plan_digest, "granted": granted}
                rows.add_event(
                    connection,
                    run.id,
                    "resumed" if run.begun else "running",
                    body,
                    actor=held.actor,
                    at=held.at,
                    fence=held.fence,
                    follows="running" if run.begun else "queued",
                )
                return rows.find(connection, run.id)
            kind: rows.Kind = "cancelled" if lease.cancel else "failed"
            ending.give_up(connection, run, kind, why, held.call, held.fence)
        raise RunNotStarted(f"{why['code']}: {why['message']}", "Claim another run.")

    def renew(self, held: Held, steps: int, *, wants: int = 0, head: str | None = None) -> Renewal:
        """Hold the run longer, having charged ``steps``; raises ``LeaseLost``.

        ``wants`` is how many steps it asks to have charged by the next time, and ``head`` the
        digest of a line of its record. Whatever is granted here is spent if another has to go
        on with the run.
        """
        with self._writer.begin() as connection:
            lease = _held(connection, held, "claimed", "running")
            granted = lease.granted
            if lease.state == "running" and max(steps, wants) > granted:
                granted = _granted(rows.find(connection, held.run), max(steps, wants))
            rows.change_lease(
                connection,
                held.run,
                expires_at=held.at + timedelta(seconds=lease.seconds),
                steps=max(lease.steps, steps),
                granted=granted,
                head=head or lease.head,
            )
            return Renewal(cancel=bool(lease.cancel), granted=granted)

    def keep_record(self, held: Held, part: int, content: bytes) -> None:
        """Keep a part of the run's record, and hold the run longer.

        Raises ``LeaseLost`` or ``RecordRefused``.
        """
        with self._writer.begin() as connection:
            lease = _held(connection, held, "running")
            records.keep(connection, held.run, held.fence, part, content)
            expires_at = held.at + timedelta(seconds=lease.seconds)
            rows.change_lease(connection, held.run, expires_at=expires_at)

    def records(self, run_id: str) -> dict[int, list[bytes]]:
        """The parts of the run's records, by fencing token."""
        with self._reader.connect() as connection:
            return records.kept(connection, run_id)

    def complete(
        self, held: Held, judged: Judged, envelope: dict[str, Any], cost: Cost | None
    ) -> Run:
        """Settle a run on what its record comes to, and keep its provenance.

        ``cost`` is that of ``judged.steps`` steps, None for all that were certified. A run that
        does not conform has failed, and keeps its charge. A report that came before is
        answered as it was. Raises ``LeaseLost``.
        """
        with self._writer.begin() as connection:
            lease = rows.lock(connection, held.run)
            known = rows.find(connection, held.run)
            if known.outcome is not None and known.outcome.get("provenance") == envelope:
                return known
            _require_held(lease, held, "running")
            steps = None if cost is None else judged.steps
            charged = ending.settle(connection, known, steps, judged.record, cost, held.call)
            kind, code = ending.verdict(judged, known, held.at, cancelled=lease.cancel)
            body = {
                "code": code,
                "message": judged.summary,
                "fence": held.fence,
                "steps_charged": charged,
                "record": judged.record,
                "provenance": envelope,
            }
            ending.end(connection, known, kind, body, held.call, fence=held.fence)
            return rows.find(connection, held.run)

    def fail(self, held: Held, code: str, message: str, *, again: bool = False) -> Run:
        """End a run: free if it was not begun, charged in full if it was.

        With ``again`` it is given back instead, for somebody to go on with it, unless it is
        over anyhow. Raises ``LeaseLost``.
        """
        with self._writer.begin() as connection:
            lease = _held(connection, held, "claimed", "running")
            run = rows.find(connection, held.run)
            body = {"code": code, "message": message, "fence": held.fence}
            if again and not handover.is_over(run, lease):
                by: dict[str, Any] = {"actor": held.actor, "at": held.at, "given_back": True}
                handover.requeue(connection, run, lease, body, **by)
            else:
                kind: rows.Kind = "cancelled" if lease.cancel else "failed"
                ending.give_up(connection, run, kind, body, held.call, held.fence)
            return rows.find(connection, held.run)

    def reap(self, at: datetime) -> int:
        """Take back leases that ran out, ``MOST_REAPED`` at most; returns how many.

        Whoever claims next takes back further ones: were each to try all, a pause of the
        service would end in as many transactions as the square of the workers.
        """
        with self._reader.connect() as connection:
            if connection.execute(_RAN_OUT, {"at": at}).first() is None:
                return 0
        for taken in range(MOST_REAPED):
            with self._writer.begin() as connection:
                lease = connection.execute(_TAKE_RAN_OUT, {"at": at}).first()
                if lease is None:
                    return taken
                ending.take_back(connection, lease, at)
        return MOST_REAPED


def _held(connection: Connection, held: Held, *states: str) -> Row[Any]:
    """The lease, if it is still under that token; raises ``LeaseLost``."""
    lease = rows.lock(connection, held.run)
    _require_held(lease, held, *states)
    return lease


def _require_held(lease: Row[Any], held: Held, *states: str) -> None:
    if (lease.fence, lease.holder) != (held.fence, held.actor) or lease.state not in states:
        raise LeaseLost(
            f"run {held.run} is not held under fencing token {held.fence} any more, or not in "
            "this state.",
            "Stop it: nothing that it does from now on counts.",
        )


def _obstacle(
    connection: Connection, run: Run, plan_digest: str, held: Held, *, cancelled: bool
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
                "message": "it was issued anew since the run was asked for.",
            }
        if run.begun:
            return None
        taken = transitions.commit(connection, ledger, reservation, held.call)
    except DomainError as refusal:
        return {"code": refusal.code, "message": refusal.message}
    if not taken:
        return {"code": "reservation_not_usable", "message": "the reservation was used already."}
    return None


def _granted(run: Run, wants: int) -> int:
    """How many steps may have been charged from now on: never fewer, and none uncertified."""
    return max(run.granted, min(wants, run.certified_steps))
