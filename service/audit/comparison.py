"""Compare rows with their log entries, once for an audit or again and again in a running service.

A row and its entry are written in one transaction. So in one snapshot of the database every entry
that is in the tree or pending has exactly one row, whatever is being written meanwhile. Entries in
neither place were not written by the service, and count for nothing.

A comparison reads from the log only what was added since the last one, and keeps what it read: an
entry that is gone later is still known. Entries are taken up by their place in the tree, because
ids do not become visible in order; those that are pending are read each time.

Tables that people's decisions fill are read whole. If neither their rows nor their entries changed,
the last result stands; otherwise rows that are new or changed are encoded and compared. Of tables
that grow with requests, the rows about the newest subjects are compared each time, because a table
that was put back lacks them, and those about a few others in turn, so that all are reached in time.
All rows are counted when a process starts. What a row says is also compared where it is used. Thus
the cost of a comparison does not grow with certificates, runs and entries; it grows with the number
of decisions, by about 5 ms for each thousand.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from datetime import datetime
from hashlib import sha256
from itertools import chain
from typing import Any

from sqlalchemy import Connection, Row, func, select

from affidavit.service.audit.entry_types import ENTRY_TYPES
from affidavit.service.certificates.integrity import UNREADABLE
from affidavit.service.core.errors import LogDamaged
from affidavit.service.log.entry_type import EntryType, is_as_logged
from affidavit.service.tables.keys import keysets, revoked_keys
from affidavit.service.tables.log import log_entries, log_leaves, log_pending
from affidavit.trust import KeysetError, SignedKeyset, check_keyset, read_keyset
from affidavit.trust.log import (
    leaf_content,
    merkle_tree,
)

ROWS_PER_CHUNK = 1000


@dataclass(frozen=True, slots=True)
class AuditFinding:
    """One inconsistency, in a table's row; ``code`` is stable (docs/reference/log.md)."""

    code: str
    where: str
    message: str

    def as_document(self) -> dict[str, Any]:
        """The finding as JSON data."""
        return asdict(self)


class EntryIndex:
    """The log's entries by the table of their row and by content; each is the entry of one row."""

    def __init__(self) -> None:
        self._ids: dict[str, dict[bytes, list[int]]] = {
            entry_type.table.name: {} for entry_type in ENTRY_TYPES
        }

    def add(self, entry_id: int, content: str) -> None:
        """Add an entry; raises ``UNREADABLE``. Entries are added in their order."""
        entry = json.loads(content)
        for entry_type in ENTRY_TYPES:
            comparable = entry_type.of_entry(entry)
            if comparable is not None:
                ids = self._ids[entry_type.table.name]
                ids.setdefault(sha256(comparable).digest(), []).append(entry_id)

    def of(self, entry_type: EntryType) -> dict[bytes, list[int]]:
        """Return the ids of the entries of a table, by the digest of their content."""
        return self._ids[entry_type.table.name]


Encoded = dict[Row[Any], bytes]
"""Rows of a table, each with the digest of the content that its entry must have."""


def compare_table(
    connection: Connection,
    entry_type: EntryType,
    entries: EntryIndex,
    pending: EntryIndex | None = None,
    encoded: Encoded | None = None,
) -> Iterator[AuditFinding]:
    """Yield the rows of a table without an entry, and the entries without a row.

    ``encoded`` has the rows that an earlier comparison read, and is updated.
    """
    added = {} if pending is None else pending.of(entry_type)
    earlier: Encoded = {} if encoded is None else dict(encoded)
    if encoded is not None:
        encoded.clear()
    taken: Counter[bytes] = Counter()
    last: dict[str, int] = {}
    disordered: set[str] = set()
    for row in connection.execute(entry_type.query.execution_options(yield_per=ROWS_PER_CHUNK)):
        where = entry_type.where(row)
        try:
            key = earlier.get(row) or sha256(entry_type.of_row(row)).digest()
        except UNREADABLE as error:
            yield AuditFinding("row_changed", where, f"it cannot be read: {error}.")
            continue
        if encoded is not None:
            encoded[row] = key
        ids = [*entries.of(entry_type).get(key, ()), *added.get(key, ())]
        if taken[key] == len(ids):
            yield AuditFinding("row_without_entry", where, "no log entry matches it.")
            continue
        entry_id = ids[taken[key]]
        taken[key] += 1
        if entry_type.ordered_by is not None:
            subject = getattr(row, entry_type.ordered_by)
            if entry_id < last.get(subject, 0):
                disordered.add(subject)
            last[subject] = entry_id
    for subject in sorted(disordered):
        message = "they are not in the order of their log entries."
        yield AuditFinding("row_changed", f"{entry_type.table.name} of {subject}", message)
    for source in (entries.of(entry_type), added):
        for key, ids in source.items():
            for entry_id in ids[taken[key] :]:
                message = f"no row of {entry_type.table.name} matches it."
                yield AuditFinding("entry_without_row", f"log_entries {entry_id}", message)
            taken[key] -= min(taken[key], len(ids))


