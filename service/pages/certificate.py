"""``/certificates/{id}``: one certificate, its charts, and what is taken away from it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from starlette.concurrency import run_in_threadpool

from affidavit.certificate.charts import Chart, draw
from affidavit.plan import MalformedPlan, Reason
from affidavit.service.errors import AccountingUnavailable
from affidavit.service.lifecycle.issuing import statement_of
from affidavit.service.lifecycle.standing import Status
from affidavit.service.log.reader import with_inclusion
from affidavit.service.openapi import JSON
from affidavit.service.pages.answer import PRIVATE, answer, page
from affidavit.service.pages.certificate_pdf import certificate_pdf
from affidavit.service.pages.certificate_view import CertificateView, certificate_view
from affidavit.service.pages.certificates import PATH, Reader
from affidavit.service.pages.checklist import Item
from affidavit.service.pages.forms_of_a_view import Rows
from affidavit.service.pages.registry_entry import as_yaml, registry_entry
from affidavit.service.pages.wishes import is_fragment
from affidavit.service.problems import Problem, unavailable
from affidavit.service.routes.certificates import find
from affidavit.service.routing import CertificateId
from affidavit.service.services import Services, TheServices
from affidavit.service.store import StoredCertificate
from affidavit.service.use_cases.draw_certificate import Charts

ONE = f"{PATH}/{{certificate_id}}"
WIDTH, HEIGHT = 360, 300
LONGEST_CLAIM = 64
CHARTS = ("profile", "trade-off", "steps")
OWN_STYLE = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'"}
"""A chart as a file carries its colours in a style of its own, and runs nothing."""

router = APIRouter()


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosed:
    """What explains a claim; ``wrong`` where the claim itself cannot be read."""

    id: str
    name: str | None
    claimed: str
    summary: str | None
    certified: str | None
    explanations: tuple[dict[str, Any], ...]
    corrected: str | None
    wrong: str | None = None


@page(router, ONE)
async def certificate(
    request: Request, _: Reader, services: TheServices, certificate_id: CertificateId
) -> Response:
    """One certificate; charts that are not drawn yet are left to pictures of their own."""
    _kept, view = await run_in_threadpool(_read, services, certificate_id)
    charts = services.draw_certificate.charts_in_memory(view.id, view.steps_run)
    return answer(
        request,
        view,
        template="certificate.html",
        rows=Rows(Item, view.checklist),
        drawn={_variable(each): svg for each, svg in _inline(charts).items()},
        title=f"checklist-{certificate_id[7:19]}",
    )


@router.get(f"{ONE}/charts/{{name}}.svg", include_in_schema=False, response_class=Response)
async def chart(
    _: Reader, services: TheServices, certificate_id: CertificateId, name: str
) -> Response:
    """One chart as a file, drawn when it is asked for."""
    kept, view = await run_in_threadpool(_read, services, certificate_id)
    charts = dict(_named(await _drawn(services, kept, view)))
    if name not in charts:
        raise Problem(404, "no_chart", "there is no such chart of this certificate.")
    svg = draw(charts[name], width=WIDTH, height=HEIGHT, standalone=True)
    return Response(svg, media_type="image/svg+xml", headers={**PRIVATE, **OWN_STYLE})


@router.get(f"{ONE}/certificate.pdf", include_in_schema=False, response_class=Response)
async def pdf(_: Reader, services: TheServices, certificate_id: CertificateId) -> Response:
    """The page to print, file and pass on; the signed bundle is what proves it."""
    kept, view = await run_in_threadpool(_read, services, certificate_id)
    charts = await _drawn(services, kept, view) if view.guarantee is not None else None
    now = datetime.now(UTC)
    made = await run_in_threadpool(certificate_pdf, view, [each for _, each in _named(charts)], now)
    return _file(made, "application/pdf", f"certificate-{certificate_id[7:19]}.pdf")


@router.get(f"{ONE}/bundle.json", include_in_schema=False, response_class=Response)
def bundle(_: Reader, services: TheServices, certificate_id: CertificateId) -> Response:
    """What the API's route gives to tokens, for who is signed in. Raises ``Problem``."""
    made = with_inclusion(services.log, find(services, certificate_id).bundle)
    return _file(made, JSON, "bundle.json")


