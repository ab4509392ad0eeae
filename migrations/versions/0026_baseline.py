"""The schema of the first release, which ``affidavit.migrations.schema`` creates.

Revisions 0001 to 0025 were of development databases that were never released.
"""

from __future__ import annotations

revision = "0026"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Do nothing, because no database is older."""
