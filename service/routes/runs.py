"""``/v1/runs``: request, list, watch and cancel runs."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Header, Query, Request, Response
from fastapi.responses import StreamingResponse
from pydantic import Field
from starlette.concurrency import run_in_threadpool

from affidavit.client import Page, Run, RunState
from affidavit.plan import Name
from affidavit.service.command import CommandContext, IdempotencyKey
from affidavit.service.cursors import InvalidCursor
from affidavit.service.identity.access import needs
from affidavit.service.identity.actor import Actor, Scope
from affidavit.service.models import QueryModel
from affidavit.service.openapi import ID_PATTERN, problems
from affidavit.service.problems import Problem, invalid_cursor
from affidavit.service.routes.ledgers import BudgetReader
from affidavit.service.routing import Instant, JsonRoute, next_page
from affidavit.service.runs.events import EVENT_ID_PATTERN, MOST_WATCHERS, EventId
from affidavit.service.runs.locked_run import LockedRun
from affidavit.service.runs.models import CancelRequest, RunId, RunRequest, run_of
from affidavit.service.services import TheServices

MEDIA_TYPE = "text/event-stream"

router = APIRouter(route_class=JsonRoute)

NO_REASON = CancelRequest()
"""What an empty body means."""


class RunQuery(QueryModel):
    """The parameters; an unknown one is refused, for a misspelt filter would show all."""

    state: RunState | None = None
    queue: Name | None = None
    certificate: Annotated[str, Field(pattern=ID_PATTERN)] | None = None
    requested_by: Annotated[str, Field(pattern=r"^[^\x00-\x1f]{1,255}$")] | None = None
    requested_after: Instant | None = None
    requested_before: Instant | None = None
    cursor: Annotated[str, Field(max_length=512)] | None = None
    limit: Annotated[int, Field(ge=1, le=200)] = 50


LastEventId = Annotated[
    str | None,
    Header(pattern=EVENT_ID_PATTERN, description="The last event seen; the stream resumes there."),
]


@router.post(
    "/v1/runs",
    status_code=201,
    summary="Request a run",
    response_description="Queued, with its cost reserved.",
    responses={
        200: {
            "model": Run,
            "description": "The run that an earlier request with this key led to.",
        },
        **problems(404, 409),
    },
)
async def request(
    actor: Annotated[Actor, needs(Scope.SUBMIT)],
    http: Request,
    response: Response,
    services: TheServices,
    request: RunRequest,
    idempotency_key: IdempotencyKey = None,
) -> Run:
    """A worker of its queue will claim it. Nothing about privacy can be chosen here."""
    call = CommandContext.of(actor, http, idempotency_key, request)
    run, created = await services.runs.request(
        request, call, any_reservation=actor.may(Scope.ADMIN)
    )
    response.status_code = 201 if created else 200
    response.headers["Location"] = f"/v1/runs/{run.id}"
    return run_of(run)


@router.get(
    "/v1/runs",
    summary="Runs",
    response_description="A page, the latest first.",
)
def runs(
    _: BudgetReader,
    response: Response,
    services: TheServices,
    query: Annotated[RunQuery, Query()],
) -> Page[Run]:
    """Latest first; ``next`` is the path of the following page, or null."""
    filters = query.model_dump(exclude={"certificate", "cursor", "limit"})
    filters["certificate_id"] = query.certificate
    try:
        page, cursor = services.runs.queue.page(query.cursor, query.limit, **filters)
    except InvalidCursor as error:
        raise invalid_cursor(error) from None
    following = next_page(response, "/v1/runs", query, cursor=cursor)
    items = [run_of(run, services.dispatcher.refusal(run)) for run in page]
    return Page[Run](items=items, next=following)


@router.get("/v1/runs/{run_id}", summary="A run", responses=problems(404))
def run(_: BudgetReader, services: TheServices, run_id: RunId) -> Run:
    """What was requested, who works on it, how far it is, and how it ended."""
    run = services.runs.queue.find(run_id)
    return run_of(run, services.dispatcher.refusal(run))


@router.post(
    "/v1/runs/{run_id}/cancel",
    summary="Cancel a run",
    responses=problems(404, 409),
)
def cancel(
    actor: Annotated[Actor, needs(Scope.SUBMIT, Scope.ADMIN, always=True)],
    http: Request,
    services: TheServices,
    run_id: RunId,
    request: CancelRequest = NO_REASON,
) -> Run:
    """One that waits costs nothing; one that began is stopped, and charged in full."""
    queue = services.runs.queue
    if queue.find(run_id).requested_by != actor.name and not actor.may(Scope.ADMIN):
        raise Problem(
            403, "not_yours", "You can cancel only your own runs. Ask whoever requested it."
        )
    call = CommandContext.of(actor, http, None, request)
    return run_of(queue.change(run_id, call, LockedRun.cancel, request.reason))


@router.get(
    "/v1/runs/{run_id}/events",
    summary="A run's events, as they happen",
    response_class=StreamingResponse,
    responses={
        200: {
            "description": "Server-sent events: `state` with a RunEvent as data, and `progress` "
            "with a RunProgress. The stream ends with the run, and otherwise within minutes: "
            "reconnect with `Last-Event-ID`.",
            "content": {MEDIA_TYPE: {"schema": {"type": "string"}}},
        },
        204: {"description": "The run is over and every event was sent: do not reconnect."},
        **problems(404),
    },
)
async def events(
    _: BudgetReader, services: TheServices, run_id: RunId, last_event_id: LastEventId = None
) -> Response:
    """State, steps and ε spent so far; it resumes where ``Last-Event-ID`` says."""
    run_events = services.run_events
    last = EventId() if last_event_id is None else EventId.read(last_event_id)
    if await run_in_threadpool(run_events.is_over, run_id, last):
        return Response(status_code=204)
    if run_events.full:
        raise Problem(
            503,
            "too_many_watchers",
            f"{MOST_WATCHERS} streams are open already. Poll the run itself, or try again later.",
            headers={"Retry-After": "5"},
        )
    return StreamingResponse(
        run_events.stream(run_id, last),
        # No cache may store it and no proxy may buffer it.
        headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
        media_type=MEDIA_TYPE,
    )
