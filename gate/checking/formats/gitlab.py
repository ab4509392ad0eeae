"""GitLab's code quality report, a list of issues with a fingerprint each.

Reference: GitLab documentation, "Code Quality", implementing a custom tool.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

from affidavit.gate.checking.finding import Finding
from affidavit.gate.checking.verdict import Judged

SEVERITIES = {"error": "blocker", "warning": "minor", "note": "info"}


def gitlab(judged: Sequence[Judged]) -> str:
    """The report; a waived finding stays in it as information."""
    issues = [
        {
            "description": finding.text,
            "check_name": f"affidavit/{finding.rule}",
            "fingerprint": fingerprint(one, finding),
            "severity": "info" if finding.waiver is not None else SEVERITIES[finding.level],
            "location": {"path": finding.file, "lines": {"begin": finding.line or 1}},
        }
        for one in judged
        for finding in one.findings
    ]
    return json.dumps(issues, ensure_ascii=False, indent=1) + "\n"


def fingerprint(judged: Judged, found: Finding) -> str:
    """The same for the same finding in the next run, whatever line it has moved to."""
    parts = (judged.name, found.rule, found.pointer, found.message)
    return hashlib.sha256("\0".join(parts).encode("utf-8", "surrogatepass")).hexdigest()
