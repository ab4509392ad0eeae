"""``/v1/ledgers`` and ``/v1/reservations``: budgets, and the reservations of runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from fastapi import APIRouter, Path, Query, Request, Response
from pydantic import Field
from sqlalchemy import RowMapping

from affidavit.client import Grant, Ledger, LedgerSummary, Page, Proposal, Reservation
from affidavit.service.core.problems import Problem
from affidavit.service.core.wire_models import QueryModel
from affidavit.service.identity.actor import Actor, CommandContext
from affidavit.service.identity.scopes import Scope
from affidavit.service.ledger import repository
from affidavit.service.ledger.state import LedgerScope, StoredLedger
from affidavit.service.ledger.store import LockedReservation
from affidavit.service.ledger.wire_models import (
    BudgetRequest,
    CommitRequest,
    DatasetName,
    GrantRequest,
    ReleaseRequest,
    ReservationId,
    ReservationRequest,
    SettlementRequest,
)
from affidavit.service.web.access import needs, require_serves
from affidavit.service.web.dependencies import IdempotencyKey, Services, TheServices
from affidavit.service.web.openapi import ID_PATTERN, RECORDED_REQUEST, problems
from affidavit.service.web.routing import JsonRoute

router = APIRouter(route_class=JsonRoute)

BudgetReader = Annotated[
    Actor, needs(Scope.SUBMIT, Scope.APPROVE, Scope.AUDIT, Scope.WORK, Scope.ADMIN)
]
"""Actors who spend budgets or monitor them."""
BudgetRequester = Annotated[Actor, needs(Scope.SUBMIT, Scope.APPROVE, Scope.ADMIN)]
Worker = Annotated[Actor, needs(Scope.WORK)]
ForecastFor = Annotated[
    str | None,
    Query(pattern=ID_PATTERN, description="Forecast how many more runs of this certificate fit."),
]
ProposalDigest = Annotated[str, Path(pattern=ID_PATTERN, description="The proposal's `digest`.")]
CHANGE = problems(404, 409)
# The defaults for an empty body.
COMMIT, SETTLE_IN_FULL, RELEASE = CommitRequest(), SettlementRequest(), ReleaseRequest()


class DeclineQuery(QueryModel):
    """Why a proposal is declined."""

    reason: Annotated[str, Field(max_length=2000, pattern=r"^[^\x00]*$")] = ""


@router.get(
    "/v1/ledgers",
    summary="List ledgers",
    response_description="Budgets and what was spent.",
)
def ledgers(_: BudgetReader, services: TheServices) -> Page[LedgerSummary]:
    """One for each data set, privacy unit and adjacency with a budget."""
    stored = services.ledger_store.ledgers()
    return Page[LedgerSummary](items=list(map(LedgerSummary.model_validate, stored)))


@router.get(
    "/v1/ledgers/{dataset}",
    summary="Get a data set's ledgers",
    responses=problems(404, 409),
    response_description="Its ledgers with their entries.",
)
async def ledger(
    _: BudgetReader, services: TheServices, dataset: DatasetName, certificate: ForecastFor = None
) -> Page[Ledger]:
    """The spending by each composition, the remaining budget, and the entries, latest first."""
    result = await services.ledger.ledgers(dataset, certificate)
    if not result:
        raise _no_budget(dataset)
    return Page[Ledger](items=result)


@router.post(
    "/v1/ledgers/{dataset}/budget",
    summary="Set a budget",
    status_code=201,
    response_description="In force from now on.",
    responses={
        200: {"model": LedgerSummary, "description": "Already set, with this Idempotency-Key."},
        **RECORDED_REQUEST,
        **problems(409),
    },
)
def set_budget(
    actor: BudgetRequester,
    http: Request,
    response: Response,
    services: TheServices,
    dataset: DatasetName,
    request: BudgetRequest,
    idempotency_key: IdempotencyKey = None,
) -> LedgerSummary:
    """Creates a new version; a budget below what has been spent exhausts the ledger.

    A request without the scope `admin` waits until administrators send the same.
    """
    call = CommandContext.of(actor, http, idempotency_key, request)
    stored, created = change_budget(services, actor, call, dataset, request)
    response.status_code = 201 if created else 200
    response.headers["Location"] = f"/v1/ledgers/{dataset}"
    return LedgerSummary.model_validate(stored)


def change_budget(
    services: Services, actor: Actor, call: CommandContext, dataset: str, request: BudgetRequest
) -> tuple[StoredLedger, bool]:
    """Set a budget, or record a proposal and raise ``Recorded``; for the API and the pages."""
    team = request.team
    if actor.team is not None and team is None and not services.ledger_store.ledgers(dataset):
        team = actor.team  # a data set without an owner, as far as the actor can see
    proposal = request.proposal(dataset, team)
    scope = LedgerScope(dataset=dataset, unit=request.unit, adjacency=request.adjacency)
    set_to = (scope, *request.decimals(), request.reason, call, team)
    return services.four_eyes.carry_out(
        "budget",
        proposal,
        actor,
        call.at,
        lambda approve: services.ledger_store.set_budget(*set_to, approve),
        reason=request.reason,
    )


@router.get(
    "/v1/ledgers/{dataset}/proposals",
    summary="List pending proposals",
    responses=problems(404),
    response_description="Requested budgets and grants, newest first.",
)
def proposals(actor: BudgetReader, services: TheServices, dataset: DatasetName) -> Page[Proposal]:
    """Each takes effect once enough administrators send the same content within a week."""
    waiting = services.four_eyes.waiting(actor, services.clock.now(), dataset)
    if not waiting and not services.ledger_store.ledgers(dataset):
        raise _no_budget(dataset)
    return Page[Proposal](items=list(waiting))


@router.delete(
    "/v1/ledgers/{dataset}/proposals/{digest}",
    summary="Decline a proposal",
    response_description="The proposals still pending, newest first.",
    responses=problems(404),
)
def decline_proposal(
    actor: Annotated[Actor, needs(Scope.ADMIN)],
    services: TheServices,
    dataset: DatasetName,
    digest: ProposalDigest,
    query: Annotated[DeclineQuery, Query()],
) -> Page[Proposal]:
    """One administrator is enough. It can be requested again; the log records both."""
    decline(services, actor, dataset, digest, query.reason)
    return proposals(actor, services, dataset)


def decline(services: Services, actor: Actor, dataset: str, digest: str, reason: str) -> None:
    """Decline a proposal; raises ``Problem`` if it does not exist."""
    now = services.clock.now()
    if not services.four_eyes.decline(dataset, digest, reason, actor, now):
        raise Problem(404, "not_found", f"No proposal with that digest is pending for {dataset}.")


@router.get(
    "/v1/ledgers/{dataset}/grants",
    summary="List a data set's grants",
    response_description="What each team may do with it, according to its last grant.",
)
def grants(
    _: Annotated[Actor, needs(Scope.AUDIT, Scope.ADMIN)],
    services: TheServices,
    dataset: DatasetName,
) -> Page[Grant]:
    """Does not include the team that owns the data set."""
    return _grants(services.ledger_store.read(repository.grants_of, dataset))


@router.post(
    "/v1/ledgers/{dataset}/grants",
    summary="Grant a team use of a data set",
    response_description="In force from now on.",
    responses={**RECORDED_REQUEST, **problems(404, 409)},
)
def grant_use(
    actor: Annotated[Actor, needs(Scope.ADMIN)],
    http: Request,
    services: TheServices,
    dataset: DatasetName,
    request: GrantRequest,
) -> Page[Grant]:
    """A team's last grant applies; ``nothing`` withdraws it."""
    call = CommandContext.of(actor, http, None, request)
    return _grants(change_grant(services, actor, call, dataset, request))


