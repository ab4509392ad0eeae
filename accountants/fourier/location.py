"""Where a direction's ε lies, roughly, for the search to begin at; bounds nothing but above."""

from __future__ import annotations

import math

import numpy as np

from affidavit.accountants.fourier.passes import ENDLESS, crossing, steered, transforms
from affidavit.accountants.fourier.saddle import Saddle, at_epsilon
from affidavit.accountants.fourier.steering import Laws, saddle_at_delta


def union_bound(laws: Laws, delta: float) -> float:
    """An upper bound of ε (nats) that needs no transform: 0 where it shows that, else a loose one.

    δ(0) is at most the sum of the releases' total variations; and unless some loss exceeds
    its top, which has probability δ at most in all, the run's is at most their sum.
    """
    releases = laws.direction.laws
    variation = total = 0.0
    steps = sum(count for _, count in releases)
    for law, count in releases:
        at_zero = law.survival(np.zeros(1))
        p, q, relative = (float(x[0]) for x in (at_zero.p, at_zero.q, at_zero.relative))
        variation += count * (p - q + 2 * relative * p) * (1 + 1e-9)
        total += count * max(0.0, law.top(delta / steps * (1 - 1e-6)))
    return 0.0 if variation <= delta else total * (1 + 1e-6)


def located(laws: Laws, delta: float) -> tuple[Saddle, float]:
    """The saddle at ``delta`` with the ε (nats) to start from, found by a coarse grid.

    The saddle's own ε can be far off when the loss is a few rare jumps, and the tilt with
    it: then the saddle is found again at the ε of the coarse grid.
    """
    saddle = saddle_at_delta(laws, delta)
    epsilon = saddle.epsilon
    for _ in range(4):
        above, _ = transforms(
            laws, steered(laws, saddle, epsilon, delta, 0.1, None, None), lower=False
        )
        width = 1 / saddle.order
        _, found = crossing(above.upper, delta, epsilon, 0.1 * width, 0.02 * width)
        if not 0 < found < ENDLESS:
            break
        moved = abs(found - epsilon) / width
        epsilon = found
        if moved < 0.5:
            break
        saddle = at_epsilon(laws.common(delta), epsilon)
    return saddle, epsilon


def located_in_strata(
    laws: Laws, saddle: Saddle, guess: float, delta: float
) -> tuple[float, float]:
    """The ε (nats) to start from and minus the slope of log δ there, by coarse grids in strata."""
    slope = saddle.order
    for _ in range(4):
        steering = steered(laws, saddle, guess, delta, 0.1, slope, None)
        above, _ = transforms(laws, steering, lower=False)
        _, found = crossing(above.upper, delta, guess, 0.1 / slope, 0.02 / slope)
        if not 0 < found < ENDLESS:
            break
        nearby = 0.2 / slope
        here, there = above.upper(found), above.upper(found + nearby)
        moved = abs(found - guess)
        if 0 < there < here:
            slope = min(100 * slope, max(0.01 * slope, math.log(here / there) / nearby))
        guess = found
        if moved * slope < 0.5:
            break
    return guess, slope
