"""Numerics: rounding that is bounded, and filters.

**Rounding**: how far a computed sum of squares may be below the true one. A sum of n products
of doubles, in any order, is off by at most γ_n times the sum of their absolute values, γ_n =
n·u / (1 - n·u), u = 2^-53; numpy may sum pairwise, in blocks or in a BLAS kernel, and the bound
holds for all of them.

>>> gamma(3) > 3 * 2.0**-53
True

References: Higham, *Accuracy and Stability of Numerical Algorithms*, 2nd ed., section 3.1.

**Filters and convolutions** are products with Toeplitz matrices, by ``scipy.signal`` and
``scipy.fft``. The first takes longer to load than most plans take to certify, so it is imported at
first use, and not for a convolution.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

UNIT = 2.0**-53
"""Unit round-off of a double."""
TRANSFORM_ERROR = 64.0
"""Rounding error of a convolution by transforms, in units of ``UNIT``, log₂ of its length and both
norms; about six suffice (Higham, section 24.1)."""


def gamma(operations: int) -> float:
    """Return γ_n, rounded up, for ``operations`` far below 2^53."""
    return 1.01 * (operations + 2) * UNIT


def transform_slack(length: int) -> float:
    """Return the error of a convolution of ``length`` numbers by transforms, over both norms."""
    return TRANSFORM_ERROR * UNIT * math.log2(2 * length + 2)


def root_up(squared: float, operations: int) -> float:
    """Return an upper bound of √s for a sum s ≥ 0 computed in ``operations`` roundings."""
    return math.nextafter(math.sqrt(squared * (1 + gamma(operations + 4))), math.inf)


def root_down(squared: float, operations: int) -> float:
    """Return a lower bound of √s, at least 0, for a sum s computed in ``operations`` roundings."""
    return math.nextafter(math.sqrt(max(0.0, squared) * (1 - gamma(operations + 4))), 0.0)


Array = NDArray[np.float64]


def padded(values: Array, length: int) -> Array:
    """Return ``values``, shape (m,), padded with zeros or truncated to shape (length,)."""
    result = np.zeros(length)
    result[: len(values)] = values[:length]
    return result


def lfilter(
    numerator: Array | list[float], denominator: Array | list[float], values: Array, axis: int = -1
) -> Array:
    """Return ``values`` filtered from rest, like ``scipy.signal.lfilter``.

    The shape is that of ``values``; the coefficients have shapes (m,) and (n,).
    """
    from scipy import signal

    return np.asarray(signal.lfilter(numerator, denominator, values, axis=axis))


def fftconvolve(left: Array, right: Array) -> Array:
    """Return the full convolution of two vectors by transforms, like scipy's.

    Shape (m + n - 1,) from (m,) and (n,).
    """
    from scipy import fft

    whole = len(left) + len(right) - 1
    length = fft.next_fast_len(whole, real=True)
    product = fft.rfft(left, length) * fft.rfft(right, length)
    return np.asarray(fft.irfft(product, length)[:whole])
