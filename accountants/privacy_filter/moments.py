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

>>> from affidavit.accountants.fourier.losses import NormalMixtureLaw
>>> law = NormalMixtureLaw(kind="gaussian", noise_multiplier=2.0)
>>> round(float(log_moments(law, np.array([3.0]))[0]), 4), 3 * 4 / (2 * 2.0**2)
(1.5, 1.5)

References: Doroshenko et al., arXiv:2207.04380 (chords, there for the hockey stick); Zhu,
Dong and Wang, arXiv:2106.08567 (dominating pairs).
"""

from __future__ import annotations

import math

import numpy as np
from scipy.special import log_ndtr

from affidavit.accountants.fourier.losses import LossLaw, NormalMixtureLaw, WorseOfBothLaw
from affidavit.accountants.fourier.normal_masses import UNIT_ROUNDOFF, Array
from affidavit.accountants.fourier.truncation import RevealedMixtureLaw
from affidavit.accountants.protocol import Unsupported

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
    moved = cells.misplaced
    low = edges[:-1] - moved[1:-1]
    high = edges[1:] + moved[1:-1]
    p = cells.p * (1 + cells.relative)
    share = _share_at_top(low, high, p[1:-1], cells.q[1:-1], cells.relative[1:-1])
    found = [_log_moment(edges, low, high, p, share, exponent) for exponent in exponents]
    with np.errstate(over="ignore"):
        beyond = [_log_tail(law, float(edges[-1]), item) for item in exponents]
    total = np.logaddexp(np.array(found), np.array(beyond))
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
        case NormalMixtureLaw():
            return _log_normal_tail(law, edge, exponent)
        case WorseOfBothLaw():
            return _log_normal_tail(law.remove, edge, exponent)
        case RevealedMixtureLaw():
            first = _log_tail(law.first, edge, exponent) + math.log1p(-law.weight)
            second = _log_tail(law.second, edge, exponent) + math.log(law.weight)
            return float(np.logaddexp(first, second))
        case _:
            raise Unsupported(f"no moments are known of {type(law).__name__}.")


def _log_normal_tail(law: NormalMixtureLaw, edge: float, exponent: float) -> float:
    """Above ``edge`` the loss is at most μz - μ²/2, and under ``replace`` -log(1-q) more."""
    mu, q = law.distance / law.noise_multiplier, law.sampling_probability
    if edge >= law.ceiling:
        return -math.inf
    with np.errstate(divide="ignore"):
        # Just below a ceiling z may come out infinite; it is never taken above the grid's end.
        place = min(float(law.place(np.array([edge]))[0]), _HIGH + mu) * (1 - 1e-9) - 1e-9
    if law.kind == "add":
        return exponent * law.ceiling + float(log_ndtr(-place))
    if not place > mu / 2:
        return math.inf
    more = -math.log1p(-q) if law.kind == "replace" else 0.0
    parts = [(1.0, mu)] if law.kind == "gaussian" else [(1 - q, 0.0), (q, mu)]
    slope = exponent * mu
    terms = [
        math.log(weight)
        + exponent * more
        + slope * mean
        + slope * slope / 2
        - slope * mu / 2
        + float(log_ndtr(mean + slope - place))
        for weight, mean in parts
        if weight > 0
    ]
    found = float(np.logaddexp.reduce(terms))
    return found + 1e-9 * (1 + abs(found))


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
        case NormalMixtureLaw():
            mu = law.distance / law.noise_multiplier
            high = _HIGH + (mu if law.kind != "add" else 0.0)
            losses = law.loss(np.arange(_LOW, high, min(_STEP, 0.05 / mu)))
            inside = (losses != 0.0) & (losses < law.ceiling * (1 - 1e-12))
            return np.asarray(losses[inside])
        case WorseOfBothLaw():
            low, high_part = _candidates(law.add), _candidates(law.remove)
            return np.concatenate((low[low < 0], high_part[high_part > 0]))
        case RevealedMixtureLaw():
            return np.concatenate((_candidates(law.first), _candidates(law.second)))
        case _:
            raise Unsupported(f"no moments are known of {type(law).__name__}.")
