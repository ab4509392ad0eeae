"""Policies and waivers, each version signed and kept."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from affidavit.migrations import append_only

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

INSTANT = sa.DateTime(timezone=True)
SEQUENCE = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    """Make the four tables and forbid changing them."""
    _policies()
    _waivers()
    _waiver_revocations()
    _waiver_uses()


def downgrade() -> None:
    """Drop the four tables, with everything in them."""
    for table in ("waiver_uses", "waiver_revocations", "waivers", "policies"):
        op.drop_table(table)


def _signed_by() -> list[sa.Column[object]]:
    return [
        sa.Column("envelope", sa.LargeBinary, nullable=False),
        sa.Column("key_id", sa.String(64), sa.ForeignKey("signing_keys.key_id"), nullable=False),
    ]


def _policies() -> None:
    op.create_table(
        "policies",
        sa.Column("id", SEQUENCE, primary_key=True),
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("version", sa.Integer, nullable=False),
        sa.Column("digest", sa.String(71), nullable=False),
        *_signed_by(),
        sa.Column("created_by", sa.String(255), nullable=False),
        sa.Column("created_at", INSTANT, nullable=False),
        sa.UniqueConstraint("name", "version", name="policies_version"),
        sa.CheckConstraint("id > 0", name="policies_id_positive"),
        sa.CheckConstraint("version > 0", name="policies_version_positive"),
    )
    append_only.protect("policies", "name", "version")


def _waivers() -> None:
    op.create_table(
        "waivers",
        sa.Column("id", SEQUENCE, primary_key=True),
        sa.Column("waiver_id", sa.String(71), nullable=False),
        *_signed_by(),
        sa.Column("owner", sa.String(255), nullable=False),
        sa.Column("created_by", sa.String(255), nullable=False),
        sa.Column("created_at", INSTANT, nullable=False),
        sa.Column("expires_at", INSTANT, nullable=False),
        sa.UniqueConstraint("waiver_id", name="waivers_once"),
        sa.CheckConstraint("id > 0", name="waivers_id_positive"),
        sa.CheckConstraint("owner <> created_by", name="waivers_by_another"),
        sa.CheckConstraint("expires_at > created_at", name="waivers_end"),
    )
    append_only.protect("waivers", "waiver_id")


def _waiver_revocations() -> None:
    op.create_table(
        "waiver_revocations",
        sa.Column("id", SEQUENCE, primary_key=True),
        sa.Column("waiver_id", sa.String(71), sa.ForeignKey("waivers.waiver_id"), nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("revoked_by", sa.String(255), nullable=False),
        sa.Column("at", INSTANT, nullable=False),
        sa.UniqueConstraint("waiver_id", name="waiver_revocations_once"),
        sa.CheckConstraint("id > 0", name="waiver_revocations_id_positive"),
    )
    append_only.protect("waiver_revocations", "waiver_id")


def _waiver_uses() -> None:
    op.create_table(
        "waiver_uses",
        sa.Column("id", SEQUENCE, primary_key=True),
        sa.Column("waiver_id", sa.String(71), sa.ForeignKey("waivers.waiver_id"), nullable=False),
        sa.Column("certificate_id", sa.String(71), nullable=False),
        sa.Column("at", INSTANT, nullable=False),
        sa.CheckConstraint("id > 0", name="waiver_uses_id_positive"),
    )
    op.create_index("waiver_uses_by_waiver", "waiver_uses", ["waiver_id"])
    append_only.protect("waiver_uses", "id")
