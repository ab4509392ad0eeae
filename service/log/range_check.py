"""A stretch of the log, hashed again from its contents up to the signed root.

The entries' own bytes are hashed, not the hashes that are stored for them; for all that
stands outside the stretch the stored hashes of whole subtrees are taken. Only if every byte
of the stretch is what was logged does that lead to the root of the newest checkpoint, whose
signature is checked too: a change of an entry, of its order or of any hash on the way up
leads somewhere else.

References: RFC 9162, 2.1.1 (Merkle tree hash).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import Connection, select

from affidavit.certificate.log import Place, Range, assemble, leaf_hash, node_hash, places
from affidavit.service.log.stored_tree import Kept, hashes, last_checkpoint
from affidavit.service.log.tables import log_entries, log_leaves

MOST = 5000
"""Entries that are hashed at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeChecked:
    """Entries ``start`` to ``end``, both included, held to the checkpoint of ``size`` leaves.

    ``altered`` are those whose bytes are not what their stored hash says, ``missing`` those
    that are gone; ``proved`` says that the whole stretch leads to the signed root.
    """

    start: int
    end: int
    size: int
    root: str
    signed_at: datetime | None
    proved: bool
    altered: tuple[int, ...]
    missing: tuple[int, ...]


def check_range(connection: Connection, start: int, end: int) -> RangeChecked:
    """Hash entries ``start`` to ``end`` again, at most ``MOST`` of them.

    Raises ``ValueError`` for a stretch that the newest checkpoint does not have, and
    ``LogDamaged`` where the stored tree itself contradicts the checkpoint.
    """
    kept = last_checkpoint(connection)
    size = 0 if kept is None else kept.checkpoint.size
    if kept is None or not 0 <= start <= end < size:
        raise ValueError(f"the newest checkpoint has entries 0 to {size - 1}")
    end = min(end, start + MOST - 1)
    leaves, altered = _leaves(connection, start, end)
    missing = tuple(index for index in range(start, end + 1) if index not in leaves)
    return RangeChecked(
        start=start,
        end=end,
        size=size,
        root=kept.checkpoint.root_hash.hex(),
        signed_at=kept.checkpoint.signed_at,
        proved=not missing and _root(connection, kept, leaves, start, end + 1),
        altered=tuple(altered),
        missing=missing,
    )


def _leaves(connection: Connection, start: int, end: int) -> tuple[dict[int, bytes], list[int]]:
    """The leaves hashed again, and those that are not what is stored for them."""
    query = (
        select(log_leaves.c.leaf_index, log_leaves.c.leaf_hash, log_entries.c.content)
        .join(log_entries)
        .where(log_leaves.c.leaf_index.between(start, end))
    )
    found, altered = {}, []
    for index, stored, content in connection.execute(query):
        found[index] = leaf_hash(content.encode())
        if found[index] != bytes(stored):
            altered.append(index)
    return found, sorted(altered)


def _root(
    connection: Connection, kept: Kept, leaves: Mapping[int, bytes], start: int, end: int
) -> bool:
    """Whether the tree over ``leaves`` and the stored rest has the signed root."""
    whole = Range(0, kept.checkpoint.size)
    outside = list(_outside(whole, start, end))
    stored = hashes(connection, [place for part in outside for place in places(part)])
    return _hash(whole, leaves, stored, start, end) == kept.checkpoint.root_hash


def _outside(part: Range, start: int, end: int) -> Iterator[Range]:
    """The largest subtrees without a leaf from ``start`` to ``end``."""
    if part.end <= start or part.start >= end:
        yield part
    elif part.end - part.start > 1:
        for half in _halves(part):
            yield from _outside(half, start, end)


def _hash(
    part: Range,
    leaves: Mapping[int, bytes],
    stored: Mapping[Place, bytes],
    start: int,
    end: int,
) -> bytes:
    if part.end <= start or part.start >= end:
        return assemble([part], stored)[0]
    if part.end - part.start == 1:
        return leaves[part.start]
    left, right = (_hash(half, leaves, stored, start, end) for half in _halves(part))
    return node_hash(left, right)


def _halves(part: Range) -> tuple[Range, Range]:
    middle = part.start + (1 << ((part.end - part.start - 1).bit_length() - 1))
    return Range(part.start, middle), Range(middle, part.end)
