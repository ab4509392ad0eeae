"""Each caller has a share of the accounting, and whoever goes away takes nothing with them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from itertools import pairwise
from types import SimpleNamespace

import pytest

from affidavit.service.core import fair_queue
from affidavit.service.core.concurrency import SingleFlight
from affidavit.service.core.errors import TooBusy
from affidavit.service.core.fair_queue import CALLER, FairQueue
from tests.support.polling import TIMEOUT_SECONDS

Job = Callable[[str, float], Awaitable[None]]


def jobs_of(queue: FairQueue, order: list[str], monkeypatch: pytest.MonkeyPatch) -> Job:
    """Jobs that take as long as they say, on a clock that they move themselves."""
    clock = [0.0]
    monkeypatch.setattr(fair_queue, "time", SimpleNamespace(monotonic=lambda: clock[0]))

    async def job(caller: str, seconds: float) -> None:
        CALLER.set(caller)
        async with queue.turn():
            order.append(caller)
            await asyncio.sleep(0)
            clock[0] += seconds

    return job


def test_a_flood_delays_another_by_one_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    async def run() -> None:
        job = jobs_of(FairQueue(1), order, monkeypatch)
        flood = [asyncio.create_task(job("flood", 60)) for _ in range(50)]
        await asyncio.sleep(0)
        for _ in range(5):
            await asyncio.create_task(job("other", 1))
        await asyncio.gather(*flood)

    asyncio.run(run())
    assert order.index("other") <= 2
    assert len(order) == 55
    # Between two of them at most the plan that ran and the one that it came too late for.
    others = [at for at, caller in enumerate(order) if caller == "other"]
    assert all(later - earlier <= 3 for earlier, later in pairwise(others))


def test_two_floods_get_equal_time_and_not_equal_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    async def run() -> None:
        job = jobs_of(FairQueue(1), order, monkeypatch)
        tasks = [asyncio.create_task(job("long", 10)) for _ in range(10)]
        tasks += [asyncio.create_task(job("short", 1)) for _ in range(60)]
        await asyncio.gather(*tasks)

    asyncio.run(run())
    served = order[: order.index("long", 20)]
    assert 8 * served.count("long") <= served.count("short") <= 12 * served.count("long")


def test_nobody_holds_every_process() -> None:
    async def run() -> None:
        queue, held = FairQueue(3), asyncio.Event()

        async def job(caller: str) -> None:
            CALLER.set(caller)
            async with queue.turn():
                await held.wait()

        flood = [asyncio.create_task(job("flood")) for _ in range(9)]
        await asyncio.sleep(0.01)
        assert len(queue) == 7
        other = asyncio.create_task(job("other"))
        await asyncio.sleep(0.01)
        assert len(queue) == 7  # the other one is served at once
        held.set()
        await asyncio.gather(other, *flood)

    asyncio.run(run())


def test_a_full_queue_turns_away_and_the_cancelled_leave_it() -> None:
    async def run() -> None:
        queue, held = FairQueue(1), asyncio.Event()

        async def job() -> None:
            async with queue.turn():
                await held.wait()

        tasks = [asyncio.create_task(job()) for _ in range(fair_queue.MAX_WAITING_EACH + 1)]
        await asyncio.sleep(0.01)
        with pytest.raises(TooBusy):
            await job()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert len(queue) == 0
        held.set()
        await asyncio.wait_for(job(), TIMEOUT_SECONDS)

    asyncio.run(run())


def test_who_fills_the_queue_is_turned_away_for_others() -> None:
    async def run() -> None:
        queue, held = FairQueue(1), asyncio.Event()

        async def job(caller: str) -> None:
            CALLER.set(caller)
            async with queue.turn():
                await held.wait()

        each = fair_queue.MAX_WAITING // 4
        floods = [asyncio.create_task(job(f"flood{n % 4}")) for n in range(4 * each + 1)]
        await asyncio.sleep(0.01)
        assert len(queue) == fair_queue.MAX_WAITING
        others = [asyncio.create_task(job(f"other{n}")) for n in range(40)]
        await asyncio.sleep(0.01)
        assert len(queue) == fair_queue.MAX_WAITING
        assert not any(other.done() for other in others)
        held.set()
        await asyncio.gather(*others)
        results = await asyncio.gather(*floods, return_exceptions=True)
        assert sum(isinstance(result, TooBusy) for result in results) == len(others)

    asyncio.run(run())


def test_a_computation_ends_with_its_last_caller() -> None:
    async def run() -> None:
        flights: SingleFlight[None] = SingleFlight()
        ended = []

        async def work() -> None:
            try:
                await asyncio.sleep(600)
            except asyncio.CancelledError:
                ended.append(True)
                raise

        one, two = (asyncio.create_task(flights.run("plan", work)) for _ in range(2))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        one.cancel()
        await asyncio.gather(one, return_exceptions=True)
        assert (len(flights), ended) == (1, [])
        two.cancel()
        await asyncio.gather(two, return_exceptions=True)
        await asyncio.sleep(0)
        assert (len(flights), ended) == (0, [True])

    asyncio.run(run())


def test_a_caller_who_goes_away_while_a_slot_gets_free_is_passed_over() -> None:
    async def run() -> None:
        queue = FairQueue(1)
        await queue.enter("first")
        gone, next_one = (asyncio.create_task(queue.enter(caller)) for caller in ("gone", "next"))
        await asyncio.sleep(0)
        gone.cancel()
        queue.leave("first", 1.0)  # before whoever goes away has run again
        await next_one
        with pytest.raises(asyncio.CancelledError):
            await gone

    asyncio.run(run())
