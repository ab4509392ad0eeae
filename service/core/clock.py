"""One clock for all replicas: the database's.

A replica with a wrong clock would sign documents that are not valid yet, use keys after their
window, or end leases too early. Therefore key windows, certificates, status lists, checkpoints,
leases and reservations use the database's time. A replica whose clock differs by more than
``MAX_SKEW`` writes nothing and is not ready (``operation.readiness``), because other times that it
would write are its own.

PostgreSQL is queried every few seconds; in between, the time advances with the monotonic clock.
SQL statements use ``NOW``. With SQLite, the time is the machine's.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from threading import Lock
from typing import Any

from sqlalchemy import Connection, Engine, select, text
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import GenericFunction

from affidavit.service.core.database import UtcDateTime, reader

MAX_SKEW = timedelta(seconds=1)
FRESH_SECONDS = 5.0
"""Time after which the database is queried again."""
MAX_QUERY_SECONDS = 1.0
"""The result of a slower query is too inexact."""

_CLOCK = text("SELECT clock_timestamp()")


class DatabaseNow(GenericFunction[datetime]):
    """The time at which a statement begins, by the database's clock."""

    type = UtcDateTime()
    inherit_cache = True


@compiles(DatabaseNow, "postgresql")
def _on_postgresql(*_: Any, **__: Any) -> str:
    return "statement_timestamp()"


@compiles(DatabaseNow, "sqlite")
def _on_sqlite(*_: Any, **__: Any) -> str:
    return "strftime('%Y-%m-%d %H:%M:%f000', 'now')"  # the driver's format


NOW = DatabaseNow()


def now_of(connection: Connection) -> datetime:
    """Return the database's time."""
    return connection.execute(select(NOW)).scalar_one()


class DatabaseClock:
    """The database's time, for several threads; ``wall`` is this machine's clock."""

    def __init__(
        self, engine: Engine, wall: Callable[[], datetime] = lambda: datetime.now(UTC)
    ) -> None:
        self._reader = reader(engine) if engine.dialect.name == "postgresql" else None
        self._wall = wall
        self._lock = Lock()
        self._queried_at = -FRESH_SECONDS
        self._base: tuple[datetime, float] | None = None

    def now(self) -> datetime:
        """Return the database's time, or this machine's until the database has answered."""
        if self._reader is None:
            return self._wall()
        if time.monotonic() >= self._queried_at + FRESH_SECONDS and self._lock.acquire(
            blocking=False
        ):
            try:
                self._query()
            finally:
                self._lock.release()
        if self._base is None:
            return self._wall()
        at, counted_from = self._base
        return at + timedelta(seconds=time.monotonic() - counted_from)

    def skew(self) -> timedelta:
        """Return how far this machine's clock is ahead; negative if it is behind."""
        now = self.now()
        return self._wall() - now

    def _query(self) -> None:
        assert self._reader is not None
        started_at = time.monotonic()
        try:
            with self._reader.connect() as connection:
                started_at = time.monotonic()
                at = connection.execute(_CLOCK).scalar_one()
        except SQLAlchemyError:
            return  # the request itself reports that the database is unreachable
        seconds = time.monotonic() - started_at
        self._queried_at = started_at
        if seconds <= MAX_QUERY_SECONDS:
            self._base = at.astimezone(UTC), started_at + seconds / 2
