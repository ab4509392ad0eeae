"""The choice of tilt, cut, step, window and grids, which narrows a bracket but proves nothing.

The step follows from the discretisation error. Moving the mass of a loss at distance d from the
nearest of two nodes onto both spreads it by d(h-d). Over T releases at tilt λ such a variance v
raises log δ by T λ(λ+1) v / 2, hence ε by T (λ+1) v / 2. For a smooth law v = h²/6 above and h²/12
below, and for one that sits within d << h of a node about d h above and d² below: at small sampling
probabilities nearly all of it does.

One cut of the rare large losses serves the saddle and the grids alike. Without it they would
dominate the tilt at small sampling probabilities.

Any nodes give sound measures (``discretized_pld.py``). Both measures agree with a law that is wide
against the step to second order wherever the nodes are, but not with one that rises or falls within
a step, and at small sampling probabilities, or beside phases of a larger scale, nearly all laws do.
So one node is anchored slightly below the barycentre of the cell that matters most, and cells above
it that would need more mass than lies above them join it.

Tilts, cuts, steps and shares of the tolerance are rounded to ladders (``cache.py``), so that plans
of the same releases that differ in δ or in their number of steps share most measures.

Reference: ``docs/theorems/fourier-lattice.md``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from affidavit.accountants.fourier.cache import SharedCache, down, nearest
from affidavit.accountants.fourier.discretized_pld import Grid, LowerRange
from affidavit.accountants.fourier.dominating_pairs import Direction
from affidavit.accountants.fourier.privacy_loss import Atoms, LossLaw
from affidavit.accountants.fourier.tilting import (
    STRATUM_CUT,
    Composition,
    Saddle,
    Window,
    at_delta,
    at_epsilon,
    at_order,
    strata,
    stratum_window,
    tilted_floor,
    tilted_window,
)

_CUT_SHARE = 1e-7
"""Share of δ: losses exceeded with less than this in the whole run are cut off."""
_TILT_RUNGS, _STEP_RUNGS, _CUT_RUNGS, _TOLERANCE_RUNGS = 8, 4, 0.1, 0.25
"""Rungs per octave of the ladders of tilts, steps, shares of δ and shares of the tolerance."""
_COARSE_TOLERANCE, _COARSE_STEP_RUNGS, _GRID_TILT_RUNGS = 0.05, 2, 1
"""From this tolerance of log δ on, as when ε is located, steps have fewer rungs. The tilt that only
aligns a grid always has."""
_STEP_SHARE, _STRATA_STEP_SHARE = 0.75, 0.56
"""Shares of the tolerance that a step may use before it is rounded down to its ladder."""
_MAX_JOINED_CELLS = 16
"""Cells that may join the first; nearly nothing lies beyond them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GridParameters:
    """Windows, cut and grids with which one direction is bracketed; ``cut`` in nats."""

    windows: tuple[Window, ...]
    cut: float | None
    grids: tuple[Grid, ...]
    lower_ranges: tuple[LowerRange, ...]

    @property
    def step(self) -> float:
        """The distance of the nodes in nats, one for all grids."""
        return self.grids[0].step

    @property
    def points(self) -> int:
        """The number of points of the longest of the grids and the transforms."""
        lengths = [window.points(self.step) for window in self.windows]
        return max(*lengths, *(grid.size for grid in self.grids))


