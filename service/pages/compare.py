"""``/compare``: two plans side by side, and which single change moved ε.

The two are certificates, by their ids in the URL, or plans that were pasted as YAML. They are
accounted as drafts are, in the bounded processes; nothing is stored.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from starlette.concurrency import run_in_threadpool

from affidavit.accountants import decimal_up
from affidavit.certificate import Alone, Assessment, PlansCompared
from affidavit.plan import ABSENT, Plan, Reason, as_document
from affidavit.service.errors import AccountingUnavailable
from affidavit.service.identity.actor import Actor, Scope
from affidavit.service.openapi import ID_PATTERN
from affidavit.service.pages.access import page_actor
from affidavit.service.pages.answer import action, answer, page
from affidavit.service.pages.forms import TheForm
from affidavit.service.pages.forms_of_a_view import Rows
from affidavit.service.pages.plan_form import check, yaml_of
from affidavit.service.pages.plan_view import sentence_of
from affidavit.service.pages.templating import words
from affidavit.service.problems import unavailable
from affidavit.service.services import Services, TheServices
from affidavit.service.use_cases.draw_certificate import plan_of

router = APIRouter()

TEMPLATE = "compare.html"
DIGITS = 6
LONGEST = 256 * 1024
"""Characters of a plan that is pasted."""
SHOWN = 200
"""Characters of a value that are shown."""
MOVED = {
    "raised": "raised",
    "lowered": "lowered",
    "unmoved": "not moved",
    "not_told_apart": "not told apart",
}
Viewer = Annotated[Actor, page_actor(Scope.SUBMIT, Scope.APPROVE, Scope.AUDIT)]
Id = Annotated[str | None, Query(pattern=rf"{ID_PATTERN}|^$")]


@dataclass(frozen=True, kw_only=True, slots=True)
class ChangeRow:
    """A change, and what it does alone to the first plan; numbers are rounded up."""

    field: str
    first: str | None
    second: str | None
    verdict: str | None
    epsilon: str | None
    noise: str | None
    epsilon_moved: str | None
    noise_moved: str | None
    furthest: bool
    why_not: str | None


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
    """The page; without ``ranking`` and with ``obstacles`` where the two are not ranked."""

    first: str
    second: str
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
async def compare(
    request: Request, _: Viewer, services: TheServices, first: Id = None, second: Id = None
) -> Response:
    """The certificates ``first`` and ``second`` compared, or the form that asks for two."""
    ids = first or "", second or ""
    plans = [await run_in_threadpool(_plan, services, item) if item else None for item in ids]
    missing = tuple(name for name, plan in zip(ids, plans, strict=True) if name and plan is None)
    texts = ["" if plan is None else yaml_of(as_document(plan)) for plan in plans]
    blank = Comparison(
        first=ids[0],
        second=ids[1],
        first_yaml=texts[0],
        second_yaml=texts[1],
        missing=missing,
    )
    if plans[0] is None or plans[1] is None:
        return _shown(request, blank, status=404 if missing else 200)
    return await _compared(request, services, blank, plans[0], plans[1])


@action(router, "/compare")
async def compare_texts(
    request: Request, _: Viewer, services: TheServices, sent: TheForm
) -> Response:
    """Two plans that were pasted."""
    texts = [sent.get(name)[:LONGEST] for name in ("first", "second")]
    checked = [check(text) for text in texts]
    blank = Comparison(
        first="",
        second="",
        first_yaml=texts[0],
        second_yaml=texts[1],
        first_reasons=checked[0].reasons,
        second_reasons=checked[1].reasons,
    )
    if checked[0].plan is None or checked[1].plan is None:
        return _shown(request, blank, status=422)
    return await _compared(request, services, blank, checked[0].plan, checked[1].plan)


async def _compared(
    request: Request, services: Services, blank: Comparison, first: Plan, second: Plan
) -> Response:
    try:
        found = await services.preview_plan.compare(first, second)
    except AccountingUnavailable as error:
        problem = unavailable(error)
        told = problem.detail.replace("nothing was stored. ", "")
        return _shown(request, replace(blank, trouble=told), status=problem.status)
    return _shown(request, replace(blank, **_found(blank, found, (first, second))))


def _found(blank: Comparison, found: PlansCompared, plans: tuple[Plan, Plan]) -> dict[str, Any]:
    strongest, noisiest = found.strongest, found.strongest_on_noise
    return {
        "sides": tuple(
            _side(certificate or None, plan, each)
            for certificate, plan, each in zip(
                (blank.first, blank.second), plans, (found.first, found.second), strict=True
            )
        ),
        "sentence": found.sentence.replace("add_remove", words("add_remove")),
        "ranking": found.ranking,
        "obstacles": found.obstacles,
        "rows": tuple(_row(item, item in (strongest, noisiest)) for item in found.alone),
        "furthest": None if strongest is None else strongest.change.pointer,
        "furthest_on_noise": None if noisiest is None else noisiest.change.pointer,
        "act_together": found.act_together,
    }


def _side(certificate: str | None, plan: Plan, found: Assessment) -> Side:
    bounded = found.epsilon is not None and found.verdict != "refused"
    return Side(
        certificate=certificate,
        name=plan.name,
        verdict=found.verdict,
        sentence=sentence_of(found),
        epsilon=_epsilon(found) if bounded else None,
        delta=None if found.delta is None else decimal_up(found.delta.upper, DIGITS),
        adjacency=found.adjacency,
        unit=found.unit,
        noise=None if found.joint is None else f"{found.joint:.6g}",
    )


def _row(each: Alone, furthest: bool) -> ChangeRow:
    found = each.assessment
    return ChangeRow(
        field=each.change.pointer,
        first=_value(each.change.before),
        second=_value(each.change.after),
        verdict=None if found is None else found.verdict,
        epsilon=None if found is None else _epsilon(found),
        noise=None if found is None or found.joint is None else f"{found.joint:.6g}",
        epsilon_moved=MOVED.get(each.moved or ""),
        noise_moved=MOVED.get(each.noise_moved or ""),
        furthest=furthest,
        why_not=" ".join(reason.message for reason in each.reasons) or None,
    )


def _epsilon(found: Assessment) -> str | None:
    if found.epsilon is None or found.verdict in ("refused", "undecided"):
        return None
    return decimal_up(found.epsilon.upper, DIGITS)


def _value(value: Any) -> str | None:
    if value is ABSENT:
        return None
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 1]}…"


def _plan(services: Services, certificate_id: str) -> Plan | None:
    found = services.store.find(certificate_id)
    return None if found is None else plan_of(found)


def _shown(request: Request, view: Comparison, status: int = 200) -> Response:
    return answer(
        request,
        view,
        template=TEMPLATE,
        rows=Rows(ChangeRow, view.rows),
        status=status,
    )
