"""Verify ledgers against the log: the head before each change, everything in an audit.

The last event of a ledger carries the state from which the next decision starts. The owner of the
database can rewrite both. So the log, which is signed outside the database, has the digest of each
state. A head is genuine if its row matches its log entry and that entry is under the signed root. A
ledger without an event for its newest log entry has lost its end.

>>> LedgerAltered("The head is not the one in the log.", "Restore the ledger.").code
'ledger_altered'

A replay checks the sums and the budget from the rows alone. It applies each event to the state
after the previous events, evaluates the rule again, and compares the row's state and log entry.
(The database itself refuses rows that are out of order: see ``state``.)

>>> LedgerFinding(ledger="toy/example/add_remove", seq=3, code="overspent", message="...").seq
3
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import isclose
from typing import Any, ClassVar

from sqlalchemy import Connection, Row, bindparam, func, select

from affidavit.accountants.privacy_filter import UNIT, Cost, Filter, Step, Steps, divergences
from affidavit.plan import (
    digest_of_bytes,
    events,
)
from affidavit.service.core.errors import DomainError, LogDamaged
from affidavit.service.core.teams import DEFAULT
from affidavit.service.ledger.state import (
    LedgerScope,
    LedgerState,
    StoredReservation,
)
from affidavit.service.log.entries import (
    EntryKind,
    is_logged,
    logged,
)
from affidavit.service.log.stored_tree import verify_range
from affidavit.service.tables.certificates import certificates
from affidavit.service.tables.ledger import (
    ledger_events,
    ledgers,
    reservations,
)
from affidavit.service.tables.log import log_entries
from affidavit.trust.log import LogEntry

# ---- the head ------------------------------------------------------------------------

ENTRY_KINDS: dict[str, EntryKind] = {
    "budget": "budget",
    "reserve": "reservation",
    "commit": "commitment",
    "settle": "settlement",
    "release": "release",
}
"""The log's kind of entry for each kind of event."""
MAX_RECENT_ENTRIES = 64
"""Entries at the end of the log that are compared with the ledgers."""

_EVENT = select(ledger_events).where(
    ledger_events.c.ledger_id == bindparam("ledger"), ledger_events.c.seq == bindparam("last")
)
_LEDGER = select(ledgers.c.filter, ledgers.c.team).where(ledgers.c.id == bindparam("ledger"))
_RESERVE_EVENT = select(ledger_events).where(
    ledger_events.c.reservation_id == bindparam("reservation"), ledger_events.c.kind == "reserve"
)
_TEAM = select(certificates.c.team).where(certificates.c.id == bindparam("certificate"))
_RECENT_ENTRIES = (
    select(log_entries.c.content)
    .where(log_entries.c.kind.in_(tuple(ENTRY_KINDS.values())))
    .order_by(log_entries.c.id.desc())
    .limit(MAX_RECENT_ENTRIES)
)
_LAST_EVENTS = (
    select(ledgers.c.id, ledgers.c.dataset, ledgers.c.unit, ledgers.c.adjacency)
    .add_columns(func.max(ledger_events.c.seq).label("seq"))
    .join(ledger_events, isouter=True)
    .group_by(ledgers.c.id, ledgers.c.dataset, ledgers.c.unit, ledgers.c.adjacency)
)


class LedgerAltered(DomainError):
    """A ledger does not match the log; it does not change until it is repaired."""

    code = "ledger_altered"
    status: ClassVar[int] = 503


def state_digest(state: str) -> str:
    """Return the logged digest of a row's state."""
    return digest_of_bytes(state.encode())


def event_entry(scope: LedgerScope, event: Any) -> LogEntry:
    """Build the log entry of a row of ``ledger_events``."""
    return LogEntry(
        kind=ENTRY_KINDS[event.kind],
        subject=event.reservation_id or str(scope),
        actor=event.actor,
        at=event.at,
        body={"ledger": scope.as_dict(), "seq": event.seq, **json.loads(event.body)},
    )


