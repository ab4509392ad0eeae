"""BLT: buffered linear Toeplitz, c_0 = 1 and c_t = Σ_i ω_i θ_i^(t-1).

With d decays θ_i in (0, 1) and scales ω_i > 0, C is a full lower triangle whose noise needs only d
buffers: w_t = z_t - Σ ω_i s_i, then s_i ← θ_i s_i + w_t. The coefficients decrease if Σω ≤ 1, and
then every bound of a Toeplitz strategy is exact. One participation has a closed form:
sens² = 1 + Σ_{ij} ω_i ω_j (1 - (θ_i θ_j)^(T-1)) / (1 - θ_i θ_j).

>>> from affidavit.mechanisms.strategies.participation import Participation
>>> one = Blt.of([0.5], [0.25], steps=3)
>>> one.strategy_coefficients
array([1.   , 0.25 , 0.125])
>>> round(one.sensitivity(Participation.single()).value ** 2, 9)
1.078125

References: Dvijotham, McMahan, Pillutla, Steinke and Thakurta, arXiv:2404.16706;
McMahan, Xu and Zhang, arXiv:2408.08868.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from affidavit.mechanisms.strategies.geometric_sums import cross_sums, geometric_sums, outer, pairs
from affidavit.mechanisms.strategies.long_runs import Response
from affidavit.mechanisms.strategies.numerics import Array
from affidavit.mechanisms.strategies.participation import Participation
from affidavit.mechanisms.strategies.sensitivity import (
    Sensitivity,
    Unaffordable,
    toeplitz_sensitivity,
)
from affidavit.mechanisms.strategies.strategy import MAX_VECTOR, Errors, Streaming, TooLarge
from affidavit.mechanisms.strategies.toeplitz import Toeplitz, newton_reciprocal
from affidavit.mechanisms.strategies.workload import Workload

SUM_ERROR = 1e-11
"""Relative error of the geometric sums: their terms are positive, each exponential is accurate to
745 roundings, and at most forty doublings add a few more."""
COEFFICIENT_ERROR = 1e-12
"""Relative error of a coefficient: (t-1)·log θ is at most 745 where θ^(t-1) is not zero."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Blt(Toeplitz):
    """``decays`` θ in (0, 1) and ``scales`` ω > 0, as many of each."""

    decays: tuple[float, ...]
    scales: tuple[float, ...]

    @classmethod
    def of(cls, decays: Sequence[float], scales: Sequence[float], steps: int) -> Blt:
        """Return the strategy of these buffers over ``steps``.

        Raises ``ValueError`` unless there are as many scales ω > 0 as decays θ in (0, 1).
        """
        if len(decays) != len(scales) or not decays:
            raise ValueError("a BLT needs as many scales as decays, and at least one")
        if not all(0 < decay < 1 for decay in decays) or not all(scale > 0 for scale in scales):
            raise ValueError("decays lie in (0, 1) and scales are positive")
        return cls(
            kind="blt",
            steps=steps,
            decays=tuple(float(decay) for decay in decays),
            scales=tuple(float(scale) for scale in scales),
        )

    def sensitivity(self, participation: Participation) -> Sensitivity:
        """Return sens(C).

        One participation costs O(d²), several O(T (d + log k)), or O(d² log T) beyond
        ``MAX_VECTOR`` steps. Raises ``Unaffordable`` if no worst pattern is known there, because
        the coefficients do not decrease.
        """
        if participation.max_participations(self.steps) == 1:
            norm = self._column_norm
            return Sensitivity(value=norm, attained=norm * (1 - 3 * COEFFICIENT_ERROR))
        if self.steps > MAX_VECTOR:
            return self._closed(participation)
        bound = toeplitz_sensitivity(self.strategy_coefficients, self.steps, participation)
        return bound.scaled(1 - COEFFICIENT_ERROR, 1 + COEFFICIENT_ERROR)

    def _closed(self, participation: Participation) -> Sensitivity:
        """Return ‖Σ_{j<k} S^(jb) c‖ by geometric sums.

        Source: docs/theorems/correlated-noise.md, Theorem 10.
        """
        if participation.schema != "fixed_epoch" and math.fsum(self.scales) > 1 - 1e-12:
            raise Unaffordable(f"scales that add up to more than 1 over {self.steps} steps")
        rates, scales = -np.log(np.asarray(self.decays)), np.asarray(self.scales)
        most, separation = participation.max_participations(self.steps), participation.separation
        tail, weights, sums = (
            self.steps - (most - 1) * separation,
            outer(scales, scales),
            pairs(rates),
        )
        delayed = scales * np.exp(-(separation - 1) * rates)
        earlier = cross_sums(separation * rates, most - 1)
        final, _ = geometric_sums(separation * rates, most)
        # At the start of a range, each earlier participation adds its coefficient to c_0 = 1.
        squared = (1 + delayed @ earlier.last) ** 2 + most - 1
        if most > 2:
            before = cross_sums(separation * rates, most - 2)
            squared += 2 * delayed @ before.total + delayed @ before.products @ delayed
        for products, length in ((earlier.products, separation), (outer(final, final), tail)):
            if length > 1:
                squared += np.sum(weights * products * geometric_sums(sums, length - 1)[0])
        norm = math.sqrt(float(squared))
        return Sensitivity(value=norm * (1 + SUM_ERROR), attained=norm * (1 - SUM_ERROR))

    def errors(self, workload: Workload) -> Errors:
        """Return the errors of ``workload`` at unit noise; raises ``TooLarge``.

        Those of prefix sums are known for runs of any length.
        """
        if self.steps <= MAX_VECTOR or not workload.is_prefix_sum:
            return super().errors(workload)
        powers, shares = self._modes
        rest = shares / (1 - powers)
        remaining = 1 / (
            1 + math.fsum(w / (1 - d) for w, d in zip(self.scales, self.decays, strict=True))
        )
        return Response(head=np.zeros(0), constant=remaining, weights=rest, powers=powers).errors(
            self.steps
        )

    def injected_noise(self) -> float:
        """Return the rms over steps of the noise at unit z."""
        if self.steps <= MAX_VECTOR:
            return super().injected_noise()
        powers, shares = self._modes
        return Response(head=np.ones(1), weights=-shares, powers=powers).rms(self.steps)

    @cached_property
    def _modes(self) -> tuple[Array, Array]:
        """φ and g of N: n_0 = 1 and n_t = -Σ g_j φ_j^(t-1), shape (d,) each.

        The buffers follow s ← (D - 1ωᵀ) s + 1 z, D the decays, which is similar to the symmetric
        D - √ω √ωᵀ.
        """
        root = np.sqrt(np.asarray(self.scales))
        lost = np.diag(1 - np.asarray(self.decays)) + np.outer(root, root)
        remaining, vectors = np.linalg.eigh(lost)
        return 1 - remaining, (root @ vectors) ** 2

    @property
    def is_nonnegative(self) -> bool:
        """Always true: every scale is positive."""
        return True

    @property
    def streaming(self) -> Streaming:
        """One buffer per decay."""
        return Streaming(
            form="buffered",
            buffers=len(self.decays),
            recurrence="w_t = z_t - Σ_i ω_i s_i, then s_i ← θ_i s_i + w_t, s_i zero at the start",
            coefficients=(*self.decays, *self.scales),
        )

    @property
    def coefficients(self) -> Mapping[str, Array]:
        """``decays`` θ and ``scales`` ω, shape (d,) each."""
        return {"decays": np.array(self.decays), "scales": np.array(self.scales)}

    @property
    def bands(self) -> int:
        """T, because every buffer affects all later steps."""
        return self.steps

    @cached_property
    def strategy_coefficients(self) -> Array:
        """The first column of C, shape (T,); raises ``TooLarge`` beyond ``MAX_VECTOR`` steps."""
        if self.steps > MAX_VECTOR:
            raise TooLarge(f"coefficients over {self.steps} steps")
        result = np.ones(self.steps)
        before = np.arange(self.steps - 1, dtype=np.float64)
        result[1:] = 0.0
        for logarithm, scale in zip(np.log(self.decays), self.scales, strict=True):
            result[1:] += scale * np.exp(before * logarithm)
        return result

    @cached_property
    def noise_coefficients(self) -> Array:
        """The first column of N, shape (T,); raises ``TooLarge`` like ``strategy_coefficients``."""
        return newton_reciprocal(self.strategy_coefficients, self.steps)

    @property
    def _column_norm(self) -> float:
        logarithms = np.log(np.asarray(self.decays))
        pairs = logarithms[:, None] + logarithms
        sums = np.expm1((self.steps - 1) * pairs) / np.expm1(pairs)
        scales = np.asarray(self.scales)
        return float(np.sqrt(1 + scales @ sums @ scales)) * (1 + COEFFICIENT_ERROR)
