"""Cosignatures of witnesses under the log's checkpoints."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from affidavit.migrations.triggers import protect

revision = "0018"
down_revision = "0017"
branch_labels = None
depends_on = None

SEQUENCE = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    """Create the table, whose rows only grow."""
    op.create_table(
        "log_cosignatures",
        sa.Column(
            "checkpoint_id",
            SEQUENCE,
            sa.ForeignKey("log_checkpoints.id"),
            primary_key=True,
            autoincrement=False,
        ),
        sa.Column("witness", sa.String(400), primary_key=True),
        sa.Column("cosigned_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("line", sa.Text, nullable=False),
    )
    protect("log_cosignatures")
