"""Long plans: 202 and a status to poll; and whoever hangs up takes their accounting with them."""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import select

from affidavit.plan import plan_from
from affidavit.replay.process_limits import processor_time_of
from affidavit.service.certificates import certifications
from affidavit.service.certificates.certifications import Certifications
from affidavit.service.core import fair_queue, pool
from affidavit.service.core.fair_queue import (
    CALLER,
    SERVICE,
    RecentUse,
)
from affidavit.service.core.pool import AccountingPool
from affidavit.service.settings import Settings
from affidavit.service.web.middleware import RequestMiddleware
from affidavit.service.web.telemetry import Metrics
from tests.support.polling import TIMEOUT_SECONDS, wait_until

Plan = Callable[..., dict[str, Any]]
Headers = dict[str, str]
AT_ONCE = {"prefer": "respond-async, wait=0"}


@pytest.fixture(scope="module", autouse=True)
def accounting() -> None:
    """Accounting in processes."""


def certify(client: TestClient, plan: Any, **headers: str) -> Any:
    return client.post("/v1/certificates", json=plan, headers={**AT_ONCE, **headers})


def ended(client: TestClient, path: str, headers: Headers | None = None) -> dict[str, Any]:
    """The certification at ``path`` when it no longer runs."""

    def get() -> Any:
        return client.get(path, headers=headers).json()

    wait_until(lambda: get()["state"] != "running")
    document: dict[str, Any] = get()
    return document


def test_a_plan_that_takes_longer_than_its_client_waits_goes_on(
    database_url: str, settings: Settings, client_of: Any, plan: Plan
) -> None:
    with client_of(replace(settings, database_url=database_url)) as client:
        _goes_on(client, plan)


def _goes_on(client: TestClient, plan: Plan) -> None:
    answer = certify(client, plan())
    assert (answer.status_code, answer.headers["retry-after"]) == (202, "1")
    where = answer.headers["location"]
    assert answer.json()["id"] == where.rpartition("/")[2]
    document = ended(client, where)
    assert (document["state"], document["problem"]) == ("done", None)
    stored = client.get(f"/v1/certificates/{document['certificate']}")
    assert stored.json()["verdict"] == "certified"
    assert client.post("/v1/certificates", json=plan()).content == stored.content


def test_a_client_that_waits_gets_the_certificate(client: TestClient, plan: Plan) -> None:
    assert certify(client, plan(), prefer="wait=30").status_code == 201
    assert client.post("/v1/certificates", json=plan(steps=11)).status_code == 201
    assert certify(client, {}, prefer="wait=30").status_code == 400


