"""``/v1/ledgers``: budgets, what was spent of them, and reservations against them."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse

from affidavit.service.command import CommandContext, IdempotencyKey
from affidavit.service.identity.access import needs
from affidavit.service.identity.actor import Actor, Scope
from affidavit.service.ledger import rows
from affidavit.service.ledger.document import reservation_document, summary
from affidavit.service.ledger.names import DatasetName
from affidavit.service.ledger.wanted import read_budget, read_reservation
from affidavit.service.openapi import ID_PATTERN, answers, json_body, problems
from affidavit.service.problems import Problem
from affidavit.service.requests import JsonBody, answered, in_thread, read
from affidavit.service.services import TheServices

router = APIRouter()

Concerned = Annotated[
    Actor, needs(Scope.SUBMIT, Scope.APPROVE, Scope.AUDIT, Scope.WORK, Scope.ADMIN)
]
"""Whoever may know what is left: those who spend it and those who watch over it."""
Forecast = Annotated[
    str | None,
    Query(pattern=ID_PATTERN, description="Say how many more runs of this certificate fit."),
]


@router.get(
    "/v1/ledgers",
    summary="All ledgers",
    response_class=JSONResponse,
    responses={
        200: answers("Budgets and what was spent.", "LedgerSummaries"),
        **problems(401, 403, 503),
    },
)
def ledgers(_: Concerned, services: TheServices) -> JSONResponse:
    """One for each data set, privacy unit and adjacency that has a budget."""
    return JSONResponse({"ledgers": [summary(item) for item in services.ledger.ledgers()]})


@router.get(
    "/v1/ledgers/{dataset}",
    summary="A data set's ledgers",
    response_class=JSONResponse,
    responses={
        200: answers("Its ledgers with their entries.", "Ledgers"),
        **problems(401, 403, 404, 409, 422, 503),
    },
)
async def ledger(
    _: Concerned, services: TheServices, dataset: DatasetName, certificate: Forecast = None
) -> JSONResponse:
    """What was spent by each composition, what is left, and the entries, latest first."""
    found = await answered(services.desk.documents(dataset, certificate))
    if not found:
        raise Problem(
            404, "not_found", f"there is no budget for {dataset}; GET /v1/ledgers lists them."
        )
    return JSONResponse({"dataset": dataset, "ledgers": found})


@router.post(
    "/v1/ledgers/{dataset}/budget",
    summary="Set a budget",
    status_code=201,
    response_class=JSONResponse,
    responses={
        201: answers("In force from now on.", "LedgerSummary"),
        200: answers("Set before, with this Idempotency-Key.", "LedgerSummary"),
        **problems(400, 401, 403, 408, 415, 422, 503),
    },
    openapi_extra=json_body("WantedBudget", "ε and δ of a privacy unit and adjacency."),
)
async def budget(
    actor: Annotated[Actor, needs(Scope.ADMIN)],
    http: Request,
    services: TheServices,
    dataset: DatasetName,
    content: JsonBody,
    idempotency_key: IdempotencyKey = None,
) -> JSONResponse:
    """Each is a version; one that is below what was spent leaves the ledger exhausted."""
    wanted = read(read_budget, content)
    scope = rows.Scope(dataset=dataset, unit=wanted.unit, adjacency=wanted.adjacency)
    call = CommandContext.of(actor, http, idempotency_key, wanted)
    kept, created = await in_thread(
        lambda: services.ledger.set_budget(scope, *wanted.decimals(), wanted.reason, call)
    )
    return JSONResponse(summary(kept), 201 if created else 200)


@router.post(
    "/v1/ledgers/{dataset}/reservations",
    summary="Reserve for a run",
    status_code=201,
    response_class=JSONResponse,
    responses={
        201: answers("Reserved.", "Reservation"),
        200: answers("Reserved before, with this Idempotency-Key.", "Reservation"),
        **problems(400, 401, 403, 408, 409, 415, 422, 503),
    },
    openapi_extra=json_body("WantedReservation", "The certificate whose run is to be made."),
)
async def reserve(
    actor: Annotated[Actor, needs(Scope.SUBMIT)],
    http: Request,
    services: TheServices,
    dataset: DatasetName,
    content: JsonBody,
    idempotency_key: IdempotencyKey = None,
) -> JSONResponse:
    """Refused with ``over_budget`` when the filter does not admit the run."""
    wanted = read(read_reservation, content)
    call = CommandContext.of(actor, http, idempotency_key, wanted)
    found, created = await answered(services.desk.reserve(dataset, wanted.certificate, call))
    return JSONResponse(
        reservation_document(found),
        201 if created else 200,
        {"Location": f"/v1/reservations/{found.id}"},
    )
