"""The Merkle tree as stored: hashes of perfect subtrees, and signed checkpoints.

Stored hashes are not trusted by themselves: the frontier of a tree must hash to the signed root, or
``LogDamaged`` is raised and nothing is signed or proved.

Reference: RFC 9162, 2.1.1 (Merkle tree hash).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import BindParameter, Connection, bindparam, func, select, tuple_

from affidavit.service.core.errors import LogDamaged
from affidavit.service.tables.certificates import signing_keys
from affidavit.service.tables.log import (
    log_checkpoints,
    log_entries,
    log_leaves,
    log_nodes,
)
from affidavit.trust import KeyFailure, PublicKey
from affidavit.trust.log import (
    BadNote,
    Checkpoint,
    leaf_content,
    merkle_tree,
    open_checkpoint,
)

MAX_RANGE = 5000
"""Entries that one call of ``verify_range`` hashes."""


@dataclass(frozen=True, slots=True)
class StoredCheckpoint:
    """A stored checkpoint: the signed note, its parsed content and the key that signed it."""

    note: str
    checkpoint: Checkpoint
    key: PublicKey


# Built once, because building a statement takes as long as running it. It is one statement, because
# a checkpoint signed between two would look larger than the newest.
_LAST = (
    select(
        log_checkpoints,
        signing_keys.c.record,
        select(func.max(log_checkpoints.c.tree_size)).scalar_subquery().label("largest"),
    )
    .join(signing_keys)
    .order_by(log_checkpoints.c.id.desc())
    .limit(1)
)
_KEYS: BindParameter[Any] = bindparam("keys", expanding=True)
_LEAVES = select(log_leaves.c.leaf_index, log_leaves.c.leaf_hash).where(
    log_leaves.c.leaf_index.in_(_KEYS)
)
_NODES = select(log_nodes).where(tuple_(log_nodes.c.level, log_nodes.c.position).in_(_KEYS))


def last_checkpoint(connection: Connection) -> StoredCheckpoint | None:
    """Return the newest checkpoint with its signature verified, or None before the first.

    Raises ``LogDamaged`` if it is unreadable, forged or not the largest.
    """
    row = connection.execute(_LAST).first()
    if row is None:
        return None
    stored = open_stored(row.note, row.record)
    if not stored.checkpoint.size == row.tree_size == row.largest:
        raise LogDamaged("the newest checkpoint is not the largest one")
    return stored


def open_stored(note: str, record: str) -> StoredCheckpoint:
    """Verify a stored note with the key in ``record``; raises ``LogDamaged``."""
    key = key_of(record)
    try:
        checkpoint, _ = open_checkpoint(note, [key])
    except (BadNote, KeyFailure, ValueError) as error:
        raise LogDamaged(f"a stored checkpoint cannot be read: {error}") from None
    return StoredCheckpoint(note, checkpoint, key)


def key_of(record: str) -> PublicKey:
    """Parse the key of a stored record; raises ``LogDamaged``."""
    try:
        return PublicKey.from_record(json.loads(record))
    except (KeyFailure, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise LogDamaged(f"the record of a key cannot be read: {error}") from None


def read_hashes(
    connection: Connection, requested: Iterable[merkle_tree.Place]
) -> dict[merkle_tree.Place, bytes]:
    """Read the stored hashes at these places; raises ``LogDamaged`` if one is missing."""
    remaining = set(requested)
    leaves = [place.position for place in remaining if place.level == 0]
    nodes = [tuple(place) for place in remaining if place.level > 0]
    hashes: dict[merkle_tree.Place, bytes] = {}
    if leaves:
        for index, value in connection.execute(_LEAVES, {"keys": leaves}):
            hashes[merkle_tree.Place(0, index)] = bytes(value)
    if nodes:
        for level, position, value in connection.execute(_NODES, {"keys": nodes}):
            hashes[merkle_tree.Place(level, position)] = bytes(value)
    missing = remaining - hashes.keys()
    if missing:
        place = min(missing)
        raise LogDamaged(f"the hash at level {place.level}, position {place.position} is missing")
    return hashes


def read_frontier(connection: Connection, checkpoint: Checkpoint | None) -> merkle_tree.Frontier:
    """Read the tree of ``checkpoint`` to append to; raises ``LogDamaged`` if it differs."""
    size = 0 if checkpoint is None else checkpoint.size
    frontier = merkle_tree.frontier_places(size)
    hashes = read_hashes(connection, frontier)
    tree = merkle_tree.Frontier(size, (hashes[place] for place in frontier))
    if tree.root() != (merkle_tree.EMPTY_ROOT if checkpoint is None else checkpoint.root_hash):
        raise LogDamaged(f"the stored tree of {size} leaves does not have the signed root")
    last = connection.execute(select(func.max(log_leaves.c.leaf_index))).scalar_one()
    if (-1 if last is None else last) != size - 1:
        raise LogDamaged(f"the log does not have exactly the {size} leaves that were signed")
    return tree


def require_superset(connection: Connection, seen: Checkpoint, newest: Checkpoint | None) -> None:
    """Raise ``LogDamaged`` unless ``newest`` extends ``seen``, proved by the stored tree."""
    if newest is None or newest.origin != seen.origin or newest.size < seen.size:
        raise LogDamaged(
            f"a checkpoint of {seen.origin} with {seen.size} leaves was seen before and is gone"
        )
    path = merkle_tree.consistency_path(seen.size, newest.size)
    hashes = read_hashes(connection, (place for part in path for place in merkle_tree.places(part)))
    try:
        merkle_tree.verify_consistency(
            first=seen.size,
            second=newest.size,
            first_root=seen.root_hash,
            second_root=newest.root_hash,
            proof=merkle_tree.assemble(path, hashes),
        )
    except merkle_tree.ProofError as error:
        raise LogDamaged(
            f"the log does not extend the checkpoint of {seen.size} leaves seen before: {error}"
        ) from None


# ---- A range of entries, hashed again up to the signed root ---------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeCheck:
    """The verification of entries ``start`` to ``end``, both included, against a checkpoint.

    The checkpoint covers ``size`` leaves. ``altered`` lists entries that do not match their stored
    hash, ``missing`` lists entries that do not exist, and ``proved`` tells whether the range hashes
    to the signed root.
    """

    start: int
    end: int
    size: int
    root: str
    signed_at: datetime | None
    proved: bool
    altered: tuple[int, ...]
    missing: tuple[int, ...]


def verify_range(connection: Connection, start: int, end: int) -> RangeCheck:
    """Hash entries ``start`` to ``end`` again, at most ``MAX_RANGE`` of them.

    The bytes of the entries are hashed; outside the range, the stored hashes of whole subtrees are
    used. The result is the signed root only if no byte of the range was changed.

    Raises ``ValueError`` if the newest checkpoint does not cover the range, and ``LogDamaged`` if
    the stored tree contradicts the checkpoint.
    """
    last = last_checkpoint(connection)
    size = 0 if last is None else last.checkpoint.size
    if last is None or not 0 <= start <= end < size:
        raise ValueError(f"the newest checkpoint covers entries 0 to {size - 1}")
    end = min(end, start + MAX_RANGE - 1)
    leaves, altered = _hash_entries(connection, start, end)
    missing = tuple(index for index in range(start, end + 1) if index not in leaves)
    proved = not missing and _root_with(connection, size, leaves) == last.checkpoint.root_hash
    return RangeCheck(
        start=start,
        end=end,
        size=size,
        root=last.checkpoint.root_hash.hex(),
        signed_at=last.checkpoint.signed_at,
        proved=proved,
        altered=tuple(altered),
        missing=missing,
    )


def _hash_entries(
    connection: Connection, start: int, end: int
) -> tuple[dict[int, bytes], list[int]]:
    """Return the recomputed leaf hashes by index, and the indexes whose stored hash differs."""
    query = (
        select(log_leaves.c.leaf_index, log_leaves.c.leaf_hash)
        .add_columns(log_entries.c.content, log_entries.c.salt)
        .join(log_entries)
        .where(log_leaves.c.leaf_index.between(start, end))
    )
    hashes, altered = {}, []
    for index, stored, content, salt in connection.execute(query):
        hashes[index] = merkle_tree.leaf_hash(leaf_content(content, salt))
        if hashes[index] != bytes(stored):
            altered.append(index)
    return hashes, sorted(altered)


def _root_with(connection: Connection, size: int, leaves: Mapping[int, bytes]) -> bytes:
    """Compute the root from the consecutive ``leaves`` and the stored hashes of the rest."""
    tree, changed = merkle_tree.Range(0, size), merkle_tree.Range(min(leaves), max(leaves) + 1)
    outside = [place for part in _outside(tree, changed) for place in merkle_tree.places(part)]
    return _root_of(tree, changed, leaves, read_hashes(connection, outside))


def _outside(part: merkle_tree.Range, changed: merkle_tree.Range) -> Iterator[merkle_tree.Range]:
    """Yield the largest subtrees of ``part`` without a leaf in ``changed``."""
    if part.end <= changed.start or part.start >= changed.end:
        yield part
    elif part.end - part.start > 1:
        for half in _halves(part):
            yield from _outside(half, changed)


def _root_of(
    part: merkle_tree.Range,
    changed: merkle_tree.Range,
    leaves: Mapping[int, bytes],
    stored: Mapping[merkle_tree.Place, bytes],
) -> bytes:
    if part.end <= changed.start or part.start >= changed.end:
        return merkle_tree.assemble([part], stored)[0]
    if part.end - part.start == 1:
        return leaves[part.start]
    left, right = (_root_of(half, changed, leaves, stored) for half in _halves(part))
    return merkle_tree.node_hash(left, right)


def _halves(part: merkle_tree.Range) -> tuple[merkle_tree.Range, merkle_tree.Range]:
    middle = part.start + (1 << ((part.end - part.start - 1).bit_length() - 1))
    return merkle_tree.Range(part.start, middle), merkle_tree.Range(middle, part.end)
