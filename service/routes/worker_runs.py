"""Routes of workers: claim a run from a queue, and report on it under its fencing token."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Response
from fastapi import Path as PathParameter

from affidavit.client import Run
from affidavit.service.command import CommandContext
from affidavit.service.identity.access import needs, require_serves
from affidavit.service.identity.actor import Actor, Scope
from affidavit.service.log.reader import with_inclusion
from affidavit.service.openapi import JSON, answers, problems
from affidavit.service.routing import JsonRoute
from affidavit.service.runs.locked_run import LockedRun
from affidavit.service.runs.models import (
    CompletionRequest,
    FailureRequest,
    HeartbeatRequest,
    RecordPartRequest,
    RunClaimRequest,
    RunId,
    StartedRun,
    StartRequest,
    job_of,
    run_of,
    started_run,
)
from affidavit.service.services import Services, TheServices
from affidavit.worker import Job, Renewal

router = APIRouter(route_class=JsonRoute)

Worker = Annotated[Actor, needs(Scope.WORK)]
HoldingWorker = Annotated[Actor, needs(Scope.WORK, always=True)]
"""A worker that reports on a run whose budget is committed already."""
Queue = Annotated[
    str, PathParameter(pattern=r"^[A-Za-z0-9._-]{1,64}$", description="The queue's name.")
]
CHANGE = problems(404, 409)


def _call(services: Services, actor: Actor) -> CommandContext:
    return CommandContext(actor=actor.name, at=services.clock.now())


@router.post(
    "/v1/queues/{queue}/claims",
    summary="Claim a run",
    response_description="The run, or null if there is none to claim.",
)
def claim_run(
    actor: Worker, services: TheServices, queue: Queue, request: RunClaimRequest
) -> Job | None:
    """The oldest run of the queue, or the one named, is this worker's until its lease ends.

    Every report on it takes the ``secret`` that is returned here and nowhere else.
    """
    require_serves(actor, queue=queue)
    claimed = services.runs.queue.claim(queue, request, _call(services, actor))
    return None if claimed is None else job_of(*claimed)


@router.get(
    "/v1/runs/{run_id}/bundle",
    summary="The bundle of a run's certificate",
    response_class=Response,
    responses={200: answers("The bundle.", "BundleDocument"), **problems(404)},
)
def bundle(actor: Worker, services: TheServices, run_id: RunId) -> Response:
    """The issue of the certificate that the run was requested with, as it was signed."""
    run = services.runs.queue.find(run_id)
    require_serves(actor, queue=run.queue)
    issue = services.store.issue(run.certificate_id, run.issue, untrusted=run.untrusted)
    return Response(with_inclusion(services.log, issue.bundle), media_type=JSON)


@router.post("/v1/runs/{run_id}/start", summary="Begin a run", responses=CHANGE)
def start(actor: Worker, services: TheServices, run_id: RunId, request: StartRequest) -> StartedRun:
    """Check certificate, status, validity, reservation and plan again, and commit the budget."""
    return started_run(services.runs.queue.start(run_id, request, _call(services, actor)))


@router.post("/v1/runs/{run_id}/heartbeat", summary="Renew a run's lease", responses=CHANGE)
def renew_lease(
    actor: HoldingWorker, services: TheServices, run_id: RunId, request: HeartbeatRequest
) -> Renewal:
    """The lease starts again now."""
    return services.runs.queue.change(run_id, _call(services, actor), LockedRun.renew, request)


@router.post("/v1/runs/{run_id}/record", summary="Send a part of a run's record", responses=CHANGE)
def upload_record(
    actor: HoldingWorker, services: TheServices, run_id: RunId, request: RecordPartRequest
) -> Renewal:
    """The record is checked against the certificate once the run is reported."""
    return services.runs.queue.change(
        run_id, _call(services, actor), LockedRun.add_record_part, request
    )


@router.post("/v1/runs/{run_id}/complete", summary="Report a run", responses=CHANGE)
async def complete(
    actor: HoldingWorker, services: TheServices, run_id: RunId, request: CompletionRequest
) -> Run:
    """Charged by its record; failed where that does not conform."""
    return run_of(await services.runs.complete(run_id, request, _call(services, actor)))


@router.post("/v1/runs/{run_id}/fail", summary="Give a run up", responses=CHANGE)
def fail(
    actor: HoldingWorker, services: TheServices, run_id: RunId, request: FailureRequest
) -> Run:
    """Free if it did not begin; charged in full if it did, unless another worker may continue."""
    call = _call(services, actor)
    return run_of(services.runs.queue.change(run_id, call, LockedRun.fail, request))
