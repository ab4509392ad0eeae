"""The parameters at which random allocations are bounded; refused outside, before work.

ε of one direction at a given δ, and δ at a given ε, to a width.

A bracket that is too wide is tried again with a smaller step, and one whose crossing lies
far from where the curves were made is tried again from there, a few times.

The accountant of one 1-of-b random allocation, both directions bracketed.

A record is thrown into one of b bins; each bin's release adds Gaussian noise. The worst
pair is P = (1/b) Σ_i N(e_i, σ² I_b) against Q = N(0, σ² I_b), whose likelihood ratio is a
mean of b independent lognormals under Q: its law is a b-fold convolution, and both orders
of the pair are means of a convex function of it.

>>> from affidavit.plan.events import RandomAllocationGaussian
>>> event = RandomAllocationGaussian(bins=100, noise_multiplier=1.0)
>>> epsilon = AllocationAccountant().curve(event).epsilon(1e-6)
>>> round(epsilon.lower, 3), round(epsilon.upper, 3)
(0.858, 0.858)

Guarantees
    * ``upper`` is at least, and ``lower`` at most, the tight value over both directions.
    * The bracket of ε is at most ``relative_width`` of ε wide (1e-6 where that is larger)
      wherever rounding allows; where it does not the bracket is wider, never wrong.
    * Parameters out of range, and lattices too long to hold, are refused.

References: docs/theorems/random-allocation.md for the pair and both bounds; Chua et al.,
"Balls-and-Bins Sampling for DP-SGD", arXiv:2412.16802, for the pair; Feldman and Shenfeld,
arXiv:2502.08202 and arXiv:2602.17284, for random allocation and its convolution.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import reduce

from affidavit.accountants.bracket import Bracket
from affidavit.accountants.composition import leaves
from affidavit.accountants.fourier.evaluation import crossing
from affidavit.accountants.fourier.refinement import refinement
from affidavit.accountants.protocol import OutOfReach, Unsupported, require_delta, require_epsilon
from affidavit.accountants.random_allocation.attack import Losses, repeated_attack
from affidavit.accountants.random_allocation.directions import Curves, Direction
from affidavit.accountants.random_allocation.limits import NOISE_MULTIPLIERS, check_range
from affidavit.accountants.random_allocation.partial_pass import PartialDirection
from affidavit.accountants.random_allocation.power import Side
from affidavit.accountants.random_allocation.renyi import (
    RenyiAllocationAccountant,
    RenyiAllocationCurve,
)
from affidavit.accountants.registry import OURS
from affidavit.plan import Event, RandomAllocationGaussian

Ordered = Direction | PartialDirection
SMALLEST_WIDTH = 1e-6
"""No bracket of ε is asked to be narrower than this, in nats."""
SIDES: tuple[Side, ...] = ("remove", "add")
_ROUNDS = 8


def bracket_epsilon(direction: Ordered, delta: float, relative_width: float) -> Bracket:
    """The ε (nats) of one direction at ``delta``, ``relative_width`` of it wide if possible."""
    guess = direction.guess(delta)
    best = Bracket(lower=0.0, upper=math.inf)
    step: float | None = None
    for _ in range(_ROUNDS):
        requested = max(relative_width * guess, SMALLEST_WIDTH)
        slope = _slope(direction, guess)
        try:
            curves = direction.curves(guess, delta, min(0.3, requested * slope), step)
        except OutOfReach:
            if math.isinf(best.upper):
                raise
            break
        best = _narrowed(best, curves, delta, guess, 0.05 / slope)
        narrow = best.width <= max(relative_width * best.upper, SMALLEST_WIDTH)
        if narrow and math.isfinite(best.upper):
            break
        high, low = curves.upper(guess), curves.lower(guess)
        gap = math.log(high / low) if low > 0 else math.inf
        step = None
        if gap > 0.8 * requested * slope:
            step = curves.step * refinement(min(0.8, requested * slope / gap))
        # The curves are best where they were made: the next ones are made at the crossing.
        middle = math.sqrt(high * low) if low > 0 else high
        # A little beyond, because what lies above the cut is bounded loosely past it.
        moved = guess + math.log(middle / delta) / slope + 0.3 * requested
        guess = min(max(SMALLEST_WIDTH, moved), direction.largest_epsilon)
    return best


def _narrowed(best: Bracket, curves: Curves, delta: float, guess: float, stride: float) -> Bracket:
    accuracy = max(1e-7 * guess, 1e-9)
    _, upper = crossing(curves.upper, delta, guess, stride, accuracy)
    lower, _ = crossing(curves.lower, delta, min(upper, guess), stride, accuracy)
    return Bracket(lower=max(best.lower, lower), upper=min(best.upper, upper))


def bracket_delta(direction: Ordered, epsilon: float, relative_width: float) -> Bracket:
    """The δ of one direction at ``epsilon`` (nats), ``relative_width`` of it wide if possible."""
    best = Bracket(lower=0.0, upper=1.0)
    guess = min(0.5, max(direction.about(epsilon), 1e-280))
    step: float | None = None
    for _ in range(_ROUNDS):
        try:
            curves = direction.curves(epsilon, guess, relative_width, step)
        except OutOfReach:
            if best.upper == 1.0:
                raise
            break
        previous = best.width
        best = Bracket(
            lower=max(best.lower, curves.lower(epsilon)),
            upper=min(best.upper, curves.upper(epsilon)),
        )
        if best.width <= relative_width * best.upper or best.width > 0.8 * previous:
            break
        guess = best.upper
        step = curves.step * refinement(relative_width * best.upper / best.width)
    return best


def ruled_out(direction: Ordered, epsilon: float, delta: float) -> bool:
    """Whether a coarse bound proves the direction's δ at ``epsilon`` (nats) below ``delta``."""
    guess = direction.about(epsilon)
    gap = math.log(delta / guess) if guess > 0 else math.inf
    if gap < 1e-3:
        return False
    try:
        curves = direction.curves(epsilon, max(guess, delta * 1e-6), min(0.5, 0.3 * gap))
    except OutOfReach:
        return False
    return curves.upper(epsilon) <= delta


