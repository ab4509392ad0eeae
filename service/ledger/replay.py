"""Replay: read every row of the ledgers again and report inconsistencies.

The database refuses rows that come out of order (``tables``). Whether the sums are right and
the budget was kept is checked here, from the rows alone: each event is applied to the state
that the events before it lead to, the rule is asked again, and what a row says of the state
after it is compared. Each event must also stand in the log as it stands in its row.

>>> LedgerFinding(ledger="toy/example/add_remove", seq=3, code="overspent", message="...").seq
3
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from sqlalchemy import Connection, Engine, select

from affidavit.accountants.privacy_filter import UNIT, Cost, Filter, Step, Steps, divergences
from affidavit.plan import event_from
from affidavit.service.ledger.head_check import ENTRY_KINDS, logged_as
from affidavit.service.ledger.ledger_tables import ledger_events, ledgers, reservations
from affidavit.service.ledger.state import LedgerScope, LedgerState
from affidavit.service.log.log_tables import log_entries

TOLERANCE = 1e-4
"""By how much a later release may bound the same events higher without accusing anybody."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LedgerFinding:
    """One thing that is wrong, at one event of one ledger; ``code`` is stable.

    ========================  =====================================================
    ``gap``                   the numbers of the events do not count up from 1
    ``no_budget``             the first event is not a budget
    ``overspent``             a run was admitted that the rule does not admit
    ``charged_above_reserved``  a run was settled on more than it reserved
    ``freed_without_record``  a run without a record was not charged in full
    ``cost_differs``          event and reservation do not say the same cost
    ``understated``           a reservation's cost is below that of the events it is for
    ``state_differs``         the row's state is not what the events lead to
    ``not_logged``            no entry of the log says what the event says
    ``unreadable``            the row cannot be read
    ========================  =====================================================
    """

    ledger: str
    seq: int
    code: str
    message: str


def replay(engine: Engine) -> list[LedgerFinding]:
    """What is wrong with the ledgers behind ``engine``; nothing if it is empty."""
    with engine.connect() as connection:
        return check_ledgers(connection)


def check_ledgers(connection: Connection) -> list[LedgerFinding]:
    """``replay`` on an open connection."""
    findings: list[LedgerFinding] = []
    logged = _logged(connection)
    rows = connection.execute(select(ledgers).order_by(ledgers.c.id)).mappings().all()
    for row in map(dict, rows):
        scope = LedgerScope(dataset=row["dataset"], unit=row["unit"], adjacency=row["adjacency"])
        findings.extend(_check(connection, row, scope, logged))
    return findings


def _check(
    connection: Connection, row: Mapping[str, Any], scope: LedgerScope, logged: set[str]
) -> Iterator[LedgerFinding]:
    filter_ = Filter.read(json.loads(row["filter"]))
    reservations_by_id = {
        mapping["id"]: dict(mapping)
        for mapping in connection.execute(
            select(reservations).where(reservations.c.ledger_id == row["id"])
        ).mappings()
    }
    query = select(ledger_events).where(ledger_events.c.ledger_id == row["id"])
    ordered = query.order_by(ledger_events.c.seq)
    events = [dict(mapping) for mapping in connection.execute(ordered).mappings()]
    state: LedgerState | None = None
    for number, event in enumerate(events, start=1):

        def finding(code: str, message: str, seq: int = event["seq"]) -> LedgerFinding:
            return LedgerFinding(
                ledger=str(scope), seq=seq, code=code, message=f"{scope}, event {seq}: {message}"
            )

        if event["seq"] != number:
            yield finding("gap", f"it should be event {number}.")
            return
        try:
            state, mistakes = _after(state, filter_, event, reservations_by_id)
            differs = state.written() != event["state"]
        except (ValueError, KeyError, TypeError) as error:
            yield finding("unreadable", f"it cannot be read ({error!r}).")
            return
        for code, message in mistakes:
            yield finding(code, message)
        if differs:
            yield finding("state_differs", "its state is not what the events lead to.")
        if logged_as(scope, event) not in logged:
            yield finding("not_logged", "the log does not say what it says.")


Mistakes = list[tuple[str, str]]


def _after(
    state: LedgerState | None,
    filter_: Filter,
    event: Mapping[str, Any],
    reservations_by_id: Mapping[str, Mapping[str, Any]],
) -> tuple[LedgerState, Mistakes]:
    """The state after ``event``, and what is wrong with the event itself."""
    body = json.loads(event["body"])
    if event["kind"] == "budget":
        if state is None:
            return LedgerState.first(body["epsilon"], body["delta"], filter_), []
        return state.with_budget(body["epsilon"], body["delta"]), []
    if state is None:
        raise ValueError("the first event of a ledger is its budget")
    reservation = reservations_by_id[event["reservation_id"]]
    cost = Cost.read(json.loads(reservation["cost"]))
    match event["kind"]:
        case "reserve":
            mistakes = _reserved(state, filter_, body, reservation, cost)
            return state.reserved(cost, reservation["rule"]), mistakes
        case "commit":
            return state.committed(), []
        case "release":
            return state.released(cost, reservation["rule"]), []
        case "settle":
            charged = Cost.read(body["cost"])
            return state.settled(cost, charged), _settled(event, body, cost, charged)
        case kind:
            raise ValueError(f"{kind!r} is no kind of event")


def _reserved(
    state: LedgerState,
    filter_: Filter,
    body: Mapping[str, Any],
    reservation: Mapping[str, Any],
    cost: Cost,
) -> Mistakes:
    mistakes = []
    if Cost.read(body["cost"]) != cost:
        mistakes.append(("cost_differs", "it names another cost than its reservation."))
    if _understated(reservation["event"], cost, state.within(filter_, cost).base):
        mistakes.append(("understated", "it reserves less than what it says was to be released."))
    rule = state.rule_for(filter_, cost, certain=body["certain"])
    if rule != reservation["rule"]:
        mistakes.append(
            (
                "overspent",
                f"a run was admitted by {reservation['rule']}, and the rule says "
                f"{rule or 'that it passes the budget'}.",
            )
        )
    return mistakes


def _understated(event: str, cost: Cost, base: Step | None) -> bool:
    """Whether ``cost`` is below the bounds of ``event`` by more than releases of ours differ."""
    steps, divergences_of_event = _bounds(event)
    if base is not None and not cost.steps.others and not steps.within(cost.steps):
        return True
    return any(
        reserved.value(UNIT) < bound * (1 - TOLERANCE) - TOLERANCE**2
        for reserved, bound in zip(cost.renyi, divergences_of_event, strict=True)
    )


@lru_cache(maxsize=4096)
def _bounds(event: str) -> tuple[Steps, tuple[float, ...]]:
    released = event_from(json.loads(event))
    return Steps.of(released), divergences(released)


def _settled(
    event: Mapping[str, Any], body: Mapping[str, Any], cost: Cost, charged: Cost
) -> Mistakes:
    mistakes = []
    if not charged.within(cost):
        mistakes.append(("charged_above_reserved", "it is charged for more than it reserved."))
    if charged != cost and (body["record"] is None or event["steps_run"] != body["steps_run"]):
        mistakes.append(("freed_without_record", "it is charged for less, and no record says why."))
    return mistakes


def _logged(connection: Connection) -> set[str]:
    """What the log says of ledgers, entry by entry."""
    query = select(log_entries.c.content).where(log_entries.c.kind.in_(tuple(ENTRY_KINDS.values())))
    return set(connection.execute(query).scalars())
