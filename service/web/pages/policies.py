"""``/policies`` and ``/waivers``: policy versions, drafts, and exceptions from a policy's rules.

``/policies/draft`` simulates a draft: it shows which verdicts would change, and can activate the
draft. The simulation evaluates the signed statements of existing certificates, newest first, one
page at a time. It neither repeats the accounting nor stores anything. A question such as "what if
the cap were 4" is a draft of the next policy version with that one rule changed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from pydantic import Field

from affidavit.certificate.policy import (
    BUILT_IN,
    WAIVABLE,
    MalformedPolicy,
    Policy,
    parse_policy,
)
from affidavit.plan import Reason
from affidavit.service.certificates.policy_changes import Simulation as PolicySimulation
from affidavit.service.certificates.policy_changes import (
    WaiverRequest,
    WaiverView,
    revoke,
    simulate,
    version_of,
)
from affidavit.service.core.errors import DomainError, MalformedRequest
from affidavit.service.core.problems import Problem
from affidavit.service.core.wire_models import QueryModel
from affidavit.service.identity.actor import Actor
from affidavit.service.identity.scopes import Scope
from affidavit.service.ledger.repository import dataset_names
from affidavit.service.policies.policy_set import PolicyConflict, PolicySet
from affidavit.service.policies.store import StoredPolicy
from affidavit.service.web.dependencies import Services, TheServices
from affidavit.service.web.pages.access import (
    Approver,
    PolicyReader,
    page_actor,
)
from affidavit.service.web.pages.certificates import refused_choices
from affidavit.service.web.pages.forms import SubmittedForm, number
from affidavit.service.web.pages.plan_form import yaml_of
from affidavit.service.web.pages.response import (
    action,
    page,
    respond,
    see_other,
)
from affidavit.service.web.routes.policies import (
    PolicyName,
    Version,
    WaiverId,
    activate_if_agreed,
    grant_if_agreed,
)

router = APIRouter()


@page(router, "/policies")
def policies(request: Request, _: PolicyReader, services: TheServices) -> Response:
    """List all versions."""
    rules = services.policies.policy_set()
    versions = [version_of(stored, rules) for stored in services.policies.versions()]
    return respond(request, {"versions": versions}, template="policies.html")


@page(router, "/policies/{name}/{version}")
def policy(
    request: Request, _: PolicyReader, services: TheServices, name: PolicyName, version: Version
) -> Response:
    """Show a version with each rule's previous value."""
    view = policy_page(services.policies.versions(), services.policies.policy_set(), name, version)
    if view is None:
        raise Problem(404, "not_found", f"policy {name} has no version {version}.")
    return respond(request, view, template="policy.html")


def policy_page(
    stored: list[StoredPolicy], rules: PolicySet, name: str, version: int
) -> dict[str, Any] | None:
    """Return the view of a version, or None if it does not exist."""
    versions = {entry.policy.version: entry for entry in stored if entry.policy.name == name}
    if version not in versions:
        return None
    current, previous = versions[version], versions.get(version - 1)
    return {
        "version": version_of(current, rules),
        "rules": _rules(current.policy, None if previous is None else previous.policy),
        "yaml": yaml_of(current.policy.as_document()),
        "versions": sorted(versions, reverse=True),
    }


_OTHER_FIELDS = frozenset({"schema_version", "name", "version"})


def _rules(policy: Policy, previous: Policy | None) -> list[dict[str, Any]]:
    """Return each rule with its value, its previous value, and whether it changed."""
    now = policy.as_document()
    before = {} if previous is None else previous.as_document()
    return [
        {
            "rule": name,
            "value": _text(now.get(name)),
            "before": _text(before.get(name)),
            "changed": previous is not None and now.get(name) != before.get(name),
        }
        for name in Policy.model_fields
        if name not in _OTHER_FIELDS and (name in now or name in before)
    ]


def _text(value: Any) -> str | None:
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(member, str) for member in value):
        return ", ".join(value) or "none"
    return json.dumps(value, ensure_ascii=False)


