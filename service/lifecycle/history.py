"""Every issue of a certificate, with what was decided about each."""

from __future__ import annotations

from dataclasses import asdict
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, Engine, select

from affidavit.service.lifecycle.lifecycle_tables import approvals
from affidavit.service.lifecycle.revoke import revocation_of
from affidavit.service.lifecycle.standing import Status
from affidavit.service.store import StoredCertificate, issues


def history(engine: Engine, certificate_id: str) -> list[dict[str, Any]]:
    """All issues as JSON data, the latest first and trusted before untrusted ones."""
    with engine.connect() as connection:
        return [_item(connection, issue) for issue in issues(connection, certificate_id)]


def written(at: datetime) -> str:
    """An instant as the API writes it."""
    return at.isoformat().replace("+00:00", "Z")


def _item(connection: Connection, found: StoredCertificate) -> dict[str, Any]:
    revoked = found.status is Status.REVOKED
    return {
        "issue": found.issue,
        "untrusted": found.untrusted,
        "status": found.status.value,
        "verdict": found.verdict,
        "envelope_digest": found.envelope_digest,
        "key_id": found.key_id,
        "created_at": written(found.created_at),
        "not_after": written(found.not_after),
        "approvals": {
            "required": found.approvals_required,
            "decisions": _decisions(connection, found),
        },
        "revocation": _revocation(connection, found) if revoked else None,
    }


def _decisions(connection: Connection, found: StoredCertificate) -> list[dict[str, Any]]:
    query = select(
        approvals.c.decision, approvals.c.approver, approvals.c.at, approvals.c.comment
    ).where(
        approvals.c.certificate_id == found.id,
        approvals.c.untrusted == found.untrusted,
        approvals.c.issue == found.issue,
    )
    rows = connection.execute(query.order_by(approvals.c.id)).mappings()
    return [{**row, "at": written(row["at"])} for row in rows]


def _revocation(connection: Connection, found: StoredCertificate) -> dict[str, Any]:
    revocation = asdict(revocation_of(connection, found))
    return {**revocation, "at": written(revocation["at"])}
