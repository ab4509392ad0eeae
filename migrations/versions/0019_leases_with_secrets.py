"""Leases with secrets; no priorities, requirements, places or waits of runs.

An engine decides where and when a run executes. What was asked for stays in ``runs.wanted``. A
lease that is held during the upgrade has no secret and ends: its run continues under a new one.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0019"
down_revision = "0018"
branch_labels = None
depends_on = None

UNUSED = ("priority", "gpu", "memory_mib", "place", "ready_at", "elsewhere_at")


def upgrade() -> None:
    """Change the columns in place; the triggers of ``runs`` stay."""
    op.drop_index("run_leases_next", "run_leases")
    for name in UNUSED:
        op.drop_column("run_leases", name)
    op.drop_column("runs", "priority")
    op.add_column("run_leases", sa.Column("secret", sa.String(71)))
    op.add_column("run_leases", sa.Column("job", sa.Integer, nullable=False, server_default="1"))
    op.create_index("run_leases_next", "run_leases", ["queue", "state", "requested_at", "run_id"])
