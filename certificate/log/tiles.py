"""C2SP tlog-tiles: a log as files of 256 hashes, and of 256 entries, that never change.

A tile of level L and number N has the hashes of the perfect subtrees of 256^L leaves from N × 256
on, 32 bytes each. Its path is ``tile/L/N``, with N in groups of three digits, all but the last
after an ``x``: 1234067 is ``x001/x234/067``. A tile that is not full yet has the path of its width
W too, ``.p/W``. ``tile/entries/N`` has the entries below the tile of level 0, each after its
length in two bytes, big-endian.

>>> tile_path(0, 1234067), tile_path("entries", 3, 17)
('tile/0/x001/x234/067', 'tile/entries/003.p/17')

Reference: C2SP, tlog-tiles.md.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

from affidavit.certificate.log.tree import (
    HASH_BYTES,
    Place,
    ProofError,
    frontier_places,
    node_hash,
)

TILE_WIDTH = 256
TILE_HEIGHT = 8
LARGEST_ENTRY = 0xFFFF
_NUMBER = re.compile(r"((?:x[0-9]{3}/){0,5})([0-9]{3})(?:\.p/([1-9][0-9]{0,2}))?", re.ASCII)

ReadTile = Callable[[int, int, int], Sequence[bytes]]
"""The first hashes of a tile: level, number, and how many."""


class BadTile(Exception):
    """The path or the content is none of a tile."""


def tile_path(level: int | str, number: int, width: int = TILE_WIDTH) -> str:
    """The path of a tile, or of its entries where ``level`` is ``entries``."""
    digits = f"{number:03d}"
    digits = digits.zfill(-(-len(digits) // 3) * 3)
    groups = [digits[start : start + 3] for start in range(0, len(digits), 3)]
    name = "/".join([*(f"x{group}" for group in groups[:-1]), groups[-1]])
    return f"tile/{level}/{name}" + ("" if width == TILE_WIDTH else f".p/{width}")


def parse_tile_number(text: str) -> tuple[int, int]:
    """Number and width of what follows the level in a tile's path; raises ``BadTile``."""
    match = _NUMBER.fullmatch(text)
    if match is None:
        raise BadTile("the path is not that of a tile")
    number = int(match[1].replace("x", "").replace("/", "") + match[2])
    width = int(match[3] or TILE_WIDTH)
    if tile_path("", number, width) != f"tile//{text}":
        raise BadTile("the path is not that of a tile")
    return number, width


def encode_entries(entries: Iterable[bytes]) -> bytes:
    """The content of ``tile/entries/N``; raises ``BadTile`` for an entry that is too long."""
    parts = []
    for entry in entries:
        if len(entry) > LARGEST_ENTRY:
            raise BadTile(f"an entry has {len(entry)} bytes, and {LARGEST_ENTRY} fit into a tile")
        parts.append(len(entry).to_bytes(2, "big") + entry)
    return b"".join(parts)


def decode_entries(content: bytes) -> list[bytes]:
    """The entries of a tile; raises ``BadTile``."""
    entries, start = [], 0
    while start < len(content):
        end = start + 2 + int.from_bytes(content[start : start + 2], "big")
        if start + 2 > len(content) or end > len(content):
            raise BadTile("the last entry is cut off")
        entries.append(content[start + 2 : end])
        start = end
    return entries


def decode_hashes(content: bytes) -> list[bytes]:
    """The hashes of a tile; raises ``BadTile``."""
    if len(content) % HASH_BYTES or len(content) > TILE_WIDTH * HASH_BYTES:
        raise BadTile(f"a tile is at most {TILE_WIDTH} hashes of {HASH_BYTES} bytes")
    return [content[at : at + HASH_BYTES] for at in range(0, len(content), HASH_BYTES)]


def frontier_hashes(size: int, read: ReadTile) -> list[bytes]:
    """The hashes of ``frontier_places(size)``, computed from the tiles of a log of that size.

    Raises ``ProofError`` for a tile that is shorter than it has to be.
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
