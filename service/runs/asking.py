"""A run that is asked for: a reservation of its own, a certificate that may be used, a place.

All within the caller's transaction, like what ends a run (``affidavit.service.runs.ending``).
"""

from __future__ import annotations

import json
import uuid

from sqlalchemy import Connection, insert

from affidavit.service.command import CommandContext
from affidavit.service.errors import IdempotencyKeyReused
from affidavit.service.ledger import repository as ledger_repository
from affidavit.service.ledger import transitions
from affidavit.service.runs import rows
from affidavit.service.runs.refusals import ReservationNotUsable
from affidavit.service.runs.rows import Run
from affidavit.service.runs.run_tables import run_leases, runs
from affidavit.service.runs.wanted import WantedRun
from affidavit.service.store import current
from affidavit.service.store import hold as hold_certificate


def repeated(connection: Connection, call: CommandContext) -> Run | None:
    """The run of an earlier request with this key; raises ``IdempotencyKeyReused``."""
    known = rows.repeated(connection, call.actor, call.idempotency_key)
    if known is not None and known.request_digest != call.request_digest:
        raise IdempotencyKeyReused(
            "this Idempotency-Key came before, with another request.",
            "Use a new key for a new request.",
        )
    return known


def enqueue(
    connection: Connection, wanted: WantedRun, reservation_id: str, call: CommandContext
) -> Run:
    """Queue a run on that reservation.

    Raises ``ReservationNotUsable``, ``CertificateNotUsable`` or ``UnknownReservation``.
    """
    hold_certificate(connection, wanted.certificate)
    reservation = ledger_repository.find_reservation(connection, reservation_id)
    if reservation is None or reservation.certificate_id != wanted.certificate:
        raise ReservationNotUsable(
            f"reservation {reservation_id} is not one of this certificate.",
            "Leave `reservation` out, and one is made.",
        )
    if reservation.state != "reserved":
        raise ReservationNotUsable(
            f"reservation {reservation_id} is {reservation.state}.", "Reserve for each run."
        )
    certificate = current(connection, wanted.certificate)
    transitions.require_usable(
        certificate, reservation.scope.dataset, allow_untrusted=reservation.untrusted
    )
    assert certificate is not None
    if (certificate.issue, certificate.untrusted) != (reservation.issue, reservation.untrusted):
        raise ReservationNotUsable(
            "the certificate was issued anew since the reservation.", "Reserve again."
        )
    run_id = str(uuid.uuid4())
    connection.execute(
        insert(runs).values(
            id=run_id,
            certificate_id=wanted.certificate,
            issue=reservation.issue,
            untrusted=reservation.untrusted,
            plan_digest=reservation.plan_digest,
            reservation_id=reservation_id,
            queue=wanted.queue,
            priority=wanted.priority,
            wanted=json.dumps(wanted.model_dump(mode="json"), sort_keys=True),
            requested_by=call.actor,
            requested_at=call.at,
            idempotency_key=call.idempotency_key,
            request_digest=call.request_digest,
        )
    )
    connection.execute(
        insert(run_leases).values(
            run_id=run_id,
            queue=wanted.queue,
            priority=wanted.priority,
            gpu=wanted.requirements.gpu,
            memory_mib=wanted.requirements.memory,
            requested_at=call.at,
            state="queued",
            fence=0,
            steps=0,
            cancel=False,
        )
    )
    body = {
        "certificate": wanted.certificate,
        "issue": reservation.issue,
        "reservation": reservation_id,
        "wanted": wanted.model_dump(mode="json"),
    }
    rows.add_event(connection, run_id, "queued", body, actor=call.actor, at=call.at, follows=None)
    return rows.find(connection, run_id)
