"""The audit: replay the log, compare it with the tables, and with checkpoints kept elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from sqlalchemy import Connection, Engine, Table, func, select

from affidavit.certificate.log import Checkpoint
from affidavit.service.ledger.replay import check_ledgers
from affidavit.service.log.compare import compare
from affidavit.service.log.findings import Finding
from affidavit.service.log.replay import replay
from affidavit.service.log.tables import log_entries, log_leaves, log_pending

Progress = Callable[[str, int, int], None]
"""Told of a part's name, how many of it were done just now, and how many there are."""


@contextmanager
def one_state(engine: Engine) -> Iterator[Connection]:
    """A connection whose every query sees the same state of the database."""
    if engine.dialect.name == "postgresql":  # a transaction of SQLite has one state anyway
        engine = engine.execution_options(isolation_level="REPEATABLE READ")
    with engine.connect() as connection:
        yield connection


def audit(
    connection: Connection, exported: Sequence[Checkpoint], progress: Progress
) -> Iterator[Finding]:
    """Everything that is wrong, in the order in which it is found."""
    leaves = _count(connection, log_leaves)
    entries = _count(connection, log_entries)
    yield from replay(connection, exported, lambda done: progress("leaves", done, leaves))
    yield from compare(connection, lambda done: progress("entries", done, entries))
    for found in check_ledgers(connection):
        yield Finding("ledger", f"{found.ledger} {found.seq}", f"{found.code}: {found.message}")


def waiting(connection: Connection) -> int:
    """Entries that wait for their places, which is no fault."""
    return _count(connection, log_pending)


def _count(connection: Connection, table: Table) -> int:
    found = connection.execute(select(func.count()).select_from(table)).scalar_one()
    return int(found)
