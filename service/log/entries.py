"""Entries of the log, written with the business transaction that they tell of.

An entry is kept or lost together with what it tells of; it gets its place in the tree
afterwards, when the sequencer takes it up.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Literal

from sqlalchemy import Column, Connection, Index, String, Table, Text, insert

from affidavit.plan.canonical import canonical_json
from affidavit.service.tables import Sequence, UtcDateTime, metadata

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

log_entries = Table(
    "log_entries",
    metadata,
    Column("id", Sequence, primary_key=True),
    Column("kind", String(32), nullable=False),
    Column("subject", String(255), nullable=False),
    Column("at", UtcDateTime, nullable=False),
    Column("content", Text, nullable=False),
    Index("log_entries_by_subject", "subject"),
)


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
    content = canonical_json(
        {
            "kind": kind,
            "subject": subject,
            "actor": actor,
            "at": at.isoformat(timespec="microseconds"),
            "body": dict(body),
        }
    )
    made = connection.execute(
        insert(log_entries)
        .values(kind=kind, subject=subject, at=at, content=content.decode())
        .returning(log_entries.c.id)
    )
    return int(made.scalar_one())