@dataclass(frozen=True, kw_only=True, slots=True)
class Laws:
    """A direction with the atoms of its laws, and the ``cache`` of measures."""

    direction: Direction
    atoms: tuple[tuple[Atoms, int], ...]
    cache: SharedCache = field(repr=False, compare=False)

    @classmethod
    def of(cls, direction: Direction, cache: SharedCache | None = None) -> Laws:
        """Return ``direction`` with the atoms of every law, and by default a new ``cache``."""
        atoms = tuple((law.atoms(), count) for law, count in direction.laws)
        cache = SharedCache() if cache is None else cache
        return cls(direction=direction, atoms=atoms, cache=cache)

    def common(self, delta: float) -> tuple[tuple[Atoms, int], ...]:
        """Return the atoms without the losses too rare to matter at ``delta``."""
        return self.cut(_CUT_SHARE * delta)[0]

    def cut(self, mass: float) -> tuple[tuple[tuple[Atoms, int], ...], tuple[float, ...]]:
        """Return the atoms up to losses exceeded with probability ``mass`` in all, and these.

        There is one such loss (nats) for each law.
        """
        rare = down(mass / self.direction.steps, _CUT_RUNGS)
        tops = tuple(law.upper_quantile(rare) for law, _ in self.direction.laws)
        cut = zip(self.atoms, tops, strict=True)
        return tuple((atoms.cut(top), count) for (atoms, count), top in cut), tops

    def grids(
        self,
        atoms: Composition,
        tops: Sequence[float],
        order: float,
        tolerance: float,
        step: float,
    ) -> tuple[tuple[Grid, ...], tuple[LowerRange, ...]]:
        """Return grids of one ``step`` for all releases, and the ranges of their lower measures.

        ``atoms`` are the laws cut above ``tops`` (nats, as ``step``), ``order`` is the tilt (1/nat)
        and ``tolerance`` the requested width of log δ. Joined cells would not narrow the bracket of
        laws that leave a gap, only loosen its upper end.
        """
        share = down(tolerance / self.direction.steps, _TOLERANCE_RUNGS)
        order = down(order, _GRID_TILT_RUNGS) if order else 0.0
        may_join = not self.direction.has_gap
        result = [
            align_grid(cut_atoms, attained, top, order, share, step, may_join)
            for attained, (cut_atoms, _), top in zip(
                self.direction.attained, atoms, tops, strict=True
            )
        ]
        return tuple(upper for upper, _ in result), tuple(lower for _, lower in result)


def saddle_at_delta(laws: Laws, delta: float) -> Saddle:
    """Return the saddle near ``delta``, with the losses too rare to matter cut off."""
    return at_delta(laws.common(delta), delta)


def saddle_at_epsilon(laws: Laws, epsilon: float, about: float = 1.0) -> tuple[Saddle, float]:
    """Return the saddle near ``epsilon`` (nats) and its δ, with the losses too rare to matter cut.

    Which losses are too rare depends on δ, which starts as ``about``.
    """
    delta = about
    for _ in range(6):
        saddle = at_epsilon(laws.common(delta), epsilon)
        before, delta = delta, math.exp(max(-650.0, min(saddle.log_delta, -1e-3)))
        if abs(math.log(delta / before)) < 1.0:
            break
    return saddle, delta


def choose_grid(
    laws: Laws,
    saddle: Saddle,
    epsilon: float,
    delta: float,
    tolerance: float,
    step: float | None = None,
) -> GridParameters:
    """Choose grids for a bracket of log δ about ``tolerance`` wide, or of a given step (nats).

    The curve will be read at ``epsilon``, where it is about ``delta``. The latter sets which losses
    are too rare to matter, and must be the δ of the saddle: another cut can move the
    tilted law by orders of magnitude.
    """
    atoms, tops = laws.cut(_CUT_SHARE * delta)
    order = nearest(saddle.order, _TILT_RUNGS)
    saddle = at_order(atoms, order)
    spread = math.sqrt(saddle.variance)
    if step is None:
        step = grid_step(atoms, order, order, 0.2 * spread, _STEP_SHARE * tolerance)
    step = down(step, step_rungs(tolerance))
    window = tilted_window(atoms, saddle, epsilon, delta, tolerance, step)
    nodes, ranges = laws.grids(atoms, tops, order, tolerance, step)
    return GridParameters(windows=(window,), cut=None, grids=nodes, lower_ranges=ranges)


def choose_grids_in_strata(
    laws: Laws,
    epsilon: float,
    delta: float,
    tolerance: float,
    slope: float,
    step: float | None = None,
) -> GridParameters:
    """Choose grids in two strata, for a curve whose log falls by ``slope`` per nat of ε there."""
    atoms, tops = laws.cut(1e-3 * min(0.1, tolerance) * delta)
    cut = STRATUM_CUT * epsilon
    if step is None:
        step = grid_step(
            atoms, slope, min(slope, 1 / epsilon), 0.05 / slope, _STRATA_STEP_SHARE * tolerance
        )
    step = down(step, step_rungs(tolerance))
    orders, both = strata(atoms, epsilon, cut, step)
    windows = tuple(
        stratum_window(orders, moments, epsilon, delta, tolerance, step, laws.direction.steps)
        for moments in both
    )
    nodes, ranges = laws.grids(atoms, tops, 0.0, tolerance, step)
    return GridParameters(windows=windows, cut=cut, grids=nodes, lower_ranges=ranges)