def change_grant(
    services: Services, actor: Actor, call: CommandContext, dataset: str, request: GrantRequest
) -> list[RowMapping]:
    """Grant a team the use of a data set, or record a proposal and raise ``Recorded``."""
    if not services.ledger_store.ledgers(dataset):
        raise _no_budget(dataset)
    if request.may == "nothing":
        return services.ledger_store.grant(dataset, request, call)
    return services.four_eyes.carry_out(
        "grant",
        {"dataset": dataset, "team": request.team, "may": request.may},
        actor,
        call.at,
        lambda approve: services.ledger_store.grant(dataset, request, call, approve),
        reason=request.reason,
    )


def _grants(rows: Sequence[RowMapping]) -> Page[Grant]:
    return Page[Grant](items=[Grant.model_validate(dict(row)) for row in rows])


def _no_budget(dataset: str) -> Problem:
    return Problem(
        404,
        "not_found",
        f"the data set {dataset} has no budget. GET /v1/ledgers lists all ledgers.",
    )


@router.post(
    "/v1/ledgers/{dataset}/reservations",
    summary="Reserve for a run",
    status_code=201,
    response_description="Reserved.",
    responses={
        200: {"model": Reservation, "description": "Already reserved, with this Idempotency-Key."},
        **problems(409),
    },
)
async def reserve_budget(
    actor: Annotated[Actor, needs(Scope.SUBMIT)],
    http: Request,
    response: Response,
    services: TheServices,
    dataset: DatasetName,
    request: ReservationRequest,
    idempotency_key: IdempotencyKey = None,
) -> Reservation:
    """Refused with ``over_budget`` if the privacy filter does not admit the run."""
    call = CommandContext.of(actor, http, idempotency_key, request)
    stored, created = await services.ledger.reserve(dataset, request.certificate, call)
    response.status_code = 201 if created else 200
    response.headers["Location"] = f"/v1/reservations/{stored.id}"
    return stored


