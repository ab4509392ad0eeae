"""``/sign-in``, ``/sign-out`` and ``/team``: a session by token or by the OpenID provider.

A token is checked as a bearer token is, and is answered with a cookie; the token itself goes
no further. Where to go afterwards is a path of this service and nothing else.

What only this browser knows of a sign-in at the provider is in a cookie of its own for ten
minutes, deleted when the browser comes back, however that ends.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Annotated

from fastapi import APIRouter, Request, Response
from starlette.concurrency import run_in_threadpool

from affidavit.service.dependencies import Services, TheServices
from affidavit.service.identity.access import not_known, open_to_all
from affidavit.service.identity.actor import Actor, AuthenticationError, Scope
from affidavit.service.identity.authentication import Caller
from affidavit.service.identity.openid_sign_in import Attempt, CodeFlow
from affidavit.service.identity.provider_tokens import ProviderUnavailable
from affidavit.service.identity.tokens import PREFIX
from affidavit.service.pages import sessions
from affidavit.service.pages.access import page_actor
from affidavit.service.pages.forms import SubmittedForm, require_form_token
from affidavit.service.pages.response import respond, see_other
from affidavit.service.problems import Problem

CALLBACK = "/sign-in/callback"
LASTS = timedelta(minutes=10)

router = APIRouter(include_in_schema=False, default_response_class=Response)
EVERYBODY = [open_to_all()]


@dataclass(frozen=True, slots=True, kw_only=True)
class SignIn:
    """The sign-in page; ``next`` is where to go from there."""

    next: str
    ended: bool = False
    open_here: bool = False
    with_provider: bool = False
    wrong: str = ""


@router.get("/sign-in", dependencies=EVERYBODY)
def sign_in(request: Request, services: TheServices) -> Response:
    """The form."""
    view = SignIn(
        next=local(request.query_params.get("next", "")),
        ended="ended" in request.query_params,
        open_here=services.authenticator.open_to_this_machine(),
        with_provider=services.code_flow is not None,
    )
    return respond(request, view, template="sign_in.html")


@router.post("/sign-in", dependencies=EVERYBODY)
async def sign_in_by_token(
    request: Request, services: TheServices, form: SubmittedForm
) -> Response:
    """Begin a session for the holder of a token."""
    require_form_token(request, form)
    to = local(form.get("next"))
    try:
        caller = await _holder(services, form.get("token"))
    except AuthenticationError as unknown:
        not_known(services, request, unknown)  # counted, as a bad bearer token is
        return await run_in_threadpool(_again, request, services, to, unknown.detail, 422)
    return await run_in_threadpool(_begin, request, services, caller, to)


@router.post("/sign-out", dependencies=EVERYBODY)
def sign_out(request: Request, services: TheServices, form: SubmittedForm) -> Response:
    """End the session, in the browser and in the database."""
    require_form_token(request, form)
    cookie = sessions.read_cookie(request, sessions.SESSION)
    if cookie is not None:
        services.sessions.end(cookie)
    response = see_other("/sign-in", done="signed_out")
    sessions.delete_cookie(request, response, sessions.SESSION)
    return response


@router.post("/team")
def switch_team(
    _: Annotated[Actor, page_actor(*Scope, always=True)],
    request: Request,
    services: TheServices,
    form: SubmittedForm,
) -> Response:
    """Act for another team of the person from now on."""
    cookie = sessions.read_cookie(request, sessions.SESSION) or ""
    at = services.clock.now()
    session = services.sessions.switch(cookie, form.get("team") or None, at=at)
    if session is None:
        raise Problem(
            403, "not_permitted", "you are not in that team; choose one that the page lists."
        )
    response = see_other("/")
    sessions.write_cookie(request, response, sessions.SESSION, *session)
    return response


@router.get("/sign-in/provider", dependencies=EVERYBODY)
def to_provider(request: Request, services: TheServices) -> Response:
    """Send the browser to the provider."""
    flow = _flow(services)
    attempt = Attempt.new(local(request.query_params.get("next", "")))
    response = see_other(flow.leave(attempt, _callback(services)))
    until = services.clock.now() + LASTS
    sessions.write_cookie(request, response, sessions.SIGN_IN, attempt.packed(), until)
    return response


@router.get(CALLBACK, dependencies=EVERYBODY)
def from_provider(request: Request, services: TheServices) -> Response:
    """Begin a session for the person that the provider names."""
    flow = _flow(services)
    attempt = Attempt.unpacked(sessions.read_cookie(request, sessions.SIGN_IN) or "")
    to = "/" if attempt is None else local(attempt.next)
    try:
        actor, *others = flow.arrive(attempt, dict(request.query_params), _callback(services))
    except AuthenticationError as unknown:
        not_known(services, request, unknown)  # counted, as a bad token is
        response = _again(request, services, to, unknown.detail, 422)
    except ProviderUnavailable:
        detail = "the OpenID provider does not answer; try again later."
        response = _again(request, services, to, detail, 503)
    else:
        response = _begin(request, services, Caller(actor, actor.name, elsewhere=tuple(others)), to)
    sessions.delete_cookie(request, response, sessions.SIGN_IN)
    return response


def local(path: str) -> str:
    """``path`` if it is one of this service, else the overview.

    >>> local("/audit?kind=token"), local("//evil.example"), local("/\\\\evil.example"), local("")
    ('/audit?kind=token', '/', '/', '/')
    """
    plain = path.isascii() and path.isprintable() and "\\" not in path and " " not in path
    if plain and path.startswith("/") and not path.startswith(("//", "/sign-")):
        return path
    return "/"


def _begin(request: Request, services: Services, caller: Caller, to: str) -> Response:
    """Begin a session and go ``to``; an older session of this browser ends."""
    old = sessions.read_cookie(request, sessions.SESSION)
    if old is not None:
        services.sessions.end(old)
    session = services.sessions.begin(caller, at=services.clock.now())
    response = see_other(to)
    sessions.write_cookie(request, response, sessions.SESSION, *session)
    sessions.delete_cookie(request, response, sessions.FORM)
    return response


def _again(request: Request, services: Services, to: str, wrong: str, status: int) -> Response:
    view = SignIn(next=to, wrong=wrong, with_provider=services.code_flow is not None)
    return respond(request, view, template="sign_in.html", status=status)


async def _holder(services: Services, text: str) -> Caller:
    """Who holds the token ``text``; raises ``AuthenticationError``."""
    if not text.startswith(PREFIX):
        raise AuthenticationError(
            "invalid_token", f"a token begins with {PREFIX}; this one does not."
        )
    return await services.authenticator.by_token(text)


def _callback(services: Services) -> str:
    return f"{services.public_url}{CALLBACK}"


def _flow(services: Services) -> CodeFlow:
    if services.code_flow is None:
        raise Problem(404, "not_found", "no OpenID provider is configured; sign in with a token.")
    return services.code_flow
