"""Closed forms of one release in high precision, sharing no code with the engine.

With μ the distance of the two means in noise standard deviations, the pairs (P, Q) are

* ``remove``: (1-q) N(0) + q N(μ) against N(0), and ``add`` its reverse;
* ``replace``: (1-q) N(0) + q N(μ) against (1-q) N(0) + q N(-μ).

Their likelihood ratios are monotone, so sup_A P(A) - α Q(A) is met on a half-line whose
end solves a quadratic at most.
"""

from __future__ import annotations

from typing import Literal

import mpmath

Side = Literal["remove", "add", "replace"]

DIGITS = 70
"""Enough for δ = 1e-30 as a difference of terms near one, with 40 digits left."""


def gaussian(mu: mpmath.mpf, alpha: mpmath.mpf) -> mpmath.mpf:
    """sup_A N(μ)(A) - α N(0)(A)."""
    cut = mpmath.log(alpha) / mu
    return mpmath.ncdf(mu / 2 - cut) - alpha * mpmath.ncdf(-mu / 2 - cut)


def one_release(side: Side, q: float, mu: mpmath.mpf, epsilon: float) -> mpmath.mpf:
    """δ of one release at ``epsilon``."""
    with mpmath.workdps(DIGITS):
        rate, alpha = mpmath.mpf(q), mpmath.exp(mpmath.mpf(epsilon))
        match side:
            case "remove":
                return _remove(rate, mu, alpha)
            case "add":
                return max(mpmath.mpf(0), 1 - alpha + alpha * _remove(rate, mu, 1 / alpha))
            case "replace":
                return _replace(rate, mu, alpha)


def _remove(q: mpmath.mpf, mu: mpmath.mpf, alpha: mpmath.mpf) -> mpmath.mpf:
    inner = (alpha - 1 + q) / q
    return q * gaussian(mu, inner) if inner > 0 else 1 - alpha


def _replace(q: mpmath.mpf, mu: mpmath.mpf, alpha: mpmath.mpf) -> mpmath.mpf:
    # With y = e^{μz}: (1-q) + q k y = α ((1-q) + q k / y), k = e^{-μ²/2}.
    k, rest = q * mpmath.exp(-mu * mu / 2), (1 - q) * (alpha - 1)
    y = (rest + mpmath.sqrt(rest * rest + 4 * k * k * alpha)) / (2 * k)
    z = mpmath.log(y) / mu
    unsampled = (1 - q) * mpmath.ncdf(-z)
    return unsampled + q * mpmath.ncdf(mu - z) - alpha * (unsampled + q * mpmath.ncdf(-mu - z))


def distance(noise_multiplier: float, clip_norms: int = 1) -> mpmath.mpf:
    """μ of means that lie ``clip_norms`` apart."""
    with mpmath.workdps(DIGITS):
        return clip_norms / mpmath.mpf(noise_multiplier)
