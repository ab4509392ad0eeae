"""Lots of fixed size: an upper bound for an adversary who chooses the data anew at each step.

``WorseOfBothLaw`` has the larger of two curves at every α, which no single pair of data sets has,
and composing it concedes that at every step. Here the adversary, who knows the loss so far, makes
the choice: with ``G_t`` the largest curve of t steps,

    G_{t+1}(α) = max over the data of ∫ p(x) G_t(α q(x) / p(x)) dx,

which bounds every adaptive run and is attained by one. The data of one step are three points of a
ball: the record, its replacement, and the record that it displaces. Finitely many curves bound them
all (``_triangles``), so that a step is a maximum of convolutions.

A run is cut into blocks of at most ``MAX_STEPS`` steps, whose largest curve is a measure to be
composed. So the run's curve is at most the composition of the blocks.

Everything is on one lattice, tilted by e^{λ·loss} as in ``composed_transform.py``. The
errors bounded here are:

* that of a transform, by ``transform_rounding``, is added to every value of a curve;
* the measure of a step is the second difference of its curve, with any rounding. Its own curve is
  then compared with the step's, and raised where it is lower;
* losses above the lattice are infinite, and losses below it are raised to its first node.

Proof: docs/theorems/without-replacement.md.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import itemgetter

import numpy as np
import scipy  # loads scipy.fft only where a transform is taken
from scipy.special import ndtr

from affidavit.accountants.bracket import Bracket
from affidavit.accountants.fourier.cache import SharedCache, down
from affidavit.accountants.fourier.composed_delta import ComposedTransform
from affidavit.accountants.fourier.composed_transform import Complex
from affidavit.accountants.fourier.discretized_pld import (
    Grid,
    LatticeMeasure,
    upper_measure,
)
from affidavit.accountants.fourier.dominating_pairs import Direction
from affidavit.accountants.fourier.evaluation import check_cost, crossing
from affidavit.accountants.fourier.grid_parameters import (
    GridParameters,
    Laws,
    choose_grid,
    saddle_at_delta,
    saddle_at_epsilon,
)
from affidavit.accountants.fourier.loss_laws import NormalMixtureLaw, WorseOfBothLaw
from affidavit.accountants.fourier.privacy_loss import UNIT_ROUNDOFF, Array, Atoms, LossLaw
from affidavit.accountants.fourier.tilting import Saddle
from affidavit.accountants.protocol import OutOfReach, require_delta, require_epsilon
from affidavit.accountants.rounding import norm, transform_rounding

MAX_STEPS = 256
"""Steps of one block. Its work grows with its steps, and the loss falls like their root."""
_MAX_NODES = 1 << 14
_EPSILON_TOLERANCE = 2e-3
"""Share of ε that the lattice may cost."""
_MAX_MASS_BELOW, _NEGLIGIBLE_DELTA_SHARE = 1e-5, 1e-3
"""Share of the tilted mass below the lattice, and of δ above it."""
_DELTA_RUNGS = 0.1
"""Rungs per octave of the ladder of δ, so that similar δ share blocks."""
_TAIL_ORDERS = 2.0 ** np.arange(-6, 10, 0.5)
"""Tilts (1/nat) of which the best bounds the losses above the lattice."""
_MAX_EXPONENT = 600.0
_TILT_ERROR = 1e-12
"""Bounds the relative error of tilting and weighting with exponents up to ``_MAX_EXPONENT``."""
_MAX_PLACE, _BISECTIONS = 60.0, 42
"""Standard deviations of the noise within which a place is found, and steps of the search."""

_ANGLES = (0.0, 0.06, 0.15, 0.3, 0.5, 0.7, math.pi / 4)
"""Radians up to half of a right angle, where cells of ``_triangles`` end; the rest mirrors it."""


def _triangles() -> tuple[tuple[float, float, float], ...]:
    """Return sides that bound those of every triangle in a cell, in radii of the ball.

    The sides lead from the record to its replacement, from the record to the displaced one, and
    from that to the replacement. They are opposite to the angles A, B and C of a triangle inscribed
    in a great circle, none of which exceeds a right one: the sides of any three points of the ball
    are at most those of one of these. In a cell π/2 - B and C lie between two of ``_ANGLES``.
    """
    ends = [*_ANGLES, *(math.pi / 2 - angle for angle in _ANGLES[-2::-1])]
    cells = list(itertools.pairwise(ends))
    return tuple(
        (
            2 * math.cos(max(third[0] - second[1], 0.0)),
            2 * math.cos(second[0]),
            2 * math.sin(third[1]),
        )
        for i, second in enumerate(cells)
        for third in cells[i:]
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Displacement:
    """Records in a lot with ``probability``, which move its sum within a ball of ``radius``.

    The radius is in standard deviations of the noise.
    """

    probability: float
    radius: float

    def curves(self, alphas: int, step: float) -> Array:
        """Return curves at e^(k · step) that bound those of all data.

        k goes from 1 - ``alphas`` to ``alphas`` - 1, and the shape is (m, 2 · alphas - 1). Some
        average of the m is nowhere below the curve of any data.
        """
        losses = step * np.arange(alphas, dtype=np.float64)
        halves: dict[tuple[float, float], Array] = {}

        def half(first: float, second: float) -> Array:
            sides = first, second
            if sides not in halves:
                halves[sides] = self._half(first * self.radius, second * self.radius, losses)
            return halves[sides]

        rows = np.array([_joined(half(a, b), half(a, c), losses) for a, b, c in _triangles()])
        return rows[_undominated(rows)] * (1 + 4 * UNIT_ROUNDOFF)

    def _half(self, replaced: float, displaced: float, losses: Array) -> Array:
        """Return the largest curve at losses >= 0 of centres this far from the record's at most.

        All are then on one line: the record at 0, the others at their distances below it (Kahane's
        inequality, as in ``poisson-replace-one.md``).
        """
        q = self.probability
        factor, rise = np.exp(losses), np.expm1(losses)
        with np.errstate(divide="ignore"):
            log_rise = np.log(rise * ((1 - q) / q))
        low, high = np.full(losses.size, -_MAX_PLACE), np.full(losses.size, _MAX_PLACE)
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            against = np.logaddexp(
                log_rise - displaced * (middle + displaced / 2),
                losses - replaced * (middle + replaced / 2),
            )
            more = against > 0
            low, high = np.where(more, middle, low), np.where(more, high, middle)
        own = q * ndtr(-high)
        value = own - rise * (1 - q) * ndtr(-high - displaced) - factor * q * ndtr(-high - replaced)
        # Each term is at most the first, and its argument is rounded. The distance from the best
        # place costs only its square.
        size = np.abs(high) + max(replaced, displaced) + 1
        error = UNIT_ROUNDOFF * (64.0 + 12.0 * size * size + 8.0 * losses) * own
        return np.asarray(np.maximum(value, 0.0) + error)


def _joined(above: Array, below: Array, losses: Array) -> Array:
    """Return the curve of ``above`` at e^losses, and of ``below``, the other order, at e^-losses.

    All have shape (n,), the curve (2n - 1,).
    """
    mirrored = -np.expm1(-losses[:0:-1]) + np.exp(-losses[:0:-1]) * below[:0:-1]
    return np.concatenate((mirrored, above))


def _undominated(rows: Array) -> list[int]:
    """Return indices of ``rows`` (m, n) that no other row dominates, of equal rows the first."""
    result: list[int] = []
    for index in sorted(range(len(rows)), key=lambda i: -float(rows[i].sum())):
        if not any((rows[other] >= rows[index]).all() for other in result):
            result.append(index)
    return result


def displacement(law: LossLaw) -> Displacement | None:
    """Return the displacement under ``law``, if one record displaces another in it."""
    match law:
        case WorseOfBothLaw(remove=NormalMixtureLaw() as pair):
            return Displacement(probability=pair.sampling_probability, radius=pair.mu / 2)
        case _:
            return None


@dataclass(frozen=True, kw_only=True, slots=True)
class AdaptiveCurve:
    """Upper ends of a run in which records displace others.

    ``direction`` has the dominating laws. The adversary chooses in the law at ``place``, whose
    displacement is ``release``.
    """

    direction: Direction
    place: int
    release: Displacement
    cache: SharedCache = field(default_factory=SharedCache, repr=False, compare=False)

    @classmethod
    def of(cls, directions: tuple[Direction, ...], cache: SharedCache) -> AdaptiveCurve | None:
        """Return the curve if it bounds the run and the adversary chooses more than once.

        The chosen law is that of the most steps in which one record displaces another.
        """
        if len(directions) != 1 or directions[0].conceded:
            return None
        steps = [
            (count, place, release)
            for place, (law, count) in enumerate(directions[0].laws)
            if count > 1 and (release := displacement(law)) is not None
        ]
        if not steps:
            return None
        _, place, release = max(steps, key=itemgetter(0))
        return cls(direction=directions[0], place=place, release=release, cache=cache)

    def epsilon(self, delta: float) -> Bracket:
        """Return ``[0, ε]`` (nats) at ``delta``; raises ``OutOfReach`` for too long a lattice."""
        require_delta(delta)
        saddle = saddle_at_delta(Laws.of(self.direction.one_sided[1], self.cache), delta)
        epsilon = max(saddle.epsilon, 0.0)
        curve = self._composed(saddle, epsilon, delta)
        accuracy = 0.1 * _EPSILON_TOLERANCE * max(epsilon, 1e-3)
        _, upper = crossing(curve.upper, delta, epsilon, 10 * accuracy, accuracy)
        return Bracket(lower=0.0, upper=upper)

    def delta(self, epsilon: float) -> Bracket:
        """Return ``[0, δ]`` at ``epsilon`` (nats); raises as ``epsilon`` does."""
        require_epsilon(epsilon)
        saddle, guess = saddle_at_epsilon(Laws.of(self.direction.one_sided[1], self.cache), epsilon)
        curve = self._composed(saddle, epsilon, guess)
        return Bracket(lower=0.0, upper=curve.upper(epsilon))

    def _composed(self, saddle: Saddle, epsilon: float, delta: float) -> ComposedTransform:
        laws = Laws.of(self.direction, self.cache)
        tolerance = _EPSILON_TOLERANCE * max(epsilon, 1e-3) * saddle.order
        parameters = choose_grid(laws, saddle, epsilon, delta, min(0.5, tolerance))
        check_cost(parameters)
        parts = self._blocks(laws.atoms[self.place], parameters, delta)
        for place, (law, count) in enumerate(self.direction.laws):
            if place != self.place:
                grid = parameters.grids[place]
                parts.append((upper_measure(grid.cells(law), grid), count))
        return ComposedTransform(parts, parameters.windows[0])

    def _blocks(
        self,
        release_atoms: tuple[Atoms, int],
        parameters: GridParameters,
        delta: float,
    ) -> list[tuple[LatticeMeasure, int]]:
        atoms, count = release_atoms
        blocks = -(-count // MAX_STEPS)
        steps, longer = divmod(count, blocks)
        lengths = {steps: blocks - longer, steps + 1: longer}
        max_steps = steps + bool(longer)
        block = Block.of(
            atoms, self.release, parameters, max_steps, down(delta / blocks, _DELTA_RUNGS)
        )

        def measures() -> list[tuple[LatticeMeasure, int]]:
            return [
                (measure, lengths[step])
                for step, measure in enumerate(block.measures(max_steps), 1)
                if lengths.get(step)
            ]

        return self.cache.get((block, count), measures, lambda _: 16 * block.size)


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """The lattice of one block of steps, each of which is a ``release``.

    Losses are ``step`` · (``first`` + i) for 0 <= i < ``size``, in nats, and ``order`` is the tilt.
    Losses of a step that are exceeded with at most the probability ``rare`` are infinite.
    """

    rare: float
    first: int
    size: int
    step: float
    order: float
    release: Displacement

    @classmethod
    def of(
        cls,
        atoms: Atoms,
        release: Displacement,
        parameters: GridParameters,
        steps: int,
        delta: float,
    ) -> Block:
        """Return a lattice for ``steps`` steps; raises ``OutOfReach`` if it is too long.

        ``atoms`` are those of a law that dominates ``release``, and ``delta`` is about the share of
        δ of the block.
        """
        order, step = parameters.windows[0].order, parameters.step
        high = (
            steps * atoms.log_moments(_TAIL_ORDERS) - math.log(_NEGLIGIBLE_DELTA_SHARE * delta)
        ) / _TAIL_ORDERS
        low = (math.log(_MAX_MASS_BELOW) - math.log(steps)) / order
        first, last = math.floor(low / step), math.ceil(float(high.min()) / step)
        # The curve is not raised in the last eighth (``measures``).
        size = math.ceil((last - first + 1) * 8 / 7)
        if size > _MAX_NODES or max(order, 1.0) * step * size > _MAX_EXPONENT:
            raise OutOfReach(
                f"needs {size} nodes a step, at most {_MAX_NODES}.", "Use another accountant."
            )
        rare = _NEGLIGIBLE_DELTA_SHARE * delta / steps
        return cls(rare=rare, first=first, size=size, step=step, order=order, release=release)

    def measures(self, steps: int) -> Iterator[LatticeMeasure]:
        """Yield the measures whose curves are at least the largest of 1, 2, ... ``steps`` steps."""
        length = scipy.fft.next_fast_len(2 * self.size, real=True)
        offsets = self.step * np.arange(1 - self.size, self.size)
        tilts = np.exp(self.order * offsets)
        rows = self.release.curves(self.size, self.step)
        rare = float(rows[:, self._top(rows) :].max())
        kernels = self._kernels(np.maximum(rows - rare, 0.0) * tilts, length)
        transforms, largest = np.array([one for one, _ in kernels]), max(n for _, n in kernels)
        # The curve of a unit mass at 0, whose convolution turns a measure into its curve.
        own = np.where(offsets < 0, -np.expm1(np.minimum(offsets, 0.0)), 0.0) * tilts
        ((hockey_stick, hockey_stick_norm),) = self._kernels(own[None], length)
        losses = self.step * (self.first + np.arange(self.size))
        weights = np.exp(self.order * losses)
        # Uniform masses raise the tilted curve by at least `lift` except in the last eighth.
        tail = self.size // 8
        lift = float(
            (-np.expm1(-self.step * np.arange(tail)) / tilts[self.size - 1 :][:tail]).sum()
        )
        uniform = scipy.fft.rfft(np.ones(self.size), length)

        masses, infinite = np.zeros(self.size), 0.0
        masses[-self.first] = 1.0
        spectrum = scipy.fft.rfft(masses, length)
        for _ in range(steps):
            values = scipy.fft.irfft(spectrum * transforms, length, axis=1)[:, : self.size]
            curve = values.max(axis=0) + self._error(float(masses.sum()), largest, length)
            curve *= 1 + _TILT_ERROR
            above = float(curve[-1] / weights[-1])
            infinite += above + rare
            masses = self._masses(curve - above * weights)
            masses[0] = weights[0] * (1 + _TILT_ERROR)
            spectrum = scipy.fft.rfft(masses, length)
            error = self._error(float(masses.sum()), hockey_stick_norm, length)
            reached = scipy.fft.irfft(spectrum * hockey_stick, length)[: self.size]
            reached -= np.abs(reached) * _TILT_ERROR + error
            short = max(0.0, float((curve - above * weights - reached).max()) * (1 + _TILT_ERROR))
            masses += short / lift
            spectrum += uniform * (short / lift)
            infinite += short / float(weights[-1 - tail])
            yield LatticeMeasure(
                grid=Grid(origin=self.step * self.first, step=self.step, size=self.size),
                masses=masses / weights * (1 + _TILT_ERROR),
                infinite=infinite * (1 + _TILT_ERROR),
            )

    def _top(self, rows: Array) -> int:
        """Return the column from which on all ``rows`` (m, n) are ``rare``, or the last."""
        few = rows.max(axis=0) <= self.rare
        return int(np.argmax(few)) if few.any() else rows.shape[1] - 1

    def _kernels(self, rows: Array, length: int) -> list[tuple[Complex, float]]:
        """Return transforms of ``rows`` (m, 2 · size - 1), with the middle at 0, and 2-norms."""
        padded = np.zeros((len(rows), length))
        padded[:, : self.size] = rows[:, self.size - 1 :]
        padded[:, 1 - self.size :] = rows[:, : self.size - 1]
        transforms = scipy.fft.rfft(padded, axis=1)
        return [(one, norm(row)) for one, row in zip(transforms, rows, strict=True)]

    def _error(self, total: float, size: float, length: int) -> float:
        """Bound the error of convolving masses of sum ``total`` and a kernel of 2-norm ``size``."""
        return 4 * transform_rounding(length) * total * size

    def _masses(self, curve: Array) -> Array:
        """Return the tilted masses of the measure of a tilted curve that is 0 at the last node."""
        fall, rise = math.exp(-self.order * self.step), math.exp(self.order * self.step)
        after = np.append(curve[1:], 0.0) * fall
        before = np.insert(curve[:-1], 0, 0.0) * rise
        masses = (after - curve) / math.expm1(self.step) - (curve - before) / -math.expm1(
            -self.step
        )
        return np.asarray(np.maximum(masses, 0.0))
