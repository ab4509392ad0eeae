"""The tables of tokens, as ``tokens_kept`` reads and writes them.

``tokens``
    One row per token, written once: its id, who it speaks for, what it allows, until
    when, whose it is where that was said, and the SHA-256 of it. The token itself is nowhere.
``token_revocations``
    A token that is revoked gets a row here; no row ever leaves.
``token_uses``
    When a token was last used, to the minute. The only one of the three that changes.
"""

from __future__ import annotations

from sqlalchemy import CheckConstraint, Column, ForeignKey, String, Table

from affidavit.service.tables import UtcDateTime, metadata

tokens = Table(
    "tokens",
    metadata,
    Column("id", String(12), primary_key=True),
    Column("name", String(64), nullable=False),
    Column("scopes", String(255), nullable=False),
    Column("digest", String(64), nullable=False),
    Column("created_at", UtcDateTime, nullable=False),
    Column("created_by", String(255), nullable=False),
    Column("expires_at", UtcDateTime, nullable=False),
    Column("person", String(255)),
    CheckConstraint("expires_at > created_at", name="tokens_expire_later"),
)

token_revocations = Table(
    "token_revocations",
    metadata,
    Column("token_id", String(12), ForeignKey("tokens.id"), primary_key=True),
    Column("revoked_at", UtcDateTime, nullable=False),
    Column("revoked_by", String(255), nullable=False),
    Column("reason", String(255), nullable=False),
)

token_uses = Table(
    "token_uses",
    metadata,
    Column("token_id", String(12), ForeignKey("tokens.id"), primary_key=True),
    Column("last_used_at", UtcDateTime),
)
