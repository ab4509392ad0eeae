"""Runs that one worker goes on with after another, and the records that workers send."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

from affidavit.migrations import append_only

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None

INSTANT = sa.DateTime(timezone=True)
EVERY_STEP = 2**31 - 1

WAS_AN_EVENT = (
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
RESUMED = " OR (kind = 'resumed' AND once IS NULL AND follows = 'running' AND fence IS NOT NULL)"
SETTLED = " OR (kind = 'settled'"
IS_AN_EVENT = WAS_AN_EVENT.replace(SETTLED, RESUMED + SETTLED)


def upgrade() -> None:
    """Let a run be resumed; a run that is running now is not handed over."""
    _events(IS_AN_EVENT)
    for column in (
        sa.Column("granted", sa.Integer, nullable=False, server_default="0"),
        sa.Column("head", sa.String(71)),
        sa.Column("place", sa.String(64)),
        sa.Column("previous", sa.Integer),
        sa.Column("ready_at", INSTANT),
        sa.Column("elsewhere_at", INSTANT),
    ):
        op.add_column("run_leases", column)
    op.execute(f"UPDATE run_leases SET granted = {EVERY_STEP} WHERE state = 'running'")
    op.create_table(
        "run_records",
        sa.Column("run_id", sa.String(36), sa.ForeignKey("runs.id"), primary_key=True),
        sa.Column("fence", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("part", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("content", sa.LargeBinary, nullable=False),
        sa.Column("length", sa.Integer, nullable=False),
        sa.CheckConstraint("fence > 0 AND part > 0", name="run_records_counted"),
    )
    append_only.protect("run_records", "run_id", "fence", "part")


def downgrade() -> None:
    """Drop the records; fails where a run was resumed."""
    op.drop_table("run_records")
    for name in ("elsewhere_at", "ready_at", "previous", "place", "head", "granted"):
        op.drop_column("run_leases", name)
    _events(WAS_AN_EVENT)


def _events(is_an_event: str) -> None:
    """Have ``run_events`` hold rows that pass ``is_an_event``."""
    if op.get_bind().dialect.name != "sqlite":
        op.drop_constraint("run_events_kind", "run_events")
        op.create_check_constraint("run_events_kind", "run_events", is_an_event)
        return
    # SQLite changes no constraint: the table is made anew, and its triggers with it. The new one
    # refers to itself from the start, so that nothing refers to the one that is dropped.
    new = "run_events_new"
    op.create_table(new, *_columns(), *_constraints(new, is_an_event))
    op.execute(f"INSERT INTO {new} SELECT * FROM run_events ORDER BY run_id, seq")
    op.drop_table("run_events")
    op.rename_table(new, "run_events")
    append_only.protect("run_events", "run_id", "seq")


def _columns() -> list[sa.Column[Any]]:
    return [
        sa.Column("run_id", sa.String(36), sa.ForeignKey("runs.id"), primary_key=True),
        sa.Column("seq", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("once", sa.String(16)),
        sa.Column("follows", sa.String(16)),
        sa.Column("fence", sa.Integer),
        sa.Column("at", INSTANT, nullable=False),
        sa.Column("actor", sa.String(255), nullable=False),
        sa.Column("body", sa.Text, nullable=False),
    ]


def _constraints(table: str, is_an_event: str) -> list[sa.Constraint]:
    return [
        sa.UniqueConstraint("run_id", "once", name="run_events_once"),
        sa.UniqueConstraint("run_id", "kind", "fence", name="run_events_fenced"),
        sa.ForeignKeyConstraint(
            ["run_id", "follows"], [f"{table}.run_id", f"{table}.once"], name="run_events_follows"
        ),
        sa.CheckConstraint("seq > 0", name="run_events_seq_positive"),
        sa.CheckConstraint("fence IS NULL OR fence > 0", name="run_events_fence_positive"),
        sa.CheckConstraint(is_an_event, name="run_events_kind"),
    ]
