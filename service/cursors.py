"""Cursors: the place where a page ended, opaque to whoever asks for the next one.

A place is the time of the page's last row and what tells rows of one time apart. Pages are cut
by place and not by count, so that what is added meanwhile neither repeats nor hides a row.

>>> cursor = cursor_at(datetime(2026, 11, 21, tzinfo=UTC), "a", True)
>>> read_cursor(cursor, str, bool)
(datetime.datetime(2026, 11, 21, 0, 0, tzinfo=datetime.timezone.utc), 'a', True)
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, Select, tuple_

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
