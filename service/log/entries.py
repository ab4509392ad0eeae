"""Entries of the log, written with the business transaction that they tell of.

An entry is kept or lost together with what it tells of; it gets its place in the tree
afterwards, when the sequencer takes it up.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Literal

from sqlalchemy import Connection, insert

from affidavit.certificate.envelope import read_envelope
from affidavit.certificate.log.leaf import Entry, certificate_entry
from affidavit.plan.loading import load_json
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
    return _append(connection, Entry(kind=kind, subject=subject, actor=actor, at=at, body=body))


def append_certificate(connection: Connection, bundle: bytes) -> int:
    """Write the entry of a certificate or refusal, which follows from its bundle alone."""
    return _append(connection, entry_of(bundle))


def entry_of(bundle: bytes) -> Entry:
    """The entry of the certificate in ``bundle``, as any verifier comes to it."""
    envelope = read_envelope(load_json(bundle, MAX_BUNDLE_BYTES).data["envelope"])
    return certificate_entry(envelope, load_json(envelope.payload, MAX_BUNDLE_BYTES).data)


def _append(connection: Connection, entry: Entry) -> int:
    made = connection.execute(
        insert(log_entries)
        .values(
            kind=entry.kind,
            subject=entry.subject,
            at=entry.at,
            content=entry.content.decode(),
        )
        .returning(log_entries.c.id)
    )
    entry_id = int(made.scalar_one())
    connection.execute(insert(log_pending).values(entry_id=entry_id))
    return entry_id
