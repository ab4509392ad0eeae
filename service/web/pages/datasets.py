"""``/datasets``: the budget and spending of each data set, and a form to set a budget.

``/datasets/{name}`` shows the ledgers of a data set, with three figures: the cost by the privacy
filter, which decides and holds for adaptively chosen plans; the composition as if all plans had
been fixed in advance; and the plain sum of ε. The last two are for information only, and are
marked so. The composition requires accounting; it is shown at once if that is quick, and otherwise
on request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from decimal import Decimal
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from pydantic import TypeAdapter, ValidationError
from sqlalchemy import Connection, RowMapping, select
from starlette.concurrency import run_in_threadpool

from affidavit.accountants import decimal_up
from affidavit.accountants.privacy_filter import UNIT
from affidavit.assessment import meaning_of
from affidavit.assessment.charts import (
    Axis,
    Chart,
    Line,
    ReferenceLine,
)
from affidavit.certificate.policy import Policy
from affidavit.client import Composition, Forecast
from affidavit.plan import Name
from affidavit.service.core.errors import MalformedRequest
from affidavit.service.core.problems import Problem, Recorded
from affidavit.service.identity.actor import Actor, CommandContext
from affidavit.service.identity.scopes import Scope
from affidavit.service.ledger import repository
from affidavit.service.ledger.state import (
    LedgerScope,
    StoredLedger,
    StoredReservation,
)
from affidavit.service.ledger.wire_models import (
    BudgetRequest,
    DatasetName,
    GrantRequest,
    amounts_of,
    forecast_of,
    marginal_epsilon,
)
from affidavit.service.policies.policy_set import PolicySet
from affidavit.service.tables.certificates import certificates
from affidavit.service.tables.ledger import reservations
from affidavit.service.tables.runs import run_events, runs
from affidavit.service.web.dependencies import Services, TheServices
from affidavit.service.web.openapi import ID_PATTERN
from affidavit.service.web.pages.access import (
    Admin,
    Anyone,
    RevokingAdmin,
    page_actor,
)
from affidavit.service.web.pages.certificates import certified_choices
from affidavit.service.web.pages.charts import (
    figure_of,
    recognition_figure,
    step_points,
    unit_of,
)
from affidavit.service.web.pages.forms import SubmittedForm, number
from affidavit.service.web.pages.ledger_shares import GROUPINGS, Grouping, Share, shares_of
from affidavit.service.web.pages.response import (
    action,
    download_csv,
    page,
    respond,
    see_other,
)
from affidavit.service.web.pages.text import (
    date_time,
    decimal,
    messages_of,
    round_up,
)
from affidavit.service.web.routes.ledgers import (
    ProposalDigest,
    change_budget,
    change_grant,
    decline,
)

router = APIRouter()


PAGE_SIZE = 50
"""Ledgers on the list, or reservations on the page of a data set."""
FIELDS = ("dataset", "unit", "adjacency", "epsilon", "delta", "reason")
MAX_QUERY_LENGTH = 64
"""Characters of a form field that the URL fills in."""
BudgetRequester = Annotated[Actor, page_actor(Scope.SUBMIT, Scope.APPROVE, Scope.ADMIN)]
_NAME: TypeAdapter[str] = TypeAdapter(Name)
ScopeName = Annotated[
    str | None, Query(pattern=r"^[A-Za-z0-9._-]{1,64}/[a-z_]{1,16}/[a-z_]{1,32}$")
]


@page(router, "/datasets")
def datasets(
    request: Request, _: Anyone, services: TheServices, after: ScopeName = None
) -> Response:
    """List the budgets; the form is filled in from the query parameters."""
    values = {name: request.query_params.get(name, "")[:MAX_QUERY_LENGTH] for name in FIELDS}
    return _respond(request, services, after, values=values)


@action(router, "/datasets")
def set_budget(
    request: Request, actor: BudgetRequester, services: TheServices, form: SubmittedForm
) -> Response:
    """Set a budget or propose it to administrators, by the use case of the API."""
    values = {name: form.get(name) for name in FIELDS}
    fields = {
        **{name: values[name] for name in ("unit", "adjacency", "reason")},
        **{name: number(values[name]) for name in ("epsilon", "delta")},
        "team": form.get("team") or None,
    }
    try:
        budget = BudgetRequest.from_data(fields)
        name = _NAME.validate_python(values["dataset"])
    except MalformedRequest as error:
        return _respond(request, services, values=values, wrong=messages_of(error.reasons))
    except ValidationError:
        wrong = "The name of a data set has 1 to 64 letters, digits, dots, dashes and underscores."
        return _respond(request, services, values=values, wrong=wrong)
    call = CommandContext.of(actor, request, None, budget)
    try:
        change_budget(services, actor, call, name, budget)
    except Recorded as recorded:
        return _respond(request, services, values=values, noted=recorded.detail)
    return see_other("/datasets", done="set")


def ledger_page(
    connection: Connection, cursor: str | None
) -> tuple[list[StoredLedger], str | None]:
    """Return a page of ledgers and the next cursor, which is the scope of a ledger as text."""
    after = None
    if cursor is not None:
        dataset, unit, adjacency = cursor.split("/")
        after = LedgerScope(dataset=dataset, unit=unit, adjacency=adjacency)
    ledgers = repository.ledgers_after(connection, after, PAGE_SIZE + 1)
    more = len(ledgers) > PAGE_SIZE
    return ledgers[:PAGE_SIZE], str(ledgers[PAGE_SIZE - 1].scope) if more else None


def _respond(
    request: Request, services: Services, after: str | None = None, **form: Any
) -> Response:
    """Show the ledgers after ``after``, and the submitted ``form`` with its error.

    If several administrators are required, ``noted`` says who else must agree.
    """
    with services.engine.connect() as connection:
        ledgers, following = ledger_page(connection, after)
    view = {
        "ledgers": ledgers,
        "next": following,
        "policy_of": services.policies.policy_set().policy_of,
        "administrators": services.keysets.administrators(),
        **{"wrong": None, "noted": None},
        **form,
    }
    status = 422 if view["wrong"] else 200
    return respond(request, view, template="datasets.html", status=status)


# ---- one data set --------------------------------------------------------------------


MAX_CHART_POINTS = 60
"""The latest changes of a ledger that its chart shows."""
MAX_SEARCHED_RUNS = 2000
"""The latest failed runs that are searched for records that do not conform."""
MAX_NOT_CONFORMANT = 5
COMPOSITION_WAIT_SECONDS = 0.3
"""Time that a page waits for the non-adaptive composition."""
ONE = "/datasets/{name}"
AMOUNTS = {
    "spent": "runs that ended",
    "committed": "runs in progress",
    "reserved": "runs in the queue",
    "free": "for further runs",
}
"""The parts of a budget in their order in the bar."""
COLUMNS = (
    *("id", "run", "name", "certificate", "issue", "state", "steps_certified", "steps_run"),
    *(
        "reserved",
        "charged",
        "adds",
        "mu",
        "record",
        "reserved_by",
        "team",
        "model",
        "reserved_at",
        "changed_at",
    ),
)
"""The columns of a ledger as CSV."""
Before = Annotated[int | None, Query(ge=1, le=2**31 - 1)]
LedgerName = Annotated[str | None, Query(pattern=r"^[a-z_]{1,16}/[a-z_]{1,32}$")]
Quarter = Annotated[str | None, Query(pattern=r"^[0-9]{4}-Q[1-4]$|^$")]
MAX_QUARTERS = 8
"""The latest quarters of which the page offers a report."""
MAX_REPORTED = 10_000
"""The latest reservations among which a report looks for those of its quarter."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Dataset:
    """A data set: its ledgers, and the reservations and chart of the ``shown`` one.

    Each of ``entries`` is a reservation and by how much the ε in use would fall without it.
    ``not_conformant`` are the latest runs whose record does not conform; no charge bounds their
    cost. ``forecast`` is for a run like the latest one, ``choices`` are the ids and names of
    certificates to forecast. ``composed`` is None until it is computed. ``shares`` are those by
    ``grouping``, and a report can be had of each of ``quarters``.
    """

    name: str
    ledgers: tuple[StoredLedger, ...] = ()
    shown: StoredLedger | None = None
    amounts: tuple[dict[str, Any], ...] = ()
    budget_sum: str = ""
    entries: tuple[tuple[StoredReservation, str | None], ...] = ()
    before: int | None = None
    next: str | None = None
    forecast: Forecast | None = None
    policy: Policy
    not_conformant: tuple[dict[str, Any], ...] = ()
    composed: Composition | None = None
    proposals: tuple[dict[str, Any], ...] = ()
    grants: tuple[Mapping[str, Any], ...] = ()
    requested_forecast: Forecast | None = None
    choices: tuple[tuple[str, str], ...] = ()
    groupings: tuple[Grouping, ...] = GROUPINGS
    grouping: Grouping = "person"
    shares: tuple[Share, ...] = ()
    quarters: tuple[str, ...] = ()
    meaning: tuple[str, ...] = ()


