"""Scheduled clipping: a public clip norm for each step, under noise that does not follow it.

Step t is clipped to ζ_t times the clip norm while the noise stays that of the clip norm, so a
record moves the run by C·diag(ζ)·x with ‖x_i‖ ≤ 1: X becomes D_ζ X D_ζ, and the noise, its errors
and its generation are those of C. Up to ``MAX_MATRIX_STEPS`` steps the columns are scaled; for any
number of steps, the largest ζ times sens(C) is a bound.

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

from affidavit.mechanisms.strategies.numerics import Array
from affidavit.mechanisms.strategies.participation import Participation
from affidavit.mechanisms.strategies.sensitivity import (
    Sensitivity,
    inverse_sensitivity,
    matrix_sensitivity,
)
from affidavit.mechanisms.strategies.strategy import Errors, Strategy, Streaming
from affidavit.mechanisms.strategies.workload import Workload
from affidavit.plan import MAX_MATRIX_STEPS


@dataclass(frozen=True, kw_only=True, eq=False)
class Scheduled(Strategy):
    """C·diag(ζ) of ``unscaled`` C; ``factors`` ζ has shape (T,) and is positive."""

    unscaled: Strategy
    factors: Array

    @classmethod
    def of(cls, unscaled: Strategy, factors: Sequence[float]) -> Scheduled:
        """Return ``unscaled`` with one factor per step.

        Raises ``ValueError`` unless there is one positive factor per step.
        """
        provided = np.array(factors, dtype=np.float64)
        if len(provided) != unscaled.steps or not np.all(provided > 0):
            raise ValueError("a clip schedule needs one positive factor per step")
        return cls(kind=unscaled.kind, steps=unscaled.steps, unscaled=unscaled, factors=provided)

    def sensitivity(self, participation: Participation) -> Sensitivity:
        """Return the tighter of two bounds: from the extreme factors, and from scaled columns."""
        largest, least = float(np.max(self.factors)), float(np.min(self.factors))
        bound = self.unscaled.sensitivity(participation).scaled(
            least * (1 - 2.0**-52), largest * (1 + 2.0**-52)
        )
        if bound.exact or self.steps > MAX_MATRIX_STEPS:
            return bound
        scaled = inverse_sensitivity(
            matrix_sensitivity(self.strategy_matrix(), participation), self.residual
        )
        seen = inverse_sensitivity(
            matrix_sensitivity(self.visible_matrix(), participation), self.residual
        )
        return Sensitivity(
            value=min(scaled.value, bound.value), attained=max(seen.attained, bound.attained)
        )

    @property
    def streaming(self) -> Streaming:
        """The streaming of C, because the noise does not follow the schedule."""
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
        """The residual of C, which scaling the columns does not change."""
        return self.unscaled.residual

    @property
    def injected(self) -> Strategy:
        """C, whose noise is injected unchanged."""
        return self.unscaled.injected

    @property
    def draws(self) -> int:
        """The draws of C."""
        return self.unscaled.draws

    @property
    def coefficients(self) -> Mapping[str, Array]:
        """The coefficients of C; the schedule is in the plan."""
        return self.unscaled.coefficients

    def noise_columns(self, first: int, last: int) -> Array:
        """Return columns first..last-1 of N, shape (T, last - first)."""
        return self.unscaled.noise_columns(first, last)

    def strategy_matrix(self) -> Array:
        """Return C·diag(ζ), shape (T, T); raises ``TooLarge``."""
        self._require_dense()
        return self.unscaled.strategy_matrix() * self.factors

    def visible_matrix(self) -> Array:
        """Return the visible rows of C with scaled columns, shape (T, T)."""
        self._require_dense()
        return self.unscaled.visible_matrix() * self.factors

    def errors(self, workload: Workload) -> Errors:
        """Return the errors of N."""
        return self.unscaled.errors(workload)
