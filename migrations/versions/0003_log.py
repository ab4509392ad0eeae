"""The transparency log: entries, leaves and signed checkpoints."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from affidavit.migrations import append_only

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

INSTANT = sa.DateTime(timezone=True)
SEQUENCE = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    """Make the tables and forbid changing them."""
    op.create_table(
        "log_entries",
        sa.Column("id", SEQUENCE, primary_key=True),
        sa.Column("kind", sa.String(32), nullable=False),
        sa.Column("subject", sa.String(255), nullable=False),
        sa.Column("at", INSTANT, nullable=False),
        sa.Column("content", sa.Text, nullable=False),
    )
    op.create_index("log_entries_by_subject", "log_entries", ["subject"])
    append_only.protect("log_entries", "id")


def downgrade() -> None:
    """Drop them, with everything in them."""
    op.drop_table("log_entries")
