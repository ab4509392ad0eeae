"""DP-Muon: momentum of the noisy means, orthogonalised by Newton-Schulz.

    M_t = β M_(t-1) + G̃_t,   O_t = Q_(κ,q)(M_t),   W ← (1 - ηλ) W - η O_t

for every hidden matrix; weight decay λ is decoupled. Tensors with more than two dimensions
are matrices of their first dimension by the others. AdamW, with the plan's β₁, β₂ and
``auxiliary_learning_rate``, updates the tensors of the auxiliary release (its name begins with
"aux") and tensors of one dimension anywhere. Matrices of equal shape, up to transposition,
are orthogonalised together. All of this is post-processing of released means.

With the paper's start, an ‖M_t‖_F below 1 is not normalised (see below), which is
usual for noisy means; ``newton_schulz_start: frobenius`` is the remedy.

The Newton-Schulz orthogonalisation Q_(κ,q) of a matrix M of m rows and n columns, transposed if
m > n:

    Y_0 = M / max(1, ‖M‖_F)  (start "paper")   or   M / ‖M‖_F  (start "frobenius"),
    Y_j = p_κ(Y_(j-1) Y_(j-1)ᵀ) Y_(j-1),   p_κ(x) = Σ_(s=0..κ) (2s)!/(4^s (s!)²) (1-x)^s.

A singular value y becomes y p_κ(y²), on its way to 1. Small values do *not* reach 1 in a few steps:
they grow by p_κ(0) per step. With the paper's start and ‖M‖_F < 1, five steps
of degree 2 are little more than a multiplication by 23.2. The zero matrix stays zero.

``dtype`` is the type of the products; norms are taken in the matrices' own type. In
bfloat16, singular values near 1 are accurate to about 1 %, and it is fast on hardware that
supports it. This is the batched, any-device twin of ``affidavit.mechanisms.newton_schulz``.

>>> small = 1e-6 * torch.eye(2).reshape(1, 2, 2)
>>> round(float(orthogonalize(small)[0, 0, 0] / small[0, 0, 0]), 1)
23.2

DP-MuonBC is DP-Muon without the leading bias that noise leaves after Newton-Schulz:

    M̂_t = M_t / Σ_(j<t) β^j,   O⁰ = Q(M̂_t),
    O² = (1/2J) Σ_j [Q(M̂_t + ρ_t U_j) + Q(M̂_t - ρ_t U_j)],   W ← (1 - ηλ) W - η (2 O⁰ - O²)

where ρ_t is the standard deviation of the noise in an entry of M̂_t. For independent noise of
variance ν² in each mean, ρ_t² = ν² (1-β)/(1+β) (1+β^t)/(1-β^t); for noise N z it follows from N.
The J probes U_j have independent standard normal entries. They come from keyed streams with their
own key, named by step, tensor and probe, so that they depend on neither the data nor the noise, and
a resumed run draws the same probes.

>>> momenta, shifts = [torch.tensor([[3.0]])], [[torch.tensor([[0.5]])]]
>>> float(correct_bias(momenta, shifts, torch.square)[0])
8.75

Reference: arXiv:2605.12994v1, Algorithm 1, section 4, appendices C and D.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor

from affidavit.mechanisms import DEFAULT_DEGREE, DEFAULT_STEPS, Start, coefficients
from affidavit.trainer.noise.normal import standard_normal
from affidavit.trainer.optimizers.base import (
    DPOptimizer,
    Rule,
    Tensors,
    Update,
    map_batches,
    std_at,
)
from affidavit.trainer.optimizers.entrywise import adam
from affidavit.trainer.optimizers.inputs import OptimizerInputs


def orthogonalize(
    matrices: Tensor,
    *,
    degree: int = DEFAULT_DEGREE,
    steps: int = DEFAULT_STEPS,
    start: Start = "paper",
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return Q of each of the matrices, (k, m, n) to (k, m, n)."""
    wide = matrices.mT if matrices.shape[-2] > matrices.shape[-1] else matrices
    norms = torch.linalg.matrix_norm(wide, keepdim=True)
    scale = norms.clamp(min=1) if start == "paper" else torch.where(norms > 0, norms, 1.0)
    iterate = wide / scale
    if dtype is not None:
        iterate = iterate.to(dtype)
    series = coefficients(degree)
    identity = torch.eye(iterate.shape[-2], dtype=iterate.dtype, device=iterate.device)
    scaled = series[-2] * identity
    for _ in range(steps):
        iterate = _step(iterate, series, identity, scaled)
    iterate = iterate.to(matrices.dtype)
    return iterate if wide is matrices else iterate.mT


