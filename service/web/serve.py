"""Run the service with uvicorn.

Before the port is opened, the database, its schema and the signing keys are checked, and a problem
is reported in one sentence. The address is logged once it is known, so that ``--port 0`` works.

On SIGTERM or Ctrl-C, the service accepts no new requests, finishes those in progress (within
``GRACE_SECONDS``), adds pending entries to the log, stops the accounting processes, and exits with
code 0.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import replace

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from affidavit.service.core.database import open_engine
from affidavit.service.core.errors import OperatorError
from affidavit.service.identity.actor import is_loopback
from affidavit.service.identity.tokens import TokenRepository
from affidavit.service.keys.keyring import Keyring
from affidavit.service.operation.database_admin import require_head
from affidavit.service.settings import Settings
from affidavit.service.web.app import create_app
from affidavit.service.web.openapi import document_bytes
from affidavit.service.web.telemetry import configure_logging, open_tracing

GRACE_SECONDS = 20
HEADER_SECONDS = 10
"""Time from the start of a connection for the head of a request to arrive."""
IDLE_SECONDS = 75
"""Time for which an idle connection stays open. It exceeds the 60 s of common load balancers, which
would otherwise send a request while the service closes the connection."""
WRITE_SECONDS = 60
"""Time that a client may take to read what was sent."""
SWITCH_SECONDS = 0.0005
"""The interpreter's switch interval, below Python's 5 ms: every response, even of /livez, waits for
it at least once while other threads compute."""

log = logging.getLogger("affidavit.service")


def serve(host: str, port: int, settings: Settings) -> None:
    """Serve until a signal stops the process.

    Raises ``SchemaNotAtHead``, ``OperatorError``, ``KeyFailure`` for an unusable signing key,
    SQLAlchemy's errors if the database is unreachable, and ``OSError`` if the address is.
    """
    engine = open_engine(settings.database_url)
    try:
        require_head(engine)
        has_users = settings.provider is not None or TokenRepository(engine).has_any()
    finally:
        engine.dispose()
    Keyring(settings.key_directory, settings.halves).all_current()
    with listen(host, port) as listening:
        _require_users(listening.getsockname()[0], has_users=has_users)
        _run(listening, settings)


def _run(listening: socket.socket, settings: Settings) -> None:
    configure_logging()
    tracing = open_tracing(os.environ)
    app = create_app(replace(settings, loopback=is_loopback(listening.getsockname()[0])), tracing)
    document_bytes(app)
    prepare_process()
    try:
        run_until_stopped(app, listening, app.state.services.run_events.stop)
    finally:
        if tracing is not None:
            tracing.close()


def run_until_stopped(
    app: ASGIApp, listening: socket.socket, end_streams: Callable[[], None]
) -> None:
    """Serve ``app``; ``end_streams`` is called before waiting for responses in progress."""
    # uvicorn raises the signal again after stopping, which would end the process with an error.
    signal.signal(signal.SIGTERM, lambda *_: None)
    config = uvicorn.Config(
        app,
        http=_Protocol,
        ws="none",
        timeout_keep_alive=IDLE_SECONDS,
        log_config=None,
        access_log=False,
        server_header=False,
        # The client is the peer of the connection, whatever a header says.
        proxy_headers=False,
        timeout_graceful_shutdown=GRACE_SECONDS,
    )
    _Server(config, end_streams).run(sockets=[listening])


def prepare_process() -> None:
    """Set the switch interval, and exclude imported objects from garbage collection.

    Collecting them would delay responses by a tenth of a second.
    """
    sys.setswitchinterval(SWITCH_SECONDS)
    gc.collect()
    gc.freeze()


def _require_users(address: str, *, has_users: bool) -> None:
    """Raise ``OperatorError`` if other machines could reach a service that has no users."""
    if not has_users and not is_loopback(address):
        raise OperatorError(
            f"nobody could use the service on {address}: it has no tokens and no OpenID provider; "
            "run: affidavit tokens new --name NAME --scope submit, or set AFFIDAVIT_OIDC_ISSUER "
            "and its related settings, or omit --host to serve only this machine"
        )


class _Protocol(H11Protocol):
    """uvicorn's protocol with time limits for sending a request head and reading a response.

    Bodies have their own time limit (``routing.read_body``). h11 limits heads to 64 KiB; uvicorn's
    other parser does not.
    """

    _head_timer: asyncio.TimerHandle | None = None
    _write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)  # any unread data pauses writing
        self._head_timer = self.loop.call_later(HEADER_SECONDS, self._close_unless_in_request)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._in_request():
            self._cancel_head_timer()
        elif self._head_timer is None:
            self._head_timer = self.loop.call_later(HEADER_SECONDS, self._close_unless_in_request)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_timer = self.loop.call_later(WRITE_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_head_timer()
        self.resume_writing()
        super().connection_lost(exc)

    def _in_request(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _close_unless_in_request(self) -> None:
        self._head_timer = None
        if not self._in_request():
            self.transport.close()

    def _cancel_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


class _Server(uvicorn.Server):
    """uvicorn's server; it logs its address once it listens.

    ``end_streams`` is called before waiting for responses in progress.
    """

    def __init__(self, config: uvicorn.Config, end_streams: Callable[[], None]) -> None:
        super().__init__(config)
        self._end_streams = end_streams

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listening in sockets or []:
            host, port = listening.getsockname()[:2]
            log.info("listening on http://%s:%d", f"[{host}]" if ":" in host else host, port)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._end_streams()
        await super().shutdown(sockets)


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that is bound to the address; raises ``OSError``."""
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    # asyncio sets TCP_NODELAY only on sockets with a protocol; without it, every response after the
    # first of a connection would wait 40 ms for an acknowledgement.
    listening = socket.socket(family, kind, protocol)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind(address)
    except OSError:
        listening.close()
        raise
    return listening
