"""``/waivers``: exceptions to a policy's rule, granted by somebody else and for a time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from fastapi import APIRouter, Request, Response

from affidavit.certificate.policy import WAIVABLE
from affidavit.service.dependencies import Services, TheServices
from affidavit.service.errors import DomainError, MalformedRequest
from affidavit.service.pages.access import Approver, PolicyReader
from affidavit.service.pages.forms import SubmittedForm
from affidavit.service.pages.response import (
    ListPage,
    Rows,
    action,
    page,
    respond,
    see_other,
    view_of,
)
from affidavit.service.policies.models import WaiverRequest
from affidavit.service.policies.service import revoke
from affidavit.service.policies.store import StoredWaiver
from affidavit.service.problems import Problem
from affidavit.service.routes.policies import WaiverId, grant_agreed

router = APIRouter()

FIELDS = ("rule", "policy", "plan_digest", "dataset", "owner", "reason", "expires_at")
LONGEST_REASON = 2000


@dataclass(frozen=True, kw_only=True, slots=True)
class WaiverLine:
    """A waiver in one line."""

    id: str
    status: str
    rule: str
    plan_digest: str | None
    dataset: str | None
    policy: str
    owner: str
    reason: str
    granted_by: str
    granted_at: str
    expires_at: str
    revoked_by: str | None
    revoked_because: str | None


@page(router, "/waivers")
def waivers(request: Request, _: PolicyReader, services: TheServices) -> Response:
    """Every waiver, including expired and revoked ones."""
    return _respond(request, services)


@action(router, "/waivers")
def grant_waiver(
    request: Request, actor: Approver, services: TheServices, form: SubmittedForm
) -> Response:
    """Grant a waiver, by the use case of the API."""
    values = {name: form.get(name) for name in FIELDS if form.get(name)}
    try:
        waiver = WaiverRequest.from_data(_with_zone(values))
        grant_agreed(services, actor, waiver)
    except MalformedRequest as error:
        return _respond(request, services, 422, values=values, reasons=error.reasons)
    except DomainError as error:
        return _respond(request, services, error.status, values=values, reasons=(error.reason,))
    return see_other("/waivers", done="granted")


@action(router, "/waivers/{waiver_id}/revoke")
def revoke_waiver(
    actor: Approver, services: TheServices, waiver_id: WaiverId, form: SubmittedForm
) -> Response:
    """Revoke a waiver and every certificate that depends on it."""
    reason = form.get("reason")
    if not 1 <= len(reason) <= LONGEST_REASON or "\x00" in reason:
        raise Problem(422, "malformed_request", "enter a reason of at most 2000 characters.")
    revoke(services.policies, waiver_id, reason, services.call_of(actor))
    return see_other("/waivers", done="revoked")


def _with_zone(values: Mapping[str, str]) -> dict[str, str]:
    """``values`` with the date of a browser's date field as the end of that day in UTC."""
    zoned = dict(values)
    day = zoned.get("expires_at", "")
    if len(day) == len("2027-01-31"):
        zoned["expires_at"] = f"{day}T23:59:59Z"
    return zoned


def _line(stored: StoredWaiver, policies: Mapping[str, str], now: datetime) -> WaiverLine:
    """A waiver in one line; ``policies`` are the names of policies by digest."""
    waiver = stored.waiver
    return view_of(
        WaiverLine,
        waiver,
        status=stored.status_at(now),
        policy=policies.get(waiver.policy, waiver.policy),
        granted_by=waiver.created_by,
        granted_at=waiver.created_at,
        revoked_by=stored.revoked_by,
        revoked_because=stored.revocation_reason,
    )


def _respond(request: Request, services: Services, status: int = 200, **form: Any) -> Response:
    """Every waiver, and the ``form`` that grants one, as it was filled in."""
    versions = (stored.policy for stored in services.policies.versions())
    names = {policy.digest(): f"{policy.name} v{policy.version}" for policy in versions}
    now = services.clock.now()
    lines = tuple(_line(waiver, names, now) for waiver in services.policies.granted())
    view = {
        "waivers": ListPage(lines=lines),
        "rules": sorted(WAIVABLE),
        "policies": sorted(services.policies.policy_set().policies),
        **{"values": {}, "reasons": ()},
        **form,
    }
    rows = Rows(WaiverLine, lines)
    return respond(request, view, template="waivers.html", rows=rows, status=status)
