"""One engine, set up so that what was answered is what was kept.

SQLite is given the settings that its defaults lack:

- ``journal_mode=WAL``: readers never wait for the writer, and a killed process leaves a
  file that opens at the last commit.
- ``synchronous=FULL``: a certificate that was answered with 201 survives a power cut.
  ``NORMAL`` would save one flush a commit and could lose the last answers.
- ``busy_timeout``: a second process waits for its turn instead of failing.
- ``foreign_keys``: off by default in SQLite.
- ``recursive_triggers``: without it ``INSERT OR REPLACE`` deletes a row without asking
  the trigger that refuses deletions.

PostgreSQL plans as for a disk that seeks, unless it is told otherwise: it then reads through a
table of certificates rather than fetch two thousand of them by their keys, which is slower. And it
plans what is asked often for any values: of leases that ran out by any time it expects to meet one
soon, and reads through all of them while there is none. Here each plan is for the values asked.

Errors do not repeat the parameters of a statement, which hold plans, so that none gets
into a log.

Statements, waiting for a lock and pausing in a transaction are bounded on PostgreSQL
(``TIMEOUTS``), whatever the server's own settings are.

A connection to PostgreSQL that the server closed is noticed before it is used: a server that goes
says so, which is looked for without asking it anything. What only reads needs no transaction
there (``reader``): each statement would see what is committed at its time in any case.

Transactions are begun by us, not by the driver, which would begin one only at the first
write: a transaction that reads and then writes could then fail instead of waiting. A
writing connection (``writer``) takes the write lock at once with ``BEGIN IMMEDIATE``.

``any_of`` is a condition that a few ids fulfil. PostgreSQL joins ``id IN (SELECT ...)`` as it
thinks best, and for a thousand of a hundred thousand rows thinks it best to read the whole table.
Of an array it expects few elements, and looks each up by the index.

>>> from sqlalchemy import column, select
>>> print(any_of(column("id"), select(column("other"))))
id IN (SELECT other)

Reference: PostgreSQL, Row and Array Comparisons, ``expression = ANY (array expression)``.
"""

from __future__ import annotations

import base64
import binascii
import json
import select
import sqlite3
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from threading import Lock
from typing import Any, Concatenate, ParamSpec, TypeVar

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
from sqlalchemy.exc import DisconnectionError, IntegrityError
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import FunctionElement

from affidavit.service import teams

P = ParamSpec("P")
T = TypeVar("T")

BUSY_MILLISECONDS = 10_000
_HELD = "affidavit_turn"
CONNECT_SECONDS = 5
CONNECTIONS = 5
"""That a process has to PostgreSQL at most, beside one ``aside``; each is opened when first needed.

More would do no more at once, because one interpreter computes for all of them: threads that wait
for a connection leave it to those that have one, and it is handed back and forth less often.
"""
RANDOM_PAGE_COST = 1.1
"""Of reading a page anywhere, in times of the page that follows: as for solid-state disks."""
TIMEOUTS = {
    "statement_timeout": 60,
    "lock_timeout": 10,
    "idle_in_transaction_session_timeout": 15,
}
"""Seconds, on each connection to PostgreSQL. A process that stops in the middle of a transaction,
or whose machine is gone, holds what it locked no longer than that; who waits gets 503 before."""
READ_ONLY = "25006"
"""What PostgreSQL says of a write to a server that takes none (``read_only_sql_transaction``)."""
PRAGMAS = (
    f"busy_timeout={BUSY_MILLISECONDS}",
    "journal_mode=WAL",
    "synchronous=FULL",
    "foreign_keys=ON",
    "recursive_triggers=ON",
)


def open_engine(url: str, *, bounded: bool = True, aside: bool = False) -> Engine:
    """An engine for ``url`` as ``settings.database_url`` returns it; opens nothing yet.

    ``bounded`` sets ``TIMEOUTS``; an operator's command may take longer. One ``aside`` has a
    connection of its own, for what is read in the middle of another's transaction: the connections
    of that one may all wait for what the transaction has locked.
    """
    if make_url(url).get_backend_name() == "sqlite":
        engine = create_engine(url, hide_parameters=True)
        event.listen(engine, "connect", _prepare_sqlite)
        turn = _Turn()
        event.listen(engine, "begin", turn.begin)
        event.listen(engine, "checkin", turn.end)
        teams.confine(engine)
        return engine
    # All connections are kept: to open one costs more than most of what is asked of it.
    engine = create_engine(
        url,
        pool_size=1 if aside else CONNECTIONS,
        max_overflow=0,
        connect_args={"connect_timeout": CONNECT_SECONDS},
        hide_parameters=True,
    )
    event.listen(engine, "connect", _prepare_postgresql)
    if bounded:
        event.listen(engine, "connect", _set_timeouts)
    event.listen(engine, "checkout", _require_open(engine.dialect))
    event.listen(engine, "handle_error", _leave_a_standby)
    teams.confine(engine)
    return engine


