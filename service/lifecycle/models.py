r"""Wire models of decisions about certificates, their issues and the status list.

>>> DecisionRequest.from_data({"decision": "approve", "envelope": "sha256:1"})
Traceback (most recent call last):
affidavit.service.errors.MalformedRequest: invalid_value at /envelope: ...
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from affidavit.client import ResponseModel, Revocation, RevocationCode
from affidavit.service.lifecycle.status import Status
from affidavit.service.models import Comment, Digest, RequestModel

GUIDE = "docs/how-to/approvals-and-revocation.md"

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
            raise PydanticCustomError("no_reason", "a rejection needs a comment that says why")
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
