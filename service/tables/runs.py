"""Tables of runs, their events, leases, records and tests."""

from __future__ import annotations

import sqlalchemy as sa

from affidavit.service.core.database import (
    UtcDateTime,
    metadata,
)
from affidavit.service.tables.certificates import issue_columns

IS_AN_EVENT = (
    "(kind = 'queued' AND seq = 1 AND once IS NOT NULL AND once = 'queued'"
    " AND follows IS NULL AND fence IS NULL)"
    " OR (seq > 1 AND follows IS NOT NULL AND ("
    "(kind = 'claimed' AND once IS NULL AND follows = 'queued' AND fence IS NOT NULL)"
    " OR (kind = 'requeued' AND once IS NULL AND follows = 'queued' AND fence IS NOT NULL)"
    " OR (kind = 'cancel_asked' AND once IS NOT NULL AND once = 'cancel_asked'"
    " AND follows = 'queued')"
    " OR (kind = 'running' AND once IS NOT NULL AND once = 'running' AND follows = 'queued'"
    " AND fence IS NOT NULL)"
    " OR (kind = 'resumed' AND once IS NULL AND follows = 'running' AND fence IS NOT NULL)"
    " OR (kind = 'settled' AND once IS NOT NULL AND once = 'end' AND follows = 'running'"
    " AND fence IS NOT NULL)"
    " OR (kind IN ('failed', 'cancelled') AND once IS NOT NULL AND once = 'end'"
    " AND follows IN ('queued', 'running'))))"
)


runs = sa.Table(
    "runs",
    metadata,
    sa.Column("id", sa.String(36), primary_key=True),
    *issue_columns("runs"),
    sa.Column("plan_digest", sa.String(71), nullable=False),
    sa.Column("reservation_id", sa.String(36), sa.ForeignKey("reservations.id"), nullable=False),
    sa.Column("queue", sa.String(64), nullable=False),
    sa.Column("request", sa.Text, nullable=False),
    sa.Column("requested_by", sa.String(255), nullable=False),
    sa.Column("requested_at", UtcDateTime, nullable=False),
    sa.Column("idempotency_key", sa.String(255)),
    sa.Column("request_digest", sa.String(71)),
    sa.Column("team", sa.String(64), nullable=False, server_default="default"),
    sa.UniqueConstraint("reservation_id", name="runs_reservation_once"),
    sa.UniqueConstraint("requested_by", "idempotency_key", name="runs_idempotent"),
    sa.Index("runs_by_time", "requested_at", "id"),
    sa.Index("runs_by_team", "team", "requested_at", "id"),
    sa.Index("runs_by_certificate", "certificate_id", "requested_at"),
    sa.Index("runs_by_queue", "queue", "requested_at"),
)


run_events = sa.Table(
    "run_events",
    metadata,
    sa.Column("run_id", sa.String(36), sa.ForeignKey("runs.id"), primary_key=True),
    sa.Column("seq", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("kind", sa.String(16), nullable=False),
    sa.Column("once", sa.String(16)),
    sa.Column("follows", sa.String(16)),
    sa.Column("fence", sa.Integer),
    sa.Column("at", UtcDateTime, nullable=False),
    sa.Column("actor", sa.String(255), nullable=False),
    sa.Column("body", sa.Text, nullable=False),
    sa.UniqueConstraint("run_id", "once", name="run_events_once"),
    sa.UniqueConstraint("run_id", "kind", "fence", name="run_events_fenced"),
    sa.ForeignKeyConstraint(
        ["run_id", "follows"],
        ["run_events.run_id", "run_events.once"],
        name="run_events_follows",
    ),
    sa.CheckConstraint("seq > 0", name="run_events_seq_positive"),
    sa.CheckConstraint("fence IS NULL OR fence > 0", name="run_events_fence_positive"),
    sa.CheckConstraint(IS_AN_EVENT, name="run_events_kind"),
    sa.Index("run_events_by_kind", "kind", "at"),
)


run_leases = sa.Table(
    "run_leases",
    metadata,
    sa.Column("run_id", sa.String(36), sa.ForeignKey("runs.id"), primary_key=True),
    sa.Column("queue", sa.String(64), nullable=False),
    sa.Column("requested_at", UtcDateTime, nullable=False),
    sa.Column("state", sa.String(16), nullable=False),
    sa.Column("fence", sa.Integer, nullable=False),
    sa.Column("secret", sa.String(71)),
    sa.Column("job", sa.Integer, nullable=False, server_default="1"),
    sa.Column("holder", sa.String(255)),
    sa.Column("worker", sa.String(64)),
    sa.Column("seconds", sa.Integer),
    sa.Column("expires_at", UtcDateTime),
    sa.Column("steps", sa.Integer, nullable=False),
    sa.Column("cancel", sa.Boolean, nullable=False),
    sa.Column("granted", sa.Integer, nullable=False, server_default="0"),
    sa.Column("head", sa.String(71)),
    sa.Column("previous", sa.Integer),
    sa.Column("search", sa.Text),
    sa.CheckConstraint(
        "state IN ('queued', 'claimed', 'running', 'ended')", name="run_leases_state"
    ),
    sa.CheckConstraint("fence >= 0", name="run_leases_fence"),
    sa.Index("run_leases_expiring", "state", "expires_at"),
    sa.Index("run_leases_next", "queue", "state", "requested_at", "run_id"),
)


run_records = sa.Table(
    "run_records",
    metadata,
    sa.Column("run_id", sa.String(36), sa.ForeignKey("runs.id"), primary_key=True),
    sa.Column("fence", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("part", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("content", sa.LargeBinary, nullable=False),
    sa.Column("length", sa.Integer, nullable=False),
    sa.CheckConstraint("fence > 0 AND part > 0", name="run_records_counted"),
)


run_tests = sa.Table(
    "run_tests",
    metadata,
    sa.Column("run_id", sa.String(36), sa.ForeignKey("runs.id"), primary_key=True),
    sa.Column("kind", sa.String(16), primary_key=True),
    sa.Column("content", sa.LargeBinary, nullable=False),
    sa.Column("digest", sa.String(71), nullable=False),
    sa.Column("verdict", sa.String(16), nullable=False),
    sa.Column("added_by", sa.String(255), nullable=False),
    sa.Column("added_at", UtcDateTime, nullable=False),
)
