"""Access to pages: guards, and ``/sign-in``, ``/sign-out`` and ``/team``.

``page_actor`` is for pages what ``needs`` is for the API, and yields the same ``Actor``. A request
is authenticated by its ``Authorization`` header if it has one, so that programs can read
``/audit.csv`` with a token; otherwise by the session cookie, or as ``anonymous`` where that is
allowed. All others are redirected to the sign-in page, which leads back. The guard also reads a
submitted form and checks its token before the route runs, so that no page can omit the check.

A session begins with a token, which is checked like a bearer token, or with the OpenID provider.
The redirect after signing in accepts only paths of this service. The secrets of a sign-in at the
provider are stored in a cookie for ten minutes, and deleted when the browser returns.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated, Any
from urllib.parse import urlencode

from fastapi import APIRouter, Depends, Request, Response
from starlette.concurrency import run_in_threadpool

from affidavit.service.core.problems import Problem
from affidavit.service.identity.actor import Actor, AuthenticationError
from affidavit.service.identity.authentication import Caller
from affidavit.service.identity.openid import CodeFlow, ProviderUnavailable, SignInAttempt
from affidavit.service.identity.scopes import Scope
from affidavit.service.identity.tokens import TOKEN_PREFIX
from affidavit.service.web import sessions
from affidavit.service.web.access import (
    SAFE_METHODS,
    Guard,
    authentication_problem,
    open_to_all,
)
from affidavit.service.web.dependencies import Services, TheServices
from affidavit.service.web.pages.forms import (
    SubmittedForm,
    read_form,
    require_form_token,
)
from affidavit.service.web.pages.response import (
    accepts_html,
    respond,
    see_other,
)

SIGN_IN = "/sign-in"


class SignInRequired(Exception):
    """The caller must sign in at ``path``, which leads back to the requested page."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.path = path


class PageGuard(Guard):
    """The dependency behind ``page_actor``."""

    async def identify(self, services: Services, request: Request) -> Caller:
        """Return the caller; raises ``SignInRequired``."""
        caller: Caller | None
        if has_credentials(request):
            caller = await super().identify(services, request)
        else:
            caller = await _by_session(services, request)
            if caller is None:
                caller = await _without_session(services, request)
        request.state.caller = caller
        return caller

    async def admitted(self, request: Request) -> None:
        """Check the token of a submitted form."""
        if request.method not in SAFE_METHODS and not has_credentials(request):
            require_form_token(request, await read_form(request))


def page_actor(*scopes: Scope, always: bool = False) -> Any:
    """Return the dependency of a page that requires one of ``scopes``; its value is the actor.

    ``always`` has the same meaning as for ``needs``.
    """
    if not scopes:
        raise ValueError("a page for actors without any scope is open_to_all")
    return Depends(PageGuard(scopes, always))


Anyone = Annotated[Actor, page_actor(*Scope)]
"""Every signed-in actor."""
Reader = Annotated[Actor, page_actor(Scope.SUBMIT, Scope.APPROVE, Scope.AUDIT)]
"""Actors who may see certificates."""
PolicyReader = Annotated[Actor, page_actor(Scope.SUBMIT, Scope.APPROVE, Scope.AUDIT, Scope.ADMIN)]
Submitter = Annotated[Actor, page_actor(Scope.SUBMIT)]
Approver = Annotated[Actor, page_actor(Scope.APPROVE)]
Auditor = Annotated[Actor, page_actor(Scope.AUDIT)]
Admin = Annotated[Actor, page_actor(Scope.ADMIN)]
RevokingAdmin = Annotated[Actor, page_actor(Scope.ADMIN, always=True)]
"""An administrator, also while writes are suspended, who revokes something."""


def has_credentials(request: Request) -> bool:
    """Return whether the request has credentials that browsers do not add automatically."""
    return "authorization" in request.headers


async def _by_session(services: Services, request: Request) -> Caller | None:
    cookie = sessions.read_cookie(request, sessions.SESSION)
    if cookie is None:
        return None
    return await run_in_threadpool(services.sessions.find, cookie, at=services.clock.now())


async def _without_session(services: Services, request: Request) -> Caller:
    """Return a caller without a session; raises ``SignInRequired``, or ``Problem`` for programs."""
    try:
        return await run_in_threadpool(services.authenticator.without_token, request)
    except AuthenticationError as error:
        problem = authentication_problem(services, request, error)
        if request.url.path.endswith(".csv") and not accepts_html(request):
            raise problem from None
        raise SignInRequired(_sign_in_path(request)) from None


def _sign_in_path(request: Request) -> str:
    """Return the path of the sign-in page, which leads back to a page that was only read."""
    query = {}
    if request.method in SAFE_METHODS and request.url.path != "/":
        path = request.url.path
        query["next"] = f"{path}?{request.url.query}" if request.url.query else path
    if sessions.read_cookie(request, sessions.SESSION) is not None:
        query["ended"] = "yes"
    return f"{SIGN_IN}?{urlencode(query)}" if query else SIGN_IN


