"""``/sign-in/provider``: to the OpenID provider, and back from it with somebody.

What only this browser knows of the sign-in is kept in a cookie of its own for ten minutes,
and thrown away when the browser comes back, however that ends.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from fastapi import APIRouter, Request, Response

from affidavit.service.identity.access import not_known, open_to_all
from affidavit.service.identity.authentication import Caller
from affidavit.service.identity.code_flow import Attempt, CodeFlow
from affidavit.service.identity.credentials import AuthenticationError
from affidavit.service.identity.provider_keys import ProviderUnavailable
from affidavit.service.pages import cookies
from affidavit.service.pages.answer import answer, see_other
from affidavit.service.pages.sign_in import SignIn, begin, local
from affidavit.service.problems import Problem
from affidavit.service.services import Services, TheServices

BACK = "/sign-in/callback"
LASTS = timedelta(minutes=10)

router = APIRouter()


@router.get(
    "/sign-in/provider",
    dependencies=[open_to_all()],
    include_in_schema=False,
    response_class=Response,
)
def leave(request: Request, services: TheServices) -> Response:
    """Send the browser to the provider."""
    flow = _flow(services)
    attempt = Attempt.new(local(request.query_params.get("next", "")))
    gone = see_other(flow.leave(attempt, _back(services)))
    until = datetime.now(UTC) + LASTS
    cookies.write(request, gone, cookies.SIGN_IN, attempt.packed(), until)
    return gone


@router.get(
    BACK,
    dependencies=[open_to_all()],
    include_in_schema=False,
    response_class=Response,
)
def arrive(request: Request, services: TheServices) -> Response:
    """Take what the browser brings, and begin a session for whom the provider names."""
    flow = _flow(services)
    attempt = Attempt.unpacked(cookies.read(request, cookies.SIGN_IN) or "")
    to = "/" if attempt is None else local(attempt.next)
    try:
        actor = flow.arrive(attempt, dict(request.query_params), _back(services))
    except AuthenticationError as unknown:
        not_known(services, request, unknown)  # counted, as a bad token is
        done = _again(request, to, unknown.detail, 422)
    except ProviderUnavailable:
        done = _again(request, to, "the OpenID provider does not answer; try again later.", 503)
    else:
        done = begin(request, services, Caller(actor, actor.name), to)
    cookies.remove(request, done, cookies.SIGN_IN)
    return done


def _again(request: Request, to: str, wrong: str, status: int) -> Response:
    view = SignIn(next=to, wrong=wrong, with_provider=True)
    return answer(request, view, template="sign_in.html", status=status)


def _back(services: Services) -> str:
    return f"{services.public_url}{BACK}"


def _flow(services: Services) -> CodeFlow:
    if services.code_flow is None:
        raise Problem(404, "not_found", "no OpenID provider is set up for signing in; use a token.")
    return services.code_flow
