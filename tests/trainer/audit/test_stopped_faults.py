"""Trainers with one fault each stop their own run, before they release what the fault spoils."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from affidavit.trainer.adapters import Group
from affidavit.trainer.distributed.peers import Peers
from affidavit.trainer.errors import MixedRecords, RunFailure
from affidavit.trainer.noise.chacha import Ratchet
from affidavit.trainer.noise.source import NoiseSource, TensorNoise
from affidavit.trainer.settings import Settings
from affidavit.trainer.steps.training_state import RunKeys, TrainingState
from tests.trainer.audit import faults
from tests.trainer.loop.small_run import MadeUpData, entropy_of, plan_with


class Wide:
    """Three tokens a record, a layer of 300 and one of a single entry."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.module = nn.Sequential(nn.Linear(1, 300), nn.Tanh(), nn.Linear(300, 1))

    def losses(self, batch: Any) -> Tensor:
        x, y = batch
        return (self.module(x[..., None]).sum((1, 2)) - 50 * y - 100).square()

    def blocks(self) -> Mapping[str, Sequence[Group]]:
        return {
            "all": tuple(Group(names=(f"{at}.weight", f"{at}.bias")) for at in (0, 2)),
        }

    def made_up(self, records: int) -> Any:
        return torch.randn(records, 3), torch.randn(records)


class Less(TrainingState):
    """Noise of four fifths of the certified deviation."""

    def _build_noise(self) -> list[NoiseSource]:
        tensors = self.layout.noise(self._config.execution.at(0)).items()
        return [
            NoiseSource({n: TensorNoise(shape=of.shape, scale=0.8 * of.scale) for n, of in tensors})
        ]


class NoBias(faults.LeftOut):
    """No noise on a bias of one entry."""

    tensor = "2.bias"


class PartOnly(TrainingState):
    """Noise on the first entries of a tensor alone."""

    def _noise_source(self, required: Any) -> NoiseSource:
        return _Part(super()._noise_source(required))  # type: ignore[return-value]


class _Part:
    def __init__(self, source: NoiseSource) -> None:
        self._source = source

    def add_to(self, sums: Mapping[str, Tensor], *given: Any) -> None:
        before = sums["0.weight"].clone()
        self._source.add_to(sums, *given)
        sums["0.weight"][250:] = before[250:]


def machine(kind: type[TrainingState]) -> TrainingState:
    """The trainer of a small plan, with ``kind`` for its state."""
    model, draws = Wide(), entropy_of(1)
    training = kind(
        faults.config_of(plan_with(steps=20), 60),
        model,
        MadeUpData(),
        settings=Settings(device="cpu", microbatch=20),
        peers=Peers.alone("cpu"),
        keys=RunKeys(lots=draws(32), probes=draws(32)),
    )
    training.require_separate_records(model)
    return training


def take(training: TrainingState, steps: int) -> int:
    """Take up to ``steps`` and return how many were released."""
    ratchet = Ratchet.fresh(entropy_of(2))
    for step in range(steps):
        try:
            training.step(step, ratchet, lambda _: None)
        except (RunFailure, MixedRecords):
            return step
        ratchet = ratchet.next()
    return steps


@pytest.mark.parametrize(
    ("kind", "around", "within"),
    [
        (Less, nullcontext(), 2),
        (faults.RootK, nullcontext(), 2),
        (NoBias, nullcontext(), 2),
        (PartOnly, nullcontext(), 2),
        (faults.Reseeded, nullcontext(), 2),
        (faults.RealisedLot, nullcontext(), 2),
        (TrainingState, faults.norms_in_bfloat16(), 20),
    ],
    ids=["less", "root K", "no bias", "part only", "reseeded", "realised lot", "bfloat16"],
)
def test_a_planted_fault_stops_the_run(
    kind: type[TrainingState], around: AbstractContextManager[None], within: int
) -> None:
    training = machine(kind)
    with around:
        assert take(training, within) < within


def test_the_trainer_itself_takes_every_step() -> None:
    assert take(machine(TrainingState), 20) == 20
