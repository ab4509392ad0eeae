"""The tables of policies and waivers, all append-only.

``policies``
    Every version of every policy with its signed envelope. The highest version of a name
    is active; a version is never withdrawn, only succeeded.
``waivers``
    Every waiver with its signed envelope, identified by the digest of its content.
``waiver_revocations``
    Revocations of waivers, at most one for each.
``waiver_uses``
    Which certificates rely on a waiver, so that they can be revoked with it.

Rows of the first three are written by one transaction at a time (``lock_policies``), so that
their ids grow in the order in which they become visible.
"""

from __future__ import annotations

from sqlalchemy import (
    CheckConstraint,
    Column,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    String,
    Table,
    Text,
    UniqueConstraint,
)

from affidavit.service.tables import Sequence, UtcDateTime, metadata

policies = Table(
    "policies",
    metadata,
    Column("id", Sequence, primary_key=True),
    Column("name", String(64), nullable=False),
    Column("version", Integer, nullable=False),
    Column("digest", String(71), nullable=False),
    Column("envelope", LargeBinary, nullable=False),
    Column("key_id", String(64), ForeignKey("signing_keys.key_id"), nullable=False),
    Column("created_by", String(255), nullable=False),
    Column("created_at", UtcDateTime, nullable=False),
    UniqueConstraint("name", "version", name="policies_version"),
    CheckConstraint("id > 0", name="policies_id_positive"),
    CheckConstraint("version > 0", name="policies_version_positive"),
)

waivers = Table(
    "waivers",
    metadata,
    Column("id", Sequence, primary_key=True),
    Column("waiver_id", String(71), nullable=False),
    Column("envelope", LargeBinary, nullable=False),
    Column("key_id", String(64), ForeignKey("signing_keys.key_id"), nullable=False),
    Column("owner", String(255), nullable=False),
    Column("created_by", String(255), nullable=False),
    Column("created_at", UtcDateTime, nullable=False),
    Column("expires_at", UtcDateTime, nullable=False),
    Column("team", String(64), nullable=False, server_default="default"),
    UniqueConstraint("waiver_id", name="waivers_once"),
    CheckConstraint("id > 0", name="waivers_id_positive"),
    CheckConstraint("owner <> created_by", name="waivers_by_another"),
    CheckConstraint("expires_at > created_at", name="waivers_end"),
)

waiver_revocations = Table(
    "waiver_revocations",
    metadata,
    Column("id", Sequence, primary_key=True),
    Column("waiver_id", String(71), ForeignKey("waivers.waiver_id"), nullable=False),
    Column("reason", Text, nullable=False),
    Column("revoked_by", String(255), nullable=False),
    Column("at", UtcDateTime, nullable=False),
    UniqueConstraint("waiver_id", name="waiver_revocations_once"),
    CheckConstraint("id > 0", name="waiver_revocations_id_positive"),
)

waiver_uses = Table(
    "waiver_uses",
    metadata,
    Column("id", Sequence, primary_key=True),
    Column("waiver_id", String(71), ForeignKey("waivers.waiver_id"), nullable=False),
    Column("certificate_id", String(71), nullable=False),
    Column("at", UtcDateTime, nullable=False),
    CheckConstraint("id > 0", name="waiver_uses_id_positive"),
    Index("waiver_uses_by_waiver", "waiver_id"),
)
