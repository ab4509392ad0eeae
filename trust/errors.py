"""The steps of a verification, and the errors of verifications and keysets."""

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


class KeysetError(CodedError):
    """The keyset cannot be used."""


class VerificationError(CodedError):
    """A step rejected the bundle; ``step`` is its number."""

    def __init__(self, step: int, code: str, message: str, remedy: str) -> None:
        super().__init__(code, message, remedy)
        self.step = step
        self.step_name = STEPS[step - 1]

    def __str__(self) -> str:
        return f"step {self.step} ({self.step_name}): {self.message} {self.remedy}"
