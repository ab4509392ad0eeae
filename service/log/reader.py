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
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from sqlalchemy import Connection, Engine, Pool, bindparam, case, func, select

from affidavit.plan import canonical_json
from affidavit.service.core.clock import now_of
from affidavit.service.core.database import Store, reader, snapshot
from affidavit.service.core.errors import LogDamaged, NotLogged
from affidavit.service.log.entries import entry_of
from affidavit.service.log.stored_tree import (
    StoredCheckpoint,
    last_checkpoint,
    open_stored,
    read_hashes,
)
from affidavit.service.tables.certificates import signing_keys
from affidavit.service.tables.keys import revoked_keys
from affidavit.service.tables.log import (
    log_checkpoints,
    log_cosignatures,
    log_entries,
    log_leaves,
)
from affidavit.trust.log import (
    UNSALTED_KINDS,
    Consistency,
    Inclusion,
    leaf_content,
    merkle_tree,
    read_checkpoint,
)


@dataclass(frozen=True, slots=True)
class InclusionProof:
    """The proof of the leaf at ``index`` in the tree of ``size`` leaves."""

    index: int
    size: int
    leaf_hash: bytes
    hashes: tuple[bytes, ...]


class LoggedEntry(NamedTuple):
    """An entry in the tree; ``content`` are the bytes of its leaf, as text."""

    leaf_index: int
    leaf_hash: bytes
    content: str


class RevealedEntries(NamedTuple):
    """Entries with the bytes of their leaves, and the proofs of one signed checkpoint.

    ``consistency`` leads from an earlier checkpoint to this one.
    """

    checkpoint: str
    entries: tuple[tuple[InclusionProof, bytes], ...]
    consistency: Consistency