def compare_keysets(connection: Connection) -> Iterator[AuditFinding]:
    """Compare keysets with their root signatures, and with the keys that they revoke."""
    revoked: defaultdict[int, dict[str, datetime]] = defaultdict(dict)
    for row in connection.execute(select(revoked_keys)):
        revoked[row.version][row.key_id] = row.since
    last: SignedKeyset | None = None
    for row in connection.execute(select(keysets).order_by(keysets.c.version)):
        where = f"keysets {row.version}"
        try:
            signed = read_keyset(bytes(row.document))
            check_keyset(signed, last)
        except KeysetError as error:
            yield AuditFinding("row_changed", where, f"it is not valid: {error.message}")
            continue
        if (signed.keyset.version, signed.digest) != (row.version, row.digest):
            yield AuditFinding("row_changed", where, "its document is that of another version.")
        if signed.keyset.revoked_since() != revoked[row.version]:
            message = "it revokes other keys than revoked_keys lists."
            yield AuditFinding("row_changed", where, message)
        last = signed


# ---- in a running service ------------------------------------------------------------

MAX_SUBJECTS = 16
"""Entries whose subjects' rows in a growing table are compared each time: of the newest entries,
and of those whose turn it is."""

_COMPARED = tuple(entry_type for entry_type in ENTRY_TYPES if not entry_type.grows)
_GROWING = tuple(entry_type for entry_type in ENTRY_TYPES if entry_type.grows)
_KINDS = frozenset(kind for entry_type in _COMPARED for kind in entry_type.kinds)

_ENTRY = (log_entries.c.id, log_entries.c.kind, log_entries.c.content, log_entries.c.salt)
_PENDING = (
    select(*_ENTRY)
    .join_from(log_entries, log_pending)
    .where(log_entries.c.kind.in_(_KINDS))
    .order_by(log_entries.c.id)
)
_SIZE = select(func.coalesce(func.max(log_leaves.c.leaf_index) + 1, 0))


@dataclass(slots=True)
class _Compared:
    """The last comparison of a table: its rows and entries, and the first finding."""

    state: tuple[Any, ...] | None = None
    encoded: Encoded = field(default_factory=dict)
    finding: AuditFinding | None = None


