"""Recursive filters and convolutions, which is what Toeplitz matrices do to vectors.

They are scipy's. Its module takes half a second to load, more than most plans take to
certify, and only correlated noise needs it: so it is loaded at the first use.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


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
