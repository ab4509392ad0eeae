"""Withdraw the certificates that rest on a waiver which no longer holds."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import Connection, insert

from affidavit.service.lifecycle.standing import DECIDED, Status
from affidavit.service.lifecycle.tables import revocations
from affidavit.service.log.entries import append
from affidavit.service.store import current, hold

CODE = "waiver_revoked"


def withdraw(
    connection: Connection, certificate_id: str, reason: str, actor: str, at: datetime
) -> None:
    """Revoke the current issues of a certificate, of either trust, that still count."""
    hold(connection, certificate_id)
    for untrusted in (False, True):
        issue = current(connection, certificate_id, untrusted=untrusted)
        if issue is None or issue.status in DECIDED or issue.status is Status.EXPIRED:
            continue
        connection.execute(
            insert(revocations).values(
                certificate_id=certificate_id,
                untrusted=untrusted,
                issue=issue.issue,
                envelope_digest=issue.envelope_digest,
                code=CODE,
                reason=reason,
                revoked_by=actor,
                at=at,
            )
        )
        body = {
            "issue": issue.issue,
            "untrusted": untrusted,
            "envelope_digest": issue.envelope_digest,
            "code": CODE,
            "reason": reason,
        }
        append(connection, "revocation", certificate_id, body, actor=actor, at=at)
