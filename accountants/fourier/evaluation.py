"""One pass over a direction: the curves of its upper and lower measures, and reading them.

``transforms`` turns a parameters into two curves that bound δ(ε) from above and below, and
``crossing`` finds the ε at which such a curve passes a δ.

About ε in a millisecond, by the saddle point: where a search begins, never a bound.

The leading term of the saddle-point expansion is within some per cent of δ where many
releases are composed, and anything where the loss is a few rare jumps. The larger of the
directions is taken, as the accountant takes the larger bracket. Source: ``saddle``.

>>> from affidavit.plan.events import PoissonSubsampledGaussian, Repeated
>>> step = PoissonSubsampledGaussian(sampling_probability=0.01, noise_multiplier=1.0)
>>> round(approximate_epsilon(Repeated(event=step, count=1000), 1e-5), 1)
1.8
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial

from affidavit.accountants.fourier.cache import SharedCache, up
from affidavit.accountants.fourier.discretized_pld import (
    BinMasses,
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
    rungs,
    saddle_at_delta,
)
from affidavit.accountants.fourier.privacy_loss import LossLaw
from affidavit.accountants.fourier.single_release import epsilon_of, single_release
from affidavit.accountants.fourier.tilting import Saddle
from affidavit.accountants.fourier.transform import ComposedTransform
from affidavit.accountants.protocol import OutOfReach
from affidavit.plan import Event

MAX_POINTS = 1 << 23
"""Longest grid or transform; 64 MiB an array of doubles."""

ENDLESS = 1e6
"""An ε (nats) at which the search for one is given up."""


def check_cost(parameters: GridParameters) -> None:
    """Refuse a parameters whose arrays would be too long: raises ``OutOfReach``."""
    if parameters.points > MAX_POINTS:
        raise OutOfReach(
            f"needs a grid of {parameters.points} points, at most {MAX_POINTS}.",
            "Ask for a wider bracket (relative_width) or use another accountant.",
        )


@dataclass(frozen=True, slots=True)
class Sum:
    """The curve of a composition as the sum of its strata's."""

    strata: tuple[ComposedTransform, ...]

    def upper(self, epsilon: float) -> float:
        """An upper bound of δ at ``epsilon``, at most 1."""
        return min(1.0, sum(one.upper(epsilon) for one in self.strata) * (1 + 1e-15))

    def lower(self, epsilon: float) -> float:
        """A lower bound of δ at ``epsilon``, at least 0."""
        return sum(one.lower(epsilon) for one in self.strata) * (1 - 1e-15)


def transforms(laws: Laws, parameters: GridParameters, *, lower: bool = True) -> tuple[Sum, Sum]:
    """The curves of the upper and of the lower measures.

    Without ``lower`` the second is the first, whose lower curve is then no bound: for
    callers that read the upper one only. Raises ``OutOfReach`` as ``check_cost`` does.
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
        cells: Callable[[], BinMasses] = cache(partial(BinMasses.of, law, grid))
        uppers.append((_upper(law, grid, cells, laws.shared), count))
        if lower:
            if attained != law:
                cells = partial(BinMasses.of, attained, grid)
            lowers.append((_lower(attained, grid, span, cells, laws.shared), count))
    above = _sum(uppers, parameters, laws.shared)
    return above, _sum(lowers, parameters, laws.shared) if lower else above


def _upper(
    law: LossLaw, grid: Grid, cells: Callable[[], BinMasses], shared: SharedCache
) -> LatticeMeasure:
    name = "upper", law, grid
    return shared.get(name, lambda: replace(upper_measure(cells()), name=name), _bytes)


def _lower(
    law: LossLaw, grid: Grid, span: LowerRange, cells: Callable[[], BinMasses], shared: SharedCache
) -> LatticeMeasure:
    name = "lower", law, grid, span
    return shared.get(name, lambda: replace(lower_measure(cells(), span), name=name), _bytes)


def _bytes(measure: LatticeMeasure) -> int:
    return measure.masses.nbytes


def _sum(
    parts: list[tuple[LatticeMeasure, int]], parameters: GridParameters, shared: SharedCache
) -> Sum:
    if parameters.cut is None:
        return Sum((ComposedTransform(parts, parameters.windows[0], shared=shared),))
    common = [(measure.up_to(parameters.cut), count) for measure, count in parts]
    return Sum(
        (
            ComposedTransform(common, parameters.windows[0]),
            ComposedTransform(parts, parameters.windows[1], parameters.cut),
        )
    )


def with_parameters(
    laws: Laws,
    saddle: Saddle,
    epsilon: float,
    delta: float,
    tolerance: float,
    slope: float | None,
    step: float | None,
) -> GridParameters:
    """Grid parameters in strata if there is a ``slope``, else in one piece.

    As ``choose_grid`` and ``choose_grids_in_strata``, with a wider step where grids would
    be too long.
    """
    tolerance = min(0.5, tolerance)

    def at(step: float | None) -> GridParameters:
        if slope is None:
            return choose_grid(laws, saddle, epsilon, delta, tolerance, step)
        return choose_grids_in_strata(laws, epsilon, delta, tolerance, slope, step)

    parameters = at(step)
    if step is None and parameters.points > MAX_POINTS:
        # A wider bracket is worth more than none.
        return at(up(1.05 * parameters.step * parameters.points / MAX_POINTS, rungs(tolerance)))
    return parameters


def crossing(
    curve: Callable[[float], float], delta: float, start: float, stride: float, accuracy: float
) -> tuple[float, float]:
    """ε on either side of where a decreasing ``curve`` passes ``delta``, ``accuracy`` apart.

    The curve is above ``delta`` at the first and at most ``delta`` at the second; the
    first is 0 if the curve never is, the second infinite. Gallops from ``start`` by
    ``stride``, then regula falsi in log δ with the Illinois weights; all in nats.
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
        if high > ENDLESS:
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


FAR = 1000.0
"""Distance in noise of one release, beyond which the law of a saddle point fills gigabytes."""


def approximate_epsilon(event: Event, delta: float) -> float:
    """ε (nats) at ``delta`` by the saddle point. Not a bound; raises as ``directions`` does.

    One release of hardly any noise is read in closed form.
    """
    result = directions(event)
    laws = single_release(result)
    if any(law.mu > FAR for law in laws):
        return max(epsilon_of(law, delta).upper for law in laws)
    return max(
        (saddle_at_delta(Laws.of(direction), delta).epsilon for direction in result), default=0.0
    )
