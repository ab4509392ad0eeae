"""What replay refuses to decide, with a stable code, a message and a remedy."""

from __future__ import annotations

from affidavit.plan import CodedError


class ReplayRefused(CodedError):
    """The loop cannot be replayed; ``code`` is stable."""

    def __str__(self) -> str:
        return f"{self.code}: {self.message} {self.remedy}"
