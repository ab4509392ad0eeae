"""Transitions of a ledger within one transaction, which may be that of another use case.

``store`` says which rules they keep. Callers lock the certificate first, where one is concerned,
and the ledger then (``hold_reservation``), so that no two transactions wait for each other.

>>> OverBudget("The run would exceed the budget.", "Run fewer steps.").code
'over_budget'
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Concatenate, Literal, ParamSpec

from sqlalchemy import Connection, insert

from affidavit.accountants.privacy_filter import Cost, Filter
from affidavit.service.certificate_store import StoredCertificate, current
from affidavit.service.database import hold as hold_certificate
from affidavit.service.errors import DomainError, OtherTeam, WrongState
from affidavit.service.identity.actor import CommandContext
from affidavit.service.ledger import repository
from affidavit.service.ledger.integrity import require_logged
from affidavit.service.ledger.state import (
    LedgerScope,
    LedgerState,
    StoredLedger,
    StoredReservation,
    reservations,
)
from affidavit.service.lifecycle.status import Status
from affidavit.service.teams import DEFAULT, may_see


class NoBudget(DomainError):
    """This data set, unit and adjacency have no budget."""

    code = "no_budget"


class NotGranted(DomainError):
    """The certificate's team may read the data set's ledger, but not reserve from it."""

    code = "not_granted"
    status = 403


class OverBudget(DomainError):
    """The privacy filter does not admit the run on top of what was spent."""

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
    """Charging fewer steps than certified requires a run record that the service has judged."""

    code = "record_required"
    status = 422


NO_STEPS_BY_HAND = (
    "Settle without steps_run for the full charge. Fewer steps are charged to a run of a queue "
    "(POST /v1/runs, which takes the reservation), whose worker sends its signed record."
)


@dataclass(frozen=True, kw_only=True, slots=True)
class CostedRun:
    """A certificate to reserve for, and what its run costs.

    ``event`` is the event document of the whole run, ``certain`` whether the certificate
    holds without a confidence. ``allow_untrusted`` admits a development key's certificate.
    """

    scope: LedgerScope
    certificate: StoredCertificate
    steps: int
    cost: Cost
    event: dict[str, Any]
    certain: bool
    allow_untrusted: bool = False


def get_reservation(connection: Connection, reservation_id: str) -> StoredReservation:
    """The reservation of that id; raises ``UnknownReservation``."""
    reservation = repository.find_reservation(connection, reservation_id)
    if reservation is None:
        raise _unknown(reservation_id)
    return reservation


def hold_reservation(
    connection: Connection, reservation_id: str, call: CommandContext
) -> LockedReservation:
    """A reservation and its ledger, which no other transaction changes until ours ends.

    Raises ``UnknownReservation``, also for one of another team in a ledger that ours may see, and
    ``LedgerAltered`` for one that is not as it was logged.
    """
    scope = repository.scope_of(connection, reservation_id)
    if scope is None:
        raise _unknown(reservation_id)
    repository.hold(connection, scope)
    ledger = repository.find_ledger(connection, scope)
    assert ledger is not None
    reservation = get_reservation(connection, reservation_id)
    if not may_see(reservation.team):
        raise _unknown(reservation_id)
    require_logged(connection, reservation)
    return LockedReservation(connection, ledger, reservation, call)


def require_usable(
    certificate: StoredCertificate | None,
    dataset: str,
    *,
    allow_untrusted: bool,
    issue: StoredCertificate | StoredReservation | None = None,
) -> None:
    """Raise ``CertificateNotUsable`` unless a run of ``certificate`` may begin now.

    ``issue`` is the one whose cost was computed, or a reservation of it; it must still be the
    current one.
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
        about = certificate.dataset or "a data set without a name"
        raise _not_usable(f"it is about {about}, not {dataset}.", "Name the data set in the plan.")
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


def require_usable_now(
    connection: Connection,
    issue: StoredCertificate | StoredReservation,
    dataset: str,
    *,
    allow_untrusted: bool,
) -> StoredCertificate:
    """The certificate of ``issue`` or of its reservation, if a run of it may begin now.

    Raises ``CertificateNotUsable``, and ``NotGenuine`` for one that somebody else put there.
    """
    named = issue.certificate_id if isinstance(issue, StoredReservation) else issue.id
    certificate = current(connection, named)
    require_usable(certificate, dataset, allow_untrusted=allow_untrusted, issue=issue)
    assert certificate is not None
    return certificate


def require_reserved_usable(
    connection: Connection, reservation: StoredReservation
) -> StoredCertificate:
    """The same for a reservation."""
    dataset, untrusted = reservation.scope.dataset, reservation.untrusted
    return require_usable_now(connection, reservation, dataset, allow_untrusted=untrusted)


