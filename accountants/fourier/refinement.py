"""Brackets that lie inside one another whatever width is asked for, without passing them all.

An answer to 1e-7 is found by way of wider ones (``RUNGS``), each cut with those before. A
coarse answer is for those who will not wait for the first of these, so the finer ones must
not pass through it, and it is widened instead: both hold the true value, so a bracket no
wider than w reaches no further than w beyond either end of any other. A coarse bracket
that is widened at both ends by what the next rung promises holds every answer that kept
its promise; one that did not keep it, which is rare, is cut with the coarse answers.

Where the laws leave a gap of their own (``Laws.gapped``) no such promise can be kept, and
every answer passes all the rungs above it.

>>> asked = []
>>> def ask(widths):
...     asked.append(list(widths))
...     return Bracket(lower=1.0, upper=1.0 + widths[-1])
>>> nested(ask, 1e-4), asked
(Bracket(lower=1.0, upper=1.0001), [[0.0001]])
>>> coarse = nested(ask, 1e-2)
>>> coarse.lower < 1.0 < 1.004 < coarse.upper, coarse.width < 1e-2
(True, True)

One direction of a composition, bracketed to a tolerance.

The bracket is read from two ``ComposedTransform``s, one of upper and one of lower
measures; the parameters only decides how narrow it comes out. A bracket that is too wide is
tried again with a smaller step, until it is narrow enough, rounding stops it, or the
grids would grow too long. What was found before is kept: a search asked for less and less
width gives brackets each inside the one before.

Where a direction's ε lies, roughly, for the search to begin at; bounds nothing but above.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from affidavit.accountants.bracket import Bracket
from affidavit.accountants.fourier.evaluation import (
    ENDLESS,
    MAX_POINTS,
    Sum,
    crossing,
    transforms,
    with_parameters,
)
from affidavit.accountants.fourier.grid_parameters import (
    GridParameters,
    Laws,
    saddle_at_delta,
    saddle_at_epsilon,
)
from affidavit.accountants.fourier.tilting import Saddle, at_epsilon


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
            laws, with_parameters(laws, saddle, epsilon, delta, 0.1, None, None), lower=False
        )
        width = 1 / saddle.order
        _, result = crossing(above.upper, delta, epsilon, 0.1 * width, 0.02 * width)
        if not 0 < result < ENDLESS:
            break
        moved = abs(result - epsilon) / width
        epsilon = result
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
        parameters = with_parameters(laws, saddle, guess, delta, 0.1, slope, None)
        above, _ = transforms(laws, parameters, lower=False)
        _, result = crossing(above.upper, delta, guess, 0.1 / slope, 0.02 / slope)
        if not 0 < result < ENDLESS:
            break
        nearby = 0.2 / slope
        here, there = above.upper(result), above.upper(result + nearby)
        moved = abs(result - guess)
        if 0 < there < here:
            slope = min(100 * slope, max(0.01 * slope, math.log(here / there) / nearby))
        guess = result
        if moved * slope < 0.5:
            break
    return guess, slope


RUNGS = (1e-4, 3e-5, 1e-5, 3e-6, 1e-6, 3e-7, 1e-7)
"""Relative widths that a bracket passes on its way to the one asked for."""
COARSE = (5e-2, 5e-3, 5e-4)
"""Relative widths of coarser answers, each more than three times the next."""
_MARGIN = 1.1
"""More than the upper ends of two brackets of the same value differ by, relative to either."""

Ask = Callable[[Sequence[float]], Bracket]
"""The bracket found by way of the given relative widths."""


def nested(ask: Ask, relative_width: float, *, least: float = 0.0, gapped: bool = False) -> Bracket:
    """The answer about ``relative_width`` wide, inside all wider ones.

    ``least`` is the absolute width below which none is asked for.
    """
    if gapped:
        return ask(_down_to(relative_width, (*COARSE, *RUNGS)))
    for index, width in enumerate(COARSE):
        if width <= relative_width:
            result = _coarse(ask, index, least)
            if result is not None:
                return result
    best = ask(_down_to(relative_width, RUNGS))
    if best.width > _promise(RUNGS[0], best, least):
        for index in range(len(COARSE)):
            best = best.intersect(_coarse(ask, index, least) or best)
    return best


def _coarse(ask: Ask, index: int, least: float) -> Bracket | None:
    """The answer of a coarse rung, widened; None if it is then wider than the rung."""
    width, following = (*COARSE, RUNGS[0])[index : index + 2]
    result = ask((width - 2 * _MARGIN * following,))
    beyond = _MARGIN * _promise(following, result, least)
    widened = Bracket(lower=max(0.0, result.lower - beyond), upper=result.upper + beyond)
    return widened if widened.width <= _promise(width, result, least) else None


def _promise(width: float, found: Bracket, least: float) -> float:
    return max(width * found.upper, least)


def _down_to(relative_width: float, rungs: Sequence[float]) -> Sequence[float]:
    """The rungs on the way, a head of the same list for every request."""
    enough = next(index for index, width in enumerate(rungs) if width <= relative_width)
    return rungs[: enough + 1]


MIN_WIDTH = 1e-6
"""No bracket of ε is asked to be narrower than this, in nats."""

SAFE_DELTA = 1e-20
"""Down to it a δ is resolved; below it a first lower end of 0 is due to rounding, which no finer
step removes."""

RARE = 0.5
"""Where the saddle promises this much more log δ than there is, one rare loss decides."""

_MIN_DELTA = 1e-280
_MIN_EPSILON = 1e-9
_ROUNDS = 8
_COARSE = 1e-2
"""Width asked for first where the laws leave a gap of their own."""
_CHEAP = 1 << 14
"""With fewer points than these, another step is tried before the gap is blamed on the laws."""


def refinement(ratio: float) -> float:
    """What to multiply the step by for a bracket ``ratio`` times as wide: width goes as step²."""
    return max(0.2, 0.9 * math.sqrt(ratio))


def worthwhile(laws: Laws, bracket: Bracket, finer: float) -> float:
    """The width (nats, or of δ) above which a step multiplied by ``finer`` did not pay.

    Of the gain that it should bring, a fifth is too little to go on. Where there is no lower
    bound yet there may be nothing to see of it, unless the laws leave a gap of their own,
    which no step will close.
    """
    if bracket.lower > 0 or laws.direction.gapped:
        return bracket.width * (1 - (1 - finer * finer) / 5)
    return math.inf


class EpsilonSearch:
    """The ε (nats) of one direction at a δ, refined by request, each bracket in the one before."""

    def __init__(self, laws: Laws, delta: float) -> None:
        self._laws, self._delta = laws, delta
        self._step: float | None = None
        self._settled = self._cheap = False
        self.bracket = Bracket(lower=0.0, upper=union_bound(laws, delta))
        if self.bracket.width <= MIN_WIDTH:
            return
        self._saddle, guess = located(laws, delta)
        self._guess = max(0.0, guess)
        self._slope = self._saddle.order
        promised = self._saddle.log_delta + (self._saddle.epsilon - guess) * self._slope
        self._rare = self._guess > 0 and promised - math.log(delta) > RARE
        if self._rare:
            self._guess, self._slope = located_in_strata(laws, self._saddle, guess, delta)

    def refine(self, relative_width: float) -> Bracket:
        """The bracket at ``relative_width`` of ε, or as narrow as rounding and memory allow."""
        if self._settled or self.bracket.width <= MIN_WIDTH:
            return self.bracket
        requested = max(relative_width * self._guess, MIN_WIDTH)
        previous = math.inf
        for _ in range(_ROUNDS):
            if self.bracket.width <= requested:
                break
            tolerance = requested
            if self._step is not None:
                finer = refinement(requested / self.bracket.width)
                previous = worthwhile(self._laws, self.bracket, finer)
                self._step *= finer
            elif self._laws.direction.gapped:
                tolerance = max(requested, _COARSE * self._guess)
            if not self._once(tolerance):
                break
            if self.bracket.lower == 0 and self._delta < SAFE_DELTA:
                break
            requested = max(relative_width * self.bracket.upper, MIN_WIDTH)
            if self.bracket.width > previous and not self._cheap:
                self._settled = self._laws.direction.gapped
                break
        return self.bracket

    def _steering(self, wanted: float) -> GridParameters:
        slope = self._slope if self._rare else None
        return with_parameters(
            self._laws,
            self._saddle,
            self._guess,
            self._delta,
            wanted * self._slope,
            slope,
            self._step,
        )

    def _once(self, wanted: float) -> bool:
        parameters = self._steering(wanted)
        if self._step is not None and parameters.points > MAX_POINTS:
            return False
        self._step = parameters.step
        self._cheap = self._laws.direction.gapped and parameters.points < _CHEAP
        above, below = transforms(self._laws, parameters)
        accuracy, stride = 0.01 * wanted, 0.05 / self._slope
        _, upper = crossing(above.upper, self._delta, self._guess, stride, accuracy)
        if math.isinf(upper):
            return False
        lower, _ = crossing(below.lower, self._delta, upper, wanted, accuracy)
        self.bracket = self.bracket.intersect(Bracket(lower=lower, upper=upper))
        self._guess = self.bracket.upper
        return True


class DeltaSearch:
    """The δ of one direction at an ε (nats), refined by request, each bracket in the one before."""

    def __init__(self, laws: Laws, epsilon: float) -> None:
        self._laws, self._epsilon = laws, epsilon
        self._saddle, self._guess = saddle_at_epsilon(laws, epsilon)
        self._slope: float | None = None
        self._step: float | None = None
        self._settled = self._cheap = False
        self.bracket = Bracket(lower=0.0, upper=1.0)
        for _ in range(6):
            parameters = with_parameters(
                laws, self._saddle, epsilon, self._guess, 0.1, self._slope, None
            )
            above, _ = transforms(laws, parameters, lower=False)
            result = max(above.upper(epsilon), _MIN_DELTA)
            self.bracket = self.bracket.intersect(Bracket(lower=0.0, upper=min(1.0, result)))
            promised, self._guess = self._guess, min(result, self._guess)
            if math.log(promised / result) < RARE:
                break
            # The saddle promised more than there is: one rare loss decides, or rarer ones
            # than were cut off have drawn the tilt.
            if epsilon > _MIN_EPSILON:
                self._slope = self._slope_at(above, result)

    def _may_split(self) -> bool:
        return self._slope is None and self._epsilon > _MIN_EPSILON

    def _slope_at(self, above: Sum, found: float) -> float:
        order = self._saddle.order
        nearby = 0.2 / order
        there = above.upper(self._epsilon + nearby)
        if not 0 < there < found:
            return order
        return min(100 * order, max(0.01 * order, math.log(found / there) / nearby))

    def refine(self, relative_width: float) -> Bracket:
        """The bracket at ``relative_width`` of δ, or as narrow as rounding and memory allow."""
        previous = math.inf
        for _ in range(0 if self._settled else _ROUNDS):
            ratio = relative_width * self.bracket.upper / max(self.bracket.width, _MIN_DELTA)
            if ratio >= 1:
                break
            tolerance = relative_width
            if self._step is not None:
                finer = refinement(ratio)
                previous = worthwhile(self._laws, self.bracket, finer)
                self._step *= finer
            elif self._laws.direction.gapped:
                tolerance = max(relative_width, _COARSE)
            if not self._once(tolerance):
                break
            if self.bracket.lower < 0.5 * self.bracket.upper and self._may_split():
                self._slope, self._step = self._saddle.order, None
                continue
            if self.bracket.width > previous and not self._cheap:
                self._settled = self._laws.direction.gapped
                break
        return self.bracket

    def _once(self, tolerance: float) -> bool:
        parameters = with_parameters(
            self._laws, self._saddle, self._epsilon, self._guess, tolerance, self._slope, self._step
        )
        if self._step is not None and parameters.points > MAX_POINTS:
            return False
        self._step = parameters.step
        self._cheap = self._laws.direction.gapped and parameters.points < _CHEAP
        above, below = transforms(self._laws, parameters)
        result = Bracket(lower=below.lower(self._epsilon), upper=above.upper(self._epsilon))
        self.bracket = self.bracket.intersect(result)
        self._guess = max(self.bracket.upper, _MIN_DELTA)
        return True
