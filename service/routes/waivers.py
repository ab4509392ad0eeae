"""``/v1/waivers``: temporary exceptions to a rule of a policy, granted by another person."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Query, Response
from pydantic import Field

from affidavit.client import DIGEST, Page
from affidavit.service.identity.access import needs
from affidavit.service.identity.actor import Actor, Scope
from affidavit.service.models import QueryModel
from affidavit.service.openapi import problems
from affidavit.service.policies.models import WaiverRequest, WaiverView
from affidavit.service.policies.service import grant, revoke
from affidavit.service.policies.store import StoredWaiver
from affidavit.service.problems import Problem
from affidavit.service.routes.policies import PolicyReader
from affidavit.service.routing import JsonRoute
from affidavit.service.services import Services, TheServices

router = APIRouter(route_class=JsonRoute)

Approver = Annotated[Actor, needs(Scope.APPROVE)]
WaiverId = Annotated[
    str, Path(pattern=DIGEST, description="``sha256:`` and 64 lower-case hex digits.")
]


class RevocationQuery(QueryModel):
    """Why a waiver is revoked."""

    reason: Annotated[str, Field(min_length=1, max_length=2000, pattern=r"^[^\x00]*$")]


@router.get("/v1/waivers", summary="All waivers")
def waivers(_: PolicyReader, services: TheServices) -> Page[WaiverView]:
    """Newest first, including expired and revoked ones."""
    now = services.clock.now()
    items = [WaiverView.of(item, now) for item in services.policies.granted()]
    return Page[WaiverView](items=items)


@router.get(
    "/v1/waivers/{waiver_id}",
    summary="A waiver by its id",
    responses=problems(404),
)
def waiver(_: PolicyReader, services: TheServices, waiver_id: WaiverId) -> WaiverView:
    """The signed waiver and its status."""
    stored = services.policies.waiver(waiver_id)
    if stored is None:
        raise _not_found(waiver_id)
    return WaiverView.of(stored, services.clock.now())


@router.post(
    "/v1/waivers",
    summary="Grant a waiver",
    status_code=201,
    responses={
        201: {"description": "Granted."},
        **problems(409),
    },
)
def grant_waiver(
    actor: Approver, services: TheServices, request: WaiverRequest, response: Response
) -> WaiverView:
    """Takes four eyes: the granter is neither the owner nor a requester of the plan.

    Where a keyset asks for several people, as many approvers send the same.
    """
    stored = agreed(services, actor, request)
    response.headers["Location"] = f"/v1/waivers/{stored.waiver.id}"
    return WaiverView.of(stored, services.clock.now())


def agreed(services: Services, actor: Actor, request: WaiverRequest) -> StoredWaiver:
    """Grant a waiver for the API and the pages, or note the request and raise ``Problem``."""
    now, key = services.clock.now(), services.keyring.current()
    team = request.team or actor.works_for
    return services.second_person.carry_out(
        "waiver",
        {**request.model_dump(mode="json"), "team": team},
        actor,
        now,
        lambda approve: grant(
            services.policies, request, key, actor=actor.name, at=now, team=team, approve=approve
        ),
        scope=Scope.APPROVE,
    )


@router.delete(
    "/v1/waivers/{waiver_id}",
    summary="Revoke a waiver",
    responses=problems(404),
)
def revoke_waiver(
    actor: Approver,
    services: TheServices,
    waiver_id: WaiverId,
    query: Annotated[RevocationQuery, Query()],
) -> WaiverView:
    """Also revokes the certificates that rely on it; the waiver itself stays on record."""
    now = services.clock.now()
    stored = revoke(services.policies, waiver_id, query.reason, actor=actor.name, at=now)
    if stored is None:
        raise _not_found(waiver_id)
    return WaiverView.of(stored, now)


def _not_found(waiver_id: str) -> Problem:
    return Problem(
        404, "not_found", f"Waiver {waiver_id} not found; GET /v1/waivers lists all waivers."
    )
