"""The order in which runs are claimed, as an index: whoever asks reads the first that fits.

The one before had no descending priority, so that a claim sorted every waiting run of the highest
priority, which may be all of them. And the runs of a queue, latest first: those of a queue that
has few were looked for among all.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Put the one in the place of the other, and add the second."""
    op.create_index(
        "run_leases_next",
        "run_leases",
        ["queue", "state", sa.text("priority DESC"), "requested_at", "run_id"],
    )
    op.drop_index("run_leases_waiting", "run_leases")
    op.create_index("runs_by_queue", "runs", ["queue", "requested_at"])


def downgrade() -> None:
    """And back."""
    op.drop_index("runs_by_queue", "runs")
    op.create_index(
        "run_leases_waiting", "run_leases", ["queue", "state", "priority", "requested_at"]
    )
    op.drop_index("run_leases_next", "run_leases")
