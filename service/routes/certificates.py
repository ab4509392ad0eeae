"""``/v1/certificates``: certify a plan, list certificates, and read one with its curves."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from pydantic import Field
from starlette.concurrency import run_in_threadpool

from affidavit.client import Page
from affidavit.plan import Name
from affidavit.service.certificate_models import (
    BundleDocument,
    CertificateSummary,
    CurvesDocument,
    Identifier,
    Result,
    Verdict,
)
from affidavit.service.identity.access import Reader, needs
from affidavit.service.identity.actor import Actor, Scope
from affidavit.service.lifecycle.issuance import result_document
from affidavit.service.lifecycle.status import Status
from affidavit.service.log.reader import with_inclusion
from affidavit.service.models import QueryModel
from affidavit.service.openapi import plan_body, problems
from affidavit.service.problems import Problem
from affidavit.service.routing import (
    JSON,
    CertificateId,
    Instant,
    next_page,
    read_body,
    syntax_of_body,
)
from affidavit.service.services import Services, TheServices
from affidavit.service.store import Filters, PlanRequest, StoredCertificate, list_certificates
from affidavit.service.use_cases.draw_certificate import CurvesText, NoCurve

SVG = "image/svg+xml"

router = APIRouter()


@router.post(
    "/v1/certificates",
    summary="Certify a plan",
    response_class=Response,
    status_code=201,
    responses={
        201: {
            "model": Result,
            "description": "Certified now; the verdict is in the body.",
        },
        200: {
            "model": Result,
            "description": "Certified before; the same certificate.",
        },
        **problems(400, 408, 415),
    },
    openapi_extra=plan_body(),
)
async def certify_plan(
    actor: Annotated[Actor, needs(Scope.SUBMIT)], http: Request, services: TheServices
) -> Response:
    """Every well-formed plan gets a signed certificate that is stored, whatever the verdict."""
    # Called, and not declared: most requests ask for what is known, and each further dependency
    # would take the framework a tenth as long as looking that up.
    syntax = await syntax_of_body(http)
    body = await read_body(http)
    request = PlanRequest(
        requester=actor.name,
        received_at=datetime.now(UTC),
        content_type=http.headers["content-type"][:255],
        body=body,
    )
    submission = await services.submit_plan(request, syntax)
    if submission.created:
        http.state.verdict = submission.certificate.verdict
    return Response(
        result_document(submission.certificate),
        201 if submission.created else 200,
        {"Location": f"/v1/certificates/{submission.certificate.id}"},
        media_type=JSON,
    )


class CertificateQuery(QueryModel):
    """The parameters; an unknown one is refused, for a misspelt filter would show all."""

    verdict: Verdict | None = None
    status: Status | None = None
    plan_digest: Identifier | None = None
    name: Name | None = None
    created_after: Instant | None = None
    created_before: Instant | None = None
    cursor: Annotated[str, Field(max_length=512)] | None = None
    limit: Annotated[int, Field(ge=1, le=200)] = 50


@router.get("/v1/certificates", summary="List certificates")
def certificates(
    _: Reader,
    services: TheServices,
    query: Annotated[CertificateQuery, Query()],
    response: Response,
) -> Page[CertificateSummary]:
    """Current issues, newest first; ``next`` is the path of the following page, or null."""
    filters = Filters(**query.model_dump(exclude={"cursor", "limit"}))
    page = list_certificates(services.store, filters, query.cursor, query.limit)
    items = [CertificateSummary.model_validate(row) for row in page.items]
    following = next_page(response, "/v1/certificates", query, cursor=page.next)
    return Page[CertificateSummary](items=items, next=following)


def _json(model: type[Any], description: str) -> dict[int | str, dict[str, Any]]:
    return {200: {"model": model, "description": description}, **problems(404)}


@router.get(
    "/v1/certificates/{certificate_id}",
    summary="Get a certificate",
    response_class=Response,
    responses=_json(Result, "The result."),
)
def certificate(_: Reader, services: TheServices, certificate_id: CertificateId) -> Response:
    """The result document with its bundle."""
    return Response(result_document(find(services, certificate_id)), media_type=JSON)


@router.get(
    "/v1/certificates/{certificate_id}/bundle",
    summary="Get a certificate's signed bundle",
    response_class=Response,
    responses=_json(BundleDocument, "The bundle."),
)
def bundle(_: Reader, services: TheServices, certificate_id: CertificateId) -> Response:
    """What ``affidavit verify`` reads, with its place in the log as soon as it has one."""
    stored = find(services, certificate_id)
    return Response(with_inclusion(services.log, stored.bundle), media_type=JSON)


@router.get(
    "/v1/certificates/{certificate_id}/curve",
    summary="Get a certificate's privacy curves",
    response_class=Response,
    responses=_json(CurvesDocument, "The curves."),
)
async def curve(_: Reader, services: TheServices, certificate_id: CertificateId) -> Response:
    """What ``affidavit curve --json`` prints: ε at any δ, attacks, beliefs, trade-off."""
    return Response((await _curves(services, certificate_id)).document, media_type=JSON)


@router.get(
    "/v1/certificates/{certificate_id}/curve.svg",
    summary="Get a chart of a certificate's privacy curves",
    response_class=Response,
    responses={
        200: {"description": "The chart.", "content": {SVG: {"schema": {"type": "string"}}}},
        **problems(404),
    },
)
async def chart(_: Reader, services: TheServices, certificate_id: CertificateId) -> Response:
    """What ``affidavit curve --svg`` draws."""
    curves = await _curves(services, certificate_id)
    return Response(
        curves.svg,
        media_type=SVG,
        # A picture that is opened by itself is a document, and this one runs nothing.
        headers={"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'"},
    )


async def _curves(services: Services, certificate_id: str) -> CurvesText:
    stored = await run_in_threadpool(find, services, certificate_id)
    try:
        return await services.draw_certificate.curves(stored)
    except NoCurve as error:
        raise Problem(
            404,
            "no_curve",
            "This certificate has no curve: nothing is claimed about its plan, or at one δ only.",
            *error.reasons,
        ) from None


def find(services: Services, certificate_id: str) -> StoredCertificate:
    """The stored certificate; raises the problem of there being none."""
    stored = services.store.find(certificate_id)
    if stored is None:
        raise no_such(certificate_id)
    return stored


def no_such(certificate_id: str) -> Problem:
    """The problem of there being no such certificate."""
    return Problem(
        404,
        "not_found",
        f"Certificate {certificate_id} not found; GET /v1/certificates lists them.",
    )
