"""``/v1/certificates``: certify plans, and list, read, approve and revoke certificates.

``POST /v1/diagnoses`` takes a plan and a claim, and returns the mistakes that explain the claim.
"""

from __future__ import annotations

import json
import re
from datetime import datetime
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path, Query, Request, Response
from fastapi.responses import JSONResponse
from pydantic import Field
from starlette.concurrency import run_in_threadpool

from affidavit.client import Certification, Page, Revocation
from affidavit.plan import Name, Syntax
from affidavit.service.certificates.certificate_curves import NoCurve
from affidavit.service.certificates.certifications import LOST, MAX_SECONDS, WAIT_SECONDS
from affidavit.service.certificates.decisions import (
    DecisionRequest,
    Issue,
    RevocationRequest,
    approve,
    history,
    reissue,
    revoke,
)
from affidavit.service.certificates.preview_plan import diagnose_request
from affidavit.service.certificates.store import PlanRequest, StoredCertificate, no_such
from affidavit.service.certificates.submit_plan import result_document
from affidavit.service.core.problems import Problem
from affidavit.service.core.wire_models import (
    UUID,
    BundleDocument,
    CertificateSummary,
    CurvesDocument,
    Diagnosis,
    Identifier,
    QueryModel,
    Result,
    Status,
    Verdict,
)
from affidavit.service.identity.actor import Actor
from affidavit.service.identity.scopes import Scope
from affidavit.service.log.reader import with_inclusion
from affidavit.service.web.access import Reader, needs
from affidavit.service.web.dependencies import TheServices
from affidavit.service.web.openapi import body, problems
from affidavit.service.web.routing import (
    JSON,
    CertificateId,
    Instant,
    JsonRoute,
    next_page,
    read_body,
    syntax_of_body,
)

_WAIT = re.compile(r"(?:^|[,;\s])wait\s*=\s*([0-9]{1,6})(?![0-9.])", re.IGNORECASE)

router = APIRouter(route_class=JsonRoute)


@router.post(
    "/v1/certificates",
    summary="Certify a plan",
    response_class=Response,
    status_code=201,
    responses={
        201: {
            "model": Result,
            "description": "Certified now; the verdict is in the body.",
        },
        200: {
            "model": Result,
            "description": "Already certified; the same certificate.",
        },
        202: {
            "model": Certification,
            "description": "Still in progress; poll `Location`.",
        },
    },
    openapi_extra=body("Plan", "A training plan."),
)
async def certify_plan(
    actor: Annotated[Actor, needs(Scope.SUBMIT)], http: Request, services: TheServices
) -> Response:
    """Every well-formed plan gets a signed, stored certificate, whatever the verdict.

    `Prefer: wait=N` says how many seconds the client waits: 30 by default, 60 at most.
    """
    # Called, not declared as dependencies, which would slow down the most frequent requests.
    syntax = await syntax_of_body(http)
    content = await read_body(http)
    request = PlanRequest(
        requester=actor.name,
        received_at=services.clock.now(),
        content_type=http.headers["content-type"][:255],
        body=content,
        team=actor.owning_team,
    )
    submission = await services.certifications.submit(
        actor.name, services.submit_plan(request, syntax), _wait_seconds(http)
    )
    if isinstance(submission, str):
        return _accepted(submission, request.received_at)
    if submission.created:
        http.state.verdict = submission.certificate.verdict
    return Response(
        result_document(submission.certificate),
        201 if submission.created else 200,
        {"Location": f"/v1/certificates/{submission.certificate.id}"},
        media_type=JSON,
    )


def _wait_seconds(http: Request) -> float:
    """Return the seconds that the client waits for a response (``Prefer: wait``, RFC 7240)."""
    wait = _WAIT.search(",".join(http.headers.getlist("prefer")))
    return min(MAX_SECONDS, int(wait[1])) if wait else WAIT_SECONDS


def _accepted(identity: str, at: datetime) -> Response:
    answer = Certification(
        id=identity, state="running", certificate=None, problem=None, requested_at=at
    )
    headers = {"Location": f"/v1/certifications/{identity}", "Retry-After": "1"}
    return Response(answer.model_dump_json(), 202, headers, media_type=JSON)


