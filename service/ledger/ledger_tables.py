"""The ledger's tables: budgets, reservations and events, as rows that are added only.

``ledgers``
    One row per data set, privacy unit and adjacency: what may be added up. Orders, weights and
    the Gaussian's share of its filter stand here and never change while the ledger lives.
``reservations``
    What was reserved: the certificate, its steps, its cost at the filter's orders (decimals
    rounded up) and the events it stands for.
``ledger_events``
    What happened to a ledger, numbered from 1 without a gap: a budget was set; a run was
    reserved, committed, settled or released. Each row carries the state after it, so that
    the next one needs to read one row, and a replay can tell whether any was wrong.
``dataset_grants``
    What a team may do with a data set of another: reserve from it, read its ledger, or nothing.
    The last row of a data set and a team counts.

What no row can say, whoever writes it:

* two events of one number (primary key), which is also what ends a race that a lock failed to;
* a reservation reserved, committed, settled or released twice (``step`` is 1 for reserve, 2 for
  commit **or** release, 3 for settle, and unique in a reservation);
* a settlement without a commitment, a commitment or release without a reservation (``follows``
  refers to the event before);
* a settlement of more steps than were certified (``certified_steps`` refers to the reservation).

That the sum stays within the budget is no constraint that a database knows; ``replay`` finds
a row that passed it by.
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
    String,
    Table,
    Text,
    UniqueConstraint,
)

from affidavit.service.tables import Sequence, UtcDateTime, metadata

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

ledgers = Table(
    "ledgers",
    metadata,
    Column("id", Sequence, primary_key=True),
    Column("dataset", String(64), nullable=False),
    Column("unit", String(16), nullable=False),
    Column("adjacency", String(32), nullable=False),
    Column("filter", Text, nullable=False),
    Column("created_at", UtcDateTime, nullable=False),
    Column("team", String(64), nullable=False, server_default="default"),
    UniqueConstraint("dataset", "unit", "adjacency", name="ledgers_one_each"),
    CheckConstraint("id > 0", name="ledgers_id_positive"),
)

reservations = Table(
    "reservations",
    metadata,
    Column("id", String(36), primary_key=True),
    Column("ledger_id", Sequence, ForeignKey("ledgers.id"), nullable=False),
    Column("certificate_id", String(71), nullable=False),
    Column("issue", Integer, nullable=False),
    Column("untrusted", Boolean, nullable=False),
    Column("plan_digest", String(71), nullable=False),
    Column("name", String(64)),
    Column("certified_steps", Integer, nullable=False),
    Column("rule", String(16), nullable=False),
    Column("cost", Text, nullable=False),
    Column("event", Text, nullable=False),
    Column("team", String(64), nullable=False, server_default="default"),
    UniqueConstraint("id", "ledger_id", "certified_steps", name="reservations_steps"),
    CheckConstraint("rule IN ('filter', 'alone')", name="reservations_rule"),
    CheckConstraint("certified_steps > 0", name="reservations_steps_positive"),
)

ledger_events = Table(
    "ledger_events",
    metadata,
    Column("ledger_id", Sequence, ForeignKey("ledgers.id"), primary_key=True),
    Column("seq", Integer, primary_key=True, autoincrement=False),
    Column("kind", String(16), nullable=False),
    Column("at", UtcDateTime, nullable=False),
    Column("actor", String(255), nullable=False),
    Column("reservation_id", String(36)),
    Column("certified_steps", Integer),
    Column("step", Integer),
    Column("follows", String(16)),
    Column("steps_run", Integer),
    Column("idempotency_key", String(255)),
    Column("request_digest", String(71)),
    Column("body", Text, nullable=False),
    Column("state", Text, nullable=False),
    UniqueConstraint("reservation_id", "step", name="ledger_events_once"),
    UniqueConstraint("reservation_id", "kind", name="ledger_events_kind_once"),
    UniqueConstraint("actor", "idempotency_key", name="ledger_events_idempotent"),
    ForeignKeyConstraint(
        ["reservation_id", "ledger_id", "certified_steps"],
        ["reservations.id", "reservations.ledger_id", "reservations.certified_steps"],
        name="ledger_events_reservation",
    ),
    ForeignKeyConstraint(
        ["reservation_id", "follows"],
        ["ledger_events.reservation_id", "ledger_events.kind"],
        name="ledger_events_follows",
    ),
    CheckConstraint("seq > 0", name="ledger_events_seq_positive"),
    CheckConstraint(IS_AN_EVENT, name="ledger_events_kind"),
    CheckConstraint(IS_WITHIN_CERTIFICATE, name="ledger_events_steps"),
)

dataset_grants = Table(
    "dataset_grants",
    metadata,
    Column("id", Sequence, primary_key=True),
    Column("dataset", String(64), nullable=False),
    Column("team", String(64), nullable=False),
    Column("may", String(16), nullable=False),
    Column("reason", Text, nullable=False),
    Column("granted_by", String(255), nullable=False),
    Column("at", UtcDateTime, nullable=False),
    CheckConstraint("id > 0", name="dataset_grants_id_positive"),
    CheckConstraint("may IN ('reserve', 'read', 'nothing')", name="dataset_grants_may"),
    Index("dataset_grants_by_dataset", "dataset", "team", "id"),
)