class LogReader(Store):
    """The log, as its readers see it."""

    def latest(self) -> StoredCheckpoint:
        """Return the newest checkpoint; raises ``NotLogged``."""
        return self.read(_latest)

    def published(self) -> StoredCheckpoint:
        """Return the checkpoint to serve, with its cosignatures; raises ``NotLogged``."""
        with self._reader.connect() as connection:
            return published(connection, _latest(connection))

    def inclusion(
        self, index: int | None, leaf: bytes | None, size: int | None, *, unsalted: bool = True
    ) -> InclusionProof:
        """Return the proof for a leaf, by index or hash, in the tree of ``size`` or the newest.

        Raises ``NotLogged``; without ``unsalted`` also for leaves before the first salted one.
        """
        with self._reader.connect() as connection:
            newest = _latest(connection)
            size = _size_or_newest(size, newest)
            if index is None and leaf is not None:
                index = _index_of(connection, leaf)
            first = 0 if unsalted else salted_from(connection)
            first += first % 2  # the proof of a leaf at an odd index contains the leaf before it
            if index is None or not first <= index < size:
                among = f"the leaves {first} to {size - 1}" if first else f"the first {size}"
                raise NotLogged(f"the leaf is not among {among} of the log")
            return _prove_inclusion(connection, index, size, newest)

    def consistency(self, first: int, second: int | None, *, unsalted: bool = True) -> Consistency:
        """Return the proof that the tree of ``second``, or the newest, extends that of ``first``.

        ``first`` is at least 1. Raises ``NotLogged``; without ``unsalted`` also if ``first`` ends
        before the first salted leaf.
        """
        with self._reader.connect() as connection:
            second = _size_or_newest(second, _latest(connection))
            if first > second:
                raise NotLogged(f"a tree of {second} leaves does not extend one of {first}")
            if not unsalted and first <= (oldest := salted_from(connection)) > 0:
                raise NotLogged(
                    f"proofs from trees of {oldest} leaves or fewer need the scope audit, because "
                    "these leaves have no salt"
                )
            return _prove_consistency(connection, first, second)

    def part_of(self, bundle: bytes) -> Inclusion | None:
        """Return the log part of a bundle; None before sequencing and for a damaged log."""
        entry = entry_of(bundle)
        with suppress(LogDamaged), self._reader.connect() as connection:
            index = _index_of(connection, entry.leaf_hash)
            newest = None if index is None else last_checkpoint(connection)
            if index is None or newest is None or index >= newest.checkpoint.size:
                return None
            shown = _choose_checkpoint(connection, index, str(entry.body["key_id"]), newest)
            proof = _prove_inclusion(connection, index, shown.checkpoint.size, shown)
            return Inclusion(
                leaf_index=index, tree_size=proof.size, proof=proof.hashes, checkpoint=shown.note
            )
        return None

    def reveal(self, subjects: Sequence[str], *, since: str) -> RevealedEntries:
        """Return the entries about ``subjects``, proved in a tree that continues that of ``since``.

        The entries have their salts. Raises ``NotLogged`` while one is not in the tree.
        """
        with snapshot(self._reader) as connection:
            newest = _latest(connection)
            shown = published(connection, newest)
            query = (
                select(log_leaves.c.leaf_index, log_entries.c.content, log_entries.c.salt)
                .join_from(log_entries, log_leaves, isouter=True)
                .where(log_entries.c.subject.in_(subjects))
                .order_by(log_entries.c.id)
            )
            rows = connection.execute(query).all()
            first = read_checkpoint(since).size
            if any(row.leaf_index is None for row in rows):
                raise NotLogged("an entry has no place in the log yet; try again in some seconds")
            last = max([first - 1, *(row.leaf_index for row in rows)])
            if last >= shown.checkpoint.size:
                shown = newest
            if last >= shown.checkpoint.size:
                raise NotLogged("the newest entry is not signed yet; try again in some seconds")
            size = shown.checkpoint.size
            entries = tuple(
                (
                    _prove_inclusion(connection, row.leaf_index, size, shown),
                    leaf_content(row.content, row.salt),
                )
                for row in sorted(rows, key=lambda row: row.leaf_index)
            )
            consistency = _prove_consistency(connection, first, size)
            return RevealedEntries(shown.note, entries, consistency)

    def has_unsalted(self, level: int, number: int) -> bool:
        """Return whether a tile covers a leaf that should have a salt and has none."""
        first = (number * merkle_tree.TILE_WIDTH) << (merkle_tree.TILE_HEIGHT * level)
        return first < self.read(salted_from)

    def entries(self, start: int, end: int) -> Sequence[LoggedEntry]:
        """Return the signed entries from ``start`` to ``end``, both included."""
        with self._reader.connect() as connection:
            size = _size(connection)
            query = (
                select(log_leaves.c.leaf_index, log_leaves.c.leaf_hash)
                .add_columns(log_entries.c.content, log_entries.c.salt)
                .join(log_entries)
                .where(log_leaves.c.leaf_index.between(start, min(end, size - 1)))
                .order_by(log_leaves.c.leaf_index)
            )
            return [
                LoggedEntry(index, bytes(leaf), leaf_content(content, salt).decode())
                for index, leaf, content, salt in connection.execute(query)
            ]


def with_inclusion(log: LogReader, bundle: bytes) -> bytes:
    """Return ``bundle`` with its ``log`` part, if ``LogReader.part_of`` has one.

    Verifiers that require the log reject a bundle without it, and ``/readyz`` gives the reason.
    """
    return with_log_part(bundle, log.part_of(bundle))


def with_log_part(bundle: bytes, part: Inclusion | None) -> bytes:
    """Return ``bundle`` with its ``log`` part, which is last in canonical JSON."""
    if part is None:
        return bundle
    return bundle[:-1] + b',"log":' + canonical_json(part.as_document()) + b"}"


def _latest(connection: Connection) -> StoredCheckpoint:
    newest = last_checkpoint(connection)
    if newest is None:
        raise NotLogged("the log has no checkpoint yet")
    return newest


