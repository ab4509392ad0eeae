"""Tilt, cut, step, window and grids: what makes a bracket narrow, never what makes it true.

The step follows from the error law. Moving the mass of a loss at distance d from the
nearest of two nodes onto both spreads it by d(h-d); over T releases at tilt λ such a
variance v raises log δ by T λ(λ+1) v / 2, hence ε by T (λ+1) v / 2. For a smooth law
v = h²/6 above and h²/12 below, and for one that sits within d << h of a node about
d h above and d² below: at small sampling probabilities nearly all of it does.

One cut of the rare large losses serves the saddle and the grids alike: left in, they
would draw the tilt to themselves at small sampling probabilities.

Tilts, cuts, steps and shares of the tolerance are rounded to ladders (``cache.py``), so that
plans of the same releases that differ in δ or in how often they run share most measures.

Reference: ``docs/theorems/fourier-lattice.md``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from affidavit.accountants.fourier.cache import MAX_BYTES, SMALL, SharedCache, down, nearest
from affidavit.accountants.fourier.discretized_pld import Grid, LowerRange
from affidavit.accountants.fourier.dominating_pairs import Direction
from affidavit.accountants.fourier.privacy_loss import Atoms, LossLaw
from affidavit.accountants.fourier.tilting import (
    CUT,
    Composition,
    Saddle,
    Window,
    at_delta,
    at_epsilon,
    at_order,
    strata,
    tilted_floor,
    tilted_window,
    window_of,
    window_points,
)

_RARE = 1e-7
"""Losses exceeded with less than this share of δ in the whole run are cut off."""
_TILTS, _STEPS, _RARES, _SHARES = 8, 4, 0.1, 0.25
"""Rungs an octave of the ladders of tilts, of steps, of shares of δ and of tolerance."""
_ROUGH, _ROUGH_STEPS, _ROUGH_TILTS = 0.05, 2, 1
"""From this tolerance of log δ on, as when ε is located, and for what only steers a grid, the
ladders have fewer rungs."""
_SPENT, _SPENT_IN_STRATA = 0.75, 0.56
"""Shares of the tolerance that a step may cost before it is moved down to its ladder."""


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
        """Points of the longest of the grids and the transforms."""
        lengths = [window_points(window, self.step) for window in self.windows]
        return max(*lengths, *(grid.size for grid in self.grids))


@dataclass(frozen=True, kw_only=True, slots=True)
class Laws:
    """A direction with the atoms of its laws, and what is ``shared`` with others of these laws."""

    direction: Direction
    atoms: tuple[tuple[Atoms, int], ...]
    shared: SharedCache = field(
        default_factory=partial(SharedCache, MAX_BYTES), repr=False, compare=False
    )

    @classmethod
    def of(cls, direction: Direction, shared: SharedCache | None = None) -> Laws:
        """The atoms of every law of ``direction``, which ``shared`` may hold."""
        stored = SharedCache(MAX_BYTES) if shared is None else shared
        return cls(
            direction=direction,
            atoms=tuple(
                (stored.get(("atoms", law), law.atoms, _bytes), count)
                for law, count in direction.laws
            ),
            shared=stored,
        )

    def common(self, delta: float) -> tuple[tuple[Atoms, int], ...]:
        """The atoms without the losses too rare to matter at ``delta``."""
        return self.cut(_RARE * delta)[0]

    def cut(self, mass: float) -> tuple[tuple[tuple[Atoms, int], ...], tuple[float, ...]]:
        """Atoms below the losses exceeded with probability ``mass`` in all, and these (nats)."""
        rare = down(mass / self.direction.steps, _RARES)
        cuts = [
            self.shared.get(
                ("cut", law, rare),
                partial(_cut, law, atoms, rare),
                lambda cuts: _bytes(cuts[0]),
            )
            for (law, _), (atoms, _) in zip(self.direction.laws, self.atoms, strict=True)
        ]
        stored = zip(cuts, self.atoms, strict=True)
        return (
            tuple((atoms, count) for (atoms, _), (_, count) in stored),
            tuple(top for _, top in cuts),
        )

    def grids(
        self,
        atoms: Composition,
        tops: Sequence[float],
        order: float,
        tolerance: float,
        step: float,
    ) -> tuple[tuple[Grid, ...], tuple[LowerRange, ...]]:
        """Grids of one ``step`` for every release, and what their lower measures use of them.

        ``atoms`` are the laws cut above ``tops`` (nats, as ``step``), ``order`` is the tilt
        (1/nat) and ``tolerance`` the width wanted of log δ. Laws that leave a gap of their own
        would not get a narrower bracket from joined cells, only a looser upper end.
        """
        share = down(tolerance / self.direction.steps, _SHARES)
        order = down(order, _ROUGH_TILTS) if order else 0.0
        result = []
        for (law, _), attained, (stored, _), top in zip(
            self.direction.laws, self.direction.attained, atoms, tops, strict=True
        ):
            requested = attained, top, order, share, step, not self.direction.gapped
            created = partial(grids_of, stored, *requested)
            result.append(self.shared.get(("grids", law, *requested), created, lambda _: SMALL))
        return tuple(upper for upper, _ in result), tuple(lower for _, lower in result)


def saddle_at_delta(laws: Laws, delta: float) -> Saddle:
    """The saddle near ``delta``, with the losses too rare to matter cut off."""
    question = "saddle", laws.direction, delta
    return laws.shared.get(question, lambda: at_delta(laws.common(delta), delta), lambda _: SMALL)


def saddle_at_epsilon(laws: Laws, epsilon: float, about: float = 1.0) -> tuple[Saddle, float]:
    """The saddle near ``epsilon`` (nats) and its δ, with the losses too rare to matter cut off.

    What is too rare depends on δ, which starts as ``about``.
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

    ``epsilon`` is where the curve will be read and ``delta`` about what it is there. The
    latter sets which losses are too rare to matter, and must be what the saddle was found
    with: another cut can move the tilted law by orders of magnitude.
    """
    atoms, tops = laws.cut(_RARE * delta)
    order = nearest(saddle.order, _TILTS)
    saddle = at_order(atoms, order)
    spread = math.sqrt(saddle.variance)
    if step is None:
        step = grid_step(atoms, order, order, 0.2 * spread, _SPENT * tolerance)
    step = down(step, rungs(tolerance))
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
    """The same in two strata, for a curve whose log falls by ``slope`` a nat of ε there."""
    atoms, tops = laws.cut(1e-3 * min(0.1, tolerance) * delta)
    cut = CUT * epsilon
    if step is None:
        step = grid_step(
            atoms, slope, min(slope, 1 / epsilon), 0.05 / slope, _SPENT_IN_STRATA * tolerance
        )
    step = down(step, rungs(tolerance))
    both = strata(atoms, epsilon, cut, step)
    windows = tuple(
        window_of(stratum, epsilon, delta, tolerance, step, laws.direction.steps)
        for stratum in both
    )
    nodes, ranges = laws.grids(atoms, tops, 0.0, tolerance, step)
    return GridParameters(windows=windows, cut=cut, grids=nodes, lower_ranges=ranges)


def rungs(tolerance: float) -> int:
    """Of the ladder of steps, an octave, for a bracket of log δ that is ``tolerance`` wide."""
    return _STEPS if tolerance < _ROUGH else _ROUGH_STEPS


def grid_step(
    laws: tuple[tuple[Atoms, int], ...],
    order: float,
    tilt: float,
    widest: float,
    tolerance: float,
) -> float:
    """The step at which log δ is bracketed to ``tolerance``, by the error law above.

    ``order`` is the slope of log δ and ``tilt`` that under which the losses are weighed.
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
    step, power = max(widest, 1e-24), 1.5
    result = variance(step)
    for _ in range(12):
        if result <= 0.0:
            break
        excess = math.log(result / allowed)
        if abs(excess) < 0.02 or (excess < 0.0 and step >= widest):
            break
        other = min(widest, step * math.exp(-excess / power))
        moved = variance(other)
        if moved > 0.0:
            power = min(2.0, max(0.9, math.log(result / moved) / math.log(step / other)))
        step, result = other, moved
    return step


