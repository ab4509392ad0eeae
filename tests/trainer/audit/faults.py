"""Trainers with one fault each, as the real machine with one part exchanged."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from affidavit.assessment import Execution, StepRequirement
from affidavit.plan import Plan, digest
from affidavit.trainer.adapters import DataAdapter, ModelAdapter
from affidavit.trainer.clipping.ghost_norm import LinearFactors
from affidavit.trainer.distributed.peers import Peers
from affidavit.trainer.noise.chacha import Ratchet
from affidavit.trainer.noise.source import NoiseSource, TensorNoise
from affidavit.trainer.run_config import RunConfig, strategies_of
from affidavit.trainer.settings import Settings
from affidavit.trainer.steps import sampling
from affidavit.trainer.steps.training_state import RunKeys, TrainingState


class RootK(TrainingState):
    """Every block noised as if it were released alone: σ/√K."""

    def _build_noise(self) -> list[NoiseSource]:
        required = self._config.execution.at(0)
        blocks = sum(len(groups) for groups in self.layout.groups.values())
        tensors = {
            name: TensorNoise(shape=item.shape, scale=item.scale / blocks**0.5)
            for name, item in self.layout.noise(required).items()
        }
        return [NoiseSource(tensors)]


class Reseeded(TrainingState):
    """The generator of the noise starts again at every step."""

    def release(self, step: int, ratchet: Ratchet, sums: dict[str, Tensor]) -> None:
        self._first = getattr(self, "_first", ratchet)
        super().release(step, self._first, sums)

    def _noise_source(self, required: StepRequirement) -> NoiseSource:
        return NoiseSource(self.layout.noise(required))


class RealisedLot(TrainingState):
    """The sum is divided by how many records there were."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        (lots,) = self._lots
        drawn, self._size = lots.of, 0

        def of(place: int, key: bytes) -> Tensor:
            lot = drawn(place, key)
            self._size = len(lot)
            return lot

        lots.of = of  # type: ignore[method-assign]

    def _update(self, sums: dict[str, Tensor], required: StepRequirement, rate: float) -> None:
        super()._update(sums, replace(required, divisor=str(max(1, self._size))), rate)


class LeftOut(TrainingState):
    """The noise passes over one tensor: a bias that another optimiser has."""

    tensor = "norm.bias"

    def _noise_source(self, required: StepRequirement) -> NoiseSource:
        return _AllButOne(super()._noise_source(required), self.tensor)  # type: ignore[return-value]


class _AllButOne:
    def __init__(self, source: NoiseSource, tensor: str) -> None:
        self._noise_source, self._tensor = source, tensor

    def add_to(self, sums: Mapping[str, Tensor], *given: Any) -> None:
        stored = sums[self._tensor].clone()
        self._noise_source.add_to(sums, *given)
        sums[self._tensor].copy_(stored)


class Shuffled(TrainingState):
    """Lots in the order of a permutation, as data loaders do."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        size = self._config.plan.dataset.size
        assert size is not None
        lot = sampling.shuffled(named["keys"].lots, size=size, lot_size=1)
        self._lots[0].of = lambda place, _key: lot(place)  # type: ignore[method-assign]


@contextmanager
def norms_in_bfloat16() -> Iterator[None]:
    """Norms from Gram matrices in bfloat16, without a correction."""

    def norms(self: LinearFactors) -> Tensor:
        a, b = self.inputs.bfloat16(), self.outputs.bfloat16()
        squares = torch.bmm(a, a.mT).mul_(torch.bmm(b, b.mT)).sum(-1).sum(-1)
        return squares.clamp(min=0).sqrt().float()

    right = LinearFactors.norms
    LinearFactors.norms = norms  # type: ignore[method-assign]
    try:
        yield
    finally:
        LinearFactors.norms = right  # type: ignore[method-assign]


def _unseen(*_: Any, **__: Any) -> None:
    """Nothing is tested."""


def build_of(kind: type[TrainingState]) -> Any:
    """How ``audit`` builds a machine of ``kind``."""

    def build(
        bound: RunConfig, model: ModelAdapter, data: DataAdapter, keys: RunKeys
    ) -> TrainingState:
        peers = Peers.alone("cpu")
        training = kind(bound, model, data, settings=Settings(), peers=peers, keys=keys)
        # The audit sees transcripts alone; the run's own tests would stop it before it ends.
        training.noise_test.observe = _unseen  # type: ignore[method-assign]
        training.noise_test.require_released = _unseen  # type: ignore[method-assign]
        training.private._probe_again = _unseen  # type: ignore[method-assign]
        return training

    return build


def config_of(plan: Plan, size: int) -> RunConfig:
    """``plan`` for as many records as there are, configured without a certificate."""
    dataset = plan.dataset.model_copy(update={"size": size})
    closed = plan.model_copy(update={"dataset": dataset})
    execution = Execution.of(closed)
    return RunConfig(
        certificate_id="audit",
        plan_digest=digest(closed),
        plan=closed,
        execution=execution,
        strategies=strategies_of(execution),
        guarantee={},
    )
