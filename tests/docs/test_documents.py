"""What the documents say is what the code does."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from affidavit.accountants import decimal_up
from affidavit.assessment import certify
from affidavit.gate import app
from affidavit.plan import (
    ClippingQuantile,
    LaplaceMetric,
    Metric,
    Optimizer,
    Phase,
    Plan,
    Release,
    Selection,
    parse_plan,
)
from affidavit.plan.document import Dataset, Sampling
from docs.generate.mechanisms import document

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))


@pytest.mark.parametrize(
    ("prefix", "part"),
    [
        ("", Plan),
        ("", Phase),
        ("dataset.", Dataset),
        ("sampling.", Sampling),
        ("releases[].", Release),
        ("optimizer.", Optimizer),
        ("extra[].", Metric),
        ("extra[].", LaplaceMetric),
        ("extra[].", ClippingQuantile),
        ("extra[].", Selection),
    ],
)
def test_every_field_of_a_plan_is_documented(prefix: str, part: type[Plan]) -> None:
    text = (ROOT / "docs/reference/plan.md").read_text()
    nested = {"dataset", "sampling", "releases", "optimizer", "extra", "target", "noise"}
    missing = [
        name
        for name in part.model_fields
        if f"`{prefix}{name}`" not in text and not (prefix == "" and name in nested)
    ]
    assert not missing


def test_the_mechanisms_are_written_from_the_registry() -> None:
    """`make docs` writes it."""
    assert (ROOT / "docs/reference/mechanisms.md").read_text() == document()


def test_the_plan_in_the_documents_is_a_plan() -> None:
    text = (ROOT / "docs/reference/plan.md").read_text()
    (plan,) = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    assert parse_plan(plan.encode(), "yaml").name == "e2e-gpt2-dp-muon"


@pytest.mark.ordinary("not digits-shuffled-epochs", "not e2e-dp-muon-shuffled")
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_every_example_says_its_source_and_gets_the_verdict_of_its_name(path: Path) -> None:
    raw = path.read_bytes()
    assert raw.startswith(b"# ")
    result = certify(parse_plan(raw, "yaml"), second_opinion=False)
    blocked = "muon-published" in path.stem or path.stem == "e2e-dp-muon-shuffled"
    assert result.verdict == ("under_noised" if blocked else "certified")


def test_the_optimal_allocation_saves_what_the_example_claims() -> None:
    plan = parse_plan((ROOT / "examples/e2e-dp-muon-optimal.yaml").read_bytes(), "yaml")
    allocation = certify(plan, second_opinion=False).allocation
    assert allocation is not None
    assert allocation["saving"] == pytest.approx(0.37, abs=0.005)


@pytest.mark.parametrize("stem", ["e2e-dp-muon-corrected", "e2e-dp-muon-published"])
def test_the_numbers_of_the_readme_are_those_of_the_demo(stem: str) -> None:
    readme = (ROOT / "README.md").read_text()
    plan = parse_plan((ROOT / f"examples/{stem}.yaml").read_bytes(), "yaml")
    result = certify(plan, second_opinion=False)
    assert result.epsilon is not None
    assert f"{result.verdict}: ε ≤ {decimal_up(result.epsilon.upper, 6)} at" in readme
    if stem.endswith("corrected"):
        assert all(f"{release.required:.7g}" in readme for release in result.releases)


def commands(page: str) -> list[str]:
    """The lines of the first block with the program."""
    blocks = re.findall(r"```sh\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    return next(lines for block in blocks if len(lines := block.strip().splitlines()) > 5)


def test_every_command_of_the_readme_ends_as_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AFFIDAVIT_HOME", str(tmp_path))
    monkeypatch.chdir(ROOT)
    for line in commands("README.md"):
        command, _, told = line.partition(" || ")
        program, *words = shlex.split(command, comments=True)
        assert program == "affidavit"
        words = [str(tmp_path / word) if word == "bundle.json" else word for word in words]
        assert CliRunner().invoke(app, words).exit_code == (1 if told else 0), line


@pytest.mark.soak
@pytest.mark.parametrize("page", ["README.md", "docs/how-to/tour.md"])
def test_every_command_line_of_the_readme_and_the_tour_runs(page: str, tmp_path: Path) -> None:
    """Each line of the first block with the program, in order, as a person would paste it."""
    python = shlex.quote(sys.executable)
    programs = {"affidavit": f"{python} -m affidavit", "python": python}
    for line in commands(page):
        named = r"(^|\| )(affidavit|python)\b"
        command = re.sub(named, lambda found: found[1] + programs[found[2]], line)
        for written in ("bundle.json", "curve.svg", "digits-run"):
            command = command.replace(written, str(tmp_path / written))
        finished = subprocess.run(
            ["bash", "-o", "pipefail", "-c", command],
            cwd=ROOT,
            env={
                "AFFIDAVIT_HOME": str(tmp_path),
                "PATH": "/usr/bin:/bin",
                "HOME": str(tmp_path),
                "OMP_NUM_THREADS": "1",  # small models wait for their threads
            },
            capture_output=True,
            text=True,
            check=False,
        )
        assert finished.returncode == 0, (line, finished.stdout, finished.stderr)
        assert "Traceback" not in finished.stderr
