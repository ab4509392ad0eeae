"""``/plans/new``: a plan typed into a form, checked as one types, and submitted.

One form posts to one path, and its button says what is to be done: ``validate`` reads the plan
and nothing more, ``check`` accounts it, ``certify`` submits it by the use case of the API.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import UTC, datetime
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from affidavit.plan import Plan, as_document
from affidavit.service import store
from affidavit.service.errors import AccountingUnavailable
from affidavit.service.identity.actor import Actor, Scope
from affidavit.service.openapi import ID_PATTERN, YAML
from affidavit.service.pages.access import page_actor
from affidavit.service.pages.answer import action, answer, page, see_other
from affidavit.service.pages.forms import Form, TheForm
from affidavit.service.pages.plan_form import START, PlanForm, check, yaml_of
from affidavit.service.pages.plan_view import Mode, NewPlan, answered, new_plan
from affidavit.service.pages.wishes import is_fragment
from affidavit.service.problems import unavailable
from affidavit.service.services import Services, TheServices
from affidavit.service.use_cases.draw_certificate import NoCurve, plan_of
from affidavit.service.use_cases.preview_plan import Pictures

router = APIRouter()

TEMPLATE = "new_plan.html"
LONGEST = 256 * 1024
"""Characters of a plan written as YAML."""
Submitter = Annotated[Actor, page_actor(Scope.SUBMIT)]


@page(router, "/plans/new", csv=False)
def form(
    request: Request,
    _: Submitter,
    services: TheServices,
    like: Annotated[str | None, Query(pattern=ID_PATTERN)] = None,
) -> Response:
    """An empty form, or the plan of the certificate ``like`` to be changed."""
    certificate = None if like is None else services.store.find(like)
    if certificate is not None:
        yaml = yaml_of(as_document(plan_of(certificate)))
        return _shown(request, _view(services, request, "yaml", PlanForm.of({}), yaml))
    begun = PlanForm.of(START)
    view = _view(services, request, "form", begun, begun.yaml)
    # Nobody has typed anything yet that could be wrong.
    return _shown(request, _untouched(view))


@action(router, "/plans/new")
async def act(request: Request, actor: Submitter, services: TheServices, sent: TheForm) -> Response:
    """What the button says."""
    mode: Mode = "yaml" if sent.get("mode") == "yaml" else "form"
    wanted = sent.get("do")
    form = _form(sent, more=1 if wanted == "more" else 0)
    yaml = "\n".join(sent.all("yaml"))[:LONGEST] if mode == "yaml" else form.yaml
    view = _view(services, request, "yaml" if wanted == "yaml" else mode, form, yaml)
    match wanted:
        case "certify":
            return await _certified(request, actor, services, view)
        case "check":
            return await _checked(request, actor, services, view)
        case "validate":
            return _shown(request, view, fragment="findings")
        case _:
            return _shown(request, _untouched(view))


async def _checked(request: Request, actor: Actor, services: Services, view: NewPlan) -> Response:
    """The page with what the plan would get; the answer alone where htmx asks for it."""
    plan = check(view.yaml).plan
    if plan is None:
        return _shown(request, view, fragment="answer", status=422)
    try:
        draft, drawn = await asyncio.gather(
            services.preview_plan.assess(plan, actor.name), _drawn(services, plan)
        )
    except AccountingUnavailable as error:
        trouble = unavailable(error)
        told = replace(view, trouble=_nothing_stored(trouble.detail))
        return _shown(request, told, fragment="answer", status=trouble.status)
    found = replace(
        view, answer=answered(draft), no_curve=drawn if isinstance(drawn, str) else None
    )
    return _shown(request, found, () if isinstance(drawn, str) else drawn, fragment="answer")


async def _drawn(services: Services, plan: Plan) -> Pictures | str:
    """The pictures, or why there are none; a curve that takes too long spoils no answer."""
    try:
        return await services.preview_plan.draw(plan)
    except NoCurve as error:
        return " ".join(reason.message for reason in error.reasons) or "there is no curve."
    except AccountingUnavailable as error:
        return _nothing_stored(unavailable(error).detail)


async def _certified(request: Request, actor: Actor, services: Services, view: NewPlan) -> Response:
    """To the certificate, whatever its verdict; back to the form where there is no plan."""
    if not view.readable:
        return _shown(request, view, status=422)
    asked = store.PlanRequest(
        requester=actor.name,
        received_at=datetime.now(UTC),
        content_type=YAML[0],
        body=view.yaml.encode("utf-8", "replace"),
    )
    try:
        found = await services.submit_plan(asked, "yaml")
    except AccountingUnavailable as error:
        trouble = unavailable(error)
        return _shown(request, replace(view, trouble=trouble.detail), status=trouble.status)
    if found.created:
        request.state.verdict = found.certificate.verdict
    return see_other(f"/certificates/{found.certificate.id}")


def _form(sent: Form, more: int) -> PlanForm:
    given = {name: texts[0] for name, texts in sent.fields.items() if texts}
    return PlanForm.of(given, more_releases=more)


def _view(services: Services, request: Request, mode: Mode, form: PlanForm, yaml: str) -> NewPlan:
    base = services.public_url or f"{request.url.scheme}://{request.url.netloc}"
    return new_plan(mode, form, yaml, check(yaml), base)


def _untouched(view: NewPlan) -> NewPlan:
    return replace(view, typed=False)


def _shown(
    request: Request,
    view: NewPlan,
    pictures: Pictures = (),
    *,
    fragment: str | None = None,
    status: int = 200,
) -> Response:
    drawn = {f"picture_{index}": svg for index, svg in enumerate(pictures)}
    # htmx leaves a page as it is for an answer that is an error.
    part = fragment is not None and is_fragment(request)
    view, told = replace(view, part=part), 200 if part else status
    return answer(request, view, template=TEMPLATE, drawn=drawn, fragment=fragment, status=told)


def _nothing_stored(detail: str) -> str:
    return detail.replace("nothing was stored. ", "")