def step_rungs(tolerance: float) -> int:
    """Return the rungs per octave of steps for a bracket of log δ that is ``tolerance`` wide."""
    return _STEP_RUNGS if tolerance < _COARSE_TOLERANCE else _COARSE_STEP_RUNGS


def grid_step(
    laws: tuple[tuple[Atoms, int], ...],
    order: float,
    tilt: float,
    max_step: float,
    tolerance: float,
) -> float:
    """Return the step at which log δ is bracketed to ``tolerance``, by the error law above.

    ``order`` is the slope of log δ, and ``tilt`` that with which the losses are weighted.
    """
    allowed = 2 * tolerance / (order * (order + 1))
    distances = []
    for atoms, count in laws:
        weights = atoms.tilted(tilt)
        distances.append((np.abs(atoms.losses - atoms.median(tilt)), count * weights))

    def variance(h: float) -> float:
        return sum(
            float(w @ (np.minimum(d * h, h * h / 6) + np.minimum(d * d, h * h / 12)))
            for d, w in distances
        )

    # It grows like a power between the first and the second of the step.
    step, power = max(max_step, 1e-24), 1.5
    result = variance(step)
    for _ in range(12):
        if result <= 0.0:
            break
        excess = math.log(result / allowed)
        if abs(excess) < 0.02 or (excess < 0.0 and step >= max_step):
            break
        other = min(max_step, step * math.exp(-excess / power))
        moved = variance(other)
        if moved > 0.0:
            power = min(2.0, max(0.9, math.log(result / moved) / math.log(step / other)))
        step, result = other, moved
    return step


def align_grid(
    atoms: Atoms,
    law: LossLaw,
    top: float,
    order: float,
    tolerance: float,
    step: float,
    may_join: bool,
) -> tuple[Grid, LowerRange]:
    """Return the grid of one release, and the range of its lower measure.

    ``law`` is the attained one and ``atoms`` are those of the dominating one, cut above ``top``.
    ``top`` and ``step`` are in nats, ``order`` is the tilt (1/nat) and ``tolerance`` the requested
    width of log δ per release.

    One node is anchored where most depends on it, slightly below the barycentre of its cell: in a
    first cell that includes a steep lower end of the law, else in a last cell that includes a steep
    upper end, else in the cell that holds the bulk.
    """
    floor, center = tilted_floor(atoms, order, 0.005 * tolerance), atoms.median(order)
    margin = 1e-3 * tolerance / (1.0 + order) + 1e-16
    first = _end_cell(law, floor, center + step, step, lower=True)
    last = None if first is not None else _end_cell(law, center - step, top, step, lower=False)
    anchor = first if first is not None else last
    joined = 0
    if anchor is None:
        anchor = _bulk_cell(law, center, step)
    elif first is not None:
        max_joined = _MAX_JOINED_CELLS if may_join else 0
        anchor, joined = _join_cells_above(law, first, step, margin, max_joined)
    anchor = _lower_to_barycentre(
        law, anchor - margin, step, first is not None, last is not None, joined
    )
    below = max(1, math.ceil((anchor - floor) / step) + 1)
    above = max(1, math.ceil((top - anchor) / step) + 1, joined + 1)
    upper = Grid(origin=anchor - below * step, step=step, size=below + above + 1)
    lower = LowerRange(
        first=below if first is not None else 0,
        last=below if first is None and last is not None else upper.size - 1,
        open_left=first is not None,
        open_right=last is not None,
        joined=joined,
    )
    return upper, lower


