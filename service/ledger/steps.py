"""What the ledger's use cases do inside a transaction, theirs or that of another use case.

``ledger`` says which rules they keep. Whoever calls one holds the certificate first, where one is
asked about, and the ledger then (``held``), so that no two transactions wait for each other.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, insert

from affidavit.accountants.privacy_filter import Cost, Filter
from affidavit.service.command import CommandContext
from affidavit.service.errors import IdempotencyKeyReused, WrongState
from affidavit.service.ledger import refusals, rows
from affidavit.service.ledger.ledger_tables import reservations
from affidavit.service.ledger.rows import KeptLedger, Reservation, Scope
from affidavit.service.ledger.state import State
from affidavit.service.lifecycle.standing import Status
from affidavit.service.store import StoredCertificate, current

Take = Callable[[Connection, KeptLedger, Reservation, CommandContext], bool]
"""A step of a held reservation: whether it was taken now."""


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
    return ledger, existing(connection, reservation_id)


def require_usable(
    certificate: StoredCertificate | None,
    dataset: str,
    *,
    untrusted_too: bool,
    issue: StoredCertificate | Reservation | None = None,
) -> None:
    """Raise ``CertificateNotUsable`` unless a run of ``certificate`` may begin now.

    ``issue`` is the one whose cost was worked out, or a reservation of it; it must still be the
    current one.
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
        raise _not_usable("it was issued anew meanwhile.", "Reserve again.")


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
    return refusals.CertificateNotUsable(f"the certificate cannot be used: {message}", remedy)


def _unknown(reservation_id: str) -> refusals.UnknownReservation:
    return refusals.UnknownReservation(
        f"there is no reservation {reservation_id}.", "GET /v1/ledgers/DATASET lists them."
    )


def existing(connection: Connection, reservation_id: str) -> Reservation:
    """The reservation of that id; raises ``UnknownReservation``."""
    found = rows.find_reservation(connection, reservation_id)
    if found is None:
        raise _unknown(reservation_id)
    return found


def is_repeated(connection: Connection, call: CommandContext) -> bool:
    """Whether this very request was answered before; raises ``IdempotencyKeyReused``."""
    event = rows.repeated(connection, call)
    if event is not None and event["request_digest"] != call.request_digest:
        raise IdempotencyKeyReused(
            "this Idempotency-Key came before, with another request.",
            "Use a new key for a new request.",
        )
    return event is not None


def repeated_reservation(connection: Connection, call: CommandContext) -> Reservation | None:
    """What this very request reserved before; raises ``IdempotencyKeyReused``."""
    if not is_repeated(connection, call):
        return None
    event = rows.repeated(connection, call)
    assert event is not None
    return existing(connection, event["reservation_id"])


def set_budget(
    connection: Connection,
    scope: Scope,
    epsilon: str,
    delta: str,
    reason: str,
    call: CommandContext,
) -> None:
    """Set a version of the budget of ``scope``; the first one begins its ledger."""
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


def reserve(connection: Connection, claim: Claim, call: CommandContext) -> Reservation:
    """Reserve what a run costs; raises ``NoBudget`` or ``OverBudget``."""
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
    return existing(connection, made)


def commit_held(
    connection: Connection, ledger: KeptLedger, reservation: Reservation, call: CommandContext
) -> bool:
    """``Ledger.commit`` of what ``held`` returned; whether it was committed now.

    Raises ``WrongState``, and ``IdempotencyKeyReused`` where ``call`` has a key.
    """
    if is_repeated(connection, call):
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
    call: CommandContext,
    *,
    reason: str,
) -> bool:
    """``Ledger.release`` of what ``held`` returned; whether it was released now.

    Raises ``WrongState``, and ``IdempotencyKeyReused`` where ``call`` has a key.
    """
    if is_repeated(connection, call):
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
    call: CommandContext,
    *,
    steps_run: int,
    record: str | None,
    cost: Cost | None,
) -> bool:
    """``Ledger.settle`` of what ``held`` returned; whether it was settled now.

    Raises ``WrongState``, ``StepsAboveCertificate`` or ``RecordRequired``, and
    ``IdempotencyKeyReused`` where ``call`` has a key.
    """
    if is_repeated(connection, call):
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


def take_step(
    connection: Connection, reservation_id: str, call: CommandContext, take: Take
) -> tuple[Reservation, bool]:
    """The reservation after a step that ``take`` says whether it was taken now.

    Raises ``UnknownReservation``, ``HeldByRun``, and what ``take`` does.
    """
    ledger, reservation = held(connection, reservation_id)
    run = rows.run_of(connection, reservation_id)
    if run is not None:
        raise refusals.HeldByRun(
            f"reservation {reservation_id} is of run {run}, which alone commits, settles and "
            "releases it: by what its record says.",
            f"Cancel the run instead: POST /v1/runs/{run}/cancel.",
        )
    taken = take(connection, ledger, reservation, call)
    return existing(connection, reservation_id), taken


def commit_usable(
    connection: Connection, ledger: KeptLedger, reservation: Reservation, call: CommandContext
) -> bool:
    """``commit_held``, unless the certificate has become one that nothing is reserved for.

    Raises ``CertificateNotUsable`` besides.
    """
    if reservation.state == "reserved" and not is_repeated(connection, call):
        try:
            require_usable(
                current(connection, reservation.certificate_id),
                reservation.scope.dataset,
                untrusted_too=reservation.untrusted,
                issue=reservation,
            )
        except refusals.CertificateNotUsable as refusal:
            raise refusals.CertificateNotUsable(
                f"the run must not begin: {refusal.message}",
                f"Release the reservation. {refusal.remedy}",
            ) from None
    return commit_held(connection, ledger, reservation, call)


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
