"""Reading and writing the ledger's rows in the transaction of a connection.

One transaction at a time works on a ledger. SQLite has one writer: the transaction begins
with ``BEGIN IMMEDIATE``. PostgreSQL: ``hold`` takes an advisory lock of the ledger's name
that ends with the transaction, and under READ COMMITTED every statement after it sees what
the holder before it committed. So the state that is read is the latest one, the decision
is made about it, and the next event follows it: the transactions are serial in the order
in which they held the lock. Were the lock not there, two events would claim one number and
the primary key would let in the first of them alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import Any

from sqlalchemy import Connection, CursorResult, RowMapping, bindparam, func, insert, select, tuple_

from affidavit.accountants.privacy_filter import Cost, Filter
from affidavit.service import database
from affidavit.service.command import CommandContext
from affidavit.service.ledger.ledger_tables import ledger_events, ledgers, reservations
from affidavit.service.ledger.state import Rule, State
from affidavit.service.log.entries import EntryKind, append
from affidavit.service.runs.run_tables import runs


@dataclass(frozen=True, kw_only=True, slots=True)
class Scope:
    """What may be added up: one data set, one privacy unit, one adjacency."""

    dataset: str
    unit: str
    adjacency: str

    def __str__(self) -> str:
        return f"{self.dataset}/{self.unit}/{self.adjacency}"

    def as_dict(self) -> dict[str, str]:
        """The three as JSON data."""
        return {"dataset": self.dataset, "unit": self.unit, "adjacency": self.adjacency}


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptLedger:
    """A ledger's row, with the state after its last event."""

    id: int
    scope: Scope
    filter: Filter
    state: State


@dataclass(frozen=True, kw_only=True, slots=True)
class Reservation:
    """A reservation's row and what happened to it.

    ``state`` is reserved, committed, settled or released. ``cost`` is what it reserved and
    ``charged`` what it counts for now; ``steps_run`` is known once it is settled.
    """

    id: str
    ledger_id: int
    scope: Scope
    certificate_id: str
    issue: int
    untrusted: bool
    plan_digest: str
    name: str | None
    certified_steps: int
    rule: Rule
    cost: Cost
    event: dict[str, Any]
    state: str
    charged: Cost
    steps_run: int | None
    record: str | None
    reserved_by: str
    reserved_at: datetime
    changed_at: datetime


EVENT_OF_STEP = {"reserve": "reserved", "commit": "committed", "settle": "settled"}
STATES = EVENT_OF_STEP | {"release": "released"}
ENTRY_KINDS: dict[str, EntryKind] = {
    "budget": "budget",
    "reserve": "reservation",
    "commit": "commitment",
    "settle": "settlement",
    "release": "release",
}
"""The log's word for each kind of event."""


# Built once, like all that each step of a run asks: putting a statement together takes as long as
# running it.
_LAST = ledger_events.alias()
_LEDGERS = (
    select(ledgers, ledger_events.c.seq, ledger_events.c.state)
    .join(ledger_events, ledger_events.c.ledger_id == ledgers.c.id)
    .where(
        ledger_events.c.seq
        == select(func.max(_LAST.c.seq)).where(_LAST.c.ledger_id == ledgers.c.id).scalar_subquery()
    )
)
"""Ledgers, each with the state after its last event."""

_NAME = (ledgers.c.dataset, ledgers.c.unit, ledgers.c.adjacency)
_LEDGER = _LEDGERS.where(*(column == bindparam(column.name) for column in _NAME))


def hold(connection: Connection, scope: Scope) -> None:
    """Let no other transaction work on this ledger until ours ends."""
    database.hold(connection, f"ledger {scope}")


def find_ledger(connection: Connection, scope: Scope) -> KeptLedger | None:
    """The ledger of ``scope`` as its last event left it."""
    row = connection.execute(_LEDGER, scope.as_dict()).mappings().first()
    return None if row is None else _kept(row)


def all_ledgers(connection: Connection, dataset: str | None = None) -> list[KeptLedger]:
    """The ledgers of ``dataset``, or of all, by name."""
    query = _LEDGERS.order_by(*_NAME)
    if dataset is not None:
        query = query.where(ledgers.c.dataset == dataset)
    return [_kept(row) for row in connection.execute(query).mappings()]


def ledgers_after(connection: Connection, after: Scope | None, limit: int) -> list[KeptLedger]:
    """At most ``limit`` ledgers by name, those beyond ``after``."""
    query = _LEDGERS.order_by(*_NAME).limit(limit)
    if after is not None:
        query = query.where(tuple_(*_NAME) > (after.dataset, after.unit, after.adjacency))
    return [_kept(row) for row in connection.execute(query).mappings()]


def new_ledger(connection: Connection, scope: Scope, filter_: Filter, at: datetime) -> int:
    """Write the row of a ledger that there was none of; returns its id."""
    made = connection.execute(
        insert(ledgers)
        .values(
            **scope.as_dict(),
            filter=json.dumps(filter_.as_document(), sort_keys=True),
            created_at=at,
        )
        .returning(ledgers.c.id)
    )
    return int(made.scalar_one())


_EVENT = insert(ledger_events)


def add_event(
    connection: Connection,
    ledger_id: int,
    scope: Scope,
    kind: str,
    state: State,
    body: Mapping[str, Any],
    call: CommandContext,
    **columns: Any,
) -> None:
    """Write the event that led to ``state``, and its entry in the log."""
    connection.execute(
        _EVENT,
        {
            "ledger_id": ledger_id,
            "seq": state.seq,
            "kind": kind,
            "at": call.at,
            "actor": call.actor,
            "idempotency_key": call.idempotency_key,
            "request_digest": call.request_digest,
            "body": json.dumps(dict(body), sort_keys=True),
            "state": state.written(),
            **columns,
        },
    )
    subject = columns.get("reservation_id") or str(scope)
    entry = entry_body(scope, state.seq, body)
    append(connection, ENTRY_KINDS[kind], subject, entry, actor=call.actor, at=call.at)


