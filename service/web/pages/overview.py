"""``/``: what needs attention, and the state of the log.

Each list shows its newest or most urgent items, found by an index, and links to all of them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from operator import attrgetter
from typing import Any

from fastapi import APIRouter, Request, Response
from sqlalchemy import ColumnElement, Connection, Row, Select, case, func, select

from affidavit.assessment.charts import (
    Axis,
    Chart,
    Line,
)
from affidavit.plan import Reason
from affidavit.service.certificates.issue_status import SUPERSEDED, status_at
from affidavit.service.core.database import snapshot
from affidavit.service.core.wire_models import Status
from affidavit.service.identity.actor import Actor
from affidavit.service.identity.scopes import Scope
from affidavit.service.ledger.repository import ledgers_after, states_of
from affidavit.service.ledger.state import StoredLedger
from affidavit.service.tables.certificates import certificates
from affidavit.service.tables.ledger import reservations
from affidavit.service.tables.runs import (
    run_events,
    run_leases,
    runs,
)
from affidavit.service.web.dependencies import TheServices
from affidavit.service.web.pages.access import Anyone
from affidavit.service.web.pages.approvals import AWAITING
from affidavit.service.web.pages.certificates import EXPIRING_SOON, conditions_of
from affidavit.service.web.pages.charts import (
    figure_of,
    step_points,
    unit_of,
)
from affidavit.service.web.pages.datasets import ledger_page
from affidavit.service.web.pages.log_page import checkpoint_of
from affidavit.service.web.pages.response import (
    page,
    respond,
)
from affidavit.service.web.pages.text import date, date_time, words

router = APIRouter()

MAX_ITEMS = 6
"""Items of a list."""
MAX_LEDGER_PAGES = 4
"""Pages of ledgers that are searched for nearly spent budgets."""
WEEKS = 12
MAX_LEDGERS = 50
"""Ledgers of which the fullest are drawn."""
MAX_LINES, MAX_CHANGES = 5, 60
"""Ledgers in the chart, and the latest changes of each."""
MAX_SEARCHED = 500
"""Certificates that expire first, and runs that failed last, that are searched."""
Items = tuple[Row[Any], ...]
"""Certificates that need attention: id, name, data set, verdict as ``code``, and a time."""
NOT_CERTIFIED = ("refused", "under_noised", "unproved", "undecided")


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """The numbers of plans of the last weeks by outcome, and of runs in progress."""

    certified: int
    not_certified: int
    runs: int
    by_week: tuple[tuple[datetime, int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Overview:
    """The view; lists that the actor may not see are empty."""

    sees_certificates: bool
    totals: Totals
    at_risk: tuple[StoredLedger, ...]
    more_ledgers: bool
    awaiting: Items
    expiring: Items
    more_expiring: bool
    refused: Items
    failed: tuple[dict[str, Any], ...]
    checkpoint: dict[str, Any] | None
    troubles: tuple[Reason, ...]
    anything: bool
    proposals: tuple[dict[str, Any], ...] = ()


@page(router, "/")
def overview(request: Request, actor: Anyone, services: TheServices) -> Response:
    """Show what needs attention and ``actor`` may see."""
    reasons = services.readiness().reasons
    with snapshot(services.engine) as connection:
        now = services.clock.now()
        view = overview_view(connection, actor, reasons, now)
        charts = {"spending": spending_chart(connection, now)}
    if actor.may(Scope.ADMIN):
        proposals = services.four_eyes.waiting(actor, now)[:MAX_ITEMS]
        view = replace(view, proposals=tuple(map(dict, proposals)))
    if view.sees_certificates and view.anything:
        charts["plans"] = plans_chart(view.totals)
    return respond(
        request,
        view,
        template="overview.html",
        charts=charts,
    )


def overview_view(
    connection: Connection,
    actor: Actor,
    reasons: tuple[Reason, ...],
    now: datetime,
) -> Overview:
    """Return the view for ``actor``; ``reasons`` say why the service is not ready."""
    sees = any(actor.may(scope) for scope in (Scope.SUBMIT, Scope.APPROVE, Scope.AUDIT))
    at_risk, more_ledgers = _at_risk(connection)
    expiring, more_expiring = _expiring(connection, now) if sees else ((), False)
    return Overview(
        sees_certificates=sees,
        totals=_totals(connection, now),
        at_risk=at_risk,
        more_ledgers=more_ledgers,
        awaiting=_awaiting(connection, now) if sees else (),
        expiring=expiring,
        more_expiring=more_expiring,
        refused=_refused(connection) if sees else (),
        failed=_failed(connection),
        checkpoint=checkpoint_of(connection),
        troubles=reasons,
        # Sorted by an index, the query reads one row.
        anything=connection.scalar(select(certificates.c.id).order_by(certificates.c.id).limit(1))
        is not None,
    )


def _totals(connection: Connection, now: datetime) -> Totals:
    """Return the numbers of plans of the last ``WEEKS`` by week, oldest first."""
    table = certificates.c
    starts = [now - timedelta(weeks=WEEKS - week) for week in range(WEEKS)]
    sums = []
    for start in starts:
        inside = (table.created_at > start) & (table.created_at <= start + timedelta(weeks=1))
        certified = table.verdict == "certified"
        sums += [
            func.count(case((inside & certified, 1))),
            func.count(case((inside & ~certified, 1))),
        ]
    # A certificate whose last approval issued it again counts once.
    current = select(*sums).where(table.created_at > starts[0], ~SUPERSEDED)
    counts = connection.execute(current).one()
    weeks = tuple(zip(starts, counts[::2], counts[1::2], strict=True))
    active = select(func.count()).select_from(run_leases).where(run_leases.c.state != "ended")
    return Totals(
        certified=sum(counts[::2]),
        not_certified=sum(counts[1::2]),
        runs=connection.execute(active).scalar_one(),
        by_week=weeks,
    )


def plans_chart(totals: Totals) -> str:
    """Return an SVG of certified and other plans by week."""
    ends = range(1, len(totals.by_week) + 1)
    counted = (
        ("certified", [certified for _, certified, _ in totals.by_week]),
        ("not certified", [other for _, _, other in totals.by_week]),
    )
    lines = [
        Line(
            name=name,
            points=tuple(
                (float(week), float(count))
                for end, count in zip(ends, counts, strict=True)
                for week in (end - 1, end)
            ),
        )
        for name, counts in counted
    ]
    chart = Chart(
        title="Plans by week",
        description=f"In {len(totals.by_week)} weeks {totals.certified} plans were certified, "
        f"{totals.not_certified} were not.",
        x=Axis(label=f"weeks since {date(totals.by_week[0][0])}"),
        y=Axis(label="plans", low=0.0),
        marks=tuple(lines),
    )
    return figure_of(chart, width=460, height=240)


def spending_chart(connection: Connection, now: datetime) -> str:
    """Return an SVG of the spending of the fullest ledgers over time; empty if there is none."""
    ledgers = [item for item in ledgers_after(connection, None, MAX_LEDGERS) if item.state.runs]
    ledgers.sort(key=lambda ledger: ledger.spent_epsilon() / float(ledger.state.budget.epsilon))
    histories = [
        (item, states_of(connection, item.id, MAX_CHANGES)) for item in ledgers[-MAX_LINES:]
    ]
    if not histories:
        return ""
    start = min(changes[0][0] for _, changes in histories)
    unit, length = unit_of((now - start).total_seconds())
    lines, end = [], (now - start).total_seconds() / length
    for ledger, changes in histories:
        points = [
            ((at - start).total_seconds() / length, replace(ledger, state=state).spent_epsilon())
            for at, state in changes
        ]
        scope = ledger.scope
        name = f"{scope.dataset} ({words(scope.adjacency)}, per {scope.unit})"
        lines.append(Line(name=name, points=step_points([*points, (end, points[-1][1])])))
    chart = Chart(
        title="ε in use by data set",
        description="What runs spent, committed and reserved, by the privacy filter.",
        x=Axis(label=f"{unit} since {date_time(start)}"),
        y=Axis(label="ε (nats)", low=0.0),
        marks=tuple(lines),
    )
    return figure_of(chart, width=460, height=240)


def _at_risk(connection: Connection) -> tuple[tuple[StoredLedger, ...], bool]:
    """Return nearly spent budgets, fullest first, and whether the search is incomplete."""
    at_risk: list[StoredLedger] = []
    cursor = None
    for _ in range(MAX_LEDGER_PAGES):
        ledgers, cursor = ledger_page(connection, cursor)
        at_risk += [ledger for ledger in ledgers if ledger.is_nearly_spent]
        if cursor is None:
            break
    at_risk.sort(key=attrgetter("share"), reverse=True)
    return tuple(at_risk[:MAX_ITEMS]), cursor is not None


def _expiring(connection: Connection, now: datetime) -> tuple[Items, bool]:
    """Return active certificates that expire soon, and whether the search is incomplete."""
    candidates = (
        _select_items(certificates.c.not_after)
        .add_columns(status_at(now).label("status"))
        .where(certificates.c.not_after > now, certificates.c.not_after <= now + EXPIRING_SOON)
        .order_by(certificates.c.not_after)
        .limit(MAX_SEARCHED)
        .subquery()
    )
    rows = connection.execute(select(candidates).order_by(candidates.c.at)).all()
    expiring = [
        row for row in rows if row.status == Status.ACTIVE.value and row.code == "certified"
    ]
    return tuple(expiring[:MAX_ITEMS]), len(rows) == MAX_SEARCHED and len(expiring) < MAX_ITEMS


def _awaiting(connection: Connection, now: datetime) -> Items:
    """Return the newest certificates that await approval."""
    query = _select_items(certificates.c.created_at).where(*conditions_of(AWAITING, now))
    return _items(connection, query.order_by(certificates.c.created_at.desc()).limit(MAX_ITEMS))


def _refused(connection: Connection) -> Items:
    """Return the newest plans that were not certified; an index finds each verdict."""
    refused: list[Row[Any]] = []
    for verdict in NOT_CERTIFIED:
        query = (
            _select_items(certificates.c.created_at)
            .where(certificates.c.verdict == verdict)
            .order_by(certificates.c.created_at.desc())
            .limit(MAX_ITEMS)
        )
        refused += _items(connection, query)
    return tuple(sorted(refused, key=attrgetter("at"), reverse=True)[:MAX_ITEMS])


def _failed(connection: Connection) -> tuple[dict[str, Any], ...]:
    """Return the latest failed runs, those whose record does not conform first."""
    query = (
        select(run_events.c.run_id, run_events.c.at, run_events.c.body)
        .add_columns(reservations.c.name)
        .select_from(run_events)
        .join(runs)
        .join(reservations, reservations.c.id == runs.c.reservation_id)
        .where(run_events.c.kind == "failed")
        .order_by(run_events.c.at.desc())
        .limit(MAX_SEARCHED)
    )
    failed = [
        {
            "id": row.run_id,
            "name": row.name,
            "dataset": None,
            "code": str(json.loads(row.body).get("code") or "failed"),
            "at": row.at,
        }
        for row in connection.execute(query)
    ]
    return tuple(sorted(failed, key=lambda run: run["code"] != "not_conformant")[:MAX_ITEMS])


def _select_items(at: ColumnElement[datetime]) -> Select[Any]:
    table = certificates.c
    return select(table.id, table.name, table.dataset, table.verdict.label("code"), at.label("at"))


def _items(connection: Connection, query: Select[Any]) -> Items:
    return tuple(connection.execute(query))
