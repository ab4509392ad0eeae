"""SQLAlchemy engines for SQLite and PostgreSQL, transactions, column types, and pages of a list.

SQLite needs settings that its defaults lack:

- ``journal_mode=WAL``: readers never wait for the writer, and after a crash the file opens at the
  last commit.
- ``synchronous=FULL``: a certificate that was answered with 201 survives a power cut. ``NORMAL``
  would save one flush per commit and could lose the last answers.
- ``busy_timeout``: a second process waits instead of failing.
- ``foreign_keys``: off by default in SQLite.
- ``recursive_triggers``: without it ``INSERT OR REPLACE`` bypasses the triggers that refuse
  deletions.

PostgreSQL assumes a spinning disk by default, and reads a whole table rather than two thousand
rows by key (``RANDOM_PAGE_COST``). Generic plans of prepared statements do the same to find
expired leases, of which there are nearly none, so every plan is made for the actual values.
Statements, waits for locks and idle transactions are bounded (``TIMEOUTS``), whatever the
server's settings. Connections are tested before use, because the server may have closed them.

Error messages omit the parameters of statements, because these contain plans.

Transactions are begun here and not by the driver, which would begin one only at the first write: a
transaction that reads and then writes could then fail instead of waiting. ``writer`` takes the
write lock at once, with ``BEGIN IMMEDIATE``. ``reader`` uses autocommit on PostgreSQL, where each
statement sees what is committed at its time in any case.

``any_of`` is a condition for a few ids. For ``id IN (SELECT ...)`` PostgreSQL may read the whole
table; for an array it expects few elements and uses the index.

>>> from sqlalchemy import column, select
>>> print(any_of(column("id"), select(column("other"))))
id IN (SELECT other)

A cursor encodes the time and the id of the last row of a page, and is opaque to clients. Rows
that are inserted meanwhile are neither repeated nor skipped.

>>> cursor = cursor_at(datetime(2026, 11, 21, tzinfo=UTC), "a", True)
>>> read_cursor(cursor, str, bool)
(datetime.datetime(2026, 11, 21, 0, 0, tzinfo=datetime.timezone.utc), 'a', True)

Reference: PostgreSQL, Row and Array Comparisons, ``expression = ANY (array expression)``.
"""

from __future__ import annotations

import base64
import binascii
import json
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from threading import Lock
from typing import Any, Concatenate, ParamSpec, TypeVar

import sqlalchemy as sa
from sqlalchemy import (
    URL,
    Boolean,
    ColumnElement,
    Connection,
    Dialect,
    Engine,
    Row,
    Select,
    create_engine,
    event,
    text,
    tuple_,
)
from sqlalchemy.engine import make_url
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.schema import SchemaItem
from sqlalchemy.sql.functions import FunctionElement

from affidavit.service.core import teams

P = ParamSpec("P")
T = TypeVar("T")

BUSY_MILLISECONDS = 10_000
_LOCKED = "affidavit_locked"
CONNECT_SECONDS = 5
MAX_CONNECTIONS = 5
"""Connections of a process to PostgreSQL, beside the one of an engine that is ``aside``.

One interpreter serves all threads, so that more connections would not increase throughput.
"""
RANDOM_PAGE_COST = 1.1
"""Cost of a random page over that of a sequential page, for solid-state disks."""
TIMEOUTS = {
    "statement_timeout": 60,
    "lock_timeout": 10,
    "idle_in_transaction_session_timeout": 15,
}
"""Seconds, for each connection to PostgreSQL. They bound how long a process that hangs or vanishes
in a transaction keeps its locks; requests that wait for them are answered with 503 before."""
READ_ONLY = "25006"
"""SQLSTATE of a write to a read-only server (``read_only_sql_transaction``)."""
PRAGMAS = (
    f"busy_timeout={BUSY_MILLISECONDS}",
    "journal_mode=WAL",
    "synchronous=FULL",
    "foreign_keys=ON",
    "recursive_triggers=ON",
)


def open_engine(url: str, *, bounded: bool = True, aside: bool = False) -> Engine:
    """Return an engine for ``url``, which is validated by ``settings.database_url``.

    Connections are opened when they are needed. ``bounded`` sets ``TIMEOUTS``, which an operator's
    command may exceed. An engine that is ``aside`` has a single connection, for reads during a
    transaction of another engine, whose connections may all wait for a lock.
    """
    if make_url(url).get_backend_name() == "sqlite":
        engine = create_engine(url, hide_parameters=True)
        event.listen(engine, "connect", _prepare_sqlite)
        lock = _WriteLock()
        event.listen(engine, "begin", lock.begin)
        event.listen(engine, "checkin", lock.release)
        teams.confine(engine)
        return engine
    # The pool keeps all connections: opening one costs more than most queries.
    engine = create_engine(
        url,
        pool_size=1 if aside else MAX_CONNECTIONS,
        max_overflow=0,
        pool_pre_ping=True,
        connect_args={"connect_timeout": CONNECT_SECONDS},
        hide_parameters=True,
    )
    event.listen(engine, "connect", _prepare_postgresql)
    if bounded:
        event.listen(engine, "connect", _set_timeouts)
    event.listen(engine, "handle_error", _disconnect_from_standby)
    teams.confine(engine)
    return engine


