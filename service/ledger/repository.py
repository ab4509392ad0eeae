"""The ledger's rows, read and written in the transaction of a connection.

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
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache, partial
from typing import Any

from sqlalchemy import (
    Connection,
    CursorResult,
    Row,
    RowMapping,
    bindparam,
    func,
    insert,
    select,
    tuple_,
)

from affidavit.accountants.privacy_filter import Cost, Filter
from affidavit.certificate.log import LogEntry
from affidavit.service import database
from affidavit.service.identity.actor import CommandContext
from affidavit.service.ledger.integrity import event_entry, require_unaltered, state_digest
from affidavit.service.ledger.models import GrantRequest
from affidavit.service.ledger.state import (
    LedgerScope,
    LedgerState,
    StoredLedger,
    StoredReservation,
    dataset_grants,
    ledger_events,
    ledgers,
    reservations,
)
from affidavit.service.log.entries import insert_logged, logged
from affidavit.service.runs.repository import runs

STATES = {
    "reserve": "reserved",
    "commit": "committed",
    "settle": "settled",
    "release": "released",
}
"""The state of a reservation after each kind of event."""


# Built once: composing a statement takes as long as running it.
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


def hold(connection: Connection, scope: LedgerScope) -> None:
    """Let no other transaction work on this ledger until ours ends."""
    database.hold(connection, f"ledger {scope}")


def find_ledger(connection: Connection, scope: LedgerScope) -> StoredLedger | None:
    """The ledger of ``scope`` as its last event left it."""
    row = connection.execute(_LEDGER, scope.as_dict()).first()
    return None if row is None else _ledger_of(row)


def find_ledgers(
    connection: Connection, scopes: Sequence[LedgerScope]
) -> list[StoredLedger | None]:
    """The ledger of each of ``scopes``, read once where several are the same."""
    stored = {scope: find_ledger(connection, scope) for scope in set(scopes)}
    return [stored[scope] for scope in scopes]


def all_ledgers(connection: Connection, dataset: str | None = None) -> list[StoredLedger]:
    """The ledgers of ``dataset``, or of all, by name."""
    query = _LEDGERS.order_by(*_NAME)
    if dataset is not None:
        query = query.where(ledgers.c.dataset == dataset)
    return [_ledger_of(row) for row in connection.execute(query)]


def ledgers_after(
    connection: Connection, after: LedgerScope | None, limit: int
) -> list[StoredLedger]:
    """At most ``limit`` ledgers by name, those beyond ``after``."""
    query = _LEDGERS.order_by(*_NAME).limit(limit)
    if after is not None:
        query = query.where(tuple_(*_NAME) > (after.dataset, after.unit, after.adjacency))
    return [_ledger_of(row) for row in connection.execute(query)]


def add_ledger(
    connection: Connection, scope: LedgerScope, team: str, filter_: Filter, at: datetime
) -> int:
    """Insert a ledger of ``team``; returns its id."""
    created = connection.execute(
        insert(ledgers)
        .values(
            **scope.as_dict(),
            team=team,
            filter=json.dumps(filter_.as_document(), sort_keys=True),
            created_at=at,
        )
        .returning(ledgers.c.id)
    )
    return int(created.scalar_one())


def add_grant(
    connection: Connection, dataset: str, request: GrantRequest, call: CommandContext
) -> None:
    """Write what a team may do with ``dataset`` from now on, and its entry in the log."""
    database.hold(connection, f"grants {dataset}")  # they are logged in the order of their rows
    row = {"dataset": dataset, **dict(request), "granted_by": call.actor, "at": call.at}
    insert_logged(connection, dataset_grants, row, grant_entry)


def grant_entry(row: Any) -> LogEntry:
    """The entry of a grant's row."""
    body = {"dataset": row.dataset, "team": row.team, "may": row.may, "reason": row.reason}
    return LogEntry(kind="grant", subject=row.dataset, actor=row.granted_by, at=row.at, body=body)


