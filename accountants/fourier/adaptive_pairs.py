"""Lots of fixed size: the best that an adversary does who chooses the data anew at each step.

``WorseOfBothLaw`` has the larger of two curves at every α, which no data have at once, and
composing it concedes that at every step. Here the choice is left to the adversary, who knows the
loss so far: with ``G_t`` the largest curve of t steps,

    G_{t+1}(α) = max over the data of ∫ p(x) G_t(α q(x) / p(x)) dx,

which bounds every adaptive run and is attained by one. What the data can be at one step are three
points of a ball: the record, what replaces it, and the record whose place it takes. Finitely many
curves bound them all (``_TRIANGLES``), so that a step is a maximum of convolutions.

A run is cut into blocks of at most ``MAX_STEPS`` steps, whose largest curve is a measure to be
composed. So the run's curve is at most what the blocks compose to.

Everything is on one lattice, tilted by e^{λ·loss} as in ``transform.py``. Errors bounded here:

* that of a transform, by ``cyclic_convolution``, is added to every value of a curve;
* the measure that a step is turned into is the second difference of its curve, with whatever
  rounding. Its own curve is then compared with the step's, and raised where it falls short;
* losses above the lattice are infinite, and losses below it are raised to its first node.

Proof: docs/theorems/without-replacement.md.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter

import numpy as np
from scipy import fft
from scipy.special import ndtr

from affidavit.accountants.bracket import Bracket
from affidavit.accountants.cyclic_convolution import norm, rounding
from affidavit.accountants.fourier.cache import MAX_CACHE_BYTES, SharedCache, down
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
from affidavit.accountants.fourier.spectrum import Complex
from affidavit.accountants.fourier.tilting import Saddle
from affidavit.accountants.fourier.transform import ComposedTransform
from affidavit.accountants.protocol import OutOfReach, require_delta, require_epsilon

MAX_STEPS = 256
"""Of one block: its work grows with its steps, and what is conceded falls like their root."""
_MAX_NODES = 1 << 14
_TOLERANCE = 2e-3
"""Of ε, what the lattice may cost."""
_FAR, _NEGLIGIBLE = 1e-5, 1e-3
"""Shares of the tilted mass below the lattice, and of δ above it."""
_DELTAS = 0.1
"""Rungs an octave of the ladder of δ, so that nearby ones share blocks."""
_ORDERS = 2.0 ** np.arange(-6, 10, 0.5)
"""Tilts (1/nat) of which the best bounds the losses above the lattice."""
_MAX_EXPONENT = 600.0
_TILTING = 1e-12
"""Relative error of what is tilted and weighed with exponents of at most that size, and more."""
_REACH, _HALVINGS = 60.0, 42
"""Standard deviations of the noise within which a place is found, by so many halvings."""

_ANGLES = (0.0, 0.06, 0.15, 0.3, 0.5, 0.7, math.pi / 4)
"""Radians up to half of a right angle, where cells of ``_triangles`` end; the rest mirrors it."""


def _triangles() -> tuple[tuple[float, float, float], ...]:
    """Sides that bound those of every triangle in a cell, in radii of the ball.

    The sides lead from the record to its replacement, from the record to the displaced one, and
    from that to the replacement. They are opposite to the angles A, B and C of a triangle inscribed
    in a great circle, none of which is more than a right one: the sides of any three points of the
    ball are at most those of one of these. In a cell π/2 - B and C lie between two of ``_ANGLES``.
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
        """Curves at e^(k · step), -``alphas`` < k < ``alphas``, that bound those of all data.

        Of shape (m, 2 · alphas - 1): the curve of any data is nowhere above some average of the m.
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
        """The largest curve at losses >= 0 of centres at most so far from the record's.

        All are on one line then: the record at 0, the others as far below it as they can be
        (Kahane's inequality, as in ``poisson-replace-one.md``).
        """
        q = self.probability
        factor, rise = np.exp(losses), np.expm1(losses)
        with np.errstate(divide="ignore"):
            log_rise = np.log(rise * ((1 - q) / q))
        low, high = np.full(losses.size, -_REACH), np.full(losses.size, _REACH)
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            against = np.logaddexp(
                log_rise - displaced * (middle + displaced / 2),
                losses - replaced * (middle + replaced / 2),
            )
            more = against > 0
            low, high = np.where(more, middle, low), np.where(more, high, middle)
        own = q * ndtr(-high)
        value = own - rise * (1 - q) * ndtr(-high - displaced) - factor * q * ndtr(-high - replaced)
        # Each term is at most the first, and its argument is rounded. That the best place is not
        # met exactly costs the square of what is left of it.
        size = np.abs(high) + max(replaced, displaced) + 1
        error = UNIT_ROUNDOFF * (64.0 + 12.0 * size * size + 8.0 * losses) * own
        return np.asarray(np.maximum(value, 0.0) + error)


def _joined(above: Array, below: Array, losses: Array) -> Array:
    """The curve that is ``above`` at e^losses, and at e^-losses ``below`` of the other order.

    All have shape (n,), the curve (2n - 1,).
    """
    mirrored = -np.expm1(-losses[:0:-1]) + np.exp(-losses[:0:-1]) * below[:0:-1]
    return np.concatenate((mirrored, above))


def _undominated(rows: Array) -> list[int]:
    """The rows, shape (m, n), that are somewhere above every other; of equal ones the first."""
    result: list[int] = []
    for index in sorted(range(len(rows)), key=lambda i: -float(rows[i].sum())):
        if not any((rows[other] >= rows[index]).all() for other in result):
            result.append(index)
    return result


def displacement(law: LossLaw) -> Displacement | None:
    """What is released under ``law``, if one record displaces another in it."""
    match law:
        case WorseOfBothLaw(remove=NormalMixtureLaw() as pair):
            return Displacement(probability=pair.sampling_probability, radius=pair.mu / 2)
        case _:
            return None


@dataclass(frozen=True, kw_only=True, slots=True)
class AdaptiveCurve:
    """Upper ends of a run in which records displace others, by the above.

    ``direction`` has laws that dominate. Of the one at ``place`` the ``release`` is followed.
    """

    direction: Direction
    place: int
    release: Displacement
    shared: SharedCache = field(
        default_factory=partial(SharedCache, MAX_CACHE_BYTES), repr=False, compare=False
    )

    @classmethod
    def of(cls, directions: tuple[Direction, ...], shared: SharedCache) -> AdaptiveCurve | None:
        """The curve, where this bounds the run and there is a choice to be made twice.

        The law of most steps in which one record displaces another is followed.
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
        return cls(direction=directions[0], place=place, release=release, shared=shared)

    def epsilon(self, delta: float) -> Bracket:
        """``[0, ε]`` (nats) at ``delta``; raises ``OutOfReach`` where its lattice is too long."""
        require_delta(delta)
        saddle = saddle_at_delta(Laws.of(self._attained, self.shared), delta)
        epsilon = max(saddle.epsilon, 0.0)
        curve = self._composed(saddle, epsilon, delta)
        accuracy = 0.1 * _TOLERANCE * max(epsilon, 1e-3)
        _, upper = crossing(curve.upper, delta, epsilon, 10 * accuracy, accuracy)
        return Bracket(lower=0.0, upper=upper)

    def delta(self, epsilon: float) -> Bracket:
        """``[0, δ]`` at ``epsilon`` (nats); raises as ``epsilon`` does."""
        require_epsilon(epsilon)
        saddle, guess = saddle_at_epsilon(Laws.of(self._attained, self.shared), epsilon)
        curve = self._composed(saddle, epsilon, guess)
        return Bracket(lower=0.0, upper=curve.upper(epsilon))

    @property
    def _attained(self) -> Direction:
        pairs = zip(self.direction.laws, self.direction.attained, strict=True)
        laws = tuple((attained, count) for (_, count), attained in pairs)
        return Direction(laws=laws, attained=self.direction.attained)

    def _composed(self, saddle: Saddle, epsilon: float, delta: float) -> ComposedTransform:
        laws = Laws.of(self.direction, self.shared)
        tolerance = _TOLERANCE * max(epsilon, 1e-3) * saddle.order
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
        followed: tuple[Atoms, int],
        parameters: GridParameters,
        delta: float,
    ) -> list[tuple[LatticeMeasure, int]]:
        atoms, count = followed
        blocks = -(-count // MAX_STEPS)
        steps, longer = divmod(count, blocks)
        lengths = {steps: blocks - longer, steps + 1: longer}
        most = steps + bool(longer)
        block = Block.of(atoms, self.release, parameters, most, down(delta / blocks, _DELTAS))

        def measures() -> list[tuple[LatticeMeasure, int]]:
            return [
                (measure, lengths[step])
                for step, measure in enumerate(block.measures(most), 1)
                if lengths.get(step)
            ]

        return self.shared.get((block, count), measures, lambda _: 16 * block.size)


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """The lattice of one block of steps, and what each ``release`` is.

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
        """A lattice for so many ``steps``; raises ``OutOfReach`` if it is too long.

        ``atoms`` are those of a law that dominates ``release``, and ``delta`` is about what the
        block may add to δ.
        """
        order, step = parameters.windows[0].order, parameters.step
        high = (steps * atoms.log_moments(_ORDERS) - math.log(_NEGLIGIBLE * delta)) / _ORDERS
        low = (math.log(_FAR) - math.log(steps)) / order
        first, last = math.floor(low / step), math.ceil(float(high.min()) / step)
        # The last eighth is where a curve is not raised (``measures``).
        size = math.ceil((last - first + 1) * 8 / 7)
        if size > _MAX_NODES or max(order, 1.0) * step * size > _MAX_EXPONENT:
            raise OutOfReach(
                f"needs {size} nodes a step, at most {_MAX_NODES}.", "Use another accountant."
            )
        rare = _NEGLIGIBLE * delta / steps
        return cls(rare=rare, first=first, size=size, step=step, order=order, release=release)

    def measures(self, steps: int) -> Iterator[LatticeMeasure]:
        """The measure whose curve is at least the largest of 1, 2, ... ``steps`` steps."""
        length = fft.next_fast_len(2 * self.size, real=True)
        offsets = self.step * np.arange(1 - self.size, self.size)
        tilts = np.exp(self.order * offsets)
        rows = self.release.curves(self.size, self.step)
        rare = float(rows[:, self._top(rows) :].max())
        kernels = self._kernels(np.maximum(rows - rare, 0.0) * tilts, length)
        transforms, largest = np.array([one for one, _ in kernels]), max(n for _, n in kernels)
        # The curve of a unit mass at 0, which turns a measure into its curve.
        own = np.where(offsets < 0, -np.expm1(np.minimum(offsets, 0.0)), 0.0) * tilts
        ((hockey_stick, loudness),) = self._kernels(own[None], length)
        losses = self.step * (self.first + np.arange(self.size))
        weights = np.exp(self.order * losses)
        # Uniform masses raise the tilted curve by at least `lift` but for the last eighth.
        tail = self.size // 8
        lift = float(
            (-np.expm1(-self.step * np.arange(tail)) / tilts[self.size - 1 :][:tail]).sum()
        )
        uniform = fft.rfft(np.ones(self.size), length)

        masses, infinite = np.zeros(self.size), 0.0
        masses[-self.first] = 1.0
        spectrum = fft.rfft(masses, length)
        for _ in range(steps):
            values = fft.irfft(spectrum * transforms, length, axis=1)[:, : self.size]
            curve = values.max(axis=0) + self._error(float(masses.sum()), largest, length)
            curve *= 1 + _TILTING
            above = float(curve[-1] / weights[-1])
            infinite += above + rare
            masses = self._masses(curve - above * weights)
            masses[0] = weights[0] * (1 + _TILTING)
            spectrum = fft.rfft(masses, length)
            error = self._error(float(masses.sum()), loudness, length)
            reached = fft.irfft(spectrum * hockey_stick, length)[: self.size]
            reached -= np.abs(reached) * _TILTING + error
            short = max(0.0, float((curve - above * weights - reached).max()) * (1 + _TILTING))
            masses += short / lift
            spectrum += uniform * (short / lift)
            infinite += short / float(weights[-1 - tail])
            yield LatticeMeasure(
                grid=Grid(origin=self.step * self.first, step=self.step, size=self.size),
                masses=masses / weights * (1 + _TILTING),
                infinite=infinite * (1 + _TILTING),
            )

    def _top(self, rows: Array) -> int:
        """The column from which all ``rows``, shape (m, n), are ``rare``, or the last."""
        few = rows.max(axis=0) <= self.rare
        return int(np.argmax(few)) if few.any() else rows.shape[1] - 1

    def _kernels(self, rows: Array, length: int) -> list[tuple[Complex, float]]:
        """Transforms of ``rows``, shape (m, 2 · size - 1), with the middle at 0, and 2-norms."""
        padded = np.zeros((len(rows), length))
        padded[:, : self.size] = rows[:, self.size - 1 :]
        padded[:, 1 - self.size :] = rows[:, : self.size - 1]
        transforms = fft.rfft(padded, axis=1)
        return [(one, norm(row)) for one, row in zip(transforms, rows, strict=True)]

    def _error(self, total: float, size: float, length: int) -> float:
        """Of a convolution of masses that sum to ``total`` and a kernel of 2-norm ``size``."""
        return 4 * rounding(length) * total * size

    def _masses(self, curve: Array) -> Array:
        """The tilted masses of the measure of a tilted curve that is 0 at the last node."""
        fall, rise = math.exp(-self.order * self.step), math.exp(self.order * self.step)
        after = np.append(curve[1:], 0.0) * fall
        before = np.insert(curve[:-1], 0, 0.0) * rise
        masses = (after - curve) / math.expm1(self.step) - (curve - before) / -math.expm1(
            -self.step
        )
        return np.asarray(np.maximum(masses, 0.0))
