"""``/v1/policies`` and ``/v1/waivers``: policies, simulations, and exceptions from a rule."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Path, Query, Response
from pydantic import Field

from affidavit.certificate.policy import Policy, parse_policy
from affidavit.client import DIGEST, Page, PolicyReference, PolicySummary, PolicyVersion
from affidavit.plan import Syntax
from affidavit.service.certificates.policy_changes import (
    SimulatedChange,
    SimulationResult,
    VerdictChange,
    WaiverRequest,
    WaiverView,
    activate,
    grant,
    no_such_waiver,
    revoke,
    simulate,
    version_of,
)
from affidavit.service.core.problems import Problem
from affidavit.service.core.wire_models import QueryModel
from affidavit.service.identity.actor import Actor
from affidavit.service.identity.scopes import Scope
from affidavit.service.policies.store import StoredPolicy, StoredWaiver
from affidavit.service.web.access import needs
from affidavit.service.web.dependencies import Services, TheServices
from affidavit.service.web.openapi import RECORDED_REQUEST, body, problems
from affidavit.service.web.routing import (
    JsonRoute,
    next_page,
    read_body,
    syntax_of_body,
)

router = APIRouter(route_class=JsonRoute)

PolicyReader = Annotated[Actor, needs(Scope.SUBMIT, Scope.APPROVE, Scope.AUDIT, Scope.ADMIN)]
"""Actors who submit plans, approve, audit or administer."""
PolicyName = Annotated[
    str, Path(pattern=r"^[A-Za-z0-9._-]{1,64}$", description="The policy's name.")
]
Version = Annotated[int, Path(ge=1, le=2**31 - 1, description="Counts from 1.")]


def read_policy(
    syntax: Annotated[Syntax, Depends(syntax_of_body)],
    content: Annotated[bytes, Depends(read_body)],
) -> Policy:
    """Parse the policy in the body, JSON or YAML; raises ``MalformedPolicy``."""
    return parse_policy(content, syntax)


PolicyBody = Annotated[Policy, Depends(read_policy)]


class PageQuery(QueryModel):
    """Which page of certificates to judge."""

    cursor: Annotated[str, Field(max_length=512)] | None = None
    limit: Annotated[int, Field(ge=1, le=200)] = 50


@router.get("/v1/policies", summary="List policies")
def policies(_: PolicyReader, services: TheServices) -> Page[PolicySummary]:
    """Every version, newest first; the built-in policy is last."""
    policies = services.policies.policy_set()
    items = [version_of(stored, policies) for stored in services.policies.versions()]
    return Page[PolicySummary](items=list(items))


@router.get(
    "/v1/policies/{name}/{version}",
    summary="Get a version of a policy",
    responses=problems(404),
)
def policy(
    _: PolicyReader, services: TheServices, name: PolicyName, version: Version
) -> PolicyVersion:
    """The document as it was signed."""
    stored = services.policies.version(name, version)
    if stored is None:
        raise Problem(
            404,
            "not_found",
            f"Policy {name} version {version} not found; GET /v1/policies lists all versions.",
        )
    return version_of(stored, services.policies.policy_set())


@router.post(
    "/v1/policies",
    summary="Activate a policy",
    status_code=201,
    responses={
        201: {"description": "Active from now on."},
        200: {"description": "It is already active.", "model": PolicyVersion},
        **RECORDED_REQUEST,
        **problems(409),
    },
    openapi_extra=body("Policy", "A policy."),
)
def activate_policy(
    actor: Annotated[Actor, needs(Scope.ADMIN)],
    services: TheServices,
    policy: PolicyBody,
    response: Response,
) -> PolicyVersion:
    """Versions of a policy are consecutive; certificates name the version that judged them."""
    stored, new = activate_if_agreed(services, actor, policy)
    response.status_code = 201 if new else 200
    response.headers["Location"] = f"/v1/policies/{policy.name}/{policy.version}"
    return version_of(stored, services.policies.policy_set())


def activate_if_agreed(
    services: Services, actor: Actor, policy: Policy
) -> tuple[StoredPolicy, bool]:
    """Activate a policy, or record a proposal and raise ``Recorded``; for the API and the pages."""
    call, key = services.call_of(actor), services.keyring.current()
    return services.four_eyes.carry_out(
        "policy",
        {"policy": policy.digest()},
        actor,
        call.at,
        lambda approve: activate(services.policies, policy, key, call, approve),
    )


@router.post(
    "/v1/policies/simulate",
    summary="Simulate a policy",
    responses=problems(409),
    openapi_extra=body("Policy", "A draft of a policy."),
)
def simulate_policy(
    _: Annotated[Actor, needs(Scope.ADMIN, Scope.AUDIT)],
    services: TheServices,
    page: Annotated[PageQuery, Query()],
    draft: PolicyBody,
    response: Response,
) -> SimulationResult:
    """Applies the draft to stored certificates, newest first, without accounting or storing."""
    result = simulate(services.policies, services.store, draft, page.cursor, page.limit)
    return SimulationResult(
        policy=PolicyReference.model_validate(draft.reference()),
        judged=result.judged,
        items=[_verdict_change(change) for change in result.changes],
        next=next_page(response, "/v1/policies/simulate", page, cursor=result.next),
    )


def _verdict_change(change: SimulatedChange) -> VerdictChange:
    certificate = change.certificate
    return VerdictChange.model_validate(
        {
            "certificate_id": certificate.id,
            "plan_digest": certificate.plan_digest,
            "name": certificate.name,
            "dataset": certificate.dataset,
            "verdict": certificate.verdict,
            "would_be": change.would_be,
            "reasons": change.reasons,
        }
    )


# ---- waivers -------------------------------------------------------------------------

Approver = Annotated[Actor, needs(Scope.APPROVE)]
WaiverId = Annotated[
    str, Path(pattern=DIGEST, description="``sha256:`` and 64 lower-case hex digits.")
]


class RevocationQuery(QueryModel):
    """Why a waiver is revoked."""

    reason: Annotated[str, Field(min_length=1, max_length=2000, pattern=r"^[^\x00]*$")]


@router.get("/v1/waivers", summary="List waivers")
def waivers(_: PolicyReader, services: TheServices) -> Page[WaiverView]:
    """Newest first, including expired and revoked ones."""
    now = services.clock.now()
    items = [WaiverView.of(item, now) for item in services.policies.granted()]
    return Page[WaiverView](items=items)


@router.get(
    "/v1/waivers/{waiver_id}",
    summary="Get a waiver",
    responses=problems(404),
)
def waiver(_: PolicyReader, services: TheServices, waiver_id: WaiverId) -> WaiverView:
    """The signed waiver and its status."""
    stored = services.policies.waiver(waiver_id)
    if stored is None:
        raise no_such_waiver(waiver_id)
    return WaiverView.of(stored, services.clock.now())


@router.post(
    "/v1/waivers",
    summary="Grant a waiver",
    status_code=201,
    responses={
        201: {"description": "Granted."},
        **RECORDED_REQUEST,
        **problems(409),
    },
)
def grant_waiver(
    actor: Approver, services: TheServices, request: WaiverRequest, response: Response
) -> WaiverView:
    """The granter must be neither the owner nor a requester of the plan.

    If the keyset requires several people, as many approvers send the same request.
    """
    stored = grant_if_agreed(services, actor, request)
    response.headers["Location"] = f"/v1/waivers/{stored.waiver.id}"
    return WaiverView.of(stored, services.clock.now())


def grant_if_agreed(services: Services, actor: Actor, request: WaiverRequest) -> StoredWaiver:
    """Grant a waiver, or record a proposal and raise ``Recorded``; for the API and the pages."""
    call, key = services.call_of(actor), services.keyring.current()
    team = request.team or actor.owning_team
    return services.four_eyes.carry_out(
        "waiver",
        {**request.model_dump(mode="json"), "team": team},
        actor,
        call.at,
        lambda approve: grant(services.policies, request, key, call, team, approve),
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
    call = services.call_of(actor)
    return WaiverView.of(revoke(services.policies, waiver_id, query.reason, call), call.at)
