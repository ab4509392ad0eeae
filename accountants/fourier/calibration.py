"""The least noise, or the most steps, that a target allows: one-sided searches.

A search steps by the saddle-point approximation (a millisecond an evaluation, no bound)
and decides by brackets: what it returns has been evaluated, and its *upper* bound meets
the target. ε is close to a power of the noise multiplier, so both kinds of step are
secants in logarithms.

``approximate_epsilon`` and ``approximate_delta`` are the leading term of the saddle-point
expansion: within some per cent of δ where many releases are composed, and anything where
the loss is a few rare jumps. **Neither is a bound.**
"""

from __future__ import annotations

import math
from collections.abc import Callable

from affidavit.accountants.bracket import Bracket
from affidavit.accountants.fourier.accountant import FourierAccountant
from affidavit.accountants.fourier.directions import NOISE_MULTIPLIERS, directions
from affidavit.accountants.fourier.steering import (
    Laws,
    saddle_at_delta,
    saddle_at_epsilon,
)
from affidavit.accountants.protocol import NoSolution, OutOfReach
from affidavit.plan.events import Event

_ACCURACY = 3e-5
"""Relative width of the brackets that decide, a share of the slack of 1e-4."""


def approximate_epsilon(event: Event, delta: float) -> float:
    """ε at ``delta`` by the saddle point. Not a bound."""
    found = directions(event)
    return max(
        (saddle_at_delta(Laws.of(direction), delta).epsilon for direction in found), default=0.0
    )


def approximate_delta(event: Event, epsilon: float) -> float:
    """δ at ``epsilon`` by the saddle point. Not a bound."""
    found = directions(event)
    return max(
        (
            math.exp(min(0.0, saddle_at_epsilon(Laws.of(direction), epsilon)[0].log_delta))
            for direction in found
        ),
        default=0.0,
    )


def calibrate_noise_multiplier(
    make_event: Callable[[float], Event],
    epsilon: float,
    delta: float,
    *,
    low: float = NOISE_MULTIPLIERS[0],
    high: float = NOISE_MULTIPLIERS[1],
    slack: float = 1e-4,
) -> float:
    """A noise multiplier in [``low``, ``high``] that meets (ε, δ), and hardly more.

    The safe side: the accountant's *upper* bound of ε at the value returned is at most
    ``epsilon``. It exceeds the least such value by about ``slack`` of itself at most
    (``low`` itself is returned where that already meets the target). Raises
    ``NoSolution`` if ``high`` does not meet the target.
    """
    accountant = FourierAccountant(relative_width=_ACCURACY)

    def bracket(noise: float) -> Bracket:
        try:
            return accountant.curve(make_event(noise)).epsilon(delta)
        except OutOfReach:
            # Too little noise to be in reach; the target is in reach.
            return Bracket(lower=math.inf, upper=math.inf)

    guess, slope = _approximate_noise(make_event, epsilon, delta, low, high)
    unsafe, safe = low, math.inf
    noise = low if guess <= low else min(high, guess * (1 + 0.3 * slack))
    previous: tuple[float, float] | None = None
    for _ in range(60):
        found = bracket(noise)
        if found.upper <= epsilon:
            safe = noise
            gap = math.log(epsilon / found.lower) if found.lower > 0 else math.inf
            if noise <= low or gap <= slack * slope or safe - unsafe <= slack * unsafe:
                return safe
        else:
            unsafe = max(unsafe, noise)
            if noise >= high:
                raise NoSolution(
                    f"noise multiplier {high:g} does not reach epsilon {epsilon:g}",
                    "lower the sampling probability or the steps, or raise the target",
                )
        middle = found.upper
        if 0 < middle < math.inf:
            point = (math.log(noise), math.log(middle))
            if previous is not None and abs(point[0] - previous[0]) > 0.1 * slack:
                slope = max(0.2, -(point[1] - previous[1]) / (point[0] - previous[0]))
            previous = point
            step = (math.log(middle / epsilon)) / slope + 0.3 * slack
            noise = noise * math.exp(max(-1.0, min(1.0, step)))
        else:
            noise = noise * (2.0 if middle > epsilon else 0.5)
        noise = _inside(noise, unsafe, safe, low, high)
    return safe


