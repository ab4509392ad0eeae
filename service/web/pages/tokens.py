"""``/tokens``: list, create and revoke tokens.

The response to the form shows a new token once, without a redirect, because only its hash is
stored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import APIRouter, Request, Response

from affidavit.service.identity.scopes import Scope
from affidavit.service.identity.tokens import MAX_DAYS, TokenError
from affidavit.service.web.dependencies import Services, TheServices
from affidavit.service.web.pages.access import Admin, RevokingAdmin
from affidavit.service.web.pages.forms import SubmittedForm
from affidavit.service.web.pages.response import (
    action,
    page,
    respond,
    see_other,
)

DEFAULT_DAYS = 90
EMPTY: Mapping[str, Any] = {
    **dict.fromkeys(("name", "person", "team", "queues", "datasets"), ""),
    **{"scopes": (), "days": str(DEFAULT_DAYS)},
}
"""The initial values of the form."""
MEANINGS = {
    "submit": "submit plans, start runs",
    "approve": "approve certificates, grant waivers, revoke",
    "audit": "read everything, including the audit log",
    "work": "claim runs of the queues, and charge the data sets, named below",
    "admin": "manage policies, budgets, tokens and keys",
}

router = APIRouter()


@page(router, "/tokens")
def tokens(request: Request, _: Admin, services: TheServices) -> Response:
    """List the tokens."""
    return _respond(request, services)


@action(router, "/tokens")
def create_token(
    request: Request, actor: Admin, services: TheServices, form: SubmittedForm
) -> Response:
    """Create a token and show it once."""
    draft: dict[str, Any] = {name: form.get(name) for name in EMPTY}
    draft |= {"scopes": form.all("scope"), "days": form.get("days") or str(DEFAULT_DAYS)}
    now = services.clock.now()
    try:
        scopes, days = _scopes(draft["scopes"]), _days(draft["days"])
        # Otherwise a single administrator could act as two people with a second token.
        proposal = {**draft, "scopes": sorted(scopes)}
        token, secret = services.four_eyes.carry_out(
            "token",
            proposal,
            actor,
            now,
            lambda approve: services.tokens.new(
                draft["name"],
                scopes,
                days,
                by=actor.name,
                at=now,
                person=draft["person"] or None,
                team=draft["team"] or None,
                queues=draft["queues"].split(),
                datasets=draft["datasets"].split(),
                approve=approve,
            ),
        )
    except TokenError as error:
        return _respond(request, services, 422, draft=draft, wrong=f"{error}.")
    response = _respond(request, services, 201, made=secret.text, made_for=token.name)
    response.headers["Location"] = "/tokens"
    return response


@action(router, "/tokens/{token_id}/revocation")
def revoke_token(
    request: Request,
    actor: RevokingAdmin,
    services: TheServices,
    form: SubmittedForm,
    token_id: str,
) -> Response:
    """Revoke a token."""
    try:
        services.tokens.revoke(token_id, form.get("reason"), by=actor.name, at=services.clock.now())
    except TokenError as error:
        return _respond(request, services, 422, wrong=f"{error}.")
    return see_other("/tokens", done="revoked")


def _scopes(names: Sequence[str]) -> list[Scope]:
    known = {scope.value for scope in Scope}
    if not names:
        raise TokenError("a token needs at least one scope; select one")
    if unknown := [name for name in names if name not in known]:
        raise TokenError(f"{unknown[0][:80]!r} is not a scope; select one of {', '.join(Scope)}")
    return [Scope(name) for name in names]


def _days(text: str) -> int:
    plain = text.isascii() and text.isdecimal() and len(text) < 7
    if not plain:
        raise TokenError(f"a token is valid for a whole number of 1 to {MAX_DAYS} days")
    return int(text)


def _respond(request: Request, services: Services, status: int = 200, **shown: Any) -> Response:
    """Show the tokens, active ones first, each newest first.

    ``made`` is the text of a new token, ``draft`` the submitted form.
    """
    now = services.clock.now()
    tokens = services.tokens.list_all()
    tokens.sort(key=lambda token: (token.created_at, token.id), reverse=True)
    tokens.sort(key=lambda token: token.state_at(now) != "active")
    view = {
        "tokens": tokens,
        "meanings": MEANINGS,
        **{"draft": EMPTY, "made": "", "made_for": "", "wrong": ""},
        **shown,
    }
    return respond(request, view, template="tokens.html", status=status)
