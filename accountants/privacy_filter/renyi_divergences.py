"""Exponential moments of a loss law, bounded from above.

For a law of the privacy loss L = log dP/dQ and λ > 0, E_P[exp(λL)] is bounded by cutting
the line of losses into cells. In a cell between a and b the function x^(-λ) of x = e^(-L) is
convex and lies under its chord, and the P-mean of x over the cell is its Q-mass, which is
known: so a cell with masses p and q gives at most

    p e^(λa) + (e^(λb) - e^(λa)) (e^(-a) p - q) / (e^(-a) - e^(-b)).

What lies above the last cell is a normal integral in closed form, because the loss is at
most linear in z there. Edges are moved outward by what their place may be wrong by, and masses
carry their own rounding.

A law that dominates a release (its hockey-stick curve lies nowhere lower) has the larger Rényi
divergences too, since they are f-divergences; that is why these moments bound a release.

>>> from affidavit.accountants.fourier.privacy_loss import NormalMixtureLaw
>>> law = NormalMixtureLaw(kind="gaussian", noise_multiplier=2.0)
>>> round(float(log_moments(law, np.array([3.0]))[0]), 4), 3 * 4 / (2 * 2.0**2)
(1.5, 1.5)

References: Doroshenko et al., arXiv:2207.04380 (chords, there for the hockey stick); Zhu,
Dong and Wang, arXiv:2106.08567 (dominating pairs).

Rényi divergences of an event at the orders of a filter, bounded from above.

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
from scipy.special import gammaln, log_ndtr, logsumexp

from affidavit.accountants.composition import parts
from affidavit.accountants.fourier.dominating_pairs import check_range, directions
from affidavit.accountants.fourier.loss_laws import RevealedMixtureLaw, WorseOfBothLaw
from affidavit.accountants.fourier.privacy_loss import UNIT_ROUNDOFF, Array, LossLaw, NormalPair
from affidavit.accountants.fourier.schedules import merge_kinds
from affidavit.accountants.protocol import OutOfReach, Unsupported
from affidavit.accountants.random_allocation.renyi import ORDERS as WHOLE_ORDERS
from affidavit.accountants.random_allocation.renyi import RenyiAllocationAccountant
from affidavit.plan import (
    BallsInBinsGaussian,
    Event,
    Gaussian,
    GaussianMixture,
    Laplace,
    Leaf,
    PoissonSampledGroupGaussian,
    PoissonSubsampledGaussian,
    RandomAllocationGaussian,
    RepeatAndSelect,
    ReplacedAllocationGaussian,
    TruncatedPoissonGaussian,
    TruncatedPoissonGroupGaussian,
    WithoutReplacementGaussian,
    WithoutReplacementGroupGaussian,
)

_LOW, _HIGH = -12.5, 37.0
"""z is followed between these; mass below the first weighs less than 1e-35."""
_STEP = 0.01
_NARROWEST = 1e-12
"""Edges nearer to each other than this, relative to their size, are one."""


def log_moments(law: LossLaw, exponents: Array) -> Array:
    """Upper bounds of log E_P[exp(λ L)] at each λ > 0 of ``exponents``; may be infinite.

    ``exponents`` and the bounds have shape (m,).
    """
    edges = _edges(law)
    cells = law.cells(edges)
    moved = cells.edge_error
    low = edges[:-1] - moved[1:-1]
    high = edges[1:] + moved[1:-1]
    p = cells.p * (1 + cells.relative_error)
    share = _share_at_top(low, high, p[1:-1], cells.q[1:-1], cells.relative_error[1:-1])
    result = [_log_moment(edges, low, high, p, share, exponent) for exponent in exponents]
    with np.errstate(over="ignore"):
        beyond = [_log_tail(law, float(edges[-1]), item) for item in exponents]
    total = np.logaddexp(np.array(result), np.array(beyond))
    return np.asarray(total + 64 * UNIT_ROUNDOFF * (1 + np.abs(total)))


def _share_at_top(low: Array, high: Array, p: Array, q: Array, relative: Array) -> Array:
    """How much of each cell's P-mass the chord puts at its upper end, rounded up."""
    with np.errstate(divide="ignore", invalid="ignore"):
        # (e^-a p - q) / (e^-a - e^-b), divided by p and by e^-a above and below.
        share = (1 - q * (1 - 2 * relative) * np.exp(low) / p) / -np.expm1(low - high)
        slack = 8 * (relative + UNIT_ROUNDOFF) / -np.expm1(low - high)
    return np.clip(np.nan_to_num(share + slack, nan=1.0), 0.0, 1.0)


