"""The steps of a verification, and the error that names the one that failed."""

from __future__ import annotations

from affidavit.plan import CodedError

STEPS = (
    "size and form",
    "payload type",
    "key",
    "signature",
    "statement",
    "key window",
    "plan",
    "accountants and policy",
    "validity",
    "inclusion",
    "checkpoint",
    "consistency",
    "status",
)


class VerificationError(CodedError):
    """A step rejected the bundle; ``step`` is its number."""

    def __init__(self, step: int, code: str, message: str, remedy: str) -> None:
        super().__init__(code, message, remedy)
        self.step = step
        self.step_name = STEPS[step - 1]

    def __str__(self) -> str:
        return f"step {self.step} ({self.step_name}): {self.message} {self.remedy}"
