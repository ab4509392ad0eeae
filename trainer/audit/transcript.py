"""Transcripts: what an observer of all iterates sees of a run, along the canary's direction.

A run is the trainer's own training, step by step, under DP-SGD without momentum at learning
rate 1, so that two iterates differ by the released mean; times the divisor that the plan
states, that is the noisy sum of every tensor. Of each sum S with the canary's share D two
numbers are kept: the matched filter ⟨S, D⟩/‖D‖², which is 1 where the canary took part and
noise was left out, and the length of what is orthogonal to D, over the noise that was
certified. Nothing else of the run is read: no lot, no norm, no noise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import torch
from numpy.typing import NDArray

from affidavit.certificate import Execution, noise_std
from affidavit.plan import Plan, digest
from affidavit.trainer.adapters import DataAdapter, ModelAdapter
from affidavit.trainer.audit.canary import CanaryData, CanaryModel
from affidavit.trainer.distributed import Peers
from affidavit.trainer.noise.chacha import derived_key
from affidavit.trainer.ratchet import Ratchet
from affidavit.trainer.run_config import RunConfig, strategies_of
from affidavit.trainer.settings import Settings
from affidavit.trainer.training_state import RunKeys, TrainingState

Array = NDArray[np.float64]

Build = Callable[[RunConfig, ModelAdapter, DataAdapter, RunKeys], TrainingState]
"""The trainer under attack: from a run's configuration to its training state."""


def training_of(
    config: RunConfig, model: ModelAdapter, data: DataAdapter, keys: RunKeys
) -> TrainingState:
    """The trainer as it is."""
    return TrainingState(
        config, model, data, settings=Settings(), peers=Peers.alone("cpu"), keys=keys
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Transcripts:
    """Of R runs of T steps and G tensors: matched filters (R, T, G), lengths (R, T).

    ``weights`` (G,) are those by which the matched filters of one step are joined best under
    the certified noise; ``joint`` is the certified multiplier of what comes out.
    """

    matched: Array
    lengths: Array
    weights: Array
    joint: float

    @property
    def filtered(self) -> Array:
        """One number a step, over all blocks jointly, (R, T)."""
        result: Array = self.matched @ self.weights
        return result

    def part(self, first: int, last: int) -> Transcripts:
        """Runs from ``first`` to before ``last``."""
        return Transcripts(
            matched=self.matched[first:last],
            lengths=self.lengths[first:last],
            weights=self.weights,
            joint=self.joint,
        )


def observe(
    plan: Plan,
    amplitudes: Sequence[float],
    signs: Sequence[float],
    runs: int,
    *,
    key: bytes,
    build: Build = training_of,
) -> Transcripts:
    """Transcripts of ``runs`` runs of a closed plan on records of ``amplitudes``.

    ``signs`` has that of each step. Keys are derived from ``key``, so that an audit can be
    repeated.
    """
    config, model = _config_of(plan, len(amplitudes)), CanaryModel()
    data = CanaryData(torch.tensor(amplitudes))
    release = plan.phases[0].releases[0]
    directions = model.direction(release.clip_norm)
    squares = np.array([float(direction.square().sum()) for direction in directions.values()])
    scale = noise_std(release)
    matched, lengths = [], []
    start = {name: item.clone() for name, item in model.module.state_dict().items()}
    for run in range(runs):
        model.module.load_state_dict(start)
        own = derived_key(key, f"audit run {run}")
        keys = RunKeys(lots=derived_key(own, "lots"), probes=derived_key(own, "probes"))
        training = build(config, model, data, keys)
        try:
            steps = list(_released(training, config, model, signs, Ratchet(own)))
        finally:
            training.close()
        matched.append([[float((s[n] * d).sum()) for n, d in directions.items()] for s in steps])
        lengths.append([_length(s, directions, squares) / scale for s in steps])
    signed = np.array(matched) * np.array(signs)[:, None] / squares
    return Transcripts(
        matched=signed,
        lengths=np.array(lengths),
        weights=squares / squares.sum(),
        joint=scale / float(np.sqrt(squares.sum())),
    )


def _config_of(plan: Plan, size: int) -> RunConfig:
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


Sums = dict[str, torch.Tensor]


def _released(
    training: TrainingState,
    config: RunConfig,
    model: CanaryModel,
    signs: Sequence[float],
    ratchet: Ratchet,
) -> list[Sums]:
    result, before = [], _copied(model)
    for step, sign in enumerate(signs):
        model.sign = sign
        training.step(step, ratchet, lambda _: None)
        ratchet, after = ratchet.next(), _copied(model)
        divisor = float(Fraction(config.execution.at(step).divisor))
        result.append({name: (before[name] - after[name]) * divisor for name in before})
        before = after
    model.sign = 1.0
    return result


def _copied(model: CanaryModel) -> Sums:
    return {name: item.detach().double() for name, item in model.module.named_parameters()}


def _length(sums: Sums, directions: Sums, squares: Array) -> float:
    """Root mean square of all entries once the canary's direction is taken out."""
    total, entries = 0.0, 0
    for (name, direction), square in zip(directions.items(), squares, strict=True):
        along = float((sums[name] * direction).sum()) ** 2 / square
        total += float(sums[name].square().sum()) - along
        entries += direction.numel() - 1
    return float(np.sqrt(max(total, 0.0) / entries))
