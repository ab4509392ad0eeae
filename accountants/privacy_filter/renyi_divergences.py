"""Upper bounds of Rényi divergences at the orders of a filter.

A filter adds up divergences of releases that are chosen in view of all previous results. So each
bound holds for both directions of the adjacency and for every pair of outputs of the event, for all
previous results.

=========================  ========================================================
leaf                       bound at order α (the least of those listed)
=========================  ========================================================
Gaussian                   α/(2σ²), exact
Laplace                    its closed form, exact
Poisson                    moments of its pair; the binomial sum at whole orders;
                           the Gaussian of a record that is always drawn
without replacement,       moments of the dominating law; the Gaussian of a record
truncated Poisson          that is always drawn (twice the clip norm)
random allocation          the power series of both directions at whole orders;
                           the Gaussian of a known bin
balls in bins, correlated  the Gaussian of the worst bin, if known
repeat and select          Papernot and Steinke, from the bounds of its run
=========================  ========================================================

Between whole orders (α - 1) D_α is convex in α and at most its chord. No mixture costs more than
its worst part (Rényi divergences are quasi-convex), so the Gaussian of a record that is always
drawn is a bound. A divergence without a bound is infinite.

**Moments.** For a law of the privacy loss L = log dP/dQ and λ > 0, E_P[exp(λL)] is bounded over
cells of losses. In a cell from a to b the function x^(-λ) of x = e^(-L) is convex and lies below
its chord, and the P-mean of x over the cell is its Q-mass. So a cell with masses p and q has at
most

    p e^(λa) + (e^(λb) - e^(λa)) (e^(-a) p - q) / (e^(-a) - e^(-b)).

The part above the last cell is a normal integral in closed form, because the loss is at most linear
in z there. Edges are moved outward by their position errors, and masses carry their rounding. A law
that dominates a release (its hockey-stick curve is nowhere lower) also has the larger Rényi
divergences, since they are f-divergences. So its moments bound the release.

>>> from affidavit.accountants.fourier.loss_laws import NormalMixtureLaw
>>> law = NormalMixtureLaw(kind="gaussian", noise_multiplier=2.0)
>>> round(float(log_moments(law, np.array([3.0]))[0]), 4), 3 * 4 / (2 * 2.0**2)
(1.5, 1.5)
>>> from affidavit.plan.events import Gaussian
>>> round(divergences(Gaussian(noise_multiplier=2.0))[ORDERS.index(8.0)], 9)
1.0

References: Mironov, arXiv:1702.07476; Mironov, Talwar and Zhang, arXiv:1908.10530 (whole orders;
the remove direction is the larger); Feldman and Shenfeld, arXiv:2502.08202; Papernot and Steinke,
arXiv:2110.03620; Doroshenko et al., arXiv:2207.04380 (chords, there for the hockey stick); Zhu,
Dong and Wang, arXiv:2106.08567 (dominating pairs).
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
from scipy.special import gammaln, log_ndtr, logsumexp

from affidavit.accountants.composition import parts
from affidavit.accountants.fourier.dominating_pairs import check_range, directions
from affidavit.accountants.fourier.loss_laws import RevealedMixtureLaw, WorseOfBothLaw
from affidavit.accountants.fourier.privacy_loss import UNIT_ROUNDOFF, Array, LossLaw, NormalPair
from affidavit.accountants.fourier.schedules import merge_kinds
from affidavit.accountants.participations import distance_if_drawn
from affidavit.accountants.protocol import OutOfReach, Unsupported
from affidavit.accountants.random_allocation.renyi import ORDERS as WHOLE_ORDERS
from affidavit.accountants.random_allocation.renyi import RenyiAllocationAccountant
from affidavit.plan import events

_MIN_Z, _MAX_Z = -12.5, 37.0
"""Range of z; the mass below has a probability of less than 1e-35."""
_Z_STEP = 0.01
_MIN_CELL_WIDTH = 1e-12
"""Relative distance below which two edges are merged."""


def log_moments(law: LossLaw, exponents: Array) -> Array:
    """Return upper bounds, maybe infinite, of log E_P[exp(λ L)] at each λ > 0 of ``exponents``.

    Both have shape (m,).
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
    """Return the share of each cell's P-mass that the chord puts at its upper end, rounded up."""
    with np.errstate(divide="ignore", invalid="ignore"):
        # (e^-a p - q) / (e^-a - e^-b), divided by p and by e^-a above and below.
        share = (1 - q * (1 - 2 * relative) * np.exp(low) / p) / -np.expm1(low - high)
        slack = 8 * (relative + UNIT_ROUNDOFF) / -np.expm1(low - high)
    return np.clip(np.nan_to_num(share + slack, nan=1.0), 0.0, 1.0)