def _step(iterate: Tensor, series: tuple[float, ...], identity: Tensor, scaled: Tensor) -> Tensor:
    """Return p_κ(Y Yᵀ) Y by Horner's rule in I - Y Yᵀ, which is accurate near 1.

    ``scaled`` is the identity times the last coefficient but one.
    """
    rest = torch.baddbmm(identity, iterate, iterate.mT, alpha=-1)
    polynomial = torch.add(scaled, rest, alpha=series[-1])
    for coefficient in series[-3::-1]:
        polynomial = torch.baddbmm(identity, polynomial, rest, beta=coefficient)
    return polynomial @ iterate


MOMENTUM = 0.95
"""Default β."""

MatrixMap = Callable[[Tensor], Tensor]
"""Maps a batch of matrices (k, m, n) to matrices of the same shapes."""


def step_along(parameters: Tensors, directions: Tensors, at: Update) -> None:
    """Set each W, of shape (m, n), to (1 - ηλ) W - η O; O has the entries of W."""
    if at.weight_decay:
        torch._foreach_mul_(parameters, 1 - at.learning_rate * at.weight_decay)
    shaped = [of.reshape(item.shape) for of, item in zip(directions, parameters, strict=True)]
    torch._foreach_add_(parameters, shaped, alpha=-at.learning_rate)


def map_matrices(matrices: Sequence[Tensor], function: MatrixMap) -> list[Tensor]:
    """Apply ``function`` to each matrix, in batches of equal shape, with tall ones transposed."""
    tall = [len(matrix) > matrix.shape[1] for matrix in matrices]
    wide = [matrix.mT if of else matrix for matrix, of in zip(matrices, tall, strict=True)]
    done = map_batches(wide, function)
    return [matrix.mT if of else matrix for matrix, of in zip(done, tall, strict=True)]


class Muon(DPOptimizer):
    """``dp_muon``."""

    def __init__(self, inputs: OptimizerInputs) -> None:
        settings = inputs.settings
        self._momentum = MOMENTUM if settings.momentum is None else settings.momentum
        self._degree = settings.newton_schulz_degree or DEFAULT_DEGREE
        self._newton_schulz_steps = settings.newton_schulz_steps or DEFAULT_STEPS
        self._start: Start = settings.newton_schulz_start or "paper"
        self._dtype = inputs.newton_schulz_dtype
        self._auxiliary_rate = (
            settings.auxiliary_learning_rate or inputs.learning_rate
        ) / inputs.learning_rate
        self._auxiliary = {release.name for release in inputs.releases if release.auxiliary}
        super().__init__(inputs)

    def rule(self, inputs: OptimizerInputs) -> Rule:
        """Return the rule of the auxiliary tensors."""
        return adam(inputs, decoupled=True)

    def map(self, matrices: Tensor) -> Tensor:
        """Return Q_(κ,q) of a batch. Shape (batch, m, n)."""
        return orthogonalize(
            matrices,
            degree=self._degree,
            steps=self._newton_schulz_steps,
            start=self._start,
            dtype=self._dtype,
        )

    def directions(self, buffers: list[Tensor], places: list[int], at: Update) -> list[Tensor]:
        """Return O_t for the momenta of a release's matrices, at ``places`` among its tensors.

        Each keeps its shape.
        """
        del places, at
        return map_matrices(buffers, self.map)

    def is_matrix(self, parameter: Tensor, at: Update) -> bool:
        """Return whether a tensor, of any shape, is orthogonalised."""
        return at.release not in self._auxiliary and parameter.ndim >= 2

    def _update(self, parameters: list[Tensor], means: list[Tensor], at: Update) -> None:
        auxiliary = replace(at, learning_rate=at.learning_rate * self._auxiliary_rate)
        is_matrix = [self.is_matrix(parameter, at) for parameter in parameters]
        others = [place for place, of in enumerate(is_matrix) if not of]
        self._apply_rule(
            [parameters[place] for place in others], [means[place] for place in others], auxiliary
        )
        places = [place for place, of in enumerate(is_matrix) if of]
        if not places:
            return
        matrices = [parameters[place] for place in places]
        states = [self.state[parameter] for parameter in matrices]
        momenta = [means[place] for place in places]
        if all("momentum" in state for state in states):
            before = [state["momentum"] for state in states]
            momenta = list(torch._foreach_add(momenta, before, alpha=self._momentum))
        else:
            momenta = [mean.clone() for mean in momenta]
        for state, momentum in zip(states, momenta, strict=True):
            state["momentum"] = momentum
        buffers = [momentum.flatten(1) for momentum in momenta]
        step_along(matrices, self._compute_directions(buffers, places, at), at)

    def _compute_directions(
        self, buffers: list[Tensor], places: list[int], at: Update
    ) -> list[Tensor]:
        """Return ``directions``; each sharded matrix is gathered on one rank."""
        if self._shards is None:
            return self.directions(buffers, places, at)
        return self._shards.map_full_matrices(
            buffers,
            [self._names[at.release][place] for place in places],
            lambda matrices, local: self.directions(
                matrices, [places[which] for which in local], at
            ),
        )


