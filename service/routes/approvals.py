"""``POST /v1/certificates/{id}/approvals``: approve or reject what awaits it."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

from fastapi import APIRouter, Depends, Response
from starlette.concurrency import run_in_threadpool

from affidavit.service.identity.access import needs
from affidavit.service.identity.actor import Actor, Scope
from affidavit.service.lifecycle.answer import answer_of
from affidavit.service.lifecycle.refusals import Impossible
from affidavit.service.lifecycle.wanted import MalformedDecision, read_decision
from affidavit.service.openapi import JSON, answers, json_body, problems
from affidavit.service.problems import not_well_formed
from affidavit.service.routes.certificates import no_such
from affidavit.service.routes.refused import impossible
from affidavit.service.routing import CertificateId, JsonOnly, read_body
from affidavit.service.services import TheServices

router = APIRouter()


@router.post(
    "/v1/certificates/{certificate_id}/approvals",
    summary="Approve or reject a certificate",
    response_class=Response,
    status_code=201,
    responses={
        201: answers("The decision is kept: the certificate as it stands now.", "Result"),
        **problems(400, 401, 403, 404, 408, 409, 415, 422, 503),
    },
    openapi_extra=json_body("WantedDecision", "About which envelope, and why."),
)
async def approvals(
    actor: Annotated[Actor, needs(Scope.APPROVE)],
    services: TheServices,
    certificate_id: CertificateId,
    _: Annotated[None, Depends(JsonOnly("a decision"))],
    body: Annotated[bytes, Depends(read_body)],
) -> Response:
    """With the last approval that is needed, the certificate is issued with all of them in it."""
    try:
        wanted = read_decision(body)
        at = datetime.now(UTC)
        found = await run_in_threadpool(services.approve, certificate_id, wanted, actor, at)
    except MalformedDecision as error:
        raise not_well_formed("malformed_decision", error) from None
    except Impossible as error:
        raise impossible(error) from None
    if found is None:
        raise no_such(certificate_id)
    return Response(answer_of(found.certificate), 201, media_type=JSON)
