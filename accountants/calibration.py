"""Calibration: search for the least noise, or the most steps, rate or lot, that meets a target.

Every search decides by ``epsilon(delta).upper`` of one engine, so the same engine certifies the
result. If the engine also approximates ε quickly
(``affidavit.accountants.protocol.Approximating``), the guess gives the start and the slope of ε
there, and never decides. ε is close to a power of the noise, of the steps and of the sampling
probability, so all steps are secants in logarithms, with bisection as the fallback.

Targets are ε in nats. A scale of the noise is a noise multiplier, or a factor on given ones.

Guarantees
    * The returned value was itself evaluated and meets the target.
    * Noise and sampling probability: the slack is at most ``SLACK`` of the value. Either a value at
      most ``SLACK`` closer to the edge was evaluated and fails, or ε at the value is so close to
      the target that one would: within a quarter of ``SLACK`` by the slope of ε.
    * Steps and lot sizes: one more was evaluated and fails. An upper bound fluctuates within the
      width of its bracket, so a larger number may meet the target again. None does if its *lower*
      bound exceeds the target.
    * If nothing in range meets the target, ``NoSolution`` is raised, or ``OutOfReach`` if the
      search ended at the limit of the engine.

``find_confirmed_noise`` is for engines that take seconds per evaluation and whose upper bounds
fluctuate with their random draws. It searches with the guess and asks the engine to confirm a few
scales that should meet the target. Each of these brackets counts towards the engine's confidence.

>>> find_min_noise(lambda sigma: 4 / sigma, 2.0) <= 2.0 * (1 + SLACK)
True
>>> find_max_count(lambda steps: 0.01 * steps, 1.0, ceiling=1000)
100
>>> find_confirmed_noise(lambda sigma: 4 / sigma, 2.0, guess=lambda sigma: 3.9 / sigma) >= 2.0
True
"""

from __future__ import annotations

import math
from collections.abc import Callable

from affidavit.accountants.protocol import NoSolution, OutOfReach

SLACK = 1e-4
"""Relative slack of a solved noise multiplier or sampling probability."""
NOISE_RANGE = (1e-6, 1e7)
"""Searched scales of the noise."""
PROBABILITY_RANGE = (1e-9, 1.0)
"""Searched sampling probabilities."""
MAX_STEPS = 100_000_000
"""Searched number of steps."""

Epsilon = Callable[[float], float]
"""Maps the searched quantity to ε (nats): a proved bound, or a guess."""

_MARGIN = 0.1 * SLACK
"""Distance beyond the edge at which a step aims, to end on the safe side of fluctuations."""
_TOLERANCE = 0.25 * SLACK
"""A safe value this close to the edge, by the slope of ε, is returned."""
_LIMIT_TOLERANCE = 0.01
"""Distance, in log noise, from the engine's limit within which no edge is searched."""
_MAX_SECANTS = 5
"""Secant steps on one side of the edge before they grow."""
_MIN_EPSILON = 1e-12
"""A smaller ε (nats) counts as zero."""


def find_min_noise(
    upper: Epsilon, target: float, *, guess: Epsilon | None = None, start: float = 1.0
) -> float:
    """Return the least scale of the noise, within ``SLACK``, with ``upper(scale) <= target``.

    ``upper`` does not increase in the scale. If it raises ``OutOfReach``, the scale does not meet
    the target. ``start`` is the start of the search without a guess.

    Raises ``NoSolution`` if no noise meets the target, or the smallest searched noise does.
    """
    search = _ScaleSearch(upper, target, *NOISE_RANGE)
    result = search.least(*_start(guess, target, start, *NOISE_RANGE))
    if result is None:
        raise NoSolution(
            "no noise meets the target.",
            "Raise target.epsilon, or remove releases that exceed it at any noise.",
        )
    if result == NOISE_RANGE[0]:
        raise NoSolution("the target holds without noise.", "Lower target.epsilon.")
    return result


