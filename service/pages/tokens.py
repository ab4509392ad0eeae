"""``/tokens``: who may use the service, a new token, and an end for one.

A new token is shown in the answer to its form and nowhere afterwards, so that this one form
is not followed by a redirect: there is nothing that a reload could read again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Annotated

from fastapi import APIRouter, Request, Response

from affidavit.service.identity.actor import Actor, Scope
from affidavit.service.identity.token_repository import (
    LONGEST_DAYS,
    Token,
    TokenError,
    TokenRepository,
)
from affidavit.service.pages.access import page_actor
from affidavit.service.pages.answer import action, answer, page, see_other
from affidavit.service.pages.forms import TheForm
from affidavit.service.pages.forms_of_a_view import Rows
from affidavit.service.services import TheServices

DAYS = 90
MEANINGS = {
    Scope.SUBMIT: "send plans, ask for runs",
    Scope.APPROVE: "approve, waive, revoke",
    Scope.AUDIT: "read everything, the log too",
    Scope.WORK: "a worker that trains",
    Scope.ADMIN: "policies, budgets, tokens, keys",
}

router = APIRouter()

Admin = Annotated[Actor, page_actor(Scope.ADMIN)]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLine:
    """A token in one line; ``state`` is one of counts, expired, revoked."""

    id: str
    name: str
    person: str | None
    scopes: tuple[str, ...]
    state: str
    created_at: datetime
    created_by: str
    expires_at: datetime
    revoked_at: datetime | None
    last_used_at: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A form as it was filled in."""

    name: str = ""
    person: str = ""
    scopes: tuple[str, ...] = ()
    days: str = str(DAYS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """What the page shows; ``made`` is the text of a token that was made just now."""

    tokens: tuple[TokenLine, ...]
    meanings: Mapping[str, str]
    draft: Draft = field(default_factory=Draft)
    made: str = ""
    made_for: str = ""
    wrong: str = ""


def tokens_view(
    store: TokenRepository,
    now: datetime,
    *,
    draft: Draft | None = None,
    made: str = "",
    made_for: str = "",
    wrong: str = "",
) -> Tokens:
    """Every token that was ever made, those that count first, then the newest."""
    lines = sorted((_line(item, now) for item in store.all()), key=_newest, reverse=True)
    lines.sort(key=lambda line: line.state != "counts")
    return Tokens(
        tokens=tuple(lines),
        meanings={scope.value: said for scope, said in MEANINGS.items()},
        draft=draft or Draft(),
        made=made,
        made_for=made_for,
        wrong=wrong,
    )


@page(router, "/tokens")
def tokens(request: Request, _: Admin, services: TheServices) -> Response:
    """The tokens."""
    view = tokens_view(services.tokens, datetime.now(UTC))
    return _answered(request, view)


@action(router, "/tokens")
def new(request: Request, actor: Admin, services: TheServices, form: TheForm) -> Response:
    """Make a token and show it this once."""
    now = datetime.now(UTC)
    draft = Draft(
        name=form.get("name"),
        person=form.get("person"),
        scopes=tuple(form.all("scope")),
        days=form.get("days") or str(DAYS),
    )
    try:
        made, text = services.tokens.new(
            draft.name,
            _scopes(draft),
            _days(draft),
            by=actor.name,
            at=now,
            person=draft.person or None,
        )
    except TokenError as refused:
        view = tokens_view(services.tokens, now, draft=draft, wrong=f"{refused}.")
        return _answered(request, view, status=422)
    view = tokens_view(services.tokens, now, made=text.text, made_for=made.name)
    return _answered(request, view, status=201)


@action(router, "/tokens/{token_id}/revocation")
def revoke(
    request: Request, actor: Admin, services: TheServices, form: TheForm, token_id: str
) -> Response:
    """End a token."""
    now = datetime.now(UTC)
    try:
        services.tokens.revoke(token_id, form.get("reason"), by=actor.name, at=now)
    except TokenError as refused:
        view = tokens_view(services.tokens, now, wrong=f"{refused}.")
        return _answered(request, view, status=422)
    return see_other("/tokens", done="revoked")


def _answered(request: Request, view: Tokens, status: int = 200) -> Response:
    return answer(
        request,
        view,
        template="tokens.html",
        rows=Rows(TokenLine, view.tokens),
        status=status,
    )


def _scopes(draft: Draft) -> list[Scope]:
    known = {item.value for item in Scope}
    if not draft.scopes:
        raise TokenError("a token needs at least one scope; tick what it may do")
    if unknown := [entry for entry in draft.scopes if entry not in known]:
        raise TokenError(f"{unknown[0][:80]!r} is no scope; tick one of {', '.join(Scope)}")
    return [Scope(scope) for scope in draft.scopes]


def _days(draft: Draft) -> int:
    plain = draft.days.isascii() and draft.days.isdecimal() and len(draft.days) < 7
    if not plain:
        raise TokenError(f"a token is valid for a whole number of 1 to {LONGEST_DAYS} days")
    return int(draft.days)


def _line(token: Token, now: datetime) -> TokenLine:
    expired = "expired" if token.expires_at <= now else "counts"
    return TokenLine(
        id=token.id,
        name=token.name,
        person=token.person,
        scopes=tuple(scope.value for scope in token.scopes),
        state="revoked" if token.revoked_at is not None else expired,
        created_at=token.created_at,
        created_by=token.created_by,
        expires_at=token.expires_at,
        revoked_at=token.revoked_at,
        last_used_at=token.last_used_at,
    )


def _newest(line: TokenLine) -> tuple[datetime, str]:
    return line.created_at, line.id
