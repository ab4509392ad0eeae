"""Tables of certificates.

``affidavit.migrations`` creates and upgrades the schema. Rows of ``certificates`` and ``requests``
are written once: database triggers refuse to change or delete them, so that even a fault in this
service cannot rewrite what it has signed.

``certificates``
    One row per issue of a certificate id, numbered from 1; each issue supersedes the earlier ones,
    which remain. ``untrusted`` rows were signed by a development key and are numbered separately:
    a plan that was certified on trial can be certified again under the same id with a trusted key.
    ``bundle`` contains the signed bytes, and ``result`` the response without what may change later
    (see ``affidavit.service.certificates``).
``certificate_facets``
    Further search keys of an issue, read from its signed bytes, with its time, so that one index
    finds the newest issues with a value.
``signing_keys``
    The public half of every key that signed a row, so that bundles can be verified after a key was
    retired or a development key was forgotten.
``requests``
    Requester, time and body of each request, and the issue that answered it.
"""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy import (
    text,
)
from sqlalchemy.schema import SchemaItem

from affidavit.service.core.database import (
    RowNumber,
    UtcDateTime,
    metadata,
    numbered,
)

ISSUE = ("certificate_id", "untrusted", "issue")
"""The columns that refer to an issue of a certificate."""


def issue_columns(table: str, *, primary_key: bool = False) -> tuple[SchemaItem, ...]:
    """Return columns that refer to an issue of a certificate, with their foreign key."""
    columns = (
        sa.Column("certificate_id", sa.String(71), primary_key=primary_key, nullable=False),
        sa.Column("untrusted", sa.Boolean, primary_key=primary_key, nullable=False),
        sa.Column(
            "issue", sa.Integer, primary_key=primary_key, nullable=False, autoincrement=False
        ),
    )
    issue = ["certificates.id", "certificates.untrusted", "certificates.issue"]
    name = f"{table}_certificate"
    return (*columns, sa.ForeignKeyConstraint([*ISSUE], issue, name=name))


def _prefix(column: str) -> dict[str, str]:
    return {column: "varchar_pattern_ops"}


signing_keys = sa.Table(
    "signing_keys",
    metadata,
    sa.Column("key_id", sa.String(64), primary_key=True),
    sa.Column("record", sa.Text, nullable=False),
    sa.Column("first_used_at", UtcDateTime, nullable=False),
)


