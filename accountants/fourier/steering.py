"""Tilt, cut, step, window and grids: what makes a bracket narrow, never what makes it true.

The step follows from the error law. Moving the mass of a loss at distance d from the
nearest of two nodes onto both spreads it by d(h-d); over T releases at tilt λ such a
variance v raises log δ by T λ(λ+1) v / 2, hence ε by T (λ+1) v / 2. For a smooth law
v = h²/6 above and h²/12 below, and for one that sits within d << h of a node about
d h above and d² below: at small sampling probabilities nearly all of it does.

One cut of the rare large losses serves the saddle and the grids alike: left in, they
would draw the tilt to themselves at small sampling probabilities.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy import fft

from affidavit.accountants.fourier.directions import Direction
from affidavit.accountants.fourier.lattice import Grid
from affidavit.accountants.fourier.losses import Atoms, LossLaw
from affidavit.accountants.fourier.saddle import (
    Saddle,
    at_delta,
    at_epsilon,
    tilted_floor,
    tilted_reach,
)
from affidavit.accountants.fourier.transform import Window, log_peak

_RARE = 1e-7
"""Losses exceeded with less than this share of δ in the whole run are cut off."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LowerGrid:
    """A grid for a lower measure, and the ends at which its outer cell is open."""

    grid: Grid
    open_left: bool
    open_right: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Steering:
    """Tilt, step, window and grids with which one direction is bracketed."""

    saddle: Saddle
    window: Window
    grids: tuple[Grid, ...]
    lower_grids: tuple[LowerGrid, ...]

    @property
    def points(self) -> int:
        """The longest of the grids and the transform."""
        step = self.grids[0].step
        window = math.ceil((self.window.high - self.window.low) / step)
        return max(window, *(grid.size for grid in self.grids))


@dataclass(frozen=True, kw_only=True, slots=True)
class Laws:
    """A direction with the atoms of its laws, computed once and used for all steering."""

    direction: Direction
    atoms: tuple[tuple[Atoms, int], ...]

    @classmethod
    def of(cls, direction: Direction) -> Laws:
        """The atoms of every law of ``direction``."""
        return cls(
            direction=direction,
            atoms=tuple((law.atoms(), count) for law, count in direction.laws),
        )

    @property
    def steps(self) -> int:
        """How many releases are composed."""
        return sum(count for _, count in self.atoms)

    def common(self, delta: float) -> tuple[tuple[Atoms, int], ...]:
        """The atoms without the losses too rare to matter at ``delta``."""
        return self.cut(_RARE * delta)[0]

    def cut(self, mass: float) -> tuple[tuple[tuple[Atoms, int], ...], tuple[float, ...]]:
        """Atoms below the losses that are exceeded with probability ``mass`` in all."""
        tops = tuple(law.top(mass / self.steps) for law, _ in self.direction.laws)
        kept = tuple(
            (atoms.cut(top), count) for (atoms, count), top in zip(self.atoms, tops, strict=True)
        )
        return kept, tops


def saddle_at_delta(laws: Laws, delta: float) -> Saddle:
    """The saddle near ``delta``, with the losses too rare to matter cut off."""
    return at_delta(laws.cut(_RARE * delta)[0], delta)


def saddle_at_epsilon(laws: Laws, epsilon: float) -> tuple[Saddle, float]:
    """The saddle near ``epsilon`` and its δ, with the losses too rare to matter cut off.

    What is too rare depends on δ, which starts as the saddle's own of the whole law.
    """
    delta = 1.0
    for _ in range(6):
        saddle = at_epsilon(laws.cut(_RARE * delta)[0], epsilon)
        before, delta = delta, math.exp(max(-650.0, min(saddle.log_delta, -1e-3)))
        if abs(math.log(delta / before)) < 1.0:
            break
    return saddle, delta