def reader(engine: Engine) -> Engine:
    """Return ``engine`` for reading; it shares the connections.

    On SQLite, a connection still reads from one snapshot.
    """
    if engine.dialect.name == "sqlite":
        return engine
    return engine.execution_options(isolation_level="AUTOCOMMIT")


def writer(engine: Engine) -> Engine:
    """Return ``engine`` for transactions that write; it shares the connections."""
    return engine.execution_options(affidavit_writes=True)


class Store:
    """Base of repositories; safe to use from several threads and processes."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._reader, self._writer = engine, reader(engine), writer(engine)

    def read(
        self, query: Callable[Concatenate[Connection, P], T], *values: P.args, **named: P.kwargs
    ) -> T:
        """Return the result of ``query`` on a new connection."""
        with self._reader.connect() as connection:
            return query(connection, *values, **named)

    def writing(self) -> AbstractContextManager[Connection]:
        """Return a transaction that writes."""
        return self._writer.begin()


def write(engine: Engine, work: Callable[[Connection], T]) -> T:
    """Run ``work`` in a transaction, and again if another transaction stored the same row first."""
    try:
        with writer(engine).begin() as connection:
            return work(connection)
    except IntegrityError:
        with writer(engine).begin() as connection:
            return work(connection)


_HOLD = text("SELECT pg_advisory_xact_lock(hashtextextended(:name, 0))")
_SHARE = text("SELECT pg_advisory_xact_lock_shared(hashtextextended(:name, 0))")


def hold(connection: Connection, name: str, *, shared: bool = False) -> None:
    """Lock ``name`` until the transaction ends; a ``shared`` lock excludes only exclusive ones.

    SQLite needs no lock, because it has one writer at a time. Names with equal hashes share a lock.
    """
    if connection.dialect.name == "postgresql":
        connection.execute(_SHARE if shared else _HOLD, {"name": name})


def is_missing_file(url: URL) -> bool:
    """Return whether ``url`` is an SQLite file that does not exist; opening it would create it."""
    if url.get_backend_name() != "sqlite" or not url.database:
        return False
    return not Path(url.database).exists()


def create_sqlite_file(url: str) -> None:
    """Create the file and directory of an SQLite database, readable by their owner only.

    SQLite creates its other files with the same mode. The mode of an existing file is changed too.
    """
    parsed = make_url(url)
    if parsed.get_backend_name() == "sqlite" and parsed.database:
        path = Path(parsed.database)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.touch(mode=0o600)
        path.chmod(0o600)


def _prepare_sqlite(connection: Any, _record: Any) -> None:
    connection.isolation_level = None
    cursor = connection.cursor()
    for pragma in PRAGMAS:
        _set(cursor, pragma)
    cursor.close()


def _set(cursor: sqlite3.Cursor, pragma: str) -> None:
    """Set ``pragma``, retrying while another connection switches the file to WAL mode."""
    end = time.monotonic() + BUSY_MILLISECONDS / 1000
    while True:
        try:
            cursor.execute(f"PRAGMA {pragma}")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > end:
                raise
            time.sleep(0.01)


def _prepare_postgresql(connection: Any, _record: Any) -> None:
    # A rollback would undo settings made in a transaction.
    connection.autocommit = True
    connection.execute(f"SET random_page_cost = {RANDOM_PAGE_COST}")
    connection.execute("SET plan_cache_mode = force_custom_plan")
    connection.autocommit = False


def _set_timeouts(connection: Any, _record: Any) -> None:
    connection.autocommit = True
    for name, seconds in TIMEOUTS.items():
        connection.execute(f"SET {name} = '{seconds}s'")
    connection.autocommit = False


def _disconnect_from_standby(context: Any) -> None:
    """Reopen all connections when the server has become a read-only standby.

    Its connections stay open, while the host name in the URL resolves to the new primary.
    """
    if getattr(context.original_exception, "sqlstate", None) == READ_ONLY:
        context.is_disconnect = True


class _WriteLock:
    """A lock for the threads of this process that write to one SQLite file.

    SQLite polls with growing pauses; a thread that waits here continues without delay.
    """

    def __init__(self) -> None:
        self._lock = Lock()

    def begin(self, connection: Connection) -> None:
        """Begin a transaction; one that writes waits for the lock."""
        if not connection.get_execution_options().get("affidavit_writes", False):
            connection.exec_driver_sql("BEGIN")
            return
        record = connection.connection.record_info
        # After this time SQLite itself reports that the file is locked.
        timeout = BUSY_MILLISECONDS / 1000
        if record is not None and _LOCKED not in record and self._lock.acquire(timeout=timeout):
            record[_LOCKED] = True
        connection.exec_driver_sql("BEGIN IMMEDIATE")

    def release(self, _connection: Any, record: Any) -> None:
        """Release the lock when the connection returns to the pool."""
        if record.record_info.pop(_LOCKED, False):
            self._lock.release()


# ---- a condition on a few ids --------------------------------------------------------


class _AnyOf(FunctionElement[bool]):
    """The SQL construct; its clauses are a column and a subquery."""

    type = Boolean()
    inherit_cache = True


def any_of(column: ColumnElement[Any], query: Select[Any]) -> ColumnElement[bool]:
    """Return the condition that ``query`` selects the value of ``column``."""
    return _AnyOf(column, query.scalar_subquery())


@compiles(_AnyOf)
def _in(element: _AnyOf, compiler: Any, **options: Any) -> str:
    column, result = (compiler.process(clause, **options) for clause in element.clauses)
    return f"{column} IN {result}"


@compiles(_AnyOf, "postgresql")
def _any(element: _AnyOf, compiler: Any, **options: Any) -> str:
    column, result = (compiler.process(clause, **options) for clause in element.clauses)
    return f"{column} = ANY (ARRAY{result})"


# ---- columns and tables --------------------------------------------------------------


class UtcDateTime(sa.TypeDecorator[datetime]):
    """An instant: aware in Python, UTC in the database (SQLite stores no time zone)."""

    impl = sa.DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:  # noqa: ARG002
        """Convert to UTC; raises ``ValueError`` for a naive time."""
        if value is not None and value.tzinfo is None:
            raise ValueError("a time without a zone is not an instant")
        return None if value is None else value.astimezone(UTC)

    def process_result_value(self, value: Any, dialect: Dialect) -> datetime | None:  # noqa: ARG002
        """Return an aware time in UTC."""
        if value is None:
            return None
        instant: datetime = value
        return instant.replace(tzinfo=UTC) if instant.tzinfo is None else instant.astimezone(UTC)


RowNumber = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
"""SQLite generates ids only for INTEGER PRIMARY KEY."""

metadata = sa.MetaData()


def numbered(name: str, *items: SchemaItem) -> sa.Table:
    """Return a table whose rows are numbered from 1 by ``id``."""
    positive = sa.CheckConstraint("id > 0", name=f"{name}_id_positive")
    return sa.Table(name, metadata, sa.Column("id", RowNumber, primary_key=True), *items, positive)


# ---- pages of a list -----------------------------------------------------------------

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)


class InvalidCursor(ValueError):
    """A cursor that this service did not issue."""


def cursor_at(at: datetime, *key: str | bool) -> str:
    """Return the cursor of a page whose last row has the time ``at`` and the unique ``key``."""
    text = json.dumps([(at - _EPOCH) // _MICROSECOND, *key], separators=(",", ":"))
    return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")


def read_cursor(cursor: str, *types: type[str] | type[bool]) -> tuple[Any, ...]:
    """Return the time and the key, of these ``types``; raises ``InvalidCursor``.

    Texts are printable ASCII, which every database accepts.
    """
    try:
        raw = base64.b64decode(cursor + "=" * (-len(cursor) % 4), altchars=b"-_", validate=True)
        microseconds, *key = json.loads(raw)
        at = _EPOCH + microseconds * _MICROSECOND
    except (binascii.Error, ValueError, TypeError, OverflowError, RecursionError):
        raise InvalidCursor("this service did not issue the cursor") from None
    texts = [item for item in key if isinstance(item, str)]
    is_plain = all(text.isascii() and text.isprintable() for text in texts)
    if [type(item) for item in key] != list(types) or not is_plain:
        raise InvalidCursor("this service did not issue the cursor")
    return (at, *key)


def page_of(
    connection: Connection,
    query: Select[Any],
    sort_key: Sequence[ColumnElement[Any]],
    cursor: str | None,
    limit: int,
) -> tuple[Sequence[Row[Any]], str | None]:
    """Return at most ``limit`` rows after ``cursor``, and the cursor of the next page or None.

    ``sort_key`` are columns of ``query``, a time first; rows are sorted in descending order. Raises
    ``InvalidCursor``.
    """
    if cursor is not None:
        types = [column.type for column in sort_key]
        after = read_cursor(cursor, *(type_.python_type for type_ in types[1:]))
        query = query.where(tuple_(*sort_key) < tuple_(*after, types=types))
    ordered = query.order_by(*(column.desc() for column in sort_key)).limit(limit + 1)
    rows = connection.execute(ordered).all()
    if len(rows) <= limit:
        return rows, None
    last = rows[limit - 1]._mapping
    return rows[:limit], cursor_at(*(last[column] for column in sort_key))


@contextmanager
def snapshot(engine: Engine) -> Iterator[Connection]:
    """Open a connection whose queries all see one state of the database."""
    if engine.dialect.name == "postgresql":  # SQLite transactions always do
        engine = engine.execution_options(isolation_level="REPEATABLE READ")
    with engine.connect() as connection:
        yield connection