def test_a_certification_that_fails_says_why(
    client: TestClient, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("affidavit.service.certificates.submit_plan.MAX_WAITING", 0)
    document = ended(client, certify(client, plan()).headers["location"])
    assert (document["state"], document["certificate"]) == ("failed", None)
    assert (document["problem"]["status"], document["problem"]["code"]) == (503, "too_busy")


def test_only_its_requester_sees_it_and_nobody_runs_too_many(
    settings: Settings,
    client_of: Any,
    tokens_for: Any,
    plan: Plan,
    slow: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(certifications, "MAX_PER_CALLER", 1)
    monkeypatch.setattr(pool, "certify", slow.sleep)
    monkeypatch.setattr(pool, "is_quick", lambda _: False)
    people = tokens_for(settings, {"one": ["submit"], "other": ["submit"]})
    with client_of(settings) as client:
        where = certify(client, plan(), **people["one"]).headers["location"]
        assert client.get(where, headers=people["other"]).status_code == 404
        refused = certify(client, plan(steps=11), **people["one"])
        assert (refused.status_code, refused.json()["code"]) == (503, "too_busy")
        assert certify(client, plan(steps=12), **people["other"]).status_code == 202
    # The service stopped, and the next one says so.
    with client_of(settings) as client:
        document = client.get(where, headers=people["one"]).json()
        assert (document["state"], document["problem"]["code"]) == ("failed", "stopping")


def test_what_nobody_asks_for_ends_and_what_a_dead_replica_left_is_lost(
    client: TestClient, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    services = client.app.state.services  # type: ignore[attr-defined]
    monkeypatch.setattr(certifications, "HEARTBEAT_SECONDS", 0.05)
    monkeypatch.setattr(certifications, "ABANDONED_AFTER", timedelta(0))

    async def sleep(_: Any) -> Any:
        await asyncio.sleep(600)

    monkeypatch.setattr(services.pool, "assess", sleep)
    where = certify(client, plan()).headers["location"]
    with services.engine.connect() as connection:
        requester = connection.scalar(select(certifications.certifications.c.requester))
    wait_until(lambda: services.certifications._running == {})
    document = client.get(where).json()
    assert (document["state"], document["problem"]["code"]) == ("failed", "abandoned")

    identity = str(uuid.uuid4())
    left_by_another_replica = Certifications(services.engine, services.clock.now)
    left_by_another_replica._begin(identity, requester)
    assert client.get(f"/v1/certifications/{identity}").json()["state"] == "running"
    monkeypatch.setattr(certifications, "LOST_AFTER", timedelta(0))
    document = client.get(f"/v1/certifications/{identity}").json()
    assert (document["state"], document["problem"]["code"]) == ("failed", "replica_lost")


def test_the_accounting_of_a_client_that_hangs_up_is_stopped(
    slow: ModuleType, tmp_path: Path
) -> None:
    """The accounting never ends by itself and hears nothing; its process is replaced."""
    accounting = AccountingPool(1, 600)

    async def hang_up(method: str, *messages: dict[str, Any]) -> None:
        begun = tmp_path / method
        arriving = iter(messages)

        async def app(_scope: Any, receive: Any, _send: Any) -> None:
            if method == "POST":
                while (await receive()).get("more_body"):
                    pass
            await accounting.run_long(slow.spin, True, begun)

        async def receive() -> Any:
            message = next(arriving, None)
            if message is None:
                while not begun.exists():
                    await asyncio.sleep(0.01)
                return {"type": "http.disconnect"}
            return message

        async def send(message: Any) -> None:
            raise AssertionError(message)

        scope = {"type": "http", "method": method, "path": "/", "headers": []}
        request = asyncio.create_task(RequestMiddleware(app, Metrics())(scope, receive, send))
        # Not wait_for, which cancels what it waits for and so would end the request itself.
        done, _ = await asyncio.wait({request}, timeout=TIMEOUT_SECONDS)
        assert done, f"{method}: the request outlived its client"
        assert scope["state"]["code"] == "client_gone"  # type: ignore[index]
        assert accounting.unanswered == 0
        request.result()

    async def run() -> None:
        body = {"type": "http.request", "body": b"{}", "more_body": True}
        end = {"type": "http.request", "body": b"", "more_body": False}
        await hang_up("POST", body, end)
        await hang_up("GET", end)
        # The only process is free again.
        other = asyncio.create_task(accounting.run(abs, -1))
        done, _ = await asyncio.wait({other}, timeout=TIMEOUT_SECONDS)
        assert done, "the process went on with what nobody waits for"
        assert other.result() == 1

    try:
        asyncio.run(run())
    finally:
        accounting.close()


def test_a_caller_with_many_long_plans_holds_the_last_process_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried: list[tuple[str, bool]] = []

    async def run(_: AccountingPool, is_long: bool, *_rest: Any) -> None:
        tried.append((CALLER.get(), is_long))
        if CALLER.get() == "flood" and not is_long:
            raise pool._TakesLong

    monkeypatch.setattr(AccountingPool, "_run", run)
    accounting = AccountingPool(2, 600)

    async def send() -> None:
        for caller in ("flood", "flood", "other", "flood"):
            CALLER.set(caller)
            await accounting.run(abs, -1)
        accounting._use = RecentUse(pool.SUSTAINED_SHARE, pool.MAX_RECENT_SECONDS)
        CALLER.set("flood")
        await accounting.run(abs, -1)

    asyncio.run(send())
    again, first = ("flood", True), [("flood", False), ("flood", True)]
    assert tried == [*first, again, ("other", False), again, *first]


def test_a_caller_with_much_recent_use_gives_way_until_a_minute_after(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = [0.0]
    monkeypatch.setattr(fair_queue, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    use = RecentUse(pool.SUSTAINED_SHARE, pool.MAX_RECENT_SECONDS)
    for seconds in range(1000):
        clock[0] = float(seconds)
        use.add("flood", 1.0)
        use.add("other", pool.SUSTAINED_SHARE / 2)
        use.add(SERVICE, 1.0)
    assert use.of("flood") > pool.ORDINARY_SECONDS
    assert use.of("other") + use.of(SERVICE) < 1
    clock[0] += 61
    assert use.of("flood") < pool.ORDINARY_SECONDS
    clock[0] += 60
    use.add("late", 0.1)
    assert list(use._used) == ["late"]


@pytest.mark.parametrize(
    ("how", "seconds", "charged"),
    [
        ("wait", 0.6, (0.0, 0.1)),
        ("work", 0.3, (0.3, 0.5)),
        ("work_in_threads", 0.3, (0.3, 0.5)),
        ("work_and_fail", 0.3, (0.3, 0.5)),
        ("work_in_a_child", 0.3, (0.3, 0.6)),
    ],
)
def test_a_caller_is_charged_for_processor_time_and_not_for_waiting(
    slow: ModuleType, how: str, seconds: float, charged: tuple[float, float]
) -> None:
    accounting = AccountingPool(1, 600)

    async def run() -> float:
        await accounting.run(abs, -1)  # the process has started
        CALLER.set("caller")
        with suppress(ZeroDivisionError):
            await accounting.run(getattr(slow, how), seconds)
        return accounting._use._used["caller"][0]

    try:
        low, high = charged
        assert low <= asyncio.run(run()) <= high
    finally:
        accounting.close()


@pytest.mark.parametrize(("how", "charged"), [("wait", (0.0, 0.1)), ("work", (0.2, 0.5))])
def test_who_hangs_up_is_charged_for_processor_time_too(
    slow: ModuleType, how: str, charged: tuple[float, float]
) -> None:
    accounting = AccountingPool(1, 600)

    async def run() -> float:
        CALLER.set("caller")
        task = asyncio.create_task(accounting.run(getattr(slow, how), 600.0))
        begun = accounting._ordinary._begun

        def is_over() -> bool:
            spent = processor_time_of(int(begun[1])) - begun[0] if begun[1] else 0.0
            return spent > 0.2 if how == "work" else bool(begun[1])

        async with asyncio.timeout(TIMEOUT_SECONDS):
            while not is_over():
                await asyncio.sleep(0.01)
        since = time.monotonic()
        while how == "wait" and time.monotonic() < since + 0.5:
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return accounting._use._used["caller"][0]

    try:
        low, high = charged
        assert low <= asyncio.run(run()) <= high
    finally:
        accounting.close()


def test_plans_that_look_quick_are_charged_and_limited(
    slow: ModuleType, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several callers' quick plans go together; one that is slow delays and costs nobody else."""
    closed = plan_from(plan(sampling={"scheme": "full_batch"}))
    assert pool.is_quick(closed)
    monkeypatch.setattr(pool, "QUICK_SECONDS", 0.2)
    monkeypatch.setattr(pool, "SUSTAINED_SHARE", 0.0)  # what was used is not forgotten meanwhile
    accounting = AccountingPool(1, 600)
    ran: list[tuple[str, Any]] = []

    async def again(work: Any, *_: Any) -> None:
        ran.append((CALLER.get(), work))

    async def send(caller: str, seconds: float) -> None:
        CALLER.set(caller)
        with suppress(pool._TakesLong):
            await accounting._quick((caller, seconds))  # type: ignore[arg-type]

    async def run() -> None:
        await asyncio.gather(send("flood", 30.0), send("other", 0.05), send("other", 0.05))
        assert accounting._use._used["flood"][0] == 0.2
        CALLER.set("flood")
        monkeypatch.setattr(accounting, "run", again)
        accounting._use.add("flood", pool.ORDINARY_SECONDS)
        await accounting.assess(closed)

    monkeypatch.setattr(pool, "certify", slow.work)
    try:
        asyncio.run(run())
        used = {caller: seconds for caller, (seconds, _) in accounting._use._used.items()}
    finally:
        accounting.close()
    assert 0.05 <= used["other"] < 0.2
    assert ran == [("flood", slow.work)]


def test_what_takes_long_starts_again_as_a_long_plan_and_leaves_a_process(
    slow: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "ORDINARY_SECONDS", 0.2)
    accounting = AccountingPool(1, 600)

    async def run() -> None:
        floods = []
        for caller in ("one", "two"):
            CALLER.set(caller)
            floods.append(asyncio.create_task(accounting.run(slow.spin, True)))
        CALLER.set("other")
        await asyncio.sleep(0)
        other = asyncio.create_task(accounting.run(abs, -1))
        done, _ = await asyncio.wait({other}, timeout=TIMEOUT_SECONDS)
        assert done, "an ordinary plan waited for long ones"
        for flood in floods:
            flood.cancel()
        await asyncio.gather(*floods, return_exceptions=True)

    try:
        asyncio.run(run())
    finally:
        accounting.close()


def test_plans_that_waited_while_their_caller_accounted_much_give_way_too(
    slow: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    accounting = AccountingPool(1, 600)
    monkeypatch.setattr(accounting._ordinary, "_max_use", 0.1)
    # Use does not decay, however long a busy machine takes.
    monkeypatch.setattr(accounting, "_use", RecentUse(0.0, pool.MAX_RECENT_SECONDS))

    async def run() -> list[int]:
        CALLER.set("flood")
        return await asyncio.gather(*(accounting.run(slow.work, 0.09) for _ in range(6)))

    try:
        niceness = asyncio.run(run())
    finally:
        accounting.close()
    own = os.nice(0)
    assert niceness[0] == min(19, own + pool.NICENESS)
    assert set(niceness[2:]) == {pool.LONG_NICENESS}