def require_unaltered(
    connection: Connection, ledger_id: int, scope: LedgerScope, last: int
) -> None:
    """Raise ``LedgerAltered`` unless event number ``last`` is the logged head.

    Raises ``LogDamaged`` if the log's entries about ledgers cannot be read.
    """
    fault = _find_head_fault(connection, ledger_id, scope, last)
    fault = fault or _find_end_fault(_last_logged_events(connection).get(scope, 0), last)
    if fault is not None:
        raise _altered(scope, fault)


def require_logged(connection: Connection, reservation: StoredReservation) -> None:
    """Raise ``LedgerAltered`` unless the reservation's row matches the log.

    A release or a settlement returns the cost in this row to the budget.
    """
    event = connection.execute(_RESERVE_EVENT, {"reservation": reservation.id}).first()
    if event is None:
        raise _altered(reservation.scope, f"reservation {reservation.id} has no event")
    stated = json.loads(event.body)
    team = connection.execute(_TEAM, {"certificate": reservation.certificate}).scalars().first()
    is_same = (Cost.read(stated["cost"]), team) == (reservation.cost, reservation.team) and all(
        stated[name] == value for name, value in reservation.facts().items()
    )
    if not is_same or not is_logged(connection, event_entry(reservation.scope, event)):
        raise _altered(reservation.scope, f"reservation {reservation.id} is not the one in the log")


def require_all_unaltered(connection: Connection) -> None:
    """Raise ``LedgerAltered`` for the first ledger that does not match the log.

    Raises ``LogDamaged`` if the log's entries about ledgers cannot be read.
    """
    # The log is read first, so that a concurrent event is only in the ledger.
    logged = _last_logged_events(connection)
    for row in connection.execute(_LAST_EVENTS).all():
        scope = LedgerScope.of(row)
        last = row.seq or 0
        fault = _find_end_fault(logged.pop(scope, 0), last) or _find_head_fault(
            connection, row.id, scope, last
        )
        if fault is not None:
            raise _altered(scope, fault)
    for scope in logged:
        raise _altered(scope, "it is in the log but not in the database")


def _find_head_fault(
    connection: Connection, ledger_id: int, scope: LedgerScope, last: int
) -> str | None:
    event = connection.execute(_EVENT, {"ledger": ledger_id, "last": last}).first()
    if event is None:
        return "it has no events"
    try:
        digest = json.loads(event.body)["state_digest"]
        content = event_entry(scope, event).content.decode()
    except (ValueError, TypeError, KeyError, AttributeError):
        return "its last event cannot be read"
    if digest != state_digest(event.state):
        return "its state is not the one in the log"
    try:
        is_as_opened = _is_as_opened(connection, ledger_id, scope)
    except (ValueError, TypeError, KeyError, AttributeError):
        is_as_opened = False
    if not is_as_opened:
        return "its filter or team is not the one of the first budget in the log"
    entries = logged(connection, event.reservation_id or str(scope))
    if content not in entries:
        return "its last event is not the one in the log"
    leaf_index = entries[content]
    if leaf_index is None:
        return None  # it is pending, for less than a second
    try:
        proved = verify_range(connection, leaf_index, leaf_index).proved
    except (ValueError, LogDamaged) as error:
        return f"the log cannot show its last event: {error}"
    return None if proved else "the log entry of its last event is not under the signed root"


def _is_as_opened(connection: Connection, ledger_id: int, scope: LedgerScope) -> bool:
    first = connection.execute(_EVENT, {"ledger": ledger_id, "last": 1}).first()
    ledger = connection.execute(_LEDGER, {"ledger": ledger_id}).one()
    return (
        first is not None
        and not _check_opening(ledger.filter, ledger.team, first.body)
        and is_logged(connection, event_entry(scope, first))
    )


def _find_end_fault(logged: int, last: int) -> str | None:
    return None if logged <= last else f"the log has event {logged}, but it ends at {last}"


def _last_logged_events(connection: Connection) -> dict[LedgerScope, int]:
    """Return the number of each ledger's last event among the newest log entries.

    Raises ``LogDamaged`` if an entry cannot be read.
    """
    last: dict[LedgerScope, int] = {}
    for content in connection.execute(_RECENT_ENTRIES).scalars():
        try:
            body = json.loads(content)["body"]
            scope, seq = LedgerScope(**body["ledger"]), int(body["seq"])
        except (ValueError, TypeError, KeyError):
            raise LogDamaged("an entry about a budget cannot be read") from None
        last[scope] = max(last.get(scope, 0), seq)
    return last


