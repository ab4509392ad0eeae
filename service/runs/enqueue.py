"""Queue a run on its own reservation and a usable certificate, in the caller's transaction."""

from __future__ import annotations

import json
import uuid

from sqlalchemy import Connection, insert

from affidavit.service.command import CommandContext
from affidavit.service.errors import DomainError, IdempotencyKeyReused
from affidavit.service.ledger import repository as ledger_repository
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


def repeated(connection: Connection, call: CommandContext) -> StoredRun | None:
    """The run of an earlier request with this key; raises ``IdempotencyKeyReused``."""
    earlier = repository.repeated(connection, call.actor, call.idempotency_key)
    if earlier is not None and earlier.request_digest != call.request_digest:
        raise IdempotencyKeyReused(
            "this Idempotency-Key was used for another request.",
            "Use a new key for a new request.",
        )
    return earlier


def enqueue(
    connection: Connection, request: RunRequest, reservation_id: str, call: CommandContext
) -> StoredRun:
    """Queue a run on that reservation.

    Raises ``ReservationNotUsable``, ``CertificateNotUsable`` or ``UnearlierReservation``.
    """
    hold_certificate(connection, request.certificate)
    reservation = ledger_repository.find_reservation(connection, reservation_id)
    if reservation is None or reservation.certificate_id != request.certificate:
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
        certificate, reservation.scope.dataset, allow_untrusted=reservation.untrusted
    )
    assert certificate is not None
    if (certificate.issue, certificate.untrusted) != (reservation.issue, reservation.untrusted):
        raise ReservationNotUsable(
            "the certificate was reissued since the reservation.", "Reserve again."
        )
    run_id = str(uuid.uuid4())
    connection.execute(
        insert(runs).values(
            id=run_id,
            certificate_id=request.certificate,
            issue=reservation.issue,
            untrusted=reservation.untrusted,
            plan_digest=reservation.plan_digest,
            reservation_id=reservation_id,
            queue=request.queue,
            wanted=json.dumps(request.model_dump(mode="json"), sort_keys=True),
            requested_by=call.actor,
            requested_at=call.at,
            idempotency_key=call.idempotency_key,
            request_digest=call.request_digest,
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
        "wanted": request.model_dump(mode="json"),
    }
    repository.add_event(
        connection, run_id, "queued", body, actor=call.actor, at=call.at, follows=None
    )
    return repository.find(connection, run_id)
