"""Rounding errors of arrays, and of Fourier transforms of laws wrapped around a cycle.

A real transform of n points has a 2-norm error of at most η = 16 u log2(n) times the norm of its
input, u = 2**-53 ([1] Theorem 24.2 gives 7 u for radix 2 with rounded twiddles; doubled for mixed
radix). The input is the *wrapped* law, with one rounding for each row that wrapping adds.

>>> wrapped = folded(np.array([0.5, 0.25, 0.25]), 2)
>>> wrapped
array([0.75, 0.25])
>>> 0 < transform_error(wrapped, 3) < 1e-13
True

Reference: [1] Higham, "Accuracy and Stability of Numerical Algorithms", 2nd ed., §24.1.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

UNIT_ROUNDOFF = 2.0**-53


def folded(law: Array, size: int) -> Array:
    """Return ``law`` of shape (n,) wrapped around to ``size`` points, shape (size,)."""
    rows = -(-law.size // size)
    padded = np.zeros(rows * size)
    padded[: law.size] = law
    wrapped: Array = padded.reshape(rows, size).sum(axis=0)
    return wrapped


def transform_rounding(size: int) -> float:
    """Return η, the error of a transform of ``size`` points over the 2-norm of its input."""
    return 16 * UNIT_ROUNDOFF * math.log2(size)


def transform_error(wrapped: Array, points: int) -> float:
    """Return the 2-norm error of the transform of ``wrapped``, a folded law of ``points`` points.

    ``wrapped`` has shape (n,).
    """
    roundings = transform_rounding(wrapped.size) + UNIT_ROUNDOFF * -(-points // wrapped.size)
    return roundings * norm(wrapped)


def norm(values: Array) -> float:
    """Return the 2-norm of ``values``, shape (n,), rounded up."""
    return math.sqrt(float(values @ values)) * (1 + 1e-10)
