"""The tables of keysets, both append-only.

``keysets``
    One row a version, none left out.
``revoked_keys``
    The keys that each version revokes and from when on, written with it: by them the database
    says where a certificate stands. Later versions revoke at least as much.
"""

from __future__ import annotations

from sqlalchemy import CheckConstraint, Column, ForeignKey, Index, LargeBinary, String, Table

from affidavit.service.tables import Sequence, UtcDateTime, metadata

keysets = Table(
    "keysets",
    metadata,
    Column("version", Sequence, primary_key=True, autoincrement=False),
    Column("follows", Sequence, ForeignKey("keysets.version", name="keysets_follows")),
    Column("digest", String(71), nullable=False, unique=True),
    Column("document", LargeBinary, nullable=False),
    Column("published_at", UtcDateTime, nullable=False),
    Column("publisher", String(255), nullable=False),
    CheckConstraint(
        "(version = 1 AND follows IS NULL) OR (follows IS NOT NULL AND version = follows + 1)",
        name="keysets_in_order",
    ),
)

revoked_keys = Table(
    "revoked_keys",
    metadata,
    Column(
        "version",
        Sequence,
        ForeignKey("keysets.version", name="revoked_keys_keyset"),
        primary_key=True,
        autoincrement=False,
    ),
    Column("key_id", String(64), primary_key=True),
    Column("since", UtcDateTime, nullable=False),
    Index("revoked_keys_by_key", "key_id"),
)
