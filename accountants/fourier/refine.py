"""One direction of a composition, bracketed to a tolerance.

The bracket is read from two ``ComposedTransform``s, one of upper and one of lower
measures; the steering only decides how narrow it comes out. A bracket that is too wide is
tried again with a smaller step, until it is narrow enough, rounding stops it, or the
grids would grow too long.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from affidavit.accountants.bracket import Bracket
from affidavit.accountants.fourier.lattice import lower_measure, upper_measure
from affidavit.accountants.fourier.saddle import Saddle, at_delta, at_epsilon
from affidavit.accountants.fourier.steering import Laws, Steering, steer
from affidavit.accountants.fourier.transform import ComposedTransform
from affidavit.accountants.protocol import OutOfReach

MOST_POINTS = 1 << 23
"""Longest grid or transform; 64 MiB an array of doubles."""

SMALLEST_WIDTH = 1e-6
"""No bracket of ε is asked to be narrower than this."""

_ENDLESS = 1e6
_ROUNDS = 8


def check_cost(steering: Steering) -> None:
    """Refuse a steering whose arrays would be too long."""
    if steering.points > MOST_POINTS:
        raise OutOfReach(
            f"needs a grid of {steering.points} points, at most {MOST_POINTS}",
            "ask for a wider bracket (relative_width) or use another accountant",
        )


def transforms(
    laws: Laws, steering: Steering, *, lower: bool = True
) -> tuple[ComposedTransform, ComposedTransform]:
    """The transforms of the upper and of the lower measures.

    Without ``lower`` the second is the first, whose lower curve is then no bound: for
    callers that read the upper one only.
    """
    check_cost(steering)
    releases = laws.direction.laws
    uppers = [
        (upper_measure(law, grid), count)
        for (law, count), grid in zip(releases, steering.grids, strict=True)
    ]
    above = ComposedTransform(uppers, steering.window)
    if not lower:
        return above, above
    lowers = [
        (
            lower_measure(
                law, choice.grid, open_left=choice.open_left, open_right=choice.open_right
            ),
            count,
        )
        for law, (_, count), choice in zip(
            laws.direction.attained, releases, steering.lower_grids, strict=True
        )
    ]
    return above, ComposedTransform(lowers, steering.window)


def crossing(
    curve: Callable[[float], float], delta: float, start: float, stride: float, accuracy: float
) -> tuple[float, float]:
    """ε on either side of where a decreasing ``curve`` passes ``delta``, ``accuracy`` apart.

    The curve is above ``delta`` at the first and at most ``delta`` at the second; the
    first is 0 if the curve never is, the second infinite. Gallops from ``start``, then
    regula falsi in log δ with the Illinois weights.
    """

    def excess(epsilon: float) -> float:
        return math.log(max(curve(epsilon), 1e-320)) - math.log(delta)

    low = high = max(0.0, start)
    above = below = excess(low)
    while above <= 0:
        if low == 0.0:
            return 0.0, 0.0
        high, below = low, above
        low, stride = max(0.0, low - stride), 2 * stride
        above = excess(low)
    while below > 0:
        if high > _ENDLESS:
            return low, math.inf
        low, above = high, below
        high, stride = high + stride, 2 * stride
        below = excess(high)
    weight_low, weight_high = above, below
    for _ in range(80):
        if high - low <= accuracy:
            break
        # Aim a little past the root, on alternate sides, so that both ends close in.
        share = weight_low / (weight_low - weight_high)
        middle = low + (high - low) * min(0.95, max(0.05, share))
        value = excess(middle)
        if value > 0:
            low, weight_low, weight_high = middle, value, weight_high / 2
        else:
            high, weight_high, weight_low = middle, value, weight_low / 2
    return low, high


def refinement(ratio: float) -> float:
    """What to multiply the step by when the bracket should be ``ratio`` times as wide."""
    return max(0.2, 0.9 * math.sqrt(ratio))


def located(laws: Laws, delta: float) -> tuple[Saddle, float]:
    """The saddle at ``delta`` with the ε to start from, found by a coarse grid.

    The saddle's own ε can be far off when the loss is a few rare jumps, and the tilt with
    it: then the saddle is found again at the ε of the coarse grid.
    """
    atoms = laws.common(delta)
    saddle = at_delta(atoms, delta)
    epsilon = saddle.epsilon
    for _ in range(4):
        above, _ = transforms(laws, steer(laws, saddle, epsilon, delta, 0.1), lower=False)
        width = 1 / saddle.order
        _, found = crossing(above.upper, delta, epsilon, 0.1 * width, 0.02 * width)
        if not 0 < found < _ENDLESS:
            break
        moved = abs(found - epsilon) / width
        epsilon = found
        if moved < 0.5:
            break
        saddle = at_epsilon(atoms, epsilon)
    return saddle, epsilon


def bracket_epsilon(laws: Laws, delta: float, relative_width: float) -> Bracket:
    """The ε of one direction at ``delta``."""
    saddle, guess = located(laws, delta)
    guess = max(0.0, guess)
    wanted = max(relative_width * guess, SMALLEST_WIDTH)
    step = None
    previous = math.inf
    best = Bracket(lower=0.0, upper=math.inf)
    for _ in range(_ROUNDS):
        steering = steer(laws, saddle, guess, delta, min(0.5, wanted * saddle.order), step)
        if math.isfinite(best.upper) and steering.points > MOST_POINTS:
            break
        above, below = transforms(laws, steering)
        accuracy, stride = 0.01 * wanted, 0.05 / saddle.order
        _, upper = crossing(above.upper, delta, guess, stride, accuracy)
        if math.isinf(upper):
            break
        lower, _ = crossing(below.lower, delta, upper, wanted, accuracy)
        best = Bracket(lower=max(best.lower, lower), upper=min(best.upper, upper))
        guess = best.upper
        wanted = max(relative_width * best.upper, SMALLEST_WIDTH)
        if best.width <= wanted or best.width > 0.8 * previous:
            # As narrow as asked for, or as rounding allows.
            break
        previous = best.width
        step = steering.grids[0].step * refinement(wanted / best.width)
    return best