def _cut(law: LossLaw, atoms: Atoms, rare: float) -> tuple[Atoms, float]:
    """The law's atoms up to the loss exceeded with probability ``rare``, and that loss (nats)."""
    top = law.top(rare)
    return atoms.cut(top), top


def _bytes(atoms: Atoms) -> int:
    return atoms.losses.nbytes + atoms.weights.nbytes


_MAX_JOINED = 16
"""Most cells that may join the first; beyond them next to nothing is left."""


def grids_of(
    atoms: Atoms,
    law: LossLaw,
    top: float,
    order: float,
    tolerance: float,
    step: float,
    joining: bool,
) -> tuple[Grid, LowerRange]:
    """Grids for the upper and the lower measure of one release, on common nodes.

    ``law`` is the attained one and ``atoms`` those of the dominating one, cut above ``top``;
    ``top`` and ``step`` are in nats, ``order`` is the tilt (1/nat) and ``tolerance`` the width
    wanted of log δ, a release. Cells may be joined to the first only where ``joining``.

    One node is anchored where most depends on it, a hair below the barycentre of its
    cell: in a first cell that takes in a steep lower end of the law, else in a last cell
    that takes in a steep upper end, else in the cell that holds the bulk.
    """
    floor, center = tilted_floor(atoms, order, 0.005 * tolerance), atoms.median(order)
    hair, most = 1e-3 * tolerance / (1.0 + order) + 1e-16, _MAX_JOINED if joining else 0
    first = _end_cell(law, floor, center + step, step, lower=True)
    last = None if first is not None else _end_cell(law, center - step, top, step, lower=False)
    anchor = first if first is not None else last
    joined = 0
    if anchor is None:
        anchor = _bulk_cell(law, center, step)
    elif first is not None:
        anchor, joined = _merge_negative_mass(law, first, step, hair, most)
    anchor = _settled(law, anchor - hair, step, first is not None, last is not None, joined)
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


