"""Words are spelt as dictionaries of common mistakes want them; exceptions stand in pyproject."""

from __future__ import annotations

import subprocess
import sys

from tests.support.document_blocks import ROOT

WHERE = ["docs", "examples", "plan", "mechanisms", "accountants", "certificate", "service", "gate"]
WHERE += [
    "contributing",
    "client",
    "importers",
    "library",
    "trainer",
    "worker",
    "migrations",
    "bench",
]


def test_no_common_misspelling() -> None:
    """The tests are left out: some of them misspell fields."""
    texts = [path.name for path in ROOT.glob("*.md")]
    command = [sys.executable, "-m", "codespell_lib", *WHERE, *texts]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
