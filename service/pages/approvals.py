"""``/approvals``: what waits for a decision, and the decision with the diff (``approval_view``)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from starlette.concurrency import run_in_threadpool

from affidavit.service.cursors import InvalidCursor
from affidavit.service.identity.actor import Actor, Scope
from affidavit.service.lifecycle.refusals import Impossible
from affidavit.service.lifecycle.wanted import MalformedDecision, read_decision
from affidavit.service.pages.access import page_actor
from affidavit.service.pages.answer import action, answer, page, see_other
from affidavit.service.pages.approval_view import (
    FieldChange,
    PendingLine,
    ToDecide,
    is_pending,
    pending,
    to_decide,
)
from affidavit.service.pages.forms import TheForm
from affidavit.service.pages.forms_of_a_view import Rows
from affidavit.service.problems import invalid_cursor
from affidavit.service.routes.certificates import no_such
from affidavit.service.routes.refused import impossible
from affidavit.service.routing import CertificateId
from affidavit.service.services import Services, TheServices

router = APIRouter()

Viewer = Annotated[Actor, page_actor(Scope.SUBMIT, Scope.APPROVE, Scope.AUDIT)]
Approver = Annotated[Actor, page_actor(Scope.APPROVE)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """What is decided about, and why the last try could not be kept."""

    found: ToDecide
    open: bool
    wrong: str | None = None
    comment: str = ""


@page(router, "/approvals")
def waiting(
    request: Request,
    _: Viewer,
    services: TheServices,
    cursor: Annotated[str | None, Query(max_length=512)] = None,
) -> Response:
    """What waits, latest first."""
    try:
        with services.engine.connect() as connection:
            view = pending(connection, datetime.now(UTC), cursor)
    except InvalidCursor as error:
        raise invalid_cursor(error) from None
    return answer(request, view, template="approvals.html", rows=Rows(PendingLine, view.lines))


@page(router, "/approvals/{certificate_id}")
def one(
    request: Request, _: Viewer, services: TheServices, certificate_id: CertificateId
) -> Response:
    """One certificate with what is new in it, and the decision's form while it waits."""
    return _shown(request, _decision(services, certificate_id))


@action(router, "/approvals/{certificate_id}")
async def decide(
    request: Request,
    actor: Approver,
    services: TheServices,
    certificate_id: CertificateId,
    sent: TheForm,
) -> Response:
    """Approve or reject the envelope that was shown, by the use case of the API."""
    asked = {name: sent.get(name) for name in ("decision", "envelope", "comment")}
    try:
        wanted = read_decision(json.dumps(asked).encode())
        at = datetime.now(UTC)
        found = await run_in_threadpool(services.approve, certificate_id, wanted, actor, at)
    except MalformedDecision as error:
        wrong = " ".join(f"{reason.message} {reason.remedy}" for reason in error.reasons)
        return await _again(request, services, certificate_id, wrong, sent.get("comment"), 422)
    except Impossible as error:
        status = impossible(error).status
        wrong = f"{error} ({error.code})"
        return await _again(request, services, certificate_id, wrong, sent.get("comment"), status)
    if found is None:
        raise no_such(certificate_id)
    done = "rejected" if wanted.decision == "reject" else "issued" if found.issued else "approved"
    return see_other(f"/approvals/{certificate_id}", done=done)


async def _again(
    request: Request,
    services: Services,
    certificate_id: str,
    wrong: str,
    comment: str,
    status: int,
) -> Response:
    view = await run_in_threadpool(_decision, services, certificate_id, wrong, comment)
    return _shown(request, view, status)


def _decision(
    services: Services, certificate_id: str, wrong: str | None = None, comment: str = ""
) -> Decision:
    with services.engine.connect() as connection:
        found = to_decide(connection, certificate_id)
    if found is None:
        raise no_such(certificate_id)
    return Decision(found=found, open=is_pending(found), wrong=wrong, comment=comment)


def _shown(request: Request, view: Decision, status: int = 200) -> Response:
    rows = Rows(FieldChange, view.found.changes)
    return answer(
        request, view, template="approval.html", rows=rows, status=status, title="changes"
    )
