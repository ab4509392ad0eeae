"""Scheduled clipping: a public clip norm for each step, under noise that does not follow it.

Where step t is clipped to ζ_t times the clip norm and the noise stays that of the clip norm,
a record moves the run by C·diag(ζ)·x with ‖x_i‖ ≤ 1: X becomes D_ζ X D_ζ, and the noise, its
errors and its generation are those of C. Up to ``MAX_MATRIX_STEPS`` steps the columns are
scaled; a bound for any number of steps is the largest ζ times sens(C).

>>> from affidavit.mechanisms.strategies.toeplitz import identity
>>> from affidavit.mechanisms.strategies.participation import Participation
>>> twice = Participation.fixed_epoch(participations=2, separation=1)
>>> round(Scheduled.of(identity(2), (3.0, 4.0)).sensitivity(twice).value, 12)
5.0

Reference: ``docs/theorems/correlated-noise.md``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from affidavit.mechanisms.strategies.participation import Participation
from affidavit.mechanisms.strategies.sensitivity import Sensitivity, of_inverse, of_matrix
from affidavit.mechanisms.strategies.strategy import Errors, Strategy, Streaming
from affidavit.mechanisms.strategies.workload import Workload
from affidavit.plan import MAX_MATRIX_STEPS

Array = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, eq=False)
class Scheduled(Strategy):
    """C·diag(ζ) of ``unscaled`` C; ``factors`` ζ has shape (T,) and is positive."""

    unscaled: Strategy
    factors: Array

    @classmethod
    def of(cls, unscaled: Strategy, factors: Sequence[float]) -> Scheduled:
        """``unscaled`` with one factor a step.

        Raises ``ValueError`` unless there is one positive factor a step.
        """
        provided = np.array(factors, dtype=np.float64)
        if len(provided) != unscaled.steps or not np.all(provided > 0):
            raise ValueError("a clip schedule needs one positive factor per step")
        return cls(kind=unscaled.kind, steps=unscaled.steps, unscaled=unscaled, factors=provided)

    def sensitivity(self, participation: Participation) -> Sensitivity:
        """The tighter ends of two bounds: factors at their extremes, and the scaled columns."""
        largest, least = float(np.max(self.factors)), float(np.min(self.factors))
        bound = self.unscaled.sensitivity(participation).stretched(
            least * (1 - 2.0**-52), largest * (1 + 2.0**-52)
        )
        if bound.exact or self.steps > MAX_MATRIX_STEPS:
            return bound
        scaled = of_inverse(of_matrix(self.strategy_matrix(), participation), self.residual)
        seen = of_inverse(of_matrix(self.seen_matrix(), participation), self.residual)
        return Sensitivity(
            value=min(scaled.value, bound.value), attained=max(seen.attained, bound.attained)
        )

    @property
    def streaming(self) -> Streaming:
        """That of C: the noise does not follow the schedule."""
        return self.unscaled.streaming

    @property
    def is_nonnegative(self) -> bool:
        """Whether no entry of C is negative."""
        return self.unscaled.is_nonnegative

    @property
    def bands(self) -> int:
        """b̂ of C."""
        return self.unscaled.bands

    @property
    def residual(self) -> float:
        """That of C; scaling the columns of both sides leaves it as it is."""
        return self.unscaled.residual

    @property
    def injected(self) -> Strategy:
        """C, whose noise is injected as it is."""
        return self.unscaled.injected

    @property
    def draws(self) -> int:
        """Those of C."""
        return self.unscaled.draws

    @property
    def coefficients(self) -> Mapping[str, Array]:
        """Those of C; the schedule stands in the plan."""
        return self.unscaled.coefficients

    def noise_columns(self, first: int, last: int) -> Array:
        """Columns of N, which is injected as it is. Shape (T, last - first)."""
        return self.unscaled.noise_columns(first, last)

    def strategy_matrix(self) -> Array:
        """C·diag(ζ), shape (T, T); raises ``TooLarge``."""
        self._require_dense()
        return self.unscaled.strategy_matrix() * self.factors

    def seen_matrix(self) -> Array:
        """What is seen of C, its columns scaled; shape (T, T)."""
        self._require_dense()
        return self.unscaled.seen_matrix() * self.factors

    def errors(self, workload: Workload) -> Errors:
        """Those of N."""
        return self.unscaled.errors(workload)
