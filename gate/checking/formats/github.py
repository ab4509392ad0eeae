"""GitHub's workflow commands: an annotation at the line of each finding.

Reference: GitHub Actions, "Workflow commands", setting an error message; what follows the two
colons may hold anything once ``%``, carriage returns and line feeds are written as escapes.
"""

from __future__ import annotations

from collections.abc import Sequence

from affidavit.gate.checking.finding import Finding
from affidavit.gate.checking.verdict import Judged

LEVELS = {"error": "error", "warning": "warning", "note": "notice"}
_MESSAGE = str.maketrans({"%": "%25", "\r": "%0D", "\n": "%0A"})
_PROPERTY = str.maketrans({"%": "%25", "\r": "%0D", "\n": "%0A", ":": "%3A", ",": "%2C"})


def github(judged: Sequence[Judged]) -> str:
    """One command a finding; a waived one is only a notice."""
    return "".join(_command(finding) + "\n" for one in judged for finding in one.findings)


def _command(found: Finding) -> str:
    level = "notice" if found.waiver is not None else LEVELS[found.level]
    properties = {"file": found.file, "title": f"affidavit: {found.rule}"}
    if found.line is not None:
        properties |= {"line": str(found.line), "col": str(found.column or 1)}
    said = ",".join(f"{key}={value.translate(_PROPERTY)}" for key, value in properties.items())
    waived = "waived: " if found.waiver is not None else ""
    return f"::{level} {said}::{(waived + found.text).translate(_MESSAGE)}"