def _remedy_for_status(certificate: StoredCertificate) -> str:
    """How a certificate that is not active becomes usable; its status tells who has to act."""
    path = f"/v1/certificates/{certificate.id}"
    match certificate.status:
        case Status.AWAITING_APPROVAL:
            return f"Ask somebody with the scope approve to approve it: POST {path}/approvals."
        case Status.REVOKED | Status.REJECTED:
            # Sending the plan again does not undo what a person decided.
            return f"Ask somebody with the scope approve to reissue it: POST {path}/issues."
        case Status.SUPERSEDED:
            return "A later issue took its place. Send the request again."
        case _:
            return "POST the plan again to reissue it."


def _not_usable(message: str, remedy: str) -> CertificateNotUsable:
    return CertificateNotUsable(f"the certificate cannot be used: {message}", remedy)


def _unknown(reservation_id: str) -> UnknownReservation:
    return UnknownReservation(
        f"reservation {reservation_id} not found.", "GET /v1/ledgers/DATASET lists reservations."
    )


def is_repeated(connection: Connection, call: CommandContext) -> bool:
    """Whether this very request was answered before; raises ``IdempotencyKeyReused``."""
    return repository.repeated(connection, call) is not None


def repeated_reservation(connection: Connection, call: CommandContext) -> StoredReservation | None:
    """What this very request reserved before; raises ``IdempotencyKeyReused``."""
    event = repository.repeated(connection, call)
    return None if event is None else get_reservation(connection, event.reservation_id)


def set_budget(
    connection: Connection,
    scope: LedgerScope,
    epsilon: str,
    delta: str,
    reason: str,
    call: CommandContext,
    team: str | None = None,
) -> None:
    """Set a version of the budget of ``scope``; the first one opens its ledger.

    ``team`` is whose data set it is, which its first budget says. Raises ``OtherTeam``.
    """
    ledger = repository.find_ledger(connection, scope)
    owner = _owner(connection, scope.dataset, team)
    if ledger is None:
        filter_ = Filter.start(float(epsilon), float(delta))
        state = LedgerState.first(epsilon, delta, filter_)
        ledger_id = repository.add_ledger(connection, scope, owner, filter_, call.at)
    else:
        state, ledger_id = ledger.state.with_budget(epsilon, delta), ledger.id
    body = {
        "version": state.budget.number,
        "epsilon": epsilon,
        "delta": delta,
        "reason": reason,
        **({} if owner == DEFAULT else {"team": owner}),
    }
    repository.add_event(connection, ledger_id, scope, "budget", state, body, call)


def _owner(connection: Connection, dataset: str, team: str | None) -> str:
    """Whose data set it is: all its ledgers are of one team."""
    owners = {ledger.team for ledger in repository.all_ledgers(connection, dataset)}
    owner = next(iter(owners), team or DEFAULT)
    if team not in (None, owner):
        raise OtherTeam(
            f"{dataset} belongs to the team {owner}.",
            "Leave `team` out, or grant the team access: POST /v1/ledgers/DATASET/grants.",
        )
    return owner


def hold_for(connection: Connection, run: CostedRun) -> None:
    """Let no other transaction change the certificate or the ledger of ``run`` until ours ends."""
    hold_certificate(connection, run.certificate.id)
    repository.hold(connection, run.scope)


def reserve_usable(
    connection: Connection, run: CostedRun, call: CommandContext
) -> StoredReservation:
    """``reserve`` after ``hold_for``, unless the certificate may not be reserved for any more.

    Raises ``CertificateNotUsable`` besides.
    """
    certificate, untrusted = run.certificate, run.allow_untrusted
    require_usable_now(connection, certificate, run.scope.dataset, allow_untrusted=untrusted)
    return reserve(connection, run, call)


def reserve(connection: Connection, run: CostedRun, call: CommandContext) -> StoredReservation:
    """Reserve what a run costs; raises ``NoBudget``, ``NotGranted`` or ``OverBudget``."""
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
        ledger.state.reserved(run.cost, rule),
        {**facts, "certain": run.certain, "cost": cost},
        call,
        reservation_id=reservation_id,
        certified_steps=run.steps,
        step=1,
        follows=None,
    )
    return get_reservation(connection, reservation_id)


