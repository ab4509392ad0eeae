"""Workload: the linear map from released gradients to the observed iterates.

The error of correlated noise is that of A·N·z, with A the workload and N the injected noise. A
determines which strategy is good and what its error is, and never enters the guarantee.

* ``prefix_sum``: plain SGD at a constant rate, A[t, j] = 1 for j ≤ t.
* ``momentum``: heavy-ball momentum β with learning rates η_0, η_1, ...,
  A[t, j] = Σ_{s=j..t} η_s β^(s-j), the sum of updates after step t.

>>> Workload(momentum=0.5, learning_rates=(1.0, 2.0)).matrix(2)
array([[1., 0.],
       [2., 2.]])
>>> Workload().coefficients(3)
array([1., 1., 1.])

References: Denisov, McMahan, Rush, Smith and Thakurta, arXiv:2202.08312, section 4 (momentum
and learning rates as one matrix).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from affidavit.mechanisms.strategies.numerics import Array, lfilter


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """Heavy-ball momentum β in [0, 1) with learning rates; the default is the prefix sum.

    ``learning_rates`` η has one positive rate per step. None is the constant rate 1, which makes
    the workload Toeplitz.
    """

    momentum: float = 0.0
    learning_rates: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.momentum < 1:
            raise ValueError("momentum must be at least 0 and below 1")

    @property
    def is_prefix_sum(self) -> bool:
        """Whether A[t, j] = 1 for j ≤ t."""
        return self.momentum == 0 and self.learning_rates is None

    def rates(self, steps: int) -> Array:
        """Return η_0, ..., η_{T-1}, shape (steps,).

        Raises ``ValueError`` if there are fewer than ``steps``.
        """
        if self.learning_rates is None:
            return np.ones(steps)
        if len(self.learning_rates) < steps:
            raise ValueError(f"{len(self.learning_rates)} learning rates for {steps} steps")
        return np.asarray(self.learning_rates[:steps], dtype=np.float64)

    def apply(self, columns: Array) -> Array:
        """Return A·columns for shape (steps,) or (steps, m), in O(steps · m)."""
        if not columns.size:
            return columns
        velocity = (
            lfilter([1.0], [1.0, -self.momentum], columns, axis=0) if self.momentum else columns
        )
        if self.learning_rates is not None:
            rates = self.rates(len(columns))
            velocity = velocity * (rates if columns.ndim == 1 else rates[:, None])
        return np.cumsum(velocity, axis=0)

    def coefficients(self, steps: int) -> Array | None:
        """Return the first column of A, shape (steps,), or None for learning rates."""
        if self.learning_rates is not None:
            return None
        impulse = np.zeros(steps)
        impulse[0] = 1.0
        return self.apply(impulse)

    def matrix(self, steps: int) -> Array:
        """Return A, lower triangular, shape (steps, steps)."""
        return self.apply(np.eye(steps))

    def gram(self, steps: int) -> Array:
        """Return AᵀA, shape (steps, steps)."""
        matrix = self.matrix(steps)
        return matrix.T @ matrix
