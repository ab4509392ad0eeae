"""``/compare``: up to four plans side by side, and what each change adds to ε.

The plans belong to the certificates in the URL, or are two pasted YAML documents. Each is compared
with the first one. They are accounted like previews, and nothing is stored.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from starlette.concurrency import run_in_threadpool

from affidavit.assessment import (
    Assessment,
    ChangeEffect,
    Contribution,
    PlanComparison,
)
from affidavit.assessment.charts import (
    Band,
    Chart,
    Line,
)
from affidavit.plan import Plan, Reason, as_document
from affidavit.service.certificates.certificate_curves import plan_of
from affidavit.service.core.errors import AccountingUnavailable
from affidavit.service.core.problems import Problem
from affidavit.service.web.dependencies import Services, TheServices
from affidavit.service.web.openapi import ID_PATTERN
from affidavit.service.web.pages.access import Reader
from affidavit.service.web.pages.certificates import certified_choices
from affidavit.service.web.pages.charts import chart_response
from affidavit.service.web.pages.errors import unavailable
from affidavit.service.web.pages.forms import SubmittedForm
from affidavit.service.web.pages.plan_form import (
    label_of,
    parse,
    yaml_of,
)
from affidavit.service.web.pages.response import (
    action,
    page,
    respond,
)
from affidavit.service.web.pages.text import (
    ADJACENCIES,
    draft_sentence,
    humanize,
    query,
    round_up,
)

router = APIRouter()

MAX_PLAN_LENGTH = 256 * 1024
"""Characters of a pasted plan."""
MAX_VALUE_LENGTH = 200
"""Characters of a value on the page."""
MAX_PLANS = 4
WIDTH, HEIGHT = 560, 340
"""Size of the chart in pixels."""
Ids = Annotated[
    list[Annotated[str, Query(pattern=rf"{ID_PATTERN}|^$")]],
    Query(alias="id", max_length=MAX_PLANS),
]


@dataclass(frozen=True, kw_only=True, slots=True)
class ChangeLine:
    """A field that differs from the first plan, and its effect on ε.

    ``alone`` is the bound with this change alone. ``contribution`` is the number of the
    contribution to ε that the change belongs to, ``adds`` its size, and ``reaches`` and ``noise``
    are the bound and the joint noise after it.
    """

    plan: str
    field: str
    pointer: str
    first: str | None
    second: str | None
    alone: str | None
    why_not: str | None
    contribution: int | None = None
    adds: str | None = None
    reaches: str | None = None
    noise: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """The view: the plans, and the comparison of each with the first.

    ``choices`` are the ids and names of certificates to choose from.
    """

    ids: tuple[str, ...] = ()
    choices: tuple[tuple[str, str], ...] = ()
    profile: str | None = None
    first_yaml: str = ""
    second_yaml: str = ""
    first_reasons: tuple[Reason, ...] = ()
    second_reasons: tuple[Reason, ...] = ()
    missing: tuple[str, ...] = ()
    trouble: str | None = None
    sides: tuple[dict[str, Any], ...] = ()
    pairs: tuple[dict[str, Any], ...] = ()


@page(router, "/compare")
async def compare_certificates(
    request: Request,
    _: Reader,
    services: TheServices,
    requested: Ids = [],  # noqa: B006
) -> Response:
    """Compare the certificates ``id``, or show the form."""
    ids = tuple(dict.fromkeys(filter(None, requested)))
    plans = {id_: await run_in_threadpool(_plan, services, id_) for id_ in ids}
    existing = {id_: plan for id_, plan in plans.items() if plan is not None}
    texts = [yaml_of(as_document(plan)) for plan in existing.values()]
    view = Comparison(
        ids=ids,
        choices=await run_in_threadpool(_choices, services),
        profile=f"/compare/profile.svg{query(id=ids)}",
        first_yaml=texts[0] if texts else "",
        second_yaml=texts[1] if len(texts) > 1 else "",
        missing=tuple(id_ for id_ in ids if id_ not in existing),
    )
    if view.missing or len(existing) < 2:
        return _respond(request, view, status=404 if view.missing else 200)
    return await _compare(request, services, view, tuple(existing.values()))


@router.get("/compare/profile.svg", include_in_schema=False, response_class=Response)
async def profiles(request: Request, _: Reader, services: TheServices, requested: Ids) -> Response:
    """Draw the privacy profiles of certificates in one chart, as a file."""
    stored = [await run_in_threadpool(services.store.get, id_) for id_ in requested if id_]
    results = await asyncio.gather(
        *(services.draw_certificate.charts(item, None) for item in stored)
    )
    profiles = [result.charts.get("profile") for result in results]
    labels = _labels([item.name for item in stored])
    labelled = [(label, chart) for label, chart in zip(labels, profiles, strict=True) if chart]
    if not labelled:
        raise Problem(404, "no_chart", "these certificates have no privacy curve.")
    return chart_response(request, _overlay(labelled), width=WIDTH, height=HEIGHT)


@action(router, "/compare")
async def compare_texts(
    request: Request, _: Reader, services: TheServices, form: SubmittedForm
) -> Response:
    """Compare two pasted plans."""
    texts = [form.get(name)[:MAX_PLAN_LENGTH] for name in ("first", "second")]
    first, second = map(parse, texts)
    view = Comparison(
        first_yaml=texts[0],
        second_yaml=texts[1],
        first_reasons=first.reasons,
        second_reasons=second.reasons,
    )
    if first.plan is None or second.plan is None:
        return _respond(request, view, status=422)
    return await _compare(request, services, view, (first.plan, second.plan))


async def _compare(
    request: Request, services: Services, view: Comparison, plans: Sequence[Plan]
) -> Response:
    first, *others = plans
    try:
        results = [await services.preview_plan.compare(first, other) for other in others]
    except AccountingUnavailable as error:
        trouble, status = unavailable(error)
        return _respond(request, replace(view, trouble=trouble), status=status)
    labels = _labels([plan.name for plan in plans])
    ids = view.ids or (None,) * len(plans)
    assessments = (results[0].first, *(result.second for result in results))
    sides = tuple(map(_side, labels, ids, assessments))
    pairs = tuple(map(_pair, labels[1:], results))
    return _respond(request, replace(view, sides=sides, pairs=pairs))


def _labels(names: Sequence[str | None]) -> list[str]:
    """Return a label for each plan, with a number if it has no name or shares it."""
    return [
        name if name and names.count(name) == 1 else f"{name or 'plan'} ({number})"
        for number, name in enumerate(names, 1)
    ]


def _side(label: str, certificate: str | None, assessment: Assessment) -> dict[str, Any]:
    """Return a plan's guarantee."""
    return {
        "label": label,
        "certificate": certificate,
        "verdict": assessment.verdict,
        "sentence": draft_sentence(assessment),
        "epsilon": assessment.epsilon_text,
        "delta": None if assessment.delta is None else round_up(assessment.delta.upper),
        "adjacency": assessment.adjacency,
        "unit": assessment.unit,
        "noise": assessment.joint_text,
    }