def reader(engine: Engine) -> Engine:
    """``engine`` for what only reads; shares its connections.

    On SQLite all that one connection reads is of one moment, as it is with ``engine``.
    """
    if engine.dialect.name == "sqlite":
        return engine
    return engine.execution_options(isolation_level="AUTOCOMMIT")


def writer(engine: Engine) -> Engine:
    """``engine`` for transactions that write; shares its connections."""
    return engine.execution_options(affidavit_writes=True)


class Store:
    """What is stored behind one engine; safe to use from several threads and processes."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._reader, self._writer = engine, reader(engine), writer(engine)

    def read(
        self, query: Callable[Concatenate[Connection, P], T], *values: P.args, **named: P.kwargs
    ) -> T:
        """The result of ``query`` on a connection of its own."""
        with self._reader.connect() as connection:
            return query(connection, *values, **named)

    def writing(self) -> AbstractContextManager[Connection]:
        """A transaction that writes."""
        return self._writer.begin()


def write(engine: Engine, work: Callable[[Connection], T]) -> T:
    """``work`` in one transaction; once more, if another one stored the same row first."""
    try:
        with writer(engine).begin() as connection:
            return work(connection)
    except IntegrityError:
        with writer(engine).begin() as connection:
            return work(connection)


_HOLD = text("SELECT pg_advisory_xact_lock(hashtextextended(:name, 0))")
_SHARE = text("SELECT pg_advisory_xact_lock_shared(hashtextextended(:name, 0))")


def hold(connection: Connection, name: str, *, shared: bool = False) -> None:
    """Let no other transaction hold ``name`` until ours ends, or where ``shared`` only share it.

    SQLite has one writer at a time. Of two names with one hash, one waits in vain.
    """
    if connection.dialect.name == "postgresql":
        connection.execute(_SHARE if shared else _HOLD, {"name": name})


def is_missing_file(url: URL) -> bool:
    """Whether ``url`` is an SQLite file that is not there; opening it would make it."""
    if url.get_backend_name() != "sqlite" or not url.database:
        return False
    return not Path(url.database).exists()


def make_room(url: str) -> None:
    """Make an SQLite file and its directory, for their owner alone: it will hold plans.

    SQLite gives the files beside it the same mode. One that exists is closed to others.
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
    """Set ``pragma``; SQLite itself does not wait while two connections begin to write ahead."""
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
    # Said in a transaction that is undone it would be undone too.
    connection.autocommit = True
    connection.execute(f"SET random_page_cost = {RANDOM_PAGE_COST}")
    connection.execute("SET plan_cache_mode = force_custom_plan")
    connection.autocommit = False


def _set_timeouts(connection: Any, _record: Any) -> None:
    connection.autocommit = True
    for name, seconds in TIMEOUTS.items():
        connection.execute(f"SET {name} = '{seconds}s'")
    connection.autocommit = False


def _require_open(dialect: Dialect) -> Callable[[Any, Any, Any], None]:
    """A check that makes the pool reopen a connection that the server closed.

    A server sends nothing to an idle client except that it closes; so only a connection that has
    something to be read is asked for an answer.
    """

    def check(connection: Any, _record: Any, _proxy: Any) -> None:
        poll = select.poll()
        poll.register(connection.fileno(), select.POLLIN)
        if not poll.poll(0):
            return
        try:
            dialect.do_ping(connection)
        except dialect.loaded_dbapi.Error as error:
            raise DisconnectionError(str(error)) from None

    return check


def _leave_a_standby(context: Any) -> None:
    """Reopen all connections once the server no longer accepts writes.

    It became a standby, whose connections live on; the name in the URL leads to the new primary.
    """
    if getattr(context.original_exception, "sqlstate", None) == READ_ONLY:
        context.is_disconnect = True


