"""Entries of the log, written with the business transaction that they tell of.

An entry is kept or lost together with what it tells of; it gets its place in the tree
afterwards, when the sequencer takes it up.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, Literal

from sqlalchemy import Connection, insert

from affidavit.certificate import read_envelope
from affidavit.certificate.log import Entry, certificate_entry
from affidavit.plan import load_json
from affidavit.service.log.tables import log_entries, log_pending

MAX_BUNDLE_BYTES = 64 * 1024 * 1024
"""What is read here was written by this service; the limit is that of the loader."""

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
    "keyset",
    "token",
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
    """Write an entry in the transaction of ``connection``; returns its row's id.

    ``body`` is JSON data without private values; what is hashed into the tree is the
    canonical JSON (RFC 8785) of kind, subject, actor, time and body.
    """
    entry = Entry(kind=kind, subject=subject, actor=actor, at=at, body=body)
    return _append(connection, [entry])[0]


def append_certificates(connection: Connection, bundles: Sequence[bytes]) -> list[int]:
    """Write the entries of certificates or refusals, which follow from their bundles alone.

    The bundles are those that were written just now, so that they need not be read strictly.
    """
    return _append(connection, [_entry_of(json.loads(bundle), json.loads) for bundle in bundles])


def entry_of(bundle: bytes) -> Entry:
    """The entry of the certificate in ``bundle``, as any verifier comes to it."""
    return _entry_of(_strictly(bundle), _strictly)


def _strictly(raw: bytes) -> Any:
    return load_json(raw, MAX_BUNDLE_BYTES).data


def _entry_of(bundle: Any, read: Callable[[bytes], Any]) -> Entry:
    envelope = read_envelope(bundle["envelope"])
    return certificate_entry(envelope, read(envelope.payload))


_ENTRIES = insert(log_entries).returning(log_entries.c.id, sort_by_parameter_order=True)
_PENDING = insert(log_pending)


def _append(connection: Connection, entries: Sequence[Entry]) -> list[int]:
    rows = [
        {
            "kind": entry.kind,
            "subject": entry.subject,
            "at": entry.at,
            "content": entry.content.decode(),
        }
        for entry in entries
    ]
    made = [int(item) for item in connection.execute(_ENTRIES, rows).scalars()]
    connection.execute(_PENDING, [{"entry_id": element} for element in made])
    return made
