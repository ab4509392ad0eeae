"""Sums of geometric series.

With r = e^{-s}, for rates s ≥ 0 (the real part of complex ones) and a
count K ≥ 1,

    g_K(s)    = Σ_{l<K} r^l,
    H_K(s)    = Σ_{m=1..K} g_m(s) = Σ_{l<K} (K - l) r^l,
    F_K(s,s') = Σ_{m=1..K} g_m(s) g_m(s').

They are computed by doubling in O(log K), with positive terms only, because the closed forms lose
all digits for small K·s. Complex arguments give derivatives, exact to rounding.

>>> import numpy as np
>>> g, H = geometric_sums(np.array([0.0, np.log(2.0)]), 3)
>>> g.tolist(), H.tolist()
([3.0, 1.75], [6.0, 4.25])
>>> cross_sums(np.array([0.0]), 3).products.tolist()
[[14.0]]

Reference: Dvijotham et al., arXiv:2404.16706, Lemmas 5.3 and 5.4.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[Any]
"""An array of doubles, or of complex doubles for a derivative."""


class CrossSums(NamedTuple):
    """``last`` g_K and ``total`` H_K of shape (..., n), and ``products`` F_K of (..., n, n)."""

    last: Numbers
    total: Numbers
    products: Numbers


def geometric_sums(rates: Numbers, count: int) -> tuple[Numbers, Numbers]:
    """Return g_K and H_K at each rate, of the shape of ``rates``; ``count`` K ≥ 1."""
    last, total, _ = _sum_by_doubling(rates, count, None)
    return last, total


def cross_sums(rates: Numbers, count: int) -> CrossSums:
    """Return g_K, H_K and F_K for rates of shape (..., n); ``count`` K ≥ 1."""
    ones = np.ones_like(rates)
    return CrossSums(*_sum_by_doubling(rates, count, outer(ones, ones)))


def _sum_by_doubling(rates: Numbers, count: int, products: Any) -> tuple[Numbers, Numbers, Any]:
    """Return g_K, H_K and, if ``products`` is F_1, F_K."""
    last, total = np.ones_like(rates), np.ones_like(rates)
    power = np.exp(-rates)
    reached = 1
    for bit in bin(count)[3:]:
        if products is not None:
            mixed = outer(last, power * total)
            products = (
                products
                + reached * outer(last, last)
                + mixed
                + np.swapaxes(mixed, -1, -2)
                + outer(power, power) * products
            )
        total = total + reached * last + power * total
        last = last + power * last
        reached *= 2
        power = np.exp(-reached * rates)
        if bit == "1":
            last = last + power
            total = total + last
            if products is not None:
                products = products + outer(last, last)
            reached += 1
            power = np.exp(-reached * rates)
    return last, total, products


def outer(left: Numbers, right: Numbers) -> Numbers:
    """Return left_i · right_j over the last axis, shape (..., n, n)."""
    return np.asarray(left[..., :, None] * right[..., None, :])


def pairs(rates: Numbers) -> Numbers:
    """Return s_i + s_j over the last axis, shape (..., n, n)."""
    return np.asarray(rates[..., :, None] + rates[..., None, :])