def _log_moment(
    edges: Array, low: Array, high: Array, p: Array, share: Array, exponent: float
) -> float:
    """Return log of the moment of all losses up to the last edge."""
    peak = exponent * float(max(high[-1], 0.0))
    bottom, top = np.exp(exponent * low - peak), np.exp(exponent * high - peak)
    inside = p[1:-1] * (bottom + share * (top - bottom))
    first = float(p[0]) * math.exp(exponent * float(edges[0] + high[0] - edges[1]) - peak)
    total = float(inside.sum()) + first
    roundings = UNIT_ROUNDOFF * (inside.size + exponent * (abs(float(high[-1])) + 1) * 4 + 64)
    return math.log(total) + peak + roundings if total > 0 else -math.inf


def _log_tail(law: LossLaw, edge: float, exponent: float) -> float:
    """Return log of a bound of the moment of the losses above ``edge``."""
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
    """Return log of a bound above ``edge``, where the loss is at most its ceiling or its line."""
    mu = law.mu
    if edge >= law.max_loss:
        return -math.inf
    with np.errstate(divide="ignore"):
        # Just below a ceiling z may be infinite, so limit it to the end of the grid.
        place = min(float(law.inverse_loss(np.array([edge]))[0]), _MAX_Z + mu) * (1 - 1e-9) - 1e-9
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
    """Return increasing edges of cells that are narrow in z, none at a loss of zero."""
    edges = np.sort(_candidates(law))
    keep = [0]
    for index in range(1, edges.size):
        gap = edges[index] - edges[keep[-1]]
        if gap > _MIN_CELL_WIDTH * (1e-3 + abs(edges[index])):
            keep.append(index)
    return np.asarray(edges[keep])


def _candidates(law: LossLaw) -> Array:
    match law:
        case NormalPair():
            means = [0.0, *(mean for _, mean in law.p_mixture)]
            places = np.arange(
                min(means) + _MIN_Z, max(means) + _MAX_Z, min(_Z_STEP, 0.05 / law.mu)
            )
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
"""The orders of every new filter. A budget keeps the orders with which it started."""
ROUNDING = 1e-12
"""Relative allowance for sums and products."""

_ALPHA = np.array(ORDERS)


def divergences(event: events.Event) -> tuple[float, ...]:
    """Return upper bounds of the Rényi divergence (nats) at each of ``ORDERS``, maybe infinite.

    The empty event has 0 everywhere. Raises ``OutOfReach`` or ``Unsupported`` for an event out of
    the verified range of the bounds.
    """
    total = np.zeros(_ALPHA.size)
    for part, count in merge_kinds(parts(event)):
        total = total + count * _divergences(part)
    if np.isnan(total).any():
        raise OutOfReach("the Rényi orders failed numerically.", "Change the noise or the rate.")
    return tuple(float(item) for item in total * (1 + ROUNDING))


