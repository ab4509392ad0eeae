"""The first release, whose whole schema ``affidavit.migrations.schema`` makes.

Revisions 0001 to 0025 belonged to development databases, none of them released, so this chain
starts at 0026.
"""

from __future__ import annotations

revision = "0026"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Nothing: no database is older."""
