"""Tokens, by which people and machines are known."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from affidavit.migrations import append_only

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

INSTANT = sa.DateTime(timezone=True)


def upgrade() -> None:
    """Make the tables; what was said of a token once cannot be changed."""
    op.create_table(
        "tokens",
        sa.Column("id", sa.String(12), primary_key=True),
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("scopes", sa.String(255), nullable=False),
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("created_at", INSTANT, nullable=False),
        sa.Column("created_by", sa.String(255), nullable=False),
        sa.Column("expires_at", INSTANT, nullable=False),
        sa.CheckConstraint("expires_at > created_at", name="tokens_expire_later"),
    )
    op.create_table(
        "token_revocations",
        sa.Column("token_id", sa.String(12), sa.ForeignKey("tokens.id"), primary_key=True),
        sa.Column("revoked_at", INSTANT, nullable=False),
        sa.Column("revoked_by", sa.String(255), nullable=False),
        sa.Column("reason", sa.String(255), nullable=False),
    )
    op.create_table(
        "token_uses",
        sa.Column("token_id", sa.String(12), sa.ForeignKey("tokens.id"), primary_key=True),
        sa.Column("last_used_at", INSTANT),
    )
    append_only.protect("tokens", "id")
    append_only.protect("token_revocations", "token_id")


def downgrade() -> None:
    """Drop them, with every token in them."""
    for table in ("token_uses", "token_revocations", "tokens"):
        op.drop_table(table)
