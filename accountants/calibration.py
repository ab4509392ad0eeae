"""Calibration: the least noise, or the most steps, rate or lot, whose proved bound meets a target.

Every search decides by ``epsilon(delta).upper`` of one engine alone, so that what it
returns is certified by the engine that searched. Where the engine can also guess ε
quickly (``affidavit.accountants.protocol.Approximating``), the guess says where to look and how
steep ε is there; it never decides. ε is close to a power of the noise, of the steps and
of the sampling probability, so that all steps are secants in logarithms, with bisection
behind them.

Targets are ε in nats. A scale of the noise is a noise multiplier, or what given ones are
multiplied by.

Guarantees
    * The value returned was itself evaluated and meets the target.
    * Noise and sampling probability: the slack is at most ``SLACK`` of the value. Either a
      value at most ``SLACK`` nearer to the edge was evaluated and fails, or ε at the value
      is so near the target that one would: within a quarter of ``SLACK`` by the slope of ε.
    * Steps and lot sizes: one more was evaluated and fails. An upper bound wobbles within
      the width of its bracket, so that a larger number may meet the target again; none does
      whose *lower* bound passes the target.
    * No value comes back when nothing in range meets the target: ``NoSolution`` is raised,
      or ``OutOfReach`` where the search ended at what the engine does not bound.

>>> find_min_noise(lambda sigma: 4 / sigma, 2.0) <= 2.0 * (1 + SLACK)
True
>>> find_max_count(lambda steps: 0.01 * steps, 1.0, ceiling=1000)
100

Confirmation: the noise that a target needs, where each evaluation takes seconds.

An accountant that draws gives its bound with confidence, at the cost of seconds a bracket,
and its upper end wobbles with the design of the draws. So the search is done on the guess,
and the engine is asked to confirm: a few brackets at scales that should meet the target by a
little, each of which counts towards what the engine's confidence covers.

>>> find_confirmed_noise(lambda sigma: 4 / sigma, 2.0, guess=lambda sigma: 3.9 / sigma) >= 2.0
True
"""

from __future__ import annotations

import math
from collections.abc import Callable

from affidavit.accountants.protocol import NoSolution, OutOfReach

SLACK = 1e-4
"""Relative slack of a noise multiplier or a sampling probability that was solved for."""
NOISE = (1e-6, 1e7)
"""Scales of the noise that are searched."""
PROBABILITIES = (1e-9, 1.0)
"""Sampling probabilities that are searched."""
MAX_STEPS = 100_000_000
"""The most steps that are searched."""

Epsilon = Callable[[float], float]
"""From the quantity that is solved for to ε (nats): a proved bound, or a guess."""

_AIM = 0.1 * SLACK
"""How far beyond the edge a step is aimed, so that it ends on the safe side of the wobble."""
_NEAR = 0.25 * SLACK
"""A safe value this near to the edge, by the slope of ε, is returned."""
_WALL = 0.01
"""This near to the noise that an engine cannot bound, by its log, an edge is not looked for."""
_PATIENCE = 5
"""Steps by secants on one side of the edge before they grow."""
_FLOOR = 1e-12
"""An ε below this is as good as none."""


def find_min_noise(
    upper: Epsilon, target: float, *, guess: Epsilon | None = None, start: float = 1.0
) -> float:
    """The least scale of the noise, within ``SLACK``, with ``upper(scale) <= target``.

    ``upper`` does not increase in the scale. Where it raises ``OutOfReach`` the target
    counts as missed. ``start`` is where the search begins if nothing better is known.

    Raises ``NoSolution`` where no noise meets the target, or the least searched does.
    """
    search = _Search(upper, target, *NOISE)
    result = search.least(*_start(guess, target, start, *NOISE))
    if result is None:
        raise NoSolution(
            "no noise meets the target.",
            "Raise target.epsilon, or remove what exceeds it regardless of the noise.",
        )
    if result == NOISE[0]:
        raise NoSolution("the target holds without noise.", "Lower target.epsilon.")
    return result


