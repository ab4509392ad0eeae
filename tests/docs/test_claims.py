"""Each row of the published claims: its command, as printed, answers what the row says."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from affidavit.gate.cli import app
from tests.support.document_blocks import DOCS, ROOT

ROW = re.compile(r"^\| `([\w.-]+\.yaml)` (?:\|[^|]*){2}\| ([^|]*) \|", re.MULTILINE)


def rows() -> list[tuple[str, str]]:
    return ROW.findall((DOCS / "reference/claims.md").read_text(encoding="utf-8"))


def test_every_claim_has_a_row_with_its_command() -> None:
    named = sorted(name for name, _ in rows())
    assert named == sorted(path.name for path in (ROOT / "claims").glob("*.yaml"))
    assert len(named) >= 60


@pytest.mark.soak
def test_every_row_is_answered_as_printed_and_soon_from_a_warm_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("AFFIDAVIT_CACHE", str(tmp_path))
    spent = 0.0
    for _cold_then_warm in range(2):
        began = time.process_time()
        for name, answer in rows():
            result = CliRunner().invoke(app, ["check", f"claims/{name}"])
            code = {"holds": 0, "refuted": 1, "not decided": 3}[answer]
            assert result.exit_code == code, (name, answer, result.output)
        spent = time.process_time() - began
    assert spent < 60
