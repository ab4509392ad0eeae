"""The ledger: budgets set, runs reserved, committed, settled and released.

A run goes one way: reserved, then committed, then settled on the steps that were run, or
released instead of committed. What it reserved counts against the budget until it is
settled; a settled run counts for what it cost for ever.

Rules it keeps:

- Everything that happens is one transaction: the check, the event and its log entry.
- The check inside is one addition of vectors and one comparison. What a run costs was
  worked out before, outside, from its certificate.
- The certificate is read again inside, so that one revoked meanwhile reserves nothing.
- An idempotency key answers a repeated request with what the first one led to, and never
  does it twice. Committing, settling or releasing again alike needs no key for that.
- Two processes that race end as if one had come after the other (``rows``).
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from sqlalchemy import Connection, Engine, insert
from sqlalchemy.exc import IntegrityError

from affidavit.accountants.filter.cost import Cost
from affidavit.accountants.filter.rule import Filter
from affidavit.service.calls import Call
from affidavit.service.database import reader, writer
from affidavit.service.ledger import refusals, rows
from affidavit.service.ledger.rows import KeptLedger, Reservation, Scope
from affidavit.service.ledger.state import State
from affidavit.service.ledger.tables import reservations
from affidavit.service.lifecycle.standing import Status
from affidavit.service.refusals import IdempotencyKeyReused, WrongState
from affidavit.service.store import StoredCertificate, current
from affidavit.service.store import hold as hold_certificate

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """What a reservation asks for: a certificate, and what its run was found to cost.

    ``event`` is the event document of the whole run, ``certain`` whether the certificate
    holds without a confidence. ``untrusted_too`` lets a development key's certificate in.
    """

    scope: Scope
    certificate: StoredCertificate
    steps: int
    cost: Cost
    event: dict[str, Any]
    certain: bool
    untrusted_too: bool = False


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
            found = {each: rows.find_ledger(connection, each) for each in set(scopes)}
        return [found[each] for each in scopes]

    def reservations(self, ledger_id: int) -> list[Reservation]:
        """The reservations of a ledger, latest first."""
        with self._reader.connect() as connection:
            return rows.reservations_of(connection, ledger_id)

    def reservation(self, reservation_id: str) -> Reservation:
        """The reservation of that id; raises ``UnknownReservation``."""
        with self._reader.connect() as connection:
            return _found(connection, reservation_id)

    def repeated(self, call: Call) -> Reservation | None:
        """The reservation of an earlier request with this key; None if there was no such request.

        Raises ``IdempotencyKeyReused``. ``reserve`` looks again, in its transaction.
        """
        with self._reader.connect() as connection:
            return _repeated_reservation(connection, call)

    # ---- writing ---------------------------------------------------------------------

    def set_budget(
        self, scope: Scope, epsilon: str, delta: str, reason: str, call: Call
    ) -> tuple[KeptLedger, bool]:
        """Set a version of the budget of ``scope``; the first one begins its ledger.

        ``epsilon`` and ``delta`` are decimals. Returns the ledger, and whether this call
        set it (or an earlier one with its idempotency key).
        """

        def work(connection: Connection) -> tuple[KeptLedger, bool]:
            rows.hold(connection, scope)
            created = not _is_repeated(connection, call)
            if created:
                _set_budget(connection, scope, epsilon, delta, reason, call)
            kept = rows.find_ledger(connection, scope)
            assert kept is not None
            return kept, created

        return self._write(work)

    def reserve(self, claim: Claim, call: Call) -> tuple[Reservation, bool]:
        """Reserve the cost of a certified run.

        Raises ``NoBudget``, ``OverBudget``, ``CertificateNotUsable`` or
        ``IdempotencyKeyReused``. Returns the reservation and whether it was made now.
        """

        def work(connection: Connection) -> tuple[Reservation, bool]:
            hold_certificate(connection, claim.certificate.id)
            rows.hold(connection, claim.scope)
            known = _repeated_reservation(connection, call)
            if known is not None:
                return known, False
            require_usable(
                current(connection, claim.certificate.id),
                claim.scope.dataset,
                untrusted_too=claim.untrusted_too,
                issue=claim.certificate,
            )
            return _reserve(connection, claim, call), True

        return self._write(work)

    def commit(self, reservation_id: str, call: Call) -> tuple[Reservation, bool]:
        """Say that the run begins: from here on it can only be settled.

        Raises ``UnknownReservation`` or ``WrongState``.
        """
        return self._step(reservation_id, call, commit_held)

    def release(self, reservation_id: str, reason: str, call: Call) -> tuple[Reservation, bool]:
        """Give back what was reserved for a run that never began.

        Raises ``UnknownReservation`` or ``WrongState``.
        """
        return self._step(reservation_id, call, lambda *given: release_held(*given, reason=reason))

    def settle(
        self,
        reservation_id: str,
        steps_run: int,
        record: str | None,
        cost: Cost | None,
        call: Call,
    ) -> tuple[Reservation, bool]:
        """Charge a committed run for the steps that it ran.

        ``record`` is the digest of its run record; without one it is charged in full.
        ``cost`` is that of ``steps_run`` steps, None for all of them. Raises
        ``UnknownReservation``, ``WrongState``, ``StepsAboveCertificate`` or
        ``RecordRequired``.
        """
        return self._step(
            reservation_id,
            call,
            lambda *given: settle_held(*given, steps_run=steps_run, record=record, cost=cost),
        )

    def _step(
        self,
        reservation_id: str,
        call: Call,
        take: Callable[[Connection, KeptLedger, Reservation, Call], bool],
    ) -> tuple[Reservation, bool]:
        """One step of a reservation; ``take`` says whether it was taken now."""

        def work(connection: Connection) -> tuple[Reservation, bool]:
            ledger, reservation = held(connection, reservation_id)
            taken = take(connection, ledger, reservation, call)
            return _found(connection, reservation_id), taken

        return self._write(work)

    def _write(self, work: Callable[[Connection], T]) -> T:
        """``work`` in one transaction, once more if another was quicker with the same key."""
        try:
            with self._writer.begin() as connection:
                return work(connection)
        except IntegrityError:
            with self._writer.begin() as connection:
                return work(connection)


# ---- in the transaction of another use case ------------------------------------------


def held(connection: Connection, reservation_id: str) -> tuple[KeptLedger, Reservation]:
    """A reservation and its ledger, which no other transaction changes until ours ends.

    Raises ``UnknownReservation``.
    """
    scope = rows.scope_of(connection, reservation_id)
    if scope is None:
        raise _unknown(reservation_id)
    rows.hold(connection, scope)
    ledger = rows.find_ledger(connection, scope)
    assert ledger is not None
    return ledger, _found(connection, reservation_id)


def require_usable(
    certificate: StoredCertificate | None,
    dataset: str,
    *,
    untrusted_too: bool,
    issue: StoredCertificate | None = None,
) -> None:
    """Raise ``CertificateNotUsable`` unless a run may be reserved for ``certificate`` now.

    ``issue`` is the one whose cost was worked out, which must still be the current one.
    """
    if certificate is None:
        raise _not_usable("there is no such certificate.", "GET /v1/certificates lists them.")
    if certificate.verdict != "certified":
        raise _not_usable(
            f"its verdict is {certificate.verdict}.", "Reserve for a plan that is certified."
        )
    if certificate.status is not Status.ACTIVE:
        raise _not_usable(
            f"it is {certificate.status.value.replace('_', ' ')}.",
            _way_out(certificate),
        )
    if certificate.dataset != dataset:
        about = certificate.dataset or "no data set by name"
        raise _not_usable(f"it is about {about}, not {dataset}.", "Name the data set in the plan.")
    if certificate.untrusted and not untrusted_too:
        raise _not_usable(
            "it was signed by a development key.",
            "Create a key with `affidavit keys new` and POST the plan again.",
        )
    if issue is not None and (issue.issue, issue.untrusted) != (
        certificate.issue,
        certificate.untrusted,
    ):
        raise _not_usable("it was issued anew meanwhile.", "Send the reservation again.")


def _way_out(certificate: StoredCertificate) -> str:
    """What makes a certificate usable that is not active: its status tells who has to act."""
    where = f"/v1/certificates/{certificate.id}"
    match certificate.status:
        case Status.AWAITING_APPROVAL:
            return f"Have it approved by somebody with the scope approve: POST {where}/approvals."
        case Status.REVOKED | Status.REJECTED:
            # Sending the plan again does not undo what a person decided.
            return f"Have it issued anew by somebody with the scope approve: POST {where}/issues."
        case Status.SUPERSEDED:
            return "A later issue took its place. Send the request again."
        case _:
            return "POST the plan again; it is issued anew."


def _not_usable(message: str, remedy: str) -> refusals.CertificateNotUsable:
    return refusals.CertificateNotUsable(
        f"the certificate cannot be reserved for: {message}", remedy
    )


def _unknown(reservation_id: str) -> refusals.UnknownReservation:
    return refusals.UnknownReservation(
        f"there is no reservation {reservation_id}.", "GET /v1/ledgers/DATASET lists them."
    )


def _found(connection: Connection, reservation_id: str) -> Reservation:
    found = rows.find_reservation(connection, reservation_id)
    if found is None:
        raise _unknown(reservation_id)
    return found


def _is_repeated(connection: Connection, call: Call) -> bool:
    """Whether this very request was answered before; raises ``IdempotencyKeyReused``."""
    event = rows.repeated(connection, call)
    if event is not None and event["request_digest"] != call.request_digest:
        raise IdempotencyKeyReused(
            "this Idempotency-Key came before, with another request.",
            "Use a new key for a new request.",
        )
    return event is not None


def _repeated_reservation(connection: Connection, call: Call) -> Reservation | None:
    if not _is_repeated(connection, call):
        return None
    event = rows.repeated(connection, call)
    assert event is not None
    return _found(connection, event["reservation_id"])


def _set_budget(
    connection: Connection, scope: Scope, epsilon: str, delta: str, reason: str, call: Call
) -> None:
    kept = rows.find_ledger(connection, scope)
    if kept is None:
        filter_ = Filter.start(float(epsilon), float(delta))
        state = State.first(epsilon, delta, filter_)
        ledger_id = rows.new_ledger(connection, scope, filter_, call.at)
    else:
        state, ledger_id = kept.state.with_budget(epsilon, delta), kept.id
    body = {
        "version": state.budget.number,
        "epsilon": epsilon,
        "delta": delta,
        "reason": reason,
    }
    rows.add_event(connection, ledger_id, scope, "budget", state, body, call)


def _reserve(connection: Connection, claim: Claim, call: Call) -> Reservation:
    ledger = rows.find_ledger(connection, claim.scope)
    if ledger is None:
        raise refusals.NoBudget(
            f"there is no budget for {claim.scope}; another unit or adjacency is another ledger.",
            "Have one set: POST /v1/ledgers/DATASET/budget.",
        )
    rule = ledger.state.rule_for(ledger.filter, claim.cost, certain=claim.certain)
    if rule is None:
        raise refusals.OverBudget(
            f"with this run {claim.scope} would pass its budget of ε = "
            f"{ledger.state.budget.epsilon} at δ = {ledger.state.budget.delta}.",
            "Run fewer steps or with more noise, or have the budget raised.",
        )
    made, certificate = str(uuid.uuid4()), claim.certificate
    known = {
        "certificate_id": certificate.id,
        "issue": certificate.issue,
        "untrusted": certificate.untrusted,
        "plan_digest": certificate.plan_digest,
        "certified_steps": claim.steps,
        "rule": rule,
    }
    connection.execute(
        insert(reservations).values(
            id=made,
            ledger_id=ledger.id,
            name=certificate.name,
            cost=json.dumps(claim.cost.as_document(), sort_keys=True),
            event=json.dumps(claim.event, sort_keys=True),
            **known,
        )
    )
    rows.add_event(
        connection,
        ledger.id,
        ledger.scope,
        "reserve",
        ledger.state.reserved(claim.cost, rule),
        {**known, "certain": claim.certain, "cost": claim.cost.as_document()},
        call,
        **_columns(made, claim.steps, 1, None),
    )
    return _found(connection, made)


def commit_held(
    connection: Connection, ledger: KeptLedger, reservation: Reservation, call: Call
) -> bool:
    """``Ledger.commit`` of what ``held`` returned; whether it was committed now.

    Raises ``WrongState``, and ``IdempotencyKeyReused`` where ``call`` has a key.
    """
    if _is_repeated(connection, call):
        return False
    if reservation.state == "released":
        raise _wrong_state(reservation, "Reserve again before the run begins.")
    if reservation.state != "reserved":
        return False
    rows.add_event(
        connection,
        ledger.id,
        ledger.scope,
        "commit",
        ledger.state.committed(),
        {},
        call,
        **_columns(reservation.id, reservation.certified_steps, 2, "reserve"),
    )
    return True


def release_held(
    connection: Connection,
    ledger: KeptLedger,
    reservation: Reservation,
    call: Call,
    *,
    reason: str,
) -> bool:
    """``Ledger.release`` of what ``held`` returned; whether it was released now.

    Raises ``WrongState``, and ``IdempotencyKeyReused`` where ``call`` has a key.
    """
    if _is_repeated(connection, call):
        return False
    if reservation.state == "released":
        return False
    if reservation.state != "reserved":
        raise _wrong_state(reservation, "A run that began is settled on the steps it ran.")
    rows.add_event(
        connection,
        ledger.id,
        ledger.scope,
        "release",
        ledger.state.released(reservation.cost, reservation.rule),
        {"reason": reason},
        call,
        **_columns(reservation.id, reservation.certified_steps, 2, "reserve"),
    )
    return True


def settle_held(
    connection: Connection,
    ledger: KeptLedger,
    reservation: Reservation,
    call: Call,
    *,
    steps_run: int,
    record: str | None,
    cost: Cost | None,
) -> bool:
    """``Ledger.settle`` of what ``held`` returned; whether it was settled now.

    Raises ``WrongState``, ``StepsAboveCertificate`` or ``RecordRequired``, and
    ``IdempotencyKeyReused`` where ``call`` has a key.
    """
    if _is_repeated(connection, call):
        return False
    certified = reservation.certified_steps
    if steps_run > certified:
        raise refusals.StepsAboveCertificate(
            f"{steps_run} steps were run and {certified} are certified.",
            "Stop what follows from this run: its guarantee does not hold. Tell the auditor.",
        )
    if steps_run < certified and record is None:
        raise refusals.RecordRequired(
            f"{steps_run} of {certified} steps are believed with a run record only.",
            "Give the record's digest, or settle without steps_run for the full charge.",
        )
    if reservation.state == "settled":
        if (reservation.steps_run, reservation.record) == (steps_run, record):
            return False
        raise _wrong_state(reservation, "A run is settled once.")
    if reservation.state != "committed":
        raise _wrong_state(reservation, "Commit it first.")
    charged = reservation.cost
    if cost is not None and steps_run < certified:
        # What a run costs in full bounds every part of it.
        charged = charged.least(cost)
    rows.add_event(
        connection,
        ledger.id,
        ledger.scope,
        "settle",
        ledger.state.settled(reservation.cost, charged),
        {"steps_run": steps_run, "record": record, "cost": charged.as_document()},
        call,
        steps_run=steps_run,
        **_columns(reservation.id, certified, 3, "commit"),
    )
    return True


def _columns(
    reservation_id: str, certified_steps: int, step: int, follows: str | None
) -> dict[str, Any]:
    return {
        "reservation_id": reservation_id,
        "certified_steps": certified_steps,
        "step": step,
        "follows": follows,
    }


def _wrong_state(reservation: Reservation, remedy: str) -> WrongState:
    return WrongState(f"reservation {reservation.id} is {reservation.state}.", remedy)
