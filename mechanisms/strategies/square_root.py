"""Square-root strategies: C·C = A for the prefix sum or for momentum, and banded relatives.

The workload of heavy-ball momentum β at a constant rate is the Toeplitz matrix of
1 / ((1-x)(1-βx)), so that its root has c(x) = (1-x)^(-1/2) (1-βx)^(-1/2): non-negative and
decreasing, close to optimal, and known without any search.

* ``sqrt``: C = A^(1/2), all coefficients.
* ``bsr``: the first b̂ coefficients of it, so that C is banded.
* ``bisr``: the first b̂ coefficients of N = A^(-1/2), so that the *inverse* is banded.

Learning rates do not enter: a Toeplitz strategy cannot follow them.

>>> square_root(4).strategy_coefficients
array([1.    , 0.5   , 0.375 , 0.3125])
>>> banded_inverse_root(4, bands=2).noise_coefficients
array([ 1. , -0.5,  0. ,  0. ])

References: Fichtenberger, Henzinger and Upadhyay, arXiv:2202.11205; Kalinin and Lampert,
arXiv:2405.13763 (BSR, momentum); Kalinin, McKenna, Upadhyay and Lampert, arXiv:2505.12128
(BISR).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from affidavit.mechanisms.strategies.filtering import fftconvolve
from affidavit.mechanisms.strategies.toeplitz import Toeplitz

Array = NDArray[np.float64]

DIRECT = 8192
"""Lengths up to which two series are multiplied term by term."""


def square_root(steps: int, *, momentum: float = 0.0) -> Toeplitz:
    """C = A^(1/2) over ``steps``; ``momentum`` is β in [0, 1), here and below."""
    return Toeplitz.from_strategy(_root(steps, momentum, -0.5), steps, kind="sqrt")


def banded_root(steps: int, *, bands: int, momentum: float = 0.0) -> Toeplitz:
    """BSR: the first ``bands`` coefficients of A^(1/2)."""
    return Toeplitz.from_strategy(_root(min(bands, steps), momentum, -0.5), steps, kind="bsr")


def banded_inverse_root(steps: int, *, bands: int, momentum: float = 0.0) -> Toeplitz:
    """BISR: N is the first ``bands`` coefficients of A^(-1/2)."""
    return Toeplitz.from_noise(_root(min(bands, steps), momentum, 0.5), steps, kind="bisr")


def _root(length: int, momentum: float, power: float) -> Array:
    """The first coefficients of ((1-x)(1-βx))^power."""
    plain = _binomial(length, power)
    if not momentum:
        return plain
    other = plain * momentum ** np.arange(length, dtype=np.float64)
    product = np.convolve if length <= DIRECT else fftconvolve
    return np.asarray(product(plain, other)[:length])


def _binomial(length: int, power: float) -> Array:
    """Coefficients of (1-x)^power: a_j = a_{j-1} (j - 1 - power) / j."""
    places = np.arange(1, length, dtype=np.float64)
    return np.concatenate([[1.0], np.cumprod((places - 1 - power) / places)])