@lru_cache(maxsize=256)
def _divergences(part: events.Leaf | events.RepeatAndSelect) -> Array:
    match part:
        case events.RepeatAndSelect(event=run, mean=mean, shape=shape):
            # Imported here because only selections need the library, which takes a second to load.
            from dp_accounting.rdp import rdp_privacy_accountant as library

            from affidavit.accountants.rdp import quiet

            inner = np.array(divergences(run))
            with quiet():
                result = library._compute_rdp_repeat_and_select(_ALPHA, inner, mean, shape)
            return np.asarray(result, dtype=np.float64) * (1 + 1e-9)
        case events.Laplace(noise_multiplier=scale):
            return _laplace(scale)
        case events.GaussianMixture():
            return _by_laws(part)
    always_drawn = _gaussian(part.noise_multiplier / distance_if_drawn(part))
    match part:
        case events.Gaussian() | events.ReplacedAllocationGaussian() | events.BallsInBinsGaussian():
            return always_drawn
        case events.RandomAllocationGaussian():
            return _least(always_drawn, _allocation(part))
        case events.PoissonSubsampledGaussian(pair="add_remove"):
            return _least(always_drawn, _by_laws(part), _binomial(part))
        case _:
            return _least(always_drawn, _by_laws(part))


def _gaussian(sigma: float) -> Array:
    return np.asarray(_ALPHA / (2 * sigma) / sigma * (1 + 8 * UNIT_ROUNDOFF))


def _laplace(scale: float) -> Array:
    """Return the divergences of Mironov, Proposition 6, at most the pure 1/s."""
    rate = 1 / scale
    first = np.log(_ALPHA / (2 * _ALPHA - 1)) + (_ALPHA - 1) * rate
    second = np.log((_ALPHA - 1) / (2 * _ALPHA - 1)) - _ALPHA * rate
    size = 1 + (_ALPHA + 1) * rate
    result = (np.logaddexp(first, second) + 32 * UNIT_ROUNDOFF * size) / (_ALPHA - 1)
    return np.asarray(np.minimum(result, rate * (1 + 4 * UNIT_ROUNDOFF)))


def _by_laws(
    leaf: events.PoissonSubsampledGaussian
    | events.PoissonSampledGroupGaussian
    | events.GaussianMixture
    | events.WithoutReplacementGaussian
    | events.WithoutReplacementGroupGaussian
    | events.TruncatedPoissonGaussian
    | events.TruncatedPoissonGroupGaussian,
) -> Array:
    """Return the larger of both directions, by the moments of their dominating laws."""
    try:
        check_range(((leaf, 1),))
    except OutOfReach:
        return np.full(_ALPHA.size, np.inf)
    sides = directions(leaf)
    if any(side.conceded > 0 for side in sides):
        return np.full(_ALPHA.size, np.inf)
    result = [log_moments(side.laws[0][0], _ALPHA - 1) for side in sides]
    return np.asarray(np.maximum(np.max(result, axis=0), 0.0) / (_ALPHA - 1))


def _binomial(leaf: events.PoissonSubsampledGaussian) -> Array:
    """Return bounds from log E_Q[(1 - q + q X)^α] at whole α, and chords between them."""
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


def _allocation(leaf: events.RandomAllocationGaussian) -> Array:
    try:
        sides = RenyiAllocationAccountant().curve(leaf).divergences
    except OutOfReach:
        return np.full(_ALPHA.size, np.inf)
    worse = np.max(sides, axis=0)
    return _chords(WHOLE_ORDERS.astype(np.float64), worse * (WHOLE_ORDERS - 1))


def _chords(whole: Array, log_moment: Array) -> Array:
    """Return divergences at ``ORDERS`` from bounds of (α - 1) D_α at ``whole`` orders and 0 at one.

    Orders above the last one have no bound.
    """
    at = np.concatenate(([1.0], whole))
    values = np.concatenate(([0.0], log_moment))
    result = np.interp(_ALPHA, at, values, right=np.inf) * (1 + 8 * UNIT_ROUNDOFF)
    return np.asarray(result / (_ALPHA - 1))


def _least(*bounds: Array) -> Array:
    return np.asarray(np.minimum.reduce(bounds))