@router.get(f"{ONE}/registry.yaml", include_in_schema=False, response_class=Response)
def registry(_: Reader, services: TheServices, certificate_id: CertificateId) -> Response:
    """An entry for the OpenDP deployments registry, to be completed."""
    kept = find(services, certificate_id)
    predicate = statement_of(kept)["predicate"]
    if kept.verdict != "certified" or predicate["guarantee"] is None:
        raise Problem(
            409, "not_certified", "only a certified guarantee can be registered; this is none."
        )
    if kept.status is not Status.ACTIVE:
        stands = kept.status.value.replace("_", " ")
        raise Problem(409, "not_active", f"this certificate is {stands} and may not be used.")
    entry = registry_entry(predicate, published=kept.created_at, certificate=kept.id)
    return _file(as_yaml(entry), "application/yaml", f"{entry['url_slug']}.yaml")


@page(router, f"{ONE}/diagnosis", csv=False)
async def diagnosis(
    request: Request,
    _: Reader,
    services: TheServices,
    certificate_id: CertificateId,
    claimed: Annotated[str, Query(max_length=LONGEST_CLAIM)] = "",
) -> Response:
    """Which known mistakes lead from this plan to another ε that somebody claims."""
    kept = await run_in_threadpool(find, services, certificate_id)
    view = await _diagnosed(services, kept, claimed.strip())
    # A part of a page is shown only where it comes with no error.
    status = 422 if view.wrong is not None and not is_fragment(request) else 200
    return answer(request, view, template="diagnosis.html", fragment="diagnosis", status=status)


def _read(services: Services, certificate_id: str) -> tuple[StoredCertificate, CertificateView]:
    kept = find(services, certificate_id)
    return kept, certificate_view(services, kept, datetime.now(UTC))


async def _drawn(services: Services, kept: StoredCertificate, view: CertificateView) -> Charts:
    try:
        return await services.draw_certificate.charts(kept, view.steps_run)
    except AccountingUnavailable as error:
        raise unavailable(error) from error


def _named(charts: Charts | None) -> tuple[tuple[str, Chart], ...]:
    return () if charts is None else charts.charts


def _inline(charts: Charts | None) -> dict[str, str]:
    """SVG of what is drawn already; an empty text where a picture stands for it."""
    known = dict(_named(charts))
    return {
        name: draw(known[name], width=WIDTH, height=HEIGHT) if name in known else ""
        for name in CHARTS
    }


def _variable(name: str) -> str:
    return f"{name.replace('-', '_')}_svg"


def _file(content: bytes, media_type: str, name: str) -> Response:
    headers = {**PRIVATE, "Content-Disposition": f'attachment; filename="{name}"'}
    return Response(content, media_type=media_type, headers=headers)


async def _diagnosed(services: Services, kept: StoredCertificate, claimed: str) -> Diagnosed:
    plan = statement_of(kept)["predicate"]["plan"]
    about: dict[str, Any] = {"id": kept.id, "name": kept.name, "claimed": claimed}
    asked = {"plan": {**plan, "claim": None}, "claimed_epsilon": claimed}
    try:
        said = await services.diagnose_claim(json.dumps(asked).encode(), "json")
    except MalformedPlan as error:
        return Diagnosed(
            **about,
            summary=None,
            certified=None,
            explanations=(),
            corrected=None,
            wrong=_wrong(error.reasons),
        )
    except AccountingUnavailable as error:
        raise unavailable(error) from error
    return Diagnosed(
        **about,
        summary=said.get("summary"),
        certified=said["certified"]["verdict"],
        explanations=tuple(said["explanations"]),
        corrected=_corrected(said.get("corrected")),
    )


def _corrected(said: dict[str, Any] | None) -> str | None:
    """The noise that a right plan has, and what is certified with it."""
    if said is None:
        return None
    noise = [
        f"{item['name']} σ = {item['required']:.7g}"
        for item in (said.get("noise_multiplier") or {}).get("releases", ())
        if item.get("required") is not None
    ]
    return f"{', '.join(noise)}; {said['summary']}." if noise else f"{said['summary']}."


def _wrong(reasons: tuple[Reason, ...]) -> str:
    said = " ".join(f"{reason.message} {reason.remedy}".strip() for reason in reasons)
    return said.replace("claimed_epsilon", "the claim")
