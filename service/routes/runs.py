"""``/v1/runs``: asking for runs, looking at them, and stopping them."""

from __future__ import annotations

from typing import Annotated, Literal
from urllib.parse import urlencode

from fastapi import APIRouter, Query, Request
from fastapi import Path as PathParameter
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field

from affidavit.plan import Name
from affidavit.service.command import CommandContext, IdempotencyKey
from affidavit.service.cursors import InvalidCursor
from affidavit.service.identity.access import needs
from affidavit.service.identity.actor import Actor, Scope
from affidavit.service.openapi import ID_PATTERN, answers, json_body, problems
from affidavit.service.problems import Problem, invalid_cursor
from affidavit.service.requests import JsonBody, answered, in_thread, read
from affidavit.service.routes.ledgers import BudgetReader
from affidavit.service.routing import Instant
from affidavit.service.runs.document import run_document
from affidavit.service.runs.rows import Filters
from affidavit.service.runs.wanted import read_cancellation, read_run
from affidavit.service.services import TheServices
from affidavit.service.wanted import UUID

router = APIRouter()

RunId = Annotated[str, PathParameter(pattern=UUID, description="As the run was answered.")]


class WantedRuns(BaseModel):
    """The parameters; an unknown one is refused, for a misspelt filter would show all."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    state: Literal["queued", "claimed", "running", "settled", "failed", "cancelled"] | None = None
    queue: Name | None = None
    certificate: Annotated[str, Field(pattern=ID_PATTERN)] | None = None
    requested_by: Annotated[str, Field(pattern=r"^[^\x00-\x1f]{1,255}$")] | None = None
    requested_after: Instant | None = None
    requested_before: Instant | None = None
    cursor: Annotated[str, Field(max_length=512)] | None = None
    limit: Annotated[int, Field(ge=1, le=200)] = 50


@router.post(
    "/v1/runs",
    status_code=201,
    summary="Request a run",
    response_class=JSONResponse,
    responses={
        200: answers("The run that an earlier request with this key led to.", "Run"),
        201: answers("Queued, with its cost reserved.", "Run"),
        **problems(400, 401, 403, 404, 408, 409, 413, 415, 422, 503),
    },
    openapi_extra=json_body("WantedRun", "The certificate, and what to train on."),
)
async def request(
    actor: Annotated[Actor, needs(Scope.SUBMIT)],
    http: Request,
    services: TheServices,
    content: JsonBody,
    idempotency_key: IdempotencyKey = None,
) -> JSONResponse:
    """A worker of its queue will claim it. Nothing about privacy can be chosen here."""
    wanted = read(read_run, content)
    call = CommandContext.of(actor, http, idempotency_key, wanted)
    asked = services.runs.request(wanted, call, anybodys=actor.may(Scope.ADMIN))
    run, created = await answered(asked)
    headers = {"Location": f"/v1/runs/{run.id}"}
    return JSONResponse(run_document(run), 201 if created else 200, headers)


@router.get(
    "/v1/runs",
    summary="Runs",
    response_class=JSONResponse,
    responses={200: answers("A page, the latest first.", "Runs"), **problems(401, 403, 422, 503)},
)
def runs(
    _: BudgetReader, services: TheServices, wanted: Annotated[WantedRuns, Query()]
) -> JSONResponse:
    """Latest first; ``next`` is the path of the following page, or null."""
    filters = Filters(
        **wanted.model_dump(exclude={"certificate", "cursor", "limit"}),
        certificate_id=wanted.certificate,
    )
    try:
        found, cursor = services.runs.queue.page(filters, wanted.cursor, wanted.limit)
    except InvalidCursor as error:
        raise invalid_cursor(error) from None
    following = None
    if cursor is not None:
        given = wanted.model_dump(mode="json", exclude_none=True) | {"cursor": cursor}
        following = f"/v1/runs?{urlencode(given)}"
    headers = {} if following is None else {"Link": f'<{following}>; rel="next"'}
    return JSONResponse(
        {"runs": [run_document(item) for item in found], "next": following}, headers=headers
    )


@router.get(
    "/v1/runs/{run_id}",
    summary="A run",
    response_class=JSONResponse,
    responses={200: answers("As it stands now.", "Run"), **problems(401, 403, 404, 422, 503)},
)
async def run(_: BudgetReader, services: TheServices, run_id: RunId) -> JSONResponse:
    """What was asked for, who works on it, how far it is, and how it ended."""
    return JSONResponse(run_document(await in_thread(lambda: services.runs.queue.find(run_id))))


@router.post(
    "/v1/runs/{run_id}/cancel",
    summary="Cancel a run",
    response_class=JSONResponse,
    responses={
        200: answers("As it stands now.", "Run"),
        **problems(400, 401, 403, 404, 408, 409, 413, 415, 422, 503),
    },
    openapi_extra=json_body("WantedCancellation", "Why.", required=False),
)
async def cancel(
    actor: Annotated[Actor, needs(Scope.SUBMIT, Scope.ADMIN)],
    http: Request,
    services: TheServices,
    run_id: RunId,
    content: JsonBody,
) -> JSONResponse:
    """One that waits costs nothing; one that began is stopped, and charged in full."""
    wanted = read(read_cancellation, content)
    queue = services.runs.queue
    found = await in_thread(lambda: queue.find(run_id))
    if found.requested_by != actor.name and not actor.may(Scope.ADMIN):
        raise Problem(403, "not_yours", "somebody else asked for it; ask them.")
    call = CommandContext.of(actor, http, None, wanted)
    stopped = await in_thread(lambda: queue.cancel(run_id, wanted.reason, call))
    return JSONResponse(run_document(stopped))
