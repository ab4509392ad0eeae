"""Append entries to the log, in the same transaction as the change that they record.

An entry is committed or rolled back together with the change; the sequencer adds it to the
Merkle tree afterwards.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, Literal

from sqlalchemy import Connection, insert

from affidavit.certificate import read_envelope
from affidavit.certificate.log import LogEntry, certificate_entry
from affidavit.plan import load_json
from affidavit.service.log.log_tables import log_entries, log_pending

MAX_BUNDLE_BYTES = 64 * 1024 * 1024
"""The loader's limit; this service wrote what is read here."""

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
    """Append an entry in the transaction of ``connection``; returns its row's id.

    ``body`` is JSON data without private values; the leaf is the hash of the
    canonical JSON (RFC 8785) of kind, subject, actor, time and body.
    """
    entry = LogEntry(kind=kind, subject=subject, actor=actor, at=at, body=body)
    return _append(connection, [entry])[0]


def append_certificates(connection: Connection, bundles: Sequence[bytes]) -> list[int]:
    """Append the entries of certificates or refusals, which follow from their bundles alone.

    The bundles were just written by this service, so they are not parsed strictly.
    """
    return _append(connection, [_entry_of(json.loads(bundle), json.loads) for bundle in bundles])


def entry_of(bundle: bytes) -> LogEntry:
    """The entry of the certificate in ``bundle``, as any verifier computes it."""
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
        }
        for entry in entries
    ]
    entry_ids = [int(entry_id) for entry_id in connection.execute(_ENTRIES, rows).scalars()]
    connection.execute(_PENDING, [{"entry_id": entry_id} for entry_id in entry_ids])
    return entry_ids
