"""Budgets and the reservations, commitments and settlements against them."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from affidavit.migrations import append_only

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

INSTANT = sa.DateTime(timezone=True)
SEQUENCE = sa.BigInteger().with_variant(sa.Integer(), "sqlite")

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


def upgrade() -> None:
    """Make the three tables and forbid changing them."""
    _ledgers()
    _reservations()
    _ledger_events()


def downgrade() -> None:
    """Drop the three tables, with everything in them."""
    for table in ("ledger_events", "reservations", "ledgers"):
        op.drop_table(table)


def _ledgers() -> None:
    op.create_table(
        "ledgers",
        sa.Column("id", SEQUENCE, primary_key=True),
        sa.Column("dataset", sa.String(64), nullable=False),
        sa.Column("unit", sa.String(16), nullable=False),
        sa.Column("adjacency", sa.String(32), nullable=False),
        sa.Column("filter", sa.Text, nullable=False),
        sa.Column("created_at", INSTANT, nullable=False),
        sa.UniqueConstraint("dataset", "unit", "adjacency", name="ledgers_one_each"),
        sa.CheckConstraint("id > 0", name="ledgers_id_positive"),
    )
    append_only.protect("ledgers", "dataset", "unit", "adjacency")


def _reservations() -> None:
    op.create_table(
        "reservations",
        sa.Column("id", sa.String(36), primary_key=True),
        sa.Column("ledger_id", SEQUENCE, sa.ForeignKey("ledgers.id"), nullable=False),
        sa.Column("certificate_id", sa.String(71), nullable=False),
        sa.Column("issue", sa.Integer, nullable=False),
        sa.Column("untrusted", sa.Boolean, nullable=False),
        sa.Column("plan_digest", sa.String(71), nullable=False),
        sa.Column("name", sa.String(64)),
        sa.Column("certified_steps", sa.Integer, nullable=False),
        sa.Column("rule", sa.String(16), nullable=False),
        sa.Column("cost", sa.Text, nullable=False),
        sa.Column("event", sa.Text, nullable=False),
        sa.UniqueConstraint("id", "ledger_id", "certified_steps", name="reservations_steps"),
        sa.CheckConstraint("rule IN ('filter', 'alone')", name="reservations_rule"),
        sa.CheckConstraint("certified_steps > 0", name="reservations_steps_positive"),
    )
    append_only.protect("reservations", "id")


def _ledger_events() -> None:
    op.create_table(
        "ledger_events",
        sa.Column("ledger_id", SEQUENCE, sa.ForeignKey("ledgers.id"), primary_key=True),
        sa.Column("seq", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("at", INSTANT, nullable=False),
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
    append_only.protect("ledger_events", "ledger_id", "seq")