def _join_cells_above(
    law: LossLaw, anchor: float, step: float, margin: float, max_joined: int
) -> tuple[float, int]:
    """Return the barycentre of a first cell with cells above it joined, and their number.

    Where a law falls steeply within a step above its lower end, a cell there needs more of the
    curve above it than there is and would be lowered by a step. Joined to the first, such cells
    cost the lower bound only their variance.
    """
    for joined in range(max_joined):
        edges = anchor + step * (joined + np.array([0.5, 1.5]))
        p_tail, q_tail = law.tails(edges)
        p, q = float(p_tail[0] - p_tail[1]), float(q_tail[0] - q_tail[1])
        alpha = math.exp(anchor + step * (joined + 1))
        needed = alpha * q - p
        if p * step <= margin or needed <= 0.5 * float(p_tail[1] - alpha * q_tail[1]):
            return anchor, joined
        anchor = _barycentre_below(law, anchor, step * (joined + 1.5))
    return anchor, max_joined


def _barycentre_below(law: LossLaw, anchor: float, reach: float) -> float:
    """Return the barycentre of all losses below an edge ``reach`` above it, from ``anchor``."""
    for _ in range(20):
        p, q = law.tails(np.array([anchor + reach]))
        moved = float(np.log((1.0 - p[0]) / (1.0 - q[0])))
        done, anchor = abs(moved - anchor) <= 1e-3 * reach, moved
        if done:
            break
    return anchor


def _end_cell(law: LossLaw, low: float, high: float, step: float, *, lower: bool) -> float | None:
    """Return the barycentre of a cell that includes a steep end of the law, if there is one.

    The cell holds all losses beyond an edge half a step from their barycentre. A law that rises
    from nothing within a step, as at small sampling probabilities, would otherwise cost the lower
    bound the outer cells' mass times the distance to their nodes. Returns None if such a cell would
    hold little mass, that is, if the law tails off gently.
    """
    sign = 1.0 if lower else -1.0
    barycentre = None
    for _ in range(3):
        edges = np.linspace(low, high, 64)
        p, q = law.tails(edges)
        if lower:
            p, q = 1.0 - p, 1.0 - q
        holds = p >= 1e-4
        with np.errstate(divide="ignore", invalid="ignore"):
            reach = sign * (edges - np.log(p / q))
        # From the outside in, the first edge that holds mass and reaches past half a step.
        far = np.flatnonzero(holds & (reach >= step / 2))
        if far.size == 0:
            return barycentre
        index = int(far[0] if lower else far[-1])
        inner, outer = index, index - 1 if lower else index + 1
        if not 0 <= outer < edges.size:
            return barycentre
        if holds[outer]:
            barycentre = float(np.log(p[index] / q[index]))
        low, high = sorted((float(edges[inner]), float(edges[outer])))
    return barycentre


def _bulk_cell(law: LossLaw, center: float, step: float) -> float:
    """Return the barycentre of the cell that holds the bulk, by moving the cell to it."""
    for _ in range(3):
        p_tail, q_tail = law.tails(np.array([center - step / 2, center + step / 2]))
        p, q = float(p_tail[0] - p_tail[1]), float(q_tail[0] - q_tail[1])
        if not (p > 0 and q > 0):
            break
        center = math.log(p / q)
    return center


def _lower_to_barycentre(
    law: LossLaw, anchor: float, step: float, first: bool, last: bool, joined: int
) -> float:
    """Return ``anchor`` moved down until it is at or below the barycentre of its own cell.

    Above it, even by a rounding, it would cost the lower bound the cell's mass times the distance,
    which can exceed everything beyond the cell.
    """
    for _ in range(20):
        p_tail, q_tail = law.tails(np.array([anchor - step / 2, anchor + step * (joined + 0.5)]))
        lower_p, lower_q = (1.0, 1.0) if first else (float(p_tail[0]), float(q_tail[0]))
        upper_p, upper_q = (0.0, 0.0) if last else (float(p_tail[1]), float(q_tail[1]))
        p, q = lower_p - upper_p, lower_q - upper_q
        if not (p > 0 and q > 0) or not (first or last or p > 0.5):
            # A cell that holds little is one of many alike, and the loss is second order.
            break
        excess = anchor - math.log(p / q)
        if excess < -1e-15:
            break
        anchor -= 1.5 * excess + 1e-15 + 1e-15 * abs(anchor)
    return anchor
