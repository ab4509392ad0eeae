"""``POST /v1/policies/simulate``: what a draft policy would change, before it is one."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import urlencode

from fastapi import APIRouter, Depends, Query
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field
from starlette.concurrency import run_in_threadpool

from affidavit.plan import Syntax
from affidavit.service.cursors import InvalidCursor
from affidavit.service.identity.access import needs
from affidavit.service.identity.actor import Actor, Scope
from affidavit.service.openapi import answers, body, problems
from affidavit.service.policies.activate import Unacceptable
from affidavit.service.policies.answers import simulation_answer
from affidavit.service.policies.rulebook import Overlap
from affidavit.service.policies.simulate import simulate
from affidavit.service.problems import invalid_cursor
from affidavit.service.routes.policies import policy_of, unacceptable
from affidavit.service.routing import read_body, syntax_of_body
from affidavit.service.services import Services, TheServices

router = APIRouter()


class Wanted(BaseModel):
    """Which certificates to look at."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    cursor: Annotated[str, Field(max_length=512)] | None = None
    limit: Annotated[int, Field(ge=1, le=200)] = 50


@router.post(
    "/v1/policies/simulate",
    summary="Simulate a policy",
    response_class=JSONResponse,
    responses={
        200: answers("What a page of certificates would become.", "Simulation"),
        **problems(400, 401, 403, 408, 409, 415, 422, 503),
    },
    openapi_extra=body("Policy", "A draft of a policy."),
)
async def simulation(
    _: Annotated[Actor, needs(Scope.ADMIN, Scope.AUDIT)],
    services: TheServices,
    wanted: Annotated[Wanted, Query()],
    syntax: Annotated[Syntax, Depends(syntax_of_body)],
    content: Annotated[bytes, Depends(read_body)],
) -> JSONResponse:
    """Judges what certificates say, newest first; nothing is accounted anew, nothing is kept."""
    return await run_in_threadpool(_simulated, services, wanted, content, syntax)


def _simulated(services: Services, wanted: Wanted, content: bytes, syntax: Syntax) -> JSONResponse:
    draft = policy_of(content, syntax)
    try:
        found = simulate(services.policies, services.store, draft, wanted.cursor, wanted.limit)
    except InvalidCursor as error:
        raise invalid_cursor(error) from None
    except Overlap as overlap:
        remedy = f"Take it out of a new version of {overlap.other} first."
        raise unacceptable(
            Unacceptable("policy_overlap", "/datasets", f"{overlap}.", remedy)
        ) from None
    following = None
    if found.next is not None:
        query = urlencode({"cursor": found.next, "limit": wanted.limit})
        following = f"/v1/policies/simulate?{query}"
    return JSONResponse(simulation_answer(draft, found, following))
