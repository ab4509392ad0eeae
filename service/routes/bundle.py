"""``GET /v1/certificates/{id}/bundle``: the signed bytes, for offline verification."""

from __future__ import annotations

from fastapi import APIRouter, Response

from affidavit.service.identity.access import Reader
from affidavit.service.log.reader import with_inclusion
from affidavit.service.openapi import JSON, answers, problems
from affidavit.service.routes.certificate import found
from affidavit.service.routes.parameters import CertificateId
from affidavit.service.services import TheServices

router = APIRouter()


@router.get(
    "/v1/certificates/{certificate_id}/bundle",
    summary="A certificate's signed bundle",
    response_class=Response,
    responses={200: answers("The bundle.", "Bundle"), **problems(401, 403, 404, 422, 503)},
)
def bundle(_: Reader, services: TheServices, certificate_id: CertificateId) -> Response:
    """What ``affidavit verify`` reads, with its place in the log as soon as it has one."""
    bundle = with_inclusion(services.log, found(services, certificate_id).bundle)
    return Response(bundle, media_type=JSON)