# ---- signing in ----------------------------------------------------------------------

CALLBACK = "/sign-in/callback"
ATTEMPT_LIFETIME = timedelta(minutes=10)

router = APIRouter(include_in_schema=False, default_response_class=Response)
OPEN = [open_to_all()]


@router.get("/sign-in", dependencies=OPEN)
def sign_in(request: Request, services: TheServices) -> Response:
    """Show the sign-in form."""
    to = local_path(request.query_params.get("next", ""))
    open_here = services.authenticator.allows_anonymous()
    ended = "ended" in request.query_params
    return _respond(request, services, to, open_here=open_here, ended=ended)


@router.post("/sign-in", dependencies=OPEN)
async def sign_in_by_token(
    request: Request, services: TheServices, form: SubmittedForm
) -> Response:
    """Begin a session for the holder of a token."""
    require_form_token(request, form)
    to = local_path(form.get("next"))
    try:
        caller = await _caller_by_token(services, form.get("token"))
    except AuthenticationError as error:
        authentication_problem(services, request, error)  # counted as a failed attempt
        return _respond(request, services, to, 422, wrong=error.detail)
    return await run_in_threadpool(_begin, request, services, caller, to)


@router.post("/sign-out", dependencies=OPEN)
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
    """Switch to another team of the person."""
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


@router.get("/sign-in/provider", dependencies=OPEN)
def redirect_to_provider(request: Request, services: TheServices) -> Response:
    """Redirect the browser to the provider."""
    flow = _flow(services)
    attempt = SignInAttempt.new(local_path(request.query_params.get("next", "")))
    response = see_other(flow.authorization_url(attempt, _callback(services)))
    until = services.clock.now() + ATTEMPT_LIFETIME
    sessions.write_cookie(request, response, sessions.SIGN_IN, attempt.to_cookie(), until)
    return response


@router.get(CALLBACK, dependencies=OPEN)
def return_from_provider(request: Request, services: TheServices) -> Response:
    """Begin a session for the person whom the provider has authenticated."""
    flow = _flow(services)
    attempt = SignInAttempt.from_cookie(sessions.read_cookie(request, sessions.SIGN_IN) or "")
    to = "/" if attempt is None else local_path(attempt.next)
    try:
        actor, *others = flow.complete(attempt, dict(request.query_params), _callback(services))
    except AuthenticationError as error:
        authentication_problem(services, request, error)  # counted as a failed attempt
        response = _respond(request, services, to, 422, wrong=error.detail)
    except ProviderUnavailable:
        detail = "the OpenID provider does not answer; try again later."
        response = _respond(request, services, to, 503, wrong=detail)
    else:
        response = _begin(request, services, Caller(actor, actor.name, elsewhere=tuple(others)), to)
    sessions.delete_cookie(request, response, sessions.SIGN_IN)
    return response


def local_path(path: str) -> str:
    """Return ``path`` if it is a path of this service, and otherwise that of the overview.

    >>> local_path("/audit?kind=token"), local_path("//evil.example")
    ('/audit?kind=token', '/')
    >>> local_path("/\\\\evil.example"), local_path("")
    ('/', '/')
    """
    plain = path.isascii() and path.isprintable() and "\\" not in path and " " not in path
    if plain and path.startswith("/") and not path.startswith(("//", "/sign-")):
        return path
    return "/"


def _begin(request: Request, services: Services, caller: Caller, to: str) -> Response:
    """Begin a session, end the browser's previous one, and redirect to ``to``."""
    old = sessions.read_cookie(request, sessions.SESSION)
    if old is not None:
        services.sessions.end(old)
    session = services.sessions.begin(caller, at=services.clock.now())
    response = see_other(to)
    sessions.write_cookie(request, response, sessions.SESSION, *session)
    sessions.delete_cookie(request, response, sessions.FORM)
    return response


def _respond(
    request: Request, services: Services, to: str, status: int = 200, **changes: Any
) -> Response:
    """Show the sign-in form; ``to`` is the path to open afterwards."""
    view = {"next": to, "wrong": "", "ended": False, "open_here": False, **changes}
    view["with_provider"] = services.code_flow is not None
    return respond(request, view, template="sign_in.html", status=status)


async def _caller_by_token(services: Services, text: str) -> Caller:
    """Return the caller with the token ``text``; raises ``AuthenticationError``."""
    if not text.startswith(TOKEN_PREFIX):
        raise AuthenticationError(
            "invalid_token", f"a token begins with {TOKEN_PREFIX}; this one does not."
        )
    return await services.authenticator.by_token(text)


def _callback(services: Services) -> str:
    return f"{services.public_url}{CALLBACK}"


def _flow(services: Services) -> CodeFlow:
    if services.code_flow is None:
        raise Problem(404, "not_found", "no OpenID provider is configured; sign in with a token.")
    return services.code_flow