def find_max_probability(upper: Epsilon, target: float, *, guess: Epsilon | None = None) -> float:
    """Return the largest sampling probability, within ``SLACK``, with ``upper(q) <= target``.

    ``upper`` does not decrease in q. The result is 1 if that meets the target.

    Raises ``NoSolution`` if the smallest searched probability does not meet it.
    """
    lowest, highest = PROBABILITY_RANGE
    span = 1 / highest, 1 / lowest

    def of(function: Epsilon) -> Epsilon:
        """Return the function of 1/q, in which ε decreases as it does in the noise."""
        return lambda inverse: function(min(highest, 1 / inverse))

    search = _ScaleSearch(of(upper), target, *span)
    result = search.least(*_start(None if guess is None else of(guess), target, 100.0, *span))
    if result is None:
        raise NoSolution(
            f"no sampling probability of at least {lowest:g} meets the target.",
            "Add noise, run fewer steps or raise target.epsilon.",
        )
    # A search may end just below the highest probability although that meets the target.
    if result <= span[0] * (1 + SLACK) and search.excess(math.log(span[0])) <= 0:
        return highest
    return min(highest, 1 / result)


def find_max_count(
    upper: Callable[[int], float],
    target: float,
    *,
    ceiling: int,
    guess: Callable[[int], float] | None = None,
    what: str = "step",
) -> int:
    """Return the largest n, at most ``ceiling``, with ``upper(n) <= target < upper(n + 1)``.

    Except for fluctuations, ``upper`` does not decrease in n. Raises ``NoSolution`` if n = 1
    exceeds the target; ``what`` is the singular noun of the counted quantity.
    """
    failures: dict[int, OutOfReach] = {}

    def excess(count: int) -> float:
        try:
            return _excess(upper(count), target)
        except OutOfReach as limit:
            failures[count] = limit
            return math.inf

    fits = _search_count(excess, ceiling, *_start_count(guess, target, ceiling))
    if fits + 1 in failures:
        raise failures[fits + 1]
    if fits == 0:
        raise NoSolution(
            f"one {what} already exceeds the target.", "Add noise or raise target.epsilon."
        )
    return fits


def find_max_steps(
    upper: Callable[[int], float], target: float, *, guess: Callable[[int], float] | None = None
) -> int:
    """Return the most steps, at least one, with ``upper(steps) <= target``.

    Raises ``NoSolution`` if one step exceeds the target, or more than ``MAX_STEPS`` meet it.
    """
    result = find_max_count(upper, target, ceiling=MAX_STEPS, guess=guess)
    if result == MAX_STEPS:
        raise NoSolution(f"more than {MAX_STEPS} steps meet the target.", "Give the steps instead.")
    return result


class _ScaleSearch:
    """Searches over log x for the least x whose ε meets the target."""

    def __init__(self, upper: Epsilon, target: float, lowest: float, highest: float) -> None:
        self.upper, self.target = upper, target
        self.span = lowest, highest
        self.ends = math.log(lowest), math.log(highest)
        self.unreached: dict[float, OutOfReach] = {}

    def _is_beyond(self, low: float, high: float) -> bool:
        """Return whether the engine's limit is above ``low``: that fails, and nothing is met."""
        fails = math.isfinite(low) and low not in self.unreached
        return fails and (math.isinf(high) or high in self.unreached)

    def excess(self, log_scale: float) -> float:
        """Return log(ε / target), or infinity if the engine does not bound ε."""
        try:
            return _excess(self.upper(self.scale(log_scale)), self.target)
        except OutOfReach as limit:
            self.unreached[log_scale] = limit
            return math.inf

    def scale(self, log_scale: float) -> float:
        """Return exp(``log_scale``), with the exact ends of the span."""
        if log_scale <= self.ends[0]:
            return self.span[0]
        return self.span[1] if log_scale >= self.ends[1] else math.exp(log_scale)

    def least(self, at: float, slope: float) -> float | None:
        """Return the least scale that meets the target, or None if the highest does not.

        Raises ``OutOfReach`` if the edge is the limit of the engine. A scale that it does not bound
        counts as too low until a lower scale was bounded and failed.
        """
        low, high = -math.inf, math.inf
        before: tuple[float, float] | None = None
        step, tries = math.inf, 0
        while high - low > (_LIMIT_TOLERANCE if high in self.unreached else _TOLERANCE):
            value = self.excess(at)
            if at in self.unreached and self._is_beyond(low, high):
                high = at
            elif value > 0:
                low = at
                if at >= self.ends[1]:
                    break
            else:
                high = at
                if at <= self.ends[0] or -value <= _TOLERANCE * slope:
                    return self.scale(at)
            slope = _slope(at, value, before, slope)
            before = (at, value) if math.isfinite(value) else before
            following = _next_scale(at, value / slope, low, high, step, tries)
            step, at = following - at, min(max(following, self.ends[0]), self.ends[1])
            tries += 1
        for edge in (high, low):
            if edge in self.unreached:
                raise self.unreached[edge]
        return self.scale(high) if math.isfinite(high) else None


