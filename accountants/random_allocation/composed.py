"""Brackets of allocations composed with each other and with releases beside them.

If bins are drawn anew, every pass is a release of its own. The hockey-stick curve h of a pass is
convex in α = e^ε. It is bounded at the nodes of a lattice of losses: by the direction's own bounds
for ε >= 0, and by those of the other direction for ε < 0, since h(α) = 1 - α + α h'(1/α).

* upper: chords of the upper bounds lie above h.
* lower: a chord with an upper bound at its far end and a lower bound at its near end lies below h
  beyond its near end. Between two nodes this holds for the chord on their left, the chord on their
  right and the mean of both. Chords of node values below all of these lie below h.

The lower convex hull of either is the curve of a measure on the nodes. Measures compose like those
of other releases (docs/theorems/random-allocation.md, Theorem 6; fourier-lattice.md).
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache, reduce

import numpy as np
from numpy.typing import NDArray

from affidavit.accountants.bracket import Bracket
from affidavit.accountants.fourier import dominating_pairs as fourier
from affidavit.accountants.fourier.composed_delta import ComposedTransform
from affidavit.accountants.fourier.discretized_pld import (
    Grid,
    LatticeMeasure,
    lower_measure,
    upper_measure,
)
from affidavit.accountants.fourier.evaluation import MAX_POINTS, crossing
from affidavit.accountants.fourier.grid_parameters import Laws, grid_step
from affidavit.accountants.fourier.privacy_loss import Atoms
from affidavit.accountants.fourier.tilting import (
    Saddle,
    at_delta,
    at_epsilon,
    at_order,
    tilted_window,
)
from affidavit.accountants.protocol import OutOfReach, require_delta, require_epsilon
from affidavit.accountants.random_allocation.directions import (
    Curves,
    Direction,
    PartialDirection,
)
from affidavit.accountants.random_allocation.replaced import ReplacedDirection
from affidavit.accountants.rounding import UNIT_ROUNDOFF, Array

Ordered = Direction | PartialDirection | ReplacedDirection
Orders = tuple[Ordered, Ordered]
"""Both orders of a pair, the one of a removed record first."""

MIN_DELTA = 1e-15
_TOLERANCE = 1e-4
"""Accuracy of log δ of the composition's lattice."""
_PASS_TOLERANCE = 3e-4
"""Accuracy of log δ of one pass, for up to 1000 bins and σ² from 0.1 on. For others it grows in
proportion, because long lattices are slow and large."""
_DELTA_RATIO, _MIN_SPACING, _MAX_CURVES = 100.0, 1.0, 40
"""Ratio of δ and distance in ε (nats) between two curves of a pass, and about their maximum."""
_INFINITE_SHARE = 1e-3
"""Share of δ of the losses that are treated as infinite."""
_COARSE_NODES, _MAX_NODES = 256, 4096
"""Nodes of a pass for finding the tilt, and at most."""


@dataclass(frozen=True, kw_only=True)
class Side:
    """One direction of a composition: passes with counts, and the releases ``beside`` them."""

    passes: tuple[tuple[Pass, int], ...]
    beside: fourier.Direction | None = None

    @cached_property
    def _laws(self) -> Laws | None:
        return None if self.beside is None else Laws.of(self.beside)

    @cached_property
    def _releases(self) -> int:
        beside = 0 if self.beside is None else self.beside.steps
        return beside + sum(count for _, count in self.passes)

    def atoms(self, delta: float) -> tuple[tuple[Atoms, int], ...]:
        """Return the laws on coarse lattices that suit a δ of about ``delta``."""
        infinite = self._infinite_mass(delta)
        atoms = tuple((_atoms(one.measures(infinite)[0]), count) for one, count in self.passes)
        if self._laws is None:
            return atoms
        return (*atoms, *self._laws.cut(_INFINITE_SHARE * delta)[0])

    def _infinite_mass(self, delta: float) -> float:
        # The nodes of replaced records serve every depth; the lattices of others serve one.
        reused = all(isinstance(one.this, ReplacedDirection) for one, _ in self.passes)
        digits = 1 if reused else 3
        exponent = math.log10(_INFINITE_SHARE * delta / self._releases)
        return 10.0 ** (digits * math.floor(exponent / digits))

    def curves(self, delta: float, saddle: Saddle) -> tuple[ComposedTransform, ComposedTransform]:
        """Return bounds from above and below near ``saddle``, where δ is about ``delta``.

        Raises ``OutOfReach`` if a lattice would be too long.
        """
        infinite = self._infinite_mass(delta)
        widest = 0.2 * math.sqrt(saddle.variance)
        step = grid_step(self.atoms(delta), saddle.order, saddle.order, widest, _TOLERANCE)
        step = max(step, *(one.reach(infinite) / _MAX_NODES for one, _ in self.passes))
        uppers, lowers = [], []
        for one, count in self.passes:
            above, below = one.measures(infinite, step)
            uppers.append((above, count))
            lowers.append((below, count))
        if self._laws is not None:
            cut, tops = self._laws.cut(_INFINITE_SHARE * delta)
            grids, spans = self._laws.grids(cut, tops, saddle.order, _TOLERANCE, step)
            if max(grid.size for grid in grids) > MAX_POINTS:
                raise _too_long()
            direction = self._laws.direction
            for (law, count), attained, grid, span in zip(
                direction.laws, direction.attained, grids, spans, strict=True
            ):
                uppers.append((upper_measure(grid.cells(law), grid), count))
                lowers.append((lower_measure(grid.cells(attained), grid, span), count))
        atoms = tuple((_atoms(measure), count) for measure, count in uppers)
        tilted = at_order(atoms, saddle.order)
        window = tilted_window(atoms, tilted, saddle.epsilon, delta, _TOLERANCE, step)
        if window.points(step) > MAX_POINTS:
            raise _too_long()
        return ComposedTransform(uppers, window), ComposedTransform(lowers, window)


