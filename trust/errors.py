"""The steps of a verification, and the errors of verifications and keysets."""

from __future__ import annotations

from typing import ClassVar

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


class StepError(CodedError):
    """A step of a verification rejected what is verified; ``step`` is its number."""

    step_names: ClassVar[tuple[str, ...]]

    def __init__(self, step: int, code: str, message: str, remedy: str) -> None:
        super().__init__(code, message, remedy)
        self.step = step
        self.step_name = self.step_names[step - 1]

    def __str__(self) -> str:
        return f"step {self.step} ({self.step_name}): {self.message} {self.remedy}"


class VerificationError(StepError):
    """A step rejected the bundle."""

    step_names = STEPS
