"""A service, in process or as a real process."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType
from typing import IO, Any

import httpx
import pytest
from sqlalchemy import Engine

with warnings.catch_warnings():
    # Its client would rather have httpx's successor; ours is the one the product uses.
    warnings.simplefilter("ignore")
    from fastapi.testclient import TestClient

from affidavit.service.core import database
from affidavit.service.core.database import open_engine
from affidavit.service.core.pool import AccountingPool
from affidavit.service.identity.scopes import Scope
from affidavit.service.identity.tokens import TokenRepository
from affidavit.service.settings import Settings
from affidavit.service.web.app import create_app
from affidavit.trust import KeyStore
from tests.service.forked_service import IN_PROCESS
from tests.support.forked_processes import Process, fork
from tests.support.polling import TIMEOUT_SECONDS, wait_until

ROOT = Path(__file__).parents[2]
PRAGMAS = database.PRAGMAS
"""As the service sets them."""
ON_SQLITE = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
"""For laws of the service's own code, whatever the database; those of SQL run on both."""
ONCE = 3600.0
"""Seconds between comparisons of tables and log, where rows are altered that a use must notice."""


@pytest.fixture(scope="session")
def openapi() -> dict[str, Any]:
    """The service's document as ``docs`` has it, which ``whole/test_every_answer.py`` compares."""
    result: dict[str, Any] = json.loads((ROOT / "docs" / "openapi.json").read_bytes())
    return result


