"""The newest certificates of a team, of a mechanism and of a key, each by an index.

Without them all certificates were read through. The time stands beside the facets for that; their
table lets no row be changed, so a new one takes its place, with rows that it has been given once
and for all.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

from affidavit.migrations import append_only

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None

TABLE, NEW = "certificate_facets", "certificate_facets_new"
PLACE = ("certificate_id", "untrusted", "issue")
FACETS = ("mechanism", "requester")


def upgrade() -> None:
    """Take the times from the certificates, and have the indexes follow them."""
    _anew(sa.Column("created_at", sa.DateTime(timezone=True), nullable=False))
    for facet in FACETS:
        op.create_index(f"{TABLE}_by_{facet}", TABLE, [facet, "created_at"])
    op.create_index("certificates_by_key", "certificates", ["key_id", "created_at"])


def downgrade() -> None:
    """And back; the certificates say when they were made."""
    op.drop_index("certificates_by_key", "certificates")
    _anew()
    for facet in FACETS:
        op.create_index(f"{TABLE}_by_{facet}", TABLE, [facet])


def _anew(*more: sa.Column[Any]) -> None:
    """Put a new table in the place of the old one, with ``more`` columns of the certificates."""
    op.create_table(
        NEW,
        sa.Column("certificate_id", sa.String(71), primary_key=True),
        sa.Column("untrusted", sa.Boolean, primary_key=True),
        sa.Column("issue", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("mechanism", sa.String(64), nullable=False),
        sa.Column("requester", sa.String(255), nullable=False),
        *more,
        sa.ForeignKeyConstraint(
            list(PLACE),
            ["certificates.id", "certificates.untrusted", "certificates.issue"],
            name="certificate_facets_certificate",
        ),
    )
    taken = [f"facets.{name}" for name in (*PLACE, *FACETS)]
    taken += [f"kept.{column.name}" for column in more]
    same = "kept.id = facets.certificate_id AND kept.untrusted = facets.untrusted"
    op.execute(
        f"INSERT INTO {NEW} SELECT {', '.join(taken)} FROM {TABLE} AS facets "
        f"JOIN certificates AS kept ON {same} AND kept.issue = facets.issue"
    )
    op.drop_table(TABLE)
    op.rename_table(NEW, TABLE)
    if op.get_bind().dialect.name == "postgresql":
        op.execute(f"ALTER INDEX {NEW}_pkey RENAME TO {TABLE}_pkey")
    append_only.protect(TABLE, *PLACE)
