"""ASGI middleware: body size, security headers, and logs and metrics of every request.

``BodyLimit`` limits a body while it streams, whatever its ``Content-Length``, and chunked bodies
too. A body that is too large is answered with 413. The rest of it is discarded for a short while
first, because closing the connection during an upload would lose the response.

``RequestMiddleware`` handles every request: a log record, metrics, a span, a request id, and the
security headers of the response.

The request id is the client's ``X-Request-Id`` if it is valid, or else random, and is returned in
the same header. Logs contain the route, the actor and the outcome, but neither path, query nor
body, which contain names. Successful probes are not logged.
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
from affidavit.service.core.fair_queue import leave_turn
from affidavit.service.core.problems import Problem
from affidavit.service.web.telemetry import (
    METHODS,
    Metrics,
    Tracing,
)

HEADER = b"x-request-id"
CLIENT_CLOSED_REQUEST = 499
"""Status in logs for a client that disconnected, as of other servers."""
RATE_LIMIT_HEADERS = "rate_limit"
"""Attribute of a request's state with the header fields of its rate limit."""
REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")
UNROUTED = "unrouted"
PROBES = frozenset({"/livez", "/readyz", "/metrics"})
LOGGED_STATE = ("actor", "code", "verdict")
"""Attributes of ``request.state`` that are logged."""

DRAIN_BYTES = 64 * 1024 * 1024
DRAIN_SECONDS = 2.0
WATCH_SECONDS = 1.0
"""Time after which a request whose body is not read is watched for a disconnect."""
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
"""Headers of every response that does not set them itself.

The content security policy allows scripts, styles, images, requests and forms of this service
only, and none inline. With ``Referrer-Policy: same-origin``, other sites learn nothing of the page
that links to them, while forms for this service still send their ``Origin``, which ``no-referrer``
would make ``null``.

References: CSP Level 3; Fetch 3.2 (the Origin header and referrer policies).
"""

log = logging.getLogger("affidavit.request")

Callback = Callable[[], Awaitable[None]]


def add_after_response(request: Request, callback: Callback) -> None:
    """Call ``callback`` after the response, however it ends; the last one is called first.

    A dependency that yields would do the same, but costs more than most requests.
    """
    request.scope["state"].setdefault(_CALLBACKS, []).append(callback)


async def _call_after_response(scope: Scope) -> None:
    callbacks: list[Callback] = scope["state"].pop(_CALLBACKS, [])
    while callbacks:
        await callbacks.pop()()


class RequestMiddleware:
    """ASGI middleware around the application."""

    def __init__(self, app: ASGIApp, meters: Metrics, tracing: Tracing | None = None) -> None:
        self._app = app
        self._meters = meters
        self._tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Process a request and record it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        observed = _ObservedRequest(scope, send)
        with self._meters.running.track_inprogress(), self._span(scope) as span:
            watch = _DisconnectWatch(receive, observed)
            try:
                await self._app(scope, watch.receive, observed.send)
            except Exception as error:
                scope["state"]["code"] = "internal_error"
                if not observed.started:
                    # Starlette would respond outside of all middleware, without these headers.
                    response = await scope["app"].exception_handlers[Exception](
                        Request(scope, receive), error
                    )
                    await response(scope, receive, observed.send)
                raise
            except asyncio.CancelledError:
                # The service stops and cannot wait longer, or the client has disconnected.
                if observed.started:
                    raise
                if watch.gone:
                    scope["state"]["code"] = "client_gone"
                    observed.status = CLIENT_CLOSED_REQUEST
                else:
                    await _stopping().as_response()(scope, receive, observed.send)
            finally:
                watch.end()
                self._record(observed, span)
                await _call_after_response(scope)

    def _span(self, scope: Scope) -> AbstractContextManager[Any]:
        if self._tracing is None:
            return nullcontext()
        headers = {
            key.decode("latin-1"): value.decode("latin-1") for key, value in scope["headers"]
        }
        return self._tracing.request(_method(scope), headers)

    def _record(self, observed: _ObservedRequest, span: Any) -> None:
        fields = observed.fields()
        route, status = fields["route"], fields["status"]
        self._meters.answered(fields["method"], route, status, observed.seconds())
        if fields.get("code") is not None:
            self._meters.problem(fields["code"])
        if fields.get("verdict") is not None:
            self._meters.issued(fields["verdict"])
        if self._tracing is not None:
            self._tracing.finish(span, fields)
        is_probe = route in PROBES and status < 400
        log.log(logging.DEBUG if is_probe else logging.INFO, "request", extra=fields)


