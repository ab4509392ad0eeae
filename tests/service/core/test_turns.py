"""Requests of one caller leave others the service's own process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from itertools import count
from types import SimpleNamespace

import httpx
import pytest

from affidavit.service.core import fair_queue
from affidavit.service.core.fair_queue import (
    BURST_RECOVERY_RATE,
    BURST_SECONDS,
    CALLER,
    TURN,
    TURNS,
    Turn,
    Turns,
    another_turn,
    leave_turn,
)
from affidavit.service.settings import Settings
from affidavit.service.web.app import create_app
from tests.support.polling import TIMEOUT_SECONDS


async def request(queue: Turns, caller: str, held: asyncio.Event, started: list[str]) -> None:
    """A request that works until ``held``."""
    CALLER.set(caller)
    async with queue.turn():
        started.append(caller)
        await held.wait()


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_a_caller_alone_has_nearly_all_turns_and_beside_others_a_part() -> None:
    async def run(others: int) -> tuple[int, int]:
        queue, held, started = Turns(128), asyncio.Event(), list[str]()
        tasks = []
        for number in range(others):
            CALLER.set(f"other {number}")
            async with queue.turn():  # answered at once, and seen of late
                pass
        for _ in range(100):
            tasks.append(asyncio.create_task(request(queue, "flood", held, started)))
        await settled()
        flooding = len(started)
        tasks.append(asyncio.create_task(request(queue, "other 0", held, started)))
        await settled()
        held.set()
        await asyncio.gather(*tasks)
        return flooding, started.index("other 0")

    assert asyncio.run(run(others=0)) == (TURNS - 1, TURNS - 1)
    assert asyncio.run(run(others=3)) == (TURNS // 4, TURNS // 4)
    assert asyncio.run(run(others=63)) == (1, 1)


def test_beside_others_a_caller_has_a_share_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of ten seconds a flood of tenths of a second gets its burst and its share, no more."""
    clock, took = [0.0], 0.1
    time = SimpleNamespace(monotonic=lambda: clock[0])
    monkeypatch.setattr(fair_queue, "time", time)
    monkeypatch.setattr(fair_queue, "time", time)

    async def run() -> float:
        queue, used = Turns(128), 0.0
        flooding: asyncio.Task[None] | None = None
        held, started = asyncio.Event(), list[str]()
        while clock[0] < 10:
            CALLER.set("other")
            async with queue.turn():
                pass
            if flooding is None:
                flooding = asyncio.create_task(request(queue, "flood", held, started))
            await settled()
            clock[0] += took
            if started:
                used += took
                held.set()
                await flooding
                flooding, held, started = None, asyncio.Event(), []
            queue._recheck()  # the clock of the event loop stands still
        if flooding is not None:
            flooding.cancel()
        return used

    used = asyncio.run(run())
    assert (
        BURST_SECONDS + 10 * BURST_RECOVERY_RATE - 2 * took
        <= used
        <= BURST_SECONDS + 10 * BURST_RECOVERY_RATE + 2 * took
    )


def test_a_share_that_is_earned_between_two_looks_is_not_missed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A caller waits for its share of the time; the clock moves on whenever it is read."""
    ticks = count()
    time = SimpleNamespace(monotonic=lambda: next(ticks) * 1e-3)
    monkeypatch.setattr(fair_queue, "time", time)

    async def run(beyond: float) -> None:
        queue = Turns(128)
        for caller in ("one", "another"):
            CALLER.set(caller)
            async with queue.turn():
                pass
        queue._use.add("one", BURST_SECONDS + beyond)
        CALLER.set("one")
        async with asyncio.timeout(TIMEOUT_SECONDS), queue.turn():
            pass

    for tenths in range(40):
        asyncio.run(run(tenths * 1e-4))


def test_a_turn_is_left_once_and_taken_again_by_work_that_goes_on() -> None:
    async def run() -> None:
        queue, held, started = Turns(128), asyncio.Event(), list[str]()
        others = [
            asyncio.create_task(request(queue, f"other {number}", held, started))
            for number in range(TURNS - 1)
        ]
        await settled()
        CALLER.set("request")
        turn = Turn(queue)
        TURN.set(turn)
        await turn.take()
        late = asyncio.create_task(request(queue, "late", held, started))
        await settled()
        assert "late" not in started, "all turns are taken"
        leave_turn()
        leave_turn()
        await settled()
        assert "late" in started
        async with asyncio.timeout(TIMEOUT_SECONDS):
            asyncio.get_running_loop().call_soon(held.set)
            async with another_turn():
                assert not turn.leave(), "the request's own turn stays left"
        await asyncio.gather(*others, late)
        assert queue._free == TURNS

    asyncio.run(run())


def test_a_caller_who_never_sends_a_body_holds_no_turn(
    settings: Settings, token_for: Callable[..., dict[str, str]]
) -> None:
    """Two callers announce a body on each turn that there is; a third is answered meanwhile."""
    app = create_app(settings)
    waiting = [token_for(settings, "submit", name=name) for name in ("one", "two")]
    reading = token_for(settings, "audit", name="three")

    begun: list[None] = []

    async def never() -> AsyncIterator[bytes]:
        yield b"{"
        begun.append(None)
        await asyncio.Event().wait()

    async def run() -> int:
        transport = httpx.ASGITransport(app)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client,
        ):
            head = {"content-type": "application/json"}
            slow = [
                asyncio.create_task(
                    client.post("/v1/certificates", content=never(), headers={**head, **token})
                )
                for token in waiting
                for _ in range(TURNS)
            ]
            while len(begun) < len(slow):
                await asyncio.sleep(0.01)
            getting = client.get("/v1/certificates", headers=reading)
            answer = await asyncio.wait_for(getting, TIMEOUT_SECONDS)
            for task in slow:
                task.cancel()
            await asyncio.gather(*slow, return_exceptions=True)
            return answer.status_code

    assert asyncio.run(run()) == 200
