"""Queue a run on its own reservation and a usable certificate, in the caller's transaction."""

from __future__ import annotations

import json
import uuid

from sqlalchemy import Connection, insert

from affidavit.certificate import read_envelope
from affidavit.service.command import CommandContext
from affidavit.service.errors import DomainError
from affidavit.service.ledger import transitions
from affidavit.service.runs import repository
from affidavit.service.runs.models import RunRequest
from affidavit.service.runs.repository import StoredRun
from affidavit.service.runs.run_tables import run_leases, runs
from affidavit.service.store import current
from affidavit.service.store import hold as hold_certificate


class ReservationNotUsable(DomainError):
    """The reservation is of another certificate, not open any more, or another run's."""

    code = "reservation_not_usable"


class WrongSearch(DomainError):
    """A run of a certificate for searches says nothing of a search, or the other way round."""

    code = "wrong_search"
    status = 422


def enqueue(
    connection: Connection, request: RunRequest, reservation_id: str, call: CommandContext
) -> StoredRun:
    """Queue a run on that reservation.

    Raises ``UnknownReservation``, ``ReservationNotUsable``, ``CertificateNotUsable`` or
    ``WrongSearch``.
    """
    hold_certificate(connection, request.certificate)
    # Held, so that it is not released meanwhile.
    _, reservation = transitions.hold_reservation(connection, reservation_id)
    if reservation.certificate_id != request.certificate:
        raise ReservationNotUsable(
            f"reservation {reservation_id} is not for this certificate.",
            "Leave `reservation` out to have one made.",
        )
    if reservation.state != "reserved":
        raise ReservationNotUsable(
            f"reservation {reservation_id} is {reservation.state}.", "Reserve for each run."
        )
    certificate = current(connection, request.certificate)
    transitions.require_usable(
        certificate,
        reservation.scope.dataset,
        allow_untrusted=reservation.untrusted,
        issue=reservation,
    )
    assert certificate is not None
    _require_search(request, certificate.bundle)
    run_id, document = str(uuid.uuid4()), request.model_dump(mode="json")
    connection.execute(
        insert(runs).values(
            id=run_id,
            certificate_id=request.certificate,
            issue=reservation.issue,
            untrusted=reservation.untrusted,
            plan_digest=reservation.plan_digest,
            reservation_id=reservation_id,
            queue=request.queue,
            request=json.dumps(document, sort_keys=True),
            requested_by=call.actor,
            requested_at=call.at,
            idempotency_key=call.idempotency_key,
            request_digest=call.request_digest,
            team=certificate.team,
        )
    )
    connection.execute(
        insert(run_leases).values(
            run_id=run_id,
            queue=request.queue,
            requested_at=call.at,
            state="queued",
            fence=0,
            steps=0,
            cancel=False,
        )
    )
    body = {
        "certificate": request.certificate,
        "issue": reservation.issue,
        "reservation": reservation_id,
        "request": document,
    }
    repository.add_event(connection, run_id, "queued", body, call)
    return repository.find(connection, run_id)


def _require_search(request: RunRequest, bundle: bytes) -> None:
    predicate = json.loads(read_envelope(json.loads(bundle)["envelope"]).payload)["predicate"]
    plan, searches = predicate["plan"], request.search is not None
    repeats = any(event["kind"] == "repeat_and_select" for event in plan.get("extra", ()))
    if repeats and not searches:
        raise WrongSearch(
            "the certificate is for a search, and covers no single run.",
            "Give search: what to try, and public data as score.",
        )
    if searches and not repeats:
        raise WrongSearch(
            "the certificate covers one run and no search.",
            "Certify a plan with repeat_and_select, or leave search out.",
        )
    if searches and plan.get("canaries") is not None:
        raise WrongSearch(
            "the canaries of a search cannot be logged before its trials.",
            "Certify the plan without canaries.",
        )
    if searches and request.time_limit is not None:
        raise WrongSearch(
            "a search has no time limit: trials that it ends would tell how many there were.",
            "Leave time_limit out.",
        )
