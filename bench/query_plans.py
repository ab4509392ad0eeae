"""Explain the SELECT statements of a workload, to find scans of whole PostgreSQL tables.

A sequential scan goes unnoticed in a small table, and takes seconds in a large one. Statements are
recorded while the workload runs and explained afterwards with their values (``EXPLAIN ANALYZE``),
each in a transaction that is rolled back.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Engine, event, text

Statement = tuple[str, Any]
"""SQL with its values."""

LARGE = "SELECT relname FROM pg_class WHERE relkind = 'r' AND reltuples > :rows"


@dataclass(frozen=True, slots=True)
class Reading:
    """What one statement reads: rows of its largest step, blocks, and tables."""

    sql: str
    touched: int
    blocks: int
    milliseconds: float
    scanned: frozenset[str]
    """Tables that were read through."""


@contextmanager
def noted(engine: Engine) -> Iterator[list[Statement]]:
    """Record the statements that read through ``engine`` in a block."""
    result: list[Statement] = []

    def note(_connection: Any, _cursor: Any, sql: str, values: Any, *_: Any) -> None:
        if sql.lstrip().upper().startswith(("SELECT", "WITH")):
            result.append((sql, values))

    event.listen(engine, "before_cursor_execute", note)
    try:
        yield result
    finally:
        event.remove(engine, "before_cursor_execute", note)


def explain(engine: Engine, statements: list[Statement], *, unless: str = "") -> list[Reading]:
    """Explain each distinct statement. ``unless`` is a setting to apply first."""
    different = {" ".join(sql.split()): (sql, values) for sql, values in statements}
    with engine.connect() as connection:
        result = []
        for short, (sql, values) in different.items():
            if unless:
                connection.exec_driver_sql(f"SET LOCAL {unless}")
            explained = f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {sql}"
            plan = connection.exec_driver_sql(explained, values).scalar_one()[0]
            result.append(_read(short, plan))
            connection.rollback()
        return result


def large_tables(engine: Engine, rows: int) -> frozenset[str]:
    """Return the tables with more rows, by the server's estimate."""
    with engine.connect() as connection:
        return frozenset(connection.execute(text(LARGE), {"rows": rows}).scalars())


def _read(sql: str, plan: dict[str, Any]) -> Reading:
    nodes = list(_nodes(plan["Plan"]))
    return Reading(
        sql=sql,
        touched=max(round(_touched(node)) for node in nodes),
        blocks=plan["Plan"]["Shared Hit Blocks"] + plan["Plan"]["Shared Read Blocks"],
        milliseconds=plan["Execution Time"],
        scanned=frozenset(
            node["Relation Name"] for node in nodes if node["Node Type"] == "Seq Scan"
        ),
    )


def _nodes(node: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield node
    for item in node.get("Plans", []):
        yield from _nodes(item)


def _touched(node: dict[str, Any]) -> float:
    removed = node.get("Rows Removed by Filter", 0) + node.get("Rows Removed by Join Filter", 0)
    return float((node["Actual Rows"] + removed) * node["Actual Loops"])
