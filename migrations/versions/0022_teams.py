"""Teams: what was stored before belongs to the team ``default``.

A token that names no team keeps seeing what it saw.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from affidavit.migrations.triggers import protect

revision = "0022"
down_revision = "0021"
branch_labels = None
depends_on = None

OWNED = ("certificates", "ledgers", "reservations", "runs", "waivers")


def upgrade() -> None:
    """Add the columns in place, and the table of grants, whose rows only grow."""
    for table in OWNED:
        op.add_column(
            table, sa.Column("team", sa.String(64), nullable=False, server_default="default")
        )
    for table in ("tokens", "sessions"):
        op.add_column(table, sa.Column("team", sa.String(64)))
    op.create_index(
        "certificates_by_team", "certificates", ["team", "created_at", "id", "untrusted"]
    )
    op.create_index("runs_by_team", "runs", ["team", "requested_at", "id"])
    op.create_table(
        "dataset_grants",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), primary_key=True),
        sa.Column("dataset", sa.String(64), nullable=False),
        sa.Column("team", sa.String(64), nullable=False),
        sa.Column("may", sa.String(16), nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("granted_by", sa.String(255), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.CheckConstraint("id > 0", name="dataset_grants_id_positive"),
        sa.CheckConstraint("may IN ('reserve', 'read', 'nothing')", name="dataset_grants_may"),
        sa.Index("dataset_grants_by_dataset", "dataset", "team", "id"),
    )
    protect("dataset_grants")
