"""``POST /v1/certificates/{id}/revocation``: a certificate that no longer counts."""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime
from typing import Annotated

from fastapi import APIRouter, Depends
from fastapi.responses import JSONResponse
from starlette.concurrency import run_in_threadpool

from affidavit.service.identity.access import needs
from affidavit.service.identity.actor import Actor, Scope
from affidavit.service.lifecycle.history import written
from affidavit.service.lifecycle.refusals import Impossible
from affidavit.service.lifecycle.wanted import MalformedDecision, read_revocation
from affidavit.service.openapi import answers, json_body, problems
from affidavit.service.problems import not_well_formed
from affidavit.service.routes.certificates import no_such
from affidavit.service.routes.refused import impossible
from affidavit.service.routing import CertificateId, JsonOnly, read_body
from affidavit.service.services import TheServices

router = APIRouter()


@router.post(
    "/v1/certificates/{certificate_id}/revocation",
    summary="Revoke a certificate",
    response_class=JSONResponse,
    status_code=201,
    responses={
        201: answers("It is revoked.", "Revocation"),
        200: answers("It was revoked before.", "Revocation"),
        **problems(400, 401, 403, 404, 408, 409, 415, 422, 503),
    },
    openapi_extra=json_body("WantedRevocation", "Why, by code and in words."),
)
async def revocation(
    actor: Annotated[Actor, needs(Scope.APPROVE, Scope.ADMIN)],
    services: TheServices,
    certificate_id: CertificateId,
    _: Annotated[None, Depends(JsonOnly("a revocation"))],
    body: Annotated[bytes, Depends(read_body)],
) -> JSONResponse:
    """For good: the current issue and all before it. One may revoke what one asked for."""
    try:
        wanted = read_revocation(body)
        at = datetime.now(UTC)
        found = await run_in_threadpool(services.revoke, certificate_id, wanted, actor, at)
    except MalformedDecision as error:
        raise not_well_formed("malformed_decision", error) from None
    except Impossible as error:
        raise impossible(error) from None
    if found is None:
        raise no_such(certificate_id)
    kept, new = found
    return JSONResponse({**asdict(kept), "at": written(kept.at)}, 201 if new else 200)
