"""Versions of the keyset, signed by the root keys: each follows the one before it."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from affidavit.migrations import append_only

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

INSTANT = sa.DateTime(timezone=True)
SEQUENCE = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    """Make the table and forbid changing it."""
    op.create_table(
        "keysets",
        sa.Column("version", SEQUENCE, primary_key=True, autoincrement=False),
        sa.Column("follows", SEQUENCE, sa.ForeignKey("keysets.version", name="keysets_follows")),
        sa.Column("digest", sa.String(71), nullable=False, unique=True),
        sa.Column("document", sa.LargeBinary, nullable=False),
        sa.Column("published_at", INSTANT, nullable=False),
        sa.Column("publisher", sa.String(255), nullable=False),
        # No version is left out: what it follows is there, and is the one before.
        sa.CheckConstraint(
            "(version = 1 AND follows IS NULL) OR (follows IS NOT NULL AND version = follows + 1)",
            name="keysets_in_order",
        ),
    )
    append_only.protect("keysets", "version")


def downgrade() -> None:
    """Drop it, with everything in it."""
    op.drop_table("keysets")
