"""Allocations that compose, with each other and with releases beside them, bracketed.

Where bins are drawn afresh every pass is a release of its own. The hockey-stick curve h of one is
convex in α = e^ε, and bounded at the nodes of a lattice of losses: by the direction's own bounds
for ε >= 0, and for ε < 0 by those of the other direction, since h(α) = 1 - α + α h'(1/α).

* upper: chords of the upper bounds lie above h.
* lower: a chord, of an upper bound at its far end and a lower one at its near end, lies below h
  beyond its near end. Between two nodes that holds for the chord on their left, for the one on
  their right and for the mean of both; values at the nodes below all of these leave chords
  below h.

Of either, the lower convex hull is the curve of a measure on the nodes, and measures compose as
those of other releases do (docs/theorems/random-allocation.md, Theorem 6; fourier-lattice.md).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache, reduce

import numpy as np
from numpy.typing import NDArray

from affidavit.accountants.bracket import Bracket
from affidavit.accountants.fourier import dominating_pairs as fourier
from affidavit.accountants.fourier.discretized_pld import (
    BinMasses,
    Grid,
    LatticeMeasure,
    lower_measure,
    upper_measure,
)
from affidavit.accountants.fourier.evaluation import MAX_POINTS, crossing
from affidavit.accountants.fourier.grid_parameters import Laws, grid_step
from affidavit.accountants.fourier.privacy_loss import UNIT_ROUNDOFF, Array, Atoms
from affidavit.accountants.fourier.tilting import (
    Composition,
    Saddle,
    at_delta,
    at_epsilon,
    at_order,
    tilted_window,
    window_points,
)
from affidavit.accountants.fourier.transform import ComposedTransform
from affidavit.accountants.protocol import OutOfReach, require_delta, require_epsilon
from affidavit.accountants.random_allocation.directions import Curves, Direction
from affidavit.accountants.random_allocation.partial_pass import PartialDirection

Ordered = Direction | PartialDirection
Orders = tuple[Ordered, Ordered]
"""Both orders of a pair, that of a removed record first."""

MIN_DELTA = 1e-15
_TOLERANCE = 1e-4
"""Of log δ in the composition's lattice."""
_CURVE_TOLERANCE = 3e-4
"""Of log δ in one pass, for up to 1000 bins and σ² from 0.1 on; then in proportion, as long
lattices are slow and large."""
_FALL, _APART, _MAX_CURVES = 100.0, 1.0, 40
"""How far δ falls from one place where curves are made to the next, how far they are apart
(nats), and about how many there are at most."""
_RARE = 1e-3
"""The share of δ that losses may have which are taken for infinite."""
_COARSE, _MAX_NODES = 256, 4096
"""Nodes of a pass for finding the tilt, and at most."""


@dataclass(frozen=True, kw_only=True)
class Side:
    """One direction of a composition: allocations in this order, and what is ``beside`` them.

    Each comes with how often it runs.
    """

    passes: tuple[tuple[Pass, int], ...]
    beside: fourier.Direction | None = None

    @cached_property
    def _laws(self) -> Laws | None:
        return None if self.beside is None else Laws.of(self.beside)

    @cached_property
    def _releases(self) -> int:
        beside = 0 if self.beside is None else self.beside.steps
        return beside + sum(count for _, count in self.passes)

    def saddle(self, delta: float, find: Callable[[Composition], Saddle]) -> Saddle:
        """What ``find`` finds for the laws as they are where δ is about ``delta``."""
        return find(self._atoms(delta))

    def _atoms(self, delta: float) -> tuple[tuple[Atoms, int], ...]:
        passes = [(one.bounded(self._rare(delta)), count) for one, count in self.passes]
        atoms = tuple((_atoms(one.measures(None)[0]), count) for one, count in passes)
        return atoms if self._laws is None else (*atoms, *self._laws.cut(_RARE * delta)[0])

    def _rare(self, delta: float) -> float:
        return 1e3 ** math.floor(math.log10(_RARE * delta / self._releases) / 3)

    def curves(self, delta: float, saddle: Saddle) -> tuple[ComposedTransform, ComposedTransform]:
        """Bounds from above and below near ``saddle``, where δ is about ``delta``.

        Raises ``OutOfReach`` where a lattice would be too long.
        """
        passes = [(one.bounded(self._rare(delta)), count) for one, count in self.passes]
        widest = 0.2 * math.sqrt(saddle.variance)
        step = grid_step(self._atoms(delta), saddle.order, saddle.order, widest, _TOLERANCE)
        step = max(step, *(one.reach / _MAX_NODES for one, _ in passes))
        uppers, lowers = [], []
        for one, count in passes:
            above, below = one.measures(step)
            uppers.append((above, count))
            lowers.append((below, count))
        if self._laws is not None:
            cut, tops = self._laws.cut(_RARE * delta)
            grids, spans = self._laws.grids(cut, tops, saddle.order, _TOLERANCE, step)
            if max(grid.size for grid in grids) > MAX_POINTS:
                raise _too_long()
            direction = self._laws.direction
            for (law, count), attained, grid, span in zip(
                direction.laws, direction.attained, grids, spans, strict=True
            ):
                uppers.append((upper_measure(BinMasses.of(law, grid)), count))
                lowers.append((lower_measure(BinMasses.of(attained, grid), span), count))
        atoms = tuple((_atoms(measure), count) for measure, count in uppers)
        tilted = at_order(atoms, saddle.order)
        window = tilted_window(atoms, tilted, saddle.epsilon, delta, _TOLERANCE, step)
        if window_points(window, step) > MAX_POINTS:
            raise _too_long()
        return ComposedTransform(uppers, window), ComposedTransform(lowers, window)


