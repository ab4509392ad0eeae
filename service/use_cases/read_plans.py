"""Plans that were read not long ago, by the very bytes that they were read from.

The same plan is asked for again and again, by a pipeline at every commit. What its bytes say
never changes, so they are not parsed again, and the id that follows from the plan and the
rules is not worked out again as long as the rules are the same. Nothing else is remembered:
who may ask, which rules are in force, whether there is a certificate and where it stands is
looked up for every request.

Memory is bounded by the bytes kept; the plan asked for longest ago is forgotten first.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from starlette.concurrency import run_in_threadpool

from affidavit.plan import Plan, Syntax, parse_plan
from affidavit.service.policies.evaluation import CertificationRequest
from affidavit.service.policies.policy_set import Head, PolicySet

MOST_BYTES = 4 * 1024 * 1024
"""Of all bodies together; a plan takes some ten times its text."""
LARGEST = 64 * 1024
AT_ONCE = 1024
"""Bytes of JSON that are read, or refused, sooner than a thread takes over."""

Rules = tuple[Head, tuple[str, ...]]
"""The policy_set, and the waivers of it that are in force for a plan and whoever asks."""


@dataclass(slots=True)
class ReadPlan:
    """A plan, with the last id that was worked out for it."""

    plan: Plan
    _named: tuple[Rules, str] | None = field(default=None)

    def request_under(self, rules: PolicySet, requester: str) -> CertificationRequest:
        """The request for the plan under ``rules``, whose id is computed once."""
        asked = CertificationRequest.under(rules, self.plan, requester)
        under = rules.head, tuple(waiver.id for waiver in asked.waivers)
        named = self._named
        if named is None or named[0] != under:
            self._named = under, asked.id
            return asked
        return asked.with_id(named[1])


class ReadPlans:
    """The plans read last; belongs to one event loop."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._kept: OrderedDict[tuple[Syntax, bytes], ReadPlan] = OrderedDict()
        self._bytes = 0

    async def __call__(self, body: bytes, syntax: Syntax) -> ReadPlan:
        """The plan that ``body`` says; raises ``MalformedPlan``."""
        known = self._kept.get((syntax, body))
        if known is not None:
            self._kept.move_to_end((syntax, body))
            return known
        if syntax == "json" and len(body) <= AT_ONCE:
            found = ReadPlan(parse_plan(body, syntax))
        else:
            found = ReadPlan(await run_in_threadpool(parse_plan, body, syntax))
        if len(body) <= LARGEST:
            self._keep(syntax, body, found)
        return found

    def _keep(self, syntax: Syntax, body: bytes, found: ReadPlan) -> None:
        if (syntax, body) not in self._kept:  # two may have read it at once
            self._bytes += len(body)
        self._kept[syntax, body] = found
        while self._bytes > self._most_bytes:
            (_, forgotten), _ = self._kept.popitem(last=False)
            self._bytes -= len(forgotten)
