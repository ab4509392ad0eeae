"""One clock for all replicas: that of the database.

A replica whose own clock is wrong would sign what is not valid yet, go on using a key whose window
is over, or end leases that were just granted. So key windows, certificates, status lists,
checkpoints, leases and reservations take the database's time. A replica that is more than
``MAX_SKEW`` off writes nothing and is not ready (``operation.readiness``), because the other times
that it would write are its own.

PostgreSQL is asked every few seconds; in between the time is counted on by the monotonic clock,
which nobody sets. Statements that compare with the present name ``NOW``, the database's own.
SQLite has no clock but the machine's.
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

from affidavit.service.certificate_tables import UtcDateTime
from affidavit.service.database import reader

MAX_SKEW = timedelta(seconds=1)
FRESH_SECONDS = 5.0
"""For how long an answer of the database is counted on."""
SLOWEST_SECONDS = 1.0
"""An answer that took longer says too little about when it was given."""

_CLOCK = text("SELECT clock_timestamp()")


class DatabaseNow(GenericFunction[datetime]):
    """When a statement begins, by the database's clock."""

    type = UtcDateTime()
    inherit_cache = True


@compiles(DatabaseNow, "postgresql")
def _on_postgresql(*_: Any, **__: Any) -> str:
    return "statement_timestamp()"


@compiles(DatabaseNow, "sqlite")
def _on_sqlite(*_: Any, **__: Any) -> str:
    return "strftime('%Y-%m-%d %H:%M:%f000', 'now')"  # as the driver writes an instant


NOW = DatabaseNow()


def now_of(connection: Connection) -> datetime:
    """The time of the database behind ``connection``."""
    return connection.execute(select(NOW)).scalar_one()


class DatabaseClock:
    """The database's time; safe to ask from several threads. ``wall`` is this machine's."""

    def __init__(
        self, engine: Engine, wall: Callable[[], datetime] = lambda: datetime.now(UTC)
    ) -> None:
        self._reader = reader(engine) if engine.dialect.name == "postgresql" else None
        self._wall = wall
        self._lock = Lock()
        self._asked_at = -FRESH_SECONDS
        self._base: tuple[datetime, float] | None = None

    def now(self) -> datetime:
        """The time; this machine's, as long as the database did not answer yet."""
        if self._reader is None:
            return self._wall()
        if time.monotonic() >= self._asked_at + FRESH_SECONDS and self._lock.acquire(
            blocking=False
        ):
            try:
                self._ask()
            finally:
                self._lock.release()
        if self._base is None:
            return self._wall()
        at, counted_from = self._base
        return at + timedelta(seconds=time.monotonic() - counted_from)

    def skew(self) -> timedelta:
        """By how much this machine's clock is ahead; negative where it is behind."""
        now = self.now()
        return self._wall() - now

    def _ask(self) -> None:
        assert self._reader is not None
        began = time.monotonic()
        try:
            with self._reader.connect() as connection:
                began = time.monotonic()
                at = connection.execute(_CLOCK).scalar_one()
        except SQLAlchemyError:
            return  # the request itself will say that there is no database
        took = time.monotonic() - began
        self._asked_at = began
        if took <= SLOWEST_SECONDS:
            self._base = at.astimezone(UTC), began + took / 2