def steer(
    laws: Laws,
    saddle: Saddle,
    epsilon: float,
    delta: float,
    tolerance: float,
    step: float | None = None,
) -> Steering:
    """Choose grids for a bracket of log δ about ``tolerance`` wide, or of a given step.

    ``epsilon`` is where the curve will be read and ``delta`` about what it is there. The
    latter sets which losses are too rare to matter, and must be what the saddle was found
    with: another cut can move the tilted law by orders of magnitude.
    """
    order = saddle.order
    atoms, tops = laws.cut(_RARE * delta)
    spread = math.sqrt(saddle.variance)
    if step is None:
        step = _step(atoms, saddle, 0.8 * tolerance)
    # Mass outside the window enters δ at most e^{K - λε} max(g) times.
    scale = sum(count * law.log_moment(order) for law, count in atoms) - order * epsilon
    tail = math.log(1e-3 * min(0.1, tolerance) * delta) - scale - log_peak(order)
    reach = tilted_reach(atoms, saddle, tail)
    window = Window(
        low=min(reach.low, epsilon - 0.01 * spread) - step,
        high=max(reach.high, epsilon + 0.01 * spread) + step,
        order=order,
        below=reach.below,
        above=reach.above,
    )
    uppers, lowers = [], []
    for release, (law, _), top in zip(laws.direction.attained, atoms, tops, strict=True):
        floor = tilted_floor(law, order, 0.01 * min(1.0, tolerance) / laws.steps / 2)
        hair = 1e-3 * tolerance / order / laws.steps + 1e-16
        upper, lower = _grids(release, floor, _median(law, order), top, step, hair)
        uppers.append(upper)
        lowers.append(lower)
    return Steering(saddle=saddle, window=window, grids=tuple(uppers), lower_grids=tuple(lowers))


def _grids(
    law: LossLaw, floor: float, center: float, top: float, step: float, hair: float
) -> tuple[Grid, LowerGrid]:
    """Grids for the upper and the lower measure of one release, on common nodes.

    One node is anchored where most depends on it, a hair below the barycentre of its
    cell: in a first cell that takes in a steep lower end of the law, else in a last cell
    that takes in a steep upper end, else in the cell that holds the bulk.
    """
    first = _end_cell(law, floor, center + step, step, lower=True)
    last = None if first is not None else _end_cell(law, center - step, top, step, lower=False)
    anchor = first if first is not None else last
    if anchor is None:
        anchor = _bulk_cell(law, center, step)
    anchor = _settled(law, anchor - hair, step, first is not None, last is not None)
    below = max(1, math.ceil((anchor - floor) / step) + 1)
    above = max(1, math.ceil((top - anchor) / step) + 1)
    upper = Grid(origin=anchor - below * step, step=step, size=below + above + 1)
    if first is not None:
        grid = Grid(origin=anchor, step=step, size=above + 1)
    elif last is not None:
        grid = Grid(origin=upper.origin, step=step, size=below + 1)
    else:
        grid = upper
    return upper, LowerGrid(grid=grid, open_left=first is not None, open_right=last is not None)


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


def _settled(law: LossLaw, anchor: float, step: float, first: bool, last: bool) -> float:
    """``anchor`` moved down until it is at or below the barycentre of its own cell.

    Above it, even by a rounding, it would cost the lower bound the cell's mass times the
    distance, which can be all there is beyond the cell.
    """
    for _ in range(20):
        tail = law.survival(np.array([anchor - step / 2, anchor + step / 2]))
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


def _median(atoms: Atoms, order: float) -> float:
    cumulative = np.cumsum(atoms.tilted(order))
    return float(atoms.losses[int(np.searchsorted(cumulative, 0.5))])


def _step(laws: tuple[tuple[Atoms, int], ...], saddle: Saddle, tolerance: float) -> float:
    """The step at which log δ is bracketed to ``tolerance``, by the error law above."""
    order = saddle.order
    allowed = 2 * tolerance / (order * (order + 1))
    distances = []
    for atoms, count in laws:
        weights = atoms.tilted(order)
        distances.append((np.abs(atoms.losses - _median(atoms, order)), count * weights))
    widest = 0.2 * math.sqrt(saddle.variance + 1e-300)
    low, high = -60.0, math.log(widest)
    for _ in range(30):
        middle = (low + high) / 2
        h = math.exp(middle)
        variance = sum(
            float(w @ (np.minimum(d * h, h * h / 6) + np.minimum(d * d, h * h / 12)))
            for d, w in distances
        )
        low, high = (low, middle) if variance > allowed else (middle, high)
    return math.exp(low)


def transform_length(steering: Steering) -> int:
    """Points of the transform that ``steering`` asks for."""
    step = steering.grids[0].step
    points = math.ceil((steering.window.high - steering.window.low) / step) + 2
    return int(fft.next_fast_len(max(32, points), real=True))