@page(router, ONE)
async def dataset(
    request: Request,
    actor: Anyone,
    services: TheServices,
    name: DatasetName,
    ledger: LedgerName = None,
    before: Before = None,
    composed: Annotated[str | None, Query(max_length=8)] = None,
    certificate: Annotated[str | None, Query(pattern=rf"{ID_PATTERN}|^$")] = None,
    by: Grouping = "person",
) -> Response:
    """Show a data set: its ledger with reservations, chart and forecast, and its policy.

    ``by`` is what the use of the budget is shared out by. ``composed`` requests the non-adaptive
    composition, which requires accounting; ``certificate`` requests a forecast for that
    certificate. A data set that a policy or certificate names has a page before it has a budget.
    """
    view, chart = await run_in_threadpool(_read, services, actor, name, ledger, before, by)
    stored = view.shown
    if stored is not None and composed:
        view = replace(view, composed=await services.ledger.compose(stored))
    elif stored is not None:
        view = replace(view, composed=await _quick_composition(services, stored))
    if stored is not None and certificate:
        forecast = await services.ledger.forecast(stored, certificate)
        view = replace(view, requested_forecast=forecast)
    drawn = "" if stored is None else recognition_figure(_budget_of(stored))
    return respond(
        request,
        view,
        template="dataset.html",
        charts={"chart": chart or "", "meaning_svg": drawn},
        fragment="composed",
    )


