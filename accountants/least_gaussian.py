"""The least Gaussian trade-off curve that bounds a run, and how much it gives away.

A run is at most μ-Gaussian, but for a remainder τ, if δ(ε) <= δ_μ(ε) + τ for every ε >= 0, with
δ_μ the curve of one Gaussian mechanism; its trade-off function is then nowhere below that of the
Gaussian by more than τ. From upper bounds of δ at some ε: δ is convex in e^ε, so that it lies below
the chords, and a chord minus the convex δ_μ is concave in e^ε. Its maximum is where the slope of
δ_μ, -Φ(-μ/2 - ε/μ), is that of the chord. Beyond the last ε, τ is at least δ.

The regret is the least κ with f(α + κ) - κ <= f_μ(α) for every α: how far the reported curve is
from the certified one, as a difference of error rates. As conjugates, κ is the largest
(δ_μ(ε) - δ(ε)) / (1 + e^ε), which lower bounds of δ bound from above.

>>> from affidavit.accountants.gaussian import GaussianCurve
>>> from affidavit.accountants.tradeoff import sample_trade_off
>>> curve = GaussianCurve(mu=0.5)
>>> bound = gaussian_bound(sample_trade_off(curve), curve)
>>> round(bound.mu, 2), bound.regret < 2e-3, bound.remainder < 1e-11
(0.5, True, True)

References: Gomez, Kaissis and others, arXiv:2503.10945 (μ and its regret); Dong, Roth and Su,
arXiv:1905.02383.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from scipy.special import ndtri

from affidavit.accountants.gaussian import MAX_MU, MIN_MU, GaussianCurve
from affidavit.accountants.protocol import AccountantError, PrivacyCurve
from affidavit.accountants.tradeoff import ERROR_ROUNDING, MAX_EPSILON, TradeOff

ACCURACY = 1e-6
"""Relative accuracy of μ, which is rounded up."""
MAX_SAMPLES = 32
"""Samples of the curve besides those of the trade-off function, at most."""
_MIN_SPACING = 1e-5
"""Distance in ε below which a further sample would only add rounding to the slopes of chords."""
_HEIGHT_ROUNDING = 2e-14
"""More than rounding adds to the height of a chord above the Gaussian curve."""
_PARTS = 32
"""Parts of an interval between sampled ε in which the regret is bounded."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GaussianBound:
    """δ(ε) <= δ_``mu``(ε) + ``remainder`` at every ε >= 0; ``regret`` is in error rates."""

    mu: float
    remainder: float
    regret: float


def gaussian_bound(trade_off: TradeOff, curve: PrivacyCurve) -> GaussianBound | None:
    """Return the least Gaussian bound of ``curve``, or None if none is shown.

    ``trade_off`` has samples of it from ε = 0 on. The curve is sampled again where its chord is
    what decides about μ.
    """
    bound = None
    for _ in range(MAX_SAMPLES):
        result = _least_mu(trade_off)
        if result is None:
            return bound
        mu, remainder, at = result
        bound = GaussianBound(mu=mu, remainder=remainder, regret=0.0)
        if min(abs(at - epsilon) for epsilon in trade_off.epsilons) < _MIN_SPACING:
            break
        try:
            trade_off = trade_off.refined({at: curve.delta(at)})
        except AccountantError:
            break
    return None if bound is None else replace(bound, regret=_regret(trade_off, bound.mu))


def _least_mu(trade_off: TradeOff) -> tuple[float, float, float] | None:
    """Return the least μ for the chords of ``trade_off``, the remainder, and the ε that decides."""
    count = sum(epsilon <= MAX_EPSILON for epsilon in trade_off.epsilons)
    epsilons = np.array(trade_off.epsilons[:count])
    high = np.array([delta.upper for delta in trade_off.deltas[:count]])
    if count < 2 or epsilons[0] > 0:
        return None
    remainder = float(high.min()) + ERROR_ROUNDING
    ratios = np.exp(epsilons)
    slopes = np.clip(np.diff(high) / np.diff(ratios), -0.5, -1e-300)

    def excess(mu: float) -> tuple[float, float]:
        """Return the largest height of a chord above the Gaussian curve, and its ε."""
        at = np.clip(-mu * (ndtri(-slopes) + mu / 2), epsilons[:-1], epsilons[1:])
        chords = high[:-1] + slopes * (np.exp(at) - ratios[:-1])
        least = [GaussianCurve(mu=mu).delta(epsilon).lower for epsilon in at.tolist()]
        heights = chords - np.array(least)
        worst = int(heights.argmax())
        return float(heights[worst]) + _HEIGHT_ROUNDING, float(at[worst])

    low, mu = MIN_MU, 2 * MIN_MU
    while excess(mu)[0] > remainder:
        low, mu = mu, 2 * mu
        if mu > MAX_MU:
            return None
    while mu - low > ACCURACY * mu:
        middle = (low + mu) / 2
        low, mu = (middle, mu) if excess(middle)[0] > remainder else (low, middle)
    return mu, remainder, excess(low)[1]


def _regret(trade_off: TradeOff, mu: float) -> float:
    curve, epsilons = GaussianCurve(mu=mu), np.array(trade_off.epsilons)
    epsilons = epsilons[epsilons <= MAX_EPSILON]
    grid = np.interp(
        np.arange((epsilons.size - 1) * _PARTS + 1) / _PARTS, np.arange(epsilons.size), epsilons
    )
    above = np.array([curve.delta(epsilon).upper for epsilon in grid.tolist()])
    below = trade_off.least_hockey_stick(np.exp(grid[1:]))
    # Both fall, so that a part is bounded by one at its start and the other at its end.
    inside = (above[:-1] - below) / (1 + np.exp(grid[:-1]))
    return float(max(inside.max(), above[-1], 0.0)) + ERROR_ROUNDING
