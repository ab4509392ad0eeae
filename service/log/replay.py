"""Replay: grow the whole tree again from the entries, and compare all that is stored.

The tree is grown leaf by leaf from the bytes that the entries hold. Every stored hash is
compared with the one that comes out, every checkpoint with the root at its size, and so
is every checkpoint that was kept outside the database: that is the one thing its owner,
who can drop triggers and write any row, cannot have changed.

It reads in chunks, in one transaction that sees one state of the database, and holds no
more than a chunk in memory.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from sqlalchemy import Connection, Row, func, select

from affidavit.certificate.log import Checkpoint, Frontier, Place, leaf_hash
from affidavit.service.log.findings import Finding
from affidavit.service.log.stored_tree import LogDamaged, opened
from affidavit.service.log.tables import (
    log_checkpoints,
    log_entries,
    log_leaves,
    log_nodes,
    log_pending,
)
from affidavit.service.tables import signing_keys

CHUNK = 4096

Progress = Callable[[int], None]


def replay(
    connection: Connection, exported: Sequence[Checkpoint], progress: Progress
) -> Iterator[Finding]:
    """What is wrong with the stored log; ``progress`` is told of leaves as they are read."""
    roots: dict[int, list[tuple[str, Checkpoint]]] = defaultdict(list)
    origins: set[str] = set()
    last = 0
    for where, note, record in _checkpoints(connection):
        try:
            found = opened(note, record).checkpoint
        except LogDamaged as error:
            yield Finding("checkpoint_changed", where, f"{error}.")
            continue
        if found.size < last:
            yield Finding("checkpoint_changed", where, "it is smaller than the one before it.")
        last = max(last, found.size)
        origins.add(found.origin)
        roots[found.size].append((where, found))
    for item in exported:
        if origins and item.origin not in origins:
            yield Finding("other_log", "a kept checkpoint", f"it is of the log {item.origin}.")
            continue
        roots[item.size].append(("a kept checkpoint", item))
    tree = Frontier()
    yield from _grow(connection, tree, roots, progress)
    yield from _beyond(tree.size, last, roots)
    yield from _extra_nodes(connection, tree.size)
    yield from _unsequenced(connection)


def _checkpoints(connection: Connection) -> Iterator[tuple[str, str, str]]:
    query = (
        select(log_checkpoints.c.id, log_checkpoints.c.note, signing_keys.c.record)
        .outerjoin(signing_keys, signing_keys.c.key_id == log_checkpoints.c.key_id)
        .order_by(log_checkpoints.c.id)
    )
    for identity, note, record in connection.execute(query):
        yield f"log_checkpoints {identity}", note, record or "{}"


def _grow(
    connection: Connection,
    tree: Frontier,
    roots: dict[int, list[tuple[str, Checkpoint]]],
    progress: Progress,
) -> Iterator[Finding]:
    yield from _compare(roots, tree)
    while rows := _leaves(connection, tree.size):
        begun = tree.size
        made: dict[Place, bytes] = {}
        for row in rows:
            if row.leaf_index != tree.size:
                yield Finding(
                    "leaf_missing",
                    f"log_leaves {tree.size}",
                    f"the leaf after it is {row.leaf_index}; nothing beyond can be compared.",
                )
                return
            yield from _entry(row)
            content = (row.content or "").encode()
            made.update(tree.append(leaf_hash(content))[1:])
            yield from _compare(roots, tree)
        yield from _nodes(connection, begun, tree.size, made)
        progress(tree.size - begun)


def _leaves(connection: Connection, start: int) -> Sequence[Row[Any]]:
    return connection.execute(
        select(log_leaves, log_entries)
        .outerjoin(log_entries, log_entries.c.id == log_leaves.c.entry_id)
        .where(log_leaves.c.leaf_index >= start)
        .order_by(log_leaves.c.leaf_index)
        .limit(CHUNK)
    ).all()


def _entry(row: Row[Any]) -> Iterator[Finding]:
    where = f"log_leaves {row.leaf_index}"
    if row.content is None:
        yield Finding("entry_missing", where, f"its entry {row.entry_id} is gone.")
        return
    if leaf_hash(row.content.encode()) != bytes(row.leaf_hash):
        yield Finding("leaf_changed", where, "its hash is not that of its entry.")
    try:
        said = json.loads(row.content)
        same = (said["kind"], said["subject"]) == (row.kind, row.subject)
        same = same and said["at"] == row.at.isoformat(timespec="microseconds")
    except (ValueError, TypeError, KeyError):
        same = False
    if not same:
        yield Finding(
            "entry_changed",
            f"log_entries {row.entry_id}",
            "its columns do not say what its hashed bytes say.",
        )


def _compare(roots: dict[int, list[tuple[str, Checkpoint]]], tree: Frontier) -> Iterator[Finding]:
    for where, checkpoint in roots.pop(tree.size, ()):
        if tree.root() != checkpoint.root_hash:
            kept = where.startswith("a kept")
            yield Finding(
                "rewritten" if kept else "checkpoint_mismatch",
                where,
                f"the first {tree.size} entries are not those that it signed.",
            )


def _nodes(
    connection: Connection, begun: int, size: int, made: dict[Place, bytes]
) -> Iterator[Finding]:
    """Compare the subtrees that the leaves from ``begun`` to ``size`` completed."""
    for level in range(1, size.bit_length()):
        first, end = begun >> level, size >> level
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
            wanted = made.get(Place(level, position))
            if position not in stored:
                yield Finding("node_missing", where, "the hash is not there.")
            elif wanted is not None and stored[position] != wanted:
                yield Finding("node_changed", where, "the hash is not that of its leaves.")


def _beyond(
    size: int, signed: int, roots: dict[int, list[tuple[str, Checkpoint]]]
) -> Iterator[Finding]:
    for wanted, kept in sorted(roots.items()):
        for where, _ in kept:
            if where.startswith("a kept"):
                message = f"it is of {wanted} entries, and the log has {size}."
                yield Finding("rolled_back", where, message)
            else:
                message = f"it signed {wanted} entries, and the log has {size}."
                yield Finding("checkpoint_mismatch", where, message)
    if size > signed:
        message = f"there are {size} leaves, and checkpoints for {signed}."
        yield Finding("checkpoint_missing", "log_checkpoints", message)


def _extra_nodes(connection: Connection, size: int) -> Iterator[Finding]:
    levels = connection.execute(
        select(log_nodes.c.level, func.max(log_nodes.c.position), func.min(log_nodes.c.position))
        .group_by(log_nodes.c.level)
        .order_by(log_nodes.c.level)
    )
    for level, highest, lowest in levels:
        if level < 1 or lowest < 0 or highest >= size >> min(level, 64):
            message = f"there are hashes of subtrees that {size} leaves do not have."
            yield Finding("node_changed", f"log_nodes {level}, {highest}", message)


def _unsequenced(connection: Connection) -> Iterator[Finding]:
    query = (
        select(log_entries.c.id)
        .outerjoin(log_leaves, log_leaves.c.entry_id == log_entries.c.id)
        .outerjoin(log_pending, log_pending.c.entry_id == log_entries.c.id)
        .where(log_leaves.c.entry_id.is_(None), log_pending.c.entry_id.is_(None))
        .order_by(log_entries.c.id)
    )
    for (identity,) in connection.execute(query):
        yield Finding(
            "entry_not_sequenced",
            f"log_entries {identity}",
            "it has no place in the log and does not wait for one.",
        )
