"""``GET /readyz``: the service can do its work, and with whose key it signs."""

from __future__ import annotations

from fastapi import APIRouter
from fastapi.responses import JSONResponse

from affidavit.service.identity.access import open_to_all
from affidavit.service.openapi import answers, problems
from affidavit.service.problems import Problem
from affidavit.service.services import TheServices
from affidavit.service.use_cases.check_readiness import check_readiness

router = APIRouter()


@router.get(
    "/readyz",
    dependencies=[open_to_all()],
    summary="Can the service do its work",
    response_class=JSONResponse,
    responses={200: answers("It can.", "Ready"), **problems(503)},
)
def readyz(services: TheServices) -> JSONResponse:
    """``signer.development`` is true while certificates are signed by nobody's key."""
    problem = services.sequencer.problem
    found = check_readiness(
        services.engine, services.head, services.signers, problem, services.log_watch
    )
    if found.reasons or found.key is None:
        raise Problem(503, "not_ready", str(found.reasons[0]), *found.reasons)
    signer = {"key_id": found.key.key_id, "development": found.key.development}
    warnings = [warning.as_dict() for warning in services.identities.warnings()]
    return JSONResponse(
        {"status": "ready", "schema": found.revision, "signer": signer, "warnings": warnings}
    )
