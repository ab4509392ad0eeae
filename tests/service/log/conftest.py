"""A log with entries in a database of either kind, and an owner who tampers with it."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, create_engine, text

from affidavit.service.audit.audit import AuditFinding, audit
from affidavit.service.core.database import open_engine, snapshot, writer
from affidavit.service.log.entries import append
from affidavit.service.log.reader import LogReader
from affidavit.service.log.sequencer import Sequencer
from affidavit.service.log.stored_tree import StoredCheckpoint
from affidavit.trust import SigningKey
from affidavit.trust.log import Checkpoint
from tests.support.polling import wait_until

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
ORIGIN = "example.com/log"
KEY = SigningKey.generate("log")
ARMED = (
    "log_entries",
    "log_pending",
    "log_leaves",
    "log_nodes",
    "log_checkpoints",
    "certificates",
    "requests",
    "certificate_facets",
    "dataset_grants",
    "keysets",
    "revocations",
    "revoked_keys",
    "signing_keys",
    "tokens",
)
"""Tables with triggers that an owner has to take off before he can tamper."""


@dataclass
class Log:
    """A database's log, as the service works on it and as its owner can."""

    url: str
    engine: Engine
    key: SigningKey = KEY
    entered: int = 0
    sequencers: list[Sequencer] = field(default_factory=list)

    def enter(self, count: int = 1) -> None:
        """Entries of a kind that no table stands behind."""
        with writer(self.engine).begin() as connection:
            for _ in range(count):
                append(
                    connection,
                    "exercise",
                    f"run {self.entered}",
                    {"number": self.entered},
                    actor="tests",
                    at=NOON + timedelta(seconds=self.entered),
                )
                self.entered += 1

    def sequencer(self, **options: Any) -> Sequencer:
        return Sequencer(self.engine, lambda: self.key, **{"origin": ORIGIN, **options})

    def sequence(self, **options: Any) -> StoredCheckpoint:
        """Give all waiting entries their places."""
        sequencer = self.sequencer(**options)
        # Another one, of a service, may be at work; it returns nothing then.
        wait_until(lambda: not sequencer.step() and sequencer.newest() is not None)
        result = sequencer.newest()
        assert result is not None
        return result

    def grow(self, *batches: int) -> StoredCheckpoint:
        """Enter and sequence batch after batch."""
        for count in batches:
            self.enter(count)
            stored = self.sequence()
        return stored

    @property
    def reader(self) -> LogReader:
        return LogReader(self.engine)

    def audit(self, *kept: Checkpoint) -> list[AuditFinding]:
        with snapshot(self.engine) as connection:
            return list(audit(connection, kept))

    def codes(self, *kept: Checkpoint) -> set[str]:
        return {item.code for item in self.audit(*kept)}

    def value(self, query: str, **parameters: Any) -> Any:
        with self.engine.connect() as connection:
            return connection.execute(text(query), parameters).scalar()

    @contextmanager
    def as_owner(self) -> Iterator[Connection]:
        """A transaction of somebody who owns the database: no trigger or key stops him."""
        stranger = create_engine(self.url)
        try:
            with stranger.begin() as connection:
                for table in ARMED:
                    _disarm(connection, table)
                yield connection
        finally:
            stranger.dispose()


def _disarm(connection: Connection, table: str) -> None:
    if connection.dialect.name == "postgresql":
        connection.execute(text(f"ALTER TABLE {table} DISABLE TRIGGER ALL"))
        return
    triggers = connection.execute(
        text("SELECT name FROM sqlite_master WHERE type = 'trigger' AND tbl_name = :table"),
        {"table": table},
    )
    for (name,) in triggers.all():
        connection.execute(text(f"DROP TRIGGER {name}"))


@pytest.fixture
def log(database_url: str) -> Iterator[Log]:
    """An empty log."""
    engine = open_engine(database_url)
    yield Log(database_url, engine)
    engine.dispose()


@pytest.fixture
def tamper(log: Log) -> Callable[..., None]:
    """One statement of the owner's, after which nothing but the log itself can tell."""

    def run(*statements: str, **parameters: Any) -> None:
        with log.as_owner() as connection:
            for statement in statements:
                result = connection.execute(text(statement), parameters)
                assert result.rowcount != 0, statement

    return run


# ---- other servers -------------------------------------------------------------------------

Answer = tuple[int, str, bytes]


@pytest.fixture
def listening() -> Iterator[Callable[[Callable[[bytes, Any], Answer]], str]]:
    """Start a server that answers each POST by a function; its URL."""
    servers = []

    def listen(answer: Callable[[bytes, Any], Answer]) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:  # the library's name
                body = self.rfile.read(int(self.headers["content-length"]))
                status, media, content = answer(body, self.headers)
                self.send_response(status)
                self.send_header("content-type", media)
                self.send_header("content-length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: Any) -> None:
                """Nothing."""

        server = HTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}/secret"

    yield listen
    for server in servers:
        server.shutdown()
        server.server_close()


CONFIGURATION = """
[tsa]
default_tsa = one
[one]
serial = {home}/serial
signer_digest = sha256
default_policy = 1.2.3.4.1
digests = sha256, sha512
accuracy = secs:1
ess_cert_id_alg = sha256
[authority]
distinguished_name = name
x509_extensions = usage
prompt = no
[name]
CN = A test's time-stamping authority
[usage]
extendedKeyUsage = critical, timeStamping
basicConstraints = critical, CA:false
"""


@pytest.fixture
def authority(tmp_path: Path, listening: Any) -> tuple[str, Path]:
    """An ``openssl ts`` behind a URL, and its root certificate."""
    home = tmp_path / "authority"
    home.mkdir()
    (home / "configuration").write_text(CONFIGURATION.format(home=home))

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=home, check=True, capture_output=True)

    root = "-x509 -newkey rsa:2048 -nodes -keyout root.key -out root.pem -days 9 -subj /CN=Root"
    openssl("req", *root.split())
    request = "-newkey rsa:2048 -nodes -keyout one.key -out one.csr -config configuration"
    openssl("req", *request.split(), "-section", "authority")
    issue = "-req -in one.csr -CA root.pem -CAkey root.key -CAcreateserial -out one.pem -days 9"
    openssl("x509", *issue.split(), "-extfile", "configuration", "-extensions", "usage")

    def answer(body: bytes, _headers: Any) -> Answer:
        (home / "query").write_bytes(body)
        reply = "-reply -config configuration -section one -queryfile query -out reply"
        openssl("ts", *reply.split(), "-signer", "one.pem", "-inkey", "one.key")
        return 200, "application/timestamp-reply", (home / "reply").read_bytes()

    return listening(answer), home / "root.pem"
