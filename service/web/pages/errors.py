"""Error pages for browsers, with the status, code and text of the problem document (RFC 9457)."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from contextlib import suppress
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from sqlalchemy.exc import SQLAlchemyError
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from affidavit.service.core.errors import AccountingUnavailable
from affidavit.service.core.problems import Problem, ProblemResponse
from affidavit.service.core.problems import unavailable as problem_of
from affidavit.service.identity.scopes import Scope
from affidavit.service.web.dependencies import services_of
from affidavit.service.web.pages.access import PageGuard, SignInRequired
from affidavit.service.web.pages.response import (
    accepts_html,
    html,
    see_other,
)
from affidavit.service.web.pages.text import for_people

COPIED_HEADERS = ("www-authenticate", "retry-after", "allow")
"""Headers of a problem that its page also has."""
HEADINGS = {
    202: "Waiting for others",
    400: "Invalid request",
    401: "Sign in",
    403: "You don't have permission",
    404: "Page not found",
    405: "Method not allowed",
    409: "Conflict",
    413: "Request too large",
    415: "Unsupported format",
    422: "Invalid input",
    429: "Too many requests",
    500: "Internal error",
    503: "Temporarily unavailable",
}
ADVICE = {
    202: "Nothing has changed yet. The others agree by sending the same.",
    404: "Check the address, or start from the overview.",
    409: "Nothing was changed. Go back and reload the page to see its current state.",
    422: "Nothing was changed. Go back, correct what is listed above and try again.",
    500: "Try again. If it happens again, tell an operator the time and the code; "
    "the service's log has the details.",
    503: "Nothing was lost. Reload the page in a moment to see its current state.",
}
NO_SCOPE = "Nothing was changed. Ask an administrator for a token with the required scope."


def install(app: FastAPI) -> None:
    """Show errors of ``app`` in browsers as pages; call it after ``problems.install``."""
    for kind, handler in list(app.exception_handlers.items()):
        if isinstance(kind, type) and not kind.__name__.startswith("WebSocket"):
            app.add_exception_handler(kind, _as_page(handler))
    app.add_exception_handler(SignInRequired, _sign_in)


def unavailable(error: AccountingUnavailable) -> tuple[str, int]:
    """Return the reason for a page that stores nothing, and the HTTP status."""
    problem = problem_of(error)
    return problem.detail.replace("nothing was stored. ", ""), problem.status


def _as_page(handler: Callable[..., Any]) -> Callable[[Request, Exception], Awaitable[Response]]:
    async def as_page(request: Request, error: Exception) -> Response:
        result = handler(request, error)
        response: Response = await result if isinstance(result, Awaitable) else result
        if not accepts_html(request) or not isinstance(response, ProblemResponse):
            return response
        if response.status_code in (404, 405) and not hasattr(request.state, "caller"):
            # No route identified the caller, who needs the navigation if signed in.
            with suppress(SignInRequired, Problem, SQLAlchemyError):
                await PageGuard(tuple(Scope)).identify(services_of(request), request)
        named = {"status": response.status_code, "title": HTTPStatus(response.status_code).phrase}
        problem = {**named, "reasons": [], **json.loads(bytes(response.body))}
        headers = {
            name: response.headers[name] for name in COPIED_HEADERS if name in response.headers
        }
        request.state.code = problem["code"]
        return await run_in_threadpool(
            html,
            request,
            "problem.html",
            {
                "problem": problem,
                "sentences": [
                    for_people(f"{item['message']} {item['remedy']}") for item in problem["reasons"]
                ]
                or [for_people(problem["detail"])],
                "heading": HEADINGS.get(response.status_code, problem["title"]),
                "advice": _advice(
                    response.status_code, problem["code"], headers.get("retry-after")
                ),
            },
            status=response.status_code,
            headers=headers,
        )

    return as_page


def _advice(status: int, code: str, retry_after: str | None) -> str:
    """Return what the user can do."""
    if code == "missing_scope":
        return NO_SCOPE
    if retry_after is not None:
        seconds = "a second" if retry_after == "1" else f"{retry_after} seconds"
        return f"Nothing was changed. Wait {seconds}, then reload the page."
    return ADVICE.get(status, "Nothing was changed. Go back and try again.")


async def _sign_in(request: Request, error: Exception) -> Response:
    assert isinstance(error, SignInRequired)
    if "hx-request" in request.headers:
        # A fragment cannot contain another page, so the browser is redirected.
        return Response(status_code=204, headers={"HX-Redirect": error.path})
    return see_other(error.path)
