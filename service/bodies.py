"""Request bodies: bounded while they stream, and read once.

The limit holds for what arrives, whatever ``Content-Length`` says and for chunked bodies
too. A body that is announced or found to be too large is answered with 413 and never
kept; what the client is still sending is thrown away for a short while first, because a
connection closed in the middle of an upload loses the answer on its way to the client.
"""

from __future__ import annotations

import asyncio
import sys

from fastapi import Request
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from affidavit.plan import Reason
from affidavit.service.problems import Problem

READ_SECONDS = 10.0
"""How long a client may take to send a body of at most the limit."""
DRAIN_BYTES = 64 * 1024 * 1024
DRAIN_SECONDS = 2.0


class JsonOnly:
    """The dependency of a route whose body, ``what`` it is, comes as JSON and nothing else."""

    def __init__(self, what: str) -> None:
        self._what = what

    def __call__(self, request: Request) -> None:
        """Raise the problem of a body that is not declared as JSON."""
        media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if media != "application/json":
            raise Problem(
                415,
                "unsupported_media_type",
                f"{self._what} comes as application/json; set Content-Type accordingly.",
                headers={"Accept": "application/json"},
            )


class BodyLimit:
    """ASGI middleware: no request body beyond ``limit`` bytes reaches the application."""

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self._app = app
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 413."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        if _announced(headers) > self._limit:
            if b"expect" not in headers:  # else the client waits for our word to send
                await _drain(receive)
            await self._too_large().as_response()(scope, receive, send)
            return
        await self._app(scope, self._counted(receive), send)

    def _counted(self, receive: Receive) -> Receive:
        seen = 0

        async def counted() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self._limit:
                if message.get("more_body"):
                    await _drain(receive)
                raise self._too_large()
            return message

        return counted

    def _too_large(self) -> Problem:
        reason = Reason(
            code="too_large",
            pointer="",
            message=f"the body has more than {self._limit} bytes.",
            remedy="Give large matrices by file and sha256.",
        )
        return Problem(413, "too_large", f"{reason}", reason, headers={"Connection": "close"})


async def read_body(request: Request) -> bytes:
    """The whole body; raises ``Problem`` when it does not come in time."""
    try:
        async with asyncio.timeout(READ_SECONDS):
            return await request.body()
    except (TimeoutError, ClientDisconnect):
        raise Problem(
            408,
            "body_incomplete",
            f"the body did not arrive within {READ_SECONDS:g} s; "
            "check that Content-Length is its length.",
            headers={"Connection": "close"},
        ) from None


def _announced(headers: dict[bytes, bytes]) -> int:
    length = headers.get(b"content-length", b"")
    if not length.isdigit():
        return 0
    return int(length) if len(length) < 20 else sys.maxsize


async def _drain(receive: Receive) -> None:
    """Throw away what still arrives, within bounds of size and time."""
    seen = 0
    try:
        async with asyncio.timeout(DRAIN_SECONDS):
            while seen < DRAIN_BYTES:
                message = await receive()
                seen += len(message.get("body", b""))
                if not message.get("more_body"):
                    return
    except TimeoutError:
        return