def _log_moment(
    edges: Array, low: Array, high: Array, p: Array, share: Array, exponent: float
) -> float:
    """log of the moment of all losses up to the last edge."""
    peak = exponent * float(max(high[-1], 0.0))
    bottom, top = np.exp(exponent * low - peak), np.exp(exponent * high - peak)
    inside = p[1:-1] * (bottom + share * (top - bottom))
    first = float(p[0]) * math.exp(exponent * float(edges[0] + high[0] - edges[1]) - peak)
    total = float(inside.sum()) + first
    roundings = UNIT_ROUNDOFF * (inside.size + exponent * (abs(float(high[-1])) + 1) * 4 + 64)
    return math.log(total) + peak + roundings if total > 0 else -math.inf


def _log_tail(law: LossLaw, edge: float, exponent: float) -> float:
    """log of a bound of the moment of the losses above ``edge``."""
    match law:
        case NormalPair():
            return _log_normal_tail(law, edge, exponent)
        case WorseOfBothLaw():
            return _log_normal_tail(law.remove, edge, exponent)
        case RevealedMixtureLaw():
            first = _log_tail(law.first, edge, exponent) + math.log1p(-law.weight)
            second = _log_tail(law.second, edge, exponent) + math.log(law.weight)
            return float(np.logaddexp(first, second))
        case _:
            raise Unsupported(f"no moments are known of {type(law).__name__}.")


def _log_normal_tail(law: NormalPair, edge: float, exponent: float) -> float:
    """Above ``edge`` the loss is at most its ceiling, or its line."""
    mu = law.mu
    if edge >= law.max_loss:
        return -math.inf
    with np.errstate(divide="ignore"):
        # Just below a ceiling z may come out infinite; it is never taken above the grid's end.
        place = min(float(law.inverse_loss(np.array([edge]))[0]), _HIGH + mu) * (1 - 1e-9) - 1e-9
    if math.isfinite(law.max_loss):
        slope, height = 0.0, law.max_loss
    elif place > mu / 2:
        slope, height = law.bounding_line
    else:
        return math.inf
    slope *= exponent
    terms = [
        math.log(weight)
        + exponent * height
        + slope * mean
        + slope * slope / 2
        + float(log_ndtr(mean + slope - place))
        for weight, mean in law.p_mixture
        if weight > 0
    ]
    result = float(np.logaddexp.reduce(terms))
    return result + 1e-9 * (1 + abs(result))


def _edges(law: LossLaw) -> Array:
    """Edges of cells that are narrow in z, increasing, none of them at a loss of zero."""
    edges = np.sort(_candidates(law))
    keep = [0]
    for index in range(1, edges.size):
        gap = edges[index] - edges[keep[-1]]
        if gap > _NARROWEST * (1e-3 + abs(edges[index])):
            keep.append(index)
    return np.asarray(edges[keep])