certificates = sa.Table(
    "certificates",
    metadata,
    sa.Column("id", sa.String(71), primary_key=True),
    sa.Column("untrusted", sa.Boolean, primary_key=True),
    sa.Column("issue", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("plan_digest", sa.String(71), nullable=False),
    sa.Column("name", sa.String(64)),
    sa.Column("dataset", sa.String(64)),
    sa.Column("adjacency", sa.String(32), nullable=False),
    sa.Column("verdict", sa.String(32), nullable=False),
    sa.Column("epsilon_upper", sa.Double),
    sa.Column("delta", sa.Double),
    sa.Column("created_at", UtcDateTime, nullable=False),
    sa.Column("key_id", sa.String(64), sa.ForeignKey("signing_keys.key_id"), nullable=False),
    sa.Column("bundle", sa.LargeBinary, nullable=False),
    sa.Column("result", sa.Text, nullable=False),
    sa.Column("not_after", UtcDateTime, nullable=False),
    sa.Column("envelope_digest", sa.String(71), nullable=False),
    sa.Column("approvals_required", sa.Integer, nullable=False),
    sa.Column("approvals_given", sa.Integer, nullable=False),
    sa.Column("team", sa.String(64), nullable=False, server_default="default"),
    sa.CheckConstraint("issue > 0", name="certificates_issue_positive"),
    sa.Index("certificates_by_time", "created_at", "id", "untrusted"),
    sa.Index("certificates_by_team", "team", "created_at", "id", "untrusted"),
    sa.Index(
        "certificates_awaiting",
        "created_at",
        "id",
        "untrusted",
        postgresql_where=text("approvals_given < approvals_required"),
        sqlite_where=text("approvals_given < approvals_required"),
    ),
    sa.Index("certificates_by_plan", "plan_digest"),
    sa.Index("certificates_by_name", "name"),
    sa.Index("certificates_by_verdict", "verdict", "created_at"),
    sa.Index("certificates_by_epsilon", "epsilon_upper"),
    sa.Index("certificates_by_end", "not_after"),
    sa.Index("certificates_by_key", "key_id", "created_at"),
    # For prefix searches, which an index in a locale's collation does not support.
    sa.Index("certificates_by_dataset", "dataset", "created_at", postgresql_ops=_prefix("dataset")),
    sa.Index("certificates_by_name_start", "name", postgresql_ops=_prefix("name")),
    sa.Index("certificates_by_id_start", "id", postgresql_ops=_prefix("id")),
    sa.Index("certificates_by_plan_start", "plan_digest", postgresql_ops=_prefix("plan_digest")),
)


certificate_facets = sa.Table(
    "certificate_facets",
    metadata,
    *issue_columns("certificate_facets", primary_key=True),
    sa.Column("mechanism", sa.String(64), nullable=False),
    sa.Column("requester", sa.String(255), nullable=False),
    sa.Column("created_at", UtcDateTime, nullable=False),
    sa.Index("certificate_facets_by_mechanism", "mechanism", "created_at"),
    sa.Index("certificate_facets_by_requester", "requester", "created_at"),
)

requests = numbered(
    "requests",
    *issue_columns("requests"),
    sa.Column("requester", sa.String(255), nullable=False),
    sa.Column("received_at", UtcDateTime, nullable=False),
    sa.Column("content_type", sa.String(255), nullable=False),
    sa.Column("body", sa.LargeBinary, nullable=False),
    sa.Index("requests_by_certificate", "certificate_id"),
)


certifications = sa.Table(
    "certifications",
    metadata,
    sa.Column("id", sa.String(36), primary_key=True),
    sa.Column("requester", sa.String(255), nullable=False),
    sa.Column("state", sa.String(16), nullable=False),
    sa.Column("certificate_id", sa.String(71)),
    sa.Column("problem", sa.Text),
    sa.Column("requested_at", UtcDateTime, nullable=False, index=True),
    sa.Column("alive_at", UtcDateTime, nullable=False),
    sa.Column("asked_at", UtcDateTime, nullable=False),
)


approvals = numbered(
    "approvals",
    *issue_columns("approvals"),
    sa.Column("envelope_digest", sa.String(71), nullable=False),
    sa.Column("decision", sa.String(16), nullable=False),
    sa.Column("approver", sa.String(255), nullable=False),
    sa.Column("at", UtcDateTime, nullable=False),
    sa.Column("comment", sa.Text, nullable=False),
    sa.UniqueConstraint("certificate_id", "untrusted", "issue", "approver", name="approvals_once"),
    sa.CheckConstraint("decision IN ('approve', 'reject')", name="approvals_decision"),
    sa.CheckConstraint("approver NOT LIKE 'anonymous@%'", name="approvals_by_someone"),
)


revocations = numbered(
    "revocations",
    *issue_columns("revocations"),
    sa.Column("envelope_digest", sa.String(71), nullable=False),
    sa.Column("code", sa.String(32), nullable=False),
    sa.Column("reason", sa.Text, nullable=False),
    sa.Column("revoked_by", sa.String(255), nullable=False),
    sa.Column("at", UtcDateTime, nullable=False),
    sa.UniqueConstraint("certificate_id", "untrusted", "issue", name="revocations_once"),
)


status_lists = sa.Table(
    "status_lists",
    metadata,
    sa.Column("sequence", RowNumber, primary_key=True, autoincrement=False),
    sa.Column("issued_at", UtcDateTime, nullable=False),
    sa.Column("next_update", UtcDateTime, nullable=False),
    sa.Column("content_digest", sa.String(71), nullable=False),
    sa.Column("key_id", sa.String(64), nullable=False),
    sa.Column("envelope", sa.LargeBinary, nullable=False),
    sa.CheckConstraint("sequence > 0", name="status_lists_sequence_positive"),
)
