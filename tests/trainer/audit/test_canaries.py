"""Canaries among digits: who takes no part changes nothing, and missing noise is found."""

from __future__ import annotations

import json
import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.stats import binom

from affidavit.assessment import certify
from affidavit.evidence import (
    Audit,
    Canaries,
    audit_canaries,
    read_canaries,
    read_losses,
)
from affidavit.plan import Plan, plan_from
from affidavit.trainer import Labelled, digits, mlp
from affidavit.trainer.data.numeric_data import AuditedData, AuditedModel, WrongData, canary_losses
from affidavit.trainer.errors import Interrupted
from affidavit.trainer.loop import train
from affidavit.trainer.noise.chacha import Ratchet, derived_key
from affidavit.trainer.steps.training_state import RunKeys, TrainingState
from tests.support.trust import trusting
from tests.trainer.audit import faults
from tests.trainer.loop.small_run import KEY, bundle_of

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

    def _noise_source(self, *_: object) -> Any:
        return self

    def add_to(self, *_: object) -> None:
        """Nothing is added."""


def audited(kind: type[TrainingState], plan: Plan = PLAN) -> Audit:
    """The audit of one run of a trainer."""
    canaries, all_digits = Canaries.generate(COUNT), digits("part=train")
    few = Labelled(all_digits.inputs[:RECORDS], all_digits.labels[:RECORDS], classes=10)
    data = AuditedData.build(few, canaries)
    model = AuditedModel(mlp("64,seed=1,blocks=all", few))
    key = derived_key(canaries.nonce, "run")
    keys = RunKeys(lots=key, probes=key)
    training = faults.build_of(kind)(faults.config_of(plan, len(data)), model, data, keys)
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
    canaries = Canaries.generate(6)
    data = AuditedData.build(
        Labelled(torch.rand(3, 5), torch.tensor([0, 1, 1]), classes=2), canaries
    )
    model = AuditedModel(mlp("4,seed=1,blocks=all", data.records))
    assert len(data) == 9
    for index, takes_part in zip(range(3, 9), canaries.included, strict=True):
        model.module.zero_grad()
        model.losses(data.collate(torch.tensor([index]))).sum().backward()
        gradients = [item.grad for item in model.module.parameters() if item.grad is not None]
        assert any(bool(item.any()) for item in gradients) == takes_part


def test_other_data_has_no_canaries() -> None:
    with pytest.raises(WrongData):
        AuditedData.build([1, 2], Canaries.generate(4))


POINTS = Labelled(torch.eye(3), torch.tensor([0, 1, 1]), classes=2)
FEW = plan_from(
    {
        "version": 1,
        "dataset": {"size": 15},
        "canaries": {"count": 12},
        "adjacency": "add_remove",
        "sampling": {"scheme": "poisson", "lot_size": 5},
        "steps": 4,
        "releases": [{"name": "all", "clip_norm": 1, "noise_multiplier": 4}],
        "clipping": "flat",
        "optimizer": {"name": "dp_sgd", "learning_rate": 0.1},
        "target": {"delta": 1e-3},
    }
)


def trained(out: Path, *, resume: bool = False) -> list[dict[str, Any]]:
    """The record of a run of ``FEW``."""
    with suppress(Interrupted):
        train(
            bundle=bundle_of(FEW),
            trusted=trusting(KEY.public),
            plan=FEW,
            data=POINTS,
            model=mlp("4,seed=1,blocks=all", POINTS),
            out=out,
            resume=resume,
            quiet=True,
        )
    return [json.loads(line) for line in (out / "record.jsonl").read_text().splitlines()]


def test_a_run_draws_the_canaries_of_its_plan_and_commits_to_them_first(tmp_path: Path) -> None:
    entries = trained(tmp_path / "run")
    canaries = read_canaries((tmp_path / "run" / "canaries.json").read_bytes())
    assert entries[0]["canaries"] == canaries.commitment
    assert (canaries.count, canaries.guesses) == (12, 4)
    assert len(read_losses((tmp_path / "run" / "canary-losses.json").read_bytes())) == 12
    assert entries[-1]["ended"] == "completed"
    assert trained(tmp_path / "other")[0]["canaries"] != canaries.commitment


def test_a_run_that_goes_on_has_the_canaries_that_it_began_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopping(*_: object) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return collate(*_)  # type: ignore[arg-type]

    collate = AuditedData.collate
    monkeypatch.setattr(AuditedData, "collate", stopping)
    begun = trained(tmp_path)
    monkeypatch.undo()
    assert begun[-1]["type"] != "final"
    assert not (tmp_path / "canaries.json").exists()  # nobody sees the coins before the end
    ended = trained(tmp_path, resume=True)
    assert ended[-1]["ended"] == "completed"
    canaries = read_canaries((tmp_path / "canaries.json").read_bytes())
    assert canaries.commitment == begun[0]["canaries"] == ended[0]["canaries"]
