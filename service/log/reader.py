"""Read the log: checkpoints, entries, and proofs built from the stored hashes.

Entries after the last checkpoint are not shown, because they are not signed yet. Every proof is
verified before it is returned, so a damaged table is reported here. Tiles are returned unverified:
readers verify them against a signed checkpoint.

Two rules choose the checkpoint to serve, because verifiers with a trust policy accept only
cosigned ones:

- by default, the newest cosigned checkpoint, unless it is much older than the newest of all; or a
  slightly older one with more cosignatures;
- for a certificate whose key was revoked since, the oldest checkpoint with the most cosignatures
  from before the revocation, which proves that the certificate is not backdated.

Reference: C2SP, tlog-cosignature.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import Connection, Engine, bindparam, case, func, select

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
from affidavit.service.certificate_tables import signing_keys
from affidavit.service.clock import now_of
from affidavit.service.database import Store, reader
from affidavit.service.keys import revoked_keys
from affidavit.service.log.entries import (
    entry_of,
    log_checkpoints,
    log_cosignatures,
    log_entries,
    log_leaves,
)
from affidavit.service.log.stored_tree import (
    LogDamaged,
    NotLogged,
    StoredCheckpoint,
    last_checkpoint,
    open_stored,
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


# ---- the checkpoint that is served ---------------------------------------------------

PATIENCE = timedelta(minutes=10)
"""For how long the newest cosigned checkpoint stands for a newer one that nobody cosigned."""
COMPLETION = timedelta(seconds=30)
"""For how long one with more cosignatures stands for a newer one, which may get them yet."""
STAMPS = "timestamp+"
"""How what stands for the witness of a timestamp begins."""


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
