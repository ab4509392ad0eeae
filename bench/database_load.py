"""What PostgreSQL does while something runs: its processor time, its waits, its growth.

Processor time is that of the server and all its processes, from ``/proc``; the server must
run on this machine. Waits are looked at ``EVERY`` seconds: how many connections wait, in a
statement, and for what. Everything else comes from the server's own counters.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from sqlalchemy import Connection, Engine, text

EVERY = 0.2
COUNTERS = """
SELECT xact_commit AS commits, xact_rollback AS rollbacks, deadlocks, tup_inserted AS inserted,
       tup_updated AS updated, tup_fetched AS fetched, blks_read AS blocks_read,
       (pg_current_wal_insert_lsn() - '0/0'::pg_lsn)::bigint AS wal_bytes
FROM pg_stat_database WHERE datname = current_database()
"""
WAITS = """
SELECT CASE WHEN state = 'active' THEN COALESCE(wait_event_type || ' ' || wait_event, 'running')
       ELSE state END, count(*)
FROM pg_stat_activity
WHERE datname = current_database() AND pid <> pg_backend_pid() AND state <> 'idle'
GROUP BY 1
"""
TABLES = """
SELECT relname, pg_table_size(relid), pg_indexes_size(relid), n_live_tup, n_dead_tup,
       COALESCE(idx_scan, 0), seq_scan
FROM pg_stat_user_tables ORDER BY pg_total_relation_size(relid) DESC
"""


@dataclass
class Load:
    """What was counted between two moments; ``waits`` counts connections seen, by what for."""

    seconds: float = 0.0
    processor: float = 0.0
    counted: dict[str, int] = field(default_factory=dict)
    waits: Counter[str] = field(default_factory=Counter)
    looks: int = 0


@dataclass(frozen=True, slots=True)
class Table:
    """A table's size in bytes, its rows by the server's estimate, and how it was read so far."""

    name: str
    data: int
    indexes: int
    live: int
    dead: int
    by_index: int
    through: int


@contextmanager
def load(engine: Engine) -> Iterator[Load]:
    """What the server does while the block runs; complete when it has ended."""
    result, stop = Load(), threading.Event()

    def look() -> None:
        with engine.connect() as connection:
            while not stop.wait(EVERY):
                for wait, count in connection.execute(text(WAITS)):
                    result.waits[wait] += count
                result.looks += 1
                connection.rollback()

    with engine.connect() as connection:
        server = _server(connection)
        before = _counted(connection)
    began, spent = time.perf_counter(), processor_seconds(server)
    looking = threading.Thread(target=look)
    looking.start()
    try:
        yield result
    finally:
        stop.set()
        looking.join()
    result.seconds = time.perf_counter() - began
    result.processor = processor_seconds(server) - spent
    with engine.connect() as connection:
        after = _counted(connection)
    result.counted = {name: after[name] - before[name] for name in after}


def tables(engine: Engine) -> list[Table]:
    """All tables, the largest first."""
    with engine.connect() as connection:
        connection.execute(text("SELECT pg_stat_clear_snapshot()"))
        return [Table(*row) for row in connection.execute(text(TABLES))]


def processor_seconds(server: int) -> float:
    """Of the process ``server`` and all its children, living and ended."""
    spent = sum(_times(server))
    for item in Path("/proc").iterdir():
        if item.name.isdigit() and _parent(item) == server:
            spent += sum(_times(int(item.name))[:2])
    return spent


def _server(connection: Connection) -> int:
    backend = connection.execute(text("SELECT pg_backend_pid()")).scalar_one()
    return _parent(Path(f"/proc/{backend}"))


def _fields(process: Path) -> list[str]:
    try:
        return (process / "stat").read_text().rpartition(")")[2].split()
    except OSError:  # it has ended
        return []


def _parent(process: Path) -> int:
    result = _fields(process)
    return int(result[1]) if result else 0


def _times(pid: int) -> list[float]:
    """User and system time, then the same of the children that ended, in seconds."""
    ticks = os.sysconf("SC_CLK_TCK")
    return [int(item) / ticks for item in _fields(Path(f"/proc/{pid}"))[11:15]]


def _counted(connection: Connection) -> dict[str, int]:
    row = connection.execute(text(COUNTERS)).mappings().one()
    return {name: int(value) for name, value in row.items()}
