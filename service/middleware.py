"""ASGI middleware: body size, security headers, and what is recorded of every request.

``BodyLimit`` bounds a body while it streams, whatever ``Content-Length`` says and for chunked
bodies too. A body that is announced or found to be too large is answered with 413 and never
stored; what the client is still sending is thrown away for a short while first, because a
connection closed in the middle of an upload loses the response on its way to the client.

``RequestMiddleware`` sees every request once: a line in the log, the counts, a span, an id that
joins them, and the security headers of the response.

The id is the client's ``X-Request-Id`` where that is harmless text, else a random one; it
is answered in the same header. What is told of a request is how it was routed, by whose
token and how it ended: not its path, its query or its body, which hold names. Probes that
succeed are not written down.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from affidavit.plan import Reason
from affidavit.service.fair_queue import leave_turn
from affidavit.service.operation.telemetry import METHODS, Metrics, Tracing
from affidavit.service.problems import Problem

HEADER = b"x-request-id"
RATE_LIMIT_HEADERS = "rate_limit"
"""What of a request's state names the header fields that tell of its rate limit."""
HARMLESS = re.compile(rb"[A-Za-z0-9._-]{1,64}")
UNROUTED = "unrouted"
PROBES = frozenset({"/livez", "/readyz", "/metrics"})
NOTED = ("actor", "code", "verdict")
"""What the application notes about a request, in ``request.state``."""

DRAIN_BYTES = 64 * 1024 * 1024
DRAIN_SECONDS = 2.0
WATCH_SECONDS = 1.0
"""After which a request whose body nobody reads is watched for the end of its connection."""
_CALLBACKS = "after_response"

CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
)
SECURITY_HEADERS = {
    b"content-security-policy": CONTENT_SECURITY_POLICY.encode(),
    b"referrer-policy": b"same-origin",
    b"x-content-type-options": b"nosniff",
    b"cross-origin-opener-policy": b"same-origin",
    b"cross-origin-resource-policy": b"same-origin",
}
"""Of every response that does not set them itself.

The content security policy allows scripts, styles, images, requests and forms of this service and
nothing else; inline scripts and styles are never run. ``Referrer-Policy`` is ``same-origin``: no
other site learns where its visitor came from, while a form that is sent to this service still has
its ``Origin``, which ``no-referrer`` would make ``null``.

References: CSP Level 3; Fetch 3.2 (the Origin header and referrer policies).
"""

log = logging.getLogger("affidavit.request")

Callback = Callable[[], Awaitable[None]]


def add_after_response(request: Request, callback: Callback) -> None:
    """Have ``callback`` called after the response, however it ends; the last added first.

    A dependency that yields does the same, but needs two context managers and a stack of them
    for each request, which takes longer than most of our requests do.
    """
    request.scope["state"].setdefault(_CALLBACKS, []).append(callback)


async def _call_after_response(scope: Scope) -> None:
    callbacks: list[Callback] = scope["state"].pop(_CALLBACKS, [])
    while callbacks:
        await callbacks.pop()()


class RequestMiddleware:
    """ASGI middleware around everything else."""

    def __init__(self, app: ASGIApp, meters: Metrics, tracing: Tracing | None = None) -> None:
        self._app = app
        self._meters = meters
        self._tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, and tell of it when it is answered."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        seen = _ObservedRequest(scope, send)
        with self._meters.running.track_inprogress(), self._span(scope) as span:
            watching = _Disconnect(receive, seen)
            try:
                await self._app(scope, watching.receive, seen.send)
            except Exception as error:
                scope["state"]["code"] = "internal_error"
                if not seen.begun:
                    # Starlette answers outside of all middleware, and so without these headers.
                    answer = await scope["app"].exception_handlers[Exception](
                        Request(scope, receive), error
                    )
                    await answer(scope, receive, seen.send)
                raise
            except asyncio.CancelledError:
                # The service stops, and waited for this as long as it may; or nobody waits.
                if seen.begun:
                    raise
                if watching.gone:
                    scope["state"]["code"] = "client_gone"
                    seen.left_alone()
                else:
                    await _stopping().as_response()(scope, receive, seen.send)
            finally:
                watching.end()
                self._tell(seen, span)
                await _call_after_response(scope)

    def _span(self, scope: Scope) -> AbstractContextManager[Any]:
        if self._tracing is None:
            return nullcontext()
        headers = {
            key.decode("latin-1"): value.decode("latin-1") for key, value in scope["headers"]
        }
        return self._tracing.request(_method(scope), headers)

    def _tell(self, seen: _ObservedRequest, span: Any) -> None:
        fields = seen.fields()
        route, status = fields["route"], fields["status"]
        self._meters.answered(fields["method"], route, status, seen.seconds())
        if fields.get("code") is not None:
            self._meters.problem(fields["code"])
        if fields.get("verdict") is not None:
            self._meters.issued(fields["verdict"])
        if self._tracing is not None:
            self._tracing.finish(span, fields)
        quiet = route in PROBES and status < 400
        log.log(logging.DEBUG if quiet else logging.INFO, "request", extra=fields)


