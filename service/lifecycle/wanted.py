r"""What a client sends to approve, reject or revoke.

>>> read_decision(b'{"decision": "approve", "envelope": "sha256:1"}')
Traceback (most recent call last):
affidavit.service.lifecycle.wanted.MalformedDecision: invalid_value at /envelope: ...
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, StringConstraints, model_validator
from pydantic_core import PydanticCustomError

from affidavit.plan import PlanError, StrictModel
from affidavit.service.wanted import Wanted, read_wanted

REASONS = {
    "plan_error": "the plan does not say what is, or was to be, run",
    "accounting_error": "the guarantee was found to be wrong",
    "run_error": "the run did not do what was certified",
    "data_withdrawn": "the data may not be used any more",
    "policy_violation": "the organisation's rules do not allow it",
    "key_compromise": "somebody else may have used the key that signed it",
    "other": "what the text says",
}
"""Codes of a revocation and what they mean; they never change their meaning."""

Digest = Annotated[str, StringConstraints(strict=True, pattern=r"^sha256:[0-9a-f]{64}$")]
# Of the control characters only tab and line ends are text; PostgreSQL takes no NUL at all.
_PRINTABLE = r"^[^\x00-\x08\x0b\x0c\x0e-\x1f\x7f]*$"
Comment = Annotated[str, StringConstraints(strict=True, max_length=2000, pattern=_PRINTABLE)]
Why = Annotated[Comment, Field(min_length=1)]


class MalformedDecision(PlanError):
    """The body is not a decision that can be made."""


class WantedDecision(StrictModel):
    """An approval or a rejection of the envelope with that digest."""

    decision: Literal["approve", "reject"] = "approve"
    envelope: Digest
    comment: Comment = ""

    @model_validator(mode="after")
    def _a_rejection_has_a_reason(self) -> Self:
        if self.decision == "reject" and not self.comment.strip():
            raise PydanticCustomError("no_reason", "a rejection says why in its comment")
        return self


class WantedRevocation(StrictModel):
    """A revocation of the current issue; of the one with ``envelope``, where that is given."""

    code: Literal[
        "plan_error",
        "accounting_error",
        "run_error",
        "data_withdrawn",
        "policy_violation",
        "key_compromise",
        "other",
    ]
    reason: Why
    envelope: Digest | None = None


def read_decision(raw: bytes) -> WantedDecision:
    """The decision that ``raw`` (JSON) says; raises ``MalformedDecision``."""
    return _read(WantedDecision, raw, "a decision")


def read_revocation(raw: bytes) -> WantedRevocation:
    """The revocation that ``raw`` (JSON) asks for; raises ``MalformedDecision``."""
    return _read(WantedRevocation, raw, "a revocation")


def _read(model: type[Wanted], raw: bytes, what: str) -> Wanted:
    page = "docs/how-to/approvals-and-revocation.md"
    return read_wanted(model, raw, what, page, MalformedDecision)
