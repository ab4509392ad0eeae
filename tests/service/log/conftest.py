"""A log with entries in a database of either kind, and an owner who tampers with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, create_engine, text

from affidavit.certificate import SigningKey
from affidavit.certificate.log import Checkpoint
from affidavit.service.database import open_engine, writer
from affidavit.service.log.audit import audit, snapshot
from affidavit.service.log.entries import append
from affidavit.service.log.reader import LogReader
from affidavit.service.log.sequencer import Sequencer
from affidavit.service.log.stored_tree import StoredCheckpoint
from affidavit.service.log.tree_audit import AuditFinding

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
ORIGIN = "example.com/log"
KEY = SigningKey.generate("log")
ARMED = (
    "log_entries",
    "log_leaves",
    "log_nodes",
    "log_checkpoints",
    "certificates",
    "requests",
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
        while sequencer.step():
            pass
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
            return list(audit(connection, kept, lambda *_: None))

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