def _next_scale(at: float, off: float, low: float, high: float, last: float, tries: int) -> float:
    """Return the next point in log x: the edge ``off`` away by a secant, or the middle."""
    if not (math.isfinite(low) and math.isfinite(high)):
        # One side is unknown: use a secant, longer after several misses, within limits that grow
        # with each try.
        secant = abs(off + _MARGIN) * 2 ** max(0, tries - _MAX_SECANTS)
        length = min(max(secant, _MARGIN * 2**tries), 0.5 * 2**tries)
        return at + math.copysign(length, off or -1.0)
    margin = min(_MARGIN, (high - low) / 4)
    aim = min(max(at + off + _MARGIN, low + margin), high - margin)
    # Steps must halve; else bisection replaces a bad secant.
    return aim if math.isfinite(off) and abs(aim - at) <= abs(last) / 2 else (low + high) / 2


def _slope(at: float, value: float, before: tuple[float, float] | None, slope: float) -> float:
    """Return -d log ε / d log x by the last two points, or ``slope`` if they are too close."""
    if before is None or not math.isfinite(value) or abs(at - before[0]) < 5 * SLACK:
        return slope
    return min(1e4, max(0.2, (before[1] - value) / (at - before[0])))


def _start(
    guess: Epsilon | None, target: float, start: float, lowest: float, highest: float
) -> tuple[float, float]:
    """Return the start in log x and -d log ε / d log x there, from the guess if there is one."""
    if guess is None:
        return math.log(start), 1.5

    def value(log_scale: float) -> float:
        return _excess(guess(min(max(math.exp(log_scale), lowest), highest)), target)

    result = _root(value, math.log(start), math.log(lowest), math.log(highest))
    if result is None:
        return math.log(start), 1.5
    return result[0] + (_MARGIN if result[0] > math.log(lowest) else 0.0), result[1]