def _slope(direction: Ordered, epsilon: float) -> float:
    """-d log δ / dε near ``epsilon``, by a difference."""
    width = 0.01 * max(epsilon, 1e-3)
    here, there = direction.about(epsilon), direction.about(epsilon + width)
    if not 0 < there < here:
        return 1.0 / max(epsilon, 1e-3)
    return math.log(here / there) / width


SMALLEST_DELTA, LARGEST_DELTA = 1e-15, 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class AllocationAccountant:
    """Two-sided accounting of one random allocation.

    ``relative_width`` is the width of the brackets asked for, relative to ε (or δ).
    """

    relative_width: float = 1e-4
    name: str = "allocation"
    version: str = OURS

    def curve(self, event: Event) -> AllocationCurve | DominatedAllocationCurve:
        """The privacy curve of ``event``; raises ``Unsupported`` or ``OutOfReach``."""
        parts = leaves(event)
        if not parts:
            return AllocationCurve(directions=(), relative_width=self.relative_width)
        leaf, count = parts[0]
        if len(parts) > 1 or not isinstance(leaf, RandomAllocationGaussian):
            raise Unsupported(
                "the allocation accountant knows runs that are one kind of random allocation.",
                "Use one phase of balls in bins, or the allocation_rdp accountant.",
            )
        check_range(leaf)
        if leaf.released is not None and count == 1:
            share = leaf.released / leaf.bins
            return self._curve(leaf.released, 1 / leaf.noise_multiplier, share)
        once = self._curve(leaf.bins, 1 / leaf.noise_multiplier)
        attained = once if leaf.attained_at is None else self._attained(leaf)
        if count > 1:
            whole = count if leaf.attained_at is None else count - 1
            added = RenyiAllocationAccountant().curve(event)
            rate = math.sqrt(count) / leaf.noise_multiplier * (1 + 1e-15)
            # Many passes as one have less noise than the lattice's terms are doubles at.
            stored = (self._curve(leaf.bins, rate),) if rate <= 1 / NOISE_MULTIPLIERS[0] else ()
            return DominatedAllocationCurve(
                attained=once,
                attacks=repeated_attack(leaf.bins, 1 / leaf.noise_multiplier, whole),
                dominating=(*stored, added),
            )
        if leaf.attained_at is None:
            return once
        return DominatedAllocationCurve(attained=attained, dominating=(once,))

    def _attained(self, leaf: RandomAllocationGaussian) -> AllocationCurve | None:
        """The curve of the whole passes of ``leaf``; None where nothing is said of them."""
        sigma = leaf.attained_at
        if sigma is None or sigma > NOISE_MULTIPLIERS[1]:
            return None
        return self._curve(leaf.bins, 1 / sigma)

    def _curve(self, bins: int, rate: float, share: float = 1.0) -> AllocationCurve:
        """The curve of a pass over ``bins`` bins, in one of which the record is by ``share``."""
        whole = [Direction(bins=bins, rate=rate, side=side) for side in SIDES]
        directions: list[Ordered] = [*whole]
        if share < 1:
            directions = [PartialDirection(inner=inner, share=share) for inner in whole]
        return AllocationCurve(directions=tuple(directions), relative_width=self.relative_width)


