"""Canaries among digits: who takes no part changes nothing, and missing noise is found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.stats import binom
from typer.testing import CliRunner

from affidavit.certificate import Audit, Canaries, audit_canaries, certify
from affidavit.plan import Plan, plan_from
from affidavit.trainer import Labelled, digits, mlp
from affidavit.trainer.__main__ import app
from affidavit.trainer.audit.transcript import _config_of
from affidavit.trainer.data.canaries import AuditedData, AuditedModel, canary_losses
from affidavit.trainer.data.numbers import WrongData
from affidavit.trainer.noise.chacha import derived_key
from affidavit.trainer.ratchet import Ratchet
from affidavit.trainer.training_state import RunKeys, TrainingState
from tests.trainer.audit import faults
from tests.trainer.loop.made import KEY, bundle_of

COUNT, RECORDS, STEPS = 400, 40, 120
PLAN = plan_from(
    {
        "version": 1,
        "dataset": {"size": COUNT + RECORDS},
        "adjacency": "add_remove",
        "sampling": {"scheme": "poisson", "lot_size": 220},
        "steps": STEPS,
        "releases": [{"name": "all", "clip_norm": 1, "noise_multiplier": 40}],
        "clipping": "flat",
        "optimizer": {"name": "dp_sgd", "learning_rate": 4},
        "target": {"delta": 1e-5},
    }
)


class Silent(TrainingState):
    """No noise at all."""

    def _source(self, *_: object) -> Any:
        return self

    def add_to(self, *_: object) -> None:
        """Nothing is added."""


def audited(kind: type[TrainingState], plan: Plan = PLAN) -> Audit:
    """The audit of one run of a trainer."""
    canaries, all_digits = Canaries.fresh(COUNT), digits("part=train")
    few = Labelled(all_digits.inputs[:RECORDS], all_digits.labels[:RECORDS], classes=10)
    data = AuditedData.of(few, canaries)
    model = AuditedModel(mlp("64,seed=1,blocks=all", data))
    key = derived_key(canaries.nonce, "run")
    keys = RunKeys(lots=key, probes=key)
    training = faults.build_of(kind)(_config_of(plan, len(data)), model, data, keys)
    ratchet = Ratchet(key)
    for step in range(plan.phases[0].steps or 0):
        training.step(step, ratchet, lambda _: None)
        ratchet = ratchet.next()
    training.close()
    return audit_canaries(canaries, canary_losses(model, data), delta=1e-5)


def certified(plan: Plan = PLAN) -> float:
    result = certify(plan, second_opinion=False).epsilon
    assert result is not None
    return result.upper


def test_missing_noise_is_found_from_the_losses_of_one_run() -> None:
    assert audited(Silent).epsilon > certified()


@pytest.mark.soak
def test_correct_runs_are_not_accused() -> None:
    """200 short runs; at the level 0.05 more of them are above ε with probability 1e-4."""
    plan = PLAN.model_copy(
        update={"phases": tuple(p.model_copy(update={"steps": 10}) for p in PLAN.phases)}
    )
    bound = certified(plan)
    above = sum(audited(TrainingState, plan).epsilon > bound for _ in range(200))
    assert above <= binom.isf(1e-4, 200, 0.05)


def test_a_canary_that_takes_no_part_has_no_gradient() -> None:
    canaries = Canaries.fresh(6)
    data = AuditedData.of(Labelled(torch.rand(3, 5), torch.tensor([0, 1, 1]), classes=2), canaries)
    model = AuditedModel(mlp("4,seed=1,blocks=all", data))
    assert len(data) == 9
    for index, takes_part in zip(range(3, 9), canaries.included, strict=True):
        model.module.zero_grad()
        model.losses(data.collate(torch.tensor([index]))).sum().backward()
        gradients = [item.grad for item in model.module.parameters() if item.grad is not None]
        assert any(bool(item.any()) for item in gradients) == takes_part


def test_other_data_has_no_canaries() -> None:
    with pytest.raises(WrongData):
        AuditedData.of([1, 2], Canaries.fresh(4))


def test_a_run_commits_to_its_canaries_before_it_begins(tmp_path: Path) -> None:
    canaries = Canaries.fresh(12)
    document = {
        "version": 1,
        "dataset": {"size": 15},
        "adjacency": "add_remove",
        "sampling": {"scheme": "poisson", "lot_size": 5},
        "steps": 2,
        "releases": [{"name": "all", "clip_norm": 1, "noise_multiplier": 4}],
        "clipping": "flat",
        "optimizer": {"name": "dp_sgd", "learning_rate": 0.1},
        "target": {"delta": 1e-3},
    }
    files = {
        "plan.json": json.dumps(document).encode(),
        "bundle.json": bundle_of(plan_from(document)),
        "canaries.json": canaries.as_bytes(),
        "keys.json": json.dumps(KEY.public.as_record()).encode(),
        "three.csv": b"a,b,label\n0,1,0\n1,0,1\n1,1,1\n",
    }
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    arguments = ["--certificate", "bundle.json", "--plan", "plan.json", "--keys", "keys.json"]
    arguments += ["--canaries", "canaries.json"]
    paths = [str(tmp_path / item) if item.endswith(".json") else item for item in arguments]
    result = CliRunner().invoke(
        app,
        [*paths, "--data", f"csv:{tmp_path / 'three.csv'},label=label,classes=2",
         "--model", "mlp:4,seed=1,blocks=all", "--out", str(tmp_path / "run")],
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    first = json.loads((tmp_path / "run" / "record.jsonl").read_text().splitlines()[0])
    assert first["canaries"] == canaries.commitment
    losses = json.loads((tmp_path / "run" / "canary-losses.json").read_text())["losses"]
    assert len(losses) == 12
