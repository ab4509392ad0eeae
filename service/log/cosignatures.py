"""Cosignatures of witnesses, and timestamps: kept beside their checkpoints, and served with them.

Two rules say which checkpoint is handed out:

- everybody gets the newest that witnesses cosigned, as long as it is not much older than the
  newest of all: verifiers and monitors that rely on witnesses can use no other;
- the bundle of a certificate whose key was revoked since gets the oldest with the most
  cosignatures of before the revocation, because only those say that it is not backdated.

A cosignature is stored only if it is valid; readers check it again.

Reference: C2SP, tlog-cosignature.md.
"""

from __future__ import annotations

import hashlib
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import Connection, Engine, Row, func, insert, select
from sqlalchemy.exc import IntegrityError

from affidavit.certificate.log import WitnessKey, parse_note, timestamp_line
from affidavit.service.clock import now_of
from affidavit.service.database import reader, writer
from affidavit.service.keys import revoked_keys
from affidavit.service.log.entries import log_checkpoints, log_cosignatures
from affidavit.service.log.stored_tree import StoredCheckpoint, open_stored
from affidavit.service.tables import signing_keys

PATIENCE = timedelta(minutes=10)
"""For how long the newest cosigned checkpoint stands for a newer one that nobody cosigned."""
COMPLETION = timedelta(seconds=30)
"""For how long one with more cosignatures stands for a newer one, which may get them yet."""
CANDIDATES = 100


class NotCosigned(Exception):
    """The witness's answer holds no valid cosignature of its key; the text says why."""


class Cosignatures:
    """The cosignatures behind one engine."""

    def __init__(self, engine: Engine) -> None:
        self._reader = reader(engine)
        self._writer = writer(engine)

    def keep(self, note: str, answer: str, witness: WitnessKey) -> None:
        """Store the earliest line of ``witness`` in ``answer`` under the checkpoint ``note``.

        Raises ``NotCosigned``, and ``BadNote`` for an answer or a cosignature that is none.
        """
        lines = [line for line in answer.splitlines() if line.startswith(f"— {witness.name} ")]
        signed = parse_note(note + "".join(f"{line}\n" for line in lines))
        at = witness.cosigned(signed)
        if at is None:
            raise NotCosigned(f"the answer has no cosignature of {witness.name}")
        own = (line for line in signed.signatures if line.key_hash == witness.key_hash)
        first = min(own, key=lambda line: line.signature)  # which begins with the time
        self._keep(note, str(witness), str(type(signed)("", (first,))).lstrip("\n"), at)

    def keep_timestamp(self, note: str, reply: bytes) -> None:
        """Store a time-stamping authority's reply for the checkpoint ``note``."""
        from rfc3161_client import decode_timestamp_response

        at = decode_timestamp_response(reply).tst_info.gen_time
        witness = f"timestamp+{hashlib.sha256(reply).hexdigest()}"
        self._keep(note, witness, timestamp_line(reply), at)

    def _keep(self, note: str, witness: str, line: str, at: datetime) -> None:
        with self._reader.connect() as connection:
            checkpoint_id = connection.execute(
                select(func.max(log_checkpoints.c.id)).where(log_checkpoints.c.note == note)
            ).scalar_one()
        row = {"checkpoint_id": checkpoint_id, "witness": witness, "line": line}
        try:
            with self._writer.begin() as connection:
                connection.execute(insert(log_cosignatures).values(**row, cosigned_at=at))
        except IntegrityError:
            return  # another replica had it cosigned too


_COUNT = func.count(log_cosignatures.c.witness)
_COSIGNED = (
    select(log_checkpoints.c.id, log_checkpoints.c.signed_at, _COUNT.label("cosigners"))
    .join(log_cosignatures)
    .group_by(log_checkpoints.c.id, log_checkpoints.c.signed_at)
)


def published(connection: Connection, newest: StoredCheckpoint) -> StoredCheckpoint:
    """The checkpoint for everybody, with its cosignatures; ``newest`` where nobody cosigns."""
    signed_at = newest.checkpoint.signed_at
    rows = connection.execute(_COSIGNED.order_by(log_checkpoints.c.id.desc()).limit(2)).all()
    if not rows or signed_at is None or rows[0].signed_at < signed_at - PATIENCE:
        return newest
    chosen = rows[0]
    if len(rows) > 1 and rows[1].cosigners > chosen.cosigners:
        complete = chosen.signed_at <= now_of(connection) - COMPLETION
        chosen = chosen if complete else rows[1]
    return _with_lines(connection, chosen)


def from_before(
    connection: Connection, leaf_index: int, since: datetime
) -> StoredCheckpoint | None:
    """A checkpoint with that leaf that witnesses cosigned before ``since``; None if none is."""
    first = (
        select(log_checkpoints.c.id)
        .join(log_cosignatures)
        .where(log_checkpoints.c.tree_size > leaf_index, log_cosignatures.c.cosigned_at < since)
        .distinct()
        .order_by(log_checkpoints.c.id)
        .limit(CANDIDATES)
    )
    query = (
        _COSIGNED.where(
            log_checkpoints.c.id.in_(first.scalar_subquery()),
            log_cosignatures.c.cosigned_at < since,
        )
        .order_by(_COUNT.desc(), log_checkpoints.c.id)
        .limit(1)
    )
    row = connection.execute(query).first()
    return None if row is None else _with_lines(connection, row)


def revoked_since(connection: Connection, key_id: str) -> datetime | None:
    """From when on a published keyset revokes the key."""
    query = select(func.min(revoked_keys.c.since)).where(revoked_keys.c.key_id == key_id)
    since: datetime | None = connection.execute(query).scalar_one()
    return since


def _with_lines(connection: Connection, chosen: Row[Any]) -> StoredCheckpoint:
    query = select(log_checkpoints.c.note, signing_keys.c.record).join(signing_keys)
    row = connection.execute(query.where(log_checkpoints.c.id == chosen.id)).one()
    of_it = log_cosignatures.c.checkpoint_id == chosen.id
    lines = connection.execute(
        select(log_cosignatures.c.line).where(of_it).order_by(log_cosignatures.c.witness)
    ).scalars()
    return open_stored(row.note + "".join(lines), row.record)
