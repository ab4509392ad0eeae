"""Who may see a page: the same actors as for the API, known by their session.

``page_actor`` stands where ``needs`` stands in the API and gives the same ``Actor``. A
request is authenticated by its ``Authorization`` header if it has one, so that a program can
read ``/audit.csv`` with its token; else by the session's cookie; else by the conditions of
``anonymous``. Anybody else is sent to the sign-in page and comes back from there.

A form is read and its token checked here, before the route runs, so that no page can
forget to.
"""

from __future__ import annotations

from typing import Annotated, Any
from urllib.parse import urlencode

from fastapi import Depends, Request
from starlette.concurrency import run_in_threadpool

from affidavit.service.dependencies import Services
from affidavit.service.identity.access import SAFE, Guard, not_known
from affidavit.service.identity.actor import Actor, AuthenticationError, Scope
from affidavit.service.identity.authentication import Caller
from affidavit.service.pages import sessions
from affidavit.service.pages.forms import read_form, require_form_token
from affidavit.service.pages.response import accepts_html, is_data

SIGN_IN = "/sign-in"


class SignInRequired(Exception):
    """Nobody is signed in; ``path`` is where to sign in and come back from."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.path = path


class PageGuard(Guard):
    """The dependency behind ``page_actor``."""

    async def identify(self, services: Services, request: Request) -> Caller:
        """The caller; raises ``SignInRequired``."""
        caller: Caller | None
        if has_credentials(request):
            caller = await super().identify(services, request)
        else:
            caller = await _by_session(services, request)
            if caller is None:
                caller = await _anonymous(services, request)
        request.state.caller = caller
        return caller

    async def admitted(self, request: Request) -> None:
        """Check the token of a form."""
        if request.method not in SAFE and not has_credentials(request):
            require_form_token(request, await read_form(request))


def page_actor(*scopes: Scope, always: bool = False) -> Any:
    """The dependency of a page for actors with one of ``scopes``; its value is the ``Actor``.

    ``always`` as in ``needs``.
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
"""An administrator who takes a right away."""


def has_credentials(request: Request) -> bool:
    """Whether the request has credentials that no browser adds by itself."""
    return "authorization" in request.headers


async def _by_session(services: Services, request: Request) -> Caller | None:
    cookie = sessions.read_cookie(request, sessions.SESSION)
    if cookie is None:
        return None
    return await run_in_threadpool(services.sessions.find, cookie, at=services.clock.now())


async def _anonymous(services: Services, request: Request) -> Caller:
    """Who needs no session; raises ``SignInRequired``, or the problem for a program."""
    try:
        return await run_in_threadpool(services.authenticator.without_token, request)
    except AuthenticationError as unknown:
        problem = not_known(services, request, unknown)
        if is_data(request) and not accepts_html(request):
            raise problem from None
        raise SignInRequired(_sign_in_path(request)) from None


def _sign_in_path(request: Request) -> str:
    """The sign-in page; it leads back to this page if the page was only read."""
    query = {}
    if request.method in SAFE and request.url.path != "/":
        path = request.url.path
        query["next"] = f"{path}?{request.url.query}" if request.url.query else path
    if sessions.read_cookie(request, sessions.SESSION) is not None:
        query["ended"] = "yes"
    return f"{SIGN_IN}?{urlencode(query)}" if query else SIGN_IN
