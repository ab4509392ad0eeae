"""The tree as it is stored: hashes of perfect subtrees by their place, and checkpoints.

What is stored is not believed because it is there: the frontier of a tree has to hash to
the root that was signed for it, or ``LogDamaged`` is raised, and nothing is signed or
proved on top of it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from sqlalchemy import BindParameter, Connection, bindparam, func, select, tuple_

from affidavit.certificate import KeyFailure, PublicKey
from affidavit.certificate.log import (
    EMPTY_ROOT,
    BadNote,
    Checkpoint,
    Frontier,
    Place,
    ProofError,
    assemble,
    consistency_path,
    frontier_places,
    open_checkpoint,
    places,
    verify_consistency,
)
from affidavit.service.log.tables import log_checkpoints, log_leaves, log_nodes
from affidavit.service.tables import signing_keys


class LogDamaged(Exception):
    """The stored log contradicts itself or a checkpoint; the text says where.

    Nothing is signed until that is mended: restore the database from a backup that is at
    least as new as the last checkpoint, and run ``affidavit audit verify``.
    """


class Kept:
    """A checkpoint as it is stored: the note and what it says."""

    def __init__(self, note: str, checkpoint: Checkpoint, key: PublicKey) -> None:
        self.note = note
        self.checkpoint = checkpoint
        self.key = key


# Built once: putting a statement together takes as long as running it.
_LAST = (
    select(log_checkpoints, signing_keys.c.record)
    .join(signing_keys)
    .order_by(log_checkpoints.c.id.desc())
    .limit(1)
)
_LARGEST = select(func.max(log_checkpoints.c.tree_size))
_WANTED: BindParameter[Any] = bindparam("wanted", expanding=True)
_LEAVES = select(log_leaves.c.leaf_index, log_leaves.c.leaf_hash).where(
    log_leaves.c.leaf_index.in_(_WANTED)
)
_NODES = select(log_nodes).where(tuple_(log_nodes.c.level, log_nodes.c.position).in_(_WANTED))


def last_checkpoint(connection: Connection) -> Kept | None:
    """The newest checkpoint, its signature checked; None while nothing was signed.

    Raises ``LogDamaged`` when it does not hold what it should.
    """
    row = connection.execute(_LAST).first()
    if row is None:
        return None
    kept = opened(row.note, row.record)
    largest = connection.execute(_LARGEST).scalar_one()
    if not kept.checkpoint.size == row.tree_size == largest:
        raise LogDamaged("the newest checkpoint is not the largest one")
    return kept


def opened(note: str, record: str) -> Kept:
    """A stored note, held to the key it was signed with; raises ``LogDamaged``."""
    try:
        key = PublicKey.from_record(json.loads(record))
        checkpoint, _ = open_checkpoint(note, [key])
    except (BadNote, KeyFailure, ValueError) as error:
        raise LogDamaged(f"a stored checkpoint cannot be read: {error}") from None
    return Kept(note, checkpoint, key)


def hashes(connection: Connection, wanted: Iterable[Place]) -> dict[Place, bytes]:
    """The stored hashes of these places; raises ``LogDamaged`` when one is missing."""
    asked = set(wanted)
    leaves = [entry.position for entry in asked if entry.level == 0]
    nodes = [tuple(element) for element in asked if element.level > 0]
    found: dict[Place, bytes] = {}
    if leaves:
        for index, value in connection.execute(_LEAVES, {"wanted": leaves}):
            found[Place(0, index)] = bytes(value)
    if nodes:
        for level, position, value in connection.execute(_NODES, {"wanted": nodes}):
            found[Place(level, position)] = bytes(value)
    for item in sorted(asked - found.keys()):
        raise LogDamaged(f"the hash at level {item.level}, position {item.position} is missing")
    return found


def frontier(connection: Connection, checkpoint: Checkpoint | None) -> Frontier:
    """The tree of ``checkpoint``, ready to grow; raises ``LogDamaged`` if it is another."""
    size = 0 if checkpoint is None else checkpoint.size
    wanted = frontier_places(size)
    found = hashes(connection, wanted)
    tree = Frontier(size, (found[place] for place in wanted))
    if tree.root() != (EMPTY_ROOT if checkpoint is None else checkpoint.root_hash):
        raise LogDamaged(f"the stored tree of {size} leaves is not the one that was signed")
    last = connection.execute(select(func.max(log_leaves.c.leaf_index))).scalar_one()
    if (-1 if last is None else last) != size - 1:
        raise LogDamaged(f"there are leaves beyond the {size} that were signed, or some are gone")
    return tree


def require_superset(connection: Connection, seen: Checkpoint, newest: Checkpoint | None) -> None:
    """Raise ``LogDamaged`` unless ``newest`` continues ``seen``, by the stored tree."""
    if newest is None or newest.origin != seen.origin or newest.size < seen.size:
        raise LogDamaged(
            f"a checkpoint of {seen.origin} with {seen.size} leaves was seen before and is gone"
        )
    path = consistency_path(seen.size, newest.size)
    wanted = hashes(connection, (place for part in path for place in places(part)))
    try:
        verify_consistency(
            first=seen.size,
            second=newest.size,
            first_root=seen.root_hash,
            second_root=newest.root_hash,
            proof=assemble(path, wanted),
        )
    except ProofError as error:
        raise LogDamaged(
            f"the log does not continue the one of {seen.size} leaves seen before: {error}"
        ) from None
