"""One direction of a composition, bracketed to a tolerance.

``Steering`` picks, from the saddle, everything that only affects how tight the bracket
is: the tilt, where the rare large losses are cut off, the step, the window. The bracket
is then read from two ``ComposedTransform``s, one of upper and one of lower measures, so
nothing here can make it wrong.

The step follows from the error law. Moving the mass of a loss at distance d from the
nearest of two nodes onto both spreads it by d(h-d); over T releases at tilt λ such a
variance v raises log δ by T λ(λ+1) v / 2, hence ε by T (λ+1) v / 2. For a smooth law
v = h²/6 above and h²/12 below, and for one that sits within d << h of a node about
d h above and d² below: at small sampling probabilities nearly all of it does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy import fft

from affidavit.accountants.bracket import Bracket
from affidavit.accountants.fourier.directions import Direction
from affidavit.accountants.fourier.lattice import (
    Grid,
    LatticeMeasure,
    lower_measure,
    upper_measure,
)
from affidavit.accountants.fourier.losses import Atoms, LossLaw
from affidavit.accountants.fourier.saddle import (
    Saddle,
    at_delta,
    at_epsilon,
    tilted_floor,
    tilted_reach,
)
from affidavit.accountants.fourier.transform import ComposedTransform, Window
from affidavit.accountants.protocol import OutOfReach

MOST_POINTS = 1 << 23
"""Longest grid or transform; 64 MiB an array of doubles."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Steering:
    """Tilt, step, window and grids with which one direction is bracketed."""

    saddle: Saddle
    window: Window
    grids: tuple[Grid, ...]

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

    def cut(self, mass: float) -> tuple[tuple[tuple[Atoms, int], ...], tuple[float, ...]]:
        """Atoms below the losses that are exceeded with probability ``mass`` in all."""
        tops = tuple(law.top(mass / self.steps) for law, _ in self.direction.laws)
        kept = tuple(
            (atoms.cut(top), count) for (atoms, count), top in zip(self.atoms, tops, strict=True)
        )
        return kept, tops


def saddle_at_delta(laws: Laws, delta: float) -> Saddle:
    """The saddle near ``delta``, once the losses too rare to matter are cut off."""
    return at_delta(laws.cut(1e-5 * delta)[0], delta)


def saddle_at_epsilon(laws: Laws, epsilon: float) -> Saddle:
    """The saddle near ``epsilon``, once the losses too rare to matter are cut off."""
    guess = at_epsilon(laws.atoms, epsilon)
    delta = math.exp(max(-690.0, min(guess.log_delta, 0.0)))
    return at_epsilon(laws.cut(1e-5 * delta)[0], epsilon)


def steer(laws: Laws, saddle: Saddle, tolerance: float, step: float | None = None) -> Steering:
    """Choose grids for a bracket of log δ about ``tolerance`` wide, or of a given step."""
    order = saddle.order
    share = min(1e-4, 0.02 * tolerance)
    delta = math.exp(max(-650.0, min(saddle.log_delta, 0.0)))
    atoms, tops = laws.cut(share * delta)
    spread = math.sqrt(saddle.variance)
    if step is None:
        step = _step(atoms, saddle, 0.8 * tolerance)
    tail = math.log(1e-3 * min(0.1, tolerance) / (1 + order * spread))
    reach = tilted_reach(atoms, saddle, tail)
    window = Window(
        low=min(reach.low, saddle.epsilon - 0.01 * spread) - step,
        high=max(reach.high, saddle.epsilon + 0.01 * spread) + step,
        order=order,
        below=reach.below,
        above=reach.above,
    )
    grids = []
    for (release, _), (law, _), top in zip(laws.direction.laws, atoms, tops, strict=True):
        floor = tilted_floor(law, order, 0.01 * min(1.0, tolerance) / laws.steps / 2)
        center = _center(release, _median(law, order), step, tolerance / order / laws.steps)
        below = math.ceil((center - floor) / step) + 1
        above = math.ceil((top - center) / step) + 1
        grids.append(Grid(origin=center - below * step, step=step, size=below + above + 1))
    return Steering(saddle=saddle, window=window, grids=tuple(grids))


def _center(law: LossLaw, guess: float, step: float, tolerance: float) -> float:
    """A node a hair below the barycentre of the losses within half a step of it.

    At small sampling probabilities nearly all the mass sits in that one cell, and a node
    above the barycentre would cost the lower bound that mass times the distance.
    """
    center = guess
    for _ in range(3):
        tail = law.survival(np.array([center - step / 2, center + step / 2]))
        p, q = float(tail.p[0] - tail.p[1]), float(tail.q[0] - tail.q[1])
        if not (p > 0 and q > 0):
            return guess
        center = math.log(p / q)
    return center - 1e-3 * tolerance - 1e-15


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


