"""Brackets of one direction, narrowed to a tolerance, each inside every wider one.

A bracket is read from two ``StrataCurve``s, one of upper and one of lower measures. The grids only
decide how narrow it is. A bracket that is too wide is computed again with a smaller step, until it
is narrow enough, rounding prevents it, or the grids would be too long. Earlier brackets are kept: a
search for narrower and narrower brackets returns each inside the one before.

``nested`` makes brackets lie inside one another without computing all widths. An answer to 1e-7 is
found by way of wider ones (``WIDTHS``), each intersected with those before. A coarse answer should
be quick, so the finer ones do not compute it first, and it is widened instead: both hold the true
value, so a bracket no wider than w reaches no further than w beyond either end of any other. A
coarse bracket that is widened at both ends by the next width holds every answer of that width. An
answer that is wider than requested, which is rare, is intersected with the coarse answers.

If the laws leave a gap (``Direction.has_gap``), brackets stay wider than requested, and every
answer passes all the widths above it.

>>> asked = []
>>> def ask(widths):
...     asked.append(list(widths))
...     return Bracket(lower=1.0, upper=1.0 + widths[-1])
>>> nested(ask, 1e-4), asked
(Bracket(lower=1.0, upper=1.0001), [[0.0001]])
>>> coarse = nested(ask, 1e-2)
>>> coarse.lower < 1.0 < 1.004 < coarse.upper, coarse.width < 1e-2
(True, True)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from affidavit.accountants.bracket import Bracket
from affidavit.accountants.fourier.evaluation import (
    MAX_POINTS,
    MAX_SEARCH_EPSILON,
    StrataCurve,
    bounding_curves,
    choose_parameters,
    crossing,
)
from affidavit.accountants.fourier.grid_parameters import Laws, saddle_at_delta, saddle_at_epsilon
from affidavit.accountants.fourier.tilting import Saddle, at_epsilon

WIDTHS = (1e-4, 3e-5, 1e-5, 3e-6, 1e-6, 3e-7, 1e-7)
"""Relative widths that a bracket passes on its way to the requested one."""
COARSE_WIDTHS = (5e-2, 5e-3, 5e-4)
"""Relative widths of coarser answers, each more than three times the next."""
_WIDTH_MARGIN = 1.1
"""Bounds the ratio of the upper ends of two brackets of the same value."""
MIN_WIDTH = 1e-6
"""No bracket of ε is requested to be narrower than this, in nats."""
MIN_RESOLVED_DELTA = 1e-20
"""Least δ that is resolved. Below it a first lower end of 0 is due to rounding, which no finer step
removes."""
_RARE_LOG_EXCESS = 0.5
"""Excess of the saddle's log δ over the computed one from which on one rare loss decides."""
_MIN_DELTA = 1e-280
_MIN_EPSILON = 1e-9
_MAX_ROUNDS = 8
_FIRST_GAP_WIDTH = 1e-2
"""Relative width that is requested first where the laws leave a gap."""
_CHEAP_POINTS = 1 << 14
"""Points up to which another step is tried before the gap counts as that of the laws."""

Ask = Callable[[Sequence[float]], Bracket]
"""Returns the bracket found by way of the given relative widths."""


def union_bound(laws: Laws, delta: float) -> float:
    """Return an upper bound of ε (nats) without a transform: 0 if it shows that, else a loose one.

    δ(0) is at most the sum of the releases' total variations. And unless some loss exceeds its
    quantile, which has probability δ at most in all, the run's loss is at most the sum of these.
    """
    releases = laws.direction.laws
    variation = total = 0.0
    steps = sum(count for _, count in releases)
    for law, count in releases:
        cells = law.cells(np.array([-1.0, 0.0, 1.0]))
        gain = cells.p - cells.q + cells.relative_error * (cells.p + cells.q)
        variation += count * float(gain[2:].sum()) * (1 + 1e-9)
        total += count * max(0.0, law.upper_quantile(delta / steps * (1 - 1e-6)))
    return 0.0 if variation <= delta else total * (1 + 1e-6)


def locate(laws: Laws, delta: float) -> tuple[Saddle, float]:
    """Return the saddle at ``delta`` and the ε (nats) to start from, found by a coarse grid.

    The saddle's own ε, and its tilt, can be far off if the loss is a few rare jumps. Then the
    saddle is computed again at the ε of the coarse grid.
    """
    saddle = saddle_at_delta(laws, delta)
    epsilon = saddle.epsilon
    for _ in range(4):
        parameters = choose_parameters(laws, saddle, epsilon, delta, 0.1, None, None)
        above, _ = bounding_curves(laws, parameters, lower=False)
        width = 1 / saddle.order
        _, result = crossing(above.upper, delta, epsilon, 0.1 * width, 0.02 * width)
        if not 0 < result < MAX_SEARCH_EPSILON:
            break
        moved = abs(result - epsilon) / width
        epsilon = result
        if moved < 0.5:
            break
        saddle = at_epsilon(laws.common(delta), epsilon)
    return saddle, epsilon