# ---- a draft -------------------------------------------------------------------------

DRAFT = "draft"
"""Name of drafts from the built-in policy, whose own name is reserved."""
FORM_RULES = ("epsilon_cap", "delta_cap", "second_opinion", "budget")
"""Rules that the form changes; users change others in the draft."""
NUMERIC_RULES = frozenset({"epsilon_cap", "delta_cap"})
SIMULATION_PAGE_SIZE = 50
"""Certificates that one page of a simulation evaluates."""
MAX_DRAFT_LENGTH = 64 * 1024
Simulator = Annotated[Actor, page_actor(Scope.AUDIT, Scope.ADMIN)]
Text = Annotated[str, Field(max_length=64)]


class DraftQuery(QueryModel):
    """A policy and rules of its next version; unknown rules are refused."""

    policy: Text = ""
    epsilon_cap: Text = ""
    delta_cap: Text = ""
    second_opinion: Text = ""
    budget: Text = ""
    cursor: Annotated[str | None, Field(max_length=512)] = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Simulation:
    """A draft with the changed verdicts of a page of certificates, or its errors.

    ``result`` is None for an invalid draft, and before it is simulated.
    """

    yaml: str
    changes: Mapping[str, str]
    of_policy: str
    known: tuple[str, ...]
    reasons: tuple[Reason, ...] = ()
    result: PolicySimulation | None = None


@page(router, "/policies/draft")
def simulation(
    request: Request,
    _: Simulator,
    services: TheServices,
    parameters: Annotated[DraftQuery, Query()],
) -> Response:
    """Simulate a changed rule of an active policy, or show the empty form."""
    changes = parameters.model_dump(include=set(FORM_RULES))
    rules = services.policies.policy_set()
    view = Simulation(
        yaml=draft_of(rules, parameters.policy, changes),
        changes=changes,
        of_policy=parameters.policy,
        known=tuple(sorted(rules.policies)),
    )
    if any(changes.values()):
        view = _simulate(services, view, parameters.cursor)
    return _respond_draft(request, view)


@action(router, "/policies/draft")
def submit_draft(
    request: Request, actor: Simulator, services: TheServices, form: SubmittedForm
) -> Response:
    """Simulate or activate the submitted draft."""
    view = Simulation(
        yaml=form.get("yaml")[:MAX_DRAFT_LENGTH],
        changes=dict.fromkeys(FORM_RULES, ""),
        of_policy="",
        known=tuple(sorted(services.policies.policy_set().policies)),
    )
    if form.get("do") == "activate":
        return _activate(request, actor, services, view)
    cursor = form.get("cursor")[:512] or None
    view = _simulate(services, view, cursor)
    return _respond_draft(request, view, 422 if view.reasons else 200)


def draft_of(rules: PolicySet, name: str | None, changes: Mapping[str, str]) -> str:
    """Return the YAML of the next version of a policy with ``changes``; empty ones are ignored."""
    policy = rules.policies.get(name or "", rules.default)
    document = policy.as_document()
    if policy == BUILT_IN:
        document |= {"name": DRAFT, "version": 1}
    else:
        document["version"] = policy.version + 1
    for rule in FORM_RULES:
        value = changes.get(rule, "").strip()
        if value:
            document[rule] = number(value) if rule in NUMERIC_RULES else value
    return yaml_of(document)


def read_draft(yaml: str) -> tuple[Policy | None, tuple[Reason, ...]]:
    """Parse ``yaml`` as a policy; returns the policy, or the reasons why it is invalid."""
    try:
        return parse_policy(yaml.encode("utf-8", "replace"), "yaml"), ()
    except MalformedPolicy as error:
        return None, error.reasons


