"""``/certificates/{id}``: a certificate, its charts, downloads and the diagnosis of a claim."""

from __future__ import annotations

import json
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from starlette.concurrency import run_in_threadpool

from affidavit.plan import MalformedPlan
from affidavit.service.certificates.preview_plan import diagnose_request
from affidavit.service.certificates.store import StoredCertificate
from affidavit.service.core.problems import Problem
from affidavit.service.log.reader import with_inclusion
from affidavit.service.web.dependencies import Services, TheServices
from affidavit.service.web.openapi import JSON
from affidavit.service.web.pages.access import Reader
from affidavit.service.web.pages.certificate_view import CertificateView, certificate_view
from affidavit.service.web.pages.charts import chart_response, figure_of, meaning_figure
from affidavit.service.web.pages.documents import technical_documentation
from affidavit.service.web.pages.response import (
    download,
    is_fragment,
    page,
    respond,
)
from affidavit.service.web.pages.text import messages_of
from affidavit.service.web.routing import CertificateId
from affidavit.trust import statement_in

ONE = "/certificates/{certificate_id}"
WIDTH, HEIGHT = 360, 300
MAX_CLAIM_LENGTH = 64
CHARTS = ("profile", "trade-off", "steps")

router = APIRouter()


@page(router, ONE)
async def certificate(
    request: Request, _: Reader, services: TheServices, certificate_id: CertificateId
) -> Response:
    """Show a certificate; charts that are not cached are loaded as images."""
    view = await run_in_threadpool(_read, services, certificate_id)
    in_memory = services.draw_certificate.charts_in_memory(certificate_id, view.steps_run)
    charts = {} if in_memory is None else in_memory.charts
    svgs = {
        f"{name.replace('-', '_')}_svg": figure_of(charts[name], width=WIDTH, height=HEIGHT)
        if name in charts
        else ""
        for name in CHARTS
    }
    svgs["meaning_svg"] = meaning_figure(view.predicate["guarantee"])
    return respond(
        request,
        view,
        template="certificate.html",
        charts=svgs,
    )


@router.get(f"{ONE}/charts/{{name}}.svg", include_in_schema=False, response_class=Response)
async def chart(
    request: Request, _: Reader, services: TheServices, certificate_id: CertificateId, name: str
) -> Response:
    """Draw one chart as a file."""
    view = await run_in_threadpool(_read, services, certificate_id)
    charts = (await services.draw_certificate.charts(view.certificate, view.steps_run)).charts
    if name not in charts:
        raise Problem(404, "no_chart", "this certificate has no such chart.")
    return chart_response(request, charts[name], width=WIDTH, height=HEIGHT)


@router.get(f"{ONE}/documentation.md", include_in_schema=False, response_class=Response)
def documentation(_: Reader, services: TheServices, certificate_id: CertificateId) -> Response:
    """Download the technical documentation as Markdown, to be completed."""
    view = _read(services, certificate_id)
    content = technical_documentation(view, services.clock.now())
    name = f"documentation-{certificate_id[7:19]}.md"
    return download(content, "text/markdown; charset=utf-8", name)


@router.get(f"{ONE}/bundle.json", include_in_schema=False, response_class=Response)
def bundle(_: Reader, services: TheServices, certificate_id: CertificateId) -> Response:
    """Download the bundle with a browser session; the API returns the same bytes."""
    content = with_inclusion(services.log, services.store.get(certificate_id).bundle)
    return download(content, JSON, "bundle.json")


@page(router, f"{ONE}/diagnosis")
async def diagnosis(
    request: Request,
    _: Reader,
    services: TheServices,
    certificate_id: CertificateId,
    claimed: Annotated[str, Query(max_length=MAX_CLAIM_LENGTH)] = "",
) -> Response:
    """Show which known mistakes lead from this plan to a claimed ε."""
    stored = await run_in_threadpool(services.store.get, certificate_id)
    view = await _diagnose(services, stored, claimed.strip())
    # htmx ignores error responses.
    status = 422 if view["wrong"] is not None and not is_fragment(request) else 200
    return respond(request, view, template="diagnosis.html", fragment="diagnosis", status=status)


async def _diagnose(services: Services, stored: StoredCertificate, claimed: str) -> dict[str, Any]:
    """Return the mistakes that explain a claim, or ``wrong`` if the claim is invalid."""
    plan = statement_in(stored.bundle)["predicate"]["plan"]
    view: dict[str, Any] = {"id": stored.id, "name": stored.name, "claimed": claimed}
    view |= dict.fromkeys(("answer", "summary", "certified", "corrected", "wrong"))
    view["explanations"] = ()
    question = {"plan": {**plan, "claim": None}, "claimed_epsilon": claimed}
    try:
        content = json.dumps(question).encode()
        result = await diagnose_request(services.pool, content, "json")
    except MalformedPlan as error:
        wrong = messages_of(error.reasons).replace("claimed_epsilon", "the claim")
        return {**view, "wrong": wrong}
    return view | {
        "answer": result["answer"],
        "summary": result["summary"],
        "certified": result["certified"]["verdict"],
        "explanations": result["explanations"],
        "corrected": _correction(result.get("corrected")),
    }


def _correction(corrected: dict[str, Any] | None) -> str | None:
    """Return the noise that reaches the target, and what is certified with it."""
    if corrected is None:
        return None
    noise = [
        f"{release['name']} σ = {release['required']:.7g}"
        for release in (corrected.get("noise_multiplier") or {}).get("releases", ())
        if release.get("required") is not None
    ]
    return "; ".join(
        [", ".join(noise), f"{corrected['summary']}."] if noise else [f"{corrected['summary']}."]
    )


def _read(services: Services, certificate_id: str) -> CertificateView:
    return certificate_view(services, services.store.get(certificate_id), services.clock.now())