class _Disconnect:
    """Cancels a request whose client goes away before it is answered.

    Once the body was read, nothing but the end of the connection can come. Routes without a body
    never ask for one; they are watched if they take long. A transaction that has begun in a
    thread is finished in any case.
    """

    def __init__(self, receive: Receive, seen: _ObservedRequest) -> None:
        self._receive = receive
        self._seen = seen
        self._request = asyncio.current_task()
        self._watch: asyncio.Task[None] | None = None
        self._early: list[Message] = []
        self._reading = False
        self._timer = asyncio.get_running_loop().call_later(WATCH_SECONDS, self._watch_unread)
        self.gone = False

    async def receive(self) -> Message:
        """The next message, as the application receives it."""
        self._reading = True
        message = self._early.pop() if self._early else await self._receive()
        if message["type"] == "http.request" and not message.get("more_body"):
            self._begin()
        return message

    def end(self) -> None:
        """The request is over."""
        self._timer.cancel()
        if self._watch is not None:
            self._watch.cancel()

    def _watch_unread(self) -> None:
        if not self._reading:
            self._begin()

    def _begin(self) -> None:
        if self._watch is None and not self._seen.begun:
            self._watch = asyncio.create_task(self._until_gone())

    async def _until_gone(self) -> None:
        message = await self._receive()
        if not self._reading and message["type"] == "http.request":
            self._early.append(message)
            if message.get("more_body"):
                return  # of a route that does not read its body
            message = await self._receive()
        if message["type"] == "http.disconnect" and not self._seen.begun and self._request:
            self.gone = True
            self._request.cancel()


class _ObservedRequest:
    """One request on its way through."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self._scope = scope
        self._send = send
        self._started_at = time.perf_counter()
        self._status = 500  # what is answered when nothing was
        self.begun = False
        sent = dict(scope["headers"]).get(HEADER, b"")
        own = secrets.token_hex(16)
        self.request_id = sent.decode("ascii") if HARMLESS.fullmatch(sent) else own
        # What the application notes in request.state is noted in this very dictionary.
        self._state = scope.setdefault("state", {})
        self._state["request_id"] = self.request_id

    async def send(self, message: Message) -> None:
        """Send, with our id and ``SECURITY_HEADERS`` in the head of the answer."""
        if message["type"] == "http.response.start":
            self._status = message["status"]
            self.begun = True
            leave_turn()  # the client may take its time to read
            identified = (HEADER, self.request_id.encode("ascii"))
            limits = self._state.get(RATE_LIMIT_HEADERS, ())
            headers = [*message.get("headers", ()), identified, *limits]
            own = {name.lower() for name, _ in headers}
            headers += [item for item in SECURITY_HEADERS.items() if item[0] not in own]
            message = {**message, "headers": headers}
        await self._send(message)

    def left_alone(self) -> None:
        """The client went away before the answer: 499, as other servers write it in their logs."""
        self._status = 499

    def seconds(self) -> float:
        """Since the request came."""
        return time.perf_counter() - self._started_at

    def fields(self) -> dict[str, Any]:
        """What is told of it."""
        return {
            "request_id": self.request_id,
            "method": _method(self._scope),
            "route": getattr(self._scope.get("route"), "path", UNROUTED),
            "status": self._status,
            "duration_ms": round(self.seconds() * 1000, 3),
            **{name: self._state.get(name) for name in NOTED},
        }


def _stopping() -> Problem:
    return Problem(
        503,
        "stopping",
        "The service is stopping and did not finish this request. Send it again, with its "
        "Idempotency-Key if it had one.",
        headers={"Retry-After": "5", "Connection": "close"},
    )


def _method(scope: Scope) -> str:
    return scope["method"] if scope["method"] in METHODS else "other"


class BodyLimit:
    """ASGI middleware: no request body beyond ``limit`` bytes reaches the application.

    Nor one of two lengths, which a proxy may take for another than we do (RFC 9112, 6.3).
    """

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self._app = app
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 400 or 413."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        if {b"content-length", b"transfer-encoding"} <= headers.keys():
            both = Problem(
                400,
                "malformed_request",
                "The request has both Content-Length and Transfer-Encoding. Send one of them.",
                headers={"Connection": "close"},
            )
            await both.as_response()(scope, receive, send)
            return
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
            message=f"the body has more than {self._limit} bytes.",
            remedy="Pass large matrices by file and sha256.",
        )
        return Problem(413, "too_large", f"{reason}", reason, headers={"Connection": "close"})


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
