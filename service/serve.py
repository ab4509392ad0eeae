"""Run the service: check first, then listen.

What would make every request fail is found before the port is opened and said in one
sentence: a database that does not answer, a schema that is not at head, a port that is
taken. The address is printed once it is known, so that ``--port 0`` can be used.

On SIGTERM or Ctrl-C no new request is taken, those in progress are finished (within
``GRACE_SECONDS``), what waits is entered into the log, the accounting processes are
stopped, and the exit code is 0.
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

from affidavit.service.app import create_app
from affidavit.service.database import open_engine
from affidavit.service.errors import OperatorError
from affidavit.service.identity.actor import is_loopback
from affidavit.service.identity.tokens import TokenRepository
from affidavit.service.keys import Keyring
from affidavit.service.operation.database_admin import require_head
from affidavit.service.operation.telemetry import configure_logging, open_tracing
from affidavit.service.settings import Settings

GRACE_SECONDS = 20
HEADER_SECONDS = 10
"""How long the head of a request may take to arrive, from the connection's first moment on."""
IDLE_SECONDS = 75
"""How long a connection is left open between two requests: longer than the 60 s of the common load
balancers, which would send a request just as the service closes the connection."""
WRITE_SECONDS = 60
"""How long a client may take to read what it was sent."""
SWITCH_SECONDS = 0.0005
"""How long a thread computes before the event loop gets its turn: every answer waits for that
once or more, and with Python's 5 ms even /livez would."""

log = logging.getLogger("affidavit.service")


def serve(host: str, port: int, settings: Settings) -> None:
    """Serve until told to stop.

    Raises ``SchemaNotAtHead``, ``OperatorError``, ``KeyFailure`` when the signing key cannot be
    used, SQLAlchemy's errors when the database does not answer, and ``OSError`` when the
    address cannot be listened on.
    """
    engine = open_engine(settings.database_url)
    try:
        require_head(engine)
        known = settings.provider is not None or TokenRepository(engine).exist()
    finally:
        engine.dispose()
    Keyring(settings.key_directory, settings.halves).all_current()
    with listen(host, port) as listening:
        _require_somebody(listening.getsockname()[0], known=known)
        _run(listening, settings)


def _run(listening: socket.socket, settings: Settings) -> None:
    configure_logging()
    tracing = open_tracing(os.environ)
    app = create_app(replace(settings, loopback=is_loopback(listening.getsockname()[0])), tracing)
    prepare_process()
    try:
        run_until_stopped(app, listening, app.state.services.run_events.stop)
    finally:
        if tracing is not None:
            tracing.close()


def run_until_stopped(
    app: ASGIApp, listening: socket.socket, end_streams: Callable[[], None] = lambda: None
) -> None:
    """Serve ``app``; ``end_streams`` is called before it waits for answers in progress."""
    # uvicorn ends its own process by the signal that stopped it; to have been asked to
    # stop is no failure, so that the signal no longer means anything then.
    signal.signal(signal.SIGTERM, lambda *_: None)
    config = uvicorn.Config(
        app,
        http=_Protocol,
        ws="none",
        timeout_keep_alive=IDLE_SECONDS,
        log_config=None,
        access_log=False,
        server_header=False,
        # Whatever a header says, the peer is who connected.
        proxy_headers=False,
        timeout_graceful_shutdown=GRACE_SECONDS,
    )
    _Server(config, end_streams).run(sockets=[listening])


def prepare_process() -> None:
    """Have threads take turns often, and leave what was imported out of every look for garbage.

    Looking through all of it again and again would keep answers waiting for a tenth of a second.
    """
    sys.setswitchinterval(SWITCH_SECONDS)
    gc.collect()
    gc.freeze()


def _require_somebody(address: str, *, known: bool) -> None:
    """Raise ``OperatorError`` where strangers would reach a service that knows nobody."""
    if not known and not is_loopback(address):
        raise OperatorError(
            f"nobody could use the service on {address}: it has no tokens and no OpenID provider; "
            "run: affidavit tokens new --name NAME --scope submit, or set AFFIDAVIT_OIDC_ISSUER "
            "and its related settings, or omit --host to serve only this machine"
        )


class _Protocol(H11Protocol):
    """uvicorn's protocol, which ends a connection that does not send or read in time.

    Bodies have a time limit of their own (``routing.read_body``). h11 bounds heads at 64 KiB;
    uvicorn's other parser does not.
    """

    _head: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)  # whatever the client does not take pauses us
        self._head = self.loop.call_later(HEADER_SECONDS, self._close_unless_in_request)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._in_request():
            self._forget_head()
        elif self._head is None:
            self._head = self.loop.call_later(HEADER_SECONDS, self._close_unless_in_request)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread = self.loop.call_later(WRITE_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget_head()
        self.resume_writing()
        super().connection_lost(exc)

    def _in_request(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _close_unless_in_request(self) -> None:
        self._head = None
        if not self._in_request():
            self.transport.close()

    def _forget_head(self) -> None:
        if self._head is not None:
            self._head.cancel()
            self._head = None


class _Server(uvicorn.Server):
    """uvicorn's server, which says where it listens once it really does.

    ``end_streams`` is called before it waits for the answers in progress to be finished.
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
    """A socket at that address to listen on; raises ``OSError``."""
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    # asyncio sends at once (TCP_NODELAY) on sockets that name their protocol alone; without it
    # every answer after a connection's first would wait 40 ms for an acknowledgement.
    listening = socket.socket(family, kind, protocol)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind(address)
    except OSError:
        listening.close()
        raise
    return listening