def find_max_probability(upper: Epsilon, target: float, *, guess: Epsilon | None = None) -> float:
    """The largest sampling probability, within ``SLACK``, with ``upper(q) <= target``.

    ``upper`` does not decrease in q. 1 is returned where it meets the target.

    Raises ``NoSolution`` where not even the smallest probability that is searched meets it.
    """
    lowest, highest = PROBABILITIES
    span = 1 / highest, 1 / lowest

    def of(function: Epsilon) -> Epsilon:
        """The function of 1/q, in which ε falls as it does in the noise."""
        return lambda inverse: function(min(highest, 1 / inverse))

    search = _Search(of(upper), target, *span)
    result = search.least(*_start(None if guess is None else of(guess), target, 100.0, *span))
    if result is None:
        raise NoSolution(
            f"no sampling probability of at least {lowest:g} meets the target.",
            "Add noise, run fewer steps or raise target.epsilon.",
        )
    # A hair below the highest is where a search may end although the highest itself fits.
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
    """The largest n, at most ``ceiling``, with ``upper(n) <= target < upper(n + 1)``.

    ``upper`` does not decrease in n, but for its wobble. Raises ``NoSolution`` if one is
    already too many; ``what`` is one of what is counted.
    """
    failures: dict[int, OutOfReach] = {}

    def excess(count: int) -> float:
        try:
            return _excess(upper(count), target)
        except OutOfReach as limit:
            failures[count] = limit
            return math.inf

    fits = _most(excess, ceiling, *_start_of_count(guess, target, ceiling))
    if fits + 1 in failures:
        raise failures[fits + 1]
    if fits == 0:
        raise NoSolution(
            f"one {what} already passes the target.", "Add noise or raise target.epsilon."
        )
    return fits


def find_max_steps(
    upper: Callable[[int], float], target: float, *, guess: Callable[[int], float] | None = None
) -> int:
    """The most steps with ``upper(steps) <= target``; at least one.

    Raises ``NoSolution`` where one step is too many, or more than ``MAX_STEPS`` fit.
    """
    result = find_max_count(upper, target, ceiling=MAX_STEPS, guess=guess)
    if result == MAX_STEPS:
        raise NoSolution(f"more than {MAX_STEPS} steps fit the target.", "Give the steps instead.")
    return result


# ---- a real scale -------------------------------------------------------------------


class _Search:
    """A search over log x for the least x whose ε meets the target."""

    def __init__(self, upper: Epsilon, target: float, lowest: float, highest: float) -> None:
        self.upper, self.target = upper, target
        self.span = lowest, highest
        self.ends = math.log(lowest), math.log(highest)
        self.unreached: dict[float, OutOfReach] = {}

    def _is_beyond(self, low: float, high: float) -> bool:
        """Whether what cannot be bounded lies above: nothing met the target, and ``low`` is."""
        fails = math.isfinite(low) and low not in self.unreached
        return fails and (math.isinf(high) or high in self.unreached)

    def excess(self, log_scale: float) -> float:
        """log(ε / target), infinite where nothing is bounded."""
        try:
            return _excess(self.upper(self.scale(log_scale)), self.target)
        except OutOfReach as limit:
            self.unreached[log_scale] = limit
            return math.inf

    def scale(self, log_scale: float) -> float:
        """exp, with the ends of the span exactly."""
        if log_scale <= self.ends[0]:
            return self.span[0]
        return self.span[1] if log_scale >= self.ends[1] else math.exp(log_scale)

    def least(self, at: float, slope: float) -> float | None:
        """The least scale; None where the highest fails, the lowest where that meets it.

        Raises ``OutOfReach`` where the edge is that of what the engine bounds. What is not
        bounded counts as too low until something lower was bounded and failed.
        """
        low, high = -math.inf, math.inf
        before: tuple[float, float] | None = None
        step, tries = math.inf, 0
        while high - low > (_WALL if high in self.unreached else _NEAR):
            value = self.excess(at)
            if at in self.unreached and self._is_beyond(low, high):
                high = at
            elif value > 0:
                low = at
                if at >= self.ends[1]:
                    break
            else:
                high = at
                if at <= self.ends[0] or -value <= _NEAR * slope:
                    return self.scale(at)
            slope = _slope(at, value, before, slope)
            before = (at, value) if math.isfinite(value) else before
            following = _next(at, value / slope, low, high, step, tries)
            step, at = following - at, min(max(following, self.ends[0]), self.ends[1])
            tries += 1
        for edge in (high, low):
            if edge in self.unreached:
                raise self.unreached[edge]
        return self.scale(high) if math.isfinite(high) else None


