"""All that was judged, as one JSON document for programs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from affidavit.gate.checking.finding import Finding
from affidavit.gate.checking.verdict import Judged
from affidavit.gate.exits import worst


def json_document(judged: Sequence[Judged]) -> str:
    """``{"exit", "plans": [{"file", "pointer", "verdict", "result", "findings"}]}``."""
    document = {
        "exit": int(worst(one.exit for one in judged)),
        "plans": [
            {
                "file": one.file,
                "name": one.name,
                "exit": int(one.exit),
                "verdict": "refused" if one.result is None else one.result["verdict"],
                "result": one.result,
                "findings": [_finding(finding) for finding in one.findings],
            }
            for one in judged
        ],
    }
    return json.dumps(document, ensure_ascii=False, allow_nan=False) + "\n"


def _finding(found: Finding) -> dict[str, Any]:
    return {**asdict(found), "blocks": found.blocks}
