"""What a browser may do with an answer: next to nothing, whatever is in it.

The policy lets scripts, styles, pictures, requests and forms of this service through and
nothing else; a line of script or style that got into a page by a mistake of ours is not run.
``Referrer-Policy`` is ``same-origin``: no other site is told where its visitor came from,
while a form that is sent to this service says its ``Origin``, which ``no-referrer`` would
make ``null``.

References: CSP Level 3; Fetch 3.2 (the Origin header and referrer policies).
"""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
)
HEADERS = {
    b"content-security-policy": POLICY.encode(),
    b"referrer-policy": b"same-origin",
    b"x-content-type-options": b"nosniff",
    b"cross-origin-opener-policy": b"same-origin",
    b"cross-origin-resource-policy": b"same-origin",
}


class SecurityHeaders:
    """ASGI middleware: every answer carries them, but for one that has its own."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                given = list(message.get("headers", ()))
                own = {name for name, _ in given}
                given += [header for header in HEADERS.items() if header[0] not in own]
                message = {**message, "headers": given}
            await send(message)

        await self._app(scope, receive, with_headers)
