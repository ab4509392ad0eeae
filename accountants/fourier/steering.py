"""Tilt, cut, step, window and grids: what makes a bracket narrow, never what makes it true.

The step follows from the error law. Moving the mass of a loss at distance d from the
nearest of two nodes onto both spreads it by d(h-d); over T releases at tilt λ such a
variance v raises log δ by T λ(λ+1) v / 2, hence ε by T (λ+1) v / 2. For a smooth law
v = h²/6 above and h²/12 below, and for one that sits within d << h of a node about
d h above and d² below: at small sampling probabilities nearly all of it does.

One cut of the rare large losses serves the saddle and the grids alike: left in, they
would draw the tilt to themselves at small sampling probabilities.

Reference: ``docs/theorems/fourier-lattice.md``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from affidavit.accountants.fourier.directions import Direction
from affidavit.accountants.fourier.grids import grids
from affidavit.accountants.fourier.lattice import Grid, LowerRange
from affidavit.accountants.fourier.losses import Atoms
from affidavit.accountants.fourier.saddle import (
    Saddle,
    at_delta,
    at_epsilon,
    tilted_reach,
)
from affidavit.accountants.fourier.spectrum import fast_length
from affidavit.accountants.fourier.strata import CUT, strata, window_of
from affidavit.accountants.fourier.transform import Window, log_peak, window_points

_RARE = 1e-7
"""Losses exceeded with less than this share of δ in the whole run are cut off."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """Half cells whose masses are computed, and points that are transformed."""

    cells: int = 0
    frequencies: int = 0

    def __add__(self, other: Work) -> Work:
        return Work(
            cells=self.cells + other.cells, frequencies=self.frequencies + other.frequencies
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Steering:
    """Tilt, step, window and grids with which one direction is bracketed; ``cut`` in nats."""

    saddle: Saddle
    windows: tuple[Window, ...]
    cut: float | None
    grids: tuple[Grid, ...]
    lower_ranges: tuple[LowerRange, ...]

    @property
    def step(self) -> float:
        """The distance of the nodes in nats, one for all grids."""
        return self.grids[0].step

    def work(self, *, lower: bool = True) -> Work:
        """What ``transforms`` computes for this steering."""
        lengths = [fast_length(window_points(window, self.step)) for window in self.windows]
        # The stratum with a rare loss transforms both parts of every law.
        once = sum((1 + index) * length for index, length in enumerate(lengths))
        frequencies = (2 if lower else 1) * len(self.grids) * once
        return Work(cells=2 * sum(grid.size for grid in self.grids), frequencies=frequencies)

    @property
    def points(self) -> int:
        """Points of the longest of the grids and the transforms."""
        lengths = [window_points(window, self.step) for window in self.windows]
        return max(*lengths, *(grid.size for grid in self.grids))


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

    @property
    def gapped(self) -> bool:
        """Whether no pair of data sets attains some dominating law, so that brackets stay wide."""
        releases = zip(self.direction.laws, self.direction.attained, strict=True)
        return any(law != attained for (law, _), attained in releases)

    def common(self, delta: float) -> tuple[tuple[Atoms, int], ...]:
        """The atoms without the losses too rare to matter at ``delta``."""
        return self.cut(_RARE * delta)[0]

    def cut(self, mass: float) -> tuple[tuple[tuple[Atoms, int], ...], tuple[float, ...]]:
        """Atoms below the losses exceeded with probability ``mass`` in all, and these (nats)."""
        tops = tuple(law.top(mass / self.steps) for law, _ in self.direction.laws)
        kept = tuple(
            (atoms.cut(top), count) for (atoms, count), top in zip(self.atoms, tops, strict=True)
        )
        return kept, tops


def saddle_at_delta(laws: Laws, delta: float) -> Saddle:
    """The saddle near ``delta``, with the losses too rare to matter cut off."""
    return at_delta(laws.cut(_RARE * delta)[0], delta)


def saddle_at_epsilon(laws: Laws, epsilon: float) -> tuple[Saddle, float]:
    """The saddle near ``epsilon`` (nats) and its δ, with the losses too rare to matter cut off.

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
    """Choose grids for a bracket of log δ about ``tolerance`` wide, or of a given step (nats).

    ``epsilon`` is where the curve will be read and ``delta`` about what it is there. The
    latter sets which losses are too rare to matter, and must be what the saddle was found
    with: another cut can move the tilted law by orders of magnitude.
    """
    order = saddle.order
    atoms, tops = laws.cut(_RARE * delta)
    spread = math.sqrt(saddle.variance)
    if step is None:
        step = _step(atoms, order, order, 0.2 * spread, 0.8 * tolerance)
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
    nodes, ranges = grids(
        laws.direction.attained, atoms, tops, order, tolerance, step, gapped=laws.gapped
    )
    return Steering(saddle=saddle, windows=(window,), cut=None, grids=nodes, lower_ranges=ranges)


def steer_in_strata(
    laws: Laws,
    saddle: Saddle,
    epsilon: float,
    delta: float,
    tolerance: float,
    slope: float,
    step: float | None = None,
) -> Steering:
    """The same in two strata, for a curve whose log falls by ``slope`` a nat of ε there."""
    atoms, tops = laws.cut(1e-3 * min(0.1, tolerance) * delta)
    cut = CUT * epsilon
    if step is None:
        step = _step(atoms, slope, min(slope, 1 / epsilon), 0.05 / slope, 0.6 * tolerance)
    both = strata(atoms, epsilon, cut, step)
    windows = tuple(
        window_of(stratum, epsilon, delta, tolerance, step, laws.steps) for stratum in both
    )
    nodes, ranges = grids(
        laws.direction.attained, atoms, tops, 0.0, tolerance, step, gapped=laws.gapped
    )
    return Steering(saddle=saddle, windows=windows, cut=cut, grids=nodes, lower_ranges=ranges)


def _step(
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
    found = variance(step)
    for _ in range(12):
        if found <= 0.0:
            break
        excess = math.log(found / allowed)
        if abs(excess) < 0.02 or (excess < 0.0 and step >= widest):
            break
        other = min(widest, step * math.exp(-excess / power))
        moved = variance(other)
        if moved > 0.0:
            power = min(2.0, max(0.9, math.log(found / moved) / math.log(step / other)))
        step, found = other, moved
    return step