def _choose_checkpoint(
    connection: Connection, index: int, key_id: str, newest: StoredCheckpoint
) -> StoredCheckpoint:
    """Return the checkpoint to serve with a certificate that this key signed."""
    since = revoked_since(connection, key_id)
    before = None if since is None else find_cosigned_before(connection, index, since)
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
    leaf = merkle_tree.Place(0, index)
    path = merkle_tree.inclusion_path(index, size)
    tree = merkle_tree.Range(0, size)
    hashes = read_hashes(connection, [leaf, *_places(path), *merkle_tree.places(tree)])
    proof = merkle_tree.assemble(path, hashes)
    root = newest.checkpoint.root_hash
    if size != newest.checkpoint.size:
        (root,) = merkle_tree.assemble([tree], hashes)
    try:
        merkle_tree.verify_inclusion(hashes[leaf], index=index, size=size, proof=proof, root=root)
    except merkle_tree.ProofError as error:
        raise LogDamaged(
            f"the stored hashes do not prove leaf {index} of {size}: {error}"
        ) from None
    return InclusionProof(index, size, hashes[leaf], tuple(proof))


def _prove_consistency(connection: Connection, first: int, second: int) -> Consistency:
    path = merkle_tree.consistency_path(first, second)
    trees = [merkle_tree.Range(0, first), merkle_tree.Range(0, second)]
    hashes = read_hashes(connection, _places([*path, *trees]))
    proof = merkle_tree.assemble(path, hashes)
    old, new = merkle_tree.assemble(trees, hashes)
    try:
        merkle_tree.verify_consistency(
            first=first, second=second, first_root=old, second_root=new, proof=proof
        )
    except merkle_tree.ProofError as error:
        raise LogDamaged(
            f"the stored hashes do not lead from {first} to {second}: {error}"
        ) from None
    return Consistency(first=first, second=second, hashes=tuple(proof))


def _places(path: Sequence[merkle_tree.Range]) -> list[merkle_tree.Place]:
    return [place for part in path for place in merkle_tree.places(part)]


# ---- the checkpoint that is served ---------------------------------------------------

MAX_COSIGNED_AGE = timedelta(minutes=10)
"""Time for which the newest cosigned checkpoint is served instead of a newer one."""
COSIGNING_TIME = timedelta(seconds=30)
"""Time for which a checkpoint with more cosignatures is served, until witnesses cosign the next."""
TIMESTAMP_PREFIX = "timestamp+"
"""The prefix of a timestamp's entry in the column ``witness``."""


_IS_TIMESTAMP = log_cosignatures.c.witness.startswith(TIMESTAMP_PREFIX)
_WITNESSES = func.sum(case((_IS_TIMESTAMP, 0), else_=1))
# Any number of timestamps ranks below one more witness.
_RANK = 2 * _WITNESSES + func.max(case((_IS_TIMESTAMP, 1), else_=0))
_ID = log_cosignatures.c.checkpoint_id
_COSIGNED = (
    select(
        _ID.label("id"),
        func.max(log_checkpoints.c.signed_at).label("signed_at"),
        _RANK.label("rank"),
    )
    .join_from(log_cosignatures, log_checkpoints)
    .group_by(_ID)
    .order_by(_ID.desc())
    .limit(100)
)


def published(connection: Connection, newest: StoredCheckpoint) -> StoredCheckpoint:
    """Return the checkpoint to serve, with cosignatures; ``newest`` if there are none."""
    signed_at = newest.checkpoint.signed_at
    complete = now_of(connection) - COSIGNING_TIME
    chosen: Any = None
    for row in connection.execute(_COSIGNED).all():
        if signed_at is None or row.signed_at < signed_at - MAX_COSIGNED_AGE:
            break
        if chosen is None or row.rank > chosen.rank:
            chosen = row
        if row.rank > 1 and row.signed_at <= complete:
            break
    return newest if chosen is None else _with_lines(connection, chosen.id)


def find_cosigned_before(
    connection: Connection, leaf_index: int, since: datetime
) -> StoredCheckpoint | None:
    """Return a checkpoint with that leaf that was cosigned before ``since``, if any."""
    first = select(func.min(log_checkpoints.c.id)).where(log_checkpoints.c.tree_size > leaf_index)
    query = (
        select(_ID)
        .where(first.scalar_subquery() <= _ID, log_cosignatures.c.cosigned_at < since)
        .group_by(_ID)
        .order_by(_RANK.desc(), _ID)
        .limit(1)
    )
    chosen = connection.execute(query).scalar()
    return None if chosen is None else _with_lines(connection, chosen)


