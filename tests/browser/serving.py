"""A served application for browsers: on a loopback port, in a thread of this process."""

from __future__ import annotations

import shutil
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from affidavit.service.core.database import open_engine
from affidavit.service.identity.scopes import Scope
from affidavit.service.identity.tokens import TokenRepository
from affidavit.service.settings import Settings
from affidavit.service.web.app import create_app
from affidavit.service.web.serve import IDLE_SECONDS
from affidavit.trust import KeyStore
from tests.support.polling import TIMEOUT_SECONDS, wait_until


@dataclass
class Site:
    """A served application, and what it takes to fill it."""

    url: str
    settings: Settings
    client: httpx.Client

    def token(self, name: str, *scopes: str) -> str:
        """The text of a new token."""
        engine = open_engine(self.settings.database_url)
        try:
            requested = [Scope(scope) for scope in scopes]
            _, text = TokenRepository(engine).new(
                name, requested, 1, by="test", at=datetime.now(UTC)
            )
            return text.text
        finally:
            engine.dispose()

    def ask(self, method: str, path: str, token: str, **sent: Any) -> httpx.Response:
        """One request of a program; what it answers must be no error."""
        headers = {"authorization": f"Bearer {token}"}
        answer = self.client.request(method, path, headers=headers, **sent)
        assert answer.status_code < 400, answer.text
        return answer


@contextmanager
def served(settings: Settings) -> Iterator[Site]:
    """Serve ``settings`` on a free loopback port, in a thread of this process."""
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    app = create_app(settings)
    # As in production: a connection that closes as soon as the client forgets it may close under
    # a request.
    config = uvicorn.Config(
        app,
        timeout_keep_alive=IDLE_SECONDS,
        timeout_graceful_shutdown=1,
        log_config=None,
        access_log=False,
        proxy_headers=False,
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    try:
        wait_until(lambda: server.started or not thread.is_alive())
        assert server.started
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        with httpx.Client(base_url=url, timeout=TIMEOUT_SECONDS) as client:
            yield Site(url, settings, client)
    finally:
        # A browser may still have a stream or a request of an open page.
        app.state.services.run_events.stop()
        server.should_exit = True
        thread.join(TIMEOUT_SECONDS)
    assert not thread.is_alive()


def settings_in(home: Path, template: Path, **changes: Any) -> Settings:
    """Settings of a service with a database and a key of its own."""
    shutil.copy(template, home / "affidavit.db")
    KeyStore(home / "keys").new("production 2026")
    provided = {"workers": 1, "loopback": True, **changes}
    return Settings(
        database_url=f"sqlite:///{home / 'affidavit.db'}", key_directory=home / "keys", **provided
    )
