"""DP-MuonBC: DP-Muon without the leading bias that noise leaves after Newton-Schulz.

    M̂_t = M_t / Σ_(j<t) β^j,   O⁰ = Q(M̂_t),
    O² = (1/2J) Σ_j [Q(M̂_t + ρ_t U_j) + Q(M̂_t - ρ_t U_j)],   W ← (1 - ηλ) W - η (2 O⁰ - O²)

with ρ_t the standard deviation of the noise in an entry of M̂_t, for independent noise of
variance ν² in each mean ρ_t² = ν² (1-β)/(1+β) (1+β^t)/(1-β^t), and J probes U_j of independent
standard normal entries. Probes come from the keyed streams of a key of their own, named by
step, tensor and probe, so that they depend on neither the data nor the noise, and a run that
goes on from a checkpoint draws the same ones. Noise N z has its own ρ_t, from N.

>>> momenta, shifts = [torch.tensor([[3.0]])], [[torch.tensor([[0.5]])]]
>>> float(update(momenta, shifts, torch.square)[0])
8.75

Reference: arXiv:2605.12994v1, section 4, appendices C and D.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from affidavit.trainer.noise.normal import standard_normal
from affidavit.trainer.optimizers.base import At, std_at
from affidavit.trainer.optimizers.inputs import OptimizerInputs
from affidavit.trainer.optimizers.muon import Map, Muon, by_shape

PROBES = 1
"""J of a plan that gives none, as published."""


def update(
    momenta: Sequence[Tensor], shifts: Iterable[Sequence[Tensor]], function: Map
) -> list[Tensor]:
    """2 O⁰ - O² of every M̂; ``shifts`` gives ρ_t U_j of all of them, one j after the other.

    Each keeps its shape.
    """
    plain = by_shape(momenta, function)
    smoothed, pairs = [torch.zeros_like(momentum) for momentum in momenta], 0
    for pairs, shift in enumerate(shifts, start=1):  # noqa: B007 (counts them)
        up = [momentum + by for momentum, by in zip(momenta, shift, strict=True)]
        down = [momentum - by for momentum, by in zip(momenta, shift, strict=True)]
        result = by_shape([*up, *down], function)
        for total, one, other in zip(smoothed, result, result[len(up) :], strict=False):
            total.add_(one).add_(other)
    return [
        torch.sub(2 * zeroth, second, alpha=1 / (2 * pairs))
        for zeroth, second in zip(plain, smoothed, strict=True)
    ]


class MuonBC(Muon):
    """``dp_muonbc``; ``inputs.probe_key`` is needed and serves the probes alone."""

    def __init__(self, inputs: OptimizerInputs) -> None:
        inputs.require_fixed_clip_norms()
        if inputs.probe_key is None:
            raise ValueError("dp_muonbc draws probes: give a probe_key of their own, 32 bytes")
        super().__init__(inputs)
        self._key = inputs.probe_key
        self._probes = inputs.settings.probes or PROBES
        counts = [len(release.tensors) for release in inputs.releases]
        if self._probes * sum(counts) > 1 << 32:
            raise ValueError(f"there are no streams for {self._probes} probes of every tensor")
        firsts = accumulate(counts, initial=0)
        self._first = {r.name: first for r, first in zip(inputs.releases, firsts, strict=False)}
        self._probe_std = {
            release.name: release.noise.momentum_std(self._momentum, normalised=True)
            for release in inputs.releases
        }

    def directions(self, buffers: list[Tensor], places: list[int], at: At) -> list[Tensor]:
        """2 O⁰ - O² of every matrix. Each keeps its shape."""
        if not buffers:
            return []
        beta = self._momentum
        weight = -math.expm1(at.step * math.log(beta)) / (1 - beta) if beta else 1.0
        momenta = [buffer / weight for buffer in buffers]
        return update(momenta, self._shifts(buffers, places, at), self.map)

    def _shifts(self, buffers: list[Tensor], places: list[int], at: At) -> Iterator[list[Tensor]]:
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
