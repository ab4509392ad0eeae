"""The rulebook: the policies and waivers in force at one moment, read and checked together.

Which policy a plan comes under follows from the name of its data set alone: the active
policy that names it, or else the active one for ``default``, or else the built-in one. At
most one active policy may be for a data set, so the answer never depends on an order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property

from affidavit.certificate.policy import BUILT_IN, Policy, Waiver, in_force
from affidavit.plan import Plan, digest

Head = tuple[int, int, int]
"""The last ids of policies, waivers and revocations; equal heads are equal rulebooks."""


class Overlap(Exception):
    """Two policies are for one data set."""

    def __init__(self, dataset: str, other: str) -> None:
        super().__init__(f"{dataset} is already under the policy {other}")
        self.dataset = dataset
        self.other = other


@dataclass(frozen=True)
class Rulebook:
    """``policies`` are the active ones by name, ``waivers`` those that nobody revoked."""

    head: Head = (0, 0, 0)
    policies: Mapping[str, Policy] = field(default_factory=dict)
    waivers: tuple[Waiver, ...] = ()

    @cached_property
    def _by_dataset(self) -> dict[str, Policy]:
        return {
            name: policy
            for policy in self.policies.values()
            if policy.datasets != "default"
            for name in policy.datasets
        }

    @cached_property
    def default(self) -> Policy:
        """The policy of data sets that no policy names."""
        found = (policy for policy in self.policies.values() if policy.datasets == "default")
        return next(found, BUILT_IN)

    def policy_of(self, dataset: str | None) -> Policy:
        """The policy that plans on ``dataset`` come under."""
        return self._by_dataset.get(dataset or "", self.default)

    def waivers_of(self, plan: Plan, requester: str, now: datetime) -> tuple[Waiver, ...]:
        """The waivers that help ``requester`` with ``plan`` at ``now``."""
        if not self.waivers:
            return ()
        return in_force(
            self.waivers,
            policy=self.policy_of(plan.dataset.name).digest(),
            plan_digest=digest(plan),
            dataset=plan.dataset.name,
            requester=requester,
            now=now,
        )

    def with_policy(self, policy: Policy) -> Rulebook:
        """The rulebook if ``policy`` were active; raises ``Overlap``."""
        others = [item for item in self.policies.values() if item.name != policy.name]
        for dataset in _named(policy):
            for other in others:
                if dataset in _named(other):
                    raise Overlap(dataset, other.name)
        return Rulebook(self.head, {**self.policies, policy.name: policy}, self.waivers)

    def is_active(self, policy: Policy) -> bool:
        """Whether new plans may come under ``policy``."""
        return self.policies.get(policy.name, self.default) == policy


def _named(policy: Policy) -> Iterable[str]:
    """What a policy is for, in words; ``the default`` is no valid name of a data set."""
    return ("the default",) if policy.datasets == "default" else policy.datasets
