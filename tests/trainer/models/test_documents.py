"""What docs/how-to/models-and-data.md shows can be pasted."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from affidavit.trainer.loop import train
from affidavit.trainer.settings import Settings
from affidavit.trainer.sources import DATA, MODELS, load_data, load_model
from examples.train.text import build_word_list
from tests.support.trust import trusting
from tests.trainer.loop.small_run import DEVICE, KEY, bundle_of, plan_with

ROOT = Path(__file__).resolve().parents[3]
TEXT = (ROOT / "docs/how-to/models-and-data.md").read_text()


def test_the_example_of_a_model_of_ones_own_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, *_ = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    (tmp_path / "mine.py").write_text(own)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    named = re.search(r"--data (python:\S+) --model (python:[\w:]+)", TEXT)
    assert named is not None
    data = load_data(named[1])
    model = load_model(named[2], data)
    plan = plan_with(
        dataset={"name": "points", "size": 400},
        sampling={"scheme": "poisson", "lot_size": 100},
        releases=[
            {"name": "hidden", "clip_norm": 1, "noise_multiplier": 3},
            {"name": "auxiliary", "clip_norm": 1, "noise_multiplier": 3},
        ],
        optimizer={"name": "dp_muon", "learning_rate": 0.1},
        target={"delta": 1e-3},
    )
    before = model.losses(data.collate(torch.arange(400))).mean()
    train(
        bundle=bundle_of(plan), trusted=trusting(KEY.public), plan=plan, data=data, model=model,
        out=tmp_path / "run", settings=Settings(device=DEVICE), quiet=True,
    )  # fmt: skip
    model.module.cpu()
    assert model.losses(data.collate(torch.arange(400))).mean() < before


def test_every_adapter_is_documented_and_the_numbers_are_those_of_the_code() -> None:
    assert all(f"`{name}:" in TEXT or f"`{name}[" in TEXT for name in {**DATA, **MODELS})
    examples = (ROOT / "examples/train/README.md").read_text()
    assert f"with {len(build_word_list())} words of its own" in examples
