"""``POST /v1/diagnoses``: a plan and a claim in, what explains the claim out."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends
from fastapi.responses import JSONResponse

from affidavit.plan import Syntax
from affidavit.service.certificate_models import Diagnosis
from affidavit.service.identity.access import Reader
from affidavit.service.openapi import body
from affidavit.service.routing import read_body, syntax_of_body
from affidavit.service.services import TheServices

router = APIRouter()


@router.post(
    "/v1/diagnoses",
    summary="Diagnose a claim",
    response_class=JSONResponse,
    responses={
        200: {
            "model": Diagnosis,
            "description": "What is certified, and which mistakes explain the claim.",
        },
    },
    openapi_extra=body("DiagnosisRequest", "A training plan and the number claimed for it."),
)
async def diagnose_claim(
    _: Reader,
    services: TheServices,
    syntax: Annotated[Syntax, Depends(syntax_of_body)],
    content: Annotated[bytes, Depends(read_body)],
) -> JSONResponse:
    """Information, not a guarantee: it is neither signed nor stored."""
    return JSONResponse(await services.diagnose_claim(content, syntax))
