"""``/v1/policies``: the rules that plans are judged by, and a new version of one."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

from fastapi import APIRouter, Depends, Path
from fastapi.responses import JSONResponse
from starlette.concurrency import run_in_threadpool

from affidavit.certificate.policy import BUILT_IN, MalformedPolicy, Policy, parse_policy
from affidavit.plan import Reason, Syntax
from affidavit.service.identity.access import needs
from affidavit.service.identity.actor import Actor, Scope
from affidavit.service.openapi import answers, body, problems
from affidavit.service.policies.activate import Unacceptable, activate
from affidavit.service.policies.answers import policies_answer, policy_answer
from affidavit.service.problems import Problem, not_well_formed
from affidavit.service.routing import read_body, syntax_of_body
from affidavit.service.services import TheServices

router = APIRouter()

Judged = Annotated[Actor, needs(Scope.SUBMIT, Scope.APPROVE, Scope.AUDIT, Scope.ADMIN)]
"""Whoever may know the rules: those who are judged by them, and those who set and check them."""
PolicyName = Annotated[str, Path(pattern=r"^[A-Za-z0-9._-]{1,64}$", description="Its name.")]
Version = Annotated[int, Path(ge=1, le=2**31 - 1, description="Counts from 1.")]


@router.get(
    "/v1/policies",
    summary="All policies",
    response_class=JSONResponse,
    responses={200: answers("Every version, newest first.", "Policies"), **problems(401, 403, 503)},
)
def policies(_: Judged, services: TheServices) -> JSONResponse:
    """The built-in policy stands last; it is active where no other is."""
    kept, rules = services.policies.versions(), services.policies.rulebook()
    return JSONResponse(policies_answer(kept, rules))


@router.get(
    "/v1/policies/{name}/{version}",
    summary="A version of a policy",
    response_class=JSONResponse,
    responses={
        200: answers("The policy.", "PolicyVersion"),
        **problems(401, 403, 404, 422, 503),
    },
)
def policy(_: Judged, services: TheServices, name: PolicyName, version: Version) -> JSONResponse:
    """The document as it was signed."""
    rules = services.policies.rulebook()
    if (name, version) == (BUILT_IN.name, BUILT_IN.version):
        return JSONResponse(policy_answer(BUILT_IN, None, rules))
    kept = services.policies.version(name, version)
    if kept is None:
        raise Problem(
            404,
            "not_found",
            f"there is no policy {name} of version {version}; GET /v1/policies lists them.",
        )
    return JSONResponse(policy_answer(kept.policy, kept, rules))


@router.post(
    "/v1/policies",
    summary="Activate a policy",
    status_code=201,
    response_class=JSONResponse,
    responses={
        201: answers("Active from now on.", "PolicyVersion"),
        200: answers("It is active already.", "PolicyVersion"),
        **problems(400, 401, 403, 408, 409, 415, 503),
    },
    openapi_extra=body("Policy", "A policy."),
)
async def new_policy(
    actor: Annotated[Actor, needs(Scope.ADMIN)],
    services: TheServices,
    syntax: Annotated[Syntax, Depends(syntax_of_body)],
    content: Annotated[bytes, Depends(read_body)],
) -> JSONResponse:
    """A name's versions count up; certificates name the one that they were judged by."""
    return await run_in_threadpool(_activated, actor, services, content, syntax)


def policy_of(content: bytes, syntax: Syntax) -> Policy:
    """The policy of a body; raises the problem of there being none in it."""
    try:
        return parse_policy(content, syntax)
    except MalformedPolicy as error:
        raise not_well_formed("malformed_policy", error) from None


def unacceptable(error: Unacceptable) -> Problem:
    """The problem of a well-formed body that cannot stand beside what is kept."""
    reason = Reason(
        code=error.code, pointer=error.pointer, message=error.message, remedy=error.remedy
    )
    return Problem(409, error.code, str(error), reason)


def _activated(actor: Actor, services: TheServices, content: bytes, syntax: Syntax) -> JSONResponse:
    wanted = policy_of(content, syntax)
    try:
        kept, new = activate(
            services.policies,
            wanted,
            services.keyring.current(),
            actor=actor.name,
            at=datetime.now(UTC),
        )
    except Unacceptable as error:
        raise unacceptable(error) from None
    found = policy_answer(kept.policy, kept, services.policies.rulebook())
    return JSONResponse(found, 201 if new else 200)
