"""Read and write the ledger's rows in the transaction of a connection.

One transaction at a time changes a ledger. SQLite has one writer, which begins with
``BEGIN IMMEDIATE``. On PostgreSQL ``lock_ledger`` takes an advisory lock on the ledger's name until
the transaction ends, and under READ COMMITTED every later statement sees the commits of the
previous holder. So each transaction decides on the latest state. Without the lock, two events
would have one number, and the primary key would refuse the second.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta
from functools import lru_cache, partial
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    CursorResult,
    Row,
    RowMapping,
    Select,
    and_,
    exists,
    func,
    insert,
    select,
    tuple_,
)

from affidavit.accountants.privacy_filter import Cost, Filter
from affidavit.service.core import database
from affidavit.service.identity.actor import CommandContext
from affidavit.service.ledger.integrity import event_entry, require_unaltered, state_digest
from affidavit.service.ledger.state import (
    LedgerScope,
    LedgerState,
    StoredLedger,
    StoredReservation,
    charge_of,
)
from affidavit.service.ledger.wire_models import GrantRequest
from affidavit.service.log.entries import PENDING_LEAF, insert_logged, logged
from affidavit.service.tables.ledger import (
    dataset_grants,
    ledger_events,
    ledgers,
    reservations,
)
from affidavit.service.tables.runs import run_leases, runs
from affidavit.trust.log import LogEntry

STATES = {
    "reserve": "reserved",
    "commit": "committed",
    "settle": "settled",
    "release": "released",
}
"""The state of a reservation after each kind of event."""
STEPS: Mapping[str, tuple[int, str | None]] = {
    "reserve": (1, None),
    "commit": (2, "reserve"),
    "release": (2, "reserve"),
    "settle": (3, "commit"),
}
"""The number of each kind of event of a reservation, and the kind that precedes it."""
UNUSED_LIFETIME = timedelta(days=7)
"""Age at which an unused reservation without a run expires."""


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


def lock_ledger(connection: Connection, scope: LedgerScope) -> None:
    """Lock the ledger until the transaction ends."""
    database.hold(connection, f"ledger {scope}")


def find_ledger(connection: Connection, scope: LedgerScope) -> StoredLedger | None:
    """Return the ledger of ``scope`` after its last event."""
    query = _LEDGERS.where(*(column == scope.as_dict()[column.name] for column in _NAME))
    row = connection.execute(query).first()
    return None if row is None else _ledger_of(row)


def all_ledgers(connection: Connection, dataset: str | None = None) -> list[StoredLedger]:
    """Return the ledgers of ``dataset``, or of all data sets, by name."""
    query = _LEDGERS.order_by(*_NAME)
    if dataset is not None:
        query = query.where(ledgers.c.dataset == dataset)
    return [_ledger_of(row) for row in connection.execute(query)]


def dataset_names(connection: Connection) -> list[str]:
    """Return the names of the data sets that have a budget."""
    query = select(ledgers.c.dataset).distinct().order_by(ledgers.c.dataset)
    return list(connection.execute(query).scalars())


def ledgers_after(
    connection: Connection, after: LedgerScope | None, limit: int
) -> list[StoredLedger]:
    """Return at most ``limit`` ledgers by name, after the ledger ``after``."""
    query = _LEDGERS.order_by(*_NAME).limit(limit)
    if after is not None:
        query = query.where(tuple_(*_NAME) > (after.dataset, after.unit, after.adjacency))
    return [_ledger_of(row) for row in connection.execute(query)]


def add_ledger(
    connection: Connection, scope: LedgerScope, team: str, filter_: Filter, at: datetime
) -> int:
    """Insert a ledger of ``team`` and return its id."""
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
    connection: Connection, dataset: str, request: GrantRequest, context: CommandContext
) -> None:
    """Insert a team's access to ``dataset``, with its log entry."""
    database.hold(connection, f"grants {dataset}")  # rows and log entries have one order
    row = {"dataset": dataset, **dict(request), "granted_by": context.actor, "at": context.at}
    insert_logged(connection, dataset_grants, row, grant_entry)


def grant_entry(row: Any) -> LogEntry:
    """Build the log entry of a row of ``dataset_grants``."""
    body = {"dataset": row.dataset, "team": row.team, "may": row.may, "reason": row.reason}
    return LogEntry(kind="grant", subject=row.dataset, actor=row.granted_by, at=row.at, body=body)


def grants_of(connection: Connection, dataset: str) -> list[RowMapping]:
    """Return the newest grant of each team for ``dataset``, by team."""
    newest = (
        select(func.max(dataset_grants.c.id))
        .where(dataset_grants.c.dataset == dataset)
        .group_by(dataset_grants.c.team)
    )
    query = select(dataset_grants).where(dataset_grants.c.id.in_(newest))
    return list(connection.execute(query.order_by(dataset_grants.c.team)).mappings())