@dataclass(frozen=True, slots=True)
class LockedReservation:
    """A reservation and its ledger, which the transaction of ``connection`` holds.

    Each change is made by ``call`` and returns whether it happened now. It raises ``WrongState``,
    and ``IdempotencyKeyReused`` where ``call`` has a key.
    """

    connection: Connection
    ledger: StoredLedger
    reservation: StoredReservation
    call: CommandContext

    def commit(self) -> bool:
        """Commit it as its run begins."""
        if is_repeated(self.connection, self.call):
            return False
        if self.reservation.state == "released":
            raise self._wrong_state("Reserve again before the run begins.")
        if self.reservation.state != "reserved":
            return False
        self._add_event("commit", self.ledger.state.committed(), {})
        return True

    def commit_usable(self) -> bool:
        """``commit``, unless the certificate may not be reserved for any more.

        Raises ``CertificateNotUsable`` besides.
        """
        reservation = self.reservation
        if reservation.state == "reserved" and not is_repeated(self.connection, self.call):
            try:
                require_reserved_usable(self.connection, reservation)
            except CertificateNotUsable as error:
                raise CertificateNotUsable(
                    f"the run must not begin: {error.message}",
                    f"Release the reservation. {error.remedy}",
                ) from None
        return self.commit()

    def release(self, reason: str) -> bool:
        """Give back what was reserved for a run that never began."""
        reservation = self.reservation
        if is_repeated(self.connection, self.call) or reservation.state == "released":
            return False
        if reservation.state != "reserved":
            raise self._wrong_state("Settle a run that has begun, by the steps it took.")
        state = self.ledger.state.released(reservation.cost, reservation.rule)
        self._add_event("release", state, {"reason": reason})
        return True

    def settle(self, steps_run: int, record: str | None, cost: Cost | None) -> bool:
        """Charge a committed run for its steps; ``cost`` is None for all of them.

        Raises ``StepsAboveCertificate`` or ``RecordRequired`` besides.
        """
        reservation, certified = self.reservation, self.reservation.certified_steps
        if is_repeated(self.connection, self.call):
            return False
        if steps_run > certified:
            raise StepsAboveCertificate(
                f"{steps_run} steps were run and {certified} are certified.",
                "Stop using the results of this run: its guarantee does not hold. Tell the "
                "auditor.",
            )
        if steps_run < certified and record is None:
            raise RecordRequired(
                f"charging {steps_run} of {certified} steps requires a run record.",
                NO_STEPS_BY_HAND,
            )
        if reservation.state == "settled":
            if (reservation.steps_run, reservation.record) == (steps_run, record):
                return False
            raise self._wrong_state("A run can be settled only once.")
        if reservation.state != "committed":
            raise self._wrong_state("Commit it first.")
        charged = reservation.cost
        if cost is not None and steps_run < certified:
            # What a run costs in full bounds every part of it.
            charged = charged.least(cost)
        state = self.ledger.state.settled(reservation.cost, charged)
        body = {"steps_run": steps_run, "record": record, "cost": charged.as_document()}
        self._add_event("settle", state, body, steps_run=steps_run)
        return True

    def settle_by_hand(self, reported: int | None, record: str | None) -> bool:
        """``settle`` for a caller whose run the service did not see: in full, whatever it reports.

        The digest of a record shows nothing: only a run's record, which the service holds and has
        judged itself, gives anything back (``runs.queue.LockedRun``). Raises like ``settle``.
        """
        certified = self.reservation.certified_steps
        steps_run = certified if reported is None else reported
        if self.reservation.state == "committed" and steps_run < certified:
            if is_repeated(self.connection, self.call):
                return False
            raise RecordRequired(
                f"{steps_run} of {certified} steps were reported and no record of the run is "
                "stored.",
                NO_STEPS_BY_HAND,
            )
        return self.settle(steps_run, record, None)

    def _add_event(
        self,
        kind: Literal["commit", "release", "settle"],
        state: LedgerState,
        body: Mapping[str, Any],
        **columns: Any,
    ) -> None:
        step, follows = _STEPS[kind]
        repository.add_event(
            self.connection,
            self.ledger.id,
            self.ledger.scope,
            kind,
            state,
            body,
            self.call,
            reservation_id=self.reservation.id,
            certified_steps=self.reservation.certified_steps,
            step=step,
            follows=follows,
            **columns,
        )

    def _wrong_state(self, remedy: str) -> WrongState:
        return WrongState(f"reservation {self.reservation.id} is {self.reservation.state}.", remedy)


_STEPS: Mapping[str, tuple[int, str]] = {
    "commit": (2, "reserve"),
    "release": (2, "reserve"),
    "settle": (3, "commit"),
}
"""The number of each transition, and the event that it follows."""

P = ParamSpec("P")
Change = Callable[Concatenate[LockedReservation, P], bool]
"""A method of ``LockedReservation``."""


def apply(
    connection: Connection,
    reservation_id: str,
    call: CommandContext,
    change: Change[P],
    *values: P.args,
    **named: P.kwargs,
) -> tuple[StoredReservation, bool]:
    """What ``LedgerStore.change`` does, in the transaction of ``connection``; raises like it."""
    # The certificate before the ledger, as everywhere, so that no two deadlock.
    hold_certificate(connection, get_reservation(connection, reservation_id).certificate_id)
    locked = hold_reservation(connection, reservation_id, call)
    run_id = repository.runs_of(connection, [reservation_id]).get(reservation_id)
    if run_id is not None:
        raise HeldByRun(
            f"reservation {reservation_id} belongs to run {run_id}, which commits, settles and "
            "releases it by its record.",
            f"Cancel the run instead: POST /v1/runs/{run_id}/cancel.",
        )
    happened = change(locked, *values, **named)
    return get_reservation(connection, reservation_id), happened
