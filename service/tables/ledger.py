"""Tables of ledgers, reservations and their events."""

from __future__ import annotations

import sqlalchemy as sa

from affidavit.service.core.database import (
    RowNumber,
    UtcDateTime,
    metadata,
    numbered,
)

IS_AN_EVENT = (
    "(kind = 'budget' AND reservation_id IS NULL AND step IS NULL AND follows IS NULL)"
    " OR (reservation_id IS NOT NULL AND certified_steps IS NOT NULL AND step IS NOT NULL AND ("
    "(kind = 'reserve' AND step = 1 AND follows IS NULL)"
    " OR (kind IN ('commit', 'release') AND step = 2"
    " AND follows IS NOT NULL AND follows = 'reserve')"
    " OR (kind = 'settle' AND step = 3 AND follows IS NOT NULL AND follows = 'commit')))"
)


IS_WITHIN_CERTIFICATE = (
    "(kind = 'settle' AND steps_run IS NOT NULL AND steps_run >= 0"
    " AND steps_run <= certified_steps) OR (kind <> 'settle' AND steps_run IS NULL)"
)


ledgers = numbered(
    "ledgers",
    sa.Column("dataset", sa.String(64), nullable=False),
    sa.Column("unit", sa.String(16), nullable=False),
    sa.Column("adjacency", sa.String(32), nullable=False),
    sa.Column("filter", sa.Text, nullable=False),
    sa.Column("created_at", UtcDateTime, nullable=False),
    sa.Column("team", sa.String(64), nullable=False, server_default="default"),
    sa.UniqueConstraint("dataset", "unit", "adjacency", name="ledgers_one_each"),
)


reservations = sa.Table(
    "reservations",
    metadata,
    sa.Column("id", sa.String(36), primary_key=True),
    sa.Column("ledger_id", RowNumber, sa.ForeignKey("ledgers.id"), nullable=False),
    sa.Column("certificate_id", sa.String(71), nullable=False),
    sa.Column("issue", sa.Integer, nullable=False),
    sa.Column("untrusted", sa.Boolean, nullable=False),
    sa.Column("plan_digest", sa.String(71), nullable=False),
    sa.Column("name", sa.String(64)),
    sa.Column("certified_steps", sa.Integer, nullable=False),
    sa.Column("rule", sa.String(16), nullable=False),
    sa.Column("cost", sa.Text, nullable=False),
    sa.Column("event", sa.Text, nullable=False),
    sa.Column("team", sa.String(64), nullable=False, server_default="default"),
    sa.UniqueConstraint("id", "ledger_id", "certified_steps", name="reservations_steps"),
    sa.CheckConstraint("rule IN ('filter', 'alone')", name="reservations_rule"),
    sa.CheckConstraint("certified_steps > 0", name="reservations_steps_positive"),
)


ledger_events = sa.Table(
    "ledger_events",
    metadata,
    sa.Column("ledger_id", RowNumber, sa.ForeignKey("ledgers.id"), primary_key=True),
    sa.Column("seq", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("kind", sa.String(16), nullable=False),
    sa.Column("at", UtcDateTime, nullable=False),
    sa.Column("actor", sa.String(255), nullable=False),
    sa.Column("reservation_id", sa.String(36)),
    sa.Column("certified_steps", sa.Integer),
    sa.Column("step", sa.Integer),
    sa.Column("follows", sa.String(16)),
    sa.Column("steps_run", sa.Integer),
    sa.Column("idempotency_key", sa.String(255)),
    sa.Column("request_digest", sa.String(71)),
    sa.Column("body", sa.Text, nullable=False),
    sa.Column("state", sa.Text, nullable=False),
    sa.UniqueConstraint("reservation_id", "step", name="ledger_events_once"),
    sa.UniqueConstraint("reservation_id", "kind", name="ledger_events_kind_once"),
    sa.UniqueConstraint("actor", "idempotency_key", name="ledger_events_idempotent"),
    sa.ForeignKeyConstraint(
        ["reservation_id", "ledger_id", "certified_steps"],
        ["reservations.id", "reservations.ledger_id", "reservations.certified_steps"],
        name="ledger_events_reservation",
    ),
    sa.ForeignKeyConstraint(
        ["reservation_id", "follows"],
        ["ledger_events.reservation_id", "ledger_events.kind"],
        name="ledger_events_follows",
    ),
    sa.CheckConstraint("seq > 0", name="ledger_events_seq_positive"),
    sa.CheckConstraint(IS_AN_EVENT, name="ledger_events_kind"),
    sa.CheckConstraint(IS_WITHIN_CERTIFICATE, name="ledger_events_steps"),
)


dataset_grants = numbered(
    "dataset_grants",
    sa.Column("dataset", sa.String(64), nullable=False),
    sa.Column("team", sa.String(64), nullable=False),
    sa.Column("may", sa.String(16), nullable=False),
    sa.Column("reason", sa.Text, nullable=False),
    sa.Column("granted_by", sa.String(255), nullable=False),
    sa.Column("at", UtcDateTime, nullable=False),
    sa.CheckConstraint("may IN ('reserve', 'read', 'nothing')", name="dataset_grants_may"),
    sa.Index("dataset_grants_by_dataset", "dataset", "team", "id"),
)
