"""The policy set: the policies and waivers in force at one time, and their effect on a plan.

The policy of a plan follows from the name of its data set: the active policy that names it, or else
the active policy for ``default``, or else the built-in one. At most one active policy covers a data
set.

A certification request is a plan with its policy and the waivers in force for its requester. The id
of its certificate follows from it before any accounting. The policy set is read again in the
transaction that stores the certificate: if it has changed, the assessment is evaluated by the new
one, and the certificate names that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property
from typing import Any

from affidavit.assessment import Assessment
from affidavit.certificate import certificate_id
from affidavit.certificate.policy import BUILT_IN, Budget, Policy, Waiver, waivers_in_force
from affidavit.plan import Plan, digest
from affidavit.service.core.errors import DomainError
from affidavit.service.core.teams import DEFAULT, team_in_id

Head = tuple[int, int, int]
"""The last row ids of policies, waivers and revocations; equal heads are equal policy sets."""


class PoliciesChanged(Exception):
    """The policy set has changed since a certificate was evaluated."""


class PolicyConflict(DomainError):
    """A well-formed policy or waiver that conflicts with the policies in force."""


@dataclass(frozen=True)
class PolicySet:
    """``policies`` are the active ones by name, ``waivers`` those that are not revoked."""

    head: Head = (0, 0, 0)
    policies: Mapping[str, Policy] = field(default_factory=dict)
    waivers: tuple[Waiver, ...] = ()
    now: Callable[[], datetime] = field(default=lambda: datetime.now(UTC), compare=False)

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
        defaults = (policy for policy in self.policies.values() if policy.datasets == "default")
        return next(defaults, BUILT_IN)

    def policy_of(self, dataset: str | None) -> Policy:
        """Return the policy of plans on ``dataset``."""
        return self._by_dataset.get(dataset or "", self.default)

    def waivers_of(self, plan: Plan, requester: str) -> tuple[Waiver, ...]:
        """Return the waivers that apply to ``plan`` by ``requester`` now."""
        if not self.waivers:
            return ()
        return waivers_in_force(
            self.waivers,
            policy=self.policy_of(plan.dataset.name).digest(),
            plan_digest=digest(plan),
            dataset=plan.dataset.name,
            requester=requester,
            now=self.now(),
        )

    def with_policy(self, policy: Policy) -> PolicySet:
        """Return the policy set with ``policy`` active; raises ``PolicyConflict``."""
        others = [other for other in self.policies.values() if other.name != policy.name]
        for dataset in _scope(policy):
            for other in others:
                if dataset in _scope(other):
                    raise PolicyConflict(
                        f"{dataset} is already covered by the policy {other.name}.",
                        f"Remove it in a new version of {other.name} first.",
                        code="policy_overlap",
                        pointer="/datasets",
                    )
        return replace(self, policies={**self.policies, policy.name: policy})

    def is_active(self, policy: Policy) -> bool:
        """Return whether ``policy`` applies to new plans."""
        return self.policies.get(policy.name, self.default) == policy


def _scope(policy: Policy) -> Iterable[str]:
    """Return the data sets of a policy; ``the default`` is not a valid name of a data set."""
    return ("the default",) if policy.datasets == "default" else policy.datasets


@dataclass(frozen=True)
class CertificationRequest:
    """A plan with the policy and the waivers in force for its requester."""

    plan: Plan
    requester: str
    policy: Policy
    waivers: tuple[Waiver, ...]
    team: str = DEFAULT

    @classmethod
    def under(
        cls, policies: PolicySet, plan: Plan, requester: str, team: str = DEFAULT
    ) -> CertificationRequest:
        """Build the request for ``plan`` by ``requester`` of ``team`` under ``policies``."""
        waivers = policies.waivers_of(plan, requester)
        return cls(plan, requester, policies.policy_of(plan.dataset.name), waivers, team)

    @cached_property
    def id(self) -> str:
        """The id of the certificate."""
        return certificate_id(digest(self.plan), self.policy, self.waivers, team_in_id(self.team))

    def with_id(self, known: str) -> CertificationRequest:
        """Return this request with an id that was computed before."""
        self.__dict__["id"] = known  # where cached_property stores it
        return self


def budget_status(assessment: Assessment, ledger: Mapping[str, Any] | None) -> Budget:
    """Return whether the run fits the data set's budget; ``ledger`` is the ledger's state, if any.

    A plan that is not certified costs nothing, so its budget is not a further reason.
    """
    if assessment.verdict != "certified":
        return "fits"
    if ledger is None:
        return "none"
    return "fits" if ledger["fits"] else "exceeded"
