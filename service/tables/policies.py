"""Tables of policies and waivers."""

from __future__ import annotations

import sqlalchemy as sa

from affidavit.service.core.database import (
    UtcDateTime,
    numbered,
)

policies = numbered(
    "policies",
    sa.Column("name", sa.String(64), nullable=False),
    sa.Column("version", sa.Integer, nullable=False),
    sa.Column("digest", sa.String(71), nullable=False),
    sa.Column("envelope", sa.LargeBinary, nullable=False),
    sa.Column("key_id", sa.String(64), sa.ForeignKey("signing_keys.key_id"), nullable=False),
    sa.Column("created_by", sa.String(255), nullable=False),
    sa.Column("created_at", UtcDateTime, nullable=False),
    sa.UniqueConstraint("name", "version", name="policies_version"),
    sa.CheckConstraint("version > 0", name="policies_version_positive"),
)


waivers = numbered(
    "waivers",
    sa.Column("waiver_id", sa.String(71), nullable=False),
    sa.Column("envelope", sa.LargeBinary, nullable=False),
    sa.Column("key_id", sa.String(64), sa.ForeignKey("signing_keys.key_id"), nullable=False),
    sa.Column("owner", sa.String(255), nullable=False),
    sa.Column("created_by", sa.String(255), nullable=False),
    sa.Column("created_at", UtcDateTime, nullable=False),
    sa.Column("expires_at", UtcDateTime, nullable=False),
    sa.Column("team", sa.String(64), nullable=False, server_default="default"),
    sa.UniqueConstraint("waiver_id", name="waivers_once"),
    sa.CheckConstraint("owner <> created_by", name="waivers_by_another"),
    sa.CheckConstraint("expires_at > created_at", name="waivers_end"),
)


waiver_revocations = numbered(
    "waiver_revocations",
    sa.Column("waiver_id", sa.String(71), sa.ForeignKey("waivers.waiver_id"), nullable=False),
    sa.Column("reason", sa.Text, nullable=False),
    sa.Column("revoked_by", sa.String(255), nullable=False),
    sa.Column("at", UtcDateTime, nullable=False),
    sa.UniqueConstraint("waiver_id", name="waiver_revocations_once"),
)


waiver_uses = numbered(
    "waiver_uses",
    sa.Column("waiver_id", sa.String(71), sa.ForeignKey("waivers.waiver_id"), nullable=False),
    sa.Column("certificate_id", sa.String(71), nullable=False),
    sa.Column("at", UtcDateTime, nullable=False),
    sa.Index("waiver_uses_by_waiver", "waiver_id"),
)