def revoked_since(connection: Connection, key_id: str) -> datetime | None:
    """Return the time from which a published keyset revokes the key."""
    query = select(func.min(revoked_keys.c.since)).where(revoked_keys.c.key_id == key_id)
    since: datetime | None = connection.execute(query).scalar_one()
    return since


def _with_lines(connection: Connection, checkpoint_id: int) -> StoredCheckpoint:
    query = select(log_checkpoints.c.note, signing_keys.c.record).join(signing_keys)
    row = connection.execute(query.where(log_checkpoints.c.id == checkpoint_id)).one()
    lines = connection.execute(
        select(log_cosignatures.c.line)
        .where(log_cosignatures.c.checkpoint_id == checkpoint_id)
        .order_by(log_cosignatures.c.witness)
    ).scalars()
    return open_stored(row.note + "".join(lines), row.record)


# ---- leaves without a salt -----------------------------------------------------------

_LAST_UNSALTED = (
    select(func.max(log_leaves.c.leaf_index))
    .join(log_entries)
    .where(log_leaves.c.leaf_index.between(bindparam("start"), bindparam("end")))
    .where(log_entries.c.salt.is_(None), log_entries.c.kind.not_in(UNSALTED_KINDS))
)
_SALTED_FROM: WeakKeyDictionary[Pool, tuple[int, int]] = WeakKeyDictionary()
"""For each database, the number of leaves that were read, and the index after the last unsalted."""


def salted_from(connection: Connection) -> int:
    """Return the index from which on the log's leaves hide their entries; 0 in a new log.

    Entries of databases before revision 0027 have no salt. Each process reads each leaf once.
    """
    size = _size(connection)
    read, first = _SALTED_FROM.get(connection.engine.pool, (0, 0))
    if size > read:
        bounds = {"start": read, "end": size - 1}
        last = connection.execute(_LAST_UNSALTED, bounds).scalar_one()
        first = first if last is None else last + 1
        _SALTED_FROM[connection.engine.pool] = size, first
    return first


# ---- tiles ---------------------------------------------------------------------------


def tile_hashes(engine: Engine, level: int, number: int, width: int) -> bytes:
    """Return the first ``width`` hashes of a tile; raises ``NotLogged`` if there are fewer."""
    with reader(engine).connect() as connection:
        first = _first(_size(connection) >> (merkle_tree.TILE_HEIGHT * level), number, width)
        tile = [
            merkle_tree.Place(merkle_tree.TILE_HEIGHT * level, first + item)
            for item in range(width)
        ]
        hashes = read_hashes(connection, tile)
        return b"".join(hashes[place] for place in tile)


def tile_entries(engine: Engine, number: int, width: int) -> bytes:
    """Return the first ``width`` entries below a tile of level 0.

    Raises ``NotLogged``, and ``BadTile`` for entries that do not fit into a tile.
    """
    with reader(engine).connect() as connection:
        first = _first(_size(connection), number, width)
        query = (
            select(log_entries.c.content, log_entries.c.salt)
            .join(log_leaves)
            .where(log_leaves.c.leaf_index.between(first, first + width - 1))
            .order_by(log_leaves.c.leaf_index)
        )
        rows = connection.execute(query).all()
    return merkle_tree.encode_entries(leaf_content(content, salt) for content, salt in rows)


def _size(connection: Connection) -> int:
    newest = last_checkpoint(connection)
    return 0 if newest is None else newest.checkpoint.size


def _first(available: int, number: int, width: int) -> int:
    first = number * merkle_tree.TILE_WIDTH
    if not 0 < width <= merkle_tree.TILE_WIDTH or first + width > available:
        raise NotLogged("the log is not that long yet")
    return first