def _altered(scope: LedgerScope, fault: str) -> LedgerAltered:
    return LedgerAltered(
        f"{scope}: {fault}.", "Tell the operator: run affidavit audit verify, and restore a backup."
    )


# ---- replay --------------------------------------------------------------------------

TOLERANCE = 1e-4
"""Relative difference between releases in the bounds of the same events."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LedgerFinding:
    """An inconsistency at one event of a ledger; ``code`` is stable.

    ========================  =====================================================
    ``gap``                   the numbers of the events do not count up from 1
    ``no_budget``             the first event is not a budget
    ``overspent``             the rule does not admit a run that was admitted
    ``charged_above_reserved``  a run was charged more than it had reserved
    ``freed_without_record``  a run without a record was charged less than in full
    ``filter_differs``          the filter is not the first budget's
    ``team_differs``            the team is not the first budget's
    ``reservation_differs``   event and reservation name different certificates
    ``cost_differs``          event and reservation have different costs
    ``understated``           a reservation's cost is below its events' cost
    ``state_differs``         the row's state does not follow from the events
    ``not_logged``            no log entry matches the event
    ``unreadable``            the row cannot be read
    ========================  =====================================================
    """

    ledger: str
    seq: int
    code: str
    message: str


def check_ledgers(connection: Connection) -> list[LedgerFinding]:
    """Return the inconsistencies of all ledgers."""
    findings: list[LedgerFinding] = []
    logged = _logged_contents(connection)
    for row in connection.execute(select(ledgers).order_by(ledgers.c.id)).all():
        findings.extend(_check_ledger(connection, row, LedgerScope.of(row), logged))
    return findings


def _check_ledger(
    connection: Connection, row: Row[Any], scope: LedgerScope, logged: set[str]
) -> Iterator[LedgerFinding]:
    filter_ = Filter.read(json.loads(row.filter))
    reserved = select(reservations).where(reservations.c.ledger_id == row.id)
    reservations_by_id = {item.id: item for item in connection.execute(reserved)}
    events = select(ledger_events).where(ledger_events.c.ledger_id == row.id)
    ordered = connection.execute(events.order_by(ledger_events.c.seq)).all()
    state: LedgerState | None = None
    for number, event in enumerate(ordered, start=1):

        def finding(code: str, message: str, seq: int = event.seq) -> LedgerFinding:
            return LedgerFinding(
                ledger=str(scope), seq=seq, code=code, message=f"{scope}, event {seq}: {message}"
            )

        if event.seq != number:
            yield finding("gap", f"it should be event {number}.")
            return
        try:
            state, discrepancies = _apply_event(state, filter_, event, reservations_by_id)
            differs = state.to_text() != event.state
        except (ValueError, KeyError, TypeError) as error:
            yield finding("unreadable", f"it cannot be read ({error!r}).")
            return
        if number == 1:
            discrepancies = _check_opening(row.filter, row.team, event.body)
        for code, message in discrepancies:
            yield finding(code, message)
        if differs:
            yield finding("state_differs", "its state does not follow from the events.")
        if event_entry(scope, event).content.decode() not in logged:
            yield finding("not_logged", "it differs from its log entry.")


Discrepancies = list[tuple[str, str]]
RESERVATION_FACTS = ("certificate_id", "issue", "untrusted", "plan_digest", "certified_steps")


def _apply_event(
    state: LedgerState | None,
    filter_: Filter,
    event: Row[Any],
    reservations_by_id: Mapping[str, Row[Any]],
) -> tuple[LedgerState, Discrepancies]:
    """Return the state after ``event``, and the event's discrepancies."""
    body = json.loads(event.body)
    if event.kind == "budget":
        if state is None:
            return LedgerState.first(body["epsilon"], body["delta"], filter_), []
        return state.with_budget(body["epsilon"], body["delta"]), []
    if state is None:
        raise ValueError("the first event of a ledger is its budget")
    reservation = reservations_by_id[event.reservation_id]
    cost = Cost.read(json.loads(reservation.cost))
    match event.kind:
        case "reserve":
            discrepancies = _check_reservation(state, filter_, body, reservation, cost)
            return state.with_reservation(cost, reservation.rule), discrepancies
        case "commit":
            return state.with_commitment(), []
        case "release":
            return state.with_release(cost, reservation.rule), []
        case "settle":
            charged = Cost.read(body["cost"])
            return state.with_settlement(cost, charged), _check_settlement(
                event, body, cost, charged
            )
        case kind:
            raise ValueError(f"{kind!r} is not a kind of event")


