"""Many short runs: a service that is asked often, and workers whose training is stubbed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import Engine, text

from affidavit.service.audit.audit import audit
from affidavit.service.core.database import open_engine, snapshot
from tests.support.polling import TIMEOUT_SECONDS
from tests.worker.conftest import Shop

STEPS = 4


@dataclass
class Crowd:
    """A shop with many runs in it, and what is found in its database afterwards."""

    shop: Shop
    client: httpx.Client
    engine: Engine
    trace: Path

    def request(self, certificate: str, **more: Any) -> str:
        body = {"certificate": certificate, "data": "digits", "model": "mlp:8", "output": "o"}
        headers = {"authorization": f"Bearer {self.shop.tokens['submit']}"}
        url = f"{self.shop.server.url}/v1/runs"
        answer = self.client.post(url, json={**body, **more}, headers=headers)
        assert answer.status_code == 201, answer.text
        return str(answer.json()["id"])

    def workers(self, count: int, *options: str) -> None:
        for number in range(count):
            name, module = f"w{number}", "tests.worker.stubbed_worker"
            self.shop.worker(*options, name=name, module=module)

    def wait(self, seconds: float = TIMEOUT_SECONDS) -> None:
        """Until every worker has found that nothing waits."""
        for process in self.shop.workers:
            assert process.wait(seconds) == 0, self.shop.logs()

    def rows(self, query: str, **given: Any) -> list[Any]:
        with self.engine.connect() as connection:
            return list(connection.execute(text(query), given))

    def trained(self) -> list[dict[str, Any]]:
        """What the stub wrote of every training."""
        return [json.loads(line) for line in self.trace.read_text().splitlines()]

    def happened(self) -> dict[str, list[str]]:
        """What happened to each run after it was queued."""
        result: dict[str, list[str]] = {}
        query = "SELECT run_id, kind FROM run_events ORDER BY run_id, seq"
        for run, kind in self.rows(query):
            result.setdefault(run, []).append(kind)
        return {run: kinds[1:] for run, kinds in result.items()}

    def require_each_once(self, runs: list[str]) -> None:
        """Every run was begun, trained, settled and charged once, and the log agrees."""
        happened = self.happened()
        ends = [kinds[-3:] for kinds in happened.values()]
        assert ends == [["claimed", "running", "settled"]] * len(runs), (happened, self.shop.logs())
        assert sorted(happened) == sorted(runs)
        # Claimed, and the answer was lost with the service: it waits again when the lease ends.
        before = {kind for kinds in happened.values() for kind in kinds[:-3]}
        assert before <= {"claimed", "requeued"}
        assert sorted(item["run"] for item in self.trained()) == sorted(runs)
        settled = "SELECT reservation_id, steps_run FROM ledger_events WHERE kind = 'settle'"
        reserved = self.rows("SELECT reservation_id FROM runs")
        assert sorted(self.rows(settled)) == sorted((one, STEPS) for (one,) in reserved)
        with snapshot(self.engine) as connection:
            assert list(audit(connection, [])) == []


@pytest.fixture
def trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the stub writes to; the processes that are started after know."""
    monkeypatch.setenv("STUB_TRACE", str(tmp_path / "trace"))
    monkeypatch.setenv("STUB_SECONDS", "0.02")
    monkeypatch.setenv("AFFIDAVIT_RATE_LIMIT", "1000000")
    return tmp_path / "trace"


@pytest.fixture
def crowd(trace: Path, shop: Shop) -> Iterator[Crowd]:
    engine = open_engine(shop.database)
    with httpx.Client(timeout=TIMEOUT_SECONDS) as client:
        yield Crowd(shop, client, engine, trace)
    engine.dispose()
