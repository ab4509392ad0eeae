"""``/v1/runs``: request, list, watch and cancel runs.

Workers claim a run from a queue, and report on it with its fencing token.
"""

from __future__ import annotations

import zlib
from typing import Annotated

from fastapi import APIRouter, Header, Query, Request, Response
from fastapi import Path as PathParameter
from fastapi.responses import StreamingResponse
from pydantic import Field
from starlette.concurrency import run_in_threadpool

from affidavit.client import Page, Run, RunState, RunTest
from affidavit.plan import Name
from affidavit.service.core.problems import Problem
from affidavit.service.core.wire_models import BundleDocument, QueryModel
from affidavit.service.identity.actor import Actor, CommandContext
from affidavit.service.identity.scopes import Scope
from affidavit.service.log.reader import with_inclusion
from affidavit.service.runs import repository
from affidavit.service.runs.events import (
    EVENT_ID_PATTERN,
    MAX_WATCHERS,
    MAX_WATCHERS_EACH,
    EventId,
)
from affidavit.service.runs.queue import LockedRun
from affidavit.service.runs.repository import StoredRun
from affidavit.service.runs.wire_models import (
    AuditRequest,
    CancelRequest,
    CompletionRequest,
    FailureRequest,
    HeartbeatRequest,
    RecordPartRequest,
    ReplayRequest,
    RunClaimRequest,
    RunId,
    RunRequest,
    StartedRun,
    StartRequest,
)
from affidavit.service.web.access import Reader, needs, require_serves
from affidavit.service.web.dependencies import IdempotencyKey, Services, TheServices
from affidavit.service.web.openapi import (
    ID_PATTERN,
    JSON,
    problems,
)
from affidavit.service.web.routes.ledgers import BudgetReader
from affidavit.service.web.routing import (
    Instant,
    JsonRoute,
    next_page,
)
from affidavit.worker import Job, Renewal

MEDIA_TYPE = "text/event-stream"
BYTES = "application/octet-stream"

router = APIRouter(route_class=JsonRoute)

NO_REASON = CancelRequest()
"""The default for an empty body."""


class RunQuery(QueryModel):
    """Query parameters; unknown ones are refused, because a misspelt filter would match all."""

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
            "description": "The run that an earlier request with this key created.",
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
    """A worker of the queue claims it. The certificate sets all privacy parameters."""
    call = CommandContext.of(actor, http, idempotency_key, request)
    run, created = await services.runs.request(
        request, call, any_reservation=actor.may(Scope.ADMIN)
    )
    response.status_code = 201 if created else 200
    response.headers["Location"] = f"/v1/runs/{run.id}"
    return run


