"""Entries of the log by kind, and what happened to runs by kind and time."""

from __future__ import annotations

from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Make the indexes."""
    op.create_index("log_entries_by_kind", "log_entries", ["kind", "id"])
    op.create_index("run_events_by_kind", "run_events", ["kind", "at"])


def downgrade() -> None:
    """Drop them."""
    op.drop_index("run_events_by_kind", "run_events")
    op.drop_index("log_entries_by_kind", "log_entries")
