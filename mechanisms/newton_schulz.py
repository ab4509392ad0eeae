"""Newton-Schulz orthogonalisation as published for DP-Muon, and its effect on small inputs.

For an m x n matrix M, transposed if m > n, the iteration is

    Y_0 = M / max(1, ‖M‖_F)  (start "paper")   or   M / ‖M‖_F  (start "frobenius"),
    Y_j = p_κ(Y_(j-1) Y_(j-1)ᵀ) Y_(j-1),   p_κ(x) = Σ_(s=0..κ) (2s)!/(4^s (s!)²) (1-x)^s,

so a singular value y becomes y p_κ(y²): p_κ is the Taylor series of x^(-1/2) at 1. The iteration
does *not* reach an orthogonal matrix in a few steps from small singular values, each of which grows
by at most p_κ(0) per step: 1.875 for κ = 2, hence 23.2 in five steps. With the paper's start, a
momentum with ‖M‖_F < 1 is not even normalised.

>>> round(gain(degree=2, steps=5), 1)
23.2

Reference: arXiv:2605.12994v1, Algorithm 1 and appendix C.2.
"""

from __future__ import annotations

import math
from typing import Literal

Start = Literal["paper", "frobenius"]
DEFAULT_DEGREE, DEFAULT_STEPS = 2, 5
"""Published degree κ and number of iterations q."""


def coefficients(degree: int) -> tuple[float, ...]:
    """Return the coefficients of (1-x)^s in p_κ, s = 0..κ.

    >>> coefficients(2)
    (1.0, 0.5, 0.375)
    """
    return tuple(math.comb(2 * s, s) / 4**s for s in range(degree + 1))


def gain(*, degree: int, steps: int) -> float:
    """Return p_κ(0)^q, the total growth of very small singular values."""
    return math.fsum(coefficients(degree)) ** steps


def singular_value(value: float, *, degree: int, steps: int) -> float:
    """Return the result of the iteration for a singular value of Y_0.

    >>> round(singular_value(0.9, degree=2, steps=5), 6)
    1.0
    """
    series = coefficients(degree)
    for _ in range(steps):
        value *= math.fsum(c * (1 - value**2) ** s for s, c in enumerate(series))
    return value


def typical_singular_value(
    norm: float, *, entries: int, degree: int, steps: int, start: Start
) -> float:
    """Estimate the root mean square singular value after the iteration for noise of this ‖·‖_F.

    1 is orthogonal. The block is assumed square, so that ‖Y_0‖_F is shared by the most singular
    values; other shapes with as many entries end closer to orthogonal. Values that spread about
    their mean end up to a seventh lower, because the map is concave.
    """
    if norm <= 0:
        return 0.0
    begin = norm / max(1.0, norm) if start == "paper" else 1.0
    return singular_value(begin * entries**-0.25, degree=degree, steps=steps)