def _pair(label: str, result: PlanComparison) -> dict[str, Any]:
    """Return the comparison of a plan with the first; ``obstacles`` prevent a ranking."""
    parts = result.contributions
    sentence = result.sentence.replace("ε ≤ ", "ε\u00a0≤\u00a0")
    for code, name in ADJACENCIES.items():
        sentence = sentence.replace(code, name)
    total = sum((part.difference for part in parts), Decimal(0))
    return {
        "label": label,
        "sentence": sentence,
        "ranking": result.ranking,
        "obstacles": result.obstacles,
        "start": result.first.epsilon_text,
        "difference": _signed(total) if parts else None,
        "end": result.second.epsilon_text,
        "lines": tuple(
            _lines(label, {item.change.pointer: item for item in result.effects}, parts)
        ),
    }


def _lines(
    label: str, effects: dict[str, ChangeEffect], parts: Sequence[Contribution]
) -> Iterator[ChangeLine]:
    """Yield the changes of each contribution in order, then those without effect."""
    for number, part in enumerate(parts, 1):
        for change in part.changes:
            yield replace(
                _line(label, effects.pop(change.pointer)),
                contribution=number,
                adds=_signed(part.difference),
                reaches=part.after.epsilon_text,
                noise=part.after.joint_text,
            )
    for effect in effects.values():
        yield _line(label, effect)


def _line(label: str, effect: ChangeEffect) -> ChangeLine:
    pointer, (first, second) = effect.change.pointer, effect.change.texts(MAX_VALUE_LENGTH)
    return ChangeLine(
        plan=label,
        field=label_of(pointer),
        pointer=pointer,
        first=humanize(first),
        second=humanize(second),
        alone=effect.epsilon_text,
        why_not=effect.reasons_text or None,
        noise=effect.noise_text,
    )


def _signed(number: Decimal) -> str:
    """Return a difference with its sign.

    >>> _signed(Decimal("-0.50")), _signed(Decimal(3))
    ('−0.5', '+3')
    """
    if not number:
        return "0"
    return ("−" if number < 0 else "+") + f"{abs(number).normalize():f}"


def _overlay(profiles: Sequence[tuple[str, Chart]]) -> Chart:
    """Return a chart of the upper bounds of all profiles, with the axes of the first."""
    lines = tuple(
        Line(name=label, points=tuple((x, upper) for x, _, upper in mark.points))
        for label, chart in profiles
        for mark in chart.marks
        if isinstance(mark, Band)
    )
    return replace(
        profiles[0][1], title="Privacy profiles", description="δ against ε.", marks=lines
    )


def _choices(services: Services) -> tuple[tuple[str, str], ...]:
    with services.engine.connect() as connection:
        return certified_choices(connection)


def _plan(services: Services, certificate_id: str) -> Plan | None:
    certificate = services.store.find(certificate_id)
    return None if certificate is None else plan_of(certificate)


def _respond(request: Request, view: Comparison, status: int = 200) -> Response:
    return respond(request, view, template="compare.html", status=status)
