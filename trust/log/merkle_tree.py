"""The Merkle tree of RFC 9162: hashes, proofs, their verification, and tiles.

A leaf's hash is ``SHA-256(0x00 || entry)``, an inner node's ``SHA-256(0x01 || left || right)``; the
prefixes keep a node from passing for a leaf. A tree of n leaves is split at the largest power of
two below n, so that every subtree except those on the right edge is perfect and never changes. A
perfect subtree is identified by its place: its level (0 is a leaf) and its position on the level.

A proof is built from places: ``inclusion_path`` and ``consistency_path`` return its ranges of
leaves, ``places`` the perfect subtrees of a range, about 2 log2 n in all, and ``assemble`` builds
the proof from their hashes, which the caller stores.

Verification recomputes roots from a proof alone and raises ``ProofError``: there is no boolean to
forget. A proof with too many or too few hashes, or of a place outside the tree, is refused. The
empty tree is the beginning of every other, so that its consistency proof is refused.

>>> leaves = [leaf_hash(bytes([each])) for each in range(5)]
>>> tree = Frontier()
>>> nodes = {place: found for each in leaves for place, found in tree.append(each)}
>>> proof = assemble(inclusion_path(3, 5), nodes)
>>> verify_inclusion(leaves[3], index=3, size=5, proof=proof, root=tree.root())
>>> verify_inclusion(leaves[3], index=2, size=5, proof=proof, root=tree.root())
Traceback (most recent call last):
affidavit.trust.log.merkle_tree.ProofError: the proof leads to a different root

Tiles are the files of a log, with 256 hashes or 256 entries, and never change. A tile of level L
and number N has the hashes of the perfect subtrees of 256^L leaves from N × 256 on, 32 bytes each.
Its path is ``tile/L/N``, with N in groups of three digits, all except the last after an ``x``:
1234067 is ``x001/x234/067``. The path of a partial tile ends in its width W, ``.p/W``.
``tile/entries/N`` has the entries below the tile of level 0, each after its length in two bytes,
big-endian.

>>> tile_path(0, 1234067), tile_path("entries", 3, 17)
('tile/0/x001/x234/067', 'tile/entries/003.p/17')

References: RFC 9162 (Certificate Transparency 2.0), sections 2.1.1 to 2.1.5; the tree is
that of RFC 6962, section 2.1; C2SP, tlog-tiles.md.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

HASH_BYTES = 32
EMPTY_ROOT = hashlib.sha256(b"").digest()
"""The root of the tree without leaves."""
MAX_LEAVES = 2**53 - 1
"""The largest size that JSON readers represent exactly."""


class ProofError(Exception):
    """The proof is invalid; the message says why."""


class Place(NamedTuple):
    """A perfect subtree, with ``2**level`` leaves from ``position * 2**level`` on."""

    level: int
    position: int


class Range(NamedTuple):
    """A subtree with the leaves ``start`` to ``end``, the latter excluded."""

    start: int
    end: int


def leaf_hash(entry: bytes) -> bytes:
    """Return the hash of a leaf with ``entry``."""
    return hashlib.sha256(b"\x00" + entry).digest()


def node_hash(left: bytes, right: bytes) -> bytes:
    """Return the hash of the node above two subtrees."""
    return hashlib.sha256(b"\x01" + left + right).digest()


# ---- a tree that grows -------------------------------------------------------------


class Frontier:
    """A tree's perfect subtrees from left to right, which suffice to append leaves.

    ``append`` computes one hash on average and log2 n at most.
    """

    def __init__(self, size: int = 0, hashes: Iterable[bytes] = ()) -> None:
        self.size = size
        self._hashes = list(hashes)
        if len(self._hashes) != size.bit_count():
            raise ValueError(f"a tree of {size} leaves has {size.bit_count()} perfect subtrees")

    def append(self, leaf: bytes) -> list[tuple[Place, bytes]]:
        """Add a leaf by its hash and return the new perfect subtrees, the leaf first."""
        created = [(Place(0, self.size), leaf)]
        position, level = self.size, 0
        while position & 1:
            leaf = node_hash(self._hashes.pop(), leaf)
            position, level = position >> 1, level + 1
            created.append((Place(level, position), leaf))
        self._hashes.append(leaf)
        self.size += 1
        return created

    def root(self) -> bytes:
        """Return the root hash of the current tree."""
        return _folded(self._hashes) if self._hashes else EMPTY_ROOT


def frontier_places(size: int) -> list[Place]:
    """Return the perfect subtrees of a tree of ``size`` leaves, left to right."""
    return places(Range(0, size))


def places(part: Range) -> list[Place]:
    """Return the perfect subtrees of a subtree, left to right."""
    start, result = part.start, []
    while start < part.end:
        level = (part.end - start).bit_length() - 1
        result.append(Place(level, start >> level))
        start += 1 << level
    return result


# ---- making proofs -----------------------------------------------------------------


def inclusion_path(index: int, size: int) -> list[Range]:
    """Return the ranges that prove leaf ``index`` of ``size``, from the leaf upwards (2.1.3.1).

    Raises ``ProofError`` if there is no such leaf.
    """
    if not 0 <= index < size:
        raise ProofError(f"a tree of {size} leaves has no leaf {index}")
    start, end, path = 0, size, []
    while end - start > 1:
        middle = start + _split(end - start)
        if index < middle:
            path.append(Range(middle, end))
            end = middle
        else:
            path.append(Range(start, middle))
            start = middle
    return path[::-1]


def consistency_path(first: int, second: int) -> list[Range]:
    """Return the ranges that prove that ``second`` leaves begin with ``first`` (2.1.4.1).

    Raises ``ProofError`` unless 0 < ``first`` <= ``second``.
    """
    if not 0 < first <= second:
        raise ProofError(f"there is no consistency proof from size {first} to size {second}")
    start, end, path = 0, second, []
    while first != end:
        middle = start + _split(end - start)
        if first <= middle:
            path.append(Range(middle, end))
            end = middle
        else:
            path.append(Range(start, middle))
            start = middle
    # If the first tree is a subtree of the second, the verifier has its root.
    own = [] if start == 0 else [Range(start, end)]
    return own + path[::-1]


def assemble(path: Iterable[Range], hashes: Mapping[Place, bytes]) -> list[bytes]:
    """Build the proof for ``path``; ``hashes`` has the hashes of all its ``places``."""
    return [_folded([hashes[place] for place in places(part)]) for part in path]


# ---- verifying proofs --------------------------------------------------------------


def verify_inclusion(
    leaf: bytes, *, index: int, size: int, proof: Sequence[bytes], root: bytes
) -> None:
    """Verify that the leaf with hash ``leaf`` is number ``index`` of the tree (RFC 9162, 2.1.3.2).

    Raises ``ProofError`` if the proof does not lead to ``root``; hashes have 32 bytes.
    """
    if not 0 <= index < size:
        raise ProofError(f"a tree of {size} leaves has no leaf {index}")
    _require_hashes(leaf, root, *proof)
    _, result = _climb(index, size - 1, leaf, proof)
    if result != root:
        raise ProofError("the proof leads to a different root")


def verify_consistency(
    *, first: int, second: int, first_root: bytes, second_root: bytes, proof: Sequence[bytes]
) -> None:
    """Verify that the tree of ``second`` leaves begins with that of ``first`` (RFC 9162, 2.1.4.2).

    Raises ``ProofError`` if the proof does not lead to both roots; hashes have 32 bytes.
    """
    if not 0 < first <= second:
        raise ProofError(f"nothing can be proved from size {first} to size {second}")
    _require_hashes(first_root, second_root, *proof)
    if first == second:
        if proof:
            raise ProofError("the proof is too long")
        if first_root != second_root:
            raise ProofError("two trees of the same size have different roots")
        return
    below, last = first - 1, second - 1
    while below & 1:
        below, last = below >> 1, last >> 1
    # The verifier has the root of a first tree that is a subtree of the second.
    path = [first_root, *proof] if first & (first - 1) == 0 else list(proof)
    if not path:
        raise ProofError("the proof is too short")
    old, new = _climb(below, last, path[0], path[1:])
    if old != first_root:
        raise ProofError("the proof is not of the first tree")
    if new != second_root:
        raise ProofError("the proof does not lead to the second tree")


def _climb(position: int, last: int, start: bytes, proof: Sequence[bytes]) -> tuple[bytes, bytes]:
    """Fold ``proof`` onto the node ``start`` at ``position`` of a level that ends at ``last``.

    Returns the root of the tree that ends with the node and that of the whole tree.
    """
    old = new = start
    for item in proof:
        if last == 0:
            raise ProofError("the proof is too long")
        if position & 1 or position == last:
            old, new = node_hash(item, old), node_hash(item, new)
            while position and not position & 1:
                position, last = position >> 1, last >> 1
        else:
            new = node_hash(new, item)
        position, last = position >> 1, last >> 1
    if last != 0:
        raise ProofError("the proof is too short")
    return old, new


def _require_hashes(*hashes: bytes) -> None:
    if any(len(hash_) != HASH_BYTES for hash_ in hashes):
        raise ProofError(f"a hash does not have {HASH_BYTES} bytes")


def _split(size: int) -> int:
    """Return the largest power of two below ``size``."""
    return 1 << ((size - 1).bit_length() - 1)


def _folded(hashes: Sequence[bytes]) -> bytes:
    result = hashes[-1]
    for hash_ in reversed(hashes[:-1]):
        result = node_hash(hash_, result)
    return result


TILE_WIDTH = 256
TILE_HEIGHT = 8
MAX_ENTRY_BYTES = 0xFFFF
_NUMBER = re.compile(r"((?:x[0-9]{3}/){0,5})([0-9]{3})(?:\.p/([1-9][0-9]{0,2}))?", re.ASCII)

ReadTile = Callable[[int, int, int], Sequence[bytes]]
"""A function that reads the first hashes of a tile: level, number, and count."""


class BadTile(Exception):
    """The path or the content of a tile is malformed."""


def tile_path(level: int | str, number: int, width: int = TILE_WIDTH) -> str:
    """Return the path of a tile, or of its entries if ``level`` is ``entries``."""
    digits = f"{number:03d}"
    digits = digits.zfill(-(-len(digits) // 3) * 3)
    groups = [digits[start : start + 3] for start in range(0, len(digits), 3)]
    name = "/".join([*(f"x{group}" for group in groups[:-1]), groups[-1]])
    return f"tile/{level}/{name}" + ("" if width == TILE_WIDTH else f".p/{width}")


def parse_tile_number(text: str) -> tuple[int, int]:
    """Parse the number and width in a tile's path, after the level; raises ``BadTile``."""
    match = _NUMBER.fullmatch(text)
    if match is None:
        raise BadTile("the path is not a tile path")
    number = int(match[1].replace("x", "").replace("/", "") + match[2])
    width = int(match[3] or TILE_WIDTH)
    if tile_path("", number, width) != f"tile//{text}":
        raise BadTile("the path is not a tile path")
    return number, width