@lru_cache(maxsize=256)
def _check_opening(filter_: str, team: str, body: str) -> Discrepancies:
    """Compare a ledger's filter and team with its first budget, which has ``body``."""
    budget, stored = json.loads(body), Filter.read(json.loads(filter_))
    expected = Filter.start(float(budget["epsilon"]), float(budget["delta"]))
    is_same = (stored.orders, stored.gaussian_share) == (expected.orders, expected.gaussian_share)
    discrepancies: Discrepancies = []
    if not is_same or not all(map(isclose, stored.weights, expected.weights)):
        message = "the ledger's filter is not the one of its first budget."
        discrepancies.append(("filter_differs", message))
    if team != budget.get("team", DEFAULT):
        message = "the ledger is of another team than its first budget."
        discrepancies.append(("team_differs", message))
    return discrepancies


def _check_reservation(
    state: LedgerState,
    filter_: Filter,
    body: Mapping[str, Any],
    reservation: Row[Any],
    cost: Cost,
) -> Discrepancies:
    discrepancies = []
    differing = [name for name in RESERVATION_FACTS if getattr(reservation, name) != body[name]]
    if differing:
        discrepancies.append(("reservation_differs", f"its reservation has another {differing}."))
    if Cost.read(body["cost"]) != cost:
        discrepancies.append(("cost_differs", "its cost differs from its reservation's."))
    if _is_understated(reservation.event, cost, state.budget_for(filter_, cost).base):
        discrepancies.append(("understated", "it reserves less than its releases cost."))
    rule = state.rule_for(filter_, cost, certain=body["certain"])
    if rule != reservation.rule:
        discrepancies.append(
            (
                "overspent",
                f"a run was admitted by {reservation.rule}, but the rule says "
                f"{rule or 'that it passes the budget'}.",
            )
        )
    return discrepancies


def _is_understated(event: str, cost: Cost, base: Step | None) -> bool:
    """Return whether ``cost`` is below the bounds of ``event`` by more than ``TOLERANCE``."""
    steps, divergences_of_event = _bounds_of_event(event)
    if base is not None and not cost.steps.others and not steps.within(cost.steps):
        return True
    return any(
        reserved.value(UNIT) < bound * (1 - TOLERANCE) - TOLERANCE**2
        for reserved, bound in zip(cost.renyi, divergences_of_event, strict=True)
    )


@lru_cache(maxsize=4096)
def _bounds_of_event(event: str) -> tuple[Steps, tuple[float, ...]]:
    released = events.parse_event(json.loads(event))
    return Steps.of(released), divergences(released)


def _check_settlement(
    event: Row[Any], body: Mapping[str, Any], cost: Cost, charged: Cost
) -> Discrepancies:
    discrepancies = []
    if not charged.within(cost):
        discrepancies.append(
            ("charged_above_reserved", "its charge is higher than its reservation.")
        )
    if event.steps_run != body["steps_run"]:
        discrepancies.append(("not_logged", "its settled steps differ from the logged steps."))
    if charged != cost and body["record"] is None:
        discrepancies.append(
            (
                "freed_without_record",
                "its charge is lower than its reservation, without a record.",
            )
        )
    return discrepancies


def _logged_contents(connection: Connection) -> set[str]:
    """Return the contents of all log entries about ledgers."""
    query = select(log_entries.c.content).where(log_entries.c.kind.in_(tuple(ENTRY_KINDS.values())))
    return set(connection.execute(query).scalars())
