"""Rényi divergences of an event at the orders of a filter, bounded from above.

Whatever a filter adds up must hold for a release that is chosen in view of everything
before it. Each bound here is one: it bounds the divergence, in both directions of the
adjacency, of every pair of outputs that the event stands for, whatever came before.

=========================  ========================================================
leaf                       bound at order α (the least of those given)
=========================  ========================================================
Gaussian                   α/(2σ²), exact
Laplace                    its closed form, exact
Poisson                    moments of its pair; the binomial sum at whole orders;
                           the Gaussian of the whole distance
without replacement,       moments of the dominating law; the Gaussian of twice
truncated Poisson          the clip norm
random allocation          the power series of both directions at whole orders;
                           the Gaussian of a bin that is known
balls in bins, correlated  the Gaussian of the worst bin, if it were known
repeat and select          Papernot and Steinke, from the bounds of its run
=========================  ========================================================

Between whole orders (α - 1) D_α is convex in α and at most its chord. No mixture costs more
than its worst part (Rényi divergences are quasi-convex), so that a Gaussian is always a
bound. A divergence that nothing bounds is infinite.

>>> from affidavit.plan.events import Gaussian
>>> round(divergences(Gaussian(noise_multiplier=2.0))[ORDERS.index(8.0)], 9)
1.0

References: Mironov, arXiv:1702.07476; Mironov, Talwar and Zhang, arXiv:1908.10530 (whole
orders; the remove direction is the larger); Feldman and Shenfeld, arXiv:2502.08202;
Papernot and Steinke, arXiv:2110.03620.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import assert_never

import numpy as np
from scipy.special import gammaln, logsumexp

from affidavit.accountants.allocation.renyi import ORDERS as WHOLE_ORDERS
from affidavit.accountants.allocation.renyi import RenyiAllocationAccountant
from affidavit.accountants.composition import parts
from affidavit.accountants.fourier.directions import check_range, directions
from affidavit.accountants.fourier.normal_masses import UNIT_ROUNDOFF, Array
from affidavit.accountants.privacy_filter.moments import log_moments
from affidavit.accountants.protocol import OutOfReach
from affidavit.plan import (
    BallsInBinsGaussian,
    Event,
    Gaussian,
    Laplace,
    Leaf,
    PoissonSubsampledGaussian,
    RandomAllocationGaussian,
    RepeatAndSelect,
    TruncatedPoissonGaussian,
    WithoutReplacementGaussian,
)

ORDERS: tuple[float, ...] = (
    *(1.0625, 1.125, 1.1875, 1.25, 1.375, 1.5, 1.625, 1.75),
    *(2.0, 2.25, 2.5, 2.75, 3.0, 3.5, 4.0, 4.5, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0, 12.0, 14.0, 16.0),
    *(20.0, 24.0, 28.0, 32.0, 40.0, 48.0, 56.0, 64.0, 80.0, 96.0, 128.0, 160.0, 200.0),
    *(256.0, 384.0, 512.0, 768.0, 1024.0),
)
"""The orders of every filter; a budget keeps those that it began with."""
ROUNDING = 1e-12
"""Relative allowance for what is added and multiplied here."""

_ALPHA = np.array(ORDERS)


def divergences(event: Event) -> tuple[float, ...]:
    """Upper bounds of the Rényi divergence (nats) at each of ``ORDERS``; infinite where none.

    Raises ``OutOfReach`` or ``Unsupported`` for an event outside what the bounds were
    verified for. The empty event has 0 everywhere.
    """
    total = np.zeros(_ALPHA.size)
    for part, count in parts(event):
        total = total + count * _of(part)
    if np.isnan(total).any():
        raise OutOfReach("the Rényi orders failed numerically.", "Change the noise or the rate.")
    return tuple(float(item) for item in total * (1 + ROUNDING))


@lru_cache(maxsize=256)
def _of(part: Leaf | RepeatAndSelect) -> Array:
    match part:
        case Gaussian(noise_multiplier=sigma):
            return _gaussian(sigma)
        case Laplace(noise_multiplier=scale):
            return _laplace(scale)
        case PoissonSubsampledGaussian(noise_multiplier=sigma, pair=pair):
            if pair == "replace_one":
                return _least(_gaussian(sigma / 2), _by_laws(part))
            return _least(_gaussian(sigma), _by_laws(part), _binomial(part))
        case WithoutReplacementGaussian() | TruncatedPoissonGaussian():
            return _least(_gaussian(part.noise_multiplier / 2), _by_laws(part))
        case RandomAllocationGaussian(noise_multiplier=sigma):
            return _least(_gaussian(sigma), _allocation(part))
        case BallsInBinsGaussian(gram=gram, noise_multiplier=sigma):
            longest = math.sqrt(max(row[place] for place, row in enumerate(gram.rows)))
            return _gaussian(sigma / longest)
        case RepeatAndSelect(event=run, mean=mean, shape=shape):
            # The library takes a second to import, which nobody else here need wait for.
            from dp_accounting.rdp import rdp_privacy_accountant as library

            from affidavit.accountants.dp_events import quiet

            inner = np.array(divergences(run))
            with quiet():
                found = library._compute_rdp_repeat_and_select(_ALPHA, inner, mean, shape)
            return np.asarray(found, dtype=np.float64) * (1 + 1e-9)
        case _:
            assert_never(part)


def _gaussian(sigma: float) -> Array:
    return np.asarray(_ALPHA / (2 * sigma) / sigma * (1 + 8 * UNIT_ROUNDOFF))


def _laplace(scale: float) -> Array:
    """Mironov, Proposition 6; never above the pure 1/s."""
    rate = 1 / scale
    first = np.log(_ALPHA / (2 * _ALPHA - 1)) + (_ALPHA - 1) * rate
    second = np.log((_ALPHA - 1) / (2 * _ALPHA - 1)) - _ALPHA * rate
    size = 1 + (_ALPHA + 1) * rate
    found = (np.logaddexp(first, second) + 32 * UNIT_ROUNDOFF * size) / (_ALPHA - 1)
    return np.asarray(np.minimum(found, rate * (1 + 4 * UNIT_ROUNDOFF)))


def _by_laws(
    leaf: PoissonSubsampledGaussian | WithoutReplacementGaussian | TruncatedPoissonGaussian,
) -> Array:
    """The larger of both directions, by the moments of their dominating laws."""
    try:
        check_range(((leaf, 1),))
    except OutOfReach:
        return np.full(_ALPHA.size, np.inf)
    found = [log_moments(side.laws[0][0], _ALPHA - 1) for side in directions(leaf)]
    return np.asarray(np.maximum(np.max(found, axis=0), 0.0) / (_ALPHA - 1))


def _binomial(leaf: PoissonSubsampledGaussian) -> Array:
    """log E_Q[(1 - q + q X)^α] at whole α, and chords between."""
    q, rate = leaf.sampling_probability, 1 / leaf.noise_multiplier
    whole = [int(order) for order in ORDERS if order >= 2 and order.is_integer()]
    found = []
    for order in whole:
        k = np.arange(order + 1)
        terms = gammaln(order + 1) - gammaln(k + 1) - gammaln(order - k + 1)
        terms = terms + (order - k) * math.log1p(-q) + k * math.log(q)
        terms = terms + rate**2 * k * (k - 1) / 2
        size = rate**2 * order**2 / 2 + 4 * float(gammaln(order + 1)) - order * math.log(q)
        slack = UNIT_ROUNDOFF * 64 * (1 + size)
        found.append(max(float(logsumexp(terms)), 0.0) + slack)
    return _chords(np.array(whole, dtype=np.float64), np.array(found))


def _allocation(leaf: RandomAllocationGaussian) -> Array:
    try:
        sides = RenyiAllocationAccountant().curve(leaf).divergences
    except OutOfReach:
        return np.full(_ALPHA.size, np.inf)
    worse = np.max(sides, axis=0)
    return _chords(WHOLE_ORDERS.astype(np.float64), worse * (WHOLE_ORDERS - 1))


def _chords(whole: Array, log_moment: Array) -> Array:
    """Divergences at ``ORDERS`` from bounds of (α - 1) D_α at ``whole`` orders and 0 at one.

    Orders above the last have no bound.
    """
    at = np.concatenate(([1.0], whole))
    values = np.concatenate(([0.0], log_moment))
    found = np.interp(_ALPHA, at, values, right=np.inf) * (1 + 8 * UNIT_ROUNDOFF)
    return np.asarray(found / (_ALPHA - 1))


def _least(*bounds: Array) -> Array:
    return np.asarray(np.minimum.reduce(bounds))