@page(router, f"{ONE}/ledger.csv")
def ledger_csv(
    actor: Anyone,
    services: TheServices,
    name: DatasetName,
    ledger: LedgerName = None,
    before: Before = None,
    quarter: Quarter = None,
) -> Response:
    """Download the reservations that the page shows, or those of a quarter."""
    view, _ = _read(services, actor, name, ledger, before)
    if not quarter or view.shown is None:
        return download_csv(COLUMNS, [_row(*entry) for entry in view.entries], f"{name}.csv")
    with services.engine.connect() as connection:
        numbered = repository.reservations_before(connection, view.shown.id, None, MAX_REPORTED)
    made = [entry for _, entry in numbered if quarter_of(entry.reserved_at) == quarter]
    rows = [_row(entry, _adds(view.shown, entry)) for entry in made]
    return download_csv(COLUMNS, rows, f"{name}-{quarter}.csv")


def _row(reservation: StoredReservation, adds: str | None) -> dict[str, Any]:
    """Return the line of a reservation; ``adds`` is what the ε in use would fall without it."""
    return {
        **dict(reservation),
        "steps_certified": reservation.steps.certified,
        "steps_run": reservation.steps.run,
        "reserved": round_up(reservation.reserved.epsilon),
        "charged": round_up(reservation.charged.epsilon) if reservation.has_ended else None,
        "adds": adds,
        "mu": round_up(reservation.reserved.mu),
    }


@action(router, f"{ONE}/proposals/{{digest}}")
def decline_proposal(
    actor: RevokingAdmin,
    services: TheServices,
    name: DatasetName,
    digest: ProposalDigest,
    form: SubmittedForm,
) -> Response:
    """Decline a proposal, by the use case of the API."""
    decline(services, actor, name, digest, form.get("reason").replace("\0", "")[:2000])
    return see_other(f"/datasets/{name}", done="declined")


@action(router, f"{ONE}/grants")
def grant_use(
    request: Request, actor: Admin, services: TheServices, name: DatasetName, form: SubmittedForm
) -> Response:
    """Grant another team the use of a data set, by the use case of the API."""
    fields = {field: form.get(field) for field in ("team", "may", "reason")}
    try:
        grant = GrantRequest.from_data(fields)
        call = CommandContext.of(actor, request, None, grant)
        change_grant(services, actor, call, name, grant)
    except MalformedRequest as error:
        raise Problem(422, "malformed_request", str(error), *error.reasons) from None
    except Recorded:
        return see_other(f"/datasets/{name}", done="noted")
    return see_other(f"/datasets/{name}", done="granted")


