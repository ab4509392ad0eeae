"""The status of an issue at a time, computed by the database.

=====================  ===============================================================
``active``             the current issue, whatever its verdict
``awaiting_approval``  signed, but not usable before others approve it
``expired``            its validity has ended; sending the plan again reissues it
``superseded``         a later issue replaces it
``rejected``           an approver rejected it
``revoked``            withdrawn, with every earlier issue
``key_revoked``        a published keyset revokes the key that signed it; sending the plan
                       again reissues it
=====================  ===============================================================

``revoked`` and ``rejected`` are decisions of people. Only a person's decision to reissue ends them
(``affidavit.service.certificates.decisions``); they never become ``expired``. A rejection applies
to one issue, a revocation also to all earlier issues.

The status follows from append-only tables:

``approvals``
    A person's decision about an envelope, identified by its digest. The database refuses decisions
    by a requester of the certificate, by an anonymous caller, twice by one person, and about an
    envelope that does not await approval.
``revocations``
    A revoked issue, and with it every earlier issue of its certificate.
``status_lists``
    Every signed status list by its sequence number, which only grows.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, and_, case, exists, select

from affidavit.service.core.wire_models import Status
from affidavit.service.log.entry_type import EntryType
from affidavit.service.tables.certificates import (
    approvals,
    certificates,
    revocations,
)
from affidavit.service.tables.keys import revoked_keys
from affidavit.trust.log import LogEntry


def approval_entry(row: Any) -> LogEntry:
    """Build the log entry of an approval or a rejection."""
    body = {
        "issue": row.issue,
        "envelope": row.envelope_digest,
        "decision": row.decision,
        "comment": row.comment,
    }
    return LogEntry(
        kind="approval", subject=row.certificate_id, actor=row.approver, at=row.at, body=body
    )


def revocation_entry(row: Any) -> LogEntry:
    """Build the log entry of a revocation."""
    body = {
        "issue": row.issue,
        "envelope": row.envelope_digest,
        "code": row.code,
        "reason": row.reason,
    }
    return LogEntry(
        kind="revocation", subject=row.certificate_id, actor=row.revoked_by, at=row.at, body=body
    )


DECISIONS = (
    EntryType(
        table=approvals,
        kinds=("approval",),
        entry=approval_entry,
        about=lambda subject: approvals.c.certificate_id == subject,
    ),
    EntryType(
        table=revocations,
        kinds=("revocation",),
        entry=revocation_entry,
        about=lambda subject: revocations.c.certificate_id == subject,
    ),
)
"""The entry types of decisions about certificates."""
DECIDED = frozenset({Status.REVOKED, Status.REJECTED})
"""Statuses that only a person's decision ends."""

_later = certificates.alias("later")

SUPERSEDED: ColumnElement[bool] = exists(
    select(1).where(
        _later.c.id == certificates.c.id,
        _later.c.untrusted == certificates.c.untrusted,
        _later.c.issue > certificates.c.issue,
    )
)
"""Whether a row of ``certificates`` has a later issue."""


def same_certificate(table: Any) -> ColumnElement[bool]:
    """Return whether a row of ``table`` belongs to the certificate of a row of ``certificates``."""
    return and_(
        table.c.certificate_id == certificates.c.id, table.c.untrusted == certificates.c.untrusted
    )


def same_issue(table: Any) -> ColumnElement[bool]:
    """Return whether a row of ``table`` is about the issue of a row of ``certificates``."""
    return and_(same_certificate(table), table.c.issue == certificates.c.issue)


COVERED = and_(same_certificate(revocations), revocations.c.issue >= certificates.c.issue)
"""Whether a row of ``revocations`` is about a row of ``certificates``, or a later issue of it."""

REVOKED: ColumnElement[bool] = exists(select(1).where(COVERED))
"""Whether a row of ``certificates`` was revoked, itself or by a later issue."""

REJECTED: ColumnElement[bool] = exists(
    select(1).where(same_issue(approvals), approvals.c.decision == "reject")
)


def key_revoked_at(now: datetime | ColumnElement[datetime]) -> ColumnElement[bool]:
    """Return whether the key that signed a row of ``certificates`` is revoked at ``now``.

    Verifiers with the log may still accept earlier signatures of the key. The service does not use
    them, because it can reissue the certificate.
    """
    return exists(
        select(1).where(revoked_keys.c.key_id == certificates.c.key_id, revoked_keys.c.since <= now)
    )


def status_at(now: datetime | ColumnElement[datetime]) -> ColumnElement[str]:
    """Return the status of a row of ``certificates`` at ``now``, as a column expression."""
    return case(
        (REVOKED, Status.REVOKED.value),
        (SUPERSEDED, Status.SUPERSEDED.value),
        (REJECTED, Status.REJECTED.value),
        (key_revoked_at(now), Status.KEY_REVOKED.value),
        (certificates.c.not_after < now, Status.EXPIRED.value),
        (
            certificates.c.approvals_given < certificates.c.approvals_required,
            Status.AWAITING_APPROVAL.value,
        ),
        else_=Status.ACTIVE.value,
    )