def _candidates(law: LossLaw) -> Array:
    match law:
        case NormalPair():
            means = [0.0, *(mean for _, mean in law.p_mixture)]
            places = np.arange(min(means) + _LOW, max(means) + _HIGH, min(_STEP, 0.05 / law.mu))
            losses = law.loss(places)
            inside = (losses != 0.0) & (losses < law.max_loss * (1 - 1e-12))
            return np.asarray(losses[inside])
        case WorseOfBothLaw():
            low, high_part = _candidates(law.add), _candidates(law.remove)
            return np.concatenate((low[low < 0], high_part[high_part > 0]))
        case RevealedMixtureLaw():
            return np.concatenate((_candidates(law.first), _candidates(law.second)))
        case _:
            raise Unsupported(f"no moments are known of {type(law).__name__}.")


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
    for part, count in merge_kinds(parts(event)):
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
        case GaussianMixture():
            return _by_laws(part)
        case PoissonSampledGroupGaussian(noise_multiplier=sigma, records=records, pair=pair):
            records *= 2 if pair == "replace_one" else 1
            return _least(_gaussian(sigma / records), _by_laws(part))
        case (
            WithoutReplacementGroupGaussian(noise_multiplier=sigma, records=records)
            | TruncatedPoissonGroupGaussian(noise_multiplier=sigma, records=records)
        ):
            return _least(_gaussian(sigma / 2 / records), _by_laws(part))
        case WithoutReplacementGaussian() | TruncatedPoissonGaussian():
            return _least(_gaussian(part.noise_multiplier / 2), _by_laws(part))
        case RandomAllocationGaussian(noise_multiplier=sigma):
            return _least(_gaussian(sigma), _allocation(part))
        case ReplacedAllocationGaussian(noise_multiplier=sigma):
            return _gaussian(sigma / 2)
        case BallsInBinsGaussian(gram=gram, noise_multiplier=sigma):
            longest = math.sqrt(max(row[place] for place, row in enumerate(gram.rows)))
            return _gaussian(sigma / longest)
        case RepeatAndSelect(event=run, mean=mean, shape=shape):
            # The library takes a second to import, which nobody else here need wait for.
            from dp_accounting.rdp import rdp_privacy_accountant as library

            from affidavit.accountants.rdp import quiet

            inner = np.array(divergences(run))
            with quiet():
                result = library._compute_rdp_repeat_and_select(_ALPHA, inner, mean, shape)
            return np.asarray(result, dtype=np.float64) * (1 + 1e-9)
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
    result = (np.logaddexp(first, second) + 32 * UNIT_ROUNDOFF * size) / (_ALPHA - 1)
    return np.asarray(np.minimum(result, rate * (1 + 4 * UNIT_ROUNDOFF)))


def _by_laws(
    leaf: PoissonSubsampledGaussian
    | PoissonSampledGroupGaussian
    | GaussianMixture
    | WithoutReplacementGaussian
    | WithoutReplacementGroupGaussian
    | TruncatedPoissonGaussian
    | TruncatedPoissonGroupGaussian,
) -> Array:
    """The larger of both directions, by the moments of their dominating laws."""
    try:
        check_range(((leaf, 1),))
    except OutOfReach:
        return np.full(_ALPHA.size, np.inf)
    sides = directions(leaf)
    if any(side.conceded > 0 for side in sides):
        return np.full(_ALPHA.size, np.inf)
    result = [log_moments(side.laws[0][0], _ALPHA - 1) for side in sides]
    return np.asarray(np.maximum(np.max(result, axis=0), 0.0) / (_ALPHA - 1))


def _binomial(leaf: PoissonSubsampledGaussian) -> Array:
    """log E_Q[(1 - q + q X)^α] at whole α, and chords between."""
    q, rate = leaf.sampling_probability, 1 / leaf.noise_multiplier
    whole = [int(order) for order in ORDERS if order >= 2 and order.is_integer()]
    result = []
    for order in whole:
        k = np.arange(order + 1)
        terms = gammaln(order + 1) - gammaln(k + 1) - gammaln(order - k + 1)
        terms = terms + (order - k) * math.log1p(-q) + k * math.log(q)
        terms = terms + rate**2 * k * (k - 1) / 2
        size = rate**2 * order**2 / 2 + 4 * float(gammaln(order + 1)) - order * math.log(q)
        slack = UNIT_ROUNDOFF * 64 * (1 + size)
        result.append(max(float(logsumexp(terms)), 0.0) + slack)
    return _chords(np.array(whole, dtype=np.float64), np.array(result))


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
    result = np.interp(_ALPHA, at, values, right=np.inf) * (1 + 8 * UNIT_ROUNDOFF)
    return np.asarray(result / (_ALPHA - 1))


def _least(*bounds: Array) -> Array:
    return np.asarray(np.minimum.reduce(bounds))
