"""The script for a GPU runs from end to end in its small form, on a processor."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "bench" / "gpu" / "run.py"
BARE = """
import re, runpy, sys
from importlib.machinery import PathFinder
from importlib.metadata import packages_distributions, requires
from pathlib import Path

allowed = set(sys.argv.pop(1).split("|"))
waiting = ["torch", "numpy", "scipy"]
while waiting:
    name = re.sub("[_.]", "-", waiting.pop().lower())
    if name not in allowed:
        allowed.add(name)
        try:
            needs = [need for need in requires(name) or () if "extra ==" not in need]
        except ImportError:  # for another platform
            continue
        waiting += [re.match(r"[\\w.-]+", need)[0] for need in needs]

OF = packages_distributions()
ROOT = Path(sys.argv[1]).parents[2]

class Bare(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        owners = {re.sub("[_.]", "-", of.lower()) for of in OF.get(name, ())} - {"affidavit"}
        # The repository comes first where a package has a folder of the same name (examples).
        hidden = owners and not owners & allowed and not (ROOT / name).is_dir()
        return None if hidden else PathFinder.find_spec(name, path, target)

sys.meta_path = [Bare if finder is PathFinder else finder for finder in sys.meta_path]
sys.path.insert(0, str(Path(sys.argv[1]).parent))
raise SystemExit(runpy.run_path(sys.argv[1])["main"](sys.argv[2:]))
"""
"""Runs the script where only PyTorch, NumPy, SciPy and the bundle's packages can be imported."""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    bundled = re.search(r"^GPU_NEEDS := (\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert bundled is not None
    return subprocess.run(
        [sys.executable, "-c", BARE, bundled[1], str(SCRIPT), *arguments],
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
    assert set(result["checks"]) == {"matrix unit", "clipping", "sums", "noise", "graph"}
    assert result["checks"]["noise"].endswith("0.0e+00")
    assert [(case["case"].split(",")[0], case["size"]) for case in result["cases"]] == [
        ("GPT-2", 8), ("GPT-2", 16), ("Llama", 8), ("Llama", 8), ("ViT-B/16", 16),
        ("ResNet-50", 16),
    ]  # fmt: skip
    assert "compiled" in result["cases"][0]
    assert len(result["profile"]) > 25
    for case in result["cases"]:
        assert "graph_failed" not in case
        assert case["over_plain"] == pytest.approx(case["private"] / case["plain"])
        assert 0 < case["noise_share"] < 1


@pytest.mark.soak
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, and the script would run")
def test_it_starts_with_the_packages_of_its_bundle() -> None:
    finished = run()
    assert finished.returncode == 2, finished.stderr
    assert "--twin" in finished.stderr
