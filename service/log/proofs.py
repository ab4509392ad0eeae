"""The log as its readers see it: checkpoints, entries, and proofs made from stored hashes.

Nothing beyond the last checkpoint is shown: what was not signed is not yet in the log.
Every proof is verified before it is handed out, so that a damaged table is a fault of
ours here and not a riddle for whoever verifies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, Engine, bindparam, select

from affidavit.certificate.log import (
    Consistency,
    Inclusion,
    Place,
    ProofError,
    Range,
    assemble,
    consistency_path,
    inclusion_path,
    places,
    verify_consistency,
    verify_inclusion,
)
from affidavit.service.database import reader
from affidavit.service.log.entries import entry_of
from affidavit.service.log.stored_tree import Kept, LogDamaged, hashes, last_checkpoint
from affidavit.service.log.tables import log_entries, log_leaves


class NothingLogged(Exception):
    """The log has no checkpoint yet, or not what was asked for; the text says which."""


@dataclass(frozen=True, slots=True)
class LoggedEntry:
    """A leaf of the log with the bytes that were hashed."""

    index: int
    leaf_hash: bytes
    content: str


@dataclass(frozen=True, slots=True)
class InclusionProof:
    """The proof that a leaf stands at ``index`` of the tree of ``size`` leaves."""

    index: int
    size: int
    leaf_hash: bytes
    hashes: tuple[bytes, ...]


class LogReader:
    """The log behind one engine."""

    def __init__(self, engine: Engine) -> None:
        self._reader = reader(engine)

    def latest(self) -> Kept:
        """The newest checkpoint; raises ``NothingLogged``."""
        with self._reader.connect() as connection:
            return _latest(connection)

    def inclusion(self, index: int | None, leaf: bytes | None, size: int | None) -> InclusionProof:
        """Proof for a leaf, by index or by hash, in the tree of ``size``, else the newest.

        Raises ``NothingLogged``.
        """
        with self._reader.connect() as connection:
            kept = _latest(connection)
            wanted = _size(size, kept)
            if index is None:
                index = None if leaf is None else _index_of(connection, leaf)
            if index is None or index >= wanted:
                raise NothingLogged(f"no such leaf is among the first {wanted} of the log")
            return _inclusion(connection, index, wanted, kept)

    def consistency(self, first: int, second: int | None) -> Consistency:
        """Proof that the tree of ``second``, else the newest, begins with that of ``first``.

        Raises ``NothingLogged``; ``first`` is at least 1.
        """
        with self._reader.connect() as connection:
            kept = _latest(connection)
            wanted = _size(second, kept)
            if first > wanted:
                raise NothingLogged(f"the tree of {wanted} leaves has no beginning of {first}")
            return _consistency(connection, first, wanted)

    def place_of(self, bundle: bytes) -> Inclusion | None:
        """The log part of a bundle; None while its certificate waits for its place."""
        leaf = entry_of(bundle).leaf_hash
        with self._reader.connect() as connection:
            index = _index_of(connection, leaf)
            kept = None if index is None else last_checkpoint(connection)
            if index is None or kept is None or index >= kept.checkpoint.size:
                return None
            found = _inclusion(connection, index, kept.checkpoint.size, kept)
        return Inclusion(
            leaf_index=index,
            tree_size=found.size,
            proof=found.hashes,
            checkpoint=kept.note,
        )

    def entries(self, start: int, end: int) -> list[LoggedEntry]:
        """The entries from ``start`` to ``end``, both included, as far as they are signed."""
        with self._reader.connect() as connection:
            last = last_checkpoint(connection)
            size = 0 if last is None else last.checkpoint.size
            query = (
                select(log_leaves.c.leaf_index, log_leaves.c.leaf_hash, log_entries.c.content)
                .join(log_entries)
                .where(log_leaves.c.leaf_index.between(start, min(end, size - 1)))
                .order_by(log_leaves.c.leaf_index)
            )
            return [
                LoggedEntry(index, bytes(leaf), content)
                for index, leaf, content in connection.execute(query)
            ]


def _latest(connection: Connection) -> Kept:
    kept = last_checkpoint(connection)
    if kept is None:
        raise NothingLogged("the log has no checkpoint yet")
    return kept


def _size(asked: int | None, kept: Kept) -> int:
    size = kept.checkpoint.size
    if asked is not None and asked > size:
        raise NothingLogged(f"the log has {size} leaves, not {asked}")
    return size if asked is None else asked


_INDEX = (
    select(log_leaves.c.leaf_index)
    .where(log_leaves.c.leaf_hash == bindparam("wanted"))
    .order_by(log_leaves.c.leaf_index)
    .limit(1)
)


def _index_of(connection: Connection, leaf: bytes) -> int | None:
    found = connection.execute(_INDEX, {"wanted": leaf}).scalar()
    return None if found is None else int(found)


def _inclusion(connection: Connection, index: int, size: int, kept: Kept) -> InclusionProof:
    leaf = Place(0, index)
    path = inclusion_path(index, size)
    whole = Range(0, size)
    found = hashes(connection, [leaf, *_all(path), *places(whole)])
    proof = assemble(path, found)
    root = kept.checkpoint.root_hash
    if size != kept.checkpoint.size:
        (root,) = assemble([whole], found)
    try:
        verify_inclusion(found[leaf], index=index, size=size, proof=proof, root=root)
    except ProofError as error:
        raise LogDamaged(
            f"the stored hashes do not prove leaf {index} of {size}: {error}"
        ) from None
    return InclusionProof(index, size, found[leaf], tuple(proof))


def _consistency(connection: Connection, first: int, second: int) -> Consistency:
    path = consistency_path(first, second)
    roots = [Range(0, first), Range(0, second)]
    found = hashes(connection, _all([*path, *roots]))
    proof = assemble(path, found)
    old, new = assemble(roots, found)
    try:
        verify_consistency(first=first, second=second, first_root=old, second_root=new, proof=proof)
    except ProofError as error:
        raise LogDamaged(
            f"the stored hashes do not lead from {first} to {second}: {error}"
        ) from None
    return Consistency(first=first, second=second, hashes=tuple(proof))


def _all(path: Sequence[Range]) -> list[Place]:
    return [place for part in path for place in places(part)]
