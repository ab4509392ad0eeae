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
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

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
    each = np.logaddexp(np.log1p(-probability), np.log(probability) + moved)
    found: Array = each.sum(1)
    return found


def _measured(outside: Transcripts) -> Callable[[Transcripts, float], Array]:
    """The likelihood under the noise that each tensor's matched filter has in ``outside``."""
    variance = outside.matched.var((0, 1)) + LEAST_VARIANCE
    precision = 1 / variance
    std = float(precision.sum() ** -0.5)

    def score(seen: Transcripts, probability: float) -> Array:
        joined = seen.matched @ (precision / precision.sum())
        return _likelihood(joined, std, probability)

    return score
