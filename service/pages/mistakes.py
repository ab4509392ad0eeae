"""A problem as a page, where a person is reading; a program gets the document.

The status, the code and the words are those of the problem document (RFC 9457).
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from affidavit.service.pages.access import SignInFirst
from affidavit.service.pages.answer import html, see_other
from affidavit.service.pages.wishes import wants_html
from affidavit.service.problems import MEDIA_TYPE

_KEPT = ("www-authenticate", "retry-after", "allow")
HEADINGS = {
    400: "This could not be read",
    401: "Sign in first",
    403: "This is not yours to do",
    404: "There is nothing here",
    405: "This is not done here",
    409: "This does not go together",
    413: "This is too much at once",
    415: "This came in an unknown form",
    422: "Something in it is wrong",
    429: "Too many requests",
    500: "Something broke here",
    503: "Not possible just now",
}
WAYS = {
    404: "Look at the address again, or go on from the overview.",
    409: "Nothing was done. Go back and look at how it stands now.",
    422: "Nothing was done. Go back, mend what is named above and try again.",
    500: "Try again. If it stays so, tell an operator the time and the code; the log has the rest.",
    503: "Nothing was done and nothing was lost. Reload the page in a moment.",
}
OTHERWISE = "Nothing was done. Go back and try again from the page."
NO_SCOPE = "Nothing was done. Ask somebody who may, or an administrator for a token that may."


def _way(status: int, code: str, retry_after: str | None) -> str:
    """What to do about it, in a sentence or two."""
    if code == "missing_scope":
        return NO_SCOPE
    if retry_after is not None:
        seconds = "a second" if retry_after == "1" else f"{retry_after} seconds"
        return f"Nothing was done. Wait {seconds}, then reload the page."
    return WAYS.get(status, OTHERWISE)


def install(app: FastAPI) -> None:
    """Show people the errors of ``app`` as pages; after ``problems.install``."""
    for kind, handler in list(app.exception_handlers.items()):
        if isinstance(kind, type) and not kind.__name__.startswith("WebSocket"):
            app.add_exception_handler(kind, _shown(handler))
    app.add_exception_handler(SignInFirst, _sign_in_first)


def _shown(handler: Callable[..., Any]) -> Callable[[Request, Exception], Awaitable[Response]]:
    async def shown(request: Request, error: Exception) -> Response:
        made = handler(request, error)
        answered: Response = await made if isinstance(made, Awaitable) else made
        if not wants_html(request) or answered.headers.get("content-type") != MEDIA_TYPE:
            return answered
        problem = json.loads(bytes(answered.body))
        kept = {name: answered.headers[name] for name in _KEPT if name in answered.headers}
        request.state.code = problem["code"]
        return await run_in_threadpool(
            html,
            request,
            "problem.html",
            {
                "problem": problem,
                "heading": HEADINGS.get(answered.status_code, problem["title"]),
                "way": _way(answered.status_code, problem["code"], kept.get("retry-after")),
            },
            status=answered.status_code,
            headers=kept,
        )

    return shown


async def _sign_in_first(request: Request, error: Exception) -> Response:
    assert isinstance(error, SignInFirst)
    if "hx-request" in request.headers:
        # A part of a page is no place for another page: the browser goes there as a whole.
        return Response(status_code=204, headers={"HX-Redirect": error.path})
    return see_other(error.path)
