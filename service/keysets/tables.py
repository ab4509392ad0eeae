"""The table of keyset versions: append-only, one row a version, none left out."""

from __future__ import annotations

from sqlalchemy import CheckConstraint, Column, ForeignKey, LargeBinary, String, Table

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
