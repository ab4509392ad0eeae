"""A claim does little, however much waits: it takes the head of the queue by an index, without
sorting what is behind it, and takes back a few at most of the leases that ran out."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any

import pytest
from sqlalchemy import Engine, event

from affidavit.service.database import open_engine
from affidavit.service.runs import queue
from affidavit.service.runs.queue import RunQueue
from affidavit.worker import ClaimRequest
from tests.service.runs.conftest import Yard

ASKED = ClaimRequest(queue="default", worker="w", seconds=60, gpu=False, memory_mib=0)


def asked_for(engine: Engine) -> tuple[str, Any]:
    """The statement by which a claim looks for a run, and its parameters."""
    result: list[tuple[str, Any]] = []

    def look(_connection: Any, _cursor: Any, statement: str, given: Any, *_: Any) -> None:
        if "ORDER BY run_leases.priority DESC" in statement:
            result.append((statement, given))

    event.listen(engine, "before_cursor_execute", look)
    assert RunQueue(engine).claim(ASKED, "w", datetime.now(UTC)) is None
    event.remove(engine, "before_cursor_execute", look)
    return result[0]


def test_a_claim_reads_the_queue_in_the_order_of_an_index(database_url: str) -> None:
    engine = open_engine(database_url)
    statement, provided = asked_for(engine)
    with engine.connect() as connection:
        if engine.dialect.name == "postgresql":
            # An empty table is sorted in no time, so that alone would be no reason against it.
            for way in ("sort", "incremental_sort", "seqscan", "bitmapscan"):
                connection.exec_driver_sql(f"SET LOCAL enable_{way} = off")
            rows = connection.exec_driver_sql(f"EXPLAIN {statement}", provided)
            plan = "\n".join(row[0] for row in rows)
        else:
            rows = connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", provided)
            plan = "\n".join(row[-1] for row in rows)
    engine.dispose()
    assert "run_leases_next" in plan
    assert "Sort" not in plan
    assert "TEMP B-TREE" not in plan


def test_leases_that_ran_out_are_taken_back_a_few_at_a_time_and_each_once(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate = yard.certify()
    runs = [yard.request(certificate).json() for _ in range(7)]
    for _ in runs:
        yard.claim()
    monkeypatch.setattr(queue, "MOST_REAPED", 2)
    assert yard.later(30) == 0
    assert yard.later(61) == 2
    with ThreadPoolExecutor(4) as pool:
        taken = list(pool.map(lambda _: yard.later(61), range(4)))
    assert max(taken) <= 2
    assert sum(taken) == 5
    assert yard.later(61) == 0
    for run in runs:
        assert [item["kind"] for item in yard.events(run)] == ["queued", "claimed", "requeued"]