@dataclass(frozen=True, kw_only=True, slots=True)
class DominatedAllocationCurve:
    """ε against δ of a run between one that it contains and others that dominate it.

    A run that ends within a pass lies between its whole passes and one pass more. Passes
    whose bins are drawn afresh lie between one of them and the smaller of two bounds: their
    Rényi divergences added up, and the passes as if bins were kept
    (docs/theorems/random-allocation.md, Theorem 2). ``attained`` is None where nothing is, and
    ``attacks`` are further bounds from below.
    """

    attained: AllocationCurve | None
    dominating: tuple[AllocationCurve | RenyiAllocationCurve, ...]
    attacks: tuple[Losses, ...] = ()

    def epsilon(self, delta: float) -> Bracket:
        """Bracket of the smallest ε (nats) at ``delta``; raises as its parts do."""
        upper = min(item.epsilon(delta).upper for item in self.dominating)
        lower = 0.0 if self.attained is None else self.attained.epsilon(delta).lower
        lower = max(lower, *(attack.epsilon(delta) for attack in self.attacks), 0.0)
        return Bracket(lower=min(lower, upper), upper=upper)

    def delta(self, epsilon: float) -> Bracket:
        """Bracket of the smallest δ at ``epsilon`` (nats); raises as its parts do."""
        upper = min(item.delta(epsilon).upper for item in self.dominating)
        lower = 0.0 if self.attained is None else self.attained.delta(epsilon).lower
        lower = max(lower, *(attack.delta(epsilon) for attack in self.attacks), 0.0)
        return Bracket(lower=min(lower, upper), upper=upper)


@dataclass(frozen=True, kw_only=True, slots=True)
class AllocationCurve:
    """ε against δ of one random allocation, over both directions; ``relative_width`` as above."""

    directions: tuple[Ordered, ...]
    relative_width: float

    def epsilon(self, delta: float) -> Bracket:
        """Bracket of the smallest ε (nats) at ``delta``.

        Raises ``ValueError`` unless 0 < δ < 1, and ``OutOfReach`` beyond the δ that are bounded.
        """
        require_delta(delta)
        if not self.directions:
            return Bracket(lower=0.0, upper=0.0)
        if not SMALLEST_DELTA <= delta <= LARGEST_DELTA:
            raise OutOfReach(
                f"delta {delta:g} is outside [{SMALLEST_DELTA:g}, {LARGEST_DELTA:g}].",
                "Ask within that range.",
            )
        remove, add = self.directions
        best = bracket_epsilon(remove, delta, self.relative_width)
        if math.isinf(best.upper) or not ruled_out(add, best.upper, delta):
            other = bracket_epsilon(add, delta, self.relative_width)
            best = best.larger(other)
        return best

    def delta(self, epsilon: float) -> Bracket:
        """Bracket of the smallest δ at ``epsilon`` (nats).

        Raises ``ValueError`` unless ε is finite and at least 0.
        """
        require_epsilon(epsilon)
        brackets = [
            bracket_delta(direction, epsilon, self.relative_width) for direction in self.directions
        ]
        return reduce(Bracket.larger, brackets, Bracket(lower=0.0, upper=0.0))