def _merge_negative_mass(
    law: LossLaw, anchor: float, step: float, hair: float, most: int
) -> tuple[float, int]:
    """The barycentre of a first cell that takes in the cells above that could not pay.

    Where a law falls steeply within a step above its lower end, a cell there needs more of
    the curve above it than there is and would be lowered by a step; together with the first
    they cost the lower bound their variance only. With it, how many these are.
    """
    for joined in range(most):
        edges = anchor + step * (joined + np.array([0.5, 1.5]))
        tail = law.survival(edges)
        p, q = float(tail.p[0] - tail.p[1]), float(tail.q[0] - tail.q[1])
        alpha = math.exp(anchor + step * (joined + 1))
        owed = alpha * q - p
        if p * step <= hair or owed <= 0.5 * float(tail.p[1] - alpha * tail.q[1]):
            return anchor, joined
        anchor = _barycentre_below(law, anchor, step * (joined + 1.5))
    return anchor, most


def _barycentre_below(law: LossLaw, anchor: float, reach: float) -> float:
    """The barycentre of all losses below an edge ``reach`` above it, found from ``anchor``."""
    for _ in range(20):
        tail = law.survival(np.array([anchor + reach]))
        moved = float(np.log((1.0 - tail.p[0]) / (1.0 - tail.q[0])))
        result, anchor = abs(moved - anchor) <= 1e-3 * reach, moved
        if result:
            break
    return anchor


def _end_cell(law: LossLaw, low: float, high: float, step: float, *, lower: bool) -> float | None:
    """The barycentre of a cell that takes in a steep end of the law, if there is one.

    All losses beyond an edge half a step from their barycentre. A law that rises from
    nothing within a step, as at small sampling probabilities, would otherwise cost the
    lower bound the outer cells' mass times the distance to their nodes. None where such a
    cell would hold little mass, that is, where the law tails off gently.
    """
    sign = 1.0 if lower else -1.0
    barycentre = None
    for _ in range(3):
        edges = np.linspace(low, high, 64)
        tail = law.survival(edges)
        p, q = (1.0 - tail.p, 1.0 - tail.q) if lower else (tail.p, tail.q)
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
    """The barycentre of the cell that holds the bulk, found by letting the cell follow it."""
    for _ in range(3):
        tail = law.survival(np.array([center - step / 2, center + step / 2]))
        p, q = float(tail.p[0] - tail.p[1]), float(tail.q[0] - tail.q[1])
        if not (p > 0 and q > 0):
            break
        center = math.log(p / q)
    return center


def _settled(
    law: LossLaw, anchor: float, step: float, first: bool, last: bool, joined: int
) -> float:
    """``anchor`` moved down until it is at or below the barycentre of its own cell.

    Above it, even by a rounding, it would cost the lower bound the cell's mass times the
    distance, which can be all there is beyond the cell.
    """
    for _ in range(20):
        tail = law.survival(np.array([anchor - step / 2, anchor + step * (joined + 0.5)]))
        lower_p, lower_q = (1.0, 1.0) if first else (float(tail.p[0]), float(tail.q[0]))
        upper_p, upper_q = (0.0, 0.0) if last else (float(tail.p[1]), float(tail.q[1]))
        p, q = lower_p - upper_p, lower_q - upper_q
        if not (p > 0 and q > 0) or not (first or last or p > 0.5):
            # A cell that holds little is one of many alike, and the loss is second order.
            break
        excess = anchor - math.log(p / q)
        if excess < -1e-15:
            break
        anchor -= 1.5 * excess + 1e-15 + 1e-15 * abs(anchor)
    return anchor