@dataclass(frozen=True, kw_only=True, slots=True)
class ComposedAllocationCurve:
    """ε against δ over both ``sides``."""

    sides: tuple[Side, ...]

    @property
    def orders(self) -> tuple[ComposedAllocationCurve, ComposedAllocationCurve]:
        """The curves of P against Q, and of Q against P."""
        remove, add = self.sides
        return ComposedAllocationCurve(sides=(remove,)), ComposedAllocationCurve(sides=(add,))

    def epsilon(self, delta: float) -> Bracket:
        """Bracket of the smallest ε (nats) at ``delta``.

        Raises ``ValueError`` unless 0 < δ < 1, and ``OutOfReach`` where there is no bound.
        """
        require_delta(delta)
        if delta < MIN_DELTA:
            raise OutOfReach(f"delta {delta:g} is below {MIN_DELTA:g}.", "Ask for a larger one.")
        return reduce(Bracket.larger, (_epsilon(side, delta) for side in self.sides))

    def delta(self, epsilon: float) -> Bracket:
        """Bracket of the smallest δ at ``epsilon`` (nats).

        Raises ``ValueError`` unless ε is finite and at least 0, and ``OutOfReach`` where there is
        no bound.
        """
        require_epsilon(epsilon)
        best = Bracket(lower=0.0, upper=0.0)
        for side in self.sides:
            best = best.larger(_delta(side, epsilon, best.lower))
        return best


@lru_cache(maxsize=64)
def _epsilon(side: Side, delta: float) -> Bracket:
    saddle = side.saddle(delta, lambda atoms: at_delta(atoms, delta))
    above, below = side.curves(delta, saddle)
    start, stride = max(0.0, saddle.epsilon), 0.05 / saddle.order
    _, upper = crossing(above.upper, delta, start, stride, 1e-5 * stride)
    lower, _ = crossing(below.lower, delta, min(upper, start), stride, 1e-5 * stride)
    return Bracket(lower=min(lower, upper), upper=upper)


@lru_cache(maxsize=64)
def _delta(side: Side, epsilon: float, enough: float) -> Bracket:
    """The side's δ at ``epsilon`` (nats), narrow where it is above ``enough``."""
    guess, best = 1e-6, Bracket(lower=0.0, upper=1.0)
    for attempt in range(4):
        saddle = side.saddle(guess, lambda atoms: at_epsilon(atoms, epsilon))
        likely = math.exp(min(0.0, saddle.log_delta))
        last = attempt == 3 or guess == MIN_DELTA
        if last or likely >= 1e-2 * guess:
            above, below = side.curves(guess, saddle)
            result = Bracket(lower=below.lower(epsilon), upper=above.upper(epsilon))
            best = best.intersect(result)
            if last or best.upper >= 1e-2 * guess or best.upper <= enough:
                break
            likely = best.upper
        guess = max(likely, enough / 10, MIN_DELTA)
    return best


