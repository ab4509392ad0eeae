"""Accounting that does not end, dies or fails: the service goes on."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
from fastapi.testclient import TestClient

from affidavit.service.core import pool
from affidavit.service.settings import Settings
from tests.support.polling import TIMEOUT_SECONDS

LIMIT = 0.5
LONG = 120.0

Post = Callable[..., Any]
Plan = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module", autouse=True)
def accounting() -> None:
    """Accounting in processes."""


@pytest.fixture
def client(settings: Settings, slow: ModuleType, client_of: Any) -> Iterator[TestClient]:
    """A client of a service whose workers were started when the stand-ins were importable."""
    assert slow.__file__
    with client_of(replace(settings, time_limit=TIMEOUT_SECONDS)) as result:
        yield result


@contextmanager
def runaway(client: Any, certify: Callable[..., Any], limit: float = LIMIT) -> Iterator[None]:
    """Account by ``certify``, for at most ``limit`` seconds; others have as long as they take."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool, "certify", certify)
        patch.setattr(client.app.state.services.pool, "time_limit", limit)
        yield


@pytest.mark.ordinary("spin")
@pytest.mark.parametrize("how", ["sleep", "spin"])
def test_a_runaway_is_killed_and_nothing_is_kept(
    client: TestClient, slow: ModuleType, plan: Plan, post: Post, how: str
) -> None:
    with runaway(client, getattr(slow, how)):
        start = time.monotonic()
        answer = post(client, plan())
        took = time.monotonic() - start
    assert answer.status_code == 503
    assert answer.json()["code"] == "accounting_timeout"
    assert "AFFIDAVIT_TIME_LIMIT" in answer.json()["detail"]
    assert LIMIT <= took < TIMEOUT_SECONDS
    assert client.get("/v1/certificates").json()["items"] == []
    assert post(client, plan()).status_code == 201


def test_callers_that_wait_for_a_runaway_all_get_its_outcome(
    client: TestClient, slow: ModuleType, plan: Plan, post: Post
) -> None:
    answers: list[Any] = []
    with runaway(client, slow.sleep):
        callers = [
            threading.Thread(target=lambda: answers.append(post(client, plan()))) for _ in range(4)
        ]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
    assert {answer.json()["code"] for answer in answers} == {"accounting_timeout"}
    assert len(answers) == 4


def test_liveness_answers_while_accounting(
    client: TestClient, slow: ModuleType, plan: Plan, post: Post
) -> None:
    with runaway(client, slow.spin, 4 * LIMIT):
        accounting = client.app.state.services.pool  # type: ignore[attr-defined]
        caller = threading.Thread(target=post, args=(client, plan()))
        caller.start()
        while accounting.unanswered == 0:
            time.sleep(0.01)
        assert client.get("/livez").status_code == 200
        assert accounting.unanswered == 1  # and goes on
        caller.join()


def test_a_worker_that_dies_fails_its_plan_alone(
    client: TestClient, slow: ModuleType, plan: Plan, post: Post
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool, "certify", slow.die)
        answer = post(client, plan())
    assert answer.status_code == 503
    assert answer.json()["code"] == "accounting_failed"
    assert post(client, plan()).status_code == 201


def test_a_pool_that_broke_is_replaced(client: TestClient, plan: Plan, post: Post) -> None:
    services = client.app.state.services  # type: ignore[attr-defined]
    assert post(client, plan()).status_code == 201
    before = services.pool._ordinary._pool
    before.stop()
    assert post(client, plan(steps=11)).status_code == 201
    assert services.pool._ordinary._pool is not before


def test_what_is_drawn_leaves_a_process_to_what_certifies() -> None:
    async def answer() -> int:
        """Two drawings that take too long, and then what must not wait for them."""
        drawings = [asyncio.create_task(result.run_long(time.sleep, LONG)) for _ in range(2)]
        await asyncio.sleep(0)
        try:
            return await asyncio.wait_for(result.run(abs, -1), LONG / 2)
        finally:
            for drawing in drawings:
                drawing.cancel()

    result = pool.AccountingPool(2, LONG)
    try:
        assert asyncio.run(answer()) == 1
    finally:
        result.close()


def test_a_fault_of_ours_is_a_500_that_tells_nothing(
    client: TestClient, slow: ModuleType, plan: Plan, post: Post
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool, "certify", slow.fault)
        answer = post(client, plan())
    assert answer.status_code == 500
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.json()["code"] == "internal_error"
    assert "secret" not in answer.text
    assert "Traceback" not in answer.text
    assert post(client, plan()).status_code == 201


def test_too_many_waiting_are_turned_away(
    client: TestClient, plan: Plan, post: Post, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("affidavit.service.certificates.submit_plan.MAX_WAITING", 0)
    answer = post(client, plan())
    assert answer.status_code == 503
    assert answer.json()["code"] == "too_busy"
    assert int(answer.headers["retry-after"]) > 0