def locate_in_strata(laws: Laws, saddle: Saddle, guess: float, delta: float) -> tuple[float, float]:
    """Return the ε (nats) to start from and minus the slope of log δ there, by grids in strata."""
    slope = saddle.order
    for _ in range(4):
        parameters = choose_parameters(laws, saddle, guess, delta, 0.1, slope, None)
        above, _ = bounding_curves(laws, parameters, lower=False)
        _, result = crossing(above.upper, delta, guess, 0.1 / slope, 0.02 / slope)
        if not 0 < result < MAX_SEARCH_EPSILON:
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


def nested(
    ask: Ask, relative_width: float, *, min_width: float = 0.0, has_gap: bool = False
) -> Bracket:
    """Return the answer about ``relative_width`` wide, inside all wider ones.

    ``min_width`` is the least absolute width that is requested.
    """
    if has_gap:
        return ask(_widths_down_to(relative_width, (*COARSE_WIDTHS, *WIDTHS)))
    for index, width in enumerate(COARSE_WIDTHS):
        if width <= relative_width:
            result = _coarse_bracket(ask, index, min_width)
            if result is not None:
                return result
    best = ask(_widths_down_to(relative_width, WIDTHS))
    if best.width > max(WIDTHS[0] * best.upper, min_width):
        for index in range(len(COARSE_WIDTHS)):
            best = best.intersect(_coarse_bracket(ask, index, min_width) or best)
    return best


def _coarse_bracket(ask: Ask, index: int, min_width: float) -> Bracket | None:
    """Return the widened answer of a coarse width; None if it is then wider than that."""
    width, following = (*COARSE_WIDTHS, WIDTHS[0])[index : index + 2]
    result = ask((width - 2 * _WIDTH_MARGIN * following,))
    beyond = _WIDTH_MARGIN * max(following * result.upper, min_width)
    widened = Bracket(lower=max(0.0, result.lower - beyond), upper=result.upper + beyond)
    return widened if widened.width <= max(width * result.upper, min_width) else None


def _widths_down_to(relative_width: float, widths: Sequence[float]) -> Sequence[float]:
    """Return the widths on the way, a prefix of the same list for every request."""
    enough = next(index for index, width in enumerate(widths) if width <= relative_width)
    return widths[: enough + 1]


def step_factor(ratio: float) -> float:
    """Return the factor of the step for a bracket ``ratio`` times as wide, which goes as step²."""
    return max(0.2, 0.9 * math.sqrt(ratio))


class _Search:
    """A bracket of one direction that smaller steps narrow, each inside the one before."""

    bracket: Bracket

    def __init__(self, laws: Laws) -> None:
        self._laws = laws
        self._step: float | None = None
        self._is_settled = self._is_cheap = False

    @property
    def _has_gap(self) -> bool:
        return self._laws.direction.has_gap

    def _reduce_step(self, ratio: float) -> float:
        """Reduce the step for a bracket ``ratio`` times as wide; return the width to get below.

        Less than a fifth of the expected gain does not justify another step. Without a lower bound
        the gain may not show yet, unless the laws leave a gap, which no step closes.
        """
        factor = step_factor(ratio)
        self._step = (self._step or 0.0) * factor
        if self.bracket.lower > 0 or self._has_gap:
            return self.bracket.width * (1 - (1 - factor * factor) / 5)
        return math.inf

    def _curves(
        self, saddle: Saddle, epsilon: float, delta: float, tolerance: float, slope: float | None
    ) -> tuple[StrataCurve, StrataCurve] | None:
        """Return the curves at the current step, or None if its grids would be too long."""
        parameters = choose_parameters(
            self._laws, saddle, epsilon, delta, tolerance, slope, self._step
        )
        if self._step is not None and parameters.points > MAX_POINTS:
            return None
        self._step = parameters.step
        self._is_cheap = self._has_gap and parameters.points < _CHEAP_POINTS
        return bounding_curves(self._laws, parameters)


