"""A repository of twelve plans, seven of which have one mistake each."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from affidavit.gate.checking.cache import Evaluator
from affidavit.gate.checking.repository_check import Checked, RepositoryCheck

REPOSITORY = Path(__file__).parents[3]
WEAK_PLAN = """\
version: 1
dataset: {size: 1000}
adjacency: add_remove
sampling: {scheme: poisson, lot_size: 100}
steps: 3
releases: [{name: all, clip_norm: 1, noise_multiplier: 0.5}]
target: {epsilon: 1, delta: 1.0e-5}
"""
WEAK_SCRIPT = """\
from opacus import PrivacyEngine
from torch.utils.data import DataLoader
engine = PrivacyEngine()
model, optimizer, loader = engine.make_private(
    module=model, optimizer=optimizer, data_loader=DataLoader(data, batch_size=100),
    noise_multiplier=0.5, max_grad_norm=1.0)
for epoch in range(1):
    for batch in loader:
        loss(batch).backward()
        optimizer.step()
# affidavit: adjacency=zero_out target_epsilon=1 target_delta=1e-5 dataset_size=1000
"""
VECTORS = REPOSITORY / "tests/vectors/mistakes.json"
RIGHT = ("e2e-dp-muon-corrected", "e2e-dp-sgd-published", "cifar10-wrn16-4-dp-sgd",
         "fixed-size-replace-one", "mnist-balls-in-bins")  # fmt: skip
WRONG = {
    "e2e-dp-muon": "releases",
    "another-delta": "  delta",
    "dp-sgd-noise-on-49-blocks": "releases",
    "corrmom-as-independent": "noise",
    "add-remove-for-replace-one": "adjacency",
    "physical-batch-of-16": "sampling",
    "one-step-lost": "epochs",
}
"""Vectors of known mistakes, with the field that each is about."""


@dataclass(frozen=True, slots=True)
class Planted:
    """A faulty plan, the mistake in it, and the line of the field that it is about."""

    file: Path
    mistake: str
    line: int


@pytest.fixture(scope="session")
def judged_before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache for the whole session: many tests check the same plans."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session", autouse=True)
def _imported(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Check a weak plan and script in this process: each child would import anew what they need."""
    import_module("affidavit.accountants.rdp")  # which accounts for longer runs
    folder = tmp_path_factory.mktemp("weak")
    (folder / "plan.yaml").write_text(WEAK_PLAN)
    (folder / "train.py").write_text(WEAK_SCRIPT)
    check = RepositoryCheck([str(folder)], Evaluator(True, None, None), None, fix=False, base=None)
    assert [told.result.exit for told in check(frozenset()) if isinstance(told, Checked)] == [1, 1]


@pytest.fixture(autouse=True)
def _cached(home: Path, judged_before: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: ARG001
    monkeypatch.setenv("AFFIDAVIT_CACHE", str(judged_before))


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder: twelve plans, and files that are none."""
    folder = tmp_path / "repository"
    (folder / "plans").mkdir(parents=True)
    monkeypatch.chdir(folder)
    for name in RIGHT:
        text = (REPOSITORY / f"examples/{name}.yaml").read_text()
        (folder / f"plans/{name}.yaml").write_text(text)
    (folder / "compose.yaml").write_text("services: {db: {image: postgres}}\n")
    (folder / "broken.yaml").write_text("{{ not a plan }}: [\n")
    (folder / "package.json").write_text('{"name": "x", "target": "es6"}')
    return folder


@pytest.fixture
def planted(repository: Path) -> list[Planted]:
    """The faulty plans, whose targets are what their mistakes lead to."""
    return [_plant(repository, name, field) for name, field in WRONG.items()]


def _plant(folder: Path, name: str, field: str) -> Planted:
    vector = next(load for load in json.loads(VECTORS.read_text()) if load["name"] == name)
    plan = json.loads(json.dumps(vector["plan"]))
    plan["target"]["epsilon"] = float(vector["claim"])
    file = folder / f"plans/wrong-{name}.yaml"
    yaml = YAML()
    with file.open("w") as stream:
        stream.write("# kept as it is\n")
        yaml.dump(plan, stream)
    lines = file.read_text().splitlines()
    line = next((n for n, text in enumerate(lines, 1) if text.startswith(f"{field}:")), 0)
    return Planted(file.relative_to(folder), vector["mistakes"][0], line)


@pytest.fixture
def checked(run: Callable[..., Any]) -> Callable[..., tuple[int, dict[str, Any]]]:
    """Exit code and JSON document of a check."""

    def invoke(*arguments: str) -> tuple[int, dict[str, Any]]:
        result = run("check", *arguments, "--format", "json")
        return result.exit_code, json.loads(result.stdout)

    return invoke
