"""The sequencer: appends pending entries to the Merkle tree and signs checkpoints.

A thread of the service looks for pending entries four times a second and sequences them in batches,
so a signed checkpoint follows every entry within about a second. Any number of processes may run a
sequencer; a lock lets one of them work at a time.

A batch reads the last checkpoint and its tree, appends the pending entries in the order of their
ids, signs the new root and commits. A killed process leaves the log as before or after the batch;
the other entries stay pending. The lock is PostgreSQL's advisory lock, or SQLite's write lock. If
it failed, the primary key of the leaves would still let only one of two batches commit.

A checkpoint is signed only for a tree that extends the last one: the stored tree must hash to the
last signed root, and must extend the newest checkpoint that this process saw, which detects that
the database was rolled back.

An inconsistent log is not signed. The service logs the problem at once and then every minute, and
``/readyz`` reports it until it is repaired. Entries stay pending meanwhile.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import Connection, Engine, delete, insert, select, text
from sqlalchemy.exc import SQLAlchemyError

from affidavit.plan import Reason
from affidavit.service.core.database import reader, writer
from affidavit.service.core.errors import LogDamaged
from affidavit.service.log.signing_keys import insert_signing_key
from affidavit.service.log.stored_tree import (
    StoredCheckpoint,
    last_checkpoint,
    read_frontier,
    require_superset,
)
from affidavit.service.tables.log import (
    log_checkpoints,
    log_entries,
    log_leaves,
    log_nodes,
    log_pending,
)
from affidavit.trust import KeyFailure, SigningPort
from affidavit.trust.log import (
    BadNote,
    Checkpoint,
    leaf_content,
    merkle_tree,
    read_checkpoint,
    sign_checkpoint,
)

MAX_BATCH_ENTRIES = 2048
"""Entries sequenced in one transaction, which blocks other writers of SQLite."""
SEQUENCER_LOCK = 0x0AFF_1DA8
"""The number of the advisory lock on a PostgreSQL server."""
PERIOD_SECONDS = 0.25
REPEAT_SECONDS = 60.0
"""Time after which a persistent problem is logged again."""
STOP_SECONDS = 10.0

log = logging.getLogger("affidavit.service.log")


# ---- One batch, in one transaction -----------------------------------------------------


@dataclass(frozen=True, slots=True)
class Batch:
    """The result of a batch: the newest checkpoint, and whether more entries may be pending."""

    checkpoint: StoredCheckpoint | None
    signed: bool
    more: bool


def has_work(
    connection: Connection, key: SigningPort, seen: Checkpoint | None, now: datetime
) -> bool:
    """Return whether entries are pending or the last checkpoint is new or needs another key."""
    if connection.execute(select(log_pending.c.entry_id).limit(1)).first() is not None:
        return True
    last = last_checkpoint(connection)
    if last is None:
        return seen is not None
    return last.checkpoint != seen or _needs_new_key(last, key, now)


def sequence(
    connection: Connection,
    key: Callable[[], SigningPort],
    origin: Callable[[Checkpoint | None], str],
    *,
    now: datetime,
    seen: Checkpoint | None = None,
    limit: int = MAX_BATCH_ENTRIES,
) -> Batch | None:
    """Sequence at most ``limit`` pending entries in the transaction of ``connection``.

    Returns None while another process works. Raises ``LogDamaged``.
    """
    if not _lock(connection):
        return None
    last = last_checkpoint(connection)
    checkpoint = None if last is None else last.checkpoint
    if seen is not None:
        require_superset(connection, seen, checkpoint)
    tree = read_frontier(connection, checkpoint)
    log_origin = origin(checkpoint)
    entries = connection.execute(
        select(log_pending.c.entry_id, log_entries.c.content, log_entries.c.salt)
        .join(log_entries)
        .order_by(log_pending.c.entry_id)
        .limit(limit)
    ).all()
    signer = key()
    if not entries and (last is None or not _needs_new_key(last, signer, now)):
        return Batch(last, signed=False, more=False)
    if entries:
        leaves = [
            (row.entry_id, merkle_tree.leaf_hash(leaf_content(row.content, row.salt)))
            for row in entries
        ]
        _append(connection, tree, leaves)
    signed = _sign(connection, tree, signer, log_origin, now)
    return Batch(signed, signed=True, more=len(entries) == limit)


def _lock(connection: Connection) -> bool:
    if connection.dialect.name != "postgresql":
        return True  # the transaction began by taking the write lock
    locked = connection.execute(
        text("SELECT pg_try_advisory_xact_lock(:lock)"), {"lock": SEQUENCER_LOCK}
    )
    return bool(locked.scalar_one())


def _needs_new_key(last: StoredCheckpoint, key: SigningPort, now: datetime) -> bool:
    """Return whether ``key`` must re-sign the last checkpoint, whose key is no longer valid."""
    if key.public.development or key.key_id == last.key.key_id:
        return False
    return last.key.development or not last.key.covers(now)


def _append(
    connection: Connection, tree: merkle_tree.Frontier, entries: Sequence[tuple[int, bytes]]
) -> None:
    leaves: list[dict[str, Any]] = []
    nodes: list[dict[str, Any]] = []
    for entry_id, leaf in entries:
        leaves.append({"leaf_index": tree.size, "entry_id": entry_id, "leaf_hash": leaf})
        nodes.extend(
            {"level": place.level, "position": place.position, "hash": node}
            for place, node in tree.append(leaf)[1:]
        )
    connection.execute(insert(log_leaves), leaves)
    if nodes:
        connection.execute(insert(log_nodes), nodes)
    # Only these ids: a row with a smaller id may have been committed meanwhile.
    sequenced = [entry_id for entry_id, _ in entries]
    deleted = connection.execute(delete(log_pending).where(log_pending.c.entry_id.in_(sequenced)))
    if deleted.rowcount != len(sequenced):
        raise LogDamaged("pending entries disappeared while they were sequenced")


def _sign(
    connection: Connection, tree: merkle_tree.Frontier, key: SigningPort, origin: str, now: datetime
) -> StoredCheckpoint:
    note = sign_checkpoint(key, origin=origin, size=tree.size, root_hash=tree.root(), at=now)
    insert_signing_key(connection, key.public.as_record(), now)
    connection.execute(
        insert(log_checkpoints).values(
            tree_size=tree.size, key_id=key.key_id, signed_at=now, note=note
        )
    )
    return StoredCheckpoint(note, read_checkpoint(note), key.public)


# ---- The thread ------------------------------------------------------------------------


class OriginMismatch(LogDamaged):
    """The setting names another log than the one in the database."""


class Sequencer:
    """The sequencer of one process.

    ``origin`` names the log; without it a new log gets a random name. ``published`` returns the
    checkpoints stored outside the database.
    """

    def __init__(
        self,
        engine: Engine,
        key: Callable[[], SigningPort],
        *,
        origin: str | None = None,
        published: Callable[[], Sequence[Checkpoint]] = tuple,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._reader = reader(engine)
        self._writer = writer(engine)
        self._key = key
        self._origin = origin
        self._published = published
        self._now = now
        self._published_checked = False
        self._newest: StoredCheckpoint | None = None
        self._damage: str | None = None
        self._damage_logged_at = 0.0
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def problem(self) -> Reason | None:
        """The reason why the log cannot be signed, if any."""
        damage = self._damage  # read once: the thread may reset it
        if damage is None:
            return None
        return Reason(
            code="log_damaged",
            message=f"{damage}.",
            remedy="The log is not signed until it is repaired; run: affidavit audit verify",
        )

    def start(self) -> None:
        """Start the thread."""
        self._thread = threading.Thread(target=self._run, name="sequencer", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Sequence at most one more batch of pending entries, then stop."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join(STOP_SECONDS)
            self._thread = None

    def newest(self) -> StoredCheckpoint | None:
        """Return the newest checkpoint that this process signed or saw."""
        return self._newest

    def step(self) -> bool:
        """Sequence at most one batch; return whether more entries may be pending."""
        seen = None if self._newest is None else self._newest.checkpoint
        key, now = self._key(), self._now()
        with self._reader.connect() as connection:
            self._check_published(connection)
            if not has_work(connection, key, seen, now):
                return False
        with self._writer.begin() as connection:
            batch = sequence(connection, self._key, self._origin_after, now=now, seen=seen)
        if batch is None:
            return False
        self._newest = batch.checkpoint or self._newest
        return batch.more

    def _check_published(self, connection: Connection) -> None:
        """Check once, before signing, that the log extends the published checkpoints."""
        if self._published_checked:
            return
        checkpoints = self._published()
        last = last_checkpoint(connection) if checkpoints else None
        for checkpoint in checkpoints:
            require_superset(connection, checkpoint, None if last is None else last.checkpoint)
        self._published_checked = True

    def _run(self) -> None:
        last = False
        while not last:
            # Entries that were appended before the stop are still sequenced.
            last = self._stopped.wait(PERIOD_SECONDS)
            more = True
            while more:
                more = self.try_step()

    def try_step(self) -> bool:
        """Do what ``step`` does, and log its errors."""
        try:
            more = self.step()
        except LogDamaged as damage:
            self._report(str(damage))
            return False
        except SQLAlchemyError as error:
            log.warning(
                "the sequencer cannot use the database and retries: %s", str(error).splitlines()[0]
            )
            return False
        except (KeyFailure, BadNote) as failure:
            log.error("the log cannot be signed: %s", failure)
            return False
        except Exception:
            # If the thread ended, only missing proofs would reveal it.
            log.exception("the sequencer failed unexpectedly and retries")
            return False
        self._damage = None
        return more and not self._stopped.is_set()

    def _report(self, text: str) -> None:
        now = time.monotonic()
        if self._damage == text and now < self._damage_logged_at + REPEAT_SECONDS:
            return
        self._damage, self._damage_logged_at = text, now
        log.critical("THE LOG IS DAMAGED: %s; it is not signed until it is repaired", text)

    def _origin_after(self, last: Checkpoint | None) -> str:
        """Return the origin of the last checkpoint, else the setting or a random name."""
        if last is None:
            return self._origin or f"affidavit.invalid/{secrets.token_hex(8)}"
        if self._origin not in (None, last.origin):
            raise OriginMismatch(
                f"AFFIDAVIT_LOG_ORIGIN is {self._origin}, but the log's origin is {last.origin}"
            )
        return last.origin
