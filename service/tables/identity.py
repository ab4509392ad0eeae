"""Tables of tokens, sessions and administrators' proposals."""

from __future__ import annotations

from typing import TYPE_CHECKING

import sqlalchemy as sa

from affidavit.service.core.database import (
    UtcDateTime,
    metadata,
    numbered,
)

if TYPE_CHECKING:
    pass


admin_proposals = numbered(
    "admin_proposals",
    sa.Column("kind", sa.String(32), nullable=False),
    sa.Column("digest", sa.String(71), nullable=False),
    sa.Column("proposer", sa.String(255), nullable=False),
    sa.Column("at", UtcDateTime, nullable=False),
    sa.Column("carried_out", sa.Boolean, nullable=False),
    sa.Column("content", sa.Text),
    sa.Column("reason", sa.Text),
    sa.Index("admin_proposals_by_digest", "digest", "id"),
)


tokens = sa.Table(
    "tokens",
    metadata,
    sa.Column("id", sa.String(12), primary_key=True),
    sa.Column("name", sa.String(64), nullable=False),
    sa.Column("scopes", sa.String(255), nullable=False),
    sa.Column("digest", sa.String(64), nullable=False),
    sa.Column("created_at", UtcDateTime, nullable=False),
    sa.Column("created_by", sa.String(255), nullable=False),
    sa.Column("expires_at", UtcDateTime, nullable=False),
    sa.Column("person", sa.String(255)),
    sa.Column("team", sa.String(64)),
    sa.Column("serves", sa.Text),
    sa.CheckConstraint("expires_at > created_at", name="tokens_expire_later"),
)


token_revocations = sa.Table(
    "token_revocations",
    metadata,
    sa.Column("token_id", sa.String(12), sa.ForeignKey("tokens.id"), primary_key=True),
    sa.Column("revoked_at", UtcDateTime, nullable=False),
    sa.Column("revoked_by", sa.String(255), nullable=False),
    sa.Column("reason", sa.String(255), nullable=False),
)


token_uses = sa.Table(
    "token_uses",
    metadata,
    sa.Column("token_id", sa.String(12), sa.ForeignKey("tokens.id"), primary_key=True),
    sa.Column("last_used_at", UtcDateTime),
)


sessions = sa.Table(
    "sessions",
    metadata,
    sa.Column("digest", sa.String(64), primary_key=True),
    sa.Column("actor", sa.String(255), nullable=False),
    sa.Column("roles", sa.JSON, nullable=False),
    sa.Column("token_id", sa.String(12), sa.ForeignKey("tokens.id")),
    sa.Column("team", sa.String(64)),
    sa.Column("created_at", UtcDateTime, nullable=False),
    sa.Column("seen_at", UtcDateTime, nullable=False),
    sa.Column("expires_at", UtcDateTime, nullable=False),
    sa.CheckConstraint("expires_at > created_at", name="sessions_expire_later"),
    sa.Index("sessions_by_expiry", "expires_at"),
)
"""Sessions by the SHA-256 of the cookie.

A session by token refers to the token, whose scopes are looked up for each request. A session by
the OpenID provider stores the person's ``roles``, each a team with scopes; ``team`` is the current
one.
"""
