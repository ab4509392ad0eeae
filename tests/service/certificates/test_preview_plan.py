"""Drafts: accounted in bounded processes, equal ones once, and never stored."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from affidavit.assessment import Assessment, certify
from affidavit.plan import Plan
from affidavit.service.certificates.preview_plan import PreviewPlan
from affidavit.service.core.errors import AccountingTimeout
from affidavit.service.policies.policy_set import CertificationRequest, PolicySet

PlanOf = Callable[..., Plan]


class Pool:
    """A pool that works when it is told to, and counts."""

    def __init__(self, time_limit: float = 60.0) -> None:
        self.time_limit = time_limit
        self.ran: list[str] = []
        self.open = asyncio.Event()

    async def run(self, work: Callable[..., Any], plan: Plan, **more: Any) -> Any:
        self.ran.append(work.__name__)
        await self.open.wait()
        if plan.phases[0].steps == 99:
            raise AccountingTimeout("killed after 60 s")
        return work(plan, **more)


class Policies:
    """The built-in policy alone."""

    def certification_request(self, plan: Plan, requester: str, team: str) -> CertificationRequest:
        return CertificationRequest.under(PolicySet(), plan, requester, team)


async def _nowhere(plan: Plan, assessment: Assessment) -> None: ...


def _drafts(pool: Pool) -> PreviewPlan:
    return PreviewPlan(pool, Policies(), _nowhere)  # type: ignore[arg-type]


def test_equal_drafts_are_accounted_once_and_kept(plan_of: PlanOf) -> None:
    async def story() -> None:
        pool = Pool()
        drafts = _drafts(pool)
        requested = [asyncio.create_task(drafts.assess(plan_of(), f"p{i}")) for i in range(5)]
        while not pool.ran:
            await asyncio.sleep(0)
        pool.open.set()
        result = await asyncio.gather(*requested)
        assert pool.ran == ["certify"]
        expected = certify(plan_of(), second_opinion=False)
        assert all(item.assessment == expected for item in result)
        await drafts.assess(plan_of(), "later")
        assert pool.ran == ["certify"]

    asyncio.run(story())


def test_a_change_that_takes_too_long_does_not_spoil_the_comparison(plan_of: PlanOf) -> None:
    async def story() -> None:
        pool = Pool()
        pool.open.set()
        block = {"name": "all", "clip_norm": 1, "noise_multiplier": 30}
        other = plan_of(steps=98, releases=[block])
        result = await _drafts(pool).compare(plan_of(), other)
        assert [entry.moved for entry in result.effects] == ["lowered", "raised"]
        late = Pool(time_limit=-1.0)
        late.open.set()
        result = await _drafts(late).compare(plan_of(), other)
        assert result.ranking is not None
        codes = [item.reasons[0].code for item in result.effects]
        assert codes == ["accounting_timeout"] * 2

    asyncio.run(story())


def test_a_draft_that_is_cut_off_says_so_and_is_not_kept(plan_of: PlanOf) -> None:
    async def story() -> None:
        pool = Pool()
        pool.open.set()
        drafts = _drafts(pool)
        for _ in range(2):
            with pytest.raises(AccountingTimeout):
                await drafts.assess(plan_of(steps=99), "p")
        assert pool.ran == ["certify", "certify"]

    asyncio.run(story())
