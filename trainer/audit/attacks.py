"""Attacks: one number for each run, larger where the canary seems to have been there.

certified   the likelihood ratio of the certified mechanism, over all blocks and steps
measured    the same with each tensor's noise as runs without the canary really have it: finds
            noise that is too small, or missing
displaced   that of a canary which takes the place of a record that contributes the opposite
summed      the sum of matched filters over all blocks and steps: finds noise that cancels
quietest    the least length of what is orthogonal to the canary, in any step
quiet       the sum of the logarithms of those lengths: finds noise whose scale depends on data

Each is a function of what is observed and of calibration runs alone, so that runs which were
not used to choose an attack are a fair test of it.

Bounds: what a rate of right guesses proves about ε.

(ε, δ)-DP says P(S) ≤ e^ε P'(S) + δ for every set of outcomes and both orders of the two
worlds. Whoever guesses "first world" on S and "second" elsewhere is then right, on average
over the worlds, with a probability of at most

    p = (P(S) + 1 - P'(S)) / 2 ≤ (e^ε + δ) / (e^ε + 1).

With n independent runs, half of them in each world, the number of right guesses is a sum of
Bernoulli variables of mean p, whose upper tail is at most that of Binomial(n, p) (Hoeffding,
1956), so that the bound of Clopper and Pearson on p holds, and with it one on ε. It can only
falsify: nothing follows where it does not.

>>> round(lower_epsilon(180, 200, delta=0.0, alarm=0.05), 3)
1.799
>>> lower_epsilon(100, 200, delta=0.0, alarm=0.05)
0.0

References: W. Hoeffding, Ann. Math. Stat. 27 (1956) 713; Clopper and Pearson,
Biometrika 26 (1934) 404; Kairouz, Oh and Viswanath, arXiv:1311.0776 (the bound on p); Steinke,
Nasr and Jagielski, arXiv:2305.08846.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from scipy.stats import beta

from affidavit.trainer.audit.transcript import Array, Transcripts

Score = Callable[[Transcripts], Array]
"""From R runs to R numbers."""

LEAST_VARIANCE = 1e-6
"""Of a matched filter, so that one without noise does not stop the arithmetic."""


def scores(outside: Transcripts, probability: float) -> dict[str, Score]:
    """All attacks, calibrated on runs without the canary; q < 1 is the sampling probability."""
    measured = _measured(outside)
    baseline = float(outside.filtered.mean())
    return {
        "certified": lambda seen: _likelihood(seen.filtered, seen.joint, probability),
        "measured": lambda seen: measured(seen, probability),
        "displaced": lambda seen: _likelihood(
            seen.filtered - baseline, seen.joint, probability, shift=2.0
        ),
        "summed": lambda seen: seen.filtered.sum(1),
        "quietest": lambda seen: -seen.lengths.min(1),
        "quiet": lambda seen: -np.log(seen.lengths + 1e-12).sum(1),
    }


def _likelihood(values: Array, std: float, probability: float, *, shift: float = 1.0) -> Array:
    """Σ_t log(1 - q + q exp(ℓ_t)), ℓ_t that of a Gaussian moved by ``shift``."""
    moved = (2 * shift * values - shift**2) / (2 * std**2)
    item = np.logaddexp(np.log1p(-probability), np.log(probability) + moved)
    result: Array = item.sum(1)
    return result


def _measured(outside: Transcripts) -> Callable[[Transcripts, float], Array]:
    """The likelihood under the noise that each tensor's matched filter has in ``outside``."""
    variance = outside.matched.var((0, 1)) + LEAST_VARIANCE
    precision = 1 / variance
    std = float(precision.sum() ** -0.5)

    def score(seen: Transcripts, probability: float) -> Array:
        joined = seen.matched @ (precision / precision.sum())
        return _likelihood(joined, std, probability)

    return score


def lower_epsilon(right: int, runs: int, *, delta: float, alarm: float) -> float:
    """The least ε, in nats, at ``delta`` that ``right`` of ``runs`` right guesses leave; 0 if all.

    The true ε is below it with probability at most ``alarm``, for a guess that was chosen
    before the runs were made.
    """
    if right <= runs / 2 + 1:  # below the mean the two tails are not in this order
        return 0.0
    low = float(beta.ppf(alarm, right, runs - right + 1))
    return math.log(max(1.0, (low - delta) / (1 - low)))
