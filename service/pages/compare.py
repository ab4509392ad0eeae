"""``/compare``: two plans side by side, and which single change moved ε most.

The two are certificates, by their ids in the URL, or plans pasted as YAML. They are accounted
as drafts are, in the bounded processes; nothing is stored.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from starlette.concurrency import run_in_threadpool

from affidavit.certificate import Assessment, ChangeRow, PlanComparison
from affidavit.plan import Plan, Reason, as_document
from affidavit.service.errors import AccountingUnavailable
from affidavit.service.openapi import ID_PATTERN
from affidavit.service.pages.access import Reader
from affidavit.service.pages.errors import unavailable
from affidavit.service.pages.forms import SubmittedForm
from affidavit.service.pages.plan_form import parse, yaml_of
from affidavit.service.pages.renderers import Rows, view_of
from affidavit.service.pages.response import action, page, respond
from affidavit.service.pages.text import ADJACENCIES, up
from affidavit.service.pages.verdicts import draft_sentence
from affidavit.service.services import Services, TheServices
from affidavit.service.use_cases.draw_certificate import plan_of

router = APIRouter()

LONGEST = 256 * 1024
"""Characters of a pasted plan."""
SHOWN = 200
"""Characters of a value on the page."""
Id = Annotated[str | None, Query(pattern=rf"{ID_PATTERN}|^$")]


@dataclass(frozen=True, kw_only=True, slots=True)
class Side:
    """One of the two plans with its guarantee."""

    certificate: str | None
    name: str | None
    verdict: str
    sentence: str
    epsilon: str | None
    delta: str | None
    adjacency: str
    unit: str
    noise: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """The page; if the plans cannot be ranked, ``obstacles`` instead of ``ranking``."""

    first: str = ""
    second: str = ""
    first_yaml: str
    second_yaml: str
    first_reasons: tuple[Reason, ...] = ()
    second_reasons: tuple[Reason, ...] = ()
    missing: tuple[str, ...] = ()
    trouble: str | None = None
    sides: tuple[Side, ...] = ()
    sentence: str | None = None
    ranking: str | None = None
    obstacles: tuple[Reason, ...] = ()
    rows: tuple[ChangeRow, ...] = ()
    furthest: str | None = None
    furthest_on_noise: str | None = None
    act_together: bool = False


@page(router, "/compare")
async def compare_certificates(
    request: Request, _: Reader, services: TheServices, first: Id = None, second: Id = None
) -> Response:
    """The certificates ``first`` and ``second`` compared, or the form that takes two ids."""
    ids = first or "", second or ""
    plans = [await run_in_threadpool(_plan, services, id_) if id_ else None for id_ in ids]
    missing = tuple(id_ for id_, plan in zip(ids, plans, strict=True) if id_ and plan is None)
    texts = ["" if plan is None else yaml_of(as_document(plan)) for plan in plans]
    view = Comparison(
        first=ids[0],
        second=ids[1],
        first_yaml=texts[0],
        second_yaml=texts[1],
        missing=missing,
    )
    if plans[0] is None or plans[1] is None:
        return _respond(request, view, status=404 if missing else 200)
    return await _compare(request, services, view, plans[0], plans[1])


@action(router, "/compare")
async def compare_texts(
    request: Request, _: Reader, services: TheServices, form: SubmittedForm
) -> Response:
    """Two pasted plans compared."""
    texts = [form.get(name)[:LONGEST] for name in ("first", "second")]
    first, second = map(parse, texts)
    view = Comparison(
        first_yaml=texts[0],
        second_yaml=texts[1],
        first_reasons=first.reasons,
        second_reasons=second.reasons,
    )
    if first.plan is None or second.plan is None:
        return _respond(request, view, status=422)
    return await _compare(request, services, view, first.plan, second.plan)


async def _compare(
    request: Request, services: Services, view: Comparison, first: Plan, second: Plan
) -> Response:
    try:
        result = await services.preview_plan.compare(first, second)
    except AccountingUnavailable as error:
        trouble, status = unavailable(error)
        return _respond(request, replace(view, trouble=trouble), status=status)
    return _respond(request, replace(view, **_result(view, result, (first, second))))


def _result(view: Comparison, result: PlanComparison, plans: tuple[Plan, Plan]) -> dict[str, Any]:
    strongest, noisiest = result.strongest, result.strongest_on_noise
    return {
        "sides": (
            _side(view.first, plans[0], result.first),
            _side(view.second, plans[1], result.second),
        ),
        "sentence": _in_words(result.sentence),
        "ranking": result.ranking,
        "obstacles": result.obstacles,
        "rows": result.rows(SHOWN),
        "furthest": None if strongest is None else strongest.change.pointer,
        "furthest_on_noise": None if noisiest is None else noisiest.change.pointer,
        "act_together": result.act_together,
    }


def _in_words(sentence: str) -> str:
    for code, name in ADJACENCIES.items():
        sentence = sentence.replace(code, name)
    return sentence


def _side(certificate: str, plan: Plan, assessment: Assessment) -> Side:
    return view_of(
        Side,
        assessment,
        certificate=certificate or None,
        name=plan.name,
        sentence=draft_sentence(assessment),
        epsilon=assessment.epsilon_text,
        delta=None if assessment.delta is None else up(assessment.delta.upper),
        noise=assessment.joint_text,
    )


def _plan(services: Services, certificate_id: str) -> Plan | None:
    certificate = services.store.find(certificate_id)
    return None if certificate is None else plan_of(certificate)


def _respond(request: Request, view: Comparison, status: int = 200) -> Response:
    rows = Rows(ChangeRow, view.rows)
    return respond(request, view, template="compare.html", rows=rows, status=status)