class _Turn:
    """Whose turn it is to write to an SQLite file, among the threads of this process.

    SQLite lets those who wait sleep ever longer and then takes whoever wakes first; a
    thread that waits here goes on the moment the one before it is done.
    """

    def __init__(self) -> None:
        self._lock = Lock()

    def begin(self, connection: Connection) -> None:
        """Begin a transaction; one that writes waits for its turn."""
        if not connection.get_execution_options().get("affidavit_writes", False):
            connection.exec_driver_sql("BEGIN")
            return
        record = connection.connection.record_info
        # After so long SQLite itself says that the file is locked.
        waits = BUSY_MILLISECONDS / 1000
        if record is not None and _HELD not in record and self._lock.acquire(timeout=waits):
            record[_HELD] = True
        connection.exec_driver_sql("BEGIN IMMEDIATE")

    def end(self, _connection: Any, record: Any) -> None:
        """A connection comes back, whatever became of its transaction."""
        if record.record_info.pop(_HELD, False):
            self._lock.release()


# ---- a condition on a few ids --------------------------------------------------------


class _AnyOf(FunctionElement[bool]):
    """The construct; its clauses are a column and a subquery."""

    type = Boolean()
    inherit_cache = True


def any_of(column: ColumnElement[Any], query: Select[Any]) -> ColumnElement[bool]:
    """Whether ``column`` is among what ``query`` selects."""
    return _AnyOf(column, query.scalar_subquery())


@compiles(_AnyOf)
def _in(element: _AnyOf, compiler: Any, **options: Any) -> str:
    column, result = (compiler.process(clause, **options) for clause in element.clauses)
    return f"{column} IN {result}"


@compiles(_AnyOf, "postgresql")
def _any(element: _AnyOf, compiler: Any, **options: Any) -> str:
    column, result = (compiler.process(clause, **options) for clause in element.clauses)
    return f"{column} = ANY (ARRAY{result})"


# ---- pages of a list -----------------------------------------------------------------

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)


class InvalidCursor(ValueError):
    """A cursor that this service did not issue."""


def cursor_at(moment: datetime, *rest: str | bool) -> str:
    """The cursor of a page whose last row is of ``moment``; ``rest`` tells it from its equals."""
    text = json.dumps([(moment - _EPOCH) // _MICROSECOND, *rest], separators=(",", ":"))
    return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")


def read_cursor(cursor: str, *kinds: type[str] | type[bool]) -> tuple[Any, ...]:
    """The time and the rest, of these ``kinds``; raises ``InvalidCursor``.

    Texts are printable ASCII, which every database takes.
    """
    try:
        raw = base64.b64decode(cursor + "=" * (-len(cursor) % 4), altchars=b"-_", validate=True)
        microseconds, *rest = json.loads(raw)
        moment = _EPOCH + microseconds * _MICROSECOND
    except (binascii.Error, ValueError, TypeError, OverflowError, RecursionError):
        raise InvalidCursor("this service did not issue the cursor") from None
    known = [type(item) for item in rest] == list(kinds)
    plain = all(entry.isascii() and entry.isprintable() for entry in rest if isinstance(entry, str))
    if not known or not plain:
        raise InvalidCursor("this service did not issue the cursor")
    return (moment, *rest)


def page_of(
    connection: Connection,
    query: Select[Any],
    place: Sequence[ColumnElement[Any]],
    cursor: str | None,
    limit: int,
) -> tuple[Sequence[Row[Any]], str | None]:
    """At most ``limit`` rows after ``cursor``, and the cursor of the next page, if there is one.

    ``place`` are columns of ``query``, a time first, by which the newest row comes first. Raises
    ``InvalidCursor``.
    """
    if cursor is not None:
        types = [column.type for column in place]
        after = read_cursor(cursor, *(kind.python_type for kind in types[1:]))
        query = query.where(tuple_(*place) < tuple_(*after, types=types))
    ordered = query.order_by(*(column.desc() for column in place)).limit(limit + 1)
    rows = connection.execute(ordered).all()
    if len(rows) <= limit:
        return rows, None
    last = rows[limit - 1]._mapping
    return rows[:limit], cursor_at(*(last[column] for column in place))
