"""Who is signed in with a browser, and the searches that people keep."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None

INSTANT = sa.DateTime(timezone=True)


def upgrade() -> None:
    """Make the tables; rows of both come and go."""
    op.create_table(
        "sessions",
        sa.Column("digest", sa.String(64), primary_key=True),
        sa.Column("actor", sa.String(255), nullable=False),
        sa.Column("scopes", sa.String(255), nullable=False),
        sa.Column("token_id", sa.String(12), sa.ForeignKey("tokens.id")),
        sa.Column("created_at", INSTANT, nullable=False),
        sa.Column("seen_at", INSTANT, nullable=False),
        sa.Column("expires_at", INSTANT, nullable=False),
        sa.CheckConstraint("expires_at > created_at", name="sessions_expire_later"),
    )
    op.create_index("sessions_by_expiry", "sessions", ["expires_at"])
    op.create_table(
        "saved_views",
        sa.Column("id", sa.String(36), primary_key=True),
        sa.Column("owner", sa.String(255), nullable=False),
        sa.Column("page", sa.String(64), nullable=False),
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("query", sa.Text, nullable=False),
        sa.Column("created_at", INSTANT, nullable=False),
        sa.UniqueConstraint("owner", "page", "name", name="saved_views_once"),
    )


def downgrade() -> None:
    """Drop them, with every session and search in them."""
    for table in ("saved_views", "sessions"):
        op.drop_table(table)