class _DisconnectWatch:
    """Cancels a request whose client disconnects before the response.

    After the body, the next message can only be a disconnect. Routes that read no body are watched
    if they take long. A transaction in a thread is finished in any case.
    """

    def __init__(self, receive: Receive, observed: _ObservedRequest) -> None:
        self._receive = receive
        self._observed = observed
        self._request = asyncio.current_task()
        self._watch: asyncio.Task[None] | None = None
        self._buffered: list[Message] = []
        self._reading = False
        self._timer = asyncio.get_running_loop().call_later(WATCH_SECONDS, self._watch_unread)
        self.gone = False

    async def receive(self) -> Message:
        """Return the next message to the application."""
        self._reading = True
        message = self._buffered.pop() if self._buffered else await self._receive()
        if message["type"] == "http.request" and not message.get("more_body"):
            self._watch_disconnect()
        return message

    def end(self) -> None:
        """Stop watching; the request is finished."""
        self._timer.cancel()
        if self._watch is not None:
            self._watch.cancel()

    def _watch_unread(self) -> None:
        if not self._reading:
            self._watch_disconnect()

    def _watch_disconnect(self) -> None:
        if self._watch is None and not self._observed.started:
            self._watch = asyncio.create_task(self._cancel_on_disconnect())

    async def _cancel_on_disconnect(self) -> None:
        message = await self._receive()
        if not self._reading and message["type"] == "http.request":
            self._buffered.append(message)
            if message.get("more_body"):
                return  # a route that does not read its body
            message = await self._receive()
        if message["type"] == "http.disconnect" and not self._observed.started and self._request:
            self.gone = True
            self._request.cancel()


class _ObservedRequest:
    """A request in progress, with what is recorded of it."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self._scope = scope
        self._send = send
        self._started_at = time.perf_counter()
        self.status = 500  # unless a response starts
        self.started = False
        sent = dict(scope["headers"]).get(HEADER, b"")
        is_valid = REQUEST_ID.fullmatch(sent)
        self.request_id = sent.decode("ascii") if is_valid else secrets.token_hex(16)
        # The dictionary behind request.state.
        self._state = scope.setdefault("state", {})
        self._state["request_id"] = self.request_id

    async def send(self, message: Message) -> None:
        """Send a message; the start of a response gets the id and ``SECURITY_HEADERS``."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.started = True
            leave_turn()  # the client may read slowly
            identified = (HEADER, self.request_id.encode("ascii"))
            limits = self._state.get(RATE_LIMIT_HEADERS, ())
            headers = [*message.get("headers", ()), identified, *limits]
            names = {name.lower() for name, _ in headers}
            headers += [item for item in SECURITY_HEADERS.items() if item[0] not in names]
            message = {**message, "headers": headers}
        await self._send(message)

    def seconds(self) -> float:
        """Return the seconds since the request arrived."""
        return time.perf_counter() - self._started_at

    def fields(self) -> dict[str, Any]:
        """Return the fields of the log record."""
        return {
            "request_id": self.request_id,
            "method": _method(self._scope),
            "route": getattr(self._scope.get("route"), "path", UNROUTED),
            "status": self.status,
            "duration_ms": round(self.seconds() * 1000, 3),
            **{name: self._state.get(name) for name in LOGGED_STATE},
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
    """ASGI middleware that rejects request bodies of more than ``limit`` bytes.

    It also rejects bodies with two lengths, which a proxy may read differently (RFC 9112, 6.3).
    """

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self._app = app
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Process a request, or respond with 400 or 413."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        if {b"content-length", b"transfer-encoding"} <= headers.keys():
            problem = Problem(
                400,
                "malformed_request",
                "The request has both Content-Length and Transfer-Encoding. Send one of them.",
                headers={"Connection": "close"},
            )
            await problem.as_response()(scope, receive, send)
            return
        if _declared_length(headers) > self._limit:
            if b"expect" not in headers:  # such a client waits before it sends the body
                await _drain(receive)
            await self._too_large().as_response()(scope, receive, send)
            return
        await self._app(scope, self._count_bytes(receive), send)

    def _count_bytes(self, receive: Receive) -> Receive:
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


def _declared_length(headers: dict[bytes, bytes]) -> int:
    length = headers.get(b"content-length", b"")
    if not length.isdigit():
        return 0
    return int(length) if len(length) < 20 else sys.maxsize


async def _drain(receive: Receive) -> None:
    """Discard the rest of the body, up to a limit of size and time."""
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