@dataclass(frozen=True, kw_only=True, slots=True)
class ComposedAllocationCurve:
    """Privacy curve of a composition over both ``sides``."""

    sides: tuple[Side, ...]

    @property
    def orders(self) -> tuple[ComposedAllocationCurve, ComposedAllocationCurve]:
        """The curves of P against Q, and of Q against P."""
        remove, add = self.sides
        return ComposedAllocationCurve(sides=(remove,)), ComposedAllocationCurve(sides=(add,))

    def epsilon(self, delta: float) -> Bracket:
        """Return the bracket of ε (nats) at ``delta``.

        Raises ``ValueError`` unless 0 < δ < 1, and ``OutOfReach`` if there is no bound.
        """
        require_delta(delta)
        if delta < MIN_DELTA:
            raise OutOfReach(f"delta {delta:g} is below {MIN_DELTA:g}.", "Choose a larger δ.")
        return reduce(Bracket.larger, (_epsilon(side, delta) for side in self.sides))

    def delta(self, epsilon: float) -> Bracket:
        """Return the bracket of δ at ``epsilon`` (nats).

        Raises ``ValueError`` unless ε is finite and at least 0, and ``OutOfReach`` if there is
        no bound.
        """
        require_epsilon(epsilon)
        best = Bracket(lower=0.0, upper=0.0)
        for side in self.sides:
            best = best.larger(_delta(side, epsilon, best.lower))
        return best


@lru_cache(maxsize=64)
def _epsilon(side: Side, delta: float) -> Bracket:
    saddle = at_delta(side.atoms(delta), delta)
    above, below = side.curves(delta, saddle)
    start, stride = max(0.0, saddle.epsilon), 0.05 / saddle.order
    _, upper = crossing(above.upper, delta, start, stride, 1e-5 * stride)
    lower, _ = crossing(below.lower, delta, min(upper, start), stride, 1e-5 * stride)
    return Bracket(lower=min(lower, upper), upper=upper)


@lru_cache(maxsize=64)
def _delta(side: Side, epsilon: float, enough: float) -> Bracket:
    """Return the bracket of δ at ``epsilon`` (nats), narrow if δ is above ``enough``."""
    guess, best = 1e-6, Bracket(lower=0.0, upper=1.0)
    for attempt in range(4):
        saddle = at_epsilon(side.atoms(guess), epsilon)
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
    """One order of the pair of a pass, ``this``, and the ``other`` order.

    The curve for ε >= 0 comes from ``this`` and for ε < 0 from ``other``. Losses with a δ below
    ``infinite`` are treated as infinite.
    """

    this: Ordered
    other: Ordered

    def reach(self, infinite: float) -> float:
        """Return the distance (nats) from the smallest to the largest finite loss."""
        return _bounds(self.this, infinite).end + _bounds(self.other, infinite).end

    def measures(
        self, infinite: float, step: float | None = None
    ) -> tuple[LatticeMeasure, LatticeMeasure]:
        """Return measures whose curves bound that of the pass from above and from below.

        Their nodes are multiples of ``step`` (nats), by default ``_COARSE_NODES`` of them.
        """
        step = self.reach(infinite) / _COARSE_NODES if step is None else step
        first = math.floor(-_bounds(self.other, infinite).end / step)
        last = math.ceil(_bounds(self.this, infinite).end / step)
        # Two more nodes at either end define the outer chords of the lower curve.
        grid = Grid(origin=(first - 2) * step, step=step, size=last - first + 5)
        return _measures(self, infinite, grid)

    def heights(self, infinite: float, losses: Array, error: float) -> tuple[Array, Array]:
        """Return upper and lower bounds of the curve at increasing ``losses`` (nats), shape (n,).

        ``error`` bounds the error of the losses.
        """
        above, below = _bounds(self.this, infinite), _bounds(self.other, infinite)
        negative = losses < 0
        ratios = np.exp(losses[negative])
        result = []
        for upper in (True, False):
            moved = -error if upper else error
            mirrored = below.at((moved - losses[negative])[::-1], upper=upper)[::-1]
            near_zero = 1.0 - ratios + ratios * mirrored
            far = above.at(losses[~negative] + moved, upper=upper)
            factor = 1 + (16 if upper else -16) * UNIT_ROUNDOFF
            result.append(np.minimum(np.concatenate((near_zero, far)) * factor, 1.0))
        return result[0], result[1]


