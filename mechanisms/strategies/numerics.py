"""Numerics: rounding that is bounded, and filters.

**Rounding**: how far a computed sum of squares may lie below the true one. A sum of n products
of doubles, in any order, is off by at most γ_n times the sum of their absolute values, γ_n =
n·u / (1 - n·u), u = 2^-53; numpy may sum pairwise, in blocks or in a BLAS kernel, and the bound
holds for all of them.

>>> gamma(3) > 3 * 2.0**-53
True

References: Higham, *Accuracy and Stability of Numerical Algorithms*, 2nd ed., section 3.1.

**Filters and convolutions** are what Toeplitz matrices do to vectors. They are scipy's. Its
module takes half a second to load, more than most plans take to certify, and only correlated
noise needs it: so it is loaded at the first use."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

UNIT = 2.0**-53
"""Unit round-off of a double."""
TRANSFORM = 64.0
"""Rounding of a convolution by transforms, in units of ``UNIT``, log₂ of its length and both
vectors' norms; some six are needed (Higham, section 24.1)."""


def gamma(operations: int) -> float:
    """γ_n, rounded up; ``operations`` far below 2^53."""
    return 1.01 * (operations + 2) * UNIT


def transform_slack(length: int) -> float:
    """What a convolution of so many numbers by transforms is off, over both vectors' norms."""
    return TRANSFORM * UNIT * math.log2(2 * length + 2)


def root_up(squared: float, operations: int) -> float:
    """An upper bound of √s, for a sum s ≥ 0 that was computed in ``operations`` roundings."""
    return math.nextafter(math.sqrt(squared * (1 + gamma(operations + 4))), math.inf)


def root_down(squared: float, operations: int) -> float:
    """A lower bound of √s, for a sum s that was computed in ``operations`` roundings; ≥ 0."""
    return math.nextafter(math.sqrt(max(0.0, squared) * (1 - gamma(operations + 4))), 0.0)


Array = NDArray[np.float64]


def padded(values: Array, length: int) -> Array:
    """``values``, shape (m,), with zeros after them or cut off; shape (length,)."""
    result = np.zeros(length)
    result[: len(values)] = values[:length]
    return result


def lfilter(
    numerator: Array | list[float], denominator: Array | list[float], values: Array, axis: int = -1
) -> Array:
    """``values`` through the filter of these coefficients, from rest; like scipy's.

    The shape is that of ``values``; coefficients have shapes (m,) and (n,).
    """
    from scipy import signal

    return np.asarray(signal.lfilter(numerator, denominator, values, axis=axis))


def fftconvolve(left: Array, right: Array) -> Array:
    """The whole convolution of two vectors, by transforms; like scipy's.

    Shape (m + n - 1,) from (m,) and (n,).
    """
    from scipy import signal

    return np.asarray(signal.fftconvolve(left, right))
