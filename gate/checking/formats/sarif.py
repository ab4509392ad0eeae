"""SARIF 2.1.0, with the fixes that can be made in the file.

Reference: OASIS, Static Analysis Results Interchange Format 2.1.0 plus Errata 01.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

from affidavit import __version__
from affidavit.gate.checking.finding import Finding, Fix
from affidavit.gate.checking.formats.gitlab import fingerprint
from affidavit.gate.checking.verdict import Judged

SCHEMA = (
    "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
)


def sarif(judged: Sequence[Judged]) -> str:
    """One run of the tool; positions count Unicode code points."""
    rules = sorted({finding.rule for one in judged for finding in one.findings})
    document = {
        "$schema": SCHEMA,
        "version": "2.1.0",
        "runs": [
            {
                "tool": {
                    "driver": {
                        "name": "affidavit",
                        "semanticVersion": __version__,
                        "rules": [{"id": rule} for rule in rules],
                    }
                },
                "columnKind": "unicodeCodePoints",
                "artifacts": [{"location": {"uri": uri}} for uri in sorted(_files(judged))],
                "results": [
                    _result(one, item, rules.index(item.rule))
                    for one in judged
                    for item in one.findings
                ],
            }
        ],
    }
    return json.dumps(document, ensure_ascii=False, indent=1) + "\n"


def _files(judged: Sequence[Judged]) -> set[str]:
    return {_uri(one.file) for one in judged}


def _result(one: Judged, found: Finding, index: int) -> dict[str, Any]:
    result: dict[str, Any] = {
        "ruleId": found.rule,
        "ruleIndex": index,
        "level": found.level,
        "message": {"text": found.text},
        "locations": [{"physicalLocation": _location(found)}],
        "partialFingerprints": {"affidavit/v1": fingerprint(one, found)},
        "properties": {"pointer": found.pointer, "mistake": found.mistake, **found.numbers},
    }
    if fixes := [_fix(found.file, fix) for fix in found.fixes if fix.edits]:
        result["fixes"] = fixes
    if found.waiver is not None:
        reason = str(found.waiver.get("reason", "waived"))
        result["suppressions"] = [{"kind": "external", "justification": reason}]
    return result


def _location(found: Finding) -> dict[str, Any]:
    place: dict[str, Any] = {"artifactLocation": {"uri": _uri(found.file)}}
    if found.line is not None:
        place["region"] = {"startLine": found.line, "startColumn": found.column or 1}
    return place


def _fix(file: str, fix: Fix) -> dict[str, Any]:
    return {
        "description": {"text": fix.description},
        "artifactChanges": [
            {
                "artifactLocation": {"uri": _uri(file)},
                "replacements": [
                    {
                        "deletedRegion": {
                            "startLine": edit.line,
                            "startColumn": edit.column,
                            "endLine": edit.end_line,
                            "endColumn": edit.end_column,
                        },
                        "insertedContent": {"text": edit.after},
                    }
                    for edit in fix.edits
                ],
            }
        ],
    }


def _uri(file: str) -> str:
    """A file as a relative URI where it is below this folder, as code hosts ask."""
    if os.path.isabs(file):
        near = os.path.relpath(file)
        file = file if near.startswith("..") else near
    return quote(os.path.normpath(file).replace(os.sep, "/"))
