"""``GET /v1/certificates/{id}``: the answer that was given, byte for byte."""

from __future__ import annotations

from fastapi import APIRouter, Response

from affidavit.service.identity.access import Reader
from affidavit.service.lifecycle.answer import answer_of
from affidavit.service.openapi import JSON, answers, problems
from affidavit.service.problems import Problem
from affidavit.service.routes.parameters import CertificateId
from affidavit.service.services import Services, TheServices
from affidavit.service.store import StoredCertificate

router = APIRouter()


@router.get(
    "/v1/certificates/{certificate_id}",
    summary="A certificate by its id",
    response_class=Response,
    responses={200: answers("The result.", "Result"), **problems(401, 403, 404, 422, 503)},
)
def certificate(_: Reader, services: TheServices, certificate_id: CertificateId) -> Response:
    """The result document with its bundle."""
    return Response(answer_of(found(services, certificate_id)), media_type=JSON)


def found(services: Services, certificate_id: str) -> StoredCertificate:
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
        f"there is no certificate {certificate_id}; GET /v1/certificates lists them.",
    )
