"""``/datasets``: the budget of each data set, what is spent of it, and a form to set one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from pydantic import TypeAdapter, ValidationError
from sqlalchemy import Connection

from affidavit.plan import Name
from affidavit.service.dependencies import Services, TheServices
from affidavit.service.errors import MalformedRequest
from affidavit.service.identity.actor import Actor, CommandContext, Scope
from affidavit.service.ledger import repository
from affidavit.service.ledger.models import BudgetRequest, summary_of
from affidavit.service.ledger.state import LedgerScope, StoredLedger
from affidavit.service.pages.access import Anyone, page_actor
from affidavit.service.pages.forms import SubmittedForm, number
from affidavit.service.pages.response import (
    ListPage,
    Rows,
    action,
    page,
    respond,
    see_other,
    view_of,
)
from affidavit.service.pages.text import down, messages_of, up
from affidavit.service.policies.policy_set import PolicySet
from affidavit.service.problems import Problem
from affidavit.service.routes.ledgers import change_budget

router = APIRouter()

LISTED = 50
"""Ledgers on a page."""
NEARLY = 0.8
"""The share of a budget from which on it is nearly spent."""
FIELDS = ("dataset", "unit", "adjacency", "epsilon", "delta", "reason")
LONGEST = 64
"""Characters of a field that a link fills in."""
BudgetRequester = Annotated[Actor, page_actor(Scope.SUBMIT, Scope.APPROVE, Scope.ADMIN)]
_NAME: TypeAdapter[str] = TypeAdapter(Name)
ScopeName = Annotated[
    str | None, Query(pattern=r"^[A-Za-z0-9._-]{1,64}/[a-z_]{1,16}/[a-z_]{1,32}$")
]


@dataclass(frozen=True, kw_only=True, slots=True)
class LedgerLine:
    """A ledger in one line; ε and δ are decimals rounded outward, ``share`` is of the budget."""

    dataset: str
    unit: str
    adjacency: str
    epsilon: str
    delta: str
    spent: str
    sum: str
    sum_delta: str
    remaining: str
    share: float
    runs: int
    exhausted: bool
    policy: str

    @property
    def nearly(self) -> bool:
        """Whether it is exhausted or nearly spent."""
        return self.exhausted or self.share >= NEARLY

    @property
    def percent(self) -> int:
        """The share in whole per cent, rounded up, for a bar of 100."""
        return min(100, math.ceil(100 * self.share))


@dataclass(frozen=True, kw_only=True, slots=True)
class DatasetsPage:
    """A page of ledgers, and the form that sets a budget, as it was filled in.

    Where more than one of the ``administrators`` has to ask, ``noted`` says who else is needed.
    """

    datasets: ListPage[LedgerLine]
    values: Mapping[str, str]
    wrong: str | None = None
    noted: str | None = None
    administrators: int = 1


@page(router, "/datasets")
def datasets(
    request: Request, _: Anyone, services: TheServices, after: ScopeName = None
) -> Response:
    """One line for each data set, privacy unit and adjacency that has a budget.

    The form of a budget has the values of the query's fields.
    """
    values = {name: request.query_params.get(name, "")[:LONGEST] for name in FIELDS}
    return _respond(request, services, after, values=values)


@action(router, "/datasets")
def set_budget(
    request: Request, actor: BudgetRequester, services: TheServices, form: SubmittedForm
) -> Response:
    """Set a version of a budget, or ask administrators for it, by the use case of the API."""
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
    except Problem as problem:
        if problem.code != "second_person_needed":
            raise
        return _respond(request, services, values=values, noted=problem.detail)
    return see_other("/datasets", done="set")


def ledger_page(
    connection: Connection, rules: PolicySet, cursor: str | None
) -> ListPage[LedgerLine]:
    """The page of ledgers after ``cursor``, the scope of one as text, by name."""
    after = None
    if cursor is not None:
        dataset, unit, adjacency = cursor.split("/")
        after = LedgerScope(dataset=dataset, unit=unit, adjacency=adjacency)
    ledgers = repository.ledgers_after(connection, after, LISTED + 1)
    lines = tuple(ledger_line(ledger, rules) for ledger in ledgers[:LISTED])
    more = len(ledgers) > LISTED
    return ListPage(lines=lines, next=str(ledgers[LISTED - 1].scope) if more else None)


def ledger_line(ledger: StoredLedger, rules: PolicySet) -> LedgerLine:
    """A ledger in one line."""
    summary = summary_of(ledger)
    spent = ledger.spent_epsilon()
    share = spent / float(ledger.state.budget.epsilon)
    policy = rules.policy_of(ledger.scope.dataset)
    return view_of(
        LedgerLine,
        ledger.scope,
        epsilon=ledger.state.budget.epsilon,
        delta=ledger.state.budget.delta,
        spent=up(spent),
        sum=up(summary.spent.sum.epsilon),
        sum_delta=up(summary.spent.sum.delta),
        remaining=down(summary.remaining.epsilon),
        share=share if math.isfinite(share) else 1e9,
        runs=ledger.state.runs,
        exhausted=summary.exhausted,
        policy=f"{policy.name} v{policy.version}",
    )


def _respond(
    request: Request, services: Services, after: str | None = None, **form: Any
) -> Response:
    """The ledgers after ``after``, and the ``form``."""
    with services.engine.connect() as connection:
        ledgers = ledger_page(connection, services.policies.policy_set(), after)
    view = DatasetsPage(datasets=ledgers, administrators=services.keysets.administrators(), **form)
    rows, status = Rows(LedgerLine, ledgers.lines), 422 if view.wrong else 200
    return respond(request, view, template="datasets.html", rows=rows, status=status)
