"""The openings of searches, which are drawn when their runs begin."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0023"
down_revision = "0022"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add a column, which is empty for all runs so far."""
    op.add_column("run_leases", sa.Column("search", sa.Text))
