"""What is done once a request was answered, or will not be any more.

A dependency that yields does the same, at the price of two context managers and a stack of
them for each request, which is more than most of our requests take for themselves. What is
registered here is called by ``service.operation.observed``, which stands around everything.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.types import Scope

Ending = Callable[[], Awaitable[None]]

_NAME = "endings"


def add_after_response(request: Request, work: Ending) -> None:
    """Have ``work`` called after the answer, whatever becomes of it; the last one first."""
    request.scope["state"].setdefault(_NAME, []).append(work)


async def end(scope: Scope) -> None:
    """Call what was registered for the request of ``scope``."""
    registered: list[Ending] = scope["state"].pop(_NAME, [])
    while registered:
        await registered.pop()()
