"""The runs' tables: what was asked for and what happened, added only; and who holds a run now.

``runs``
    One row per run, with everything that was asked for. A reservation is for one run.
``run_events``
    What happened to a run, numbered from 1. The state of a run is what its events say.
``run_leases``
    Who holds a run, until when, under which fencing token and secret (its digest), and how many
    steps those who held it may have charged (``granted``). ``previous`` is the token under which
    the run was last begun, ``job`` counts the jobs that it was handed to an engine in, and
    ``search`` is the secret opening of a search, whose digest its event ``running`` has.
    The only rows that change; all that matters about them afterwards stands in an event too.
``run_records``
    The record that a worker sent of a run, part by part (zlib; ``length`` is in bytes before).

What no row can say, whoever writes it: a run that is queued, begun or ended twice (``once``
is unique in a run); a run that began without having been queued, or was settled without having
begun (``follows`` refers to the event before); two claims under one fencing token.
"""

from __future__ import annotations

from sqlalchemy import (
    Boolean,
    CheckConstraint,
    Column,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    Integer,
    LargeBinary,
    String,
    Table,
    Text,
    UniqueConstraint,
)

from affidavit.service.tables import UtcDateTime, metadata

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

runs = Table(
    "runs",
    metadata,
    Column("id", String(36), primary_key=True),
    Column("certificate_id", String(71), nullable=False),
    Column("issue", Integer, nullable=False),
    Column("untrusted", Boolean, nullable=False),
    Column("plan_digest", String(71), nullable=False),
    Column("reservation_id", String(36), ForeignKey("reservations.id"), nullable=False),
    Column("queue", String(64), nullable=False),
    Column("request", Text, nullable=False),
    Column("requested_by", String(255), nullable=False),
    Column("requested_at", UtcDateTime, nullable=False),
    Column("idempotency_key", String(255)),
    Column("request_digest", String(71)),
    Column("team", String(64), nullable=False, server_default="default"),
    UniqueConstraint("reservation_id", name="runs_reservation_once"),
    UniqueConstraint("requested_by", "idempotency_key", name="runs_idempotent"),
    ForeignKeyConstraint(
        ["certificate_id", "untrusted", "issue"],
        ["certificates.id", "certificates.untrusted", "certificates.issue"],
        name="runs_certificate",
    ),
    Index("runs_by_time", "requested_at", "id"),
    Index("runs_by_team", "team", "requested_at", "id"),
    Index("runs_by_certificate", "certificate_id", "requested_at"),
    Index("runs_by_queue", "queue", "requested_at"),
)

run_events = Table(
    "run_events",
    metadata,
    Column("run_id", String(36), ForeignKey("runs.id"), primary_key=True),
    Column("seq", Integer, primary_key=True, autoincrement=False),
    Column("kind", String(16), nullable=False),
    Column("once", String(16)),
    Column("follows", String(16)),
    Column("fence", Integer),
    Column("at", UtcDateTime, nullable=False),
    Column("actor", String(255), nullable=False),
    Column("body", Text, nullable=False),
    UniqueConstraint("run_id", "once", name="run_events_once"),
    UniqueConstraint("run_id", "kind", "fence", name="run_events_fenced"),
    ForeignKeyConstraint(
        ["run_id", "follows"],
        ["run_events.run_id", "run_events.once"],
        name="run_events_follows",
    ),
    CheckConstraint("seq > 0", name="run_events_seq_positive"),
    CheckConstraint("fence IS NULL OR fence > 0", name="run_events_fence_positive"),
    CheckConstraint(IS_AN_EVENT, name="run_events_kind"),
    Index("run_events_by_kind", "kind", "at"),
)

run_leases = Table(
    "run_leases",
    metadata,
    Column("run_id", String(36), ForeignKey("runs.id"), primary_key=True),
    Column("queue", String(64), nullable=False),
    Column("requested_at", UtcDateTime, nullable=False),
    Column("state", String(16), nullable=False),
    Column("fence", Integer, nullable=False),
    Column("secret", String(71)),
    Column("job", Integer, nullable=False, server_default="1"),
    Column("holder", String(255)),
    Column("worker", String(64)),
    Column("seconds", Integer),
    Column("expires_at", UtcDateTime),
    Column("steps", Integer, nullable=False),
    Column("cancel", Boolean, nullable=False),
    Column("granted", Integer, nullable=False, server_default="0"),
    Column("head", String(71)),
    Column("previous", Integer),
    Column("search", Text),
    CheckConstraint("state IN ('queued', 'claimed', 'running', 'ended')", name="run_leases_state"),
    CheckConstraint("fence >= 0", name="run_leases_fence"),
    Index("run_leases_expiring", "state", "expires_at"),
    Index("run_leases_next", "queue", "state", "requested_at", "run_id"),
)

run_records = Table(
    "run_records",
    metadata,
    Column("run_id", String(36), ForeignKey("runs.id"), primary_key=True),
    Column("fence", Integer, primary_key=True, autoincrement=False),
    Column("part", Integer, primary_key=True, autoincrement=False),
    Column("content", LargeBinary, nullable=False),
    Column("length", Integer, nullable=False),
    CheckConstraint("fence > 0 AND part > 0", name="run_records_counted"),
)
