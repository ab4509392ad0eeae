"""A plan that was judged."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from affidavit.gate.checking.finding import Finding
from affidavit.gate.exits import Exit
from affidavit.plan import Reason


@dataclass(frozen=True, kw_only=True, slots=True)
class Judged:
    """A plan with what was found; without a result it could not be read.

    ``result`` is the result document and ``headline`` the verdict in one sentence.
    """

    file: str
    name: str
    exit: Exit
    findings: tuple[Finding, ...]
    result: dict[str, Any] | None = None
    headline: str = ""


def unreadable(file: str, reasons: Iterable[Reason], name: str | None = None) -> Judged:
    """A file whose plan could not be read."""
    findings = tuple(Finding.of(file, reason) for reason in reasons)
    return Judged(file=file, name=name or file, exit=Exit.USAGE, findings=findings)
