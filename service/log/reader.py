"""Read the log: checkpoints, entries, and proofs built from the stored hashes.

Nothing after the last checkpoint is shown: an entry that is not signed is not in the log
yet. Every proof is verified before it is returned, so that a damaged table is reported here
and does not confuse whoever verifies the proof.

Tiles are read as they are: whoever follows the log verifies them against a signed checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Engine, bindparam, select

from affidavit.certificate.log import (
    TILE_HEIGHT,
    TILE_WIDTH,
    Consistency,
    Inclusion,
    Place,
    ProofError,
    Range,
    assemble,
    consistency_path,
    encode_entries,
    inclusion_path,
    places,
    verify_consistency,
    verify_inclusion,
)
from affidavit.plan import canonical_json
from affidavit.service.database import Store, reader
from affidavit.service.log.cosignatures import from_before, published, revoked_since
from affidavit.service.log.entries import entry_of, log_entries, log_leaves
from affidavit.service.log.stored_tree import (
    LogDamaged,
    NotLogged,
    StoredCheckpoint,
    last_checkpoint,
    read_hashes,
)


@dataclass(frozen=True, slots=True)
class InclusionProof:
    """The proof that a leaf is at ``index`` in the tree of ``size`` leaves."""

    index: int
    size: int
    leaf_hash: bytes
    hashes: tuple[bytes, ...]


class LogReader(Store):
    """The log."""

    def latest(self) -> StoredCheckpoint:
        """The newest checkpoint; raises ``NotLogged``."""
        return self.read(_latest)

    def published(self) -> StoredCheckpoint:
        """The checkpoint for everybody, with its cosignatures; raises ``NotLogged``."""
        with self._reader.connect() as connection:
            return published(connection, _latest(connection))

    def inclusion(self, index: int | None, leaf: bytes | None, size: int | None) -> InclusionProof:
        """The proof for a leaf, by index or by hash, in the tree of ``size``, else the newest.

        Raises ``NotLogged``.
        """
        with self._reader.connect() as connection:
            newest = _latest(connection)
            size = _size_or_newest(size, newest)
            if index is None and leaf is not None:
                index = _index_of(connection, leaf)
            if index is None or index >= size:
                raise NotLogged(f"the leaf is not among the first {size} of the log")
            return _prove_inclusion(connection, index, size, newest)

    def consistency(self, first: int, second: int | None) -> Consistency:
        """The proof that the tree of ``second``, else the newest, extends that of ``first``.

        Raises ``NotLogged``; ``first`` is at least 1.
        """
        with self._reader.connect() as connection:
            second = _size_or_newest(second, _latest(connection))
            if first > second:
                raise NotLogged(f"a tree of {second} leaves does not extend one of {first}")
            return _prove_consistency(connection, first, second)

    def part_of(self, bundle: bytes) -> Inclusion | None:
        """The log part of a bundle; None while its entry is not sequenced, or the log damaged."""
        entry = entry_of(bundle)
        with suppress(LogDamaged), self._reader.connect() as connection:
            index = _index_of(connection, entry.leaf_hash)
            newest = None if index is None else last_checkpoint(connection)
            if index is None or newest is None or index >= newest.checkpoint.size:
                return None
            shown = _shown(connection, index, str(entry.body["key_id"]), newest)
            proof = _prove_inclusion(connection, index, shown.checkpoint.size, shown)
            return Inclusion(
                leaf_index=index, tree_size=proof.size, proof=proof.hashes, checkpoint=shown.note
            )
        return None

    def entries(self, start: int, end: int) -> Sequence[Any]:
        """The signed entries from ``start`` to ``end``, both included."""
        with self._reader.connect() as connection:
            size = _size(connection)
            query = (
                select(log_leaves.c.leaf_index, log_leaves.c.leaf_hash, log_entries.c.content)
                .join(log_entries)
                .where(log_leaves.c.leaf_index.between(start, min(end, size - 1)))
                .order_by(log_leaves.c.leaf_index)
            )
            return connection.execute(query).all()


def with_inclusion(log: LogReader, bundle: bytes) -> bytes:
    """``bundle`` with its ``log`` part; without one where ``LogReader.part_of`` has none.

    Verifiers that require the log then reject the bundle, and ``/readyz`` says why.
    """
    return joined(bundle, log.part_of(bundle))


def joined(bundle: bytes, part: Inclusion | None) -> bytes:
    """``bundle`` with its ``log`` part, which comes last in canonical JSON."""
    if part is None:
        return bundle
    return bundle[:-1] + b',"log":' + canonical_json(part.as_document()) + b"}"


def _latest(connection: Connection) -> StoredCheckpoint:
    newest = last_checkpoint(connection)
    if newest is None:
        raise NotLogged("the log has no checkpoint yet")
    return newest


def _shown(
    connection: Connection, index: int, key_id: str, newest: StoredCheckpoint
) -> StoredCheckpoint:
    """The checkpoint that shows most of the leaf of a certificate that this key signed."""
    since = revoked_since(connection, key_id)
    before = None if since is None else from_before(connection, index, since)
    if before is not None:
        return before
    shown = published(connection, newest)
    return shown if index < shown.checkpoint.size else newest


def _size_or_newest(size: int | None, newest: StoredCheckpoint) -> int:
    available = newest.checkpoint.size
    if size is not None and size > available:
        raise NotLogged(f"the log has {available} leaves, not {size}")
    return available if size is None else size


_INDEX = (
    select(log_leaves.c.leaf_index)
    .where(log_leaves.c.leaf_hash == bindparam("leaf"))
    .order_by(log_leaves.c.leaf_index)
    .limit(1)
)


def _index_of(connection: Connection, leaf: bytes) -> int | None:
    index = connection.execute(_INDEX, {"leaf": leaf}).scalar()
    return None if index is None else int(index)


def _prove_inclusion(
    connection: Connection, index: int, size: int, newest: StoredCheckpoint
) -> InclusionProof:
    leaf = Place(0, index)
    path = inclusion_path(index, size)
    tree = Range(0, size)
    hashes = read_hashes(connection, [leaf, *_places(path), *places(tree)])
    proof = assemble(path, hashes)
    root = newest.checkpoint.root_hash
    if size != newest.checkpoint.size:
        (root,) = assemble([tree], hashes)
    try:
        verify_inclusion(hashes[leaf], index=index, size=size, proof=proof, root=root)
    except ProofError as error:
        raise LogDamaged(
            f"the stored hashes do not prove leaf {index} of {size}: {error}"
        ) from None
    return InclusionProof(index, size, hashes[leaf], tuple(proof))


def _prove_consistency(connection: Connection, first: int, second: int) -> Consistency:
    path = consistency_path(first, second)
    trees = [Range(0, first), Range(0, second)]
    hashes = read_hashes(connection, _places([*path, *trees]))
    proof = assemble(path, hashes)
    old, new = assemble(trees, hashes)
    try:
        verify_consistency(first=first, second=second, first_root=old, second_root=new, proof=proof)
    except ProofError as error:
        raise LogDamaged(
            f"the stored hashes do not lead from {first} to {second}: {error}"
        ) from None
    return Consistency(first=first, second=second, hashes=tuple(proof))


def _places(path: Sequence[Range]) -> list[Place]:
    return [place for part in path for place in places(part)]


# ---- tiles ---------------------------------------------------------------------------


def tile_hashes(engine: Engine, level: int, number: int, width: int) -> bytes:
    """The first ``width`` hashes of a tile; raises ``NotLogged`` where there are fewer."""
    with reader(engine).connect() as connection:
        first = _first(_size(connection) >> (TILE_HEIGHT * level), number, width)
        places = [Place(TILE_HEIGHT * level, first + item) for item in range(width)]
        hashes = read_hashes(connection, places)
        return b"".join(hashes[place] for place in places)


def tile_entries(engine: Engine, number: int, width: int) -> bytes:
    """The first ``width`` entries below a tile of level 0.

    Raises ``NotLogged``, and ``BadTile`` for entries that do not fit into a tile.
    """
    with reader(engine).connect() as connection:
        first = _first(_size(connection), number, width)
        query = (
            select(log_entries.c.content)
            .join(log_leaves)
            .where(log_leaves.c.leaf_index.between(first, first + width - 1))
            .order_by(log_leaves.c.leaf_index)
        )
        contents = connection.execute(query).scalars().all()
    return encode_entries(content.encode() for content in contents)


def _size(connection: Connection) -> int:
    newest = last_checkpoint(connection)
    return 0 if newest is None else newest.checkpoint.size


def _first(available: int, number: int, width: int) -> int:
    first = number * TILE_WIDTH
    if not 0 < width <= TILE_WIDTH or first + width > available:
        raise NotLogged("the log is not that long yet")
    return first
