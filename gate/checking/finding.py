"""Findings about plans, their fixes, and the result of checking a plan."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from affidavit.gate.exit_codes import Exit
from affidavit.plan import Reason


class UnreadableBase(Exception):
    """The earlier version of a plan cannot be read; the message says why."""


Level = Literal["error", "warning", "note"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Edit:
    """Replace the characters ``start`` to ``end``; lines and columns count from 1."""

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
    """A change after which the plan is certified, with ε at most ``epsilon``."""

    description: str
    changes: tuple[tuple[str, Any, Any], ...]
    """Pointer, value before and value after, of each field."""
    epsilon: float
    edits: tuple[Edit, ...] = ()
    """Edits of the file; empty if the change must be made by hand."""

    @classmethod
    def from_document(cls, document: dict[str, Any]) -> Fix:
        """Return the fix of the data that ``asdict`` makes of it."""
        changes = tuple((pointer, old, new) for pointer, old, new in document["changes"])
        edits = tuple(Edit(**edit) for edit in document["edits"])
        return cls(**document | {"changes": changes, "edits": edits})


@dataclass(frozen=True, kw_only=True, slots=True)
class GateFinding:
    """A finding; only unwaived findings of level ``error`` block.

    ``rule`` is a reason's code, ``mistake`` the known mistakes that explain it (joined by " + "),
    and ``numbers`` those of the message, for programs.
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
    def of(cls, file: str, reason: Reason, level: Level = "error") -> GateFinding:
        """Return the finding for a reason in ``file``."""
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

    @classmethod
    def from_document(cls, document: dict[str, Any]) -> GateFinding:
        """Return the finding of the data that ``asdict`` makes of it."""
        return cls(**document | {"fixes": tuple(map(Fix.from_document, document["fixes"]))})

    @property
    def blocks(self) -> bool:
        """Whether the finding blocks the plan."""
        return self.level == "error" and self.waiver is None

    @property
    def text(self) -> str:
        """Message and remedy in one paragraph."""
        mistake = f" Known mistake: {self.mistake}." if self.mistake else ""
        return f"{self.message}{mistake} {self.remedy}".rstrip()

    def line_text(self, *, with_pointer: bool = False) -> str:
        """Return the finding on one line, with its place and, on request, the field's pointer."""
        place = f":{self.line}:{self.column}" if self.line is not None else ""
        field = f" {self.pointer}" if with_pointer and self.pointer else ""
        waived = " (waived)" if self.waiver is not None else ""
        return f"{self.file}{place}: {self.rule}{field}{waived}: {self.text}"


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckResult:
    """A checked plan; ``result`` is None if the plan could not be read.

    ``result`` is the result document and ``headline`` the verdict in one sentence. ``adds_up``:
    whether its ε adds up with that of the file's other plans, for the same records.
    """

    file: str
    name: str
    exit: Exit
    findings: tuple[GateFinding, ...]
    result: dict[str, Any] | None = None
    headline: str = ""
    adds_up: bool = False

    @classmethod
    def from_document(cls, document: dict[str, Any]) -> CheckResult:
        """Return the result of the data that ``asdict`` makes of it.

        Raises ``KeyError``, ``TypeError`` and ``ValueError`` for other data.
        """
        findings = tuple(map(GateFinding.from_document, document["findings"]))
        return cls(**document | {"findings": findings, "exit": Exit(document["exit"])})


def unreadable_result(file: str, reasons: Iterable[Reason], name: str | None = None) -> CheckResult:
    """Return the result of a file whose plan could not be read."""
    findings = tuple(GateFinding.of(file, reason) for reason in reasons)
    return CheckResult(file=file, name=name or file, exit=Exit.USAGE, findings=findings)
