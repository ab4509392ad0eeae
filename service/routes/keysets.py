"""``/v1/keyset`` and ``/v1/keysets``: the keyset as the root keys signed it, and a new one."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

from fastapi import APIRouter, Depends, Path
from fastapi.responses import JSONResponse, Response
from starlette.concurrency import run_in_threadpool

from affidavit.certificate import KeysetError
from affidavit.plan import Reason
from affidavit.service.identity.access import needs, open_to_all
from affidavit.service.identity.actor import Actor, Scope
from affidavit.service.openapi import JSON, answers, json_body, problems
from affidavit.service.problems import Problem
from affidavit.service.routing import JsonOnly, read_body
from affidavit.service.services import TheServices

router = APIRouter()

Version = Annotated[int, Path(ge=1, le=2**53 - 1, description="A version of the keyset.")]


@router.get(
    "/v1/keyset",
    summary="The newest keyset",
    dependencies=[open_to_all()],
    response_class=Response,
    responses={200: answers("The keyset.", "SignedKeyset"), **problems(404, 503)},
)
def keyset(services: TheServices) -> Response:
    """Trust it by roots that you have from elsewhere, not because it is served here."""
    return _served(services.keysets.newest(), "no keyset was published here yet.")


@router.get(
    "/v1/keysets/{version}",
    summary="A version of the keyset",
    dependencies=[open_to_all()],
    response_class=Response,
    responses={200: answers("The keyset.", "SignedKeyset"), **problems(404, 422, 503)},
)
def keyset_version(services: TheServices, version: Version) -> Response:
    """For verifiers that missed versions in which the roots changed."""
    return _served(services.keysets.find(version), f"there is no version {version}.")


@router.post(
    "/v1/keysets",
    summary="Publish a keyset",
    status_code=201,
    response_class=JSONResponse,
    responses={
        201: answers("Published now.", "PublishedKeyset"),
        200: answers("It is the newest already.", "PublishedKeyset"),
        **problems(400, 401, 403, 408, 409, 415, 503),
    },
    openapi_extra=json_body("SignedKeyset", "A keyset that enough root keys have signed."),
)
async def publish(
    actor: Annotated[Actor, needs(Scope.ADMIN)],
    services: TheServices,
    _json: Annotated[None, Depends(JsonOnly("a keyset"))],
    content: Annotated[bytes, Depends(read_body)],
) -> JSONResponse:
    """Kept only if it follows the version before and that one's roots have signed it."""
    try:
        found, new = await run_in_threadpool(
            services.keysets.publish, content, actor=actor.name, at=datetime.now(UTC)
        )
    except KeysetError as error:
        raise _refused(error) from None
    said = {"version": found.keyset.version, "digest": found.digest}
    return JSONResponse(said, 201 if new else 200)


def _served(document: bytes | None, otherwise: str) -> Response:
    if document is None:
        raise Problem(404, "not_found", otherwise)
    return Response(document, media_type=JSON)


def _refused(error: KeysetError) -> Problem:
    reason = Reason(code=error.code, pointer="", message=error.message, remedy=error.remedy)
    status = 400 if error.code == "keyset_malformed" else 409
    return Problem(status, error.code, str(error), reason)