@router.get(
    "/v1/reservations/{reservation_id}",
    summary="Get a reservation",
    responses=problems(404),
)
def reservation(
    _: BudgetReader, services: TheServices, reservation_id: ReservationId
) -> Reservation:
    """The reserved and the charged amount."""
    return services.ledger_store.reservation(reservation_id)


@router.post("/v1/reservations/{reservation_id}/commit", summary="Commit a run", responses=CHANGE)
def commit(
    actor: Worker,
    http: Request,
    services: TheServices,
    reservation_id: ReservationId,
    request: CommitRequest = COMMIT,
    idempotency_key: IdempotencyKey = None,
) -> Reservation:
    """Call it before the run's first step; afterwards the run can only be settled."""
    call = CommandContext.of(actor, http, idempotency_key, request)
    _require_serves(services, actor, reservation_id)
    change = LockedReservation.commit_usable
    return services.ledger_store.change(reservation_id, call, change)[0]


def _require_serves(services: Services, actor: Actor, reservation_id: str) -> None:
    reserved = services.ledger_store.reservation(reservation_id)
    require_serves(actor, dataset=reserved.dataset)


@router.post("/v1/reservations/{reservation_id}/settle", summary="Settle a run", responses=CHANGE)
def settle(
    actor: Worker,
    http: Request,
    services: TheServices,
    reservation_id: ReservationId,
    request: SettlementRequest = SETTLE_IN_FULL,
    idempotency_key: IdempotencyKey = None,
) -> Reservation:
    """Charges in full; a run of a queue settles itself, by the steps in its record."""
    call = CommandContext.of(actor, http, idempotency_key, request)
    _require_serves(services, actor, reservation_id)
    settle = LockedReservation.settle_by_hand
    report = (request.steps_run, request.record)
    return services.ledger_store.change(reservation_id, call, settle, *report)[0]


@router.post(
    "/v1/reservations/{reservation_id}/release", summary="Release a reservation", responses=CHANGE
)
def release(
    actor: Annotated[Actor, needs(Scope.SUBMIT, Scope.WORK, Scope.ADMIN)],
    http: Request,
    services: TheServices,
    reservation_id: ReservationId,
    request: ReleaseRequest = RELEASE,
    idempotency_key: IdempotencyKey = None,
) -> Reservation:
    """Only before it is committed; with only the scope `submit`, only your own."""
    call = CommandContext.of(actor, http, idempotency_key, request)
    reserved = services.ledger_store.reservation(reservation_id)
    if actor.name == reserved.reserved_by or actor.may(Scope.ADMIN):
        pass
    elif actor.may(Scope.WORK):
        require_serves(actor, dataset=reserved.dataset)
    else:
        raise Problem(
            403,
            "not_yours",
            "You can release only your own reservations. Ask the requester or an administrator.",
        )
    release, reason = LockedReservation.release, request.reason
    return services.ledger_store.change(reservation_id, call, release, reason)[0]
