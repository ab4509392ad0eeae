"""Runs, what happened to them, and who holds one now."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from affidavit.migrations import append_only

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None

INSTANT = sa.DateTime(timezone=True)

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
    " OR (kind = 'settled' AND once IS NOT NULL AND once = 'end' AND follows = 'running'"
    " AND fence IS NOT NULL)"
    " OR (kind IN ('failed', 'cancelled') AND once IS NOT NULL AND once = 'end'"
    " AND follows IN ('queued', 'running'))))"
)


def upgrade() -> None:
    """Make the three tables; only leases may change."""
    _runs()
    _run_events()
    _run_leases()


def downgrade() -> None:
    """Drop the three tables, with everything in them."""
    for table in ("run_leases", "run_events", "runs"):
        op.drop_table(table)


def _runs() -> None:
    op.create_table(
        "runs",
        sa.Column("id", sa.String(36), primary_key=True),
        sa.Column("certificate_id", sa.String(71), nullable=False),
        sa.Column("issue", sa.Integer, nullable=False),
        sa.Column("untrusted", sa.Boolean, nullable=False),
        sa.Column("plan_digest", sa.String(71), nullable=False),
        sa.Column(
            "reservation_id", sa.String(36), sa.ForeignKey("reservations.id"), nullable=False
        ),
        sa.Column("queue", sa.String(64), nullable=False),
        sa.Column("priority", sa.Integer, nullable=False),
        sa.Column("wanted", sa.Text, nullable=False),
        sa.Column("requested_by", sa.String(255), nullable=False),
        sa.Column("requested_at", INSTANT, nullable=False),
        sa.Column("idempotency_key", sa.String(255)),
        sa.Column("request_digest", sa.String(71)),
        sa.UniqueConstraint("reservation_id", name="runs_reservation_once"),
        sa.UniqueConstraint("requested_by", "idempotency_key", name="runs_idempotent"),
        sa.ForeignKeyConstraint(
            ["certificate_id", "untrusted", "issue"],
            ["certificates.id", "certificates.untrusted", "certificates.issue"],
            name="runs_certificate",
        ),
    )
    op.create_index("runs_by_time", "runs", ["requested_at", "id"])
    append_only.protect("runs", "id")


def _run_events() -> None:
    op.create_table(
        "run_events",
        sa.Column("run_id", sa.String(36), sa.ForeignKey("runs.id"), primary_key=True),
        sa.Column("seq", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("once", sa.String(16)),
        sa.Column("follows", sa.String(16)),
        sa.Column("fence", sa.Integer),
        sa.Column("at", INSTANT, nullable=False),
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
    )
    append_only.protect("run_events", "run_id", "seq")


def _run_leases() -> None:
    op.create_table(
        "run_leases",
        sa.Column("run_id", sa.String(36), sa.ForeignKey("runs.id"), primary_key=True),
        sa.Column("queue", sa.String(64), nullable=False),
        sa.Column("priority", sa.Integer, nullable=False),
        sa.Column("gpu", sa.Boolean, nullable=False),
        sa.Column("memory_mib", sa.Integer, nullable=False),
        sa.Column("requested_at", INSTANT, nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("fence", sa.Integer, nullable=False),
        sa.Column("holder", sa.String(255)),
        sa.Column("worker", sa.String(64)),
        sa.Column("seconds", sa.Integer),
        sa.Column("expires_at", INSTANT),
        sa.Column("steps", sa.Integer, nullable=False),
        sa.Column("cancel", sa.Boolean, nullable=False),
        sa.CheckConstraint(
            "state IN ('queued', 'claimed', 'running', 'ended')", name="run_leases_state"
        ),
        sa.CheckConstraint("fence >= 0", name="run_leases_fence"),
    )
    op.create_index(
        "run_leases_waiting", "run_leases", ["queue", "state", "priority", "requested_at"]
    )
    op.create_index("run_leases_expiring", "run_leases", ["state", "expires_at"])
