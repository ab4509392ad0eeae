"""Certificates, the keys that signed them, the requests for them, and the audit log."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from affidavit.migrations import append_only

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

# Written out rather than imported from the service: a published revision must go on
# making the tables of its day when the service's tables have moved on.
INSTANT = sa.DateTime(timezone=True)
SEQUENCE = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    """Make the four tables and forbid changing them."""
    append_only.install()
    _signing_keys()
    _certificates()
    _requests()
    _audit()


def downgrade() -> None:
    """Drop the four tables, with everything in them."""
    for table in ("audit", "requests", "certificates", "signing_keys"):
        op.drop_table(table)
    append_only.uninstall()


def _signing_keys() -> None:
    op.create_table(
        "signing_keys",
        sa.Column("key_id", sa.String(64), primary_key=True),
        sa.Column("record", sa.Text, nullable=False),
        sa.Column("first_used_at", INSTANT, nullable=False),
    )
    append_only.protect("signing_keys", "key_id")


def _certificates() -> None:
    op.create_table(
        "certificates",
        sa.Column("id", sa.String(71), primary_key=True),
        sa.Column("untrusted", sa.Boolean, primary_key=True),
        sa.Column("plan_digest", sa.String(71), nullable=False),
        sa.Column("name", sa.String(64)),
        sa.Column("dataset", sa.String(64)),
        sa.Column("adjacency", sa.String(32), nullable=False),
        sa.Column("verdict", sa.String(32), nullable=False),
        sa.Column("epsilon_upper", sa.Double),
        sa.Column("delta", sa.Double),
        sa.Column("created_at", INSTANT, nullable=False),
        sa.Column("key_id", sa.String(64), sa.ForeignKey("signing_keys.key_id"), nullable=False),
        sa.Column("bundle", sa.LargeBinary, nullable=False),
        sa.Column("result", sa.Text, nullable=False),
    )
    op.create_index("certificates_by_time", "certificates", ["created_at", "id", "untrusted"])
    op.create_index("certificates_by_plan", "certificates", ["plan_digest"])
    op.create_index("certificates_by_name", "certificates", ["name"])
    append_only.protect("certificates", "id", "untrusted")


def _requests() -> None:
    op.create_table(
        "requests",
        sa.Column("id", SEQUENCE, primary_key=True),
        sa.Column("certificate_id", sa.String(71), nullable=False),
        sa.Column("untrusted", sa.Boolean, nullable=False),
        sa.Column("requester", sa.String(255), nullable=False),
        sa.Column("received_at", INSTANT, nullable=False),
        sa.Column("content_type", sa.String(255), nullable=False),
        sa.Column("body", sa.LargeBinary, nullable=False),
        sa.ForeignKeyConstraint(
            ["certificate_id", "untrusted"],
            ["certificates.id", "certificates.untrusted"],
            name="requests_certificate",
        ),
        sa.CheckConstraint("id > 0", name="requests_id_positive"),
    )
    op.create_index("requests_by_certificate", "requests", ["certificate_id"])
    append_only.protect("requests", "id")


def _audit() -> None:
    op.create_table(
        "audit",
        sa.Column("seq", SEQUENCE, primary_key=True),
        sa.Column("at", INSTANT, nullable=False),
        sa.Column("actor", sa.String(255), nullable=False),
        sa.Column("action", sa.String(64), nullable=False),
        sa.Column("subject", sa.String(255), nullable=False),
        sa.Column("details", sa.Text, nullable=False),
        sa.CheckConstraint("seq > 0", name="audit_seq_positive"),
    )
    op.create_index("audit_by_subject", "audit", ["subject"])
    append_only.protect("audit", "seq")
