"""Run records as workers send them, part by part, under the token that the run is held by.

A part follows the part before it and never changes; said again alike, it is taken as said.
"""

from __future__ import annotations

import zlib

from sqlalchemy import Connection, func, insert, select

from affidavit.service.runs.refusals import RecordRefused
from affidavit.service.runs.run_tables import run_records

LARGEST = 256 * 1024 * 1024
"""Bytes of a record that is held against its certificate here; some 10^5 steps have half of it."""


def keep(connection: Connection, run_id: str, fence: int, part: int, content: bytes) -> None:
    """Keep a part of a record; raises ``RecordRefused``."""
    where = (run_records.c.run_id == run_id, run_records.c.fence == fence)
    parts, length = connection.execute(
        select(func.count(), func.coalesce(func.sum(run_records.c.length), 0)).where(*where)
    ).one()
    if part <= parts:
        said = select(run_records.c.content).where(*where, run_records.c.part == part)
        if zlib.decompress(connection.execute(said).scalar_one()) != content:
            raise RecordRefused(
                f"part {part} of the record was sent before, and was another.",
                "A part is sent again only as it was.",
            )
        return
    if part != parts + 1:
        raise RecordRefused(f"part {part} came and {parts + 1} is due.", "Send them in order.")
    if length + len(content) > LARGEST:
        raise RecordRefused(
            f"the record has more than {LARGEST} bytes.",
            "Report the run without it; it is charged in full.",
        )
    connection.execute(
        insert(run_records).values(
            run_id=run_id,
            fence=fence,
            part=part,
            content=zlib.compress(content),
            length=len(content),
        )
    )


def kept(connection: Connection, run_id: str) -> dict[int, list[bytes]]:
    """The parts of every record of a run, by fencing token, compressed as they are kept."""
    columns = (run_records.c.fence, run_records.c.content)
    query = select(*columns).where(run_records.c.run_id == run_id)
    found: dict[int, list[bytes]] = {}
    for fence, content in connection.execute(
        query.order_by(run_records.c.fence, run_records.c.part)
    ):
        found.setdefault(fence, []).append(bytes(content))
    return found
