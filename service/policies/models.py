"""Wire models of policies, waivers and simulations.

>>> WaiverRequest.from_data({"rule": "under_noised", "policy": "nlg"})
Traceback (most recent call last):
affidavit.service.errors.MalformedRequest: invalid_value at /rule: ...
"""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any, Literal, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from affidavit.certificate import Instant, parse_instant
from affidavit.certificate.policy import Explanation, Person, WaivableRule
from affidavit.client import (
    Page,
    PolicyDocument,
    PolicyReference,
    PolicySummary,
    PolicyVersion,
    ResponseModel,
)
from affidavit.plan import Name
from affidavit.service.ledger.models import TeamName
from affidavit.service.models import Digest, ProblemReason, RequestModel, Verdict
from affidavit.service.policies.policy_set import PolicySet
from affidavit.service.policies.store import StoredPolicy, StoredWaiver

WaiverStatus = Literal["in_force", "expired", "revoked"]


def summary_of(stored: StoredPolicy, policies: PolicySet) -> PolicySummary:
    """The response for ``stored``."""
    return PolicySummary(**_fields_of(stored, policies))


def version_of(stored: StoredPolicy, policies: PolicySet) -> PolicyVersion:
    """The response for ``stored``, with its document and statement."""
    return PolicyVersion(
        **_fields_of(stored, policies),
        policy=PolicyDocument(stored.policy.as_document()),
        envelope=None if stored.envelope is None else json.loads(stored.envelope),
    )


def _fields_of(stored: StoredPolicy, policies: PolicySet) -> dict[str, Any]:
    return {
        **stored.policy.reference(),
        "datasets": stored.policy.as_document()["datasets"],
        "active": policies.is_active(stored.policy),
        "created_by": stored.created_by,
        "created_at": stored.created_at,
    }


class WaiverRequest(RequestModel):
    """A waiver to grant; who grants it, and when, follows from the request."""

    noun = "a waiver"
    guide = "docs/how-to/policies.md"
    error_code = "malformed_waiver"

    rule: WaivableRule
    policy: Name
    plan_digest: Digest | None = None
    dataset: Name | None = None
    owner: Person
    reason: Explanation
    expires_at: Instant
    team: TeamName | None = None

    @model_validator(mode="after")
    def _has_one_scope(self) -> Self:
        if (self.plan_digest is None) == (self.dataset is None):
            raise PydanticCustomError("scope", "give either plan_digest or dataset")
        return self

    @property
    def expires(self) -> datetime:
        """When it expires."""
        return parse_instant(self.expires_at)


class WaiverRevocation(ResponseModel):
    """Who revoked a waiver, when and why."""

    by: str
    at: datetime
    reason: str


class WaiverView(ResponseModel):
    """A waiver with its status, its signed envelope and its revocation."""

    id: Digest
    status: WaiverStatus
    waiver: dict[str, Any]
    revoked: WaiverRevocation | None
    envelope: dict[str, Any]

    @classmethod
    def of(cls, stored: StoredWaiver, now: datetime) -> Self:
        """``stored`` with its status at ``now``."""
        revoked = None
        if stored.revoked_at is not None:
            revoked = {
                "by": stored.revoked_by,
                "at": stored.revoked_at,
                "reason": stored.revocation_reason,
            }
        return cls.model_validate(
            {
                "id": stored.waiver.id,
                "status": stored.status_at(now),
                "waiver": stored.waiver.as_document(),
                "revoked": revoked,
                "envelope": json.loads(stored.envelope),
            }
        )


class VerdictChange(ResponseModel):
    """A certificate whose verdict a draft policy would change, and why."""

    certificate_id: Digest
    plan_digest: Digest
    name: str | None
    dataset: str | None
    verdict: Verdict
    would_be: Verdict
    reasons: list[ProblemReason]


class SimulationResult(Page[VerdictChange]):
    """What a draft would change on one page of certificates; ``next`` takes the same body."""

    policy: PolicyReference
    judged: int = Field(
        ge=0, description="Certificates of this page that would come under the policy."
    )
