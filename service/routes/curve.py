"""``GET /v1/certificates/{id}/curve`` and ``/curve.svg``: a guarantee beside its one ε."""

from __future__ import annotations

from fastapi import APIRouter, Response
from starlette.concurrency import run_in_threadpool

from affidavit.service.errors import AccountingUnavailable
from affidavit.service.identity.access import Reader
from affidavit.service.openapi import JSON, answers, problems
from affidavit.service.problems import Problem, unavailable
from affidavit.service.routes.certificate import found
from affidavit.service.routes.parameters import CertificateId
from affidavit.service.services import Services, TheServices
from affidavit.service.use_cases.draw_curve import Drawn, NoCurve

SVG = "image/svg+xml"

router = APIRouter()


@router.get(
    "/v1/certificates/{certificate_id}/curve",
    summary="A certificate's curves",
    response_class=Response,
    responses={200: answers("The curves.", "Curves"), **problems(401, 403, 404, 422, 503)},
)
async def curve(_: Reader, services: TheServices, certificate_id: CertificateId) -> Response:
    """What ``affidavit curve --json`` prints: ε at any δ, attacks, beliefs, trade-off."""
    return Response((await _drawn(services, certificate_id)).document, media_type=JSON)


@router.get(
    "/v1/certificates/{certificate_id}/curve.svg",
    summary="A certificate's curves, drawn",
    response_class=Response,
    responses={
        200: {"description": "The picture.", "content": {SVG: {"schema": {"type": "string"}}}},
        **problems(401, 403, 404, 422, 503),
    },
)
async def picture(_: Reader, services: TheServices, certificate_id: CertificateId) -> Response:
    """What ``affidavit curve --svg`` draws."""
    drawn = await _drawn(services, certificate_id)
    return Response(
        drawn.svg,
        media_type=SVG,
        # A picture that is opened by itself is a document, and this one runs nothing.
        headers={"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'"},
    )


async def _drawn(services: Services, certificate_id: str) -> Drawn:
    certificate = await run_in_threadpool(found, services, certificate_id)
    try:
        return await services.draw_curve(certificate)
    except NoCurve as error:
        raise Problem(
            404,
            "no_curve",
            "this certificate has no curve: nothing is claimed about its plan, or at one δ only.",
            *error.reasons,
        ) from None
    except AccountingUnavailable as error:
        raise unavailable(error) from error