def _search_count(excess: Callable[[int], float], ceiling: int, start: int, slope: float) -> int:
    """Return the largest count with ``excess <= 0`` whose successor fails, or 0."""
    fits, fails = 0, ceiling + 1
    below = above = math.nan
    at, stride = start, 1 + start // 50_000
    while fails - fits > 1:
        value = excess(at)
        if value <= 0:
            fits, below = at, value
        else:
            fails, above = at, value
        if fits and fails <= ceiling:
            at = _interpolate(fits, fails, below, above)
            # Regula falsi that halves the value of the retained end, so that neither end stays.
            below, above = (below, above / 2) if value <= 0 else (below / 2, above)
        elif math.isfinite(value):
            aim = round(at * math.exp(max(-3.0, min(3.0, -value / slope))))
            at = max(at, aim) + stride if value <= 0 else min(at, aim) - stride
            stride *= 2
        else:
            at, stride = (at * 2, stride) if value <= 0 else (at // 2, stride)
        at = min(max(at, fits + 1), fails - 1)
    return fits


def _interpolate(fits: int, fails: int, below: float, above: float) -> int:
    if not math.isfinite(above - below):
        return (fits + fails) // 2
    return fits + round((fails - fits) * below / (below - above))


def _start_count(
    guess: Callable[[int], float] | None, target: float, ceiling: int
) -> tuple[int, float]:
    """Return the start and d log ε / d log n there, from the guess if there is one."""
    if guess is None:
        return 1, 0.5

    def value(log_inverse: float) -> float:
        return _excess(guess(max(1, min(ceiling, round(math.exp(-log_inverse))))), target)

    result = _root(value, -math.log(min(1000, ceiling)), -math.log(ceiling), 0.0)
    if result is None:
        return 1, 0.5
    return max(1, min(ceiling, int(math.exp(-result[0])))), result[1]


def _root(
    value: Callable[[float], float], at: float, lowest: float, highest: float
) -> tuple[float, float] | None:
    """Return the root of a decreasing function of log x and its slope, or None if it fails."""
    try:
        low, above, high, below = _straddle(value, at, lowest, highest)
        middle = high
        if above <= 0 or below > 0:
            return (low, 1.5) if above <= 0 else (high, 1.5)
        previous = 0.0
        while high - low > _MARGIN / 20:
            middle = (low + high) / 2
            if math.isfinite(above - below):
                share = above / (above - below)
                middle = low + (high - low) * min(0.98, max(0.02, share))
            result = value(middle)
            if abs(result) <= _MARGIN / 20:
                break
            # The value of an end that stays twice is halved, so that it does not stay.
            share = 0.5 if result * previous > 0 else 1.0
            if result > 0:
                low, above, below = middle, result, below * share
            else:
                high, below, above = middle, result, above * share
            previous = result
        nearby = (value(middle) - value(middle + 0.01)) / 0.01
        return middle, min(1e4, max(0.2, nearby))
    except (OutOfReach, ArithmeticError):
        return None


def _straddle(
    value: Callable[[float], float], at: float, lowest: float, highest: float
) -> tuple[float, float, float, float]:
    """Return two ordered points with their values, on both sides of zero if it is in range."""
    here, stride, growth = value(at), 0.5, 2.0
    while True:
        other = min(highest, max(lowest, at + (stride if here > 0 else -stride)))
        try:
            there = value(other)
        except OutOfReach:
            if stride < 0.02:
                raise
            stride, growth = stride / 4, 1.0
            continue
        if (there > 0) != (here > 0) or other in (lowest, highest):
            (low, above), (high, below) = sorted(((at, here), (other, there)))
            return low, above, high, below
        at, here, stride = other, there, growth * stride


def _excess(epsilon: float, target: float) -> float:
    """Return log(ε / target), infinity for an unbounded ε, minus infinity for zero."""
    if not math.isfinite(epsilon):
        return math.inf
    return math.log(epsilon / target) if epsilon > _MIN_EPSILON else -math.inf


CONFIRMED_SLACK = 0.01
"""Relative distance of a confirmed ε below the target that is close enough."""
MAX_BRACKETS = 8
"""Brackets computed by the engine."""
_CONFIRMED_MARGIN = 0.002
"""Distance beyond the edge, in log noise, of a tried scale."""
_MAX_GUESSES = 40


def find_confirmed_noise(upper: Epsilon, target: float, *, guess: Epsilon) -> float:
    """Return a scale of the noise with ``upper(scale) <= target`` (nats), within about 1 % of it.

    ``upper`` is called at most ``MAX_BRACKETS`` times. Raises ``NoSolution`` if the guess meets the
    target nowhere or everywhere, and ``OutOfReach`` if nothing was confirmed.
    """
    at, slope = _crossing(lambda x: _log_excess(guess(math.exp(x)), target), 0.0)
    best: float | None = None
    at += _CONFIRMED_MARGIN
    for attempt in range(MAX_BRACKETS):
        value = _log_excess(upper(math.exp(at)), target)
        if value <= 0:
            best = at if best is None else min(best, at)
            if value >= -CONFIRMED_SLACK:
                break
        at += value / slope + (
            _CONFIRMED_MARGIN * (attempt + 1) if value > 0 else _CONFIRMED_MARGIN
        )
        if best is not None and at >= best:
            break
    if best is None:
        raise OutOfReach(
            "no noise could be confirmed to meet the target.", "Give the noise to check it."
        )
    return math.exp(best)


def _log_excess(epsilon: float, target: float) -> float:
    return math.log(max(epsilon, 1e-12) / target)


def _crossing(excess: Epsilon, at: float) -> tuple[float, float]:
    """Return about the root of a decreasing function of log noise, and the slope there."""
    low, high = math.log(NOISE_RANGE[0]), math.log(NOISE_RANGE[1])
    below = above = math.nan
    for _ in range(_MAX_GUESSES):
        try:
            value = excess(at)
        except OutOfReach:
            value = math.inf
        if value > 0:
            low, above = at, value
        else:
            high, below = at, value
        if abs(value) < 1e-3:
            return at, _slope_between(excess, at)
        if high - low < 1e-4:
            break
        at = _next_guess(low, above, high, below, at)
    if math.isfinite(above) and math.isfinite(below):
        return at, _slope_between(excess, at)
    raise NoSolution("no noise in range meets the target.", "Change target.epsilon.")


def _next_guess(low: float, above: float, high: float, below: float, at: float) -> float:
    if math.isnan(above) or math.isnan(below):
        stride = 0.7 if math.isnan(below) else -0.7
        return min(max(at + stride, low), high)
    if math.isinf(above):
        return (low + high) / 2
    share = above / (above - below)
    return low + (high - low) * min(0.95, max(0.05, share))


def _slope_between(excess: Epsilon, at: float) -> float:
    """Return -d log ε / d log noise."""
    return min(20.0, max(0.3, (excess(at) - excess(at + 0.02)) / 0.02))