class EpsilonSearch(_Search):
    """The ε (nats) of one direction at a δ, narrowed by request."""

    def __init__(self, laws: Laws, delta: float) -> None:
        super().__init__(laws)
        self._delta = delta
        self.bracket = Bracket(lower=0.0, upper=union_bound(laws, delta))
        if self.bracket.width <= MIN_WIDTH:
            return
        self._saddle, guess = locate(laws, delta)
        self._guess = max(0.0, guess)
        self._slope = self._saddle.order
        expected = self._saddle.log_delta + (self._saddle.epsilon - guess) * self._slope
        self._is_rare = self._guess > 0 and expected - math.log(delta) > _RARE_LOG_EXCESS
        if self._is_rare:
            self._guess, self._slope = locate_in_strata(laws, self._saddle, guess, delta)

    def refine(self, relative_width: float) -> Bracket:
        """Return the bracket at ``relative_width`` of ε, or the narrowest one within reach."""
        if self._is_settled or self.bracket.width <= MIN_WIDTH:
            return self.bracket
        requested = max(relative_width * self._guess, MIN_WIDTH)
        previous = math.inf
        for _ in range(_MAX_ROUNDS):
            if self.bracket.width <= requested:
                break
            tolerance = requested
            if self._step is not None:
                previous = self._reduce_step(requested / self.bracket.width)
            elif self._has_gap:
                tolerance = max(requested, _FIRST_GAP_WIDTH * self._guess)
            if not self._narrow(tolerance):
                break
            if self.bracket.lower == 0 and self._delta < MIN_RESOLVED_DELTA:
                break
            requested = max(relative_width * self.bracket.upper, MIN_WIDTH)
            if self.bracket.width > previous and not self._is_cheap:
                self._is_settled = self._has_gap
                break
        return self.bracket

    def _narrow(self, width: float) -> bool:
        """Narrow the bracket to about ``width`` (nats); return whether that was possible."""
        slope = self._slope if self._is_rare else None
        curves = self._curves(self._saddle, self._guess, self._delta, width * self._slope, slope)
        if curves is None:
            return False
        above, below = curves
        accuracy, stride = 0.01 * width, 0.05 / self._slope
        _, upper = crossing(above.upper, self._delta, self._guess, stride, accuracy)
        if math.isinf(upper):
            return False
        lower, _ = crossing(below.lower, self._delta, upper, width, accuracy)
        self.bracket = self.bracket.intersect(Bracket(lower=lower, upper=upper))
        self._guess = self.bracket.upper
        return True


class DeltaSearch(_Search):
    """The δ of one direction at an ε (nats), narrowed by request."""

    def __init__(self, laws: Laws, epsilon: float) -> None:
        super().__init__(laws)
        self._epsilon = epsilon
        self._saddle, self._guess = saddle_at_epsilon(laws, epsilon)
        self._slope: float | None = None
        self.bracket = Bracket(lower=0.0, upper=1.0)
        for _ in range(6):
            parameters = choose_parameters(
                laws, self._saddle, epsilon, self._guess, 0.1, self._slope, None
            )
            above, _ = bounding_curves(laws, parameters, lower=False)
            result = max(above.upper(epsilon), _MIN_DELTA)
            self.bracket = self.bracket.intersect(Bracket(lower=0.0, upper=min(1.0, result)))
            expected, self._guess = self._guess, min(result, self._guess)
            if math.log(expected / result) < _RARE_LOG_EXCESS:
                break
            # The saddle's δ is too large: one rare loss decides, or losses rarer than those cut
            # off have moved the tilt.
            if epsilon > _MIN_EPSILON:
                self._slope = self._slope_at(above, result)

    def _slope_at(self, above: StrataCurve, delta: float) -> float:
        order = self._saddle.order
        nearby = 0.2 / order
        there = above.upper(self._epsilon + nearby)
        if not 0 < there < delta:
            return order
        return min(100 * order, max(0.01 * order, math.log(delta / there) / nearby))

    def refine(self, relative_width: float) -> Bracket:
        """Return the bracket at ``relative_width`` of δ, or the narrowest one within reach."""
        previous = math.inf
        for _ in range(0 if self._is_settled else _MAX_ROUNDS):
            ratio = relative_width * self.bracket.upper / max(self.bracket.width, _MIN_DELTA)
            if ratio >= 1:
                break
            tolerance = relative_width
            if self._step is not None:
                previous = self._reduce_step(ratio)
            elif self._has_gap:
                tolerance = max(relative_width, _FIRST_GAP_WIDTH)
            curves = self._curves(self._saddle, self._epsilon, self._guess, tolerance, self._slope)
            if curves is None:
                break
            above, below = curves
            result = Bracket(lower=below.lower(self._epsilon), upper=above.upper(self._epsilon))
            self.bracket = self.bracket.intersect(result)
            self._guess = max(self.bracket.upper, _MIN_DELTA)
            can_split = self._slope is None and self._epsilon > _MIN_EPSILON
            if self.bracket.lower < 0.5 * self.bracket.upper and can_split:
                self._slope, self._step = self._saddle.order, None
                continue
            if self.bracket.width > previous and not self._is_cheap:
                self._is_settled = self._has_gap
                break
        return self.bracket
