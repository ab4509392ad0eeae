"""Giving entries their places: one batch, in one transaction, by one process at a time.

A batch reads the last checkpoint and the tree below it, appends the waiting entries in
the order of their ids, signs the new root and commits. A process that is killed at any
point leaves the log as it was before the batch or as it is after it; the entries that
wait are kept until they have their places. What holds the others off is PostgreSQL's
advisory lock, or SQLite's write lock, which the transaction begins with; were both to
fail, the leaves' primary key would let only one of two batches in.

A checkpoint is signed only for a tree that grew from the last one: the stored tree has to
hash to the last signed root before a leaf is appended to it, and the caller names the
newest checkpoint that it saw itself, so that a database that was rolled back under a
running service is noticed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import Connection, delete, insert, select, text

from affidavit.certificate import SigningPort
from affidavit.certificate.log import (
    Checkpoint,
    Frontier,
    leaf_hash,
    read_checkpoint,
    sign_checkpoint,
)
from affidavit.service.log.stored_tree import (
    Kept,
    LogDamaged,
    frontier,
    last_checkpoint,
    require_superset,
)
from affidavit.service.log.tables import (
    log_checkpoints,
    log_entries,
    log_leaves,
    log_nodes,
    log_pending,
)
from affidavit.service.tables import signing_keys

BATCH = 2048
"""Entries a transaction gives places to: what SQLite's other writers may have to wait for."""
SEQUENCER_LOCK = 0x0AFF_1DA8
"""Names our advisory lock among all those of a PostgreSQL server."""


@dataclass(frozen=True, slots=True)
class Batch:
    """What a batch came to: the newest checkpoint, and whether more entries wait."""

    kept: Kept | None
    signed: bool
    more: bool


def has_work(connection: Connection, key: SigningPort, seen: Checkpoint | None) -> bool:
    """Whether an entry waits, or the last checkpoint is not ``seen`` or needs a better key."""
    if connection.execute(select(log_pending.c.entry_id).limit(1)).first() is not None:
        return True
    last = last_checkpoint(connection)
    if last is None:
        return seen is not None
    return last.checkpoint != seen or _outdated(last, key)


def sequence(
    connection: Connection,
    key: Callable[[], SigningPort],
    origin: Callable[[Checkpoint | None], str],
    *,
    seen: Checkpoint | None = None,
    limit: int = BATCH,
) -> Batch | None:
    """Take up at most ``limit`` waiting entries in the transaction of ``connection``.

    None when another process is at it. Raises ``LogDamaged``, and then nothing is changed.
    """
    if not _alone(connection):
        return None
    last = last_checkpoint(connection)
    checkpoint = None if last is None else last.checkpoint
    if seen is not None:
        require_superset(connection, seen, checkpoint)
    tree = frontier(connection, checkpoint)
    named = origin(checkpoint)
    entries = connection.execute(
        select(log_pending.c.entry_id, log_entries.c.content)
        .join(log_entries)
        .order_by(log_pending.c.entry_id)
        .limit(limit)
    ).all()
    signer = key()
    if not entries and (last is None or not _outdated(last, signer)):
        return Batch(last, signed=False, more=False)
    if entries:
        _grow(connection, tree, [(entry_id, content) for entry_id, content in entries])
    return Batch(_sign(connection, tree, signer, named), signed=True, more=len(entries) == limit)


def _alone(connection: Connection) -> bool:
    if connection.dialect.name != "postgresql":
        return True  # the transaction began by taking the write lock
    took = connection.execute(
        text("SELECT pg_try_advisory_xact_lock(:lock)"), {"lock": SEQUENCER_LOCK}
    )
    return bool(took.scalar_one())


def _outdated(last: Kept, key: SigningPort) -> bool:
    """Whether ``key`` should sign the last checkpoint anew because its own no longer counts."""
    if key.public.development or key.key_id == last.key.key_id:
        return False
    return last.key.development or not last.key.covers(datetime.now(UTC))


def _grow(connection: Connection, tree: Frontier, entries: Sequence[tuple[int, str]]) -> None:
    leaves: list[dict[str, Any]] = []
    nodes: list[dict[str, Any]] = []
    for entry_id, content in entries:
        value = leaf_hash(content.encode())
        leaves.append({"leaf_index": tree.size, "entry_id": entry_id, "leaf_hash": value})
        nodes.extend(
            {"level": place.level, "position": place.position, "hash": found}
            for place, found in tree.append(value)[1:]
        )
    connection.execute(insert(log_leaves), leaves)
    if nodes:
        connection.execute(insert(log_nodes), nodes)
    # Exactly these: a row with a smaller id may have been committed meanwhile.
    taken = [entry_id for entry_id, _ in entries]
    gone = connection.execute(delete(log_pending).where(log_pending.c.entry_id.in_(taken)))
    if gone.rowcount != len(taken):
        raise LogDamaged("entries that waited for their places went while they were given")


def _sign(connection: Connection, tree: Frontier, key: SigningPort, origin: str) -> Kept:
    now = datetime.now(UTC)
    note = sign_checkpoint(key, origin=origin, size=tree.size, root_hash=tree.root(), at=now)
    known = select(signing_keys.c.key_id).where(signing_keys.c.key_id == key.key_id)
    if connection.execute(known).first() is None:
        record = json.dumps(key.public.as_record(), sort_keys=True)
        connection.execute(
            insert(signing_keys).values(key_id=key.key_id, record=record, first_used_at=now)
        )
    connection.execute(
        insert(log_checkpoints).values(
            tree_size=tree.size, key_id=key.key_id, signed_at=now, note=note
        )
    )
    return Kept(note, read_checkpoint(note), key.public)
