"""Plans that were parsed not long ago, by the very bytes that they were parsed from.

The same plan is sent again and again, by a pipeline at every commit. What its bytes say
never changes, so they are not parsed again, and the id that follows from the plan and the
rules is not computed again as long as the rules are the same. Nothing else is remembered:
access, the rules in force, whether there is a certificate and its status are looked up for
every request.

Memory is bounded by the bytes stored; the plan that was used longest ago is forgotten first.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from starlette.concurrency import run_in_threadpool

from affidavit.plan import Plan, Syntax, parse_plan
from affidavit.service.policies.evaluation import CertificationRequest
from affidavit.service.policies.policy_set import Head, PolicySet
from affidavit.service.teams import DEFAULT

MAX_BYTES = 4 * 1024 * 1024
"""Of all bodies together; a plan takes some ten times its text."""
MAX_BODY_BYTES = 64 * 1024
INLINE_BYTES = 1024
"""JSON of at most this size is parsed, or refused, sooner than a thread takes over."""

Rules = tuple[Head, tuple[str, ...], str]
"""The policy set, the waivers of it that are in force for a plan and its requester, the team."""


@dataclass(slots=True)
class CachedPlan:
    """A plan, with the last id that was computed for it."""

    plan: Plan
    _last_id: tuple[Rules, str] | None = field(default=None)

    def request_under(
        self, rules: PolicySet, requester: str, team: str = DEFAULT
    ) -> CertificationRequest:
        """The plan under ``rules``; its id is computed once for each."""
        request = CertificationRequest.under(rules, self.plan, requester, team)
        in_force = rules.head, tuple(waiver.id for waiver in request.waivers), team
        last_id = self._last_id
        if last_id is None or last_id[0] != in_force:
            self._last_id = in_force, request.id
            return request
        return request.with_id(last_id[1])


class PlanCache:
    """The latest plans; belongs to one event loop."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._plans: OrderedDict[tuple[Syntax, bytes], CachedPlan] = OrderedDict()
        self._bytes = 0

    async def __call__(self, body: bytes, syntax: Syntax) -> CachedPlan:
        """The plan that ``body`` contains; raises ``MalformedPlan``."""
        cached = self._plans.get((syntax, body))
        if cached is not None:
            self._plans.move_to_end((syntax, body))
            return cached
        if syntax == "json" and len(body) <= INLINE_BYTES:
            plan = CachedPlan(parse_plan(body, syntax))
        else:
            plan = CachedPlan(await run_in_threadpool(parse_plan, body, syntax))
        if len(body) <= MAX_BODY_BYTES:
            self._store(syntax, body, plan)
        return plan

    def _store(self, syntax: Syntax, body: bytes, plan: CachedPlan) -> None:
        if (syntax, body) not in self._plans:  # two may have parsed it at once
            self._bytes += len(body)
        self._plans[syntax, body] = plan
        while self._bytes > self._max_bytes:
            (_, forgotten), _ = self._plans.popitem(last=False)
            self._bytes -= len(forgotten)
