"""What proposals ask for and why, to show it to whoever has to agree."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0025"
down_revision = "0024"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add two columns, which are empty for proposals so far."""
    op.add_column("admin_proposals", sa.Column("content", sa.Text))
    op.add_column("admin_proposals", sa.Column("reason", sa.Text))
