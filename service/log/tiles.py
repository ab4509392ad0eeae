"""The log's tiles, read from the tables of its tree.

Whoever follows the log verifies them against a signed checkpoint; nothing is verified here.
"""

from __future__ import annotations

from sqlalchemy import Connection, Engine, select

from affidavit.certificate.log import (
    TILE_HEIGHT,
    TILE_WIDTH,
    Place,
    encode_entries,
)
from affidavit.service.database import reader
from affidavit.service.log.log_tables import log_entries, log_leaves
from affidavit.service.log.stored_tree import NotLogged, last_checkpoint, read_hashes


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
        raise NotLogged("the log does not have so much yet")
    return first
