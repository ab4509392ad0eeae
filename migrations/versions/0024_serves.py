"""The queues and data sets that a worker's token names."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0024"
down_revision = "0023"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add a column; earlier tokens of workers are for the queue ``default``."""
    op.add_column("tokens", sa.Column("serves", sa.Text))
