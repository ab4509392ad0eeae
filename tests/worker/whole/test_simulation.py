"""A small draw of ``bench/scale.py``: its workers do what workers do, and it counts right."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from starlette.concurrency import run_in_threadpool

from affidavit.service.log.audit import audit, one_state
from affidavit.service.pool import AccountingPool

ROOT = Path(__file__).parents[3]
RUNS, WORKERS = 24, 12


async def here(_pool: Any, work: Any, *given: Any, **named: Any) -> Any:
    return await run_in_threadpool(work, *given, **named)


@pytest.fixture
def scale(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The benchmark, which no test but this imports; its accounting is done in this process."""
    monkeypatch.syspath_prepend(ROOT)
    monkeypatch.setattr(AccountingPool, "run", here)
    found = import_module("bench.scale")
    monkeypatch.setattr(found, "DATASETS", 2)
    return found


def test_simulated_workers_do_each_run_once(
    scale: Any, postgresql_url: str, tmp_path: Path
) -> None:
    simulated = scale.simulated
    with scale.place(postgresql_url, tmp_path) as at:
        plain = simulated.Share(url=at.url, home=at.home, certificates=at.certificates)
        with scale.load(at.engine) as done:
            asked = simulated.requesting(replace(plain, runs=range(RUNS)))
            worked = simulated.working(replace(plain, workers=range(WORKERS), training=0.1))
        idle = simulated.idling(replace(plain, workers=range(WORKERS), seconds=0.5))
        scale.until_logged(at.engine, at.url, at.home)
        scale.require_each_once(at.engine, RUNS)
        with pytest.raises(SystemExit, match="not each once"):
            scale.require_each_once(at.engine, RUNS + 1)
        with one_state(at.engine) as connection:
            assert list(audit(connection, [], lambda *_: None)) == []
        names = {each.name for each in scale.tables(at.engine)}
        at.engine.dispose()
    assert [what for what, _, _ in asked] == ["request"] * RUNS
    counts = {what: [each[0] for each in worked].count(what) for what in ("claim", "complete")}
    assert counts == {"claim": RUNS + WORKERS, "complete": RUNS}
    assert {what for what, _, _ in idle} == {"claim"}
    claims = [left for left, _ in scale.waiting(sorted(worked, key=lambda one: one[1]), RUNS)]
    assert claims == [*range(RUNS, 0, -1)] + [0] * WORKERS
    assert done.counted["inserted"] > 20 * RUNS
    assert done.processor > 0
    assert {"runs", "run_events", "ledger_events"} <= names