@router.get(
    "/v1/certifications/{certification_id}",
    summary="Get a certification",
    responses=problems(404),
    response_description="Its state: `done` with the certificate's id, or `failed` with why.",
)
def certification(
    actor: Annotated[Actor, needs(Scope.SUBMIT)],
    services: TheServices,
    certification_id: Annotated[str, Path(pattern=UUID)],
    response: Response,
) -> Certification:
    """The progress of a certification that was answered with 202, for its requester.

    It stops if nobody polls it for five minutes, and is deleted after a day.
    """
    row = services.certifications.find(certification_id, actor.name)
    if row is None:
        raise Problem(404, "not_found", "You have no certification with this id; send the plan.")
    state = services.certifications.state_of(row)
    if state == "running":
        response.headers["Retry-After"] = "1"
    problem = json.loads(row.problem) if row.problem else LOST.document()
    return Certification(
        id=row.id,
        state=state,
        certificate=row.certificate_id,
        problem=problem if state == "failed" else None,
        requested_at=row.requested_at,
    )


class CertificateQuery(QueryModel):
    """Query parameters; unknown ones are refused, because a misspelt filter would match all."""

    verdict: Verdict | None = None
    status: Status | None = None
    plan_digest: Identifier | None = None
    name: Name | None = None
    created_after: Instant | None = None
    created_before: Instant | None = None
    cursor: Annotated[str, Field(max_length=512)] | None = None
    limit: Annotated[int, Field(ge=1, le=200)] = 50


@router.get("/v1/certificates", summary="List certificates")
def certificates(
    _: Reader,
    services: TheServices,
    query: Annotated[CertificateQuery, Query()],
    response: Response,
) -> Page[CertificateSummary]:
    """Current issues, newest first; ``next`` is the path of the following page, or null."""
    filters = query.model_dump(exclude={"cursor", "limit"})
    page, cursor = services.store.page(query.cursor, query.limit, **filters)
    items = [CertificateSummary.model_validate(row) for row in page]
    following = next_page(response, "/v1/certificates", query, cursor=cursor)
    return Page[CertificateSummary](items=items, next=following)


def _json(model: type[Any], description: str) -> dict[int | str, dict[str, Any]]:
    return {200: {"model": model, "description": description}, **problems(404)}


@router.get(
    "/v1/certificates/{certificate_id}",
    summary="Get a certificate",
    response_class=Response,
    responses=_json(Result, "The result."),
)
def certificate(_: Reader, services: TheServices, certificate_id: CertificateId) -> Response:
    """The result document with its bundle."""
    return Response(result_document(services.store.get(certificate_id)), media_type=JSON)


@router.get(
    "/v1/certificates/{certificate_id}/bundle",
    summary="Get a certificate's signed bundle",
    response_class=Response,
    responses=_json(BundleDocument, "The bundle."),
)
def bundle(_: Reader, services: TheServices, certificate_id: CertificateId) -> Response:
    """The input of ``affidavit verify``, with the log entry as soon as there is one."""
    stored = services.store.get(certificate_id)
    return Response(with_inclusion(services.log, stored.bundle), media_type=JSON)


@router.get(
    "/v1/certificates/{certificate_id}/curve",
    summary="Get a certificate's privacy curves",
    response_class=Response,
    responses=_json(CurvesDocument, "The curves."),
)
async def curve(_: Reader, services: TheServices, certificate_id: CertificateId) -> Response:
    """The output of ``affidavit curve --json``: ε at any δ, attacks, beliefs, trade-off."""
    stored = await run_in_threadpool(services.store.get, certificate_id)
    try:
        document = await services.draw_certificate.curves(stored)
    except NoCurve as error:
        raise Problem(
            404,
            "no_curve",
            "This certificate has no curve: it claims nothing about its plan, or only at one δ.",
            *error.reasons,
        ) from None
    return Response(document, media_type=JSON)


# ---- approvals and revocations -------------------------------------------------------

IssueNumber = Annotated[int, Path(ge=1, le=2**31 - 1, description="An issue's number, from 1.")]


