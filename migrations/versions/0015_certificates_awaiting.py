"""Certificates that lack approvals, by time: the few of many that wait for somebody."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None

LACKING = sa.text("approvals_given < approvals_required")


def upgrade() -> None:
    """Make the index."""
    op.create_index(
        "certificates_awaiting",
        "certificates",
        ["created_at", "id", "untrusted"],
        postgresql_where=LACKING,
        sqlite_where=LACKING,
    )


def downgrade() -> None:
    """Drop it."""
    op.drop_index("certificates_awaiting", "certificates")