def encode_entries(entries: Iterable[bytes]) -> bytes:
    """Return the content of ``tile/entries/N``; raises ``BadTile`` if an entry is too long."""
    parts = []
    for entry in entries:
        if len(entry) > MAX_ENTRY_BYTES:
            raise BadTile(f"an entry has {len(entry)} bytes, and {MAX_ENTRY_BYTES} fit into a tile")
        parts.append(len(entry).to_bytes(2, "big") + entry)
    return b"".join(parts)


def decode_entries(content: bytes) -> list[bytes]:
    """Parse the entries of a tile; raises ``BadTile``."""
    entries, start = [], 0
    while start < len(content):
        end = start + 2 + int.from_bytes(content[start : start + 2], "big")
        if start + 2 > len(content) or end > len(content):
            raise BadTile("the last entry is cut off")
        entries.append(content[start + 2 : end])
        start = end
    return entries


def decode_hashes(content: bytes) -> list[bytes]:
    """Parse the hashes of a tile; raises ``BadTile``."""
    if len(content) % HASH_BYTES or len(content) > TILE_WIDTH * HASH_BYTES:
        raise BadTile(f"a tile is at most {TILE_WIDTH} hashes of {HASH_BYTES} bytes")
    return [content[at : at + HASH_BYTES] for at in range(0, len(content), HASH_BYTES)]


def frontier_hashes(size: int, read: ReadTile) -> list[bytes]:
    """Compute the hashes of ``frontier_places(size)`` from the tiles of a log of that size.

    Raises ``ProofError`` if a tile is too short.
    """
    return [_hash_at(place, size, read) for place in frontier_places(size)]


def _hash_at(place: Place, size: int, read: ReadTile) -> bytes:
    level, above = divmod(place.level, TILE_HEIGHT)
    first = place.position << above
    number, start = divmod(first, TILE_WIDTH)
    width = min(TILE_WIDTH, (size >> (TILE_HEIGHT * level)) - number * TILE_WIDTH)
    hashes = list(read(level, number, width))[start : start + (1 << above)]
    if len(hashes) != 1 << above:
        raise ProofError(f"the tile of level {level} and number {number} is too short")
    while len(hashes) > 1:
        pairs = zip(hashes[::2], hashes[1::2], strict=True)
        hashes = [node_hash(left, right) for left, right in pairs]
    return hashes[0]
