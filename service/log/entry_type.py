"""An entry type: a table, the kind of log entry that records its rows, and how to compare the two.

An entry type builds the entry that a row must have: kind, subject, actor, time, and the fields of
the body that the row has too. The same fields are taken from the logged entry. Both must be equal,
with times compared to the second.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import ColumnElement, Connection, Select, Table, select

from affidavit.plan import canonical_json
from affidavit.service.log.entries import logged
from affidavit.trust.log import LogEntry

Body = Mapping[str, Any]
Projection = Callable[[Body], Body | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class EntryType:
    """A table and the kinds of entries that record its rows.

    ``entry`` builds the entry that a row must have. ``comparable`` takes the same fields from a
    logged body, or returns None if the entry records another table's row. ``joined`` are columns of
    one other table that ``entry`` needs, then what follows from them. ``about`` returns the
    condition for the rows about a subject of entries, and ``ordered_by`` is the column among whose
    rows the newest applies. A table that ``grows`` with requests is not read whole by a running
    service.
    """

    table: Table
    kinds: tuple[str, ...]
    entry: Callable[[Any], LogEntry]
    comparable: Projection = dict
    joined: tuple[Any, ...] = ()
    about: Callable[[str], ColumnElement[bool]] | None = None
    ordered_by: str | None = None
    grows: bool = False

    @property
    def query(self) -> Select[Any]:
        """The query for all rows, with the joined columns."""
        query = select(*self.table.columns, *self.joined)
        if self.joined:
            query = query.outerjoin(self.joined[0].table)
        return query.order_by(*self.table.primary_key)

    def where(self, row: Any) -> str:
        """Return the name of a row."""
        keys = (str(getattr(row, column.name)) for column in self.table.primary_key)
        return f"{self.table.name} {', '.join(keys)}"

    def of_row(self, row: Any) -> bytes:
        """Return the canonical bytes of the entry that a row must have."""
        entry = self.entry(row)
        return _canonical(entry.kind, entry.subject, entry.actor, entry.at, entry.body)

    def of_entry(self, content: Mapping[str, Any]) -> bytes | None:
        """Return the canonical bytes of an entry, or None if it records another table's row."""
        body = self.comparable(content["body"]) if content["kind"] in self.kinds else None
        if body is None:
            return None
        at = datetime.fromisoformat(content["at"])
        return _canonical(content["kind"], content["subject"], content["actor"], at, body)


def is_as_logged(connection: Connection, entry_type: EntryType, subject: str) -> bool:
    """Return whether the rows about ``subject`` are exactly those that are logged or pending.

    Raises ``ValueError`` without a condition for them, and the errors of an unreadable row.
    """
    if entry_type.about is None:
        raise ValueError(f"rows of {entry_type.table.name} are not found by a subject")
    rows = connection.execute(entry_type.query.where(entry_type.about(subject)))
    entries = map(entry_type.of_entry, map(json.loads, logged(connection, subject)))
    return sorted(map(entry_type.of_row, rows)) == sorted(filter(None, entries))


def _canonical(kind: str, subject: str, actor: str, at: datetime, body: Body) -> bytes:
    second = at.astimezone(UTC).isoformat(timespec="seconds")
    return canonical_json([kind, subject, actor, second, dict(body)])


def fields(*names: str) -> Projection:
    """Select these fields of a body, with None for missing ones."""
    return lambda body: {name: body.get(name) for name in names}


def fields_where(field: str, value: str, projection: Projection = dict) -> Projection:
    """Apply ``projection`` to bodies whose ``field`` is ``value``; others give None."""
    return lambda body: projection(body) if body.get(field) == value else None
