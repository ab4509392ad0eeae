"""A small draw of ``bench/scale.py``: its workers do what workers do, and it counts right."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, Table
from starlette.concurrency import run_in_threadpool

from affidavit.service.log.audit import audit, snapshot
from affidavit.service.pool import AccountingPool
from affidavit.service.tables import metadata

ROOT = Path(__file__).parents[3]
RUNS, WORKERS = 24, 12
COPIES = 200
MANY = 300
"""Rows that may be touched of tables with thousands: a few pages of a list."""

COPIED = """
SET LOCAL session_replication_role = replica;
CREATE TEMPORARY TABLE copies ON COMMIT DROP AS
    SELECT id, number, gen_random_uuid()::text AS new, gen_random_uuid()::text AS reserved
    FROM runs, generate_series(1, {copies}) AS number;
INSERT INTO reservations SELECT {reservations}
    FROM copies JOIN runs ON runs.id = copies.id
    JOIN reservations AS row ON row.id = runs.reservation_id;
INSERT INTO run_events SELECT {run_events}
    FROM copies JOIN run_events AS row ON row.run_id = copies.id;
INSERT INTO run_leases SELECT {run_leases}
    FROM copies JOIN run_leases AS row ON row.run_id = copies.id;
INSERT INTO runs SELECT {runs} FROM copies JOIN runs AS row ON row.id = copies.id;
"""
LATER = "row.requested_at + number * interval '1 millisecond'"
OWN = {
    "reservations": {"id": "reserved"},
    "run_events": {"run_id": "new"},
    "run_leases": {"run_id": "new", "requested_at": LATER},
    "runs": {"id": "new", "reservation_id": "reserved", "requested_at": LATER},
}
"""What a copy of a run has of its own."""


async def here(_pool: Any, work: Any, *given: Any, **named: Any) -> Any:
    return await run_in_threadpool(work, *given, **named)


@pytest.fixture
def scale(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The benchmark, which no test but this imports; its accounting is done in this process."""
    monkeypatch.syspath_prepend(ROOT)
    monkeypatch.setattr(AccountingPool, "run", here)
    result = import_module("bench.scale")
    monkeypatch.setattr(result, "DATASETS", 2)
    return result


def copied(engine: Engine, tables: Mapping[str, Table]) -> None:
    """Have ``COPIES`` of each run wait behind it; they have no budget, so none may begin."""
    columns = {
        name: ", ".join(
            own.get(column.name, f"row.{column.name}") for column in tables[name].columns
        )
        for name, own in OWN.items()
    }
    with engine.begin() as connection:
        for statement in COPIED.format(copies=COPIES, **columns).split(";"):
            if statement.strip():
                connection.exec_driver_sql(statement)
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.exec_driver_sql("ANALYZE")


def test_nothing_reads_the_queue_through(scale: Any, postgresql_url: str, tmp_path: Path) -> None:
    with scale.place(postgresql_url, tmp_path) as at:
        scale.simulated.requesting(replace(at.share(), runs=range(RUNS)))
        copied(at.engine, metadata.tables)
        result = scale.queue_reads(at.share())
        large = scale.large_tables(at.engine, scale.SMALL)
        at.engine.dispose()
    assert {"run_events", "run_leases", "runs"} <= large
    worst = result.pop("claim, none fits")
    assert max(one.touched for one in worst) >= RUNS * COPIES  # so it is seen if it is read
    assert {"claim", "start", "renew", "record", "complete", "list, queued"} <= set(result)
    for what, item in result.items():
        for one in item:
            assert not one.scanned & large, (what, one)
            assert one.touched < MANY, (what, one)


def test_simulated_workers_do_each_run_once(
    scale: Any, postgresql_url: str, tmp_path: Path
) -> None:
    simulated = scale.simulated
    with scale.place(postgresql_url, tmp_path) as at:
        plain = at.share()
        with scale.load(at.engine) as done:
            requested = simulated.requesting(replace(plain, runs=range(RUNS)))
            worked = simulated.working(replace(plain, workers=range(WORKERS), training=0.1))
        idle = simulated.idling(replace(plain, workers=range(WORKERS), seconds=0.5))
        scale.until_logged(at.engine, at.url, at.home)
        scale.require_each_once(at.engine, RUNS)
        with pytest.raises(SystemExit, match="not each once"):
            scale.require_each_once(at.engine, RUNS + 1)
        with snapshot(at.engine) as connection:
            assert list(audit(connection, [], lambda *_: None)) == []
        names = {table.name for table in scale.tables(at.engine)}
        at.engine.dispose()
    assert [what for what, _, _ in requested] == ["request"] * RUNS
    counts = {what: [item[0] for item in worked].count(what) for what in ("claim", "complete")}
    assert counts == {"claim": RUNS + WORKERS, "complete": RUNS}
    assert {what for what, _, _ in idle} == {"claim"}
    claims = [left for left, _ in scale.waiting(sorted(worked, key=lambda one: one[1]), RUNS)]
    assert claims == [*range(RUNS, 0, -1)] + [0] * WORKERS
    assert done.counted["inserted"] > 20 * RUNS
    assert done.processor > 0
    assert {"runs", "run_events", "ledger_events"} <= names
