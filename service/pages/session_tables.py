"""The tables of pages; both change, for neither says anything about privacy.

``sessions``
    Who is signed in with a browser, until when. The key is the SHA-256 of the cookie; the
    cookie itself is nowhere. A session by token names the token and nothing of what it
    allows, which is looked up for each request; one by the OpenID provider has the scopes
    that the provider's groups gave when it began.
``saved_views``
    Searches that people keep: a page, a name and the query of its URL, for one actor.
"""

from __future__ import annotations

from sqlalchemy import (
    CheckConstraint,
    Column,
    ForeignKey,
    Index,
    String,
    Table,
    Text,
    UniqueConstraint,
)

from affidavit.service.tables import UtcDateTime, metadata

sessions = Table(
    "sessions",
    metadata,
    Column("digest", String(64), primary_key=True),
    Column("actor", String(255), nullable=False),
    Column("scopes", String(255), nullable=False),
    Column("token_id", String(12), ForeignKey("tokens.id")),
    Column("created_at", UtcDateTime, nullable=False),
    Column("seen_at", UtcDateTime, nullable=False),
    Column("expires_at", UtcDateTime, nullable=False),
    CheckConstraint("expires_at > created_at", name="sessions_expire_later"),
    Index("sessions_by_expiry", "expires_at"),
)

saved_views = Table(
    "saved_views",
    metadata,
    Column("id", String(36), primary_key=True),
    Column("owner", String(255), nullable=False),
    Column("page", String(64), nullable=False),
    Column("name", String(64), nullable=False),
    Column("query", Text, nullable=False),
    Column("created_at", UtcDateTime, nullable=False),
    UniqueConstraint("owner", "page", "name", name="saved_views_once"),
)
