"""Work on a plan before it is submitted: what it would get, its curves, and beside another.

Nothing here is signed, stored or logged. What is asked is accounted in the same processes as a
certificate, under the same time limit; at most ``MOST_WAITING`` drafts are worked on or wait,
equal ones once, and the latest answers are kept in memory. A draft is accounted by one engine,
as ``affidavit check`` does, unless the policy of its data set asks for a second opinion.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.concurrency import run_in_threadpool

from affidavit.certificate import (
    Assessment,
    PlansCompared,
    Trial,
    certify,
    compared,
    curves,
    profile,
    trade_off,
    trials,
)
from affidavit.certificate.charts import draw
from affidavit.certificate.policy import Judgement, Policy, judge
from affidavit.plan import Plan, Reason, digest
from affidavit.service.errors import AccountingUnavailable, TooBusy
from affidavit.service.policies.judging import budget_of, question
from affidavit.service.policies.store import PolicyStore
from affidavit.service.pool import AccountingPool
from affidavit.service.single_flight import SingleFlight
from affidavit.service.use_cases.draw_curve import NoCurve
from affidavit.service.use_cases.submit_plan import Position

MOST_WAITING = 16
"""Drafts that are accounted or wait for it, beyond which another is turned away."""
MOST_KEPT = 256
"""Answers kept in memory, some 10 KB each; of curves some 20 KB."""
WIDTH, HEIGHT = 440, 320
"""Of one picture, in pixels."""

T = TypeVar("T")
Pictures = tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Draft:
    """What a plan would get: proved, and judged by the policy of its data set.

    ``ledger`` is where the data set's budget stands, if there is one; ``assessment`` has the
    verdict under the policy.
    """

    assessment: Assessment
    policy: Policy
    judgement: Judgement
    ledger: Mapping[str, Any] | None


class PreviewPlan:
    """The use case, with what it works on; it belongs to one event loop."""

    def __init__(self, pool: AccountingPool, policies: PolicyStore, position: Position) -> None:
        self._pool = pool
        self._policies = policies
        self._position = position
        self._flights: SingleFlight[Any] = SingleFlight()
        self._kept: OrderedDict[str, Any] = OrderedDict()

    async def assess(self, plan: Plan, requester: str) -> Draft:
        """What ``requester`` would get for ``plan`` now.

        Raises ``TooBusy``, ``AccountingTimeout``, ``AccountingFailed``, ``Altered``.
        """
        asked = await run_in_threadpool(question, self._policies, plan, requester)
        second = asked.policy.second_opinion == "required"
        proved = await self._assessed(plan, second_opinion=second)
        ledger = await self._position(plan, proved)
        budget = budget_of(proved, ledger)
        found, judgement = judge(plan, proved, asked.policy, asked.waivers, budget)
        return Draft(assessment=found, policy=asked.policy, judgement=judgement, ledger=ledger)

    async def draw(self, plan: Plan) -> Pictures:
        """The privacy profile and the trade-off function as SVG; raises ``NoCurve`` too."""
        found = await self._once(f"curve {digest(plan)}", lambda: self._pool.run_aside(drawn, plan))
        if isinstance(found, NotDrawn):
            raise NoCurve(found.reasons)
        pictures: Pictures = found
        return pictures

    async def compare(self, first: Plan, second: Plan) -> PlansCompared:
        """Both plans, and the first with each change alone; raises like ``assess``.

        One change after the other, and no further ones once they took as long as one
        computation may; those say so, as one does whose accounting was cut off.
        """
        sides = [await self._assessed(item) for item in (first, second)]
        end = time.monotonic() + self._pool.time_limit
        tried: list[tuple[Trial, Assessment | None]] = []
        for trial in trials(first, second):
            tried.append(await self._tried(trial, in_time=time.monotonic() < end))
        return compared(sides[0], sides[1], tried)

    async def _tried(self, trial: Trial, *, in_time: bool) -> tuple[Trial, Assessment | None]:
        if trial.plan is None:
            return trial, None
        if in_time:
            try:
                return trial, await self._assessed(trial.plan)
            except AccountingUnavailable:
                pass
        return Trial(change=trial.change, plan=None, reasons=(_cut_off(trial),)), None

    async def _assessed(self, plan: Plan, *, second_opinion: bool = False) -> Assessment:
        found: Assessment = await self._once(
            f"{'both' if second_opinion else 'one'} {digest(plan)}",
            lambda: self._pool.run(certify, plan, second_opinion=second_opinion),
        )
        return found

    async def _once(self, name: str, work: Callable[[], Awaitable[T]]) -> T:
        if name not in self._kept:
            if name not in self._flights and len(self._flights) >= MOST_WAITING:
                raise TooBusy
            found, _ = await self._flights.run(name, work)
            self._kept[name] = found
        self._kept.move_to_end(name)
        while len(self._kept) > MOST_KEPT:
            self._kept.popitem(last=False)
        kept: T = self._kept[name]
        return kept


@dataclass(frozen=True, slots=True)
class NotDrawn:
    """Why nothing can be drawn, in a form that travels between processes."""

    reasons: tuple[Reason, ...]


def drawn(plan: Plan) -> Pictures | NotDrawn:
    """In the pool: the pictures of ``plan``, coloured by the page they stand in."""
    found = curves(plan)
    if isinstance(found, Assessment):
        return NotDrawn(found.reasons)
    return tuple(draw(item(found), width=WIDTH, height=HEIGHT) for item in (profile, trade_off))


def _cut_off(trial: Trial) -> Reason:
    return Reason(
        code="accounting_timeout",
        pointer=trial.change.pointer,
        message="this change was not tried alone: the accounting took too long.",
        remedy="Compare plans that differ in less, or run `affidavit compare`.",
    )
