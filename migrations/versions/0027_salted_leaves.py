"""Entries of the log get a salt, so that the hashes of their leaves hide them.

Existing entries keep their leaves and have no salt.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0027"
down_revision = "0026"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column."""
    op.add_column("log_entries", sa.Column("salt", sa.LargeBinary(16)))
