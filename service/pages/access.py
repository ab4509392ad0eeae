"""Who may see a page: the same actors as for the API, known by their session.

``page_actor`` stands where ``needs`` stands in the API and gives the same ``Actor``. A
request is judged by its ``Authorization`` header if it has one, so that a program can read
``/audit.csv`` with its token; else by the session's cookie; else by the conditions of
``anonymous``. Whoever is not known is sent to the sign-in page and comes back from there.

A form is read and its token checked here, before the route runs, so that no page can
forget to.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlencode

from fastapi import Depends, Request
from starlette.concurrency import run_in_threadpool

from affidavit.service.identity.access import Guard, address_of, not_known
from affidavit.service.identity.actor import Scope
from affidavit.service.identity.authentication import Caller
from affidavit.service.identity.credentials import AuthenticationError
from affidavit.service.pages import cookies
from affidavit.service.pages.csrf import require_own
from affidavit.service.pages.forms import read_form
from affidavit.service.pages.wishes import is_data, wants_html
from affidavit.service.services import Services

SIGN_IN = "/sign-in"
SAFE = frozenset({"GET", "HEAD", "OPTIONS"})


class SignInFirst(Exception):
    """Nobody is known to ask; ``path`` is where to sign in and come back from."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.path = path


class PageGuard(Guard):
    """The dependency behind ``page_actor``."""

    async def identify(self, services: Services, request: Request) -> Caller:
        """Who asks; raises ``SignInFirst`` for who should sign in."""
        if not by_header(request):
            caller = await _signed_in(services, request)
            if caller is None:
                caller = await _at_this_machine(services, request)
        else:
            caller = await super().identify(services, request)
        request.state.caller = caller
        return caller

    async def admitted(self, request: Request) -> None:
        """Check the form of somebody who may send it."""
        if request.method not in SAFE and not by_header(request):
            require_own(request, await read_form(request))


def page_actor(*scopes: Scope) -> Any:
    """The dependency of a page for actors with one of ``scopes``; its value is the ``Actor``."""
    if not scopes:
        raise ValueError("a page for actors without any scope is open_to_all")
    return Depends(PageGuard(scopes))


def by_header(request: Request) -> bool:
    """Whether the request shows credentials that no browser adds by itself."""
    return "authorization" in request.headers


async def _signed_in(services: Services, request: Request) -> Caller | None:
    cookie = cookies.read(request, cookies.SESSION)
    if cookie is None:
        return None
    return await run_in_threadpool(services.sessions.find, cookie, at=datetime.now(UTC))


async def _at_this_machine(services: Services, request: Request) -> Caller:
    """Who needs no session; raises ``SignInFirst``, or the problem for a program."""
    try:
        return await run_in_threadpool(
            services.authenticator.without_token,
            address_of(request),
            request.headers,
            request.scope["http_version"],
        )
    except AuthenticationError as unknown:
        problem = not_known(services, request, unknown)
        if is_data(request) and not wants_html(request):
            raise problem from None
        raise SignInFirst(_sign_in(request)) from None


def _sign_in(request: Request) -> str:
    """The way to the sign-in page, which leads back to a page that was only read."""
    query = {}
    if request.method in SAFE and request.url.path != "/":
        path = request.url.path
        query["next"] = f"{path}?{request.url.query}" if request.url.query else path
    if cookies.read(request, cookies.SESSION) is not None:
        query["ended"] = "yes"
    return f"{SIGN_IN}?{urlencode(query)}" if query else SIGN_IN
