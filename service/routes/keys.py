"""``GET /v1/keys``: the public keys that the service signs with or has signed with."""

from __future__ import annotations

from fastapi import APIRouter
from fastapi.responses import JSONResponse

from affidavit.service.identity.access import open_to_all
from affidavit.service.openapi import answers, problems
from affidavit.service.services import TheServices

router = APIRouter()


@router.get(
    "/v1/keys",
    dependencies=[open_to_all()],
    summary="Public keys",
    response_class=JSONResponse,
    responses={200: answers("Public key records.", "Keys"), **problems(503)},
)
def keys(services: TheServices) -> JSONResponse:
    """Where a key is both stored and in the directory, the directory's record counts."""
    kept = [*services.store.keys(), *services.keyring.public_records()]
    return JSONResponse({"keys": list({record["key_id"]: record for record in kept}.values())})
