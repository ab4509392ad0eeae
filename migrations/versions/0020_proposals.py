"""What administrators ask for and others have to ask for too."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from affidavit.migrations.triggers import protect

revision = "0020"
down_revision = "0019"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create the table, whose rows only grow."""
    op.create_table(
        "admin_proposals",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), primary_key=True),
        sa.Column("kind", sa.String(32), nullable=False),
        sa.Column("digest", sa.String(71), nullable=False),
        sa.Column("proposer", sa.String(255), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("carried_out", sa.Boolean, nullable=False),
        sa.CheckConstraint("id > 0", name="admin_proposals_id_positive"),
        sa.Index("admin_proposals_by_digest", "digest", "id"),
    )
    protect("admin_proposals")