def _next(at: float, off: float, low: float, high: float, last: float, tries: int) -> float:
    """The next point in log x: the edge that a secant sees ``off`` away, or the middle."""
    if not (math.isfinite(low) and math.isfinite(high)):
        # One side is unknown: a secant, longer where it has missed the edge before, but no
        # shorter and no longer than grows with each try.
        secant = abs(off + _AIM) * 2 ** max(0, tries - _PATIENCE)
        length = min(max(secant, _AIM * 2**tries), 0.5 * 2**tries)
        return at + math.copysign(length, off or -1.0)
    margin = min(_AIM, (high - low) / 4)
    aim = min(max(at + off + _AIM, low + margin), high - margin)
    # Steps must halve, so that a secant that is led astray gives way to bisection.
    return aim if math.isfinite(off) and abs(aim - at) <= abs(last) / 2 else (low + high) / 2


def _slope(at: float, value: float, before: tuple[float, float] | None, slope: float) -> float:
    """-d log ε / d log x by the secant through the last two points, where that says much."""
    if before is None or not math.isfinite(value) or abs(at - before[0]) < 5 * SLACK:
        return slope
    return min(1e4, max(0.2, (before[1] - value) / (at - before[0])))


def _start(
    guess: Epsilon | None, target: float, start: float, lowest: float, highest: float
) -> tuple[float, float]:
    """Where to begin, in log x, and -d log ε / d log x there; by the guess if there is one."""
    if guess is None:
        return math.log(start), 1.5

    def value(log_scale: float) -> float:
        return _excess(guess(min(max(math.exp(log_scale), lowest), highest)), target)

    result = _root(value, math.log(start), math.log(lowest), math.log(highest))
    if result is None:
        return math.log(start), 1.5
    return result[0] + (_AIM if result[0] > math.log(lowest) else 0.0), result[1]


# ---- a whole number -----------------------------------------------------------------


