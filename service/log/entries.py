"""Append entries to the log, in the same transaction as the change that they record.

An entry is committed or rolled back together with the change. The sequencer adds it to the Merkle
tree afterwards.

``log_entries``
    Every entry, with its canonical JSON and the salt that is hashed with it. Certificates and
    refusals have no salt (``trust.log.entry``), nor have entries of databases before revision 0027.
``log_pending``
    A queue of entries that are not sequenced yet, the only table here from which rows are deleted.
    An entry is added with its change, and deleted in the transaction that sequences it; the
    database refuses to delete it before. (Row ids would not do: a transaction that began earlier
    may commit later.)
``log_leaves``
    The entry and hash of each leaf, numbered from 0 without gaps.
``log_nodes``
    The hash of every perfect subtree of two or more leaves, by level and position, so that a proof
    needs about 2 log2 n keys.
``log_checkpoints``
    Every signed checkpoint.
``log_cosignatures``
    The signature lines of witnesses for checkpoints, by verifier key.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cache
from typing import Any, Literal

import sqlalchemy as sa
from sqlalchemy import Connection, bindparam, func, insert, select
from sqlalchemy.sql.dml import ReturningInsert

from affidavit.plan import load_json
from affidavit.service.tables.log import log_entries, log_leaves, log_pending
from affidavit.trust import read_envelope
from affidavit.trust.log import LogEntry, certificate_entry, new_salt

MAX_BUNDLE_BYTES = 64 * 1024 * 1024
"""The loader's limit, which the service's own bundles do not reach."""

PENDING_LEAF = 2**62
"""The leaf index assumed for a pending entry, after all leaves."""

EntryKind = Literal[
    "certificate",
    "refusal",
    "approval",
    "revocation",
    "policy",
    "waiver",
    "budget",
    "reservation",
    "commitment",
    "settlement",
    "release",
    "run",
    "record",
    "replay",
    "audit",
    "steps",
    "keyset",
    "token",
    "proposal",
    "grant",
]


def append(
    connection: Connection,
    kind: EntryKind,
    subject: str,
    body: Mapping[str, Any],
    *,
    actor: str,
    at: datetime,
) -> int:
    """Append an entry in the transaction of ``connection`` and return its row's id.

    ``body`` is JSON data without private values. The leaf is the hash of the canonical JSON (RFC
    8785) of kind, subject, actor, time, body and, for most kinds, a salt.
    """
    entry = LogEntry(kind=kind, subject=subject, actor=actor, at=at, body=body)
    return _append(connection, [entry])[0]


def insert_logged(
    connection: Connection,
    table: sa.Table,
    values: Mapping[str, Any],
    entry_of_row: Callable[[Any], LogEntry],
) -> sa.Row[Any]:
    """Insert a row and its log entry, which the audit compares; return the row."""
    row = connection.execute(_insert(table), values).one()
    _append(connection, [entry_of_row(row)])
    return row


@cache
def _insert(table: sa.Table) -> ReturningInsert[Any]:
    return insert(table).returning(table)


# Built once, because building a statement takes as long as running it.
_LOGGED = (
    select(log_entries.c.content, log_leaves.c.leaf_index)
    .join_from(log_entries, log_leaves, isouter=True)
    .outerjoin(log_pending, log_pending.c.entry_id == log_entries.c.id)
    .where(log_entries.c.subject == bindparam("about"))
    .where(func.coalesce(log_leaves.c.entry_id, log_pending.c.entry_id).is_not(None))
)


def logged(connection: Connection, subject: str) -> dict[str, int | None]:
    """Return the contents of the entries about ``subject``, each with its leaf index, if any.

    A person's decision is valid only with its entry. A row alone may have been inserted by anybody,
    and so may an entry that is neither in the tree, where monitors see it, nor pending.
    """
    return {row.content: row.leaf_index for row in connection.execute(_LOGGED, {"about": subject})}


def is_logged(connection: Connection, entry: LogEntry) -> bool:
    """Return whether ``entry`` is in the log or pending."""
    return entry.content.decode() in logged(connection, entry.subject)


def append_certificates(connection: Connection, bundles: Sequence[bytes]) -> list[int]:
    """Append the entries of certificates or refusals, which are computed from their bundles.

    The service has just written the bundles, so it does not parse them strictly.
    """
    return _append(connection, [_entry_of(json.loads(bundle), json.loads) for bundle in bundles])


def entry_of(bundle: bytes) -> LogEntry:
    """Compute the entry of the certificate in ``bundle``, as verifiers do."""
    return _entry_of(_load_strictly(bundle), _load_strictly)


def _load_strictly(raw: bytes) -> Any:
    return load_json(raw, MAX_BUNDLE_BYTES).data


def _entry_of(bundle: Any, read: Callable[[bytes], Any]) -> LogEntry:
    envelope = read_envelope(bundle["envelope"])
    return certificate_entry(envelope, read(envelope.payload))


_ENTRIES = insert(log_entries).returning(log_entries.c.id, sort_by_parameter_order=True)
_PENDING = insert(log_pending)


def _append(connection: Connection, entries: Sequence[LogEntry]) -> list[int]:
    rows = [
        {
            "kind": entry.kind,
            "subject": entry.subject,
            "at": entry.at,
            "content": entry.content.decode(),
            "salt": new_salt(entry.kind),
        }
        for entry in entries
    ]
    entry_ids = [int(entry_id) for entry_id in connection.execute(_ENTRIES, rows).scalars()]
    connection.execute(_PENDING, [{"entry_id": entry_id} for entry_id in entry_ids])
    return entry_ids
