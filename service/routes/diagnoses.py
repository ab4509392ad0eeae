"""``POST /v1/diagnoses``: a plan and a claim in, what explains the claim out."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends
from fastapi.responses import JSONResponse

from affidavit.plan import Syntax
from affidavit.service.bodies import read_body
from affidavit.service.errors import AccountingUnavailable
from affidavit.service.identity.access import Reader
from affidavit.service.openapi import answers, body, problems
from affidavit.service.problems import unavailable
from affidavit.service.routes.submit import syntax_of_body
from affidavit.service.services import TheServices

router = APIRouter()


@router.post(
    "/v1/diagnoses",
    summary="Diagnose a claim",
    response_class=JSONResponse,
    responses={
        200: answers("What is certified, and which mistakes explain the claim.", "Diagnosis"),
        **problems(400, 401, 403, 408, 415, 503),
    },
    openapi_extra=body("DiagnosisRequest", "A training plan and the number claimed for it."),
)
async def diagnoses(
    _: Reader,
    services: TheServices,
    syntax: Annotated[Syntax, Depends(syntax_of_body)],
    content: Annotated[bytes, Depends(read_body)],
) -> JSONResponse:
    """Information, not a guarantee: it is neither signed nor stored."""
    try:
        return JSONResponse(await services.diagnose_claim(content, syntax))
    except AccountingUnavailable as error:
        raise unavailable(error) from error