def _most(excess: Callable[[int], float], ceiling: int, start: int, slope: float) -> int:
    """The largest count with ``excess <= 0`` whose next fails; 0 where one fails already."""
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
            at = _inside(fits, fails, below, above)
            # Regula falsi that halves the end it keeps, so that neither end stays forever.
            below, above = (below, above / 2) if value <= 0 else (below / 2, above)
        elif math.isfinite(value):
            aim = round(at * math.exp(max(-3.0, min(3.0, -value / slope))))
            at = max(at, aim) + stride if value <= 0 else min(at, aim) - stride
            stride *= 2
        else:
            at, stride = (at * 2, stride) if value <= 0 else (at // 2, stride)
        at = min(max(at, fits + 1), fails - 1)
    return fits


def _inside(fits: int, fails: int, below: float, above: float) -> int:
    if not math.isfinite(above - below):
        return (fits + fails) // 2
    return fits + round((fails - fits) * below / (below - above))


def _start_of_count(
    guess: Callable[[int], float] | None, target: float, ceiling: int
) -> tuple[int, float]:
    """Where to begin, and d log ε / d log n there; by the guess if there is one."""
    if guess is None:
        return 1, 0.5

    def value(log_inverse: float) -> float:
        return _excess(guess(max(1, min(ceiling, round(math.exp(-log_inverse))))), target)

    result = _root(value, -math.log(min(1000, ceiling)), -math.log(ceiling), 0.0)
    if result is None:
        return 1, 0.5
    return max(1, min(ceiling, int(math.exp(-result[0])))), result[1]


# ---- what a guess says --------------------------------------------------------------


def _root(
    value: Callable[[float], float], at: float, lowest: float, highest: float
) -> tuple[float, float] | None:
    """Where a decreasing function of log x crosses zero, and its slope; None if it fails."""
    try:
        low, above, high, below = _straddle(value, at, lowest, highest)
        middle = high
        if above <= 0 or below > 0:
            return (low, 1.5) if above <= 0 else (high, 1.5)
        stayed = 0.0
        while high - low > _AIM / 20:
            middle = (low + high) / 2
            if math.isfinite(above - below):
                share = above / (above - below)
                middle = low + (high - low) * min(0.98, max(0.02, share))
            result = value(middle)
            if abs(result) <= _AIM / 20:
                break
            # The end that stays a second time counts half, so that it does not stay forever.
            share = 0.5 if result * stayed > 0 else 1.0
            if result > 0:
                low, above, below = middle, result, below * share
            else:
                high, below, above = middle, result, above * share
            stayed = result
        nearby = (value(middle) - value(middle + 0.01)) / 0.01
        return middle, min(1e4, max(0.2, nearby))
    except (OutOfReach, ArithmeticError):
        return None


def _straddle(
    value: Callable[[float], float], at: float, lowest: float, highest: float
) -> tuple[float, float, float, float]:
    """Two points in order with their values, on both sides of zero unless that lies outside."""
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
    """log(ε / target); infinite for an unbounded ε, minus infinity for none."""
    if not math.isfinite(epsilon):
        return math.inf
    return math.log(epsilon / target) if epsilon > _FLOOR else -math.inf


WITHIN = 0.01
"""A confirmed ε at most this far below the target, relative to it, is near enough."""
MAX_LOOKS = 8
"""Brackets asked of the engine."""
_BEYOND = 0.002
"""How far beyond the edge, in log noise, a scale is tried."""
_GUESSES = 40


def find_confirmed_noise(upper: Epsilon, target: float, *, guess: Epsilon) -> float:
    """A scale of the noise with ``upper(scale) <= target`` (nats), within about ``WITHIN`` of it.

    ``upper`` is called at most ``MAX_LOOKS`` times. Raises ``NoSolution`` where the guess
    meets the target nowhere or everywhere, ``OutOfReach`` where nothing was confirmed.
    """
    at, slope = _crossing(lambda x: _log_excess(guess(math.exp(x)), target), 0.0)
    best: float | None = None
    at += _BEYOND
    for look in range(MAX_LOOKS):
        value = _log_excess(upper(math.exp(at)), target)
        if value <= 0:
            best = at if best is None else min(best, at)
            if value >= -WITHIN:
                break
        at += value / slope + (_BEYOND * (look + 1) if value > 0 else _BEYOND)
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
            return at, _slope_between(excess, at)
        if high - low < 1e-4:
            break
        at = _next_guess(low, above, high, below, at)
    if math.isfinite(above) and math.isfinite(below):
        return at, _slope_between(excess, at)
    raise NoSolution("no noise in range was found to meet the target.", "Change target.epsilon.")


def _next_guess(low: float, above: float, high: float, below: float, at: float) -> float:
    if math.isnan(above) or math.isnan(below):
        stride = 0.7 if math.isnan(below) else -0.7
        return min(max(at + stride, low), high)
    if math.isinf(above):
        return (low + high) / 2
    share = above / (above - below)
    return low + (high - low) * min(0.95, max(0.05, share))


def _slope_between(excess: Epsilon, at: float) -> float:
    """-d log ε / d log noise."""
    return min(20.0, max(0.3, (excess(at) - excess(at + 0.02)) / 0.02))