@dataclass(frozen=True, kw_only=True, slots=True)
class Pass:
    """One order of the pair of a pass, ``this``, and the ``other`` one."""

    this: Ordered
    other: Ordered

    def bounded(self, rare: float) -> BoundedPass:
        """Its curve's bounds, down to a δ of ``rare``."""
        above, below = _bounds(self.this, rare), _bounds(self.other, rare)
        return BoundedPass(orders=self, rare=rare, above=above, below=below)


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundedPass:
    """Bounds of one pass' curve for ε >= 0, ``above``, and of the other order, for ε < 0."""

    orders: Pass
    rare: float
    above: _Bounds
    below: _Bounds

    @property
    def reach(self) -> float:
        """From the least loss to the largest that are not too rare, in nats."""
        return self.above.end + self.below.end

    def measures(self, step: float | None) -> tuple[LatticeMeasure, LatticeMeasure]:
        """Measures whose curves bound that of the pass from above and from below.

        On multiples of ``step`` (nats), or on ``_COARSE`` of them.
        """
        step = self.reach / _COARSE if step is None else step
        first, last = math.floor(-self.below.end / step), math.ceil(self.above.end / step)
        # Two nodes more at either end, from which the lower curve's outer chords come.
        grid = Grid(origin=(first - 2) * step, step=step, size=last - first + 5)
        return _measures(self.orders, self.rare, grid)

    def heights(self, losses: Array, outwards: float) -> tuple[Array, Array]:
        """Upper and lower bounds of the curve at increasing ``losses`` (nats), shape (n,) each.

        ``outwards`` is how far the losses may be off.
        """
        negative = losses < 0
        ratios = np.exp(losses[negative])
        result = []
        for upper in (True, False):
            moved = -outwards if upper else outwards
            mirrored = self.below.at((moved - losses[negative])[::-1], upper=upper)[::-1]
            near_zero = 1.0 - ratios + ratios * mirrored
            far = self.above.at(losses[~negative] + moved, upper=upper)
            factor = 1 + (16 if upper else -16) * UNIT_ROUNDOFF
            result.append(np.minimum(np.concatenate((near_zero, far)) * factor, 1.0))
        return result[0], result[1]


@lru_cache(maxsize=64)
def _measures(one: Pass, rare: float, grid: Grid) -> tuple[LatticeMeasure, LatticeMeasure]:
    losses = grid.losses()
    # A node is off by a rounding of what it is summed from, and its exponential by one of its own.
    rounding = 4 * UNIT_ROUNDOFF * (1 + abs(grid.origin) + abs(float(losses[-1])))
    upper, lower = one.bounded(rare).heights(losses, rounding)
    ratios = np.exp(losses)
    above = LatticeMeasure(
        grid=grid,
        masses=_masses(ratios, np.append(1.0, upper), above=True),
        infinite=float(upper[-1]),
        loss_error=rounding,
    )
    masses = _masses(ratios, _below_chords(ratios, upper, lower), above=False)
    return above, LatticeMeasure(grid=grid, masses=masses, infinite=0.0, loss_error=rounding)


def _below_chords(ratios: Array, upper: Array, lower: Array) -> Array:
    """Heights at 0 and at ``ratios`` whose chords are nowhere above the curve.

    ``upper`` and ``lower`` bound it at ``ratios``, shape (n,) as these; the heights are (n + 1,).
    """
    widths = np.diff(ratios)
    # Of the line through an upper bound at a node and a lower one at the next, beyond the latter.
    ahead = lower[1:-1] + (lower[1:-1] - upper[:-2]) / widths[:-1] * widths[1:]
    # Of the line through a lower bound at a node and an upper one at the next, before the former.
    back = lower[1:-1] - (upper[2:] - lower[1:-1]) / widths[1:] * widths[:-1]
    starts, ends = np.append(back, lower[-2]), np.append(lower[1], ahead)
    # Between two inner nodes both lines bound the curve, and so does their mean.
    starts[1:-1] = (lower[1:-2] + back[1:]) / 2
    ends[1:-1] = (ahead[:-1] + lower[2:-1]) / 2
    heights = np.concatenate((starts[:1], np.minimum(ends[:-1], starts[1:]), ends[-1:]))
    slope = (upper[2] - lower[1]) / widths[1]
    heights = np.append(min(1.0, lower[1] - slope * ratios[1]), heights)
    error = 32 * UNIT_ROUNDOFF * np.append(1.0, upper)
    heights = np.minimum.accumulate(heights - error)
    end = int(np.count_nonzero(heights > 0)) - 1
    # From where nothing is left on, the height there is taken away everywhere.
    return np.maximum(heights - heights[end], 0.0) if end >= 0 else np.zeros(heights.size)


