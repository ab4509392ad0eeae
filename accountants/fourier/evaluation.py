"""One pass over a direction: the curves of its upper and lower measures, and where they cross a δ.

``bounding_curves`` returns two curves that bound δ(ε) from above and below for given grids, and
``crossing`` finds the ε at which such a curve crosses a δ.

``approximate_epsilon`` takes a millisecond: a search begins there, and it is never a bound. The
leading term of the saddle-point expansion is within some per cent of δ where many releases are
composed, and arbitrarily wrong where the loss is a few rare jumps. The larger of the directions is
taken, as in the accountant. Source: ``tilting.py``.

>>> from affidavit.plan.events import PoissonSubsampledGaussian, Repeated
>>> step = PoissonSubsampledGaussian(sampling_probability=0.01, noise_multiplier=1.0)
>>> round(approximate_epsilon(Repeated(event=step, count=1000), 1e-5), 1)
1.8
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

from affidavit.accountants.fourier.cache import up
from affidavit.accountants.fourier.composed_delta import ComposedTransform
from affidavit.accountants.fourier.discretized_pld import (
    Grid,
    LatticeMeasure,
    LowerRange,
    lower_measure,
    upper_measure,
)
from affidavit.accountants.fourier.dominating_pairs import directions
from affidavit.accountants.fourier.grid_parameters import (
    GridParameters,
    Laws,
    choose_grid,
    choose_grids_in_strata,
    saddle_at_delta,
    step_rungs,
)
from affidavit.accountants.fourier.privacy_loss import Cells, LossLaw
from affidavit.accountants.fourier.single_release import epsilon_of, single_release
from affidavit.accountants.fourier.tilting import Saddle
from affidavit.accountants.protocol import OutOfReach
from affidavit.plan import events

MAX_POINTS = 1 << 23
"""Points of the longest grid or transform: 64 MiB per array of doubles."""
MAX_SEARCH_EPSILON = 1e6
"""ε (nats) at which the search for a crossing ends."""
MAX_SADDLE_MU = 1000.0
"""Distance of one release, in standard deviations of the noise, beyond which the law of a saddle
point takes gigabytes."""


def check_cost(parameters: GridParameters) -> None:
    """Raise ``OutOfReach`` if arrays of these ``parameters`` would be too long."""
    if parameters.points > MAX_POINTS:
        raise OutOfReach(
            f"needs a grid of {parameters.points} points, at most {MAX_POINTS}.",
            "Ask for a wider bracket (relative_width) or use another accountant.",
        )


@dataclass(frozen=True, slots=True)
class StrataCurve:
    """The curve of a composition as the sum of its strata's."""

    strata: tuple[ComposedTransform, ...]

    def upper(self, epsilon: float) -> float:
        """Return an upper bound of δ at ``epsilon`` (nats), at most 1."""
        return min(1.0, sum(one.upper(epsilon) for one in self.strata) * (1 + 1e-15))

    def lower(self, epsilon: float) -> float:
        """Return a lower bound of δ at ``epsilon`` (nats), at least 0."""
        return sum(one.lower(epsilon) for one in self.strata) * (1 - 1e-15)


def bounding_curves(
    laws: Laws, parameters: GridParameters, *, lower: bool = True
) -> tuple[StrataCurve, StrataCurve]:
    """Return the curves of the upper and of the lower measures.

    Without ``lower`` the second curve is the first, which is no lower bound. Raises ``OutOfReach``
    as ``check_cost`` does.
    """
    check_cost(parameters)
    uppers, lowers = [], []
    for (law, count), attained, grid, span in zip(
        laws.direction.laws,
        laws.direction.attained,
        parameters.grids,
        parameters.lower_ranges,
        strict=True,
    ):
        cells: Callable[[], Cells] = cache(partial(grid.cells, law))
        uppers.append((_upper(laws, law, grid, cells), count))
        if lower:
            if attained != law:
                cells = partial(grid.cells, attained)
            lowers.append((_lower(laws, attained, grid, span, cells), count))
    above = _strata_curve(uppers, parameters)
    return above, _strata_curve(lowers, parameters) if lower else above


def _upper(laws: Laws, law: LossLaw, grid: Grid, cells: Callable[[], Cells]) -> LatticeMeasure:
    return laws.cache.get(("upper", law, grid), lambda: upper_measure(cells(), grid), _bytes)


def _lower(
    laws: Laws, law: LossLaw, grid: Grid, span: LowerRange, cells: Callable[[], Cells]
) -> LatticeMeasure:
    key = ("lower", law, grid, span)
    return laws.cache.get(key, lambda: lower_measure(cells(), grid, span), _bytes)


def _bytes(measure: LatticeMeasure) -> int:
    return measure.masses.nbytes


def _strata_curve(
    parts: list[tuple[LatticeMeasure, int]], parameters: GridParameters
) -> StrataCurve:
    if parameters.cut is None:
        return StrataCurve((ComposedTransform(parts, parameters.windows[0]),))
    common = [(measure.up_to(parameters.cut), count) for measure, count in parts]
    return StrataCurve(
        (
            ComposedTransform(common, parameters.windows[0]),
            ComposedTransform(parts, parameters.windows[1], parameters.cut),
        )
    )


def choose_parameters(
    laws: Laws,
    saddle: Saddle,
    epsilon: float,
    delta: float,
    tolerance: float,
    slope: float | None,
    step: float | None,
) -> GridParameters:
    """Choose grids in strata if there is a ``slope`` (minus that of log δ), else in one piece.

    The arguments are those of ``choose_grid`` and ``choose_grids_in_strata``. The step is wider
    where grids would be too long.
    """
    tolerance = min(0.5, tolerance)

    def at(step: float | None) -> GridParameters:
        if slope is None:
            return choose_grid(laws, saddle, epsilon, delta, tolerance, step)
        return choose_grids_in_strata(laws, epsilon, delta, tolerance, slope, step)

    parameters = at(step)
    if step is None and parameters.points > MAX_POINTS:
        # A wider bracket is better than none.
        wider = 1.05 * parameters.step * parameters.points / MAX_POINTS
        return at(up(wider, step_rungs(tolerance)))
    return parameters


def crossing(
    curve: Callable[[float], float], delta: float, start: float, stride: float, accuracy: float
) -> tuple[float, float]:
    """Return two ε around the crossing of a decreasing ``curve`` with ``delta``.

    They are ``accuracy`` apart. The curve is above ``delta`` at the first, which is 0 if it never
    is, and at most ``delta`` at the second, which is infinite if it never is. The search gallops
    from ``start`` by ``stride``, then follows regula falsi in log δ with the Illinois weights; all
    in nats.
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
        if high > MAX_SEARCH_EPSILON:
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


def approximate_epsilon(event: events.Event, delta: float) -> float:
    """Return ε (nats) at ``delta`` by the saddle point. Not a bound; raises as ``directions`` does.

    One release with very little noise is computed in closed form.
    """
    result = directions(event)
    laws = single_release(result)
    if any(law.mu > MAX_SADDLE_MU for law in laws):
        return max(epsilon_of(law, delta).upper for law in laws)
    return max(
        (saddle_at_delta(Laws.of(direction), delta).epsilon for direction in result), default=0.0
    )
