"""ε of one direction at a given δ, and δ at a given ε, to a width.

A bracket that is too wide is tried again with a smaller step, and one whose crossing lies
far from where the curves were made is tried again from there, a few times.
"""

from __future__ import annotations

import math

from affidavit.accountants.allocation.directions import Curves, Direction
from affidavit.accountants.bracket import Bracket
from affidavit.accountants.fourier.passes import crossing
from affidavit.accountants.fourier.refine import refinement
from affidavit.accountants.protocol import OutOfReach

SMALLEST_WIDTH = 1e-6
"""No bracket of ε is asked to be narrower than this, in nats."""
_ROUNDS = 8


def bracket_epsilon(direction: Direction, delta: float, relative_width: float) -> Bracket:
    """The ε (nats) of one direction at ``delta``, ``relative_width`` of it wide if possible."""
    guess = direction.guess(delta)
    best = Bracket(lower=0.0, upper=math.inf)
    step: float | None = None
    for _ in range(_ROUNDS):
        wanted = max(relative_width * guess, SMALLEST_WIDTH)
        slope = _slope(direction, guess)
        try:
            curves = direction.curves(guess, delta, min(0.3, wanted * slope), step)
        except OutOfReach:
            if math.isinf(best.upper):
                raise
            break
        best = _narrowed(best, curves, delta, guess, 0.05 / slope)
        narrow = best.width <= max(relative_width * best.upper, SMALLEST_WIDTH)
        if narrow and math.isfinite(best.upper):
            break
        high, low = curves.upper(guess), curves.lower(guess)
        gap = math.log(high / low) if low > 0 else math.inf
        step = None
        if gap > 0.8 * wanted * slope:
            step = curves.step * refinement(min(0.8, wanted * slope / gap))
        # The curves are best where they were made: the next ones are made at the crossing.
        middle = math.sqrt(high * low) if low > 0 else high
        # A little beyond, because what lies above the cut is bounded loosely past it.
        moved = guess + math.log(middle / delta) / slope + 0.3 * wanted
        guess = min(max(SMALLEST_WIDTH, moved), direction.largest_epsilon)
    return best


def _narrowed(best: Bracket, curves: Curves, delta: float, guess: float, stride: float) -> Bracket:
    accuracy = max(1e-7 * guess, 1e-9)
    _, upper = crossing(curves.upper, delta, guess, stride, accuracy)
    lower, _ = crossing(curves.lower, delta, min(upper, guess), stride, accuracy)
    return Bracket(lower=max(best.lower, lower), upper=min(best.upper, upper))


def bracket_delta(direction: Direction, epsilon: float, relative_width: float) -> Bracket:
    """The δ of one direction at ``epsilon`` (nats), ``relative_width`` of it wide if possible."""
    best = Bracket(lower=0.0, upper=1.0)
    guess = min(0.5, max(direction.about(epsilon), 1e-280))
    step: float | None = None
    for _ in range(_ROUNDS):
        try:
            curves = direction.curves(epsilon, guess, relative_width, step)
        except OutOfReach:
            if best.upper == 1.0:
                raise
            break
        previous = best.width
        best = Bracket(
            lower=max(best.lower, curves.lower(epsilon)),
            upper=min(best.upper, curves.upper(epsilon)),
        )
        if best.width <= relative_width * best.upper or best.width > 0.8 * previous:
            break
        guess = best.upper
        step = curves.step * refinement(relative_width * best.upper / best.width)
    return best


def ruled_out(direction: Direction, epsilon: float, delta: float) -> bool:
    """Whether a coarse bound proves the direction's δ at ``epsilon`` (nats) below ``delta``."""
    guess = direction.about(epsilon)
    gap = math.log(delta / guess) if guess > 0 else math.inf
    if gap < 1e-3:
        return False
    try:
        curves = direction.curves(epsilon, max(guess, delta * 1e-6), min(0.5, 0.3 * gap))
    except OutOfReach:
        return False
    return curves.upper(epsilon) <= delta


def _slope(direction: Direction, epsilon: float) -> float:
    """-d log δ / dε near ``epsilon``, by a difference."""
    width = 0.01 * max(epsilon, 1e-3)
    here, there = direction.about(epsilon), direction.about(epsilon + width)
    if not 0 < there < here:
        return 1.0 / max(epsilon, 1e-3)
    return math.log(here / there) / width
