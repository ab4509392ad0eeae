"""DP-Muon: momentum of the noisy means, orthogonalised by Newton-Schulz.

    M_t = β M_(t-1) + G̃_t,   O_t = Q_(κ,q)(M_t),   W ← (1 - ηλ) W - η O_t

for every hidden matrix; weight decay λ is decoupled. Tensors with more than two dimensions
are taken as matrices of their first dimension by the others. Tensors of the auxiliary release
(its name begins with "aux"), and tensors of one dimension anywhere, are updated by AdamW with
the plan's β₁, β₂ and ``auxiliary_learning_rate``. Matrices of equal shape, up to transposition,
are orthogonalised together. Everything starts from released means: post-processing.

With the paper's start an ‖M_t‖_F below 1 is not normalised (see ``newton_schulz``), which is
usual for noisy means; ``newton_schulz_start: frobenius`` is the remedy.

>>> direction, buffer = update(torch.eye(2), None, momentum=0.9, start="frobenius", steps=20)
>>> [[round(x, 3) for x in row] for row in direction.tolist()]
[[1.0, 0.0], [0.0, 1.0]]

Reference: arXiv:2605.12994v1, Algorithm 1.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from affidavit.mechanisms import DEGREE, STEPS, Start
from affidavit.trainer.optimizers.adam import adamw_rule
from affidavit.trainer.optimizers.base import At, DPOptimizer, Rule
from affidavit.trainer.optimizers.inputs import OptimizerInputs
from affidavit.trainer.optimizers.newton_schulz import orthogonalised

MOMENTUM = 0.95
"""β of a plan that gives none."""

Map = Callable[[Tensor], Tensor]
"""From a batch of matrices (k, m, n) to as many of the same shape."""


def accumulated(mean: Tensor, buffer: Tensor | None, momentum: float) -> Tensor:
    """M_t; ``buffer`` is M_(t-1), None for zero. All of one shape."""
    return mean.clone() if buffer is None else torch.add(mean, buffer, alpha=momentum)


def update(
    mean: Tensor,
    buffer: Tensor | None,
    *,
    momentum: float = MOMENTUM,
    degree: int = DEGREE,
    steps: int = STEPS,
    start: Start = "paper",
) -> tuple[Tensor, Tensor]:
    """O_t and M_t of one matrix, each of its shape (m, n)."""
    buffer = accumulated(mean, buffer, momentum)
    result = orthogonalised(buffer[None], degree=degree, steps=steps, start=start)
    return result[0], buffer


def moved(parameter: Tensor, direction: Tensor, at: At) -> Tensor:
    """(1 - ηλ) W - η O. The shape is that of W."""
    decayed = parameter * (1 - at.learning_rate * at.weight_decay) if at.weight_decay else parameter
    return torch.add(decayed, direction.view_as(parameter), alpha=-at.learning_rate)


def by_shape(matrices: Sequence[Tensor], function: Map) -> list[Tensor]:
    """``function`` of each matrix, in batches of equal shape, the tall ones transposed."""
    places: dict[tuple[object, ...], list[int]] = defaultdict(list)
    tall = [len(matrix) > matrix.shape[1] for matrix in matrices]
    wide = [matrix.mT if of else matrix for matrix, of in zip(matrices, tall, strict=True)]
    for place, matrix in enumerate(wide):
        places[(matrix.shape, matrix.dtype, matrix.device)].append(place)
    result = list(matrices)
    for same in places.values():
        batch = function(torch.stack([wide[place] for place in same]))
        for place, matrix in zip(same, batch, strict=True):
            result[place] = matrix.mT if tall[place] else matrix
    return result


class Muon(DPOptimizer):
    """``dp_muon``."""

    def __init__(self, inputs: OptimizerInputs) -> None:
        settings = inputs.settings
        self._momentum = MOMENTUM if settings.momentum is None else settings.momentum
        self._degree = settings.newton_schulz_degree or DEGREE
        self._newton_schulz_steps = settings.newton_schulz_steps or STEPS
        self._start: Start = settings.newton_schulz_start or "paper"
        self._dtype = inputs.newton_schulz_dtype
        self._auxiliary_rate = (
            settings.auxiliary_learning_rate or inputs.learning_rate
        ) / inputs.learning_rate
        self._auxiliary = {release.name for release in inputs.releases if release.auxiliary}
        super().__init__(inputs)

    def rule(self, inputs: OptimizerInputs) -> Rule:
        """The rule of the auxiliary tensors."""
        return adamw_rule(inputs.settings)

    def map(self, matrices: Tensor) -> Tensor:
        """Q_(κ,q) of a batch. Shape (batch, m, n)."""
        return orthogonalised(
            matrices,
            degree=self._degree,
            steps=self._newton_schulz_steps,
            start=self._start,
            dtype=self._dtype,
        )

    def directions(self, buffers: list[Tensor], places: list[int], at: At) -> list[Tensor]:
        """O_t of the momenta of a release's matrices, at ``places`` among its tensors.

        Each keeps its shape.
        """
        del places, at
        return by_shape(buffers, self.map)

    def is_matrix(self, parameter: Tensor, at: At) -> bool:
        """Whether a tensor is orthogonalised. One of any shape."""
        return at.release not in self._auxiliary and parameter.ndim >= 2

    def _update(self, parameters: list[Tensor], means: list[Tensor], at: At) -> None:
        places, buffers = [], []
        auxiliary = replace(at, learning_rate=at.learning_rate * self._auxiliary_rate)
        for place, (parameter, mean) in enumerate(zip(parameters, means, strict=True)):
            state = self.state[parameter]
            if not self.is_matrix(parameter, at):
                parameter.copy_(self._rule(parameter, mean, state, auxiliary))
                continue
            state["momentum"] = accumulated(mean, state.get("momentum"), self._momentum)
            places.append(place)
            buffers.append(state["momentum"].flatten(1))
        for place, direction in zip(places, self._directed(buffers, places, at), strict=True):
            parameters[place].copy_(moved(parameters[place], direction, at))

    def _directed(self, buffers: list[Tensor], places: list[int], at: At) -> list[Tensor]:
        """``directions``; of sharded matrices each on one rank, which is handed all its rows."""
        if self._shards is None:
            return self.directions(buffers, places, at)
        return self._shards.on_whole(
            buffers,
            [self._names[at.release][place] for place in places],
            lambda matrices, mine: self.directions(matrices, [places[which] for which in mine], at),
        )
