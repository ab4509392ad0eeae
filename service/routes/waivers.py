"""``/v1/waivers``: exceptions to a policy's rule, granted by somebody else and for a time."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

from fastapi import APIRouter, Depends, Path, Query
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field
from starlette.concurrency import run_in_threadpool

from affidavit.certificate.policy import DIGEST_PATTERN
from affidavit.service.identity.access import needs
from affidavit.service.identity.actor import Actor, Scope
from affidavit.service.openapi import answers, json_body, problems
from affidavit.service.policies.activate import Unacceptable
from affidavit.service.policies.answers import waiver_answer
from affidavit.service.policies.waive import NotYours, grant, revoke
from affidavit.service.policies.wanted import MalformedWaiver, read_waiver
from affidavit.service.problems import Problem, not_well_formed
from affidavit.service.routes.policies import Judged, unacceptable
from affidavit.service.routing import JsonOnly, read_body
from affidavit.service.services import Services, TheServices

router = APIRouter()

WaiverId = Annotated[
    str, Path(pattern=DIGEST_PATTERN, description="``sha256:`` and 64 lower-case hex digits.")
]


class Why(BaseModel):
    """Why a waiver is revoked."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    reason: Annotated[str, Field(min_length=1, max_length=2000, pattern=r"^[^\x00]*$")]


@router.get(
    "/v1/waivers",
    summary="All waivers",
    response_class=JSONResponse,
    responses={200: answers("Every waiver, newest first.", "Waivers"), **problems(401, 403, 503)},
)
def waivers(_: Judged, services: TheServices) -> JSONResponse:
    """Expired and revoked ones too."""
    now = datetime.now(UTC)
    found = [waiver_answer(item, now) for item in services.policies.granted()]
    return JSONResponse({"waivers": found})


@router.get(
    "/v1/waivers/{waiver_id}",
    summary="A waiver by its id",
    response_class=JSONResponse,
    responses={200: answers("The waiver.", "Waiver"), **problems(401, 403, 404, 422, 503)},
)
def waiver(_: Judged, services: TheServices, waiver_id: WaiverId) -> JSONResponse:
    """As it was signed, and what became of it."""
    found = services.policies.waiver(waiver_id)
    if found is None:
        raise _not_found(waiver_id)
    return JSONResponse(waiver_answer(found, datetime.now(UTC)))


@router.post(
    "/v1/waivers",
    summary="Grant a waiver",
    status_code=201,
    response_class=JSONResponse,
    responses={
        201: answers("Granted.", "Waiver"),
        **problems(400, 401, 403, 408, 409, 415, 503),
    },
    openapi_extra=json_body(
        "WantedWaiver", "For which rule of which policy, for what, who answers for it, and why."
    ),
)
async def new_waiver(
    actor: Annotated[Actor, needs(Scope.APPROVE)],
    _: Annotated[None, Depends(JsonOnly("a waiver"))],
    services: TheServices,
    content: Annotated[bytes, Depends(read_body)],
) -> JSONResponse:
    """Four eyes: not for a plan that one asked for, and not where one is the owner."""
    return await run_in_threadpool(_granted, actor, services, content)


@router.delete(
    "/v1/waivers/{waiver_id}",
    summary="Revoke a waiver",
    response_class=JSONResponse,
    responses={200: answers("It is revoked.", "Waiver"), **problems(401, 403, 404, 422, 503)},
)
def revoked_waiver(
    actor: Annotated[Actor, needs(Scope.APPROVE)],
    services: TheServices,
    waiver_id: WaiverId,
    why: Annotated[Why, Query()],
) -> JSONResponse:
    """The certificates that rest on it are revoked with it; the waiver itself stays on record."""
    now = datetime.now(UTC)
    found = revoke(services.policies, waiver_id, why.reason, actor=actor.name, at=now)
    if found is None:
        raise _not_found(waiver_id)
    return JSONResponse(waiver_answer(found, now))


def _granted(actor: Actor, services: Services, content: bytes) -> JSONResponse:
    now = datetime.now(UTC)
    try:
        wanted = read_waiver(content)
        key = services.keyring.current()
        kept = grant(services.policies, wanted, key, actor=actor.name, at=now)
    except MalformedWaiver as error:
        raise not_well_formed("malformed_waiver", error) from None
    except NotYours as error:
        raise Problem(403, "four_eyes", f"{error}; ask another approver.") from None
    except Unacceptable as error:
        raise unacceptable(error) from None
    return JSONResponse(
        waiver_answer(kept, now), 201, {"Location": f"/v1/waivers/{kept.waiver.id}"}
    )


def _not_found(waiver_id: str) -> Problem:
    return Problem(404, "not_found", f"there is no waiver {waiver_id}; GET /v1/waivers lists them.")
