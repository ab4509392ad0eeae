"""The ledger store: sets budgets; reserves, commits, settles and releases the cost of runs.

A run goes one way: reserved, then committed, then settled on the steps that were run, or
released instead of committed. What it reserved counts against the budget until it is
settled; a settled run counts permanently for what it cost.

Rules it keeps:

- Everything that happens is one transaction: the check, the event and its log entry.
- The check inside is one addition of vectors and one comparison. What a run costs was
  computed before, outside, from its certificate.
- The certificate is read again inside, so that one revoked meanwhile reserves nothing, and begins
  no run that was reserved.
- Nothing is given back on a caller's word: by hand a run is settled in full.
- The reservation of a run is the run's: nobody commits, settles or releases it by hand.
- An idempotency key answers a repeated request with what the first one led to, and never
  does it twice. Committing, settling or releasing again alike needs no key for that.
- Two processes that race end as if one had come after the other (``repository``).

Reservations that nobody uses any more are released, or named by an audit. A reservation of a run
lasts as long as the run waits. One without a run, made by hand or left behind by an earlier version
that died between reservation and run, is released after a week.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import ColumnElement, Connection, Engine, RowMapping, Select, and_, exists, select

from affidavit.service.database import Store, write
from affidavit.service.errors import WrongState
from affidavit.service.identity.actor import CommandContext
from affidavit.service.identity.four_eyes import Approve, alone
from affidavit.service.ledger import repository, transitions
from affidavit.service.ledger.models import GrantRequest
from affidavit.service.ledger.state import (
    LedgerScope,
    StoredLedger,
    StoredReservation,
    ledger_events,
    reservations,
)
from affidavit.service.ledger.transitions import Change, CostedRun, HeldByRun, LockedReservation, P
from affidavit.service.runs.repository import run_leases, runs


class LedgerStore(Store):
    """The ledgers; ``repository`` and ``transitions`` have what is read of them."""

    def ledgers(self, dataset: str | None = None) -> list[StoredLedger]:
        """The ledgers of ``dataset``, or all of them."""
        return self.read(repository.all_ledgers, dataset)

    def reservation(self, reservation_id: str) -> StoredReservation:
        """The reservation of that id; raises ``UnknownReservation``."""
        return self.read(transitions.get_reservation, reservation_id)

    def set_budget(
        self,
        scope: LedgerScope,
        epsilon: str,
        delta: str,
        reason: str,
        call: CommandContext,
        team: str | None = None,
        approve: Approve = alone,
    ) -> tuple[StoredLedger, bool]:
        """Set a version of the budget of ``scope``; the first one begins its ledger, of ``team``.

        ``epsilon`` and ``delta`` are decimals. Returns the ledger, and whether this call
        set it (or an earlier one with its idempotency key). Raises ``OtherTeam``.
        """

        def work(connection: Connection) -> tuple[StoredLedger, bool]:
            repository.hold(connection, scope)
            created = not transitions.is_repeated(connection, call)
            if created:
                approve(connection)
                transitions.set_budget(connection, scope, epsilon, delta, reason, call, team)
            ledger = repository.find_ledger(connection, scope)
            assert ledger is not None
            return ledger, created

        return write(self._engine, work)

    def grant(
        self,
        dataset: str,
        request: GrantRequest,
        call: CommandContext,
        approve: Approve = alone,
    ) -> list[RowMapping]:
        """Let a team reserve from ``dataset``, read its ledger, or do nothing any more."""

        def work(connection: Connection) -> list[RowMapping]:
            approve(connection)
            repository.add_grant(connection, dataset, request, call)
            return repository.grants_of(connection, dataset)

        return write(self._engine, work)

    def reserve(self, run: CostedRun, call: CommandContext) -> tuple[StoredReservation, bool]:
        """Reserve the cost of a certified run.

        Raises ``NoBudget``, ``NotGranted``, ``OverBudget``, ``CertificateNotUsable`` or
        ``IdempotencyKeyReused``. Returns the reservation and whether it was made now.
        """

        def work(connection: Connection) -> tuple[StoredReservation, bool]:
            transitions.hold_for(connection, run)
            earlier = transitions.repeated_reservation(connection, call)
            if earlier is not None:
                return earlier, False
            return transitions.reserve_usable(connection, run, call), True

        return write(self._engine, work)

    def change(
        self,
        reservation_id: str,
        call: CommandContext,
        change: Change[P],
        *values: P.args,
        **named: P.kwargs,
    ) -> tuple[StoredReservation, bool]:
        """The reservation after ``change``, and whether that happened now.

        Raises ``UnknownReservation``, ``HeldByRun``, and what ``change`` does.
        """

        def work(connection: Connection) -> tuple[StoredReservation, bool]:
            return transitions.apply(connection, reservation_id, call, change, *values, **named)

        return write(self._engine, work)


# ---- reservations that expire --------------------------------------------------------

LIFETIME = timedelta(days=7)
ACTOR = "service:expiry"
MAX_EXPIRED = 1000
"""Reservations of one round."""


def expire_reservations(writer: Engine, reader: Engine, at: datetime) -> int:
    """Release unused reservations older than ``LIFETIME`` that have no run; returns how many."""
    with reader.connect() as connection:
        expired = connection.execute(_without_run(at).limit(MAX_EXPIRED)).scalars().all()
    released = 0
    for reservation_id in expired:
        # A run may have been queued on it since, or it was used.
        with suppress(HeldByRun, WrongState), writer.begin() as connection:
            call = CommandContext(actor=ACTOR, at=at)
            _, happened = transitions.apply(
                connection, reservation_id, call, LockedReservation.release, "expired"
            )
            released += happened
    return released


def orphans(connection: Connection, at: datetime) -> Iterator[tuple[str, str]]:
    """Reservations that block budget and that nobody will settle, each with the reason."""
    for reservation_id in connection.execute(_without_run(at)).scalars():
        yield reservation_id, f"it has no run, and is older than {LIFETIME.days} days."
    ended = (
        select(runs.c.reservation_id, runs.c.id)
        .join(run_leases, run_leases.c.run_id == runs.c.id)
        .where(run_leases.c.state == "ended", ~_has(runs.c.reservation_id, "settle", "release"))
    )
    for reservation_id, run_id in connection.execute(ended):
        yield reservation_id, f"run {run_id} has ended, and it is neither settled nor released."


def _without_run(at: datetime) -> Select[Any]:
    """Unused reservations older than ``LIFETIME`` without a run."""
    made = and_(
        ledger_events.c.reservation_id == reservations.c.id,
        ledger_events.c.kind == "reserve",
        ledger_events.c.at < at - LIFETIME,
    )
    return (
        select(reservations.c.id)
        .join(ledger_events, made)
        .where(~exists().where(runs.c.reservation_id == reservations.c.id))
        .where(~_has(reservations.c.id, "commit", "release"))
        .order_by(ledger_events.c.at)
    )


def _has(reservation_id: ColumnElement[str], *kinds: str) -> ColumnElement[bool]:
    """Whether one of these events happened to a reservation."""
    later = ledger_events.alias()
    return exists().where(later.c.reservation_id == reservation_id, later.c.kind.in_(kinds))