def dataset_view(
    connection: Connection,
    rules: PolicySet,
    name: str,
    scope: tuple[str, str] | None,
    before: int | None,
) -> Dataset:
    """Return the view of the ledger of ``scope`` (unit, adjacency) or the first.

    Reservations are listed before the event number ``before``.
    """
    ledgers = tuple(repository.all_ledgers(connection, name))
    view = Dataset(name=name, ledgers=ledgers, policy=rules.policy_of(name))
    chosen = next((item for item in ledgers if scope in (None, (item.unit, item.adjacency))), None)
    if chosen is None:
        return replace(view, ledgers=())
    numbered = repository.reservations_before(connection, chosen.id, before, PAGE_SIZE + 1)
    entries = [reservation for _, reservation in numbered[:PAGE_SIZE]]
    amounts, forecast = _amounts(connection, chosen), None
    if entries and before is None:  # the privacy filter decides, because the ledger is not empty
        latest = entries[0]
        forecast = forecast_of(chosen, latest.cost, latest.certificate, certain=False)
    return replace(
        view,
        amounts=amounts,
        budget_sum=decimal(float(sum((Decimal(part["epsilon"]) for part in amounts), Decimal(0)))),
        shown=chosen,
        entries=tuple((entry, _adds(chosen, entry)) for entry in entries),
        before=before,
        next=str(numbered[PAGE_SIZE - 1][0]) if len(numbered) > PAGE_SIZE else None,
        forecast=forecast,
        not_conformant=_not_conformant(connection, chosen),
        meaning=_meaning(chosen),
    )


def _adds(ledger: StoredLedger, reservation: StoredReservation) -> str | None:
    adds = marginal_epsilon(ledger, reservation)
    return None if adds is None else decimal_up(adds, 4)


def quarter_of(at: datetime) -> str:
    """Return the quarter of a time in UTC.

    >>> from datetime import UTC
    >>> quarter_of(datetime(2027, 2, 14, tzinfo=UTC))
    '2027-Q1'
    """
    return f"{at.year}-Q{(at.month + 2) // 3}"


def _quarters(connection: Connection, ledger: StoredLedger, now: datetime) -> tuple[str, ...]:
    """Return the quarters since the ledger's first reservation, the latest first."""
    first = repository.first_reservation(connection, ledger.id)
    if first is None:
        return ()
    last = 4 * now.year + (now.month + 2) // 3
    begun = 4 * first.year + (first.month + 2) // 3
    count = min(MAX_QUARTERS, last - begun + 1)
    return tuple(f"{(at - 1) // 4}-Q{(at - 1) % 4 + 1}" for at in range(last, last - count, -1))


def _meaning(ledger: StoredLedger) -> tuple[str, ...]:
    """Return what the whole budget means, which the filter guarantees of all runs together."""
    meaning = meaning_of(_budget_of(ledger))
    return meaning.sentences(ledger.scope.unit, ledger.scope.adjacency)


def _budget_of(ledger: StoredLedger) -> list[tuple[float, float]]:
    budget = ledger.state.budget
    return [(float(budget.epsilon), float(budget.delta))]


def is_known(connection: Connection, rules: PolicySet, name: str) -> bool:
    """Return whether a budget, policy or certificate names the data set."""
    if rules.policy_of(name).datasets != "default" or repository.all_ledgers(connection, name):
        return True
    query = select(certificates.c.id).where(certificates.c.dataset == name).limit(1)
    return connection.execute(query).first() is not None


