"""The base of all optimisers: one step over the noisy means of all releases.

A subclass defines how one tensor is updated (``rule``) or, if tensors are updated together,
all tensors of a release. The base enforces what was certified: every tensor has a mean in
every step (a tensor that is left out would be one without noise), means are finite and dense,
there is no closure (it would compute unclipped gradients), and no step is beyond the plan.
Denoising, if the plan asks for it, precedes the rule.

The state dict continues a run bit for bit. Loading the state of another optimiser or of other
releases is an error. A release is a parameter group, so that ``torch.optim.lr_scheduler``
works on it; a learning rate may depend on the step and on released values only.

Denoising: a mean is a low-rank signal plus noise of standard deviation σ' in each entry. If the
largest singular value λ₁ exceeds κ σ'(√m + √n), each singular value is mapped back through the
effect of the noise and shrunk by the remaining alignment of its vectors; values at or
below σ'(√m + √n) become zero, and the result keeps the Frobenius norm of the mean. Other means stay
unchanged, bit for bit, and so do tensors that are no matrices. In units of σ', with y = λ/σ',

    x⁴-root:  2 x² = y² - m - n + √((y² - m - n)² - 4mn),
    η = x √((x⁴ - mn)/(x⁴ + m x²)) √((x⁴ - mn)/(x⁴ + n x²)).

>>> mean = torch.diag(torch.tensor([100.0, 1.0, 1.0]))
>>> denoise_matrices(mean[None], 1.0, threshold=1.02)[0].diagonal().tolist()[1:]
[0.0, 0.0]

References: "Sample-efficient DP fine-tuning via gradient matrix denoising", equations 3 to 9;
Shabalin and Nobel, arXiv:1007.4148.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from affidavit.trainer.norm_bounds import all_finite
from affidavit.trainer.optimizers.inputs import Array, OptimizerInputs, ReleasedTensors


def map_batches(
    tensors: Sequence[Tensor], function: Callable[[Tensor], Iterable[Tensor]]
) -> list[Tensor]:
    """Apply ``function`` to batches (k, ...) of ``tensors`` of equal shape; shapes stay."""
    result = list(tensors)
    shapes: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for place, item in enumerate(tensors):
        shapes[(item.shape, item.dtype, item.device)].append(place)
    for places in shapes.values():
        values = function(torch.stack([tensors[place] for place in places]))
        for place, item in zip(places, values, strict=True):
            result[place] = item
    return result


def denoise_matrices(matrices: Tensor, noise_std: float, *, threshold: float) -> Tensor:
    """Return the denoised matrices, (k, m, n) to (k, m, n)."""
    rows, columns = matrices.shape[-2:]
    left, values, right = torch.linalg.svd(matrices, full_matrices=False)
    wide = values.double()
    shrunk_values = shrinkage(wide / noise_std, rows, columns) * noise_std
    norm = torch.linalg.vector_norm(shrunk_values, dim=-1)
    edge = noise_std * (math.sqrt(rows) + math.sqrt(columns))
    is_denoised = (wide[:, 0] > threshold * edge) & (norm > 0)
    scale = torch.linalg.vector_norm(wide, dim=-1) / torch.where(is_denoised, norm, 1.0)
    diagonal = (shrunk_values * scale[:, None]).to(values.dtype)
    return torch.where(is_denoised[:, None, None], (left * diagonal[:, None, :]) @ right, matrices)


def shrinkage(values: Tensor, rows: int, columns: int) -> Tensor:
    """Return η of equation 8 in units of σ', zero at or below √m + √n. The shape stays."""
    sums = values.square() - (rows + columns)
    root = (sums.square() - 4 * rows * columns).clamp(min=0).sqrt()
    square = ((sums + root) / 2).clamp(min=1)
    signal = (square.square() - rows * columns).clamp(min=0)
    ratio = (
        signal / ((square.square() + rows * square) * (square.square() + columns * square)).sqrt()
    )
    above = values > math.sqrt(rows) + math.sqrt(columns)
    return torch.where(above, square.sqrt() * ratio, 0.0)


State = dict[str, Any]


