"""The base of all optimisers: one step over the noisy means of every release.

A subclass says how one tensor is updated (``rule``), or, where tensors are updated together,
all tensors of a release. The base keeps to what was certified: every tensor has a mean at
every step (a tensor that is left out would be one without noise), means are finite and dense,
there is no closure (it would compute gradients that nobody clipped), and no step is taken
beyond the plan's. Denoising, where the plan asks for it, comes before the rule.

The state dict continues a run bit for bit; loading one of another optimiser or of other
releases is an error. A release is a parameter group, so that ``torch.optim.lr_scheduler``
works on it; a learning rate may depend on the step and on released values only.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from affidavit.trainer.numerics import all_finite
from affidavit.trainer.optimizers import denoise
from affidavit.trainer.optimizers.inputs import Array, OptimizerInputs, ReleasedTensors

State = dict[str, Any]


class BeyondThePlan(RuntimeError):
    """More steps than were certified."""


@dataclass(frozen=True, kw_only=True, slots=True)
class At:
    """Where an update stands: its release, its step t from 1, and what may be scheduled."""

    release: str
    step: int
    learning_rate: float
    weight_decay: float


Rule = Callable[[Tensor, Tensor, State, At], Tensor]
"""From a tensor, its mean and its state, which is changed, to the tensor's next value."""


class DPOptimizer(Optimizer):
    """An optimiser of noisy means; ``given`` has the certified plan and the tensors."""

    def __init__(self, inputs: OptimizerInputs) -> None:
        self._name = inputs.settings.name
        self._steps = sum(inputs.releases[0].noise.steps)
        self._threshold = inputs.settings.denoise.threshold if inputs.settings.denoise else None
        self._noise_std: dict[str, Array] = {}
        if self._threshold is not None:
            inputs.require_fixed_clip_norms()
            self._noise_std = {item.name: item.noise.std() for item in inputs.releases}
        self._shards = inputs.shards
        self._names = {release.name: list(release.tensors) for release in inputs.releases}
        for release in inputs.releases:
            _require_tensors(release, sharded=inputs.shards is not None)
        groups = [
            {
                "name": release.name,
                "params": list(release.tensors.values()),
                "lr": inputs.learning_rate,
                "weight_decay": inputs.settings.weight_decay or 0.0,
                "step": 0,
                "optimizer": self._name,
            }
            for release in inputs.releases
        ]
        super().__init__(groups, {})
        self._rule = self.rule(inputs)

    @abstractmethod
    def rule(self, inputs: OptimizerInputs) -> Rule:
        """The update of one tensor."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One update of every tensor from its ``grad``, the noisy mean.

        Raises ``BeyondThePlan`` after the last certified step, ``ValueError`` for a closure or a
        mean that is missing, sparse or not finite; then nothing was changed.
        """
        if closure is not None:
            raise ValueError("a closure would compute gradients that are not released means")
        for group in self.param_groups:
            self._require_means(group)
        for group in self.param_groups:
            group["step"] += 1
            means = [parameter.grad for parameter in group["params"]]
            if self._threshold is not None:
                std = float(self._noise_std[group["name"]][group["step"] - 1])
                means = self._shrunk(means, std, self._names[group["name"]])
            at = At(
                release=group["name"],
                step=group["step"],
                learning_rate=float(group["lr"]),
                weight_decay=float(group["weight_decay"]),
            )
            self._update(group["params"], means, at)

    def _shrunk(self, means: list[Tensor], std: float, names: Sequence[str]) -> list[Tensor]:
        """Denoised matrices, each on the rank that has it whole."""
        assert self._threshold is not None  # asked by the caller
        threshold = self._threshold
        if self._shards is None:
            return denoise.all_shrunk(means, std, threshold=threshold)
        places = [place for place, mean in enumerate(means) if mean.ndim == 2]
        done = self._shards.on_whole(
            [means[place] for place in places],
            [names[place] for place in places],
            lambda matrices, _: denoise.all_shrunk(matrices, std, threshold=threshold),
        )
        result = list(means)
        for place, mean in zip(places, done, strict=True):
            result[place] = mean
        return result

    def _update(self, parameters: list[Tensor], means: list[Tensor], at: At) -> None:
        for parameter, mean in zip(parameters, means, strict=True):
            parameter.copy_(self._rule(parameter, mean, self.state[parameter], at))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a checkpoint; raises ``ValueError`` for that of another optimiser."""
        mine = [(group["optimizer"], group["name"]) for group in self.param_groups]
        theirs = [
            (group.get("optimizer"), group.get("name")) for group in state_dict["param_groups"]
        ]
        if mine != theirs:
            raise ValueError(f"the checkpoint is of {theirs}, not of {mine}")
        super().load_state_dict(state_dict)

    def _require_means(self, group: dict[str, Any]) -> None:
        if group["step"] >= self._steps:
            raise BeyondThePlan(
                f"{self._steps} steps were certified and all are taken. Certify a longer plan."
            )
        for parameter in group["params"]:
            if parameter.grad is None or parameter.grad.is_sparse:
                raise ValueError(
                    f"release {group['name']}: a tensor of shape {tuple(parameter.shape)} has no "
                    "dense mean. Every tensor is released at every step."
                )
        if not all_finite(parameter.grad for parameter in group["params"]):
            raise ValueError(
                f"release {group['name']}: a mean is not finite. The sums overflowed before they "
                "were released; look for a learning rate that diverges."
            )


def _require_tensors(release: ReleasedTensors, *, sharded: bool) -> None:
    for name, tensor in release.tensors.items():
        if (tensor.numel() == 0 and not sharded) or tensor.dtype not in (
            torch.float32,
            torch.float64,
        ):
            raise ValueError(
                f"{name} in release {release.name}: {tensor.dtype} of shape {tuple(tensor.shape)}. "
                "Trainable tensors have entries, in float32 or float64; use autocast for speed."
            )
    if not release.tensors:
        raise ValueError(f"release {release.name} has no tensors")


def std_at(stds: dict[str, Array], at: At) -> float:
    """The number of a release at a step.

    Of arrays of shape (T,), one for each release; steps count from 1.
    """
    return float(np.asarray(stds[at.release])[at.step - 1])


def corrected(moment: Tensor, decay: float, step: int) -> Tensor:
    """A moment over 1 - decay^t, exact for decays near 1. Its shape stays."""
    return moment / -math.expm1(step * math.log(decay)) if decay else moment
