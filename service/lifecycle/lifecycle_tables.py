"""The tables of approvals, revocations and status lists, all append-only.

``approvals``
    A person's decision about an envelope, identified by its digest. The database itself
    refuses a decision by a requester of the certificate, by an anonymous caller, a second
    one by the same person, and one about an envelope that does not await approval.
``revocations``
    A revoked issue, and with it every earlier issue of its certificate.
``status_lists``
    Every signed status list by its sequence number, which only grows.
"""

from __future__ import annotations

from sqlalchemy import (
    Boolean,
    CheckConstraint,
    Column,
    ForeignKeyConstraint,
    Integer,
    LargeBinary,
    String,
    Table,
    Text,
    UniqueConstraint,
)

from affidavit.service.tables import Sequence, UtcDateTime, metadata

_ISSUE = ["certificates.id", "certificates.untrusted", "certificates.issue"]

approvals = Table(
    "approvals",
    metadata,
    Column("id", Sequence, primary_key=True),
    Column("certificate_id", String(71), nullable=False),
    Column("untrusted", Boolean, nullable=False),
    Column("issue", Integer, nullable=False),
    Column("envelope_digest", String(71), nullable=False),
    Column("decision", String(16), nullable=False),
    Column("approver", String(255), nullable=False),
    Column("at", UtcDateTime, nullable=False),
    Column("comment", Text, nullable=False),
    ForeignKeyConstraint(
        ["certificate_id", "untrusted", "issue"], _ISSUE, name="approvals_certificate"
    ),
    UniqueConstraint("certificate_id", "untrusted", "issue", "approver", name="approvals_once"),
    CheckConstraint("id > 0", name="approvals_id_positive"),
    CheckConstraint("decision IN ('approve', 'reject')", name="approvals_decision"),
    CheckConstraint("approver NOT LIKE 'anonymous@%'", name="approvals_by_someone"),
)

revocations = Table(
    "revocations",
    metadata,
    Column("id", Sequence, primary_key=True),
    Column("certificate_id", String(71), nullable=False),
    Column("untrusted", Boolean, nullable=False),
    Column("issue", Integer, nullable=False),
    Column("envelope_digest", String(71), nullable=False),
    Column("code", String(32), nullable=False),
    Column("reason", Text, nullable=False),
    Column("revoked_by", String(255), nullable=False),
    Column("at", UtcDateTime, nullable=False),
    ForeignKeyConstraint(
        ["certificate_id", "untrusted", "issue"], _ISSUE, name="revocations_certificate"
    ),
    UniqueConstraint("certificate_id", "untrusted", "issue", name="revocations_once"),
    CheckConstraint("id > 0", name="revocations_id_positive"),
)

status_lists = Table(
    "status_lists",
    metadata,
    Column("sequence", Sequence, primary_key=True, autoincrement=False),
    Column("issued_at", UtcDateTime, nullable=False),
    Column("next_update", UtcDateTime, nullable=False),
    Column("content_digest", String(71), nullable=False),
    Column("key_id", String(64), nullable=False),
    Column("envelope", LargeBinary, nullable=False),
    CheckConstraint("sequence > 0", name="status_lists_sequence_positive"),
)