@lru_cache(maxsize=64)
def _measures(one: Pass, infinite: float, grid: Grid) -> tuple[LatticeMeasure, LatticeMeasure]:
    losses = grid.losses()
    # A node has a rounding of each of its terms, and its exponential one of its own.
    rounding = 4 * UNIT_ROUNDOFF * (1 + abs(grid.origin) + abs(float(losses[-1])))
    upper, lower = one.heights(infinite, losses, rounding)
    # δ falls, also where the bounds of one order are out of reach, and masses are not negative.
    upper = np.minimum.accumulate(upper)
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
    """Return heights at 0 and at ``ratios`` whose chords are nowhere above the curve.

    ``upper`` and ``lower`` bound it at ``ratios``, shape (n,). The heights have shape (n + 1,).
    """
    widths = np.diff(ratios)
    # The line through an upper bound at a node and a lower bound at the next one, beyond it.
    ahead = lower[1:-1] + (lower[1:-1] - upper[:-2]) / widths[:-1] * widths[1:]
    # The line through a lower bound at a node and an upper bound at the next one, before it.
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
    # Subtract the height at the last positive node everywhere.
    return np.maximum(heights - heights[end], 0.0) if end >= 0 else np.zeros(heights.size)


def _masses(ratios: Array, heights: Array, *, above: bool) -> Array:
    """Return the masses at ``ratios``, (n,), of the lower hull of ``heights``, (n + 1,)."""
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
    """Bounds of δ(ε) of one order up to ``end`` (nats), one curve near each of ``epsilons``."""

    epsilons: tuple[float, ...]
    curves: tuple[Curves, ...]
    end: float

    def at(self, epsilons: Array, *, upper: bool) -> Array:
        """Return bounds of δ at increasing ``epsilons`` (nats), shape (n,)."""
        values = np.full(epsilons.size, 1.0 if upper else 0.0)
        ends = np.searchsorted(epsilons, (-np.inf, *self.epsilons, np.inf))
        for index, curve in enumerate(self.curves):
            # A curve is used up to the neighbours of its own ε.
            near = slice(ends[index], ends[index + 2])
            if upper:
                values[near] = np.minimum(values[near], curve.uppers(epsilons[near]))
            else:
                values[near] = np.maximum(values[near], curve.lowers(epsilons[near]))
        # δ decreases, so a neighbour's bound may replace one far from its own ε.
        if upper:
            return np.minimum.accumulate(values)
        return np.maximum.accumulate(values[::-1])[::-1]


@lru_cache(maxsize=4)  # each holds the lattices of its curves, up to hundreds of megabytes
def _bounds(direction: Ordered, infinite: float) -> _Bounds:
    end = direction.approximate_epsilon(infinite)
    spacing = max(_MIN_SPACING, end / _MAX_CURVES)
    epsilons, delta = [0.0], direction.approximate_delta(0.0)
    while epsilons[-1] < end:
        delta /= _DELTA_RATIO
        following = direction.approximate_epsilon(delta) if delta > infinite else end
        parts = max(1, math.ceil((following - epsilons[-1]) / spacing))
        epsilons += np.linspace(epsilons[-1], following, parts + 1).tolist()[1:]
    tolerance = _PASS_TOLERANCE * max(1.0, direction.bins / 1000, direction.rate**2 / 10)
    curves: dict[float, Curves] = {}
    for epsilon, following in zip(epsilons, (*epsilons[1:], end), strict=True):
        # If an ε is out of reach, the looser bounds of its neighbours hold there.
        with suppress(OutOfReach):
            delta = direction.approximate_delta(epsilon)
            curves[epsilon] = direction.curves(epsilon, delta, tolerance, upto=following)
    return _Bounds(tuple(curves), tuple(curves.values()), end)


def _lower_hull(places: Array, heights: Array) -> NDArray[np.intp]:
    """Return the indices of the lower convex hull's corners, including both ends."""
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
