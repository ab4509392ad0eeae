r"""Wire models: base classes and field types of request and response bodies.

A request body is a ``RequestModel``, parsed as strictly as a plan: duplicate keys, NaN, lone
surrogates, unknown fields, excessive depth and size are refused with the position of the mistake.
A response body is a ``ResponseModel``, filled from the attributes of the returned object.

>>> class CommentRequest(RequestModel):
...     noun = "a comment"
...     text: Comment
>>> CommentRequest.from_data({"text": "fine"}).text
'fine'
>>> CommentRequest.load(b'{"text": "fine", "text": "bad"}')
Traceback (most recent call last):
affidavit.service.core.errors.MalformedRequest: duplicate_key at /text: ...

Results, bundles and curves of certificates are stored or computed as text and returned unchanged;
their models only document them. ``PlanDocument`` refers to the plan's own schema.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, RootModel, StringConstraints, ValidationError

from affidavit.client import DIGEST, Interval, ResponseModel, is_none
from affidavit.plan import (
    CLAIM_PATTERN,
    MAX_CLAIM,
    MIN_CLAIM,
    DocumentSchema,
    MalformedPlan,
    Reason,
    StrictModel,
    load_json,
)
from affidavit.service.core.errors import MalformedRequest

Value = TypeVar("Value")
UUID = r"^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$"
# Tabs and line ends are the only control characters in text; PostgreSQL refuses NUL.
_PRINTABLE = r"^[^\x00-\x08\x0b\x0c\x0e-\x1f\x7f]*$"

Digest = Annotated[str, StringConstraints(strict=True, pattern=DIGEST)]
Comment = Annotated[str, StringConstraints(strict=True, max_length=2000, pattern=_PRINTABLE)]


class RequestModel(StrictModel):
    """Base of JSON request bodies: frozen, without unknown fields.

    Error messages contain ``noun`` and ``guide``, the page that describes the fields.
    ``error_code`` is the code of the problem, and ``max_bytes`` limits the body.
    """

    noun: ClassVar[str] = "a request"
    guide: ClassVar[str] = "/docs"
    error_code: ClassVar[str] = "malformed_request"
    max_bytes: ClassVar[int] = 64 * 1024

    @classmethod
    def load(cls, content: bytes) -> Any:
        """Parse ``content`` as JSON without validation; raises ``MalformedRequest``."""
        try:
            return load_json(content, cls.max_bytes).data
        except MalformedPlan as error:
            raise cls._malformed([cls._with_remedy(reason) for reason in error.reasons]) from None

    @classmethod
    def from_data(cls, data: Any) -> Self:
        """Validate JSON data; raises ``MalformedRequest`` with every mistake."""
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            kind = DocumentSchema(
                cls.noun, lambda: {name: name for name in cls.model_fields}, cls.guide
            )
            raise cls._malformed(kind.reasons(error, data)) from None

    @classmethod
    def _malformed(cls, reasons: Sequence[Reason]) -> MalformedRequest:
        return MalformedRequest(*reasons, code=cls.error_code)

    @classmethod
    def _with_remedy(cls, reason: Reason) -> Reason:
        """Return ``reason`` with this model's remedy where the loader's own is about plans."""
        remedies = {
            "empty": f"Send {cls.noun}; see {cls.guide}.",
            "too_large": f"Send {cls.noun} of at most {cls.max_bytes} bytes; see {cls.guide}.",
        }
        return replace(reason, remedy=remedies.get(reason.code, reason.remedy))


class QueryModel(BaseModel):
    """Base of query parameters, without unknown names."""

    model_config = ConfigDict(extra="forbid", frozen=True)


Internal = Annotated[Value, Field(exclude=True, repr=False)]
"""A field of a stored resource that no answer contains."""

Position = Annotated[int | None, Field(ge=1, exclude_if=is_none)]
"""A line or column, omitted if the text has no positions."""


class ProblemReason(ResponseModel):
    """What is wrong, where, and how to fix it; ``code`` never changes its meaning."""

    code: str
    pointer: str = Field(description="RFC 6901 pointer into the plan or the request.")
    message: str
    remedy: str
    line: Position = None
    column: Position = None


# ---- certificates --------------------------------------------------------------------

Verdict = Literal["certified", "under_noised", "unproved", "refused", "undecided"]
Identifier = Annotated[str, Field(pattern=DIGEST)]
Object = dict[str, Any]
Count = Annotated[int, Field(ge=1)]
Claimed = (
    Annotated[float, Field(ge=MIN_CLAIM, le=MAX_CLAIM)]
    | Annotated[str, Field(pattern=CLAIM_PATTERN)]
)


def optional(description: str | None = None) -> Any:
    """Return a field that is omitted if it has no value."""
    return Field(default=None, exclude_if=is_none, description=description)


class PlanDocument(RootModel[Object]):
    """A training plan, with one phase or several."""


class BundleDocument(RootModel[Object]):
    """The signed envelope, and its place in the audit log."""


class CertificateSummary(ResponseModel):
    """A certificate's current issue, as shown in a list."""

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
    """The issue that contains a result."""

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
    gaussian_bound: Object | None = optional(
        "The least μ whose Gaussian curve bounds the guarantee, where it was requested."
    )
    accountants: list[Object]
    reasons: list[ProblemReason]
    warnings: list[Object]
    planning: list[Object] = Field(description="For information; not a guarantee.")
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
        "The σ of every block that is claimed to reach the plan's target."
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
    answer: Literal["holds", "refuted", "not_decided"] = Field(
        description="The largest number that rounds to the claim is not below the upper bound, is "
        "below the lower bound, or lies between them."
    )
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
    gaussian_bound: Object | None = Field(
        default=None, description="The least μ whose Gaussian curve bounds the guarantee."
    )
    renyi: Object
    trade_off: list[Object]
    advantage: Interval | None = Field(description="Largest TPR - FPR of an attack.")
    true_positive_rate: list[Object]
    posterior: list[Object]
    profile: list[Object]
    digest: Identifier = Field(description="SHA-256 of the rest as RFC 8785 canonical JSON.")


class Status(StrEnum):
    """The status of an issue; its values are part of the API."""

    ACTIVE = "active"
    AWAITING_APPROVAL = "awaiting_approval"
    EXPIRED = "expired"
    SUPERSEDED = "superseded"
    REJECTED = "rejected"
    REVOKED = "revoked"
    KEY_REVOKED = "key_revoked"