class StepsExhausted(RuntimeError):
    """A step beyond the certified ones."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Update:
    """The release and step t (from 1) of an update, and the scheduled values."""

    release: str
    step: int
    learning_rate: float
    weight_decay: float


Tensors = list[Tensor] | tuple[Tensor, ...]

Rule = Callable[[Tensors, Tensors, Sequence[State], Update], None]
"""Updates tensors in place from their means and their states, which are changed."""

MAX_TOGETHER, MAX_TOGETHER_CPU = 1 << 26, 1 << 18
"""Entries of tensors that are updated together, on a device and on the processor, whose cache then
has them from one operation to the next."""


class DPOptimizer(Optimizer):
    """An optimiser of noisy means; ``inputs`` has the certified plan and the tensors."""

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
        """Return the update of one tensor."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every tensor from its ``grad``, the noisy mean.

        Raises ``StepsExhausted`` after the last certified step, and ``ValueError`` for a closure or
        a mean that is missing, sparse or not finite; then nothing was changed.
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
                means = self._denoise(means, std, self._names[group["name"]])
            at = Update(
                release=group["name"],
                step=group["step"],
                learning_rate=float(group["lr"]),
                weight_decay=float(group["weight_decay"]),
            )
            self._update(group["params"], means, at)

    def _denoise(self, means: list[Tensor], std: float, names: Sequence[str]) -> list[Tensor]:
        """Denoise the matrices among the means, each on the rank that has it in full."""
        assert self._threshold is not None  # checked by the caller
        denoise = partial(denoise_matrices, noise_std=std, threshold=self._threshold)
        places = [place for place, mean in enumerate(means) if mean.ndim == 2]
        matrices = [means[place] for place in places]
        if self._shards is None:
            denoised: Sequence[Tensor] = map_batches(matrices, denoise)
        else:
            matrix_names = [names[place] for place in places]
            denoised = self._shards.map_full_matrices(
                matrices, matrix_names, lambda full, _: map_batches(full, denoise)
            )
        result = list(means)
        for place, mean in zip(places, denoised, strict=True):
            result[place] = mean
        return result

    def _update(self, parameters: list[Tensor], means: list[Tensor], at: Update) -> None:
        self._apply_rule(parameters, means, at)

    def _apply_rule(self, parameters: Tensors, means: Tensors, at: Update) -> None:
        """Update by the rule, many small tensors at once."""
        for part in _runs(parameters):
            states = [self.state[parameter] for parameter in parameters[part]]
            self._rule(parameters[part], means[part], states, at)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a checkpoint; raises ``ValueError`` for the state of another optimiser."""
        expected = [(group["optimizer"], group["name"]) for group in self.param_groups]
        stored = [
            (group.get("optimizer"), group.get("name")) for group in state_dict["param_groups"]
        ]
        if stored != expected:
            raise ValueError(f"the checkpoint is from {stored}, not {expected}")
        super().load_state_dict(state_dict)

    def _require_means(self, group: dict[str, Any]) -> None:
        if group["step"] >= self._steps:
            raise StepsExhausted(
                f"{self._steps} steps were certified, and all were taken. Certify a longer plan."
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


def _runs(tensors: Tensors) -> Iterator[slice]:
    """Yield runs of tensors with at most so many entries, or of one tensor."""
    begin = entries = 0
    for place, tensor in enumerate(tensors):
        most = MAX_TOGETHER_CPU if tensor.device.type == "cpu" else MAX_TOGETHER
        if entries and entries + tensor.numel() > most:
            yield slice(begin, place)
            begin, entries = place, 0
        entries += tensor.numel()
    if tensors:
        yield slice(begin, len(tensors))


def _require_tensors(release: ReleasedTensors, *, sharded: bool) -> None:
    for name, tensor in release.tensors.items():
        if (tensor.numel() == 0 and not sharded) or tensor.dtype not in (
            torch.float32,
            torch.float64,
        ):
            raise ValueError(
                f"{name} in release {release.name}: {tensor.dtype} of shape {tuple(tensor.shape)}. "
                "Trainable tensors must be non-empty float32 or float64; use autocast for speed."
            )
    if not release.tensors:
        raise ValueError(f"release {release.name} has no tensors")


def std_at(stds: dict[str, Array], at: Update) -> float:
    """Return the value of a release at a step, counted from 1, from arrays of shape (T,)."""
    return float(np.asarray(stds[at.release])[at.step - 1])
