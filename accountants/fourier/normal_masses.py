"""The masses of a normal law between given points, each good to a few roundings of itself.

A mass taken as the difference of two distribution functions is good to a rounding of
*those*. A million releases whose losses are all tiny need grids so fine that this would be
the largest error of all, so narrow cells are summed as a series about their centre.

>>> masses, errors = normal_masses(np.array([0.0, 1e-9]), 0.0)
>>> bool(abs(masses[1] / 1e-9 - 0.3989422804014327) < 1e-15)
True
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr

Array = NDArray[np.float64]

UNIT_ROUNDOFF = 2.0**-53
_PIECE = 8192


def normal_masses(z: Array, mean: float) -> tuple[Array, Array]:
    """Masses of N(mean, 1) below, between and above ``z``, and bounds of their absolute errors.

    ``z`` increases, shape (n,) and in standard deviations; both results have shape (n + 1,).

    A cell [c - d, c + d] that is narrow against the density's own scale has

        2 d φ(c) Σ_k He_2k(c) d^2k / (2k+1)!,

    summed to k = 4: the next term is below 3 units of rounding where (1 + |c|) d <= 0.08.
    The half width is that of z itself, so no cell is widened by the rounding of z - mean. A
    wider one is the difference of two tails, taken on the side where they are small. Where
    the argument is rounded the density moves by as many ulp as |z - mean| (|z| + |mean|).
    """
    at = z - mean
    masses, errors = np.empty(z.size + 1), np.empty(z.size + 1)
    masses[:1], errors[:1] = _tails(at[:1], mean)
    masses[-1:], errors[-1:] = _tails(-at[-1:], mean)
    # Piece by piece, so that what is passed over many times stays in the cache.
    for start in range(0, z.size - 1, _PIECE):
        piece = slice(start, min(start + _PIECE, z.size - 1) + 1)
        inside = slice(piece.start + 1, piece.stop)
        masses[inside], errors[inside] = _inner_masses(z[piece], at[piece], mean)
    return masses, UNIT_ROUNDOFF * errors


def _inner_masses(z: Array, at: Array, mean: float) -> tuple[Array, Array]:
    centre, half = (at[:-1] + at[1:]) / 2, np.diff(z) / 2
    x, y = centre * centre, half * half
    distance = np.abs(centre)
    width = (1 + distance) * half
    series = y * (((x - 6) * x + 3) / 120)
    if width.max() > 0.004:
        # Below that the terms left out, at most 15 · 0.004^6 / 5040, are less than u / 8.
        higher = ((((x - 28) * x + 210) * x - 420) * x + 105) / 362880
        series += y * y * ((((x - 15) * x + 45) * x - 15) / 5040 + y * higher)
    series = y * ((x - 1) / 6 + series)
    masses = np.exp(-x / 2) * ((1 + series) * half * math.sqrt(2 / math.pi))
    sizes = distance + (abs(mean) + 1.0)
    errors = (32.0 + 4.0 * sizes * sizes) * masses
    wide = np.flatnonzero(width > 0.08)
    if wide.size:
        mirrored = np.where(centre[wide] > 0, -1.0, 1.0)
        low, low_error = _tails(mirrored * at[wide], mean)
        high, high_error = _tails(mirrored * at[wide + 1], mean)
        masses[wide] = np.abs(high - low)
        errors[wide] = low_error + high_error
    return masses, errors


def _tails(at: Array, mean: float) -> tuple[Array, Array]:
    """Φ at ``at``, and a bound of its error in units of rounding, that of ``at`` included."""
    tails = ndtr(at)
    sizes = np.minimum(np.abs(at), 40.0) + (abs(mean) + 1.0)
    return tails, (16.0 + 4.0 * sizes * sizes) * tails
