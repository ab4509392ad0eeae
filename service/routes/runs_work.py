"""What workers ask: a run from a queue, and what they tell of it under its fencing token."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

from fastapi import APIRouter, Response
from fastapi import Path as PathParameter
from fastapi.responses import JSONResponse

from affidavit.service.identity.access import needs
from affidavit.service.identity.actor import Actor, Scope
from affidavit.service.log.reader import with_inclusion
from affidavit.service.openapi import JSON, answers, json_body, problems
from affidavit.service.requests import JsonBody, answered, in_thread, read
from affidavit.service.routes.runs import RunId
from affidavit.service.runs.document import job_document, run_document
from affidavit.service.runs.queue import Held
from affidavit.service.runs.wanted import (
    read_claim,
    read_completion,
    read_failure,
    read_heartbeat,
    read_record,
    read_start,
)
from affidavit.service.services import TheServices
from affidavit.worker import ClaimRequest

router = APIRouter()

Worker = Annotated[Actor, needs(Scope.WORK)]
Queue = Annotated[
    str, PathParameter(pattern=r"^[A-Za-z0-9._-]{1,64}$", description="The queue's name.")
]
CHANGED = {
    200: answers("As it stands now.", "Run"),
    **problems(400, 401, 403, 404, 408, 409, 413, 415, 422, 503),
}


def _held(run_id: str, fence: int, actor: Actor) -> Held:
    return Held(run=run_id, fence=fence, actor=actor.name, at=datetime.now(UTC))


@router.post(
    "/v1/queues/{queue}/claims",
    summary="Claim a run",
    response_class=JSONResponse,
    responses={
        200: answers("The run, or null if none waits that fits.", "Job"),
        **problems(400, 401, 403, 408, 413, 415, 422, 503),
    },
    openapi_extra=json_body("WantedClaim", "What the worker has, and for how long it asks."),
)
async def claim(
    actor: Worker, services: TheServices, queue: Queue, content: JsonBody
) -> JSONResponse:
    """The run of highest priority, then the oldest, is this worker's until its lease ends."""
    wanted = read(read_claim, content)
    claim_request = ClaimRequest(
        queue=queue,
        worker=wanted.worker,
        seconds=wanted.lease,
        gpu=wanted.gpu,
        memory_mib=wanted.memory,
        place=wanted.place,
    )
    queues, now = services.runs.queue, datetime.now(UTC)
    found = await in_thread(lambda: queues.claim(claim_request, actor.name, now))
    return JSONResponse(None if found is None else job_document(found))


@router.get(
    "/v1/runs/{run_id}/bundle",
    summary="The bundle of a run's certificate",
    response_class=Response,
    responses={200: answers("The bundle.", "BundleDocument"), **problems(401, 403, 404, 422, 503)},
)
async def bundle(_: Worker, services: TheServices, run_id: RunId) -> Response:
    """The issue that the run was asked for with, as it was signed."""
    run = await in_thread(lambda: services.runs.queue.find(run_id))
    issues = await in_thread(lambda: services.store.issues(run.certificate_id))
    (issue,) = (
        item for item in issues if (item.issue, item.untrusted) == (run.issue, run.untrusted)
    )
    found = await in_thread(lambda: with_inclusion(services.log, issue.bundle))
    return Response(found, media_type=JSON)


@router.post(
    "/v1/runs/{run_id}/start",
    summary="Begin a run",
    response_class=JSONResponse,
    responses=CHANGED,
    openapi_extra=json_body("WantedStart", "The fencing token, and the plan at hand."),
)
async def start(
    actor: Worker, services: TheServices, run_id: RunId, content: JsonBody
) -> JSONResponse:
    """Certificate, status, validity, reservation and plan are checked again, and it is charged."""
    wanted = read(read_start, content)
    held, queue = _held(run_id, wanted.fence, actor), services.runs.queue
    begun = await in_thread(
        lambda: queue.start(held, wanted.plan_digest, wanted.wants, wanted.place)
    )
    return JSONResponse(run_document(begun))


@router.post(
    "/v1/runs/{run_id}/heartbeat",
    summary="Hold a run longer",
    response_class=JSONResponse,
    responses={
        200: answers("Whether it is to be stopped, and the steps it may charge.", "Renewal"),
        **problems(400, 401, 403, 404, 408, 409, 413, 415, 422, 503),
    },
    openapi_extra=json_body("WantedHeartbeat", "The fencing token, and the steps so far."),
)
async def heartbeat(
    actor: Worker, services: TheServices, run_id: RunId, content: JsonBody
) -> JSONResponse:
    """The lease begins anew from now."""
    wanted = read(read_heartbeat, content)
    held, queue = _held(run_id, wanted.fence, actor), services.runs.queue
    renewed = await in_thread(
        lambda: queue.renew(held, wanted.steps, wants=wanted.wants, head=wanted.head)
    )
    return JSONResponse({"cancel": renewed.cancel, "granted": renewed.granted})


@router.post(
    "/v1/runs/{run_id}/record",
    summary="Send a part of a run's record",
    response_class=JSONResponse,
    responses={
        200: answers("It is kept.", "RecordPart"),
        **problems(400, 401, 403, 404, 408, 409, 413, 415, 422, 503),
    },
    openapi_extra=json_body("WantedRecord", "The fencing token, and whole lines."),
)
async def record(
    actor: Worker, services: TheServices, run_id: RunId, content: JsonBody
) -> JSONResponse:
    """The record is held against the certificate once the run is reported."""
    wanted = read(read_record, content)
    held, queue = _held(run_id, wanted.fence, actor), services.runs.queue
    lines = wanted.lines.encode("utf-8", "surrogatepass")
    await in_thread(lambda: queue.keep_record(held, wanted.part, lines))
    return JSONResponse({"part": wanted.part})


@router.post(
    "/v1/runs/{run_id}/complete",
    summary="Report a run",
    response_class=JSONResponse,
    responses=CHANGED,
    openapi_extra=json_body("WantedCompletion", "The fencing token, and signed provenance."),
)
async def complete(
    actor: Worker, services: TheServices, run_id: RunId, content: JsonBody
) -> JSONResponse:
    """Charged for what its record comes to; failed where that does not conform."""
    wanted = read(read_completion, content)
    held = _held(run_id, wanted.fence, actor)
    return JSONResponse(
        run_document(await answered(services.runs.complete(held, wanted.provenance)))
    )


@router.post(
    "/v1/runs/{run_id}/fail",
    summary="Give a run up",
    response_class=JSONResponse,
    responses=CHANGED,
    openapi_extra=json_body("WantedFailure", "The fencing token, and what went wrong."),
)
async def fail(
    actor: Worker, services: TheServices, run_id: RunId, content: JsonBody
) -> JSONResponse:
    """Free if it was not begun; charged in full if it was, unless another may go on with it."""
    wanted = read(read_failure, content)
    held, queue = _held(run_id, wanted.fence, actor), services.runs.queue
    ended = await in_thread(
        lambda: queue.fail(held, wanted.code, wanted.message, again=wanted.again)
    )
    return JSONResponse(run_document(ended))
