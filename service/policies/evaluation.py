"""Which policy and waivers apply to a plan, and whether they change during a request.

A certification request is a plan, its policy and the waivers in force for its requester; the
id of its certificate follows from it before any accounting. Accounting takes time, so the
policy set is read again in the transaction that stores the certificate: if it has changed,
the assessment is judged by the new one, and the certificate names that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from sqlalchemy import Connection

from affidavit.certificate import Assessment, certificate_id
from affidavit.certificate.policy import Budget, Policy, Waiver
from affidavit.plan import Plan
from affidavit.service.policies.policy_set import PolicySet
from affidavit.service.policies.store import PolicyStore, lock_policies
from affidavit.service.teams import DEFAULT, acting_for, in_id


class PoliciesChanged(Exception):
    """The policy set is no longer the one by which a certificate was judged."""


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
        """The request for ``plan`` by ``requester`` of ``team`` under ``policies``."""
        waivers = policies.waivers_of(plan, requester)
        return cls(plan, requester, policies.policy_of(plan.dataset.name), waivers, team)

    @cached_property
    def id(self) -> str:
        """The id of its certificate."""
        return certificate_id(self.plan, self.policy, self.waivers, in_id(self.team))

    def with_id(self, known: str) -> CertificationRequest:
        """This request, with its id computed before."""
        self.__dict__["id"] = known  # where cached_property stores it
        return self


def budget_status(assessment: Assessment, ledger: Mapping[str, Any] | None) -> Budget:
    """Whether the run fits its data set's budget; ``ledger`` is the ledger's position, if any.

    A plan that is not certified costs nothing, so its budget is not a further reason.
    """
    if assessment.verdict != "certified":
        return "fits"
    if ledger is None:
        return "none"
    return "fits" if ledger["fits"] else "exceeded"


def is_pending_budget(verdict: str, result: str) -> bool:
    """Whether a stored result is a refusal that a larger budget could end.

    The budget is not part of the request, so such a plan is judged again when it is resent.
    """
    return verdict == "refused" and '"code": "policy_budget"' in result


def certification_request(
    store: PolicyStore, plan: Plan, requester: str, team: str
) -> CertificationRequest:
    """The request under the policy set in force for ``team``; raises ``PolicyTampered``."""
    with acting_for(team):
        return CertificationRequest.under(store.policy_set(), plan, requester, team)


def require_unchanged(
    store: PolicyStore, connection: Connection, *requests: CertificationRequest
) -> None:
    """Lock the policy set until the transaction ends.

    Raises ``PoliciesChanged`` and ``PolicyTampered``.
    """
    lock_policies(connection, shared=True)
    policies = store.policy_set_in(connection)
    if any(
        CertificationRequest.under(policies, request.plan, request.requester, request.team)
        != request
        for request in requests
    ):
        raise PoliciesChanged
