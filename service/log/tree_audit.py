"""Verify the stored Merkle tree: rebuild it from the entries and compare every hash.

The tree is rebuilt leaf by leaf from the bytes of the entries. Each stored hash is compared
with the rebuilt one, and each checkpoint with the root of the tree at its size, including
checkpoints kept outside the database: those are the only ones that the owner of the
database, who can drop triggers and write any row, cannot have changed.

Rows are read in chunks, in one transaction with one snapshot of the database, and at most
one chunk is held in memory.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sqlalchemy import Connection, Row, func, select

from affidavit.certificate.log import Checkpoint, Frontier, Place, leaf_hash
from affidavit.service.log.log_tables import (
    log_checkpoints,
    log_entries,
    log_leaves,
    log_nodes,
    log_pending,
)
from affidavit.service.log.stored_tree import LogDamaged, open_stored
from affidavit.service.tables import signing_keys

CHUNK = 4096
EXTERNAL = "an external checkpoint"

Expected = dict[int, list[tuple[str, Checkpoint]]]
"""Checkpoints by tree size, each with the place where it is stored."""


@dataclass(frozen=True, slots=True)
class AuditFinding:
    """One inconsistency; ``code`` is stable, ``where`` names a table and a row.

    ========================  =========================================================
    ``leaf_missing``          the leaf numbers have a gap
    ``leaf_changed``          a leaf's hash is not the hash of its entry
    ``entry_missing``         a leaf's entry does not exist
    ``entry_changed``         an entry's columns contradict its hashed bytes
    ``entry_not_sequenced``   an entry has no leaf and is not pending
    ``node_missing``          the hash of a subtree is missing
    ``node_changed``          the hash of a subtree is wrong, or there is no such subtree
    ``checkpoint_changed``    a stored checkpoint is unreadable or its signature is invalid
    ``checkpoint_mismatch``   a checkpoint signed another root than the leaves have
    ``checkpoint_missing``    there are leaves after the last checkpoint
    ``row_changed``           a row's columns contradict its signed bytes
    ``row_without_entry``     no log entry matches a row
    ``entry_without_row``     no row matches a log entry
    ``ledger``                a ledger is inconsistent; the message says how
    ``rolled_back``           an external checkpoint covers more entries than the log has
    ``rewritten``             an external checkpoint has another root than the log
    ``other_log``             an external checkpoint has another log's origin
    ========================  =========================================================
    """

    code: str
    where: str
    message: str

    def as_document(self) -> dict[str, Any]:
        """The finding as JSON data."""
        return asdict(self)


def audit_tree(connection: Connection, external: Sequence[Checkpoint]) -> Iterator[AuditFinding]:
    """Yield the tree's inconsistencies."""
    expected: Expected = defaultdict(list)
    origins: set[str] = set()
    last = 0
    for where, note, record in _checkpoints(connection):
        try:
            checkpoint = open_stored(note, record).checkpoint
        except LogDamaged as error:
            yield AuditFinding("checkpoint_changed", where, f"{error}.")
            continue
        if checkpoint.size < last:
            yield AuditFinding(
                "checkpoint_changed", where, "it covers fewer entries than the previous one."
            )
        last = max(last, checkpoint.size)
        origins.add(checkpoint.origin)
        expected[checkpoint.size].append((where, checkpoint))
    for checkpoint in external:
        if origins and checkpoint.origin not in origins:
            yield AuditFinding("other_log", EXTERNAL, f"its origin is {checkpoint.origin}.")
            continue
        expected[checkpoint.size].append((EXTERNAL, checkpoint))
    tree = Frontier()
    yield from _rebuild(connection, tree, expected)
    yield from _beyond_the_end(tree.size, last, expected)
    yield from _unexpected_nodes(connection, tree.size)
    yield from _unsequenced_entries(connection)


def _checkpoints(connection: Connection) -> Iterator[tuple[str, str, str]]:
    query = (
        select(log_checkpoints.c.id, log_checkpoints.c.note, signing_keys.c.record)
        .outerjoin(signing_keys, signing_keys.c.key_id == log_checkpoints.c.key_id)
        .order_by(log_checkpoints.c.id)
    )
    for row_id, note, record in connection.execute(query):
        yield f"log_checkpoints {row_id}", note, record or "{}"


def _rebuild(connection: Connection, tree: Frontier, expected: Expected) -> Iterator[AuditFinding]:
    yield from _compare_root(expected, tree)
    while rows := _read_leaves(connection, tree.size):
        start = tree.size
        nodes: dict[Place, bytes] = {}
        for row in rows:
            if row.leaf_index != tree.size:
                yield AuditFinding(
                    "leaf_missing",
                    f"log_leaves {tree.size}",
                    f"the next leaf is {row.leaf_index}; later leaves cannot be verified.",
                )
                return
            yield from _compare_entry(row)
            nodes.update(tree.append(leaf_hash((row.content or "").encode()))[1:])
            yield from _compare_root(expected, tree)
        yield from _compare_nodes(connection, start, tree.size, nodes)