def _simulate(services: Services, view: Simulation, cursor: str | None) -> Simulation:
    """Add the changed verdicts of a page of certificates, or the errors of the draft."""
    draft, reasons = read_draft(view.yaml)
    if draft is None:
        return replace(view, reasons=reasons)
    try:
        result = simulate(services.policies, services.store, draft, cursor, SIMULATION_PAGE_SIZE)
    except PolicyConflict as error:
        return replace(view, reasons=(error.reason,))
    return replace(view, result=result)


def _activate(request: Request, actor: Actor, services: Services, view: Simulation) -> Response:
    if not actor.may(Scope.ADMIN):
        raise Problem(403, "missing_scope", "activating a policy needs the scope admin.")
    policy, reasons = read_draft(view.yaml)
    if policy is None:
        return _respond_draft(request, replace(view, reasons=reasons), 422)
    try:
        stored, _ = activate_if_agreed(services, actor, policy)
    except PolicyConflict as error:
        return _respond_draft(request, replace(view, reasons=(error.reason,)), error.status)
    return see_other(f"/policies/{stored.policy.name}/{stored.policy.version}", done="activated")


def _respond_draft(request: Request, view: Simulation, status: int = 200) -> Response:
    return respond(
        request,
        view,
        template="draft.html",
        fragment="simulation",
        status=status,
    )


# ---- waivers -------------------------------------------------------------------------

WAIVER_FIELDS = ("rule", "policy", "plan_digest", "dataset", "owner", "reason", "expires_at")
MAX_REASON_LENGTH = 2000


@page(router, "/waivers")
def waivers(request: Request, _: PolicyReader, services: TheServices) -> Response:
    """List all waivers, including expired and revoked ones."""
    return _respond_waivers(request, services)


@action(router, "/waivers")
def grant_waiver(
    request: Request, actor: Approver, services: TheServices, form: SubmittedForm
) -> Response:
    """Grant a waiver, by the use case of the API."""
    values = {name: form.get(name) for name in WAIVER_FIELDS if form.get(name)}
    try:
        waiver = WaiverRequest.from_data(_with_zone(values))
        grant_if_agreed(services, actor, waiver)
    except MalformedRequest as error:
        return _respond_waivers(request, services, 422, values=values, reasons=error.reasons)
    except DomainError as error:
        return _respond_waivers(
            request, services, error.status, values=values, reasons=(error.reason,)
        )
    return see_other("/waivers", done="granted")


@action(router, "/waivers/{waiver_id}/revoke")
def revoke_waiver(
    actor: Approver, services: TheServices, waiver_id: WaiverId, form: SubmittedForm
) -> Response:
    """Revoke a waiver and every certificate that depends on it."""
    reason = form.get("reason")
    if not 1 <= len(reason) <= MAX_REASON_LENGTH or "\x00" in reason:
        raise Problem(422, "malformed_request", "enter a reason of at most 2000 characters.")
    revoke(services.policies, waiver_id, reason, services.call_of(actor))
    return see_other("/waivers", done="revoked")


def _with_zone(values: Mapping[str, str]) -> dict[str, str]:
    """Replace the date of a date field by the end of that day in UTC."""
    zoned = dict(values)
    day = zoned.get("expires_at", "")
    if len(day) == len("2027-01-31"):
        zoned["expires_at"] = f"{day}T23:59:59Z"
    return zoned


def _respond_waivers(
    request: Request, services: Services, status: int = 200, **form: Any
) -> Response:
    """Show all waivers, and the form that grants one with the submitted values."""
    versions = (stored.policy for stored in services.policies.versions())
    names = {policy.digest(): f"{policy.name} v{policy.version}" for policy in versions}
    now = services.clock.now()
    with services.engine.connect() as connection:
        plans, datasets = refused_choices(connection), dataset_names(connection)
    view = {
        "plans": plans,
        "datasets": datasets,
        "waivers": [WaiverView.of(waiver, now) for waiver in services.policies.granted()],
        "names": names,
        "rules": sorted(WAIVABLE),
        "policies": sorted(services.policies.policy_set().policies),
        **{"values": {}, "reasons": ()},
        **form,
    }
    return respond(request, view, template="waivers.html", status=status)
