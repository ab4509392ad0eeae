"""``/policies``: the rules, each version beside the last, and what a draft would break."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from starlette.concurrency import run_in_threadpool

from affidavit.plan import Reason
from affidavit.service.cursors import InvalidCursor
from affidavit.service.identity.actor import Actor, Scope
from affidavit.service.pages.access import page_actor
from affidavit.service.pages.answer import action, answer, page, see_other
from affidavit.service.pages.forms import TheForm
from affidavit.service.pages.forms_of_a_view import Rows
from affidavit.service.pages.policy_view import (
    ASKED,
    ChangeLine,
    PolicyLine,
    RuleLine,
    Simulation,
    changes_of,
    draft_of,
    policies,
    policy_page,
    read_draft,
)
from affidavit.service.policies.activate import Unacceptable, activate
from affidavit.service.policies.rulebook import Overlap
from affidavit.service.policies.simulate import simulate
from affidavit.service.problems import Problem, invalid_cursor
from affidavit.service.routes.policies import PolicyName, Version
from affidavit.service.services import Services, TheServices

router = APIRouter()

JUDGED = 50
"""Certificates that a page of the simulation judges."""
LONGEST = 64 * 1024
Judged = Annotated[Actor, page_actor(Scope.SUBMIT, Scope.APPROVE, Scope.AUDIT, Scope.ADMIN)]
Simulator = Annotated[Actor, page_actor(Scope.AUDIT, Scope.ADMIN)]
Admin = Annotated[Actor, page_actor(Scope.ADMIN)]
Text = Annotated[str, Query(max_length=64)]


@page(router, "/policies")
def every(request: Request, _: Judged, services: TheServices) -> Response:
    """Every version, newest first; the built-in one last."""
    view = policies(services.policies.versions(), services.policies.rulebook())
    return answer(request, view, template="policies.html", rows=Rows(PolicyLine, view.lines))


@page(router, "/policies/draft")
def what_if(
    request: Request,
    _: Simulator,
    services: TheServices,
    policy: Text = "",
    epsilon_cap: Text = "",
    delta_cap: Text = "",
    approvals: Text = "",
    valid_days: Text = "",
    second_opinion: Text = "",
    budget: Text = "",
    cursor: Annotated[str | None, Query(max_length=512)] = None,
) -> Response:
    """What would break if a rule of an active policy were another, or the form that asks."""
    asked = {
        "epsilon_cap": epsilon_cap,
        "delta_cap": delta_cap,
        "approvals": approvals,
        "valid_days": valid_days,
        "second_opinion": second_opinion,
        "budget": budget,
    }
    rules = services.policies.rulebook()
    view = Simulation(
        yaml=draft_of(rules, policy, asked),
        asked=asked,
        of_policy=policy,
        known=tuple(sorted(rules.policies)),
    )
    if any(asked.values()):
        view = _simulated(services, view, cursor)
    return _shown(request, view)


@action(router, "/policies/draft")
async def draft(
    request: Request, actor: Simulator, services: TheServices, sent: TheForm
) -> Response:
    """Simulate the draft that was written, or activate it."""
    view = Simulation(
        yaml=sent.get("yaml")[:LONGEST],
        asked=dict.fromkeys(ASKED, ""),
        of_policy="",
        known=tuple(sorted(services.policies.rulebook().policies)),
    )
    if sent.get("do") == "activate":
        return await run_in_threadpool(_activated, request, actor, services, view)
    cursor = sent.get("cursor")[:512] or None
    found = await run_in_threadpool(_simulated, services, view, cursor)
    return _shown(request, found, 422 if found.reasons else 200)


@page(router, "/policies/{name}/{version}")
def one(
    request: Request, _: Judged, services: TheServices, name: PolicyName, version: Version
) -> Response:
    """One version, rule by rule beside the version before it."""
    kept, rules = services.policies.versions(), services.policies.rulebook()
    view = policy_page(kept, rules, name, version)
    if view is None:
        raise Problem(404, "not_found", f"there is no policy {name} of version {version}.")
    title = f"{name}-{version}"
    rows = Rows(RuleLine, view.rules)
    return answer(request, view, template="policy.html", rows=rows, title=title)


def _simulated(services: Services, view: Simulation, cursor: str | None) -> Simulation:
    """``view`` with what a page of certificates would become, or with what is wrong in it."""
    draft, reasons = read_draft(view.yaml)
    if draft is None:
        return replace(view, reasons=reasons)
    try:
        said = simulate(services.policies, services.store, draft, cursor, JUDGED)
    except InvalidCursor as error:
        raise invalid_cursor(error) from None
    except Overlap as overlap:
        remedy = f"Take it out of a new version of {overlap.other} first."
        return replace(
            view, reasons=(_reason("policy_overlap", "/datasets", f"{overlap}.", remedy),)
        )
    return replace(view, judged=said.judged, lines=changes_of(said), next=said.next)


def _activated(request: Request, actor: Actor, services: Services, view: Simulation) -> Response:
    if not actor.may(Scope.ADMIN):
        raise Problem(403, "missing_scope", "activating a policy needs the scope admin.")
    policy, reasons = read_draft(view.yaml)
    if policy is None:
        return _shown(request, replace(view, reasons=reasons), 422)
    try:
        kept, _ = activate(
            services.policies,
            policy,
            services.keyring.current(),
            actor=actor.name,
            at=datetime.now(UTC),
        )
    except Unacceptable as error:
        found = _reason(error.code, error.pointer, error.message, error.remedy)
        return _shown(request, replace(view, reasons=(found,)), 409)
    return see_other(f"/policies/{kept.policy.name}/{kept.policy.version}", done="activated")


def _reason(code: str, pointer: str, message: str, remedy: str) -> Reason:
    return Reason(code=code, pointer=pointer, message=message, remedy=remedy)


def _shown(request: Request, view: Simulation, status: int = 200) -> Response:
    rows = Rows(ChangeLine, view.lines)
    return answer(
        request, view, template="draft.html", rows=rows, status=status, title="simulation"
    )