class LogComparison:
    """What one process knows of the log, to compare the tables with it; used by one at a time."""

    def __init__(self) -> None:
        self._size = 0
        self._entries = EntryIndex()
        self._compared: defaultdict[str, _Compared] = defaultdict(_Compared)
        self._counted: set[str] = set()
        self._passed: defaultdict[str, int] = defaultdict(int)

    def contradictions(self, connection: Connection) -> dict[str, AuditFinding]:
        """Return the first finding in each table that contradicts the log, by the table's name.

        ``connection`` reads from one snapshot. Raises ``LogDamaged`` if an entry cannot be read or
        is not the one of its leaf.
        """
        self._read_leaves(connection)
        pending = EntryIndex()
        for row in connection.execute(_PENDING):
            _add(pending, row)
        first = {
            entry_type.table.name: self._compare(connection, entry_type, pending)
            for entry_type in _COMPARED
        }
        first[keysets.name] = first[keysets.name] or next(compare_keysets(connection), None)
        for entry_type in _GROWING:
            recent = _compare_recent(connection, entry_type)
            others = self._compare_others(connection, entry_type)
            counted = self._count(connection, entry_type)
            first[entry_type.table.name] = next(chain(recent, others, counted), None)
        return {table: finding for table, finding in first.items() if finding is not None}

    def _read_leaves(self, connection: Connection) -> None:
        """Take up the decisions that got their places since the last comparison."""
        size = connection.execute(_SIZE).scalar_one()
        query = (
            select(*_ENTRY, log_leaves.c.leaf_hash)
            .join_from(log_leaves, log_entries)
            .where(log_leaves.c.leaf_index.between(self._size, size - 1))
            .where(log_entries.c.kind.in_(_KINDS))
            .order_by(log_leaves.c.leaf_index)
        )
        rows = connection.execute(query).all()
        for row in rows:
            if merkle_tree.leaf_hash(leaf_content(row.content, row.salt)) != bytes(row.leaf_hash):
                raise LogDamaged(f"the log entry {row.id} is not the one of its leaf")
        for row in rows:
            _add(self._entries, row)
        self._size = max(self._size, size)

    def _compare(
        self, connection: Connection, entry_type: EntryType, pending: EntryIndex
    ) -> AuditFinding | None:
        table, last = entry_type.table, self._compared[entry_type.table.name]
        columns = ", ".join(column.name for column in table.primary_key)
        # Values as the driver returns them, which need no conversion to be compared.
        stored = connection.exec_driver_sql(f"SELECT * FROM {table.name} ORDER BY {columns}")
        known = [
            sorted(chain(*index.of(entry_type).values())) for index in (self._entries, pending)
        ]
        state = (stored.all(), known)
        if state != last.state:
            findings = compare_table(connection, entry_type, self._entries, pending, last.encoded)
            last.finding = next(iter([*findings]), None)  # all, so that each row is encoded
            last.state = state
        return last.finding

    def _compare_others(
        self, connection: Connection, entry_type: EntryType
    ) -> Iterator[AuditFinding]:
        """Compare the rows about the next subjects of a table; those that differ stay the next."""
        query = (
            select(log_entries.c.id, log_entries.c.subject)
            .where(log_entries.c.kind.in_(entry_type.kinds))
            .where(log_entries.c.id > self._passed[entry_type.table.name])
            .order_by(log_entries.c.id)
            .limit(MAX_SUBJECTS)
        )
        entries = connection.execute(query).all()
        yield from _compare_subjects(connection, entry_type, [entry.subject for entry in entries])
        self._passed[entry_type.table.name] = entries[-1].id if entries else 0

    def _count(self, connection: Connection, entry_type: EntryType) -> Iterator[AuditFinding]:
        """Count the rows and the entries of a table, until their numbers were once equal."""
        table = entry_type.table
        if table.name in self._counted:
            return
        of_table = log_entries.c.kind.in_(entry_type.kinds)
        logged = connection.execute(select(func.count()).where(of_table)).scalar_one()
        stored = connection.execute(select(func.count()).select_from(table)).scalar_one()
        if stored == logged:
            self._counted.add(table.name)
            return
        code = "entry_without_row" if stored < logged else "row_without_entry"
        message = f"it has {stored} rows, but the log has {logged} entries of them."
        yield AuditFinding(code, table.name, message)


def _add(entries: EntryIndex, row: Any) -> None:
    try:
        entries.add(row.id, row.content)
    except UNREADABLE:
        raise LogDamaged(f"the log entry {row.id} cannot be read") from None


def _compare_recent(connection: Connection, entry_type: EntryType) -> Iterator[AuditFinding]:
    """Compare the rows about the subjects of a table's newest entries."""
    newest = (
        select(log_entries.c.subject)
        .where(log_entries.c.kind.in_(entry_type.kinds))
        .order_by(log_entries.c.id.desc())
        .limit(MAX_SUBJECTS)
    )
    yield from _compare_subjects(connection, entry_type, connection.execute(newest).scalars())


def _compare_subjects(
    connection: Connection, entry_type: EntryType, subjects: Iterable[str]
) -> Iterator[AuditFinding]:
    """Compare the rows about subjects with all their entries."""
    for subject in dict.fromkeys(subjects):
        try:
            is_same = is_as_logged(connection, entry_type, subject)
        except UNREADABLE:
            is_same = False
        if not is_same:
            message = f"its rows about {subject} are not the logged ones."
            yield AuditFinding("row_changed", entry_type.table.name, message)
