"""What the gate has to say about one place of one file."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from affidavit.plan import Reason

Level = Literal["error", "warning", "note"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Edit:
    """Characters ``start`` to ``end`` of the file replaced; lines and columns count from 1."""

    start: int
    end: int
    line: int
    column: int
    end_line: int
    end_column: int
    before: str
    after: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Fix:
    """A change after which the plan was certified, with ε at most ``epsilon``."""

    description: str
    changes: tuple[tuple[str, Any, Any], ...]
    """Pointer, value before and value after, of each field."""
    epsilon: float
    edits: tuple[Edit, ...] = ()
    """How to make the change in the file; none where it must be made by hand."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One finding; only those of level ``error`` that nobody waived block.

    ``rule`` is a reason's code and ``mistake`` the known mistakes that explain it, joined
    by " + ". ``numbers`` are those of the message, for programs.
    """

    file: str
    rule: str
    level: Level
    message: str
    remedy: str = ""
    pointer: str = ""
    line: int | None = None
    column: int | None = None
    mistake: str | None = None
    numbers: dict[str, Any] = field(default_factory=dict)
    fixes: tuple[Fix, ...] = ()
    waiver: dict[str, Any] | None = None

    @classmethod
    def of(cls, file: str, reason: Reason, level: Level = "error") -> Finding:
        """A reason as a finding in ``file``."""
        return cls(
            file=file,
            rule=reason.code,
            level=level,
            message=reason.message,
            remedy=reason.remedy,
            pointer=reason.pointer,
            line=reason.line,
            column=reason.column,
        )

    @property
    def blocks(self) -> bool:
        """Whether the plan may not run because of it."""
        return self.level == "error" and self.waiver is None

    @property
    def text(self) -> str:
        """Message and remedy in one paragraph."""
        named = f" Known mistake: {self.mistake}." if self.mistake else ""
        return f"{self.message}{named} {self.remedy}".rstrip()
