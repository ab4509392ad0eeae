"""Each caller of Batcher and ComputationCache gets its own answer, computed once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from affidavit.service.core.concurrency import (
    MAX_BATCH,
    Batcher,
    ComputationCache,
    in_thread_pool,
)


class Halving:
    """Halves numbers, and has nothing to do with a batch that has an odd one."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def __call__(self, asked: Sequence[int]) -> list[int]:
        self.sizes.append(len(asked))
        if any(entry % 2 for entry in asked):
            raise ValueError("odd")
        return [item // 2 for item in asked]


def _ask(work: Halving, numbers: Sequence[int]) -> list[int | BaseException]:
    async def run() -> list[int | BaseException]:
        batches = Batcher(in_thread_pool(work))
        return await asyncio.gather(
            *(batches(number) for number in numbers), return_exceptions=True
        )

    return asyncio.run(run())


def test_each_gets_their_own_answer_in_batches_of_at_most_so_many() -> None:
    work = Halving()
    numbers = range(0, 6 * MAX_BATCH, 2)
    assert _ask(work, numbers) == [number // 2 for number in numbers]
    assert sum(work.sizes) == 3 * MAX_BATCH
    assert max(work.sizes) == MAX_BATCH


def test_one_that_fails_fails_alone() -> None:
    result = _ask(Halving(), [2, 3, 4])
    assert [result[0], result[2]] == [1, 2]
    assert isinstance(result[1], ValueError)


def test_lanes_share_what_waits_and_are_free_again_when_it_is_done() -> None:
    at_once: list[int] = []
    running = 0

    async def work(asked: Sequence[int]) -> list[int]:
        nonlocal running
        running += 1
        at_once.append(running)
        await asyncio.sleep(0.01)
        running -= 1
        return list(asked)

    async def run() -> None:
        batches = Batcher(work, lanes=3)
        for _ in range(2):
            assert await asyncio.gather(*(batches(item) for item in range(10))) == list(range(10))

    asyncio.run(run())
    assert at_once == [1, 2, 3] * 2


def test_a_caller_that_went_away_keeps_nobody_waiting() -> None:
    async def run() -> int:
        batches = Batcher(in_thread_pool(Halving()))
        gone = asyncio.create_task(batches(2))
        stays = asyncio.create_task(batches(4))
        await asyncio.sleep(0)
        gone.cancel()
        return await stays

    assert asyncio.run(run()) == 2


def test_a_caller_that_comes_while_a_result_is_handed_over_computes_nothing() -> None:
    """Its call runs after the work has returned, and before the first caller runs again."""
    computed: list[str] = []
    late: list[asyncio.Task[int]] = []
    cache: ComputationCache[int] = ComputationCache(8)

    async def work() -> int:
        computed.append("work")
        if not late:
            late.append(asyncio.create_task(cache("name", work)))
        return 1

    async def story() -> None:
        assert await cache("name", work) == await late[0] == 1

    asyncio.run(story())
    assert computed == ["work"]