@router.get(
    "/v1/runs",
    summary="List runs",
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
    page, cursor = services.runs.queue.read(repository.page, query.cursor, query.limit, **filters)
    following = next_page(response, "/v1/runs", query, cursor=cursor)
    items = [services.dispatcher.with_refusal(run) for run in page]
    return Page[Run](items=items, next=following)


@router.get("/v1/runs/{run_id}", summary="Get a run", responses=problems(404))
def run(_: BudgetReader, services: TheServices, run_id: RunId) -> Run:
    """The request, its worker, its progress and its outcome."""
    return services.dispatcher.with_refusal(services.runs.queue.find(run_id))


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
    """A waiting run costs nothing; a run that has begun is stopped and charged in full."""
    queue = services.runs.queue
    if not _may_change(actor, queue.find(run_id)):
        raise Problem(
            403, "not_yours", "You can cancel only your own runs. Ask the requester to cancel it."
        )
    call = CommandContext.of(actor, http, None, request)
    return queue.change(run_id, call, LockedRun.cancel, request.reason)


@router.post(
    "/v1/runs/{run_id}/replay",
    summary="Add a replay of a run",
    response_description="Part of the run's evidence.",
    responses=problems(404, 409),
)
async def replay(
    actor: Annotated[Actor, needs(Scope.SUBMIT, Scope.ADMIN)],
    http: Request,
    services: TheServices,
    run_id: RunId,
    request: ReplayRequest,
) -> RunTest:
    """What `affidavit replay --plan` showed; a run has one, which may be sent again."""
    run = await run_in_threadpool(_own_run, services, actor, run_id)
    call = CommandContext.of(actor, http, None, request)
    return await services.runs.add_replay(run, request, call)


@router.post(
    "/v1/runs/{run_id}/audit",
    summary="Add an audit of a run's canaries",
    response_description="Part of the run's evidence.",
    responses=problems(404, 409),
)
async def audit(
    actor: Annotated[Actor, needs(Scope.SUBMIT, Scope.ADMIN)],
    http: Request,
    services: TheServices,
    run_id: RunId,
    request: AuditRequest,
) -> RunTest:
    """What the canaries of the record and their losses show; a run has one audit."""
    run = await run_in_threadpool(_own_run, services, actor, run_id)
    call = CommandContext.of(actor, http, None, request)
    return await services.runs.add_audit(run, request, call)


def _own_run(services: Services, actor: Actor, run_id: str) -> StoredRun:
    run = services.runs.queue.find(run_id)
    if not _may_change(actor, run):
        raise Problem(
            403, "not_yours", "You can add tests only to your own runs. Ask the requester."
        )
    return run


def _may_change(actor: Actor, run: Run) -> bool:
    """Whether the actor requested the run or is an administrator."""
    return run.requested_by == actor.name or actor.may(Scope.ADMIN)


@router.get(
    "/v1/runs/{run_id}/events",
    summary="Stream a run's events",
    response_class=StreamingResponse,
    responses={
        200: {
            "description": "Server-sent events: `state` with a RunEvent as data, and `progress` "
            "with a RunProgress. The stream ends with the run, and otherwise within minutes: "
            "reconnect with `Last-Event-ID`.",
            "content": {MEDIA_TYPE: {"schema": {"type": "string"}}},
        },
        204: {"description": "The run has ended and every event was sent: do not reconnect."},
        **problems(404),
    },
)
async def events(
    actor: BudgetReader, services: TheServices, run_id: RunId, last_event_id: LastEventId = None
) -> Response:
    """State, steps and ε spent so far; ``Last-Event-ID`` resumes the stream."""
    run_events = services.run_events
    last = EventId() if last_event_id is None else EventId.read(last_event_id)
    if await run_in_threadpool(run_events.is_over, run_id, last):
        return Response(status_code=204)
    if run_events.is_full_for(actor.name):
        raise Problem(
            503,
            "too_many_watchers",
            f"{MAX_WATCHERS} streams are open already, or {MAX_WATCHERS_EACH} of yours. Poll the "
            "run itself, or try again later.",
            headers={"Retry-After": "5"},
        )
    return StreamingResponse(
        run_events.stream(run_id, last, actor.name),
        # Prevent caches from storing and proxies from buffering the stream.
        headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
        media_type=MEDIA_TYPE,
    )


@router.get(
    "/v1/runs/{run_id}/record",
    summary="Get a run's record",
    response_class=StreamingResponse,
    responses={
        200: {
            "description": "The record by which the run was charged, one JSON object a line.",
            "content": {BYTES: {"schema": {"type": "string", "format": "binary"}}},
        },
        **problems(404),
    },
)
def record(_: Reader, services: TheServices, run_id: RunId) -> Response:
    """What the worker sent and signed; `affidavit conformance` checks it against the bundle."""
    parts = services.runs.queue.read(repository.final_record, run_id)
    return StreamingResponse(map(zlib.decompress, parts), media_type=BYTES)


@router.get(
    "/v1/runs/{run_id}/bundle",
    summary="Get the bundle of a run's certificate",
    response_class=Response,
    responses={200: {"model": BundleDocument, "description": "The bundle."}, **problems(404)},
)
def bundle(
    actor: Annotated[Actor, needs(Scope.WORK, Scope.SUBMIT, Scope.APPROVE, Scope.AUDIT)],
    services: TheServices,
    run_id: RunId,
) -> Response:
    """The signed issue of the certificate that the run was requested with."""
    run = services.runs.queue.find(run_id)
    if not any(actor.may(scope) for scope in (Scope.SUBMIT, Scope.APPROVE, Scope.AUDIT)):
        require_serves(actor, queue=run.queue)
    return Response(bundle_of(services, run), media_type=JSON)


def bundle_of(services: Services, run: StoredRun) -> bytes:
    """Return the bundle of the issue that ``run`` was requested with, with its log part."""
    issue = services.store.issue(run.certificate, run.issue, untrusted=run.untrusted)
    return with_inclusion(services.log, issue.bundle)


# ---- for workers ---------------------------------------------------------------------

Worker = Annotated[Actor, needs(Scope.WORK)]
HoldingWorker = Annotated[Actor, needs(Scope.WORK, always=True)]
"""A worker that reports on a run whose budget is committed already."""
Queue = Annotated[
    str, PathParameter(pattern=r"^[A-Za-z0-9._-]{1,64}$", description="The queue's name.")
]
CHANGE = problems(404, 409)


@router.post(
    "/v1/queues/{queue}/claims",
    summary="Claim a run",
    response_description="The run, or null if there is none to claim.",
)
def claim_run(
    actor: Worker, services: TheServices, queue: Queue, request: RunClaimRequest
) -> Job | None:
    """Leases the oldest run of the queue, or the named run, to this worker.

    Every report about the run needs the ``secret``, which only this response contains.
    """
    require_serves(actor, queue=queue)
    claimed = services.runs.queue.claim(queue, request, services.call_of(actor))
    if claimed is None:
        return None
    run, secret = claimed
    leased = {"run": run.id, "fence": run.claims, "secret": secret, "granted": run.steps.granted}
    return Job.model_validate({**dict(run), **leased})


@router.post(
    "/v1/runs/{run_id}/start",
    summary="Begin a run",
    response_model=StartedRun,
    responses=CHANGE,
)
def start(actor: Worker, services: TheServices, run_id: RunId, request: StartRequest) -> Run:
    """Checks certificate, status, validity, reservation and plan again and commits the budget."""
    return services.runs.queue.start(run_id, request, services.call_of(actor))


@router.post("/v1/runs/{run_id}/heartbeat", summary="Renew a run's lease", responses=CHANGE)
def renew_lease(
    actor: HoldingWorker, services: TheServices, run_id: RunId, request: HeartbeatRequest
) -> Renewal:
    """The lease starts anew."""
    return services.runs.queue.change(run_id, services.call_of(actor), LockedRun.renew, request)


@router.post("/v1/runs/{run_id}/record", summary="Send a part of a run's record", responses=CHANGE)
def upload_record(
    actor: HoldingWorker, services: TheServices, run_id: RunId, request: RecordPartRequest
) -> Renewal:
    """The record is checked against the certificate once the run is reported."""
    return services.runs.queue.change(
        run_id, services.call_of(actor), LockedRun.add_record_part, request
    )


@router.post("/v1/runs/{run_id}/complete", summary="Report a run", responses=CHANGE)
async def complete(
    actor: HoldingWorker, services: TheServices, run_id: RunId, request: CompletionRequest
) -> Run:
    """Charged by its record; a run whose record does not conform fails."""
    return await services.runs.complete(run_id, request, services.call_of(actor))


@router.post("/v1/runs/{run_id}/fail", summary="Give up a run", responses=CHANGE)
def fail(
    actor: HoldingWorker, services: TheServices, run_id: RunId, request: FailureRequest
) -> Run:
    """Free if it did not begin; otherwise charged in full, unless another worker may continue."""
    call = services.call_of(actor)
    return services.runs.queue.change(run_id, call, LockedRun.fail, request)
