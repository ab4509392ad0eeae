"""The ledger: budgets set, runs reserved, committed, settled and released.

A run goes one way: reserved, then committed, then settled on the steps that were run, or
released instead of committed. What it reserved counts against the budget until it is
settled; a settled run counts for what it cost for ever.

Rules it keeps:

- Everything that happens is one transaction: the check, the event and its log entry.
- The check inside is one addition of vectors and one comparison. What a run costs was
  worked out before, outside, from its certificate.
- The certificate is read again inside, so that one revoked meanwhile reserves nothing, and begins
  no run that was reserved.
- The reservation of a run is the run's: nobody commits, settles or releases it by hand.
- An idempotency key answers a repeated request with what the first one led to, and never
  does it twice. Committing, settling or releasing again alike needs no key for that.
- Two processes that race end as if one had come after the other (``rows``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import IntegrityError

from affidavit.accountants.privacy_filter import Cost
from affidavit.service.command import CommandContext
from affidavit.service.database import reader, writer
from affidavit.service.ledger import rows, steps
from affidavit.service.ledger.rows import KeptLedger, Reservation, Scope
from affidavit.service.store import current
from affidavit.service.store import hold as hold_certificate

T = TypeVar("T")


class Ledger:
    """The ledgers behind one engine; safe to call from several threads and processes."""

    def __init__(self, engine: Engine) -> None:
        self._reader = reader(engine)
        self._writer = writer(engine)

    # ---- reading ---------------------------------------------------------------------

    def ledgers(self, dataset: str | None = None) -> list[KeptLedger]:
        """The ledgers of ``dataset``, or all of them."""
        with self._reader.connect() as connection:
            return rows.all_ledgers(connection, dataset)

    def find(self, scope: Scope) -> KeptLedger | None:
        """The ledger of ``scope``, if it has a budget."""
        with self._reader.connect() as connection:
            return rows.find_ledger(connection, scope)

    def find_all(self, scopes: Sequence[Scope]) -> list[KeptLedger | None]:
        """The same for each of ``scopes``, in one look."""
        with self._reader.connect() as connection:
            found = {item: rows.find_ledger(connection, item) for item in set(scopes)}
        return [found[scope] for scope in scopes]

    def reservations(self, ledger_id: int) -> list[Reservation]:
        """The reservations of a ledger, latest first."""
        with self._reader.connect() as connection:
            return rows.reservations_of(connection, ledger_id)

    def reservation(self, reservation_id: str) -> Reservation:
        """The reservation of that id; raises ``UnknownReservation``."""
        with self._reader.connect() as connection:
            return steps.existing(connection, reservation_id)

    def repeated(self, call: CommandContext) -> Reservation | None:
        """The reservation of an earlier request with this key; None if there was no such request.

        Raises ``IdempotencyKeyReused``. ``reserve`` looks again, in its transaction.
        """
        with self._reader.connect() as connection:
            return steps.repeated_reservation(connection, call)

    # ---- writing ---------------------------------------------------------------------

    def set_budget(
        self, scope: Scope, epsilon: str, delta: str, reason: str, call: CommandContext
    ) -> tuple[KeptLedger, bool]:
        """Set a version of the budget of ``scope``; the first one begins its ledger.

        ``epsilon`` and ``delta`` are decimals. Returns the ledger, and whether this call
        set it (or an earlier one with its idempotency key).
        """

        def work(connection: Connection) -> tuple[KeptLedger, bool]:
            rows.hold(connection, scope)
            created = not steps.is_repeated(connection, call)
            if created:
                steps.set_budget(connection, scope, epsilon, delta, reason, call)
            kept = rows.find_ledger(connection, scope)
            assert kept is not None
            return kept, created

        return self._write(work)

    def reserve(self, claim: steps.Claim, call: CommandContext) -> tuple[Reservation, bool]:
        """Reserve the cost of a certified run.

        Raises ``NoBudget``, ``OverBudget``, ``CertificateNotUsable`` or
        ``IdempotencyKeyReused``. Returns the reservation and whether it was made now.
        """

        def work(connection: Connection) -> tuple[Reservation, bool]:
            hold_certificate(connection, claim.certificate.id)
            rows.hold(connection, claim.scope)
            known = steps.repeated_reservation(connection, call)
            if known is not None:
                return known, False
            steps.require_usable(
                current(connection, claim.certificate.id),
                claim.scope.dataset,
                untrusted_too=claim.untrusted_too,
                issue=claim.certificate,
            )
            return steps.reserve(connection, claim, call), True

        return self._write(work)

    def commit(self, reservation_id: str, call: CommandContext) -> tuple[Reservation, bool]:
        """Say that the run begins: from here on it can only be settled.

        Raises ``UnknownReservation``, ``HeldByRun`` or ``WrongState``, and
        ``CertificateNotUsable`` where the certificate was revoked, ran out or was issued anew since
        it was reserved for.
        """

        def work(connection: Connection) -> tuple[Reservation, bool]:
            # The certificate first and the ledger then, as everywhere: no two wait for each other.
            hold_certificate(connection, steps.existing(connection, reservation_id).certificate_id)
            return steps.take_step(connection, reservation_id, call, steps.commit_usable)

        return self._write(work)

    def release(
        self, reservation_id: str, reason: str, call: CommandContext
    ) -> tuple[Reservation, bool]:
        """Give back what was reserved for a run that never began.

        Raises ``UnknownReservation``, ``HeldByRun`` or ``WrongState``.
        """
        return self._step(
            reservation_id, call, lambda *given: steps.release_held(*given, reason=reason)
        )

    def settle(
        self,
        reservation_id: str,
        steps_run: int,
        record: str | None,
        cost: Cost | None,
        call: CommandContext,
    ) -> tuple[Reservation, bool]:
        """Charge a committed run for the steps that it ran.

        ``record`` is the digest of its run record; without one it is charged in full.
        ``cost`` is that of ``steps_run`` steps, None for all of them. Raises
        ``UnknownReservation``, ``HeldByRun``, ``WrongState``, ``StepsAboveCertificate`` or
        ``RecordRequired``.
        """
        return self._step(
            reservation_id,
            call,
            lambda *given: steps.settle_held(*given, steps_run=steps_run, record=record, cost=cost),
        )

    def _step(
        self,
        reservation_id: str,
        call: CommandContext,
        take: steps.Take,
    ) -> tuple[Reservation, bool]:
        """One step of a reservation; ``take`` says whether it was taken now."""
        return self._write(
            lambda connection: steps.take_step(connection, reservation_id, call, take)
        )

    def _write(self, work: Callable[[Connection], T]) -> T:
        """``work`` in one transaction, once more if another was quicker with the same key."""
        try:
            with self._writer.begin() as connection:
                return work(connection)
        except IntegrityError:
            with self._writer.begin() as connection:
                return work(connection)
