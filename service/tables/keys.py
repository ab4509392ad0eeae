"""Tables of keysets and revoked keys."""

from __future__ import annotations

import sqlalchemy as sa

from affidavit.service.core.database import (
    RowNumber,
    UtcDateTime,
    metadata,
)

keysets = sa.Table(
    "keysets",
    metadata,
    sa.Column("version", RowNumber, primary_key=True, autoincrement=False),
    sa.Column("follows", RowNumber, sa.ForeignKey("keysets.version", name="keysets_follows")),
    sa.Column("digest", sa.String(71), nullable=False, unique=True),
    sa.Column("document", sa.LargeBinary, nullable=False),
    sa.Column("published_at", UtcDateTime, nullable=False),
    sa.Column("publisher", sa.String(255), nullable=False),
    sa.CheckConstraint(
        "(version = 1 AND follows IS NULL) OR (follows IS NOT NULL AND version = follows + 1)",
        name="keysets_in_order",
    ),
)


revoked_keys = sa.Table(
    "revoked_keys",
    metadata,
    sa.Column(
        "version",
        RowNumber,
        sa.ForeignKey("keysets.version", name="revoked_keys_keyset"),
        primary_key=True,
        autoincrement=False,
    ),
    sa.Column("key_id", sa.String(64), primary_key=True),
    sa.Column("since", UtcDateTime, nullable=False),
    sa.Index("revoked_keys_by_key", "key_id"),
)