def _inside(noise: float, unsafe: float, safe: float, low: float, high: float) -> float:
    """``noise`` kept inside what is still open, by halving when a step leaves it."""
    if math.isinf(safe):
        return min(max(noise, min(unsafe * (1 + 1e-5), high)), high)
    if not unsafe < noise < safe:
        noise = math.sqrt(unsafe * safe)
    return max(low, noise)


def _approximate_noise(
    make_event: Callable[[float], Event], epsilon: float, delta: float, low: float, high: float
) -> tuple[float, float]:
    """Where the approximation meets ``epsilon``, and -d log ε / d log σ there."""
    log_low, log_high = math.log(low), math.log(high)

    def excess(log_noise: float) -> float:
        event = make_event(min(high, max(low, math.exp(log_noise))))
        return approximate_epsilon(event, delta) - epsilon

    at = min(max(0.0, log_low), log_high)
    value = excess(at)
    stride = 0.5
    # Gallop to the side where the sign changes, then regula falsi.
    while True:
        other = min(log_high, max(log_low, at + math.copysign(stride, value)))
        other_value = excess(other)
        if other_value * value <= 0 or other in (log_low, log_high):
            break
        at, value, stride = other, other_value, 2 * stride
    ends = sorted(((at, value), (other, other_value)))
    (a, fa), (b, fb) = ends
    if fa <= 0:
        return math.exp(a), 1.0
    if fb > 0:
        return math.exp(b), 1.0
    for _ in range(40):
        middle = a + (b - a) * min(0.98, max(0.02, fa / (fa - fb)))
        value = excess(middle)
        if abs(value) < 1e-4 * epsilon or b - a < 1e-6:
            break
        if value > 0:
            a, fa, fb = middle, value, fb / 2
        else:
            b, fb, fa = middle, value, fa / 2
    nearby = excess(middle + 0.01)
    slope = math.log((value + epsilon) / max(nearby + epsilon, 1e-3 * epsilon)) / 0.01
    return math.exp(middle), max(0.2, slope)


def calibrate_steps(
    make_event: Callable[[int], Event],
    epsilon: float,
    delta: float,
    *,
    most: int = 10_000_000,
) -> int:
    """The largest number of steps, at most ``most``, whose upper bound meets (ε, δ).

    The safe side: the upper bound of ε at the value returned is at most ``epsilon``, and
    at one step more it is above (or ``most`` is returned). Raises ``NoSolution`` if one
    step is already too many.
    """
    accountant = FourierAccountant(relative_width=_ACCURACY)

    def upper(steps: int) -> float:
        try:
            return accountant.curve(make_event(steps)).epsilon(delta).upper
        except OutOfReach:
            return math.inf

    def excess(steps: int) -> float:
        value = upper(steps)
        return 1.0 if math.isinf(value) else math.log(max(value, 1e-300) / epsilon)

    steps = _approximate_steps(make_event, epsilon, delta, most)
    safe, unsafe = 0, most + 1
    below = above = math.nan
    stride = 1 + steps // 20_000
    while safe == 0 or unsafe == most + 1:
        value = excess(steps)
        if value <= 0:
            safe, below, aim = steps, value, steps + stride
        else:
            unsafe, above, aim = steps, value, steps - stride
        if (safe == most) or (unsafe == 1):
            break
        stride *= 2
        steps = min(max(aim, safe + 1), unsafe - 1)
    while unsafe - safe > 1 and safe > 0:
        share = below / (below - above)
        steps = min(max(safe + round((unsafe - safe) * share), safe + 1), unsafe - 1)
        value = excess(steps)
        if value <= 0:
            safe, below, above = steps, value, above / 2
        else:
            unsafe, above, below = steps, value, below / 2
    if safe == 0:
        raise NoSolution(
            f"one step does not reach epsilon {epsilon:g}", "add noise or raise the target"
        )
    return safe


def _approximate_steps(
    make_event: Callable[[int], Event], epsilon: float, delta: float, most: int
) -> int:
    """The most steps that meet the target by the approximation, at least 1."""
    unsafe = 1
    while unsafe < most and approximate_epsilon(make_event(unsafe), delta) <= epsilon:
        unsafe *= 2
    safe = max(1, unsafe // 2)
    while unsafe - safe > max(1, safe // 5000):
        middle = (unsafe + safe) // 2
        if approximate_epsilon(make_event(middle), delta) <= epsilon:
            safe = middle
        else:
            unsafe = middle
    return min(safe, most)
