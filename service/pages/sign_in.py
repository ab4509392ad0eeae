"""``/sign-in`` and ``/sign-out``: a session for who holds a token.

What is typed is judged as a bearer token is, and is answered with a cookie; the token
itself goes no further. Where to go afterwards is a path of this service and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime

from fastapi import APIRouter, Request, Response
from starlette.concurrency import run_in_threadpool

from affidavit.service.identity.access import not_known, open_to_all
from affidavit.service.identity.authentication import Caller
from affidavit.service.identity.credentials import AuthenticationError
from affidavit.service.identity.tokens import PREFIX
from affidavit.service.pages import cookies
from affidavit.service.pages.answer import answer, see_other
from affidavit.service.pages.csrf import require_own
from affidavit.service.pages.forms import TheForm
from affidavit.service.services import Services, TheServices

router = APIRouter()


@dataclass(frozen=True, slots=True, kw_only=True)
class SignIn:
    """What the sign-in page shows."""

    next: str
    ended: bool = False
    open_here: bool = False
    with_provider: bool = False
    wrong: str = ""


@router.get(
    "/sign-in",
    dependencies=[open_to_all()],
    include_in_schema=False,
    response_class=Response,
)
def sign_in(request: Request, services: TheServices) -> Response:
    """The form; ``next`` is where to go from there."""
    view = SignIn(
        next=local(request.query_params.get("next", "")),
        ended="ended" in request.query_params,
        open_here=services.authenticator.open_to_this_machine(),
        with_provider=services.code_flow is not None,
    )
    return answer(request, view, template="sign_in.html")


@router.post(
    "/sign-in",
    dependencies=[open_to_all()],
    include_in_schema=False,
    response_class=Response,
)
async def take_token(request: Request, services: TheServices, form: TheForm) -> Response:
    """A session for the holder of the token that was typed."""
    require_own(request, form)
    to = local(form.get("next"))
    try:
        caller = await _holder(services, form.get("token"))
    except AuthenticationError as unknown:
        not_known(services, request, unknown)  # counted, as a bad bearer token is
        view = SignIn(next=to, wrong=unknown.detail, with_provider=services.code_flow is not None)
        return await run_in_threadpool(answer, request, view, template="sign_in.html", status=422)
    return await run_in_threadpool(begin, request, services, caller, to)


@router.post(
    "/sign-out",
    dependencies=[open_to_all()],
    include_in_schema=False,
    response_class=Response,
)
def sign_out(request: Request, services: TheServices, form: TheForm) -> Response:
    """End the session, here and in the database."""
    require_own(request, form)
    cookie = cookies.read(request, cookies.SESSION)
    if cookie is not None:
        services.sessions.end(cookie)
    done = see_other("/sign-in", done="signed_out")
    cookies.remove(request, done, cookies.SESSION)
    return done


def begin(
    request: Request,
    services: Services,
    caller: Caller,
    to: str,
    until: datetime | None = None,
) -> Response:
    """Begin a session and go ``to`` where its person wanted to go; an older one ends."""
    old = cookies.read(request, cookies.SESSION)
    if old is not None:
        services.sessions.end(old)
    begun = services.sessions.begin(caller, at=datetime.now(UTC), until=until)
    done = see_other(to)
    cookies.write(request, done, cookies.SESSION, begun.cookie, begun.expires_at)
    cookies.remove(request, done, cookies.FORM)
    return done


def local(path: str) -> str:
    """``path`` if it is one of this service, else the overview.

    >>> local("/audit?kind=token"), local("//evil.example"), local("/\\\\evil.example"), local("")
    ('/audit?kind=token', '/', '/', '/')
    """
    plain = path.isascii() and path.isprintable() and "\\" not in path and " " not in path
    if plain and path.startswith("/") and not path.startswith(("//", "/sign-")):
        return path
    return "/"


async def _holder(services: Services, text: str) -> Caller:
    """Who holds the token ``text``; raises ``AuthenticationError``."""
    if not text.startswith(PREFIX):
        raise AuthenticationError(
            "invalid_token", f"a token begins with {PREFIX}; this one does not."
        )
    return await services.authenticator.by_token(text)
