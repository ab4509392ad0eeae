"""Evidence files: of a run that ended, or of a certificate, for an auditor."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Response
from fastapi.responses import StreamingResponse

from affidavit.evidence import write_evidence
from affidavit.service.identity.actor import Actor
from affidavit.service.identity.scopes import Scope
from affidavit.service.runs.wire_models import RunId
from affidavit.service.web.access import needs
from affidavit.service.web.dependencies import TheServices
from affidavit.service.web.openapi import problems
from affidavit.service.web.routing import CertificateId, JsonRoute

BYTES = "application/octet-stream"
_FILE = {
    "description": "The evidence file, a zip; `affidavit verify-evidence` checks it offline.",
    "content": {BYTES: {"schema": {"type": "string", "format": "binary"}}},
}

router = APIRouter(route_class=JsonRoute)
Auditor = Annotated[Actor, needs(Scope.AUDIT)]


@router.get(
    "/v1/runs/{run_id}/evidence",
    summary="Get the evidence of a run",
    response_class=StreamingResponse,
    responses={200: _FILE, **problems(404, 409, 503)},
)
async def evidence(_: Auditor, services: TheServices, run_id: RunId) -> Response:
    """Everything about a run that ended, with the log entries about it and their salts."""
    files = await services.evidence.of_run(run_id, services.clock.now())
    return StreamingResponse(write_evidence(files), media_type=BYTES)


@router.get(
    "/v1/certificates/{certificate_id}/evidence",
    summary="Get the evidence of a certificate",
    response_class=StreamingResponse,
    responses={200: _FILE, **problems(404, 409, 503)},
)
async def evidence_of_issue(
    _: Auditor, services: TheServices, certificate_id: CertificateId
) -> Response:
    """Everything about a certificate's current issue, with the log entries about it."""
    files = await services.evidence.of_certificate(certificate_id, services.clock.now())
    return StreamingResponse(write_evidence(files), media_type=BYTES)
