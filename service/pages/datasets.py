"""``/datasets``: budgets, what was spent of each, and what is left (``dataset_view``)."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from pydantic import TypeAdapter, ValidationError
from starlette.concurrency import run_in_threadpool

from affidavit.plan import Name
from affidavit.service.command import CommandContext
from affidavit.service.identity.actor import Actor, Scope
from affidavit.service.ledger.names import DatasetName
from affidavit.service.ledger.rows import KeptLedger
from affidavit.service.ledger.rows import Scope as LedgerScope
from affidavit.service.ledger.wanted import read_budget
from affidavit.service.openapi import ID_PATTERN
from affidavit.service.pages.access import page_actor
from affidavit.service.pages.answer import action, answer, data, page, see_other
from affidavit.service.pages.dataset_view import (
    Dataset,
    Datasets,
    EntryLine,
    LedgerLine,
    dataset,
    datasets,
    is_known,
    spent_chart,
    with_composed,
    with_forecast,
)
from affidavit.service.pages.forms import Form, TheForm
from affidavit.service.pages.forms_of_a_view import Rows
from affidavit.service.pages.wishes import DATA
from affidavit.service.problems import Problem
from affidavit.service.requests import answered
from affidavit.service.services import Services, TheServices
from affidavit.service.wanted import MalformedRequest

router = APIRouter()

Concerned = Annotated[
    Actor, page_actor(Scope.SUBMIT, Scope.APPROVE, Scope.AUDIT, Scope.WORK, Scope.ADMIN)
]
Admin = Annotated[Actor, page_actor(Scope.ADMIN)]
LedgerName = Annotated[str | None, Query(pattern=r"^[a-z_]{1,16}/[a-z_]{1,32}$")]
ScopeName = Annotated[
    str | None, Query(pattern=r"^[A-Za-z0-9._-]{1,64}/[a-z_]{1,16}/[a-z_]{1,32}$")
]

ONE = "/datasets/{name}"
FIELDS = ("dataset", "unit", "adjacency", "epsilon", "delta", "reason")
BLANK = dict.fromkeys(FIELDS, "")
_NAME: TypeAdapter[str] = TypeAdapter(Name)


@dataclass(frozen=True, kw_only=True, slots=True)
class DatasetsPage:
    """The page of ledgers, and the form that sets a budget, as it was filled in."""

    datasets: Datasets
    values: Mapping[str, str]
    wrong: str | None = None


@page(router, "/datasets")
def every(
    request: Request, _: Concerned, services: TheServices, after: ScopeName = None
) -> Response:
    """One line for each data set, privacy unit and adjacency that has a budget."""
    return _listed(request, services, after)


@action(router, "/datasets")
async def set_budget(
    request: Request, actor: Admin, services: TheServices, sent: TheForm
) -> Response:
    """Set a version of a budget, by the use case of the API."""
    return await run_in_threadpool(_set, request, actor, services, sent)


@page(router, ONE)
@data(router, f"{ONE}/ledger")
async def one(
    request: Request,
    _: Concerned,
    services: TheServices,
    name: DatasetName,
    ledger: LedgerName = None,
    before: Annotated[int | None, Query(ge=1, le=2**31 - 1)] = None,
    composed: Annotated[str | None, Query(max_length=8)] = None,
    certificate: Annotated[str | None, Query(pattern=rf"{ID_PATTERN}|^$")] = None,
) -> Response:
    """One data set: its ledger with entries, chart and forecast, and its policy.

    ``composed`` has the non-adaptive composition worked out, which takes accounting;
    ``certificate`` asks how many more runs of that one fit. Where there is no budget yet, the
    page says how one is set, for a data set that a policy or a certificate names.

    A data set may be called ``a.csv``, and its page is there: for certain, the data of one are
    at ``/ledger.json`` and ``/ledger.csv`` below its page.
    """
    whole = await run_in_threadpool(_whole_name, request, services, name)
    view, kept, chart = await run_in_threadpool(_read, services, whole or name, ledger, before)
    if kept is not None and composed:
        view = with_composed(view, await answered(services.desk.composed(kept)))
    if kept is not None and certificate:
        view = with_forecast(view, await answered(services.desk.forecast(kept, certificate)))
    drawn = {} if chart is None else {"chart": chart}
    return answer(
        request,
        view,
        template="dataset.html",
        rows=Rows(EntryLine, view.entries),
        drawn=drawn,
        fragment="composed",
        title=name,
        as_page=whole is not None,
    )


def _set(request: Request, actor: Actor, services: Services, sent: Form) -> Response:
    values = {name: sent.get(name) for name in FIELDS}
    asked = {name: _typed(name, text) for name, text in values.items() if name != "dataset"}
    try:
        wanted = read_budget(json.dumps(asked).encode())
        name = _NAME.validate_python(values["dataset"])
    except MalformedRequest as error:
        wrong = " ".join(f"{reason.message} {reason.remedy}" for reason in error.reasons)
        return _listed(request, services, None, values, wrong)
    except ValidationError:
        wrong = "A data set's name has 1 to 64 letters, digits, dots, dashes and underscores."
        return _listed(request, services, None, values, wrong)
    scope = LedgerScope(dataset=name, unit=wanted.unit, adjacency=wanted.adjacency)
    call = CommandContext.of(actor, request, None, wanted)
    services.ledger.set_budget(scope, *wanted.decimals(), wanted.reason, call)
    return see_other("/datasets", done="set")


def _typed(name: str, text: str) -> object:
    """A number where one was typed; the reader refuses what is none by its name."""
    if name not in ("epsilon", "delta"):
        return text
    try:
        found = float(text)
    except ValueError:
        return text
    return found if math.isfinite(found) else text


def _listed(
    request: Request,
    services: Services,
    after: str | None,
    values: Mapping[str, str] = BLANK,
    wrong: str | None = None,
) -> Response:
    rules = services.policies.rulebook()
    with services.engine.connect() as connection:
        found = datasets(connection, rules, after)
    view = DatasetsPage(datasets=found, values=values, wrong=wrong)
    return answer(
        request,
        view,
        template="datasets.html",
        rows=Rows(LedgerLine, found.lines),
        status=422 if wrong else 200,
    )


def _whole_name(request: Request, services: Services, name: str) -> str | None:
    """The data set whose name is that of ``name`` and the ending of its data, if there is one."""
    ending = request.scope["route"].path.removeprefix(ONE)
    if ending not in DATA:
        return None
    rules, whole = services.policies.rulebook(), f"{name}{ending}"
    with services.engine.connect() as connection:
        return whole if is_known(connection, rules, whole) else None


def _read(
    services: Services, name: str, ledger: str | None, before: int | None
) -> tuple[Dataset, KeptLedger | None, str | None]:
    """The page's view, the ledger on it and its chart. Raises ``Problem``."""
    rules = services.policies.rulebook()
    unit, _, adjacency = (ledger or "").partition("/")
    with services.engine.connect() as connection:
        view, kept = dataset(connection, rules, name, (unit, adjacency) if ledger else None, before)
        if kept is None and (ledger is not None or not is_known(connection, rules, name)):
            raise Problem(404, "not_found", f"there is no budget for {name} here.")
        return view, kept, None if kept is None else spent_chart(connection, kept)
