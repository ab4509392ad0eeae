"""Decisions about a certificate: approvals, revocation, and its issues."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Response
from starlette.concurrency import run_in_threadpool

from affidavit.client import Page, Revocation
from affidavit.service.certificate_models import Result
from affidavit.service.identity.access import Reader, needs
from affidavit.service.identity.actor import Actor, Scope
from affidavit.service.lifecycle.decisions import approve, history, reissue, revoke
from affidavit.service.lifecycle.issuance import result_document
from affidavit.service.lifecycle.models import (
    DecisionRequest,
    Issue,
    RevocationRequest,
)
from affidavit.service.openapi import JSON, problems
from affidavit.service.routes.certificates import find, no_such
from affidavit.service.routing import CertificateId, JsonRoute
from affidavit.service.services import TheServices
from affidavit.service.store import StoredCertificate

router = APIRouter(route_class=JsonRoute)

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
    """With the last required approval, the certificate is issued with all approvals in it."""
    about = (certificate_id, request, actor, services.clock.now())
    result = approve(services.engine, services.keyring, *about)
    if result is None:
        raise no_such(certificate_id)
    return Response(
        result_document(result.certificate), 201, _location(result.certificate), media_type=JSON
    )


@router.post(
    "/v1/certificates/{certificate_id}/revocation",
    summary="Revoke a certificate",
    status_code=201,
    responses={
        201: {"description": "Revoked."},
        200: {"description": "It was revoked before.", "model": Revocation},
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
    """Revokes the current issue and all before it, for good; requesters may revoke too."""
    result = revoke(services.engine, certificate_id, request, actor, services.clock.now())
    if result is None:
        raise no_such(certificate_id)
    revocation, new = result
    response.status_code = 201 if new else 200
    response.headers["Location"] = f"/v1/certificates/{certificate_id}/issues/{revocation.issue}"
    return revocation


@router.get(
    "/v1/certificates/{certificate_id}/issues",
    summary="All issues of a certificate",
    responses=problems(404),
)
def issues(_: Reader, services: TheServices, certificate_id: CertificateId) -> Page[Issue]:
    """Latest first, with approvals and revocation."""
    items = history(services.engine, certificate_id)
    if not items:
        raise no_such(certificate_id)
    return Page[Issue](items=items)


@router.get(
    "/v1/certificates/{certificate_id}/issues/{issue}",
    summary="An issue of a certificate",
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
    """A person's decision: sending the plan again never brings back a revoked certificate."""
    certificate = await run_in_threadpool(find, services, certificate_id)
    now = services.clock.now()
    answer = await reissue(services.policies, services.submit_plan, certificate, actor, now)
    return Response(
        result_document(answer.certificate),
        201 if answer.created else 200,
        _location(answer.certificate),
        media_type=JSON,
    )


def _location(issue: StoredCertificate) -> dict[str, str]:
    return {"Location": f"/v1/certificates/{issue.id}/issues/{issue.issue}"}