def grants_of(connection: Connection, dataset: str) -> list[RowMapping]:
    """What each team may do with ``dataset`` now, by team; those that may do nothing too."""
    newest = (
        select(func.max(dataset_grants.c.id))
        .where(dataset_grants.c.dataset == dataset)
        .group_by(dataset_grants.c.team)
    )
    query = select(dataset_grants).where(dataset_grants.c.id.in_(newest))
    return list(connection.execute(query.order_by(dataset_grants.c.team)).mappings())


def may_reserve(connection: Connection, ledger: StoredLedger, team: str) -> bool:
    """Whether ``team`` may reserve from a ledger: its own, or by the newest grant, if logged."""
    if ledger.team == team:
        return True
    dataset = ledger.scope.dataset
    query = (
        select(dataset_grants)
        .where(dataset_grants.c.dataset == dataset, dataset_grants.c.team == team)
        .order_by(dataset_grants.c.id.desc())
    )
    grant = connection.execute(query.limit(1)).first()
    if grant is None or grant.may != "reserve":
        return False
    return grant_entry(grant).content.decode() in logged(connection, dataset)


def add_event(
    connection: Connection,
    ledger_id: int,
    scope: LedgerScope,
    kind: str,
    state: LedgerState,
    body: Mapping[str, Any],
    call: CommandContext,
    **columns: Any,
) -> None:
    """Write the event that led to ``state``, and its entry in the log.

    Raises ``LedgerAltered`` where the event before it is not the one in the log.
    """
    if state.seq > 1:
        require_unaltered(connection, ledger_id, scope, state.seq - 1)
    body = {**body, "state_digest": state_digest(state.written())}
    row = {
        "ledger_id": ledger_id,
        "seq": state.seq,
        "kind": kind,
        "at": call.at,
        "actor": call.actor,
        "idempotency_key": call.idempotency_key,
        "request_digest": call.request_digest,
        "body": json.dumps(body, sort_keys=True),
        "state": state.written(),
        **columns,
    }
    insert_logged(connection, ledger_events, row, partial(event_entry, scope))


def repeated(connection: Connection, call: CommandContext) -> Row[Any] | None:
    """The event of an earlier request with this key; raises ``IdempotencyKeyReused``."""
    if call.idempotency_key is None:
        return None
    query = select(ledger_events).where(
        ledger_events.c.actor == call.actor,
        ledger_events.c.idempotency_key == call.idempotency_key,
    )
    event = connection.execute(query).first()
    if event is not None:
        call.require_same(event.request_digest)
    return event


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

_BY_ID = reservations.c.id == bindparam("reservation")
_RESERVATION = _RESERVATIONS.where(_BY_ID)
_SCOPE = select(*_NAME).join(reservations, reservations.c.ledger_id == ledgers.c.id).where(_BY_ID)


def scope_of(connection: Connection, reservation_id: str) -> LedgerScope | None:
    """The ledger that a reservation stands in."""
    row = connection.execute(_SCOPE, {"reservation": reservation_id}).first()
    return None if row is None else LedgerScope.of(row)


def find_reservation(connection: Connection, reservation_id: str) -> StoredReservation | None:
    """The reservation of that id as it stands now."""
    result = connection.execute(_RESERVATION, {"reservation": reservation_id})
    return next(iter(_reservations_of(result)), None)


def reservations_of(connection: Connection, ledger_id: int) -> list[StoredReservation]:
    """All reservations of a ledger, latest first."""
    return _reservations_of(
        connection.execute(_RESERVATIONS.where(reservations.c.ledger_id == ledger_id))
    )


