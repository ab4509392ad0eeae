"""Confirmation: the noise that a target needs, where each evaluation takes seconds.

An accountant that draws gives its bound with confidence, at the price of seconds a bracket,
and its upper end wobbles with the design of the draws. So the search is done on the guess,
and the engine is asked to confirm: a few brackets at scales that should meet the target by a
little, each of which counts towards what the engine's confidence covers.

>>> confirmed_noise(lambda sigma: 4 / sigma, 2.0, guess=lambda sigma: 3.9 / sigma) >= 2.0
True
"""

from __future__ import annotations

import math
from collections.abc import Callable

from affidavit.accountants.calibration import NOISE
from affidavit.accountants.protocol import NoSolution, OutOfReach

WITHIN = 0.01
"""A confirmed ε at most this far below the target, relative to it, is near enough."""
MOST_LOOKS = 8
"""Brackets asked of the engine."""
_AIM = 0.002
"""How far beyond the edge, in log noise, a scale is tried."""
_GUESSES = 40

Epsilon = Callable[[float], float]
"""From a scale of the noise to ε (nats)."""


def confirmed_noise(upper: Epsilon, target: float, *, guess: Epsilon, start: float = 1.0) -> float:
    """A scale of the noise with ``upper(scale) <= target`` (nats), within about ``WITHIN`` of it.

    ``upper`` is called at most ``MOST_LOOKS`` times. Raises ``NoSolution`` where the guess
    meets the target nowhere or everywhere, ``OutOfReach`` where nothing was confirmed.
    """
    at, slope = _crossing(lambda x: _excess(guess(math.exp(x)), target), math.log(start))
    best: float | None = None
    at += _AIM
    for look in range(MOST_LOOKS):
        value = _excess(upper(math.exp(at)), target)
        if value <= 0:
            best = at if best is None else min(best, at)
            if value >= -WITHIN:
                break
        at += value / slope + (_AIM * (look + 1) if value > 0 else _AIM)
        if best is not None and at >= best:
            break
    if best is None:
        raise OutOfReach(
            "no noise was confirmed to meet the target.", "Give the noise, and have it checked."
        )
    return math.exp(best)


def _excess(epsilon: float, target: float) -> float:
    return math.log(max(epsilon, 1e-12) / target)


def _crossing(excess: Epsilon, at: float) -> tuple[float, float]:
    """Where a decreasing function of log noise crosses zero, about, and its slope there."""
    low, high = math.log(NOISE[0]), math.log(NOISE[1])
    below = above = math.nan
    for _ in range(_GUESSES):
        try:
            value = excess(at)
        except OutOfReach:
            value = math.inf
        if value > 0:
            low, above = at, value
        else:
            high, below = at, value
        if abs(value) < 1e-3:
            return at, _slope(excess, at)
        if high - low < 1e-4:
            break
        at = _next(low, above, high, below, at)
    if math.isfinite(above) and math.isfinite(below):
        return at, _slope(excess, at)
    raise NoSolution("no noise in range is found to meet the target.", "Change target.epsilon.")


def _next(low: float, above: float, high: float, below: float, at: float) -> float:
    if math.isnan(above) or math.isnan(below):
        stride = 0.7 if math.isnan(below) else -0.7
        return min(max(at + stride, low), high)
    if math.isinf(above):
        return (low + high) / 2
    share = above / (above - below)
    return low + (high - low) * min(0.95, max(0.05, share))


def _slope(excess: Epsilon, at: float) -> float:
    """-d log ε / d log noise."""
    return min(20.0, max(0.3, (excess(at) - excess(at + 0.02)) / 0.02))