def may_reserve(connection: Connection, ledger: StoredLedger, team: str) -> bool:
    """Return whether ``team`` owns the ledger, or its newest grant, also in the log, allows it."""
    if ledger.team == team:
        return True
    dataset = ledger.scope.dataset
    database.hold(connection, f"grants {dataset}", shared=True)  # none is added meanwhile
    query = (
        select(dataset_grants)
        .where(dataset_grants.c.dataset == dataset, dataset_grants.c.team == team)
        .order_by(dataset_grants.c.id.desc())
    )
    grant = connection.execute(query.limit(1)).first()
    if grant is None or grant.may != "reserve":
        return False
    places = {
        content: PENDING_LEAF if leaf is None else leaf
        for content, leaf in logged(connection, dataset).items()
        if _is_grant(json.loads(content), team)
    }
    # A later grant in the log was removed from the table; of pending ones the order is unknown.
    newest = max(places.values(), default=None)
    return newest is not None and places.get(grant_entry(grant).content.decode()) == newest


def _is_grant(entry: Mapping[str, Any], team: str) -> bool:
    return bool(entry["kind"] == "grant" and entry["body"].get("team") == team)


def add_event(
    connection: Connection,
    ledger_id: int,
    scope: LedgerScope,
    kind: str,
    state: LedgerState,
    body: Mapping[str, Any],
    context: CommandContext,
    *,
    reservation_id: str | None = None,
    certified_steps: int | None = None,
    steps_run: int | None = None,
) -> None:
    """Insert the event that led to ``state``, with its log entry.

    Raises ``LedgerAltered`` if the previous event contradicts the log.
    """
    if state.seq > 1:
        require_unaltered(connection, ledger_id, scope, state.seq - 1)
    body = {**body, "state_digest": state_digest(state.to_text())}
    step, follows = STEPS.get(kind, (None, None))
    row = {
        "ledger_id": ledger_id,
        "seq": state.seq,
        "kind": kind,
        "at": context.at,
        "actor": context.actor,
        "idempotency_key": context.idempotency_key,
        "request_digest": context.request_digest,
        "body": json.dumps(body, sort_keys=True),
        "state": state.to_text(),
        "reservation_id": reservation_id,
        "certified_steps": certified_steps,
        "step": step,
        "follows": follows,
        "steps_run": steps_run,
    }
    insert_logged(connection, ledger_events, row, partial(event_entry, scope))


def find_repeated(connection: Connection, context: CommandContext) -> Row[Any] | None:
    """Return the event of an earlier request with this key; raises ``IdempotencyKeyReused``."""
    if context.idempotency_key is None:
        return None
    query = select(ledger_events).where(
        ledger_events.c.actor == context.actor,
        ledger_events.c.idempotency_key == context.idempotency_key,
    )
    event = connection.execute(query).first()
    if event is not None:
        context.require_same(event.request_digest)
    return event


_RESERVATIONS = (
    select(
        *(column for column in reservations.c if column.name not in ("certificate_id", "rule")),
        reservations.c.certificate_id.label("certificate"),
        reservations.c.rule.label("admitted_by"),
        runs.c.id.label("run"),
        runs.c.request.label("run_request"),
        *_NAME,
        *(ledger_events.c[name] for name in ("kind", "seq", "at", "actor", "steps_run", "body")),
    )
    .join(ledgers, ledgers.c.id == reservations.c.ledger_id)
    .join(ledger_events, ledger_events.c.reservation_id == reservations.c.id)
    .outerjoin(runs, runs.c.reservation_id == reservations.c.id)
    .order_by(ledger_events.c.seq)
)
"""Reservations, one row for each event."""


def find_reservation(connection: Connection, reservation_id: str) -> StoredReservation | None:
    """Return the reservation of that id."""
    query = _RESERVATIONS.where(reservations.c.id == reservation_id)
    return next(iter(_reservations_of(connection.execute(query))), None)


def reservations_of(connection: Connection, ledger_id: int) -> list[StoredReservation]:
    """Return all reservations of a ledger, latest first."""
    query = _RESERVATIONS.where(reservations.c.ledger_id == ledger_id)
    return _reservations_of(connection.execute(query))


def reservations_before(
    connection: Connection, ledger_id: int, before: int | None, limit: int
) -> list[tuple[int, StoredReservation]]:
    """Return at most ``limit`` reservations made before event number ``before``, latest first.

    Each comes with the number of its ``reserve`` event.
    """
    events = ledger_events.c
    reserve_events = select(events.seq, events.reservation_id).where(
        events.ledger_id == ledger_id, events.kind == "reserve"
    )
    if before is not None:
        reserve_events = reserve_events.where(events.seq < before)
    rows = connection.execute(reserve_events.order_by(events.seq.desc()).limit(limit)).all()
    query = _RESERVATIONS.where(reservations.c.id.in_([row.reservation_id for row in rows]))
    stored = _reservations_of(connection.execute(query))
    by_id = {reservation.id: reservation for reservation in stored}
    return [(row.seq, by_id[row.reservation_id]) for row in rows]


