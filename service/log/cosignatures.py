"""Cosignatures of witnesses, and timestamps: kept beside their checkpoints, and served with them.

Two rules say which checkpoint is handed out:

- everybody gets the newest that witnesses cosigned, as long as it is not much older than the
  newest of all, or one with more cosignatures that is hardly older: verifiers and monitors that
  rely on witnesses can use no other;
- the bundle of a certificate whose key was revoked since gets the oldest with the most
  cosignatures of before the revocation, because only those say that it is not backdated.

A cosignature is stored only if it is valid; readers check it again.

Reference: C2SP, tlog-cosignature.md.
"""

from __future__ import annotations

import hashlib
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import Connection, case, func, insert, select
from sqlalchemy.exc import IntegrityError

from affidavit.certificate.log import WitnessKey, parse_note, timestamp_line
from affidavit.service.certificate_tables import signing_keys
from affidavit.service.clock import now_of
from affidavit.service.database import Store
from affidavit.service.keys import revoked_keys
from affidavit.service.log.entries import log_checkpoints, log_cosignatures
from affidavit.service.log.stored_tree import StoredCheckpoint, open_stored

PATIENCE = timedelta(minutes=10)
"""For how long the newest cosigned checkpoint stands for a newer one that nobody cosigned."""
COMPLETION = timedelta(seconds=30)
"""For how long one with more cosignatures stands for a newer one, which may get them yet."""
STAMPS = "timestamp+"
"""How what stands for the witness of a timestamp begins."""


class NotCosigned(Exception):
    """The witness's answer holds no valid cosignature of its key; the text says why."""


class Cosignatures(Store):
    """The cosignatures of checkpoints."""

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
        witness = f"{STAMPS}{hashlib.sha256(reply).hexdigest()}"
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


_STAMPED = log_cosignatures.c.witness.startswith(STAMPS)
_WITNESSES = func.sum(case((_STAMPED, 0), else_=1))
# However many timestamps there are, they say less than one more witness.
_STANDING = 2 * _WITNESSES + func.max(case((_STAMPED, 1), else_=0))
_ID = log_cosignatures.c.checkpoint_id
_NEWEST = (
    select(
        _ID.label("id"),
        func.max(log_checkpoints.c.signed_at).label("signed_at"),
        _STANDING.label("standing"),
    )
    .join_from(log_cosignatures, log_checkpoints)
    .group_by(_ID)
    .order_by(_ID.desc())
    .limit(100)
)


def published(connection: Connection, newest: StoredCheckpoint) -> StoredCheckpoint:
    """The checkpoint for everybody, with its cosignatures; ``newest`` where nobody cosigns."""
    signed_at = newest.checkpoint.signed_at
    complete = now_of(connection) - COMPLETION
    chosen: Any = None
    for row in connection.execute(_NEWEST).all():
        if signed_at is None or row.signed_at < signed_at - PATIENCE:
            break
        if chosen is None or row.standing > chosen.standing:
            chosen = row
        if row.standing > 1 and row.signed_at <= complete:
            break
    return newest if chosen is None else _with_lines(connection, chosen.id)


def from_before(
    connection: Connection, leaf_index: int, since: datetime
) -> StoredCheckpoint | None:
    """A checkpoint with that leaf that witnesses cosigned before ``since``; None if none is."""
    first = select(func.min(log_checkpoints.c.id)).where(log_checkpoints.c.tree_size > leaf_index)
    query = (
        select(_ID)
        .where(first.scalar_subquery() <= _ID, log_cosignatures.c.cosigned_at < since)
        .group_by(_ID)
        .order_by(_STANDING.desc(), _ID)
        .limit(1)
    )
    chosen = connection.execute(query).scalar()
    return None if chosen is None else _with_lines(connection, chosen)


def revoked_since(connection: Connection, key_id: str) -> datetime | None:
    """From when on a published keyset revokes the key."""
    query = select(func.min(revoked_keys.c.since)).where(revoked_keys.c.key_id == key_id)
    since: datetime | None = connection.execute(query).scalar_one()
    return since


def _with_lines(connection: Connection, checkpoint_id: int) -> StoredCheckpoint:
    query = select(log_checkpoints.c.note, signing_keys.c.record).join(signing_keys)
    row = connection.execute(query.where(log_checkpoints.c.id == checkpoint_id)).one()
    of_it = log_cosignatures.c.checkpoint_id == checkpoint_id
    lines = connection.execute(
        select(log_cosignatures.c.line).where(of_it).order_by(log_cosignatures.c.witness)
    ).scalars()
    return open_stored(row.note + "".join(lines), row.record)