def reservations_before(
    connection: Connection, ledger_id: int, before: int | None, limit: int
) -> list[tuple[int, StoredReservation]]:
    """At most ``limit`` reservations made before event number ``before``, latest first.

    Each with the number of the event that made it.
    """
    events = ledger_events.c
    query = select(events.seq, events.reservation_id).where(
        events.ledger_id == ledger_id, events.kind == "reserve"
    )
    if before is not None:
        query = query.where(events.seq < before)
    rows = connection.execute(query.order_by(events.seq.desc()).limit(limit)).all()
    theirs = reservations.c.id.in_([row.reservation_id for row in rows])
    stored = _reservations_of(connection.execute(_RESERVATIONS.where(theirs)))
    by_id = {reservation.id: reservation for reservation in stored}
    return [(row.seq, by_id[row.reservation_id]) for row in rows]


def open_costs(connection: Connection, ledger_id: int, orders: int) -> dict[str, Cost]:
    """The sums of what reservations that have not ended reserved, by their state."""
    events = ledger_events.c
    latest = (
        select(events.reservation_id, func.max(events.step).label("step"))
        .where(events.ledger_id == ledger_id)
        .group_by(events.reservation_id)
        .subquery()
    )
    query = (
        select(reservations.c.cost, events.kind)
        .join(latest, latest.c.reservation_id == reservations.c.id)
        .join(
            ledger_events,
            (events.reservation_id == reservations.c.id) & (events.step == latest.c.step),
        )
        .where(events.kind.in_(("reserve", "commit")))
    )
    result = {name: Cost.nothing(orders) for name in ("reserved", "committed")}
    for row in connection.execute(query):
        result[STATES[row.kind]] += Cost.read(json.loads(row.cost))
    return result


def runs_of(connection: Connection, reservation_ids: Sequence[str]) -> dict[str, str]:
    """The runs that reservations are of, by the reservations' ids."""
    query = select(runs.c.reservation_id, runs.c.id).where(
        runs.c.reservation_id.in_(reservation_ids)
    )
    return {row.reservation_id: row.id for row in connection.execute(query)}


def states_of(
    connection: Connection, ledger_id: int, limit: int
) -> list[tuple[datetime, LedgerState]]:
    """The states after the last ``limit`` events of a ledger, oldest first."""
    events = ledger_events.c
    query = select(events.seq, events.at, events.state).where(events.ledger_id == ledger_id)
    rows = connection.execute(query.order_by(events.seq.desc()).limit(limit)).all()
    return [(row.at, LedgerState.read(row.seq, row.state)) for row in reversed(rows)]


def _reservations_of(result: CursorResult[Any]) -> list[StoredReservation]:
    """From rows of ``_RESERVATIONS``; the one made last comes first."""
    events: dict[str, list[Row[Any]]] = {}
    for row in result:
        events.setdefault(row.id, []).append(row)
    return [_reservation(rows[0], rows[-1]) for rows in reversed(list(events.values()))]


def _reservation(first: Row[Any], last: Row[Any]) -> StoredReservation:
    """From the joined rows of one reservation, those of its first and its last event."""
    body = json.loads(last.body)
    cost = Cost.read(json.loads(first.cost))
    charged = cost
    if last.kind == "settle":
        charged = Cost.read(body["cost"])
    elif last.kind == "release":
        charged = Cost.nothing(len(cost.renyi))
    plain = (
        *("id", "ledger_id", "certificate_id", "issue", "untrusted", "plan_digest", "name"),
        *("certified_steps", "rule", "team"),
    )
    return StoredReservation(
        **{name: getattr(first, name) for name in plain},
        scope=LedgerScope.of(first),
        cost=cost,
        event=json.loads(first.event),
        state=STATES[last.kind],
        charged=charged,
        steps_run=last.steps_run,
        record=body.get("record") if last.kind == "settle" else None,
        reserved_by=first.actor,
        reserved_at=first.at,
        changed_at=last.at,
    )


def _ledger_of(row: Row[Any]) -> StoredLedger:
    """From a row of ``_LEDGERS``."""
    return StoredLedger(
        id=row.id,
        scope=LedgerScope.of(row),
        filter=_filter(row.filter),
        state=LedgerState.read(row.seq, row.state),
        team=row.team,
    )


@lru_cache(maxsize=256)
def _filter(text: str) -> Filter:
    return Filter.read(json.loads(text))
