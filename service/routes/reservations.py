"""``/v1/reservations/{id}``: a run's way from reserved to settled or released."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from affidavit.service.command import CommandContext, IdempotencyKey
from affidavit.service.identity.access import needs
from affidavit.service.identity.actor import Actor, Scope
from affidavit.service.ledger.document import reservation_document
from affidavit.service.ledger.names import ReservationId
from affidavit.service.ledger.rows import Reservation
from affidavit.service.ledger.wanted import read_commitment, read_release, read_settlement
from affidavit.service.openapi import answers, json_body, problems
from affidavit.service.problems import Problem
from affidavit.service.requests import JsonBody, answered, in_thread, read
from affidavit.service.routes.ledgers import Concerned
from affidavit.service.services import TheServices

router = APIRouter()

Worker = Annotated[Actor, needs(Scope.WORK)]
CHANGED = {
    200: answers("As it stands now.", "Reservation"),
    **problems(400, 401, 403, 404, 408, 409, 415, 422, 503),
}


def _answer(found: tuple[Reservation, bool]) -> JSONResponse:
    return JSONResponse(reservation_document(found[0]))


@router.get(
    "/v1/reservations/{reservation_id}",
    summary="A reservation",
    response_class=JSONResponse,
    responses={
        200: answers("As it stands now.", "Reservation"),
        **problems(401, 403, 404, 422, 503),
    },
)
async def reservation(
    _: Concerned, services: TheServices, reservation_id: ReservationId
) -> JSONResponse:
    """What was reserved, and what it is charged with."""
    found = await in_thread(lambda: services.ledger.reservation(reservation_id))
    return JSONResponse(reservation_document(found))


@router.post(
    "/v1/reservations/{reservation_id}/commit",
    summary="Commit a run",
    response_class=JSONResponse,
    responses=CHANGED,
    openapi_extra=json_body("WantedCommitment", "Nothing, or an empty object.", required=False),
)
async def commit(
    actor: Worker,
    http: Request,
    services: TheServices,
    reservation_id: ReservationId,
    content: JsonBody,
    idempotency_key: IdempotencyKey = None,
) -> JSONResponse:
    """Before the run's first step: from here on it can only be settled."""
    call = CommandContext.of(actor, http, idempotency_key, read(read_commitment, content))
    return _answer(await in_thread(lambda: services.ledger.commit(reservation_id, call)))


@router.post(
    "/v1/reservations/{reservation_id}/settle",
    summary="Settle a run",
    response_class=JSONResponse,
    responses=CHANGED,
    openapi_extra=json_body(
        "WantedSettlement", "The steps that were run, and their record.", required=False
    ),
)
async def settle(
    actor: Worker,
    http: Request,
    services: TheServices,
    reservation_id: ReservationId,
    content: JsonBody,
    idempotency_key: IdempotencyKey = None,
) -> JSONResponse:
    """Charged for the steps that were run; without a record in full."""
    wanted = read(read_settlement, content)
    call = CommandContext.of(actor, http, idempotency_key, wanted)
    settled = services.desk.settle(reservation_id, wanted.steps_run, wanted.record, call)
    return _answer(await answered(settled))


@router.post(
    "/v1/reservations/{reservation_id}/release",
    summary="Release a reservation",
    response_class=JSONResponse,
    responses=CHANGED,
    openapi_extra=json_body("WantedRelease", "Why.", required=False),
)
async def release(
    actor: Annotated[Actor, needs(Scope.SUBMIT, Scope.WORK, Scope.ADMIN)],
    http: Request,
    services: TheServices,
    reservation_id: ReservationId,
    content: JsonBody,
    idempotency_key: IdempotencyKey = None,
) -> JSONResponse:
    """Before it is committed; who may only submit releases what they reserved themselves."""
    wanted = read(read_release, content)
    call = CommandContext.of(actor, http, idempotency_key, wanted)
    found = await in_thread(lambda: services.ledger.reservation(reservation_id))
    anybodys = actor.may(Scope.WORK) or actor.may(Scope.ADMIN)
    if not anybodys and found.reserved_by != actor.name:
        raise Problem(403, "not_yours", "somebody else reserved it; ask them or an administrator.")
    return _answer(
        await in_thread(lambda: services.ledger.release(reservation_id, wanted.reason, call))
    )
