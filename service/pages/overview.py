"""``/``: what needs attention, and whether the log is in order.

Each list has its newest or most urgent few, read by an index, and a link to all of them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from operator import attrgetter
from typing import Any

from fastapi import APIRouter, Request, Response
from sqlalchemy import ColumnElement, Connection, Select, case, func, literal, select

from affidavit.certificate.charts import Axis, Chart, Line
from affidavit.client import Proposal
from affidavit.plan import Reason
from affidavit.service.certificate_tables import certificates
from affidavit.service.certificates.status import Status, status_at
from affidavit.service.dependencies import TheServices
from affidavit.service.identity.actor import Actor, Scope
from affidavit.service.ledger.repository import ledgers_after, states_of
from affidavit.service.ledger.state import reservations
from affidavit.service.log.audit import snapshot
from affidavit.service.pages.access import Anyone
from affidavit.service.pages.approvals import awaiting
from affidavit.service.pages.audit import checkpoint_of
from affidavit.service.pages.charts import figure_of, stairs, unit_of
from affidavit.service.pages.datasets import LedgerLine, ledger_page
from affidavit.service.pages.response import Rows, page, respond, view_of
from affidavit.service.pages.text import words
from affidavit.service.policies.policy_set import PolicySet
from affidavit.service.runs.repository import run_events, run_leases, runs

router = APIRouter()

FEW = 6
SOON = timedelta(days=30)
LEDGER_PAGES = 4
"""Pages of ledgers that are searched for budgets that are nearly spent."""
WEEKS = 12
LEDGERS = 50
DRAWN, STATES = 5, 60
"""Ledgers in the chart of all of them, and the latest changes of each."""
LOOKED_AT = 500
"""Certificates that expire first, and runs that failed last, that are searched."""
NOT_CERTIFIED = ("refused", "under_noised", "unproved", "undecided")


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """Something that needs attention: a certificate, a failed run, a budget or the service itself.

    ``code`` is the verdict, or why a run failed or the service is in trouble.
    """

    what: str
    id: str
    name: str | None = None
    dataset: str | None = None
    code: str
    at: datetime | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Plans of the last weeks by what became of them, and runs that are not over."""

    certified: int
    not_certified: int
    runs: int
    by_week: tuple[tuple[datetime, int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Overview:
    """The page; lists that the actor may not see are empty."""

    sees_certificates: bool
    totals: Totals
    at_risk: tuple[LedgerLine, ...]
    more_ledgers: bool
    awaiting: tuple[Item, ...]
    expiring: tuple[Item, ...]
    more_expiring: bool
    refused: tuple[Item, ...]
    failed: tuple[Item, ...]
    checkpoint: dict[str, Any] | None
    troubles: tuple[Reason, ...]
    anything: bool
    proposals: tuple[Proposal, ...] = ()

    @property
    def items(self) -> tuple[Item, ...]:
        """All of it as one table."""
        budgets = (
            Item(
                what="budget",
                id=f"{line.unit}/{line.adjacency}",
                dataset=line.dataset,
                code=f"ε {line.spent} of {line.epsilon} at δ {line.delta}",
            )
            for line in self.at_risk
        )
        troubles = (
            Item(what="service", id="", name=trouble.message, code=trouble.code)
            for trouble in self.troubles
        )
        return (*budgets, *self.awaiting, *self.expiring, *self.refused, *self.failed, *troubles)


@page(router, "/")
def overview(request: Request, actor: Anyone, services: TheServices) -> Response:
    """What needs attention, as far as ``actor`` may see it."""
    reasons = services.readiness().reasons
    rules = services.policies.policy_set()
    with snapshot(services.engine) as connection:
        now = services.clock.now()
        view = overview_view(connection, rules, actor, reasons, now)
        drawn = {"spending": spending_chart(connection, now)}
    if actor.may(Scope.ADMIN):
        view = replace(view, proposals=services.second_person.waiting(actor, now)[:FEW])
    if view.sees_certificates and view.anything:
        drawn["plans"] = plans_chart(view.totals)
    return respond(
        request,
        view,
        template="overview.html",
        rows=Rows(Item, view.items),
        drawn=drawn,
        title="overview",
    )


def overview_view(
    connection: Connection,
    rules: PolicySet,
    actor: Actor,
    reasons: tuple[Reason, ...],
    now: datetime,
) -> Overview:
    """The page for ``actor``; ``reasons`` say why the service is not ready."""
    sees = any(actor.may(scope) for scope in (Scope.SUBMIT, Scope.APPROVE, Scope.AUDIT))
    at_risk, more_ledgers = _at_risk(connection, rules)
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
        anything=_anything(connection),
    )


def _anything(connection: Connection) -> bool:
    """Whether there is a certificate; in the order of an index, to read one row alone."""
    first = select(certificates.c.id).order_by(certificates.c.id).limit(1)
    return connection.execute(first).first() is not None


def _totals(connection: Connection, now: datetime) -> Totals:
    """The plans of the last ``WEEKS``, by week, oldest first."""
    table = certificates.c
    began = [now - timedelta(weeks=WEEKS - week) for week in range(WEEKS)]
    sums = []
    for start in began:
        inside = (table.created_at > start) & (table.created_at <= start + timedelta(weeks=1))
        certified = table.verdict == "certified"
        sums += [
            func.count(case((inside & certified, 1))),
            func.count(case((inside & ~certified, 1))),
        ]
    counts = connection.execute(select(*sums).where(table.created_at > began[0])).one()
    weeks = tuple(zip(began, counts[::2], counts[1::2], strict=True))
    active = select(func.count()).select_from(run_leases).where(run_leases.c.state != "ended")
    return Totals(
        certified=sum(counts[::2]),
        not_certified=sum(counts[1::2]),
        runs=connection.execute(active).scalar_one(),
        by_week=weeks,
    )


def plans_chart(totals: Totals) -> str:
    """SVG of certified and other plans, week by week."""
    ends = range(1 - len(totals.by_week), 1)
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
        x=Axis(label="weeks from now"),
        y=Axis(label="plans", low=0.0),
        marks=tuple(lines),
    )
    return figure_of(chart, width=460, height=240)