def _masses(ratios: Array, heights: Array, *, above: bool) -> Array:
    """Masses at ``ratios``, (n,), of the lower hull of ``heights`` at 0 and there, (n + 1,)."""
    places = np.append(0.0, ratios)
    hull = _lower_hull(places, heights)
    outwards = (4 if above else -4) * UNIT_ROUNDOFF
    tails = -np.diff(heights[hull]) / np.diff(places[hull]) * (1 + outwards)
    if above:
        tails = np.maximum.accumulate(tails[::-1])[::-1]
    else:
        tails = np.minimum.accumulate(np.maximum(tails, 0.0))
    masses = np.zeros(ratios.size)
    masses[hull[1:] - 1] = -np.diff(tails, append=0.0) * places[hull[1:]] * (1 + outwards)
    return masses


@dataclass(frozen=True, slots=True)
class _Bounds:
    """Upper bounds of one order's δ(ε), each made near one of ``places`` (nats), to ``end``."""

    places: tuple[float, ...]
    curves: tuple[Curves, ...]
    end: float

    def at(self, epsilons: Array, *, upper: bool) -> Array:
        """Bounds of δ at increasing ``epsilons`` (nats), shape (n,) as these."""
        values = np.full(epsilons.size, 1.0 if upper else 0.0)
        ends = np.searchsorted(epsilons, (-np.inf, *self.places, np.inf))
        for index, curve in enumerate(self.curves):
            # A curve is read up to the places next to its own.
            near = slice(ends[index], ends[index + 2])
            if upper:
                values[near] = np.minimum(values[near], curve.uppers(epsilons[near]))
            else:
                values[near] = np.maximum(values[near], curve.lowers(epsilons[near]))
        # δ falls, so that a bound far from its place may be replaced by that of a neighbour.
        if upper:
            return np.minimum.accumulate(values)
        return np.maximum.accumulate(values[::-1])[::-1]


@lru_cache(maxsize=4)  # each holds the lattices of its curves, up to hundreds of megabytes
def _bounds(direction: Ordered, rare: float) -> _Bounds:
    end = direction.guess(rare)
    apart = max(_APART, end / _MAX_CURVES)
    places, delta = [0.0], direction.about(0.0)
    while places[-1] < end:
        delta /= _FALL
        following = direction.guess(delta) if delta > rare else end
        parts = max(1, math.ceil((following - places[-1]) / apart))
        places += np.linspace(places[-1], following, parts + 1).tolist()[1:]
    tolerance = _CURVE_TOLERANCE * max(1.0, direction.bins / 1000, direction.rate**2 / 10)
    made: list[tuple[float, Curves]] = []
    for place, following in zip(places, (*places[1:], end), strict=True):
        # Beside a place that is out of reach the bounds of its neighbours hold, and are loose.
        with suppress(OutOfReach):
            about = direction.about(place)
            made.append((place, direction.curves(place, about, tolerance, upto=following)))
    return _Bounds(tuple(place for place, _ in made), tuple(curve for _, curve in made), end)


def _lower_hull(places: Array, heights: Array) -> NDArray[np.intp]:
    """Indices of the lower convex hull's corners, first and last included."""
    corners = [0]
    for index in range(1, places.size):
        while len(corners) > 1:
            before, last = corners[-2], corners[-1]
            rise = (heights[last] - heights[before]) * (places[index] - places[before])
            if rise < (heights[index] - heights[before]) * (places[last] - places[before]):
                break
            corners.pop()
        corners.append(index)
    return np.array(corners)


def _atoms(measure: LatticeMeasure) -> Atoms:
    positive = measure.masses > 0
    return Atoms(losses=measure.grid.losses()[positive], weights=measure.masses[positive])


def _too_long() -> OutOfReach:
    return OutOfReach(
        f"the composition would need a lattice of more than {MAX_POINTS} points.",
        "Add noise, or take fewer steps.",
    )
