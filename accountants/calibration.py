"""Calibration: the least noise, or the most steps, whose proved bound meets a target.

Both searches use only ``epsilon(delta).upper``, so that what they return is certified by
the same engine that searched: the noise multiplier is rounded to the safe side with a
slack of at most ``SLACK`` of itself, and one more step than the number of steps returned
would pass the target.

Guarantees
    * The value returned was itself evaluated and meets the target.
    * No float comes back when nothing in range does: ``NoSolution`` is raised.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from affidavit.accountants.protocol import NoSolution, OutOfReach

SLACK = 2e-5
SMALLEST, LARGEST = 1e-6, 1e7
MOST_STEPS = 100_000_000

UpperEpsilon = Callable[[float], float]


def least_noise(upper_epsilon: UpperEpsilon, target: float, guess: float = 1.0) -> float:
    """The least x, within ``SLACK``, with ``upper_epsilon(x) <= target``.

    ``upper_epsilon`` maps a scale of the noise to a proved bound on ε and does not
    increase in it. Where it raises ``OutOfReach`` the scale counts as too low; when the search
    ends at such a scale, the least one is not known and ``OutOfReach`` is raised.
    """
    unreached: dict[float, OutOfReach] = {}

    def excess(scale: float) -> float:
        """log(ε / target), infinite where nothing is bounded."""
        try:
            epsilon = upper_epsilon(scale)
        except OutOfReach as limit:
            if scale > LARGEST:
                raise
            unreached[scale] = limit
            return math.inf
        return math.log(max(epsilon, 1e-12) / target) if math.isfinite(epsilon) else math.inf

    low, high = _bracket(excess, guess)
    above, below = excess(low), excess(high)
    while high / low - 1 > SLACK:
        middle = _between(math.log(low), above, math.log(high), below)
        value = excess(middle)
        # Having met the target (or missed it) by a hair, look just beyond on the other side.
        if value <= 0:
            high, below = middle, value
            near = max(low, high * (1 - SLACK / 2))
        else:
            low, above = middle, value
            near = min(high, low * (1 + SLACK / 2))
        if low < near < high and abs(value) < 10 * SLACK:
            value = excess(near)
            if value <= 0:
                high, below = near, value
            else:
                low, above = near, value
    if low in unreached:
        raise unreached[low]
    return high


def most_steps(upper_epsilon: Callable[[int], float], target: float) -> int:
    """The largest whole T with ``upper_epsilon(T) <= target``; at least one."""
    if upper_epsilon(1) > target:
        raise NoSolution("one step already passes the target.", "Add noise.")
    low, high = 1, 2
    while upper_epsilon(high) <= target:
        low, high = high, 2 * high
        if high > MOST_STEPS:
            raise NoSolution(
                f"more than {MOST_STEPS} steps fit the target.", "Give the steps instead."
            )
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if upper_epsilon(middle) <= target else (low, middle)
    return low


def _bracket(excess: Callable[[float], float], guess: float) -> tuple[float, float]:
    """A scale that fails the target and one that meets it."""
    if excess(guess) <= 0:
        high, low = guess, guess / 2
        while excess(low) <= 0:
            high, low = low, low / 2
            if low < SMALLEST:
                raise NoSolution("the target holds without noise.", "Lower target.epsilon.")
        return low, high
    low, high = guess, guess * 2
    while excess(high) > 0:
        if high > LARGEST:
            raise NoSolution("no noise meets the target.", "Raise target.epsilon.")
        low, high = high, high * 2
    return low, high


def _between(log_low: float, above: float, log_high: float, below: float) -> float:
    """A point inside the bracket: by secant where that is safe, else the middle."""
    middle = (log_low + log_high) / 2
    if math.isfinite(above) and above > below:
        secant = log_low + (log_high - log_low) * above / (above - below)
        margin = 0.02 * (log_high - log_low)
        middle = min(max(secant, log_low + margin), log_high - margin)
    return math.exp(middle)
