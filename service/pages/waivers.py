"""``/waivers``: exceptions to a policy's rule, granted by somebody else and for a time."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Annotated

from fastapi import APIRouter, Request, Response
from starlette.concurrency import run_in_threadpool

from affidavit.certificate.policy import WAIVABLE
from affidavit.plan import Reason
from affidavit.service.identity.actor import Actor, Scope
from affidavit.service.pages.access import page_actor
from affidavit.service.pages.answer import action, answer, page, see_other
from affidavit.service.pages.forms import Form, TheForm
from affidavit.service.pages.forms_of_a_view import Rows
from affidavit.service.pages.policy_view import WaiverLine, Waivers, policy_names, waivers
from affidavit.service.policies.activate import Unacceptable
from affidavit.service.policies.waive import NotYours, grant, revoke
from affidavit.service.policies.wanted import MalformedWaiver, read_waiver
from affidavit.service.problems import Problem
from affidavit.service.routes.waivers import WaiverId
from affidavit.service.services import Services, TheServices

router = APIRouter()

FIELDS = ("rule", "policy", "plan_digest", "dataset", "owner", "reason", "expires_at")
LONGEST_REASON = 2000
Judged = Annotated[Actor, page_actor(Scope.SUBMIT, Scope.APPROVE, Scope.AUDIT, Scope.ADMIN)]
Approver = Annotated[Actor, page_actor(Scope.APPROVE)]


@dataclass(frozen=True, kw_only=True, slots=True)
class WaiversPage:
    """Every waiver, and the form that grants one, as it was filled in."""

    waivers: Waivers
    rules: tuple[str, ...]
    policies: tuple[str, ...]
    values: Mapping[str, str] = field(default_factory=dict)
    reasons: tuple[Reason, ...] = ()


@page(router, "/waivers")
def every(request: Request, _: Judged, services: TheServices) -> Response:
    """Every waiver, newest first; expired and revoked ones too."""
    return _shown(request, services, {}, ())


@action(router, "/waivers")
async def new(request: Request, actor: Approver, services: TheServices, sent: TheForm) -> Response:
    """Grant one, by the use case of the API."""
    return await run_in_threadpool(_granted, request, actor, services, sent)


@action(router, "/waivers/{waiver_id}/revoke")
async def end(
    actor: Approver, services: TheServices, waiver_id: WaiverId, sent: TheForm
) -> Response:
    """Revoke one, with every certificate that rests on it."""
    reason = sent.get("reason")
    if not 1 <= len(reason) <= LONGEST_REASON or "\x00" in reason:
        raise Problem(422, "malformed_request", "say why, in at most 2000 characters.")
    now = datetime.now(UTC)
    found = await run_in_threadpool(
        lambda: revoke(services.policies, waiver_id, reason, actor=actor.name, at=now)
    )
    if found is None:
        raise Problem(404, "not_found", f"there is no waiver {waiver_id}.")
    return see_other("/waivers", done="revoked")


def _granted(request: Request, actor: Actor, services: Services, sent: Form) -> Response:
    values = {name: sent.get(name) for name in FIELDS if sent.get(name)}
    try:
        wanted = read_waiver(json.dumps(_with_zone(values)).encode())
        key = services.keyring.current()
        grant(services.policies, wanted, key, actor=actor.name, at=datetime.now(UTC))
    except MalformedWaiver as error:
        return _shown(request, services, values, error.reasons, 422)
    except NotYours as error:
        reason = _reason("four_eyes", "", f"{error}.", "Ask another approver.")
        return _shown(request, services, values, (reason,), 403)
    except Unacceptable as error:
        reason = _reason(error.code, error.pointer, error.message, error.remedy)
        return _shown(request, services, values, (reason,), 409)
    return see_other("/waivers", done="granted")


def _with_zone(values: Mapping[str, str]) -> dict[str, str]:
    """What a browser's field for a day says, as the end of that day in UTC."""
    given = dict(values)
    day = given.get("expires_at", "")
    if len(day) == len("2027-01-31"):
        given["expires_at"] = f"{day}T23:59:59Z"
    return given


def _reason(code: str, pointer: str, message: str, remedy: str) -> Reason:
    return Reason(code=code, pointer=pointer, message=message, remedy=remedy)


def _shown(
    request: Request,
    services: Services,
    values: Mapping[str, str],
    reasons: tuple[Reason, ...],
    status: int = 200,
) -> Response:
    named = policy_names(services.policies.versions())
    found = waivers(services.policies.granted(), named, datetime.now(UTC))
    view = WaiversPage(
        waivers=found,
        rules=tuple(sorted(WAIVABLE)),
        policies=tuple(sorted(services.policies.rulebook().policies)),
        values=values,
        reasons=reasons,
    )
    rows = Rows(WaiverLine, found.lines)
    return answer(request, view, template="waivers.html", rows=rows, status=status)
