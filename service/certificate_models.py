"""Wire models of certificates: what the routes return, and what OpenAPI says of stored text.

A result, a bundle and curves are stored or computed as text and returned byte for byte; their
models document them. ``PlanDocument`` stands for a plan, whose schema is that of the plan room.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import Field, RootModel

from affidavit.client import DIGEST, Interval, ResponseModel, is_none
from affidavit.plan import CLAIM_PATTERN, LARGEST, SMALLEST
from affidavit.service.lifecycle.status import Status
from affidavit.service.models import ProblemReason

Verdict = Literal["certified", "under_noised", "unproved", "refused", "undecided"]
Identifier = Annotated[str, Field(pattern=DIGEST)]
Object = dict[str, Any]
Count = Annotated[int, Field(ge=1)]
Claimed = (
    Annotated[float, Field(ge=SMALLEST, le=LARGEST)] | Annotated[str, Field(pattern=CLAIM_PATTERN)]
)


def optional(description: str | None = None) -> Any:
    """A field that is left out where it has no value."""
    return Field(default=None, exclude_if=is_none, description=description)


class PlanDocument(RootModel[Object]):
    """A training plan, with one phase or several."""


class BundleDocument(RootModel[Object]):
    """The signed envelope, and its place in the audit log."""


class CertificateSummary(ResponseModel):
    """A certificate's current issue as a list shows it."""

    id: Identifier
    untrusted: bool = Field(description="Signed by a development key.")
    issue: Count
    status: Status
    plan_digest: Identifier
    name: str | None
    dataset: str | None
    adjacency: str
    verdict: Verdict
    epsilon_upper: float | None = Field(description="In nats.")
    delta: float | None
    created_at: datetime
    not_after: datetime


class IssuedCertificate(ResponseModel):
    """The issue that carries a result."""

    id: Identifier
    bundle: BundleDocument
    issue: Count = Field(description="Its number; the first issue is 1.")
    envelope_digest: Identifier = Field(description="Approvals name it.")
    status: Status


class AssessmentDocument(ResponseModel):
    """What was proved about a plan."""

    verdict: Verdict
    plan_digest: Identifier
    epsilon: Interval | None = Field(description="In nats.")
    delta: Interval | None
    confidence: float | None = Field(
        description="The probability that the bounds hold, over draws from the accountant's "
        "seed; null where they are certain."
    )
    adjacency: str
    noise_multiplier: Object
    sensitivity: float | None
    strategy: Object | None = optional("Where noise is correlated across steps.")
    groups: list[Object] | None = optional(
        "ε of groups of records and of other relations, where they were requested."
    )
    mu: float | None
    accountants: list[Object]
    reasons: list[ProblemReason]
    warnings: list[Object]
    planning: list[Object] = Field(description="For information; no guarantee.")
    obligations: list[Object]


class Result(AssessmentDocument):
    """What was proved, judged by a policy, and signed."""

    policy: Object | None = optional("Name, version and digest of the policy that judged it.")
    waived: list[Object] | None = optional("Reasons, each with its waiver.")
    certificate: IssuedCertificate


class DiagnosisRequest(ResponseModel):
    """A training plan and the number claimed for it."""

    plan: PlanDocument
    claimed_epsilon: Claimed | None = optional("ε in nats, at the plan's δ.")
    claimed_noise_multiplier: Claimed | None = optional(
        "σ of every block, said to reach the plan's target."
    )


class Explanation(ResponseModel):
    """Mistakes that lead to the claimed number."""

    mistakes: list[str]
    accountant: str | None = optional()
    reproduces: float | None = optional()
    differs_by: float | None = optional()
    agreement: Literal["exactly", "cut", "nearly"] | None = optional()
    steps: list[Object] | None = optional()


class Diagnosis(ResponseModel):
    """What explains a claim; neither signed nor stored."""

    claim: Object
    summary: str
    certified: Object = Field(description="A result without a certificate.")
    explanations: list[Explanation]
    corrected: Object | None


class CurvesDocument(ResponseModel):
    """A guarantee beside its one ε: at any δ, against attacks, and as a trade-off function."""

    plan_digest: Identifier
    verdict: Verdict
    accountant: Object
    adjacency: str
    unit: str
    target: Object
    epsilon_at_delta: list[Object]
    delta_at_epsilon: list[Object]
    mu: float | None = Field(description="Of Gaussian DP, where it is exact.")
    rho: float | None = Field(description="Of zCDP, where it is exact.")
    renyi: Object
    trade_off: list[Object]
    advantage: Interval | None = Field(description="Largest TPR - FPR of an attack.")
    true_positive_rate: list[Object]
    posterior: list[Object]
    profile: list[Object]
    digest: Identifier = Field(description="SHA-256 of the rest as RFC 8785 canonical JSON.")