PROBES = 1
"""Default J, as published."""


def correct_bias(
    momenta: Sequence[Tensor], shifts: Iterable[Sequence[Tensor]], function: MatrixMap
) -> list[Tensor]:
    """Return 2 O⁰ - O² of each M̂; ``shifts`` yields ρ_t U_j of all of them for each j.

    Each keeps its shape.
    """
    plain = map_matrices(momenta, function)
    smoothed, pairs = [torch.zeros_like(momentum) for momentum in momenta], 0
    for pairs, shift in enumerate(shifts, start=1):  # noqa: B007 (counts them)
        up = [momentum + by for momentum, by in zip(momenta, shift, strict=True)]
        down = [momentum - by for momentum, by in zip(momenta, shift, strict=True)]
        result = map_matrices([*up, *down], function)
        for total, one, other in zip(smoothed, result, result[len(up) :], strict=False):
            total.add_(one).add_(other)
    return [
        torch.sub(2 * zeroth, second, alpha=1 / (2 * pairs))
        for zeroth, second in zip(plain, smoothed, strict=True)
    ]


class MuonBC(Muon):
    """``dp_muonbc``; it needs ``inputs.probe_key``, which serves only the probes."""

    def __init__(self, inputs: OptimizerInputs) -> None:
        inputs.require_fixed_clip_norms()
        if inputs.probe_key is None:
            raise ValueError("dp_muonbc draws probes: give a separate probe_key of 32 bytes")
        super().__init__(inputs)
        self._key = inputs.probe_key
        self._probes = inputs.settings.probes or PROBES
        counts = [len(release.tensors) for release in inputs.releases]
        if self._probes * sum(counts) > 1 << 32:
            raise ValueError(f"too few streams for {self._probes} probes of every tensor")
        firsts = accumulate(counts, initial=0)
        self._first = {r.name: first for r, first in zip(inputs.releases, firsts, strict=False)}
        self._probe_std = {
            release.name: release.noise.momentum_std(self._momentum, normalised=True)
            for release in inputs.releases
        }

    def directions(self, buffers: list[Tensor], places: list[int], at: Update) -> list[Tensor]:
        """Return 2 O⁰ - O² of each matrix. Each keeps its shape."""
        if not buffers:
            return []
        beta = self._momentum
        weight = -math.expm1(at.step * math.log(beta)) / (1 - beta) if beta else 1.0
        momenta = [buffer / weight for buffer in buffers]
        return correct_bias(momenta, self._shifts(buffers, places, at), self.map)

    def _shifts(
        self, buffers: list[Tensor], places: list[int], at: Update
    ) -> Iterator[list[Tensor]]:
        std = std_at(self._probe_std, at)
        for probe in range(self._probes):
            numbers = [(self._first[at.release] + p) * self._probes + probe for p in places]
            yield [
                std * self._draw(buffer, number, at.step)
                for buffer, number in zip(buffers, numbers, strict=True)
            ]

    def _draw(self, like: Tensor, number: int, step: int) -> Tensor:
        device = str(like.device)
        normal = standard_normal(
            self._key, step=step, tensor=number, shape=like.shape, device=device
        )
        return normal.to(like.dtype)