def spending_chart(connection: Connection, now: datetime) -> str:
    """SVG of ε taken of the fullest data sets over time; empty if nothing was taken."""
    ledgers = [each for each in ledgers_after(connection, None, LEDGERS) if each.state.runs]
    ledgers.sort(key=lambda ledger: ledger.spent_epsilon() / float(ledger.state.budget.epsilon))
    drawn = [(each, states_of(connection, each.id, STATES)) for each in ledgers[-DRAWN:]]
    if not drawn:
        return ""
    unit, length = unit_of(max((now - changes[0][0]).total_seconds() for _, changes in drawn))
    lines = []
    for ledger, changes in drawn:
        points = [
            ((at - now).total_seconds() / length, replace(ledger, state=state).spent_epsilon())
            for at, state in changes
        ]
        scope = ledger.scope
        name = f"{scope.dataset} ({words(scope.adjacency)}, per {scope.unit})"
        lines.append(Line(name=name, points=stairs([*points, (0.0, points[-1][1])])))
    chart = Chart(
        title="ε in use by data set",
        description="What runs spent, committed and reserved, by the privacy filter.",
        x=Axis(label=f"{unit} from now"),
        y=Axis(label="ε (nats)", low=0.0),
        marks=tuple(lines),
    )
    return figure_of(chart, width=460, height=240)


def _at_risk(connection: Connection, rules: PolicySet) -> tuple[tuple[LedgerLine, ...], bool]:
    """Budgets that are nearly or fully spent, fullest first, and whether not all were searched."""
    at_risk: list[LedgerLine] = []
    cursor = None
    for _ in range(LEDGER_PAGES):
        ledgers = ledger_page(connection, rules, cursor)
        at_risk += [line for line in ledgers.lines if line.nearly]
        cursor = ledgers.next
        if cursor is None:
            break
    at_risk.sort(key=lambda line: line.share, reverse=True)
    return tuple(at_risk[:FEW]), cursor is not None


def _expiring(connection: Connection, now: datetime) -> tuple[tuple[Item, ...], bool]:
    """Active certificates that expire soon, soonest first, and whether not all were searched."""
    some = (
        _lines("expiring", certificates.c.not_after)
        .add_columns(status_at(now).label("status"))
        .where(certificates.c.not_after > now, certificates.c.not_after <= now + SOON)
        .order_by(certificates.c.not_after)
        .limit(LOOKED_AT)
        .subquery()
    )
    rows = connection.execute(select(some).order_by(some.c.at)).all()
    expiring = [
        view_of(Item, row)
        for row in rows
        if row.status == Status.ACTIVE.value and row.code == "certified"
    ]
    return tuple(expiring[:FEW]), len(rows) == LOOKED_AT and len(expiring) < FEW


def _awaiting(connection: Connection, now: datetime) -> tuple[Item, ...]:
    """The newest certificates that wait for approvals."""
    query = _lines("awaiting approval", certificates.c.created_at).where(*awaiting(now))
    return _read(connection, query.order_by(certificates.c.created_at.desc()).limit(FEW))


def _refused(connection: Connection) -> tuple[Item, ...]:
    """The newest plans that were not certified; each verdict by its index."""
    refused: list[Item] = []
    for verdict in NOT_CERTIFIED:
        query = (
            _lines("not certified", certificates.c.created_at)
            .where(certificates.c.verdict == verdict)
            .order_by(certificates.c.created_at.desc())
            .limit(FEW)
        )
        refused += _read(connection, query)
    return tuple(sorted(refused, key=attrgetter("at"), reverse=True)[:FEW])


def _failed(connection: Connection) -> tuple[Item, ...]:
    """Of the runs that failed last, those whose record does not conform first."""
    query = (
        select(run_events.c.run_id, run_events.c.at, run_events.c.body)
        .add_columns(reservations.c.name)
        .select_from(run_events)
        .join(runs)
        .join(reservations, reservations.c.id == runs.c.reservation_id)
        .where(run_events.c.kind == "failed")
        .order_by(run_events.c.at.desc())
        .limit(LOOKED_AT)
    )
    failed = [
        Item(
            what="failed run",
            id=row.run_id,
            name=row.name,
            code=str(json.loads(row.body).get("code") or "failed"),
            at=row.at,
        )
        for row in connection.execute(query)
    ]
    return tuple(sorted(failed, key=lambda run: run.code != "not_conformant")[:FEW])


def _lines(what: str, at: ColumnElement[datetime]) -> Select[Any]:
    table, kind = certificates.c, literal(what).label("what")
    columns = (table.id, table.name, table.dataset, table.verdict.label("code"), at.label("at"))
    return select(*columns, kind)


def _read(connection: Connection, query: Select[Any]) -> tuple[Item, ...]:
    return tuple(view_of(Item, row) for row in connection.execute(query))