def entry_body(scope: Scope, seq: int, body: Mapping[str, Any]) -> dict[str, Any]:
    """What the log says of an event."""
    return {"ledger": scope.as_dict(), "seq": seq, **body}


def repeated(connection: Connection, call: CommandContext) -> RowMapping | None:
    """The event that this actor's idempotency key led to, if there is one."""
    if call.idempotency_key is None:
        return None
    query = select(ledger_events).where(
        ledger_events.c.actor == call.actor,
        ledger_events.c.idempotency_key == call.idempotency_key,
    )
    return connection.execute(query).mappings().first()


_RESERVATIONS = (
    select(
        reservations,
        *_NAME,
        *(ledger_events.c[name] for name in ("kind", "seq", "at", "actor", "steps_run", "body")),
    )
    .join(ledgers, ledgers.c.id == reservations.c.ledger_id)
    .join(ledger_events, ledger_events.c.reservation_id == reservations.c.id)
    .order_by(ledger_events.c.seq)
)
"""Reservations, each as often as something happened to it."""

_WANTED = reservations.c.id == bindparam("wanted")
_RESERVATION = _RESERVATIONS.where(_WANTED)
_SCOPE = select(*_NAME).join(reservations, reservations.c.ledger_id == ledgers.c.id).where(_WANTED)


def scope_of(connection: Connection, reservation_id: str) -> Scope | None:
    """The ledger that a reservation stands in."""
    row = connection.execute(_SCOPE, {"wanted": reservation_id}).mappings().first()
    return None if row is None else Scope(**row)


def find_reservation(connection: Connection, reservation_id: str) -> Reservation | None:
    """The reservation of that id as it stands now."""
    found = _read(connection.execute(_RESERVATION, {"wanted": reservation_id}))
    return found[0] if found else None


def run_of(connection: Connection, reservation_id: str) -> str | None:
    """The id of the run that a reservation is of, if it is of one."""
    query = select(runs.c.id).where(runs.c.reservation_id == reservation_id)
    found: str | None = connection.execute(query).scalar()
    return found


def reservations_of(connection: Connection, ledger_id: int) -> list[Reservation]:
    """All reservations of a ledger, latest first."""
    return _read(connection.execute(_RESERVATIONS.where(reservations.c.ledger_id == ledger_id)))


def reservations_before(
    connection: Connection, ledger_id: int, before: int | None, limit: int
) -> list[tuple[int, Reservation]]:
    """At most ``limit`` reservations made before event number ``before``, latest first.

    Each with the number of the event that made it.
    """
    events = ledger_events.c
    query = select(events.seq, events.reservation_id).where(
        events.ledger_id == ledger_id, events.kind == "reserve"
    )
    if before is not None:
        query = query.where(events.seq < before)
    made = connection.execute(query.order_by(events.seq.desc()).limit(limit)).all()
    theirs = reservations.c.id.in_([row.reservation_id for row in made])
    known = {item.id: item for item in _read(connection.execute(_RESERVATIONS.where(theirs)))}
    return [(row.seq, known[row.reservation_id]) for row in made]


def states_of(connection: Connection, ledger_id: int, limit: int) -> list[tuple[datetime, State]]:
    """The states after the last ``limit`` events of a ledger, oldest first."""
    events = ledger_events.c
    query = select(events.seq, events.at, events.state).where(events.ledger_id == ledger_id)
    rows = connection.execute(query.order_by(events.seq.desc()).limit(limit)).all()
    return [(row.at, State.read(row.seq, row.state)) for row in reversed(rows)]


def _read(found: CursorResult[Any]) -> list[Reservation]:
    """From rows of ``_RESERVATIONS``; the one made last comes first."""
    events: dict[str, list[RowMapping]] = {}
    for row in found.mappings():
        events.setdefault(row["id"], []).append(row)
    return [_reservation(rows) for rows in reversed(list(events.values()))]


def _reservation(rows: list[RowMapping]) -> Reservation:
    """From the joined rows of one reservation, in the order in which they happened."""
    first, last = rows[0], rows[-1]
    body = json.loads(last["body"])
    cost = Cost.read(json.loads(first["cost"]))
    charged = cost
    if last["kind"] == "settle":
        charged = Cost.read(body["cost"])
    elif last["kind"] == "release":
        charged = Cost.nothing(len(cost.renyi))
    plain = (
        *("id", "ledger_id", "certificate_id", "issue", "untrusted", "plan_digest", "name"),
        *("certified_steps", "rule"),
    )
    return Reservation(
        **{name: first[name] for name in plain},
        scope=Scope(**{name: first[name] for name in ("dataset", "unit", "adjacency")}),
        cost=cost,
        event=json.loads(first["event"]),
        state=STATES[last["kind"]],
        charged=charged,
        steps_run=last["steps_run"],
        record=body.get("record") if last["kind"] == "settle" else None,
        reserved_by=first["actor"],
        reserved_at=first["at"],
        changed_at=last["at"],
    )


def _kept(row: RowMapping) -> KeptLedger:
    """From a row of ``_LEDGERS``."""
    return KeptLedger(
        id=row["id"],
        scope=Scope(dataset=row["dataset"], unit=row["unit"], adjacency=row["adjacency"]),
        filter=_filter(row["filter"]),
        state=State.read(row["seq"], row["state"]),
    )


@lru_cache(maxsize=256)
def _filter(text: str) -> Filter:
    return Filter.read(json.loads(text))