def check_cost(steering: Steering) -> None:
    """Refuse a steering whose arrays would be too long."""
    if steering.points > MOST_POINTS:
        raise OutOfReach(
            f"needs a grid of {steering.points} points, at most {MOST_POINTS}",
            "ask for a wider bracket (relative_width) or use another accountant",
        )


def transforms(
    laws: Laws, steering: Steering, *, lower: bool = True
) -> tuple[ComposedTransform, ComposedTransform | None]:
    """The transforms of the upper and, unless told otherwise, of the lower measures."""
    check_cost(steering)
    pairs = list(zip(laws.direction.laws, steering.grids, strict=True))
    uppers: list[tuple[LatticeMeasure, int]] = [
        (upper_measure(law, grid), count) for (law, count), grid in pairs
    ]
    above = ComposedTransform(uppers, steering.window)
    if not lower:
        return above, None
    lowers = [(lower_measure(law, grid), count) for (law, count), grid in pairs]
    return above, ComposedTransform(lowers, steering.window)


def transform_length(steering: Steering) -> int:
    """Points of the transform that ``steering`` asks for."""
    step = steering.grids[0].step
    points = math.ceil((steering.window.high - steering.window.low) / step) + 2
    return int(fft.next_fast_len(max(32, points), real=True))


def epsilon_upper(transform: ComposedTransform, delta: float, start: float, order: float) -> float:
    """An ε at which the upper curve is at most ``delta``: the safe side of its root."""
    epsilon = max(0.0, start)
    value = transform.upper(epsilon)
    for _ in range(12):
        if value <= delta * (1 - 1e-12) and (value > delta * (1 - 1e-8) or epsilon == 0.0):
            return epsilon
        epsilon = max(0.0, epsilon + _newton(value, delta * (1 - 5e-9), order))
        value = transform.upper(epsilon)
    while value > delta:
        if not epsilon < 1e6:
            return math.inf
        epsilon += max(1e-7 / order, 1e-9 * epsilon, abs(_newton(value, delta, order)))
        value = transform.upper(epsilon)
    return epsilon


def epsilon_lower(transform: ComposedTransform, delta: float, start: float, order: float) -> float:
    """An ε at which the lower curve is at least ``delta``, 0 if there is none."""
    epsilon = max(0.0, start)
    value = transform.lower(epsilon)
    for _ in range(12):
        if delta <= value < delta * (1 + 1e-8):
            return epsilon
        moved = epsilon + _newton(value, delta * (1 + 5e-9), order)
        if moved <= 0.0 and epsilon == 0.0:
            return 0.0
        epsilon = max(0.0, moved)
        value = transform.lower(epsilon)
    for _ in range(60):
        if value >= delta or epsilon <= 0.0:
            break
        epsilon = max(0.0, epsilon - max(1e-7 / order, 1e-9 * epsilon))
        value = transform.lower(epsilon)
    return epsilon if value >= delta else 0.0


def _newton(value: float, target: float, order: float) -> float:
    """The step in ε that brings log δ from ``value`` to ``target`` at slope -λ."""
    if value <= 0.0:
        return -1.0 / order
    step = (math.log(value) - math.log(target)) / order
    return math.copysign(min(abs(step), 3.0 / order), step)


def bracket_epsilon(laws: Laws, delta: float, relative_width: float) -> Bracket:
    """The ε of one direction at ``delta``."""
    saddle = saddle_at_delta(laws, delta)
    target = max(relative_width * saddle.epsilon, 1e-6)
    step = None
    best = Bracket(lower=0.0, upper=math.inf)
    for _ in range(4):
        steering = steer(laws, saddle, min(0.5, target * saddle.order), step)
        above, below = transforms(laws, steering)
        assert below is not None
        upper = epsilon_upper(above, delta, saddle.epsilon, saddle.order)
        start = min(upper, max(0.0, saddle.epsilon)) if math.isinf(upper) else upper
        lower = epsilon_lower(below, delta, start, saddle.order)
        best = Bracket(lower=max(best.lower, lower), upper=min(best.upper, upper))
        wanted = max(relative_width * best.upper, 1e-6)
        if best.width <= wanted or not math.isfinite(upper):
            break
        step = steering.grids[0].step * max(0.3, 0.9 * math.sqrt(wanted / best.width))
    return best