def _read_leaves(connection: Connection, start: int) -> Sequence[Row[Any]]:
    return connection.execute(
        select(log_leaves, log_entries)
        .outerjoin(log_entries, log_entries.c.id == log_leaves.c.entry_id)
        .where(log_leaves.c.leaf_index >= start)
        .order_by(log_leaves.c.leaf_index)
        .limit(CHUNK)
    ).all()


def _compare_entry(row: Row[Any]) -> Iterator[AuditFinding]:
    where = f"log_leaves {row.leaf_index}"
    if row.content is None:
        yield AuditFinding("entry_missing", where, f"its entry {row.entry_id} does not exist.")
        return
    if leaf_hash(row.content.encode()) != bytes(row.leaf_hash):
        yield AuditFinding("leaf_changed", where, "its hash is not the hash of its entry.")
    try:
        content = json.loads(row.content)
        columns = (row.kind, row.subject, row.at.isoformat(timespec="microseconds"))
        same = (content["kind"], content["subject"], content["at"]) == columns
    except (ValueError, TypeError, KeyError):
        same = False
    if not same:
        where = f"log_entries {row.entry_id}"
        yield AuditFinding("entry_changed", where, "its columns contradict its hashed bytes.")


def _compare_root(expected: Expected, tree: Frontier) -> Iterator[AuditFinding]:
    for where, checkpoint in expected.pop(tree.size, ()):
        if tree.root() != checkpoint.root_hash:
            yield AuditFinding(
                "rewritten" if where == EXTERNAL else "checkpoint_mismatch",
                where,
                f"the first {tree.size} entries do not have the root that it signed.",
            )


def _compare_nodes(
    connection: Connection, start: int, size: int, nodes: dict[Place, bytes]
) -> Iterator[AuditFinding]:
    """Compare the subtrees that were completed by the leaves from ``start`` to ``size``."""
    for level in range(1, size.bit_length()):
        first, end = start >> level, size >> level
        if first == end:
            continue
        rows = connection.execute(
            select(log_nodes.c.position, log_nodes.c.hash).where(
                log_nodes.c.level == level,
                log_nodes.c.position >= first,
                log_nodes.c.position < end,
            )
        )
        stored = {position: bytes(value) for position, value in rows}
        for position in range(first, end):
            where = f"log_nodes {level}, {position}"
            rebuilt = nodes.get(Place(level, position))
            if position not in stored:
                yield AuditFinding("node_missing", where, "the hash is missing.")
            elif rebuilt is not None and stored[position] != rebuilt:
                yield AuditFinding("node_changed", where, "the hash is not that of its leaves.")


def _beyond_the_end(size: int, signed: int, expected: Expected) -> Iterator[AuditFinding]:
    for expected_size, checkpoints in sorted(expected.items()):
        for where, _ in checkpoints:
            yield AuditFinding(
                "rolled_back" if where == EXTERNAL else "checkpoint_mismatch",
                where,
                f"it covers {expected_size} entries, but the log has {size}.",
            )
    if size > signed:
        message = f"there are {size} leaves, but the checkpoints cover {signed}."
        yield AuditFinding("checkpoint_missing", "log_checkpoints", message)


def _unexpected_nodes(connection: Connection, size: int) -> Iterator[AuditFinding]:
    levels = connection.execute(
        select(log_nodes.c.level, func.max(log_nodes.c.position), func.min(log_nodes.c.position))
        .group_by(log_nodes.c.level)
        .order_by(log_nodes.c.level)
    )
    for level, highest, lowest in levels:
        if level < 1 or lowest < 0 or highest >= size >> min(level, 64):
            message = f"a tree of {size} leaves has no such subtree."
            yield AuditFinding("node_changed", f"log_nodes {level}, {highest}", message)


def _unsequenced_entries(connection: Connection) -> Iterator[AuditFinding]:
    query = (
        select(log_entries.c.id)
        .outerjoin(log_leaves, log_leaves.c.entry_id == log_entries.c.id)
        .outerjoin(log_pending, log_pending.c.entry_id == log_entries.c.id)
        .where(log_leaves.c.entry_id.is_(None), log_pending.c.entry_id.is_(None))
        .order_by(log_entries.c.id)
    )
    for (entry_id,) in connection.execute(query):
        yield AuditFinding(
            "entry_not_sequenced",
            f"log_entries {entry_id}",
            "it has no leaf in the tree and is not pending.",
        )
