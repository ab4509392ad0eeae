r"""Wire models of decisions about certificates, their issues and the status list.

>>> DecisionRequest.from_json(b'{"decision": "approve", "envelope": "sha256:1"}')
Traceback (most recent call last):
affidavit.service.errors.MalformedRequest: invalid_value at /envelope: ...
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from affidavit.client import ResponseModel
from affidavit.service.lifecycle.status import Status
from affidavit.service.models import Comment, Digest, RequestModel

GUIDE = "docs/how-to/approvals-and-revocation.md"
STATUS_LIST_TYPE = "application/vnd.affidavit.status-list.v1+json"

REVOCATION_CODES = {
    "plan_error": "the plan does not describe the run",
    "accounting_error": "the guarantee is wrong",
    "run_error": "the run did not do what was certified",
    "data_withdrawn": "the data may no longer be used",
    "policy_violation": "the organisation's policies do not allow it",
    "key_compromise": "somebody else may have used the signing key",
    "other": "see the reason",
}
"""Codes of a revocation; they never change their meaning."""

RevocationCode = Annotated[
    Literal[
        "plan_error",
        "accounting_error",
        "run_error",
        "data_withdrawn",
        "policy_violation",
        "key_compromise",
        "other",
    ],
    Field(
        description="; ".join(f"`{code}`: {text}" for code, text in REVOCATION_CODES.items()),
    ),
]
Verb = Literal["approve", "reject"]


class DecisionRequest(RequestModel):
    """An approval or a rejection of the envelope with this digest."""

    noun = "a decision"
    guide = GUIDE
    error_code = "malformed_decision"

    decision: Verb = "approve"
    envelope: Digest = Field(description="The envelope_digest of the issue that was reviewed.")
    comment: Comment = Field("", description="Required to reject.")

    @model_validator(mode="after")
    def _rejection_has_a_comment(self) -> Self:
        if self.decision == "reject" and not self.comment.strip():
            raise PydanticCustomError("no_reason", "a rejection says why in its comment")
        return self


class RevocationRequest(RequestModel):
    """A revocation of the current issue; with ``envelope``, only if it is still current."""

    noun = "a revocation"
    guide = GUIDE
    error_code = "malformed_decision"

    code: RevocationCode
    reason: Annotated[Comment, Field(min_length=1)]
    envelope: Digest | None = Field(None, description="Revoke only if this is still current.")


class Decision(ResponseModel):
    """A decision about an issue."""

    decision: Verb
    approver: str
    at: datetime
    comment: str


class IssueApprovals(ResponseModel):
    """The approvals that an issue requires, and the decisions about it."""

    required: int
    decisions: list[Decision]


class Revocation(ResponseModel):
    """A revocation of an issue and of every issue before it."""

    certificate_id: Digest
    issue: int
    envelope_digest: Digest
    code: RevocationCode
    reason: str
    revoked_by: str
    at: datetime


class Issue(ResponseModel):
    """An issue of a certificate with its status, its decisions and its revocation."""

    issue: int = Field(ge=1)
    untrusted: bool
    status: Status
    verdict: str
    envelope_digest: Digest
    key_id: str
    created_at: datetime
    not_after: datetime
    approvals: IssueApprovals
    revocation: Revocation | None


class SignedStatusList(ResponseModel):
    """A DSSE envelope; its payload is the status list, which is valid for an hour."""

    payload: str
    payload_type: Literal["application/vnd.affidavit.status-list.v1+json"] = Field(
        alias="payloadType"
    )
    signatures: list[dict[str, str]]