@router.post(
    "/v1/certificates/{certificate_id}/approvals",
    summary="Approve or reject a certificate",
    response_class=Response,
    status_code=201,
    responses={
        201: {
            "description": "The decision is stored; the certificate's current issue.",
            "model": Result,
        },
        **problems(404, 409),
    },
)
def approve_certificate(
    actor: Annotated[Actor, needs(Scope.APPROVE)],
    services: TheServices,
    certificate_id: CertificateId,
    request: DecisionRequest,
) -> Response:
    """The last required approval issues the certificate, which then contains all approvals."""
    about = (certificate_id, request, actor, services.clock.now())
    issue, _ = approve(services.engine, services.keyring, *about)
    return Response(result_document(issue), 201, _location(issue), media_type=JSON)


@router.post(
    "/v1/certificates/{certificate_id}/revocation",
    summary="Revoke a certificate",
    status_code=201,
    responses={
        201: {"description": "Revoked."},
        200: {"description": "It was already revoked.", "model": Revocation},
        **problems(404, 409),
    },
)
def revoke_certificate(
    actor: Annotated[Actor, needs(Scope.APPROVE, Scope.ADMIN, always=True)],
    services: TheServices,
    certificate_id: CertificateId,
    request: RevocationRequest,
    response: Response,
) -> Revocation:
    """Permanently revokes the current issue and all before it; requesters may revoke too."""
    now = services.clock.now()
    revocation, new = revoke(services.engine, certificate_id, request, actor, now)
    response.status_code = 201 if new else 200
    response.headers["Location"] = f"/v1/certificates/{certificate_id}/issues/{revocation.issue}"
    return revocation


@router.get(
    "/v1/certificates/{certificate_id}/issues",
    summary="List a certificate's issues",
    responses=problems(404),
)
def issues(_: Reader, services: TheServices, certificate_id: CertificateId) -> Page[Issue]:
    """Latest first, with approvals and revocation."""
    return Page[Issue](items=history(services.engine, certificate_id))


@router.get(
    "/v1/certificates/{certificate_id}/issues/{issue}",
    summary="Get an issue of a certificate",
    response_class=Response,
    responses={
        200: {"description": "Its result.", "model": Result},
        **problems(404),
    },
)
def issue_by_number(
    _: Reader, services: TheServices, certificate_id: CertificateId, issue: IssueNumber
) -> Response:
    """The first response, with the signed bundle; a trusted issue before an untrusted one."""
    for stored in services.store.issues(certificate_id):
        if stored.issue == issue:
            return Response(result_document(stored), media_type=JSON)
    raise no_such(f"{certificate_id} with an issue {issue}")


@router.post(
    "/v1/certificates/{certificate_id}/issues",
    summary="Reissue a revoked, rejected or expired certificate",
    response_class=Response,
    status_code=201,
    responses={
        201: {"description": "The new issue.", "model": Result},
        200: {"description": "Another request reissued it first: its new issue.", "model": Result},
        **problems(404, 409),
    },
)
async def reissue_certificate(
    actor: Annotated[Actor, needs(Scope.APPROVE)],
    services: TheServices,
    certificate_id: CertificateId,
) -> Response:
    """Requires a person: sending the plan again never restores a revoked certificate."""
    certificate = await run_in_threadpool(services.store.get, certificate_id)
    now = services.clock.now()
    submission = await reissue(services.policies, services.submit_plan, certificate, actor, now)
    return Response(
        result_document(submission.certificate),
        201 if submission.created else 200,
        _location(submission.certificate),
        media_type=JSON,
    )


def _location(issue: StoredCertificate) -> dict[str, str]:
    return {"Location": f"/v1/certificates/{issue.id}/issues/{issue.issue}"}


# ---- diagnoses -----------------------------------------------------------------------


@router.post(
    "/v1/diagnoses",
    summary="Diagnose a claim",
    response_class=JSONResponse,
    responses={
        200: {
            "model": Diagnosis,
            "description": "What is certified, and the mistakes that explain the claim.",
        },
    },
    openapi_extra=body("DiagnosisRequest", "A training plan and the number claimed for it."),
)
async def diagnose_claim(
    _: Reader,
    services: TheServices,
    syntax: Annotated[Syntax, Depends(syntax_of_body)],
    content: Annotated[bytes, Depends(read_body)],
) -> JSONResponse:
    """Information, not a guarantee: it is neither signed nor stored."""
    return JSONResponse(await diagnose_request(services.pool, content, syntax))