@pytest.fixture
def plan(document: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """The quick plan's document with some fields changed."""
    return document


# ---- the service in this process ---------------------------------------------------


@pytest.fixture(scope="module", autouse=True)
def accounting() -> Iterator[None]:
    """Accounting in this process, which is quicker; a module about the others overrides this.

    Nor does a commit or a key wait for the disk: what is killed here is a process and not the
    machine.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name, method in IN_PROCESS.items():
            patch.setattr(AccountingPool, name, method)
        patch.setattr(database, "PRAGMAS", (*PRAGMAS, "synchronous=OFF"))
        patch.setattr(os, "fsync", lambda _: None)
        yield


@pytest.fixture
def settings(sqlite_url: str, tmp_path: Path) -> Settings:
    """Settings with a migrated database and a key to sign with."""
    KeyStore(tmp_path / "keys").new("test")
    return Settings(
        database_url=sqlite_url, key_directory=tmp_path / "keys", workers=1, loopback=True
    )


def client_of(settings: Settings, address: str = "127.0.0.1", **parts: Any) -> TestClient:
    """A client on this machine, or at ``address``; a 500 is an answer, not an exception."""
    result = TestClient(
        create_app(settings, **parts),
        base_url="http://127.0.0.1",
        client=(address, 50_000),
        raise_server_exceptions=False,
    )
    result.event_hooks["response"].append(says_where_it_is)
    return result


def says_where_it_is(answer: httpx.Response) -> None:
    """What every test asks of the API: a thing that was made has a path."""
    assert answer.status_code != 201 or answer.headers["location"].startswith("/")


@pytest.fixture(scope="session", name="client_of")
def _client_of() -> Callable[..., TestClient]:
    return client_of


Headers = dict[str, str]


EACH_SCOPE = {scope.value: [scope.value] for scope in Scope}
"""Somebody for each scope, of its name."""


def token_texts(
    engine: Engine, people: Mapping[str, Iterable[str]], person: str | None = None
) -> dict[str, str]:
    """For each name the text of a new token of its scopes; others are not let in after."""
    store, now = TokenRepository(engine), datetime.now(UTC)
    return {
        name: store.new(
            name,
            held := [Scope(scope) for scope in scopes],
            1,
            by="test",
            at=now,
            person=person,
            queues=["default"] if Scope.WORK in held else (),
            datasets=["toy"] if Scope.WORK in held else (),
        )[1].text
        for name, scopes in people.items()
    }


def tokens_for(
    settings: Settings, people: Mapping[str, Iterable[str]], person: str | None = None
) -> dict[str, Headers]:
    """The same as headers."""
    engine = open_engine(settings.database_url)
    try:
        texts = token_texts(engine, people, person)
    finally:
        engine.dispose()
    return {name: {"authorization": f"Bearer {text}"} for name, text in texts.items()}


def token_for(
    settings: Settings, *scopes: str, name: str = "tester", person: str | None = None
) -> Headers:
    """The same for one name."""
    return tokens_for(settings, {name: scopes}, person)[name]


@pytest.fixture(name="tokens_for")
def _tokens_for() -> Callable[..., dict[str, Headers]]:
    return tokens_for


@pytest.fixture(name="token_for")
def _token_for() -> Callable[..., dict[str, str]]:
    return token_for


@pytest.fixture
def engine(database_url: str) -> Iterator[Engine]:
    """An engine of either kind."""
    result = open_engine(database_url)
    yield result
    result.dispose()


@pytest.fixture
def client(settings: Settings) -> Iterator[TestClient]:
    """A client of a running application that nobody made a token for yet."""
    with client_of(settings) as result:
        yield result


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Stand-ins for ``certify`` that never end or die, importable here and in the workers."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    import slow_accounting

    yield slow_accounting
    del sys.modules["slow_accounting"]


@pytest.fixture(scope="module")
def reader(migrated_sqlite: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    """A client of an application for a whole module, whose tests change nothing."""
    home = tmp_path_factory.mktemp("reader")
    shutil.copy(migrated_sqlite, home / "affidavit.db")
    KeyStore(home / "keys").new("test")
    url = f"sqlite:///{home / 'affidavit.db'}"
    settings = Settings(database_url=url, key_directory=home / "keys", workers=1, loopback=True)
    with client_of(settings) as result:
        yield result


# ---- the service as a process ------------------------------------------------------


@dataclass
class Server:
    """``python -m affidavit.service serve`` with its home, started and killed at will.

    One that is ``forked`` starts at once, and does its accounting itself (``forked_service``).
    """

    home: Path
    forked: bool = False
    log: list[str] = field(default_factory=list)
    process: Process | None = None
    said: IO[str] | None = None
    port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """One command to its end."""
        return subprocess.run(
            [sys.executable, "-m", "affidavit.service", *arguments],
            env=self._environment(),
            capture_output=True,
            check=False,
            text=True,
            timeout=300,
        )

    def start(self) -> None:
        """Start serving on a free port, or the one that it had; return when it listens."""
        self.process, self.said = self._begun("serve", "--port", str(self.port))
        for line in self.said:
            self.log.append(line)
            if result := re.search(r"listening on http://127\.0\.0\.1:(\d+)", line):
                self.port = int(result[1])
                threading.Thread(target=self._keep_reading, args=(self.said,), daemon=True).start()
                return
        raise AssertionError("".join(self.log))

    def _begun(self, *arguments: str) -> tuple[Process, IO[str]]:
        """The process, and where it writes its log."""
        reading, writing = os.pipe()
        with os.fdopen(writing, "wb") as log:
            environment = self._environment()
            if self.forked:
                module = "tests.service.forked_service"
                process: Process = fork(module, arguments, environment, log.fileno())
            else:
                command = [sys.executable, "-m", "affidavit.service", *arguments]
                process = subprocess.Popen(command, env=environment, stderr=log)
        return process, os.fdopen(reading)

    def stop(self, sent: signal.Signals = signal.SIGTERM) -> None:
        """Send a signal and wait for the end."""
        if self.process is not None:
            self.process.send_signal(sent)
            self.process.wait(TIMEOUT_SECONDS)
            wait_until(lambda: self.said is None or self.said.closed)
            self.process = None

    def _keep_reading(self, said: IO[str]) -> None:
        with said as stream:
            self.log.extend(stream)

    def _environment(self) -> dict[str, str]:
        stored = {key: value for key, value in os.environ.items() if key != "DATABASE_URL"}
        return {**stored, "AFFIDAVIT_HOME": str(self.home), "AFFIDAVIT_WORKERS": "1"}


def _server(sqlite_url: str, home: Path, *, forked: bool) -> Iterator[Server]:
    assert sqlite_url.endswith(str(home / "affidavit.db"))
    KeyStore(home / "keys").new("test")
    result = Server(home, forked)
    yield result
    result.stop(signal.SIGKILL)


@pytest.fixture
def server(sqlite_url: str, tmp_path: Path) -> Iterator[Server]:
    """A server with a migrated database and a key; not started yet."""
    yield from _server(sqlite_url, tmp_path, forked=False)


@pytest.fixture
def forked_server(sqlite_url: str, tmp_path: Path) -> Iterator[Server]:
    """The same, which starts at once."""
    yield from _server(sqlite_url, tmp_path, forked=True)


@pytest.fixture(scope="session", name="serving")
def _serving() -> Callable[..., AbstractContextManager[Server]]:
    """Serve from a prepared home for the length of a block."""

    @contextmanager
    def serving(home: Path, *, forked: bool = False) -> Iterator[Server]:
        result = Server(home, forked)
        result.start()
        try:
            yield result
        finally:
            result.stop(signal.SIGKILL)

    return serving


def post(client: Any, document: Any, syntax: str = "application/json", url: str = "") -> Any:
    """POST a plan given as data or as bytes."""
    raw = document if isinstance(document, bytes) else json.dumps(document).encode()
    return client.post(f"{url}/v1/certificates", content=raw, headers={"content-type": syntax})


@pytest.fixture(name="post")
def _post() -> Callable[..., Any]:
    return post