def spent_chart(connection: Connection, ledger: StoredLedger) -> str:
    """Return an SVG of the spending over time; empty if there are fewer than two changes."""
    states = repository.states_of(connection, ledger.id, MAX_CHART_POINTS)
    if len(states) < 2:
        return ""
    start, end = states[0][0], states[-1][0]
    unit, length = unit_of((end - start).total_seconds())
    after = [((at - start).total_seconds() / length, state) for at, state in states]
    spent = [(then, replace(ledger, state=state).spent_epsilon()) for then, state in after]
    plain = [(then, state.spent.epsilon.value(UNIT)) for then, state in after]
    chart = Chart(
        title=f"Budget of {ledger.scope.dataset} in use",
        description=f"After {ledger.state.seq} changes {round_up(spent[-1][1])} of "
        f"{ledger.state.budget.epsilon} is in use, by the privacy filter.",
        x=Axis(label=f"{unit} since {date_time(start)}"),
        y=Axis(label="ε (nats)", low=0.0),
        marks=(
            Line(name="in use, by the privacy filter", points=step_points(spent)),
            Line(name="plain sum of ε", points=step_points(plain)),
            ReferenceLine(name="budget", at=float(ledger.state.budget.epsilon)),
        ),
    )
    return figure_of(chart, width=460, height=280)


def _read(
    services: Services,
    actor: Actor,
    name: str,
    ledger: str | None,
    before: int | None,
    by: Grouping = "person",
) -> tuple[Dataset, str | None]:
    """Return the view and its chart; raises ``Problem``."""
    rules = services.policies.policy_set()
    unit, _, adjacency = (ledger or "").partition("/")
    scope = (unit, adjacency) if ledger else None
    with services.engine.connect() as connection:
        view = dataset_view(connection, rules, name, scope, before)
        proposals = services.four_eyes.waiting(actor, services.clock.now(), name)
        exists = proposals or is_known(connection, rules, name)
        if view.shown is None and (ledger is not None or not exists):
            raise Problem(404, "not_found", f"the data set {name} has no budget.")
        grants: Sequence[RowMapping] = ()
        if actor.may(Scope.AUDIT) or actor.may(Scope.ADMIN):
            grants = repository.grants_of(connection, name)
        view = replace(view, proposals=tuple(map(dict, proposals)), grants=tuple(map(dict, grants)))
        shown = view.shown
        if shown is None:
            return view, None
        view = replace(
            view,
            choices=certified_choices(connection, name),
            grouping=by,
            shares=shares_of(connection, shown, by),
            quarters=_quarters(connection, shown, services.clock.now()),
        )
        return view, spent_chart(connection, shown)


async def _quick_composition(services: Services, ledger: StoredLedger) -> Composition | None:
    """Return the composition if it is quick; otherwise it continues, for a later request."""
    task = asyncio.create_task(services.ledger.compose(ledger))
    # Errors are reported when the user requests the composition.
    task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
    await asyncio.wait({task}, timeout=COMPOSITION_WAIT_SECONDS)
    return task.result() if task.done() and task.exception() is None else None


def _amounts(connection: Connection, ledger: StoredLedger) -> tuple[dict[str, Any], ...]:
    """Return the parts of the budget's ε; ``start`` and ``share`` are percentages."""
    open_costs = repository.open_costs(connection, ledger.id, len(ledger.filter.orders))
    amounts = amounts_of(ledger, open_costs)
    if amounts is None:
        return ()
    total = max(float(sum(amounts.values())), 1e-300)
    lines, start = [], 0.0
    for name, meaning in AMOUNTS.items():
        share = 100 * float(amounts[name]) / total
        epsilon = f"{amounts[name].normalize():f}"
        line = {"name": name, "epsilon": epsilon, "meaning": meaning}
        lines.append({**line, "start": start, "share": share})
        start += share
    return tuple(lines)


def _not_conformant(connection: Connection, ledger: StoredLedger) -> tuple[dict[str, Any], ...]:
    """Return the latest runs on this ledger whose record does not conform."""
    failed = (
        select(run_events.c.run_id, run_events.c.at, run_events.c.body)
        .where(run_events.c.kind == "failed")
        .order_by(run_events.c.at.desc())
        .limit(MAX_SEARCHED_RUNS)
        .subquery()
    )
    query = (
        select(failed.c.run_id, failed.c.at, reservations.c.name)
        .join(runs, runs.c.id == failed.c.run_id)
        .join(reservations, reservations.c.id == runs.c.reservation_id)
        .where(reservations.c.ledger_id == ledger.id, failed.c.body.contains("not_conformant"))
        .order_by(failed.c.at.desc())
        .limit(MAX_NOT_CONFORMANT)
    )
    return tuple(dict(row) for row in connection.execute(query).mappings())