def first_reservation(connection: Connection, ledger_id: int) -> datetime | None:
    """Return when the first reservation of a ledger was made, or None."""
    events = ledger_events.c
    query = select(events.at).where(events.ledger_id == ledger_id, events.kind == "reserve")
    return connection.execute(query.order_by(events.seq).limit(1)).scalar_one_or_none()


def open_costs(connection: Connection, ledger_id: int, orders: int) -> dict[str, Cost]:
    """Return the summed costs of reserved and of committed reservations, by state."""
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
    result = {name: Cost.zero(orders) for name in ("reserved", "committed")}
    for row in connection.execute(query):
        result[STATES[row.kind]] += Cost.read(json.loads(row.cost))
    return result


def states_of(
    connection: Connection, ledger_id: int, limit: int
) -> list[tuple[datetime, LedgerState]]:
    """Return the times of and the states after a ledger's last ``limit`` events, oldest first."""
    events = ledger_events.c
    query = select(events.seq, events.at, events.state).where(events.ledger_id == ledger_id)
    rows = connection.execute(query.order_by(events.seq.desc()).limit(limit)).all()
    return [(row.at, LedgerState.from_text(row.seq, row.state)) for row in reversed(rows)]


# ---- reservations that block budget --------------------------------------------------


def unused_reservations(at: datetime) -> Select[Any]:
    """Return the query for expired reservations that have no run and were never used."""
    reserve_events = and_(
        ledger_events.c.reservation_id == reservations.c.id,
        ledger_events.c.kind == "reserve",
        ledger_events.c.at < at - UNUSED_LIFETIME,
    )
    return (
        select(reservations.c.id)
        .join(ledger_events, reserve_events)
        .where(~exists().where(runs.c.reservation_id == reservations.c.id))
        .where(~_has_event(reservations.c.id, "commit", "release"))
        .order_by(ledger_events.c.at)
    )


def orphaned_reservations(connection: Connection, at: datetime) -> Iterator[tuple[str, str]]:
    """Yield the id of each reservation that nothing will settle or release, and the reason."""
    for reservation_id in connection.execute(unused_reservations(at)).scalars():
        yield reservation_id, f"it has no run, and is older than {UNUSED_LIFETIME.days} days."
    ended = (
        select(runs.c.reservation_id, runs.c.id)
        .join(run_leases, run_leases.c.run_id == runs.c.id)
        .where(
            run_leases.c.state == "ended",
            ~_has_event(runs.c.reservation_id, "settle", "release"),
        )
    )
    for reservation_id, run_id in connection.execute(ended):
        yield reservation_id, f"run {run_id} has ended, and it is neither settled nor released."


def _has_event(reservation_id: ColumnElement[str], *kinds: str) -> ColumnElement[bool]:
    later = ledger_events.alias()
    return exists().where(later.c.reservation_id == reservation_id, later.c.kind.in_(kinds))


# ---- rows ----------------------------------------------------------------------------


def _reservations_of(result: CursorResult[Any]) -> list[StoredReservation]:
    """Build reservations from rows of ``_RESERVATIONS``, latest first."""
    events: dict[str, list[Row[Any]]] = {}
    for row in result:
        events.setdefault(row.id, []).append(row)
    return [_reservation(rows[0], rows[-1]) for rows in reversed(list(events.values()))]


def _reservation(first: Row[Any], last: Row[Any]) -> StoredReservation:
    """Build a reservation from the rows of its first and its last event."""
    body = json.loads(last.body)
    cost = Cost.read(json.loads(first.cost))
    charged = cost
    if last.kind == "settle":
        charged = Cost.read(body["cost"])
    elif last.kind == "release":
        charged = Cost.zero(len(cost.renyi))
    return StoredReservation.model_validate(
        {
            **first._mapping,
            "steps": {"certified": first.certified_steps, "run": last.steps_run},
            "cost": cost,
            "current_cost": charged,
            "reserved": charge_of(cost),
            "charged": charge_of(charged),
            "event": json.loads(first.event),
            "model": None if first.run is None else json.loads(first.run_request)["model"],
            "state": STATES[last.kind],
            "record": body.get("record") if last.kind == "settle" else None,
            "reserved_by": first.actor,
            "reserved_at": first.at,
            "changed_at": last.at,
        }
    )


def _ledger_of(row: Row[Any]) -> StoredLedger:
    return StoredLedger(
        id=row.id,
        scope=LedgerScope.of(row),
        filter=_filter(row.filter),
        state=LedgerState.from_text(row.seq, row.state),
        team=row.team,
    )


@lru_cache(maxsize=256)
def _filter(text: str) -> Filter:
    return Filter.read(json.loads(text))
