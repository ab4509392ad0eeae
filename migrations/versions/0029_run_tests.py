"""What a replay of its training script and an audit of its canaries showed is stored with a run."""

from __future__ import annotations

from affidavit.migrations import schema

revision = "0029"
down_revision = "0028"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create the table, which is append-only."""
    schema.add("run_tests")
