"""The script for a GPU runs from end to end in its small form, on a processor."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).resolve().parents[2] / "bench" / "gpu" / "run.py"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.soak
def test_the_twin_checks_and_measures_everything() -> None:
    finished = run("--twin")
    assert finished.returncode == 0, finished.stderr
    result = json.loads(finished.stdout)
    assert set(result["checks"]) == {"matrix unit", "clipping", "sums", "noise"}
    assert result["checks"]["noise"].endswith("0.0e+00")
    assert [case["tokens"] for case in result["cases"]] == [8, 16]
    for case in result["cases"]:
        assert case["over_plain"] == pytest.approx(case["private"] / case["plain"])
        assert 0 < case["noise_share"] < 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, and the script would run")
def test_without_a_gpu_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(SCRIPT.parent)
    assert runpy.run_path(str(SCRIPT))["main"]([]) == 2
    assert "--twin" in capsys.readouterr().err
