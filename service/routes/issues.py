"""``/v1/certificates/{id}/issues``: every issue of a certificate, and a new one by decision."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

from fastapi import APIRouter, Path, Response
from fastapi.responses import JSONResponse

from affidavit.service.errors import AccountingUnavailable
from affidavit.service.identity.access import Reader, needs
from affidavit.service.identity.actor import Actor, Scope
from affidavit.service.lifecycle.answer import answer_of
from affidavit.service.lifecycle.history import history
from affidavit.service.lifecycle.refusals import Impossible
from affidavit.service.openapi import JSON, answers, problems
from affidavit.service.problems import unavailable
from affidavit.service.routes.certificates import no_such
from affidavit.service.routes.refused import impossible
from affidavit.service.routing import CertificateId
from affidavit.service.services import TheServices

router = APIRouter()

IssueNumber = Annotated[int, Path(ge=1, le=2**31 - 1, description="An issue's number, from 1.")]


@router.get(
    "/v1/certificates/{certificate_id}/issues",
    summary="All issues of a certificate",
    response_class=JSONResponse,
    responses={200: answers("The issues.", "Issues"), **problems(401, 403, 404, 422, 503)},
)
def issues(_: Reader, services: TheServices, certificate_id: CertificateId) -> JSONResponse:
    """The latest first, with approvals and revocation."""
    found = history(services.engine, certificate_id)
    if not found:
        raise no_such(certificate_id)
    return JSONResponse({"items": found})


@router.get(
    "/v1/certificates/{certificate_id}/issues/{issue}",
    summary="An issue of a certificate",
    response_class=Response,
    responses={200: answers("Its result.", "Result"), **problems(401, 403, 404, 422, 503)},
)
def one(
    _: Reader, services: TheServices, certificate_id: CertificateId, issue: IssueNumber
) -> Response:
    """What was answered, with its bundle as it was signed; a trusted one before another."""
    for item in services.store.issues(certificate_id):
        if item.issue == issue:
            return Response(answer_of(item), media_type=JSON)
    raise no_such(f"{certificate_id} with an issue {issue}")


@router.post(
    "/v1/certificates/{certificate_id}/issues",
    summary="Issue a revoked, rejected or expired certificate again",
    response_class=Response,
    status_code=201,
    responses={
        201: answers("The new issue.", "Result"),
        200: answers("Somebody was quicker: their new issue.", "Result"),
        **problems(401, 403, 404, 409, 422, 503),
    },
)
async def again(
    actor: Annotated[Actor, needs(Scope.APPROVE)],
    services: TheServices,
    certificate_id: CertificateId,
) -> Response:
    """A person's decision: sending the plan again never brings back what was revoked."""
    try:
        answer = await services.reissue(certificate_id, actor, datetime.now(UTC))
    except Impossible as error:
        raise impossible(error) from None
    except AccountingUnavailable as error:
        raise unavailable(error) from error
    if answer is None:
        raise no_such(certificate_id)
    status = 201 if answer.created else 200
    return Response(answer_of(answer.certificate), status, media_type=JSON)
