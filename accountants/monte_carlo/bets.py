"""Bets: confidence bounds for the mean of bounded draws, by one fixed bet.

X_1..X_n are independent with X ≥ 0 and mean μ. For any bet 0 ≤ λ ≤ 1/(1-μ) that does not
depend on them, and X ≤ 1,

    Π (1 + λ (μ - X_i))   is non-negative with mean 1,

so that by Markov's inequality it reaches 1/β with probability at most β: a mean μ for which
it does is rejected. In the same way Π (1 + λ (X_i - μ)), 0 ≤ λ < 1/μ, rejects means from
below and needs no upper bound on X. A bet near √(2 log(1/β) / (n E X²)) makes the interval as
narrow as Bernstein's inequality with the variance known.

Both capitals move one way in every X and in μ. The integrand does not increase in ε, so
that "δ(ε) ≤ δ is not rejected" can fail for a whole search over ε only by failing at its
one true crossing: no union over ε is needed.

References: Waudby-Smith and Ramdas, arXiv:2010.09686, section 4 (betting; here the bet is
fixed beforehand); Maurer and Pontil, arXiv:0907.3740, for the rate.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from affidavit.accountants.monte_carlo.pair import Array

LARGEST_BET = 0.9
"""Bets nearer to ruin than this gain nothing."""


def log_capital_above(values: Array, draws: int, mean: float, bet: float) -> float:
    """log Π (1 + λ(μ - X)): large where ``mean`` is too high to be true; -inf for a μ ≤ 0.

    ``values`` are the positive ones among ``draws``, each at most 1; ``bet`` λ ≤ 0.9.

    ``values`` have shape (n,).
    """
    if mean <= 0:
        return -math.inf
    base = math.log1p(bet * mean)
    return draws * base + float(np.sum(np.log1p(-bet / (1 + bet * mean) * values)))


def log_capital_below(values: Array, draws: int, mean: float, bet: float) -> float:
    """log Π (1 + λ(X - μ)): large where ``mean`` is too low; -inf where the bet is ruinous.

    ``values`` have shape (n,).
    """
    if bet * mean >= LARGEST_BET:
        return -math.inf
    base = math.log1p(-bet * mean)
    return draws * base + float(np.sum(np.log1p(bet / (1 - bet * mean) * values)))


def best_bet(second_moment: float, draws: int, log_failure: float) -> float:
    """The bet that suits draws of this E X², for ``log_failure`` = log(1/β)."""
    if second_moment <= 0:
        return LARGEST_BET
    return min(LARGEST_BET, math.sqrt(2 * log_failure / (draws * second_moment)))


def first_true(holds: Callable[[float], bool], low: float, high: float, fineness: float) -> float:
    """A point at most ``fineness`` above the first at which the monotone ``holds`` is true.

    It was evaluated there, except that ``high`` is taken for granted.
    """
    if holds(low):
        return low
    while high - low > fineness:
        middle = (low + high) / 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def last_true(holds: Callable[[float], bool], low: float, high: float, fineness: float) -> float:
    """A point at most ``fineness`` below the last at which the monotone ``holds`` is true.

    It was evaluated there, except that ``low`` is taken for granted.
    """
    while high - low > fineness:
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
