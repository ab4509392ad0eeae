"""The ledger store: sets budgets; reserves, commits, settles and releases the cost of runs.

A run is reserved, then committed, then settled by the steps that it took, or released instead of
committed. Its reservation counts against the budget until it is settled. A settled run counts
permanently for its cost.

Rules:

- The check, the event and its log entry are one transaction.
- The check adds two vectors and compares once. The cost of a run is computed before the
  transaction, from its certificate.
- The certificate is read again in the transaction, so a certificate revoked meanwhile reserves
  nothing and begins no run.
- A caller's report frees no budget: a run settled by hand is charged in full.
- The reservation of a queued run is committed, settled and released by that run only.
- A repeated idempotency key returns the first result and changes nothing. Repeating a commit,
  settlement or release needs no key.
- Two concurrent processes leave the same result as one after the other (``repository``).
- Transactions lock the certificate first and the ledger second, so they cannot deadlock.
- An unused reservation without a run is released after a week.

>>> OverBudget("The run would exceed the budget.", "Run fewer steps.").code
'over_budget'
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Concatenate, ParamSpec

from sqlalchemy import Connection, RowMapping, insert

from affidavit.accountants.privacy_filter import Cost, Filter
from affidavit.service.certificates.decisions import require_logged_decisions
from affidavit.service.certificates.store import StoredCertificate, current
from affidavit.service.core.database import Store, write
from affidavit.service.core.database import hold as hold_certificate
from affidavit.service.core.errors import (
    DomainError,
    OtherTeam,
    WrongState,
)
from affidavit.service.core.teams import DEFAULT, may_see
from affidavit.service.core.wire_models import Status
from affidavit.service.identity.actor import Approve, CommandContext, approve_alone
from affidavit.service.ledger import repository
from affidavit.service.ledger.integrity import require_logged
from affidavit.service.ledger.state import (
    LedgerScope,
    LedgerState,
    StoredLedger,
    StoredReservation,
)
from affidavit.service.ledger.wire_models import GrantRequest
from affidavit.service.tables.ledger import reservations


class NoBudget(DomainError):
    """This data set, unit and adjacency have no budget."""

    code = "no_budget"


class NotGranted(DomainError):
    """The certificate's team may read the data set's ledger, but not reserve from it."""

    code = "not_granted"
    status = 403


class OverBudget(DomainError):
    """The privacy filter does not admit the run on top of the spent budget."""

    code = "over_budget"


class CertificateNotUsable(DomainError):
    """The certificate is unknown, not certified, not current, not trusted, or about other data."""

    code = "certificate_not_usable"


class HeldByRun(DomainError):
    """The reservation belongs to a run, which alone commits, settles and releases it."""

    code = "held_by_run"


class UnknownReservation(DomainError):
    """No reservation has this id."""

    code = "not_found"
    status = 404


class StepsAboveCertificate(DomainError):
    """More steps were run than the certificate covers."""

    code = "steps_above_certificate"


class RecordRequired(DomainError):
    """Charging fewer steps than certified requires a run record that the service has verified."""

    code = "record_required"
    status = 422


@dataclass(frozen=True, kw_only=True, slots=True)
class CostedRun:
    """A certificate to reserve a run of, and the cost of that run.

    ``event`` is the event document of the whole run. ``certain`` tells whether the certificate
    holds without a confidence. ``allow_untrusted`` admits a development key's certificate.
    """

    scope: LedgerScope
    certificate: StoredCertificate
    steps: int
    cost: Cost
    event: dict[str, Any]
    certain: bool
    allow_untrusted: bool = False


# ---- usable certificates -------------------------------------------------------------


def require_usable(
    certificate: StoredCertificate | None,
    dataset: str,
    *,
    allow_untrusted: bool,
    issue: StoredCertificate | StoredReservation | None = None,
) -> StoredCertificate:
    """Return ``certificate`` if a run of it may begin now; else raise ``CertificateNotUsable``.

    ``issue`` is the issue whose cost was computed, or a reservation of that issue. It must still
    be the current issue.
    """
    if certificate is None:
        raise _not_usable("it does not exist.", "GET /v1/certificates lists all certificates.")
    if certificate.verdict != "certified":
        raise _not_usable(
            f"its verdict is {certificate.verdict}.", "Reserve for a plan that is certified."
        )
    if certificate.status is not Status.ACTIVE:
        raise _not_usable(
            f"it is {certificate.status.value.replace('_', ' ')}.", _remedy_for_status(certificate)
        )
    if certificate.dataset != dataset:
        subject = certificate.dataset or "a data set without a name"
        raise _not_usable(
            f"it is about {subject}, not {dataset}.", "Name the data set in the plan."
        )
    if certificate.untrusted and not allow_untrusted:
        raise _not_usable(
            "it was signed by a development key.",
            "Create a key with `affidavit keys new` and POST the plan again.",
        )
    if issue is not None and (issue.issue, issue.untrusted) != (
        certificate.issue,
        certificate.untrusted,
    ):
        raise _not_usable("it has been reissued since.", "Reserve again.")
    return certificate


def require_reserved_usable(
    connection: Connection, reservation: StoredReservation
) -> StoredCertificate:
    """Return the certificate of a reservation if its run may begin now.

    Raises ``CertificateNotUsable``, and ``NotGenuine`` for a tampered certificate.
    """
    return require_usable(
        current(connection, reservation.certificate),
        reservation.dataset,
        allow_untrusted=reservation.untrusted,
        issue=reservation,
    )


def _remedy_for_status(certificate: StoredCertificate) -> str:
    """Return how a certificate that is not active becomes usable."""
    path = f"/v1/certificates/{certificate.id}"
    match certificate.status:
        case Status.AWAITING_APPROVAL:
            return f"Ask somebody with the scope approve to approve it: POST {path}/approvals."
        case Status.REVOKED | Status.REJECTED:
            # Sending the plan again does not undo a person's decision.
            return f"Ask somebody with the scope approve to reissue it: POST {path}/issues."
        case Status.SUPERSEDED:
            return "A later issue took its place. Send the request again."
        case _:
            return "POST the plan again to reissue it."


def _not_usable(message: str, remedy: str) -> CertificateNotUsable:
    return CertificateNotUsable(f"the certificate cannot be used: {message}", remedy)


# ---- in the transaction of a connection ----------------------------------------------


def get_reservation(connection: Connection, reservation_id: str) -> StoredReservation:
    """Return the reservation of that id; raises ``UnknownReservation``."""
    reservation = repository.find_reservation(connection, reservation_id)
    if reservation is None:
        raise _unknown(reservation_id)
    return reservation


def _unknown(reservation_id: str) -> UnknownReservation:
    return UnknownReservation(
        f"reservation {reservation_id} not found.", "GET /v1/ledgers/DATASET lists reservations."
    )


def find_repeated_reservation(
    connection: Connection, context: CommandContext
) -> StoredReservation | None:
    """Return the reservation of an earlier identical request; raises ``IdempotencyKeyReused``."""
    event = repository.find_repeated(connection, context)
    return None if event is None else get_reservation(connection, event.reservation_id)


def lock_for_reservation(connection: Connection, run: CostedRun) -> None:
    """Lock the certificate and the ledger of ``run`` until the transaction ends."""
    hold_certificate(connection, run.certificate.id)
    repository.lock_ledger(connection, run.scope)


def reserve(connection: Connection, run: CostedRun, context: CommandContext) -> StoredReservation:
    """Reserve the cost of a run, after ``lock_for_reservation``.

    Raises ``CertificateNotUsable``, ``NoBudget``, ``NotGranted`` or ``OverBudget``, and
    ``LogDamaged`` if a decision about the certificate is not as it was logged.
    """
    require_logged_decisions(connection, run.certificate.id)
    require_usable(
        current(connection, run.certificate.id),
        run.scope.dataset,
        allow_untrusted=run.allow_untrusted,
        issue=run.certificate,
    )
    ledger = repository.find_ledger(connection, run.scope)
    if ledger is None:
        raise NoBudget(
            f"{run.scope} has no budget; each unit and adjacency has its own ledger.",
            "Set one: POST /v1/ledgers/DATASET/budget.",
        )
    if not repository.may_reserve(connection, ledger, run.certificate.team):
        raise NotGranted(
            f"The team {run.certificate.team} may not reserve from {run.scope.dataset}.",
            "Ask an administrator for a grant: POST /v1/ledgers/DATASET/grants.",
        )
    rule = ledger.state.rule_for(ledger.filter, run.cost, certain=run.certain)
    if rule is None:
        raise OverBudget(
            f"with this run {run.scope} would exceed its budget of ε = "
            f"{ledger.state.budget.epsilon} at δ = {ledger.state.budget.delta}.",
            "Run fewer steps or with more noise, or raise the budget.",
        )
    reservation_id, certificate = str(uuid.uuid4()), run.certificate
    facts = {
        "certificate_id": certificate.id,
        "issue": certificate.issue,
        "untrusted": certificate.untrusted,
        "plan_digest": certificate.plan_digest,
        "certified_steps": run.steps,
        "rule": rule,
    }
    cost = run.cost.as_document()
    connection.execute(
        insert(reservations).values(
            id=reservation_id,
            ledger_id=ledger.id,
            name=certificate.name,
            team=certificate.team,
            cost=json.dumps(cost, sort_keys=True),
            event=json.dumps(run.event, sort_keys=True),
            **facts,
        )
    )
    repository.add_event(
        connection,
        ledger.id,
        ledger.scope,
        "reserve",
        ledger.state.with_reservation(run.cost, rule),
        {**facts, "certain": run.certain, "cost": cost},
        context,
        reservation_id=reservation_id,
        certified_steps=run.steps,
    )
    return get_reservation(connection, reservation_id)


def lock_reservation(
    connection: Connection, reservation_id: str, context: CommandContext
) -> LockedReservation:
    """Lock the ledger of a reservation until the transaction ends.

    Raises ``UnknownReservation``, also for another team's reservation in a shared ledger, and
    ``LedgerAltered`` for a reservation that contradicts the log.
    """
    scope = get_reservation(connection, reservation_id).scope
    repository.lock_ledger(connection, scope)
    ledger = repository.find_ledger(connection, scope)
    assert ledger is not None
    reservation = get_reservation(connection, reservation_id)
    if not may_see(reservation.team):
        raise _unknown(reservation_id)
    require_logged(connection, reservation)
    return LockedReservation(connection, ledger, reservation, context)


@dataclass(frozen=True, slots=True)
class LockedReservation:
    """A reservation and its ledger, locked by the transaction of ``connection``.

    Each change is recorded with ``context``, returns whether it happened now, and raises
    ``WrongState`` if the reservation's state does not allow it.
    """

    connection: Connection
    ledger: StoredLedger
    reservation: StoredReservation
    context: CommandContext

    def commit(self) -> bool:
        """Commit the reservation as its run begins."""
        if self.reservation.state == "released":
            raise self._wrong_state("Reserve again before the run begins.")
        if self.reservation.state != "reserved":
            return False
        self._add_event("commit", self.ledger.state.with_commitment(), {})
        return True

    def commit_usable(self) -> bool:
        """Commit the reservation if its certificate is still usable.

        Raises ``CertificateNotUsable`` besides.
        """
        if self.reservation.state == "reserved":
            try:
                require_reserved_usable(self.connection, self.reservation)
            except CertificateNotUsable as error:
                raise CertificateNotUsable(
                    f"the run must not begin: {error.message}",
                    f"Release the reservation. {error.remedy}",
                ) from None
        return self.commit()

    def release(self, reason: str) -> bool:
        """Release the reservation of a run that never began."""
        reservation = self.reservation
        if reservation.state == "released":
            return False
        if reservation.state != "reserved":
            raise self._wrong_state("Settle a run that has begun, by the steps it took.")
        state = self.ledger.state.with_release(reservation.cost, reservation.admitted_by)
        self._add_event("release", state, {"reason": reason})
        return True

    def settle(self, steps_run: int, record: str | None, cost: Cost | None) -> bool:
        """Charge a committed run for its steps; ``cost`` is None for all of them.

        Raises ``StepsAboveCertificate`` or ``RecordRequired`` besides.
        """
        reservation, certified = self.reservation, self.reservation.steps.certified
        if steps_run > certified:
            raise StepsAboveCertificate(
                f"{steps_run} steps were run and {certified} are certified.",
                "Stop using the results of this run: its guarantee does not hold. Tell the "
                "auditor.",
            )
        if steps_run < certified and record is None:
            raise _record_required(steps_run, certified)
        if reservation.state == "settled":
            if (reservation.steps.run, reservation.record) == (steps_run, record):
                return False
            raise self._wrong_state("A run can be settled only once.")
        if reservation.state != "committed":
            raise self._wrong_state("Commit it first.")
        charged = reservation.cost
        if cost is not None and steps_run < certified:
            # The cost of the whole run bounds the cost of every part of it.
            charged = charged.least(cost)
        state = self.ledger.state.with_settlement(reservation.cost, charged)
        body = {"steps_run": steps_run, "record": record, "cost": charged.as_document()}
        self._add_event("settle", state, body, steps_run=steps_run)
        return True

    def settle_by_hand(self, reported: int | None, record: str | None) -> bool:
        """Charge in full for a run that the service did not observe. Raises like ``settle``.

        The digest of a record proves nothing: only a record that the service itself holds and has
        verified (``runs.queue.LockedRun``) reduces a charge.
        """
        certified = self.reservation.steps.certified
        steps_run = certified if reported is None else reported
        if self.reservation.state == "committed" and steps_run < certified:
            raise _record_required(steps_run, certified)
        return self.settle(steps_run, record, None)

    def _add_event(
        self, kind: str, state: LedgerState, body: Mapping[str, Any], steps_run: int | None = None
    ) -> None:
        repository.add_event(
            self.connection,
            self.ledger.id,
            self.ledger.scope,
            kind,
            state,
            body,
            self.context,
            reservation_id=self.reservation.id,
            certified_steps=self.reservation.steps.certified,
            steps_run=steps_run,
        )

    def _wrong_state(self, remedy: str) -> WrongState:
        return WrongState(f"reservation {self.reservation.id} is {self.reservation.state}.", remedy)


def _record_required(steps_run: int, certified: int) -> RecordRequired:
    return RecordRequired(
        f"charging {steps_run} of {certified} steps requires a run record.",
        "Settle without steps_run for the full charge. Fewer steps are charged to a run of a queue "
        "(POST /v1/runs, which takes the reservation), whose worker sends its signed record.",
    )


# ---- the store -----------------------------------------------------------------------

P = ParamSpec("P")
Change = Callable[Concatenate[LockedReservation, P], bool]
"""A method of ``LockedReservation``."""

MAX_EXPIRED = 1000
"""Reservations released in one round of ``LedgerStore.expire``."""


class LedgerStore(Store):
    """The ledgers."""

    def ledgers(self, dataset: str | None = None) -> list[StoredLedger]:
        """Return the ledgers of ``dataset``, or all ledgers."""
        return self.read(repository.all_ledgers, dataset)

    def reservation(self, reservation_id: str) -> StoredReservation:
        """Return the reservation of that id; raises ``UnknownReservation``."""
        return self.read(get_reservation, reservation_id)

    def set_budget(
        self,
        scope: LedgerScope,
        epsilon: str,
        delta: str,
        reason: str,
        context: CommandContext,
        team: str | None = None,
        approve: Approve = approve_alone,
    ) -> tuple[StoredLedger, bool]:
        """Set a version of the budget of ``scope``; the first version opens its ledger.

        ``epsilon`` and ``delta`` are decimals. ``team`` owns the data set from its first budget on.
        Returns the ledger, and whether this call set the budget. Raises ``OtherTeam``.
        """

        def work(connection: Connection) -> tuple[StoredLedger, bool]:
            repository.lock_ledger(connection, scope)
            created = repository.find_repeated(connection, context) is None
            if created:
                approve(connection)
                _set_budget(connection, scope, epsilon, delta, reason, context, team)
            ledger = repository.find_ledger(connection, scope)
            assert ledger is not None
            return ledger, created

        return write(self._engine, work)

    def grant(
        self,
        dataset: str,
        request: GrantRequest,
        context: CommandContext,
        approve: Approve = approve_alone,
    ) -> list[RowMapping]:
        """Set a team's access to ``dataset``; return the grants of all teams."""

        def work(connection: Connection) -> list[RowMapping]:
            approve(connection)
            repository.add_grant(connection, dataset, request, context)
            return repository.grants_of(connection, dataset)

        return write(self._engine, work)

    def reserve(self, run: CostedRun, context: CommandContext) -> tuple[StoredReservation, bool]:
        """Reserve the cost of a certified run; return whether this call made the reservation.

        Raises ``NoBudget``, ``NotGranted``, ``OverBudget``, ``CertificateNotUsable`` or
        ``IdempotencyKeyReused``.
        """

        def work(connection: Connection) -> tuple[StoredReservation, bool]:
            lock_for_reservation(connection, run)
            earlier = find_repeated_reservation(connection, context)
            if earlier is not None:
                return earlier, False
            return reserve(connection, run, context), True

        return write(self._engine, work)

    def change(
        self,
        reservation_id: str,
        context: CommandContext,
        change: Change[P],
        *values: P.args,
        **named: P.kwargs,
    ) -> tuple[StoredReservation, bool]:
        """Apply ``change`` to a reservation; return the result and whether this call changed it.

        Raises ``UnknownReservation``, ``HeldByRun``, ``IdempotencyKeyReused``, and the errors of
        ``change``.
        """

        def work(connection: Connection) -> tuple[StoredReservation, bool]:
            hold_certificate(connection, get_reservation(connection, reservation_id).certificate)
            locked = lock_reservation(connection, reservation_id, context)
            if (run_id := locked.reservation.run) is not None:
                raise HeldByRun(
                    f"reservation {reservation_id} belongs to run {run_id}, which commits, "
                    "settles and releases it by its record.",
                    f"Cancel the run instead: POST /v1/runs/{run_id}/cancel.",
                )
            if repository.find_repeated(connection, context) is not None:
                return locked.reservation, False
            happened = change(locked, *values, **named)
            return get_reservation(connection, reservation_id), happened

        return write(self._engine, work)

    def expire(self, at: datetime) -> int:
        """Release unused reservations without a run that are older than a week; return how many."""
        with self._reader.connect() as connection:
            unused = repository.unused_reservations(at).limit(MAX_EXPIRED)
            expired = connection.execute(unused).scalars().all()
        context = CommandContext(actor="service:expiry", at=at)
        released = 0
        for reservation_id in expired:
            # A run may have been queued on it since, or it was used.
            with suppress(HeldByRun, WrongState):
                _, happened = self.change(
                    reservation_id, context, LockedReservation.release, "expired"
                )
                released += happened
        return released


def _set_budget(
    connection: Connection,
    scope: LedgerScope,
    epsilon: str,
    delta: str,
    reason: str,
    context: CommandContext,
    team: str | None,
) -> None:
    owners = {ledger.team for ledger in repository.all_ledgers(connection, scope.dataset)}
    owner = next(iter(owners), team or DEFAULT)
    if team not in (None, owner):
        raise OtherTeam(
            f"{scope.dataset} belongs to the team {owner}.",
            "Leave `team` out, or grant the team access: POST /v1/ledgers/DATASET/grants.",
        )
    ledger = repository.find_ledger(connection, scope)
    if ledger is None:
        filter_ = Filter.start(float(epsilon), float(delta))
        state = LedgerState.first(epsilon, delta, filter_)
        ledger_id = repository.add_ledger(connection, scope, owner, filter_, context.at)
    else:
        state, ledger_id = ledger.state.with_budget(epsilon, delta), ledger.id
    body = {
        "version": state.budget.number,
        "epsilon": epsilon,
        "delta": delta,
        "reason": reason,
        **({} if owner == DEFAULT else {"team": owner}),
    }
    repository.add_event(connection, ledger_id, scope, "budget", state, body, context)
