"""The script for Slurm gives the worker what the allocation has, and no secret to Slurm."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.deploy.manifests import DEPLOY, ROOT, parsed, variables

SCRIPT = DEPLOY / "slurm" / "worker.sbatch"
TEXT = SCRIPT.read_text()
TOKEN = "a token of somebody's"
SRUN = """#!/bin/sh
# Options of its own, then what it runs.
while [ "${1#--}" != "$1" ]; do echo "srun $1" >> "$CALLS"; shift; done
exec "$@"
"""
AFFIDAVIT = """#!/bin/sh
for each; do printf '%s\\n' "$each"; done
echo "token=$AFFIDAVIT_TOKEN home=$AFFIDAVIT_HOME threads=$OMP_NUM_THREADS"
"""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder with what the script reads, and stand-ins for the programs that it runs."""
    (tmp_path / "a site").mkdir()
    (tmp_path / "a site" / "token").write_text(TOKEN + "\n")
    for name, text in (("srun", SRUN), ("affidavit", AFFIDAVIT)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    return tmp_path / "a site"


def run(site: Path, *arguments: str, **slurm: str) -> subprocess.CompletedProcess[str]:
    environment = {
        "PATH": f"{site.parent}:{os.environ['PATH']}",
        "HOME": str(site.parent),
        "CALLS": str(site.parent / "calls"),
        "AFFIDAVIT_SITE": str(site),
        "AFFIDAVIT_SERVER": "https://affidavit.example.com",
        "SLURM_JOB_ID": "4711",
        **slurm,
    }
    provided = {key: value for key, value in environment.items() if value}
    return subprocess.run(
        ["bash", SCRIPT, *arguments], env=provided, capture_output=True, text=True, check=False
    )


def test_shellcheck_finds_nothing() -> None:
    checked = Path(sys.executable).parent / "shellcheck"
    scripts = [SCRIPT, DEPLOY / "compose" / "roles.sh"]
    subprocess.run([checked, *scripts], check=True, capture_output=True)


@pytest.mark.parametrize(
    ("slurm", "gpus", "threads"),
    [
        ({"SLURM_GPUS_ON_NODE": "2", "SLURM_CPUS_PER_TASK": "8"}, 2, 4),
        ({"SLURM_GPUS_ON_NODE": "1", "SLURM_CPUS_PER_TASK": "8"}, 1, 8),
        ({"SLURM_CPUS_PER_TASK": "3"}, 0, 3),
        ({}, 0, 1),
    ],
)
def test_the_worker_has_what_the_allocation_has(
    site: Path, slurm: dict[str, str], gpus: int, threads: int
) -> None:
    ran = run(site, "--microbatch", "256", **slurm)
    assert ran.returncode == 0, ran.stderr
    *words, last = ran.stdout.splitlines()
    options = parsed(["affidavit", *words])
    assert (options["gpu"], options["processes"]) == (gpus > 0, max(1, gpus))
    assert (options["once"], options["microbatch"]) == (True, 256)
    assert options["name"] == "slurm-4711"
    assert options["keys"] == [site / "service-keys.json"]
    assert options["outputs"] == site / "runs"
    assert last == f"token={TOKEN} home={site} threads={threads}"
    # It is a step of the job: Slurm sends its signals to steps.
    calls = (site.parent / "calls").read_text().splitlines()
    assert calls == [
        "srun --ntasks=1",
        f"srun --cpus-per-task={slurm.get('SLURM_CPUS_PER_TASK', 1)}",
    ]


@pytest.mark.parametrize("missing", ["AFFIDAVIT_SERVER", "SLURM_JOB_ID"])
def test_what_is_missing_is_named(site: Path, missing: str) -> None:
    ran = run(site, **{missing: ""})
    assert ran.returncode != 0
    assert missing in ran.stderr
    assert not ran.stdout


def test_no_secret_goes_to_slurm() -> None:
    """The script is kept by Slurm, and so is what it exports; the token is in neither."""
    directives = re.findall(r"^#SBATCH (--[a-z-]+)=(\S+)$", TEXT, re.MULTILINE)
    assert dict(directives)["--signal"] == "TERM@3600"  # without B: to the steps
    assert dict(directives)["--nodes"] == dict(directives)["--ntasks"] == "1"
    assert "AFFIDAVIT_TOKEN=$(<" in TEXT
    assert not re.search(r"--(token|env|export)", TEXT)


def test_its_variables_are_on_its_page() -> None:
    page = (ROOT / "docs/how-to/run-on-slurm.md").read_text()
    read = set(re.findall(r"\$\{(AFFIDAVIT_\w+)", TEXT))
    assert set(re.findall(r"^\| `(AFFIDAVIT_\w+)`", page, re.MULTILINE)) == read
    assert {"AFFIDAVIT_SERVER", "AFFIDAVIT_TOKEN", "AFFIDAVIT_HOME"} <= variables()
