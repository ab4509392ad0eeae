"""Searches are not saved any more: their address can be bookmarked."""

from __future__ import annotations

from alembic import op

revision = "0028"
down_revision = "0027"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Drop the table."""
    op.drop_table("saved_views", if_exists=True)
