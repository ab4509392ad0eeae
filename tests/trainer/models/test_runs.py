"""Whole certified runs with the built-in models and data, and the example plans they are for."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from affidavit.assessment import Execution, certify
from affidavit.plan import Plan, parse_plan
from affidavit.trainer.loop import train
from affidavit.trainer.settings import Settings
from affidavit.trainer.sources import load_data, load_model
from affidavit.trainer.steps.blocks import build_layout
from tests.support.trust import trusting
from tests.trainer.loop.small_run import DEVICE, KEY, bundle_of

TRAIN = Path(__file__).resolve().parents[3] / "examples" / "train"
TEXT = f"python:examples.train.gpt2:gpt2:{TRAIN / 'tiny-gpt2.json'},seed=1"
MODELS = {
    "digits-dp-muon": ("digits:part=train", "mlp:64,seed=1"),
    "digits-dp-sgd": ("digits:part=train", "mlp:64,seed=1,blocks=all"),
    "generated-dp-muon": ("python:examples.train.text:generated:2000,seed=1", TEXT),
}


def plan_of_file(stem: str) -> Plan:
    return parse_plan((TRAIN / f"{stem}.yaml").read_bytes(), "yaml")


def test_every_plan_to_train_is_tried() -> None:
    by_scripts = {
        stem
        for path in TRAIN.glob("*.py")
        for stem in re.findall(r"([\w-]+)\.yaml", path.read_text())
    }
    assert {path.stem for path in TRAIN.glob("*.yaml")} == {*MODELS, *by_scripts}


@pytest.mark.parametrize("stem", MODELS)
def test_a_plan_to_train_is_certified_and_fits_its_data_and_model(stem: str) -> None:
    assert (TRAIN / f"{stem}.yaml").read_bytes().startswith(b"# ")
    plan, (data_name, model_name) = plan_of_file(stem), MODELS[stem]
    result = certify(plan, second_opinion=False)
    assert result.verdict == "certified"
    data = load_data(data_name)
    assert len(data) == plan.dataset.size
    noised = tuple(
        release.model_copy(update={"noise_multiplier": 1.0}) for release in plan.phases[0].releases
    )
    phase = plan.phases[0].model_copy(update={"releases": noised})
    closed = plan.model_copy(update={"phases": (phase,)})
    build_layout(Execution.of(closed), load_model(model_name, data))


@pytest.mark.soak
def test_a_small_gpt2_learns_the_generated_corpus_under_dp_muon(tmp_path: Path) -> None:
    """Adapters, certificate, loop and record together; the corpus is synthetic and public."""
    document = plan_of_file("generated-dp-muon")
    phase = document.phases[0].model_copy(update={"steps": 24})
    plan = document.model_copy(update={"phases": (phase,)})
    data = load_data("python:examples.train.text:generated:2000,seed=1")
    model = load_model(TEXT, data)
    batch = data.collate(torch.arange(100))
    before = float(model.losses(batch).detach().mean())
    outcome = train(
        bundle=bundle_of(plan), trusted=trusting(KEY.public), plan=plan, data=data, model=model,
        out=tmp_path / "run", settings=Settings(device=DEVICE, microbatch=256), quiet=True,
    )  # fmt: skip
    model.module.cpu()
    after = float(model.losses(batch).detach().mean())
    assert (outcome.ended, outcome.released) == ("completed", 24)
    assert after < before - 1.0


@pytest.mark.soak
def test_the_demonstration_trains_both_and_prints_their_accuracies(tmp_path: Path) -> None:
    finished = subprocess.run(
        [sys.executable, str(TRAIN / "demo.py")],
        env={**os.environ, "AFFIDAVIT_HOME": str(tmp_path), "COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.count("✓ conformant: 100 of 100") == 2
    result = re.findall(
        r"(DP-Muon|DP-SGD|Adam) .*?([\d.]+)%", finished.stdout.split("accuracy")[-1]
    )
    assert [name for name, _ in result] == ["DP-Muon", "DP-SGD", "Adam"]
    assert all(float(percent) > 80 for _, percent in result)
