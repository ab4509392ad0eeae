"""The accountant of random allocations, both directions bracketed.

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
    * Several allocations, and releases beside them, are bracketed nearly as narrowly.
    * Parameters out of range, and lattices too long to hold, are refused.

References: docs/theorems/random-allocation.md for the pair and both bounds; Chua et al.,
"Balls-and-Bins Sampling for DP-SGD", arXiv:2412.16802, for the pair; Feldman and Shenfeld,
arXiv:2502.08202 and arXiv:2602.17284, for random allocation and its convolution.
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from affidavit.accountants.bracket import Bracket
from affidavit.accountants.bracketing_curves import BracketingCurve, Capped, LeastCurve
from affidavit.accountants.composition import leaves
from affidavit.accountants.fourier import dominating_pairs as fourier
from affidavit.accountants.fourier.dominating_pairs import directions
from affidavit.accountants.fourier.evaluation import crossing
from affidavit.accountants.fourier.refinement import refinement
from affidavit.accountants.protocol import (
    AccountantError,
    OutOfReach,
    PrivacyCurve,
    TwoOrders,
    Unsupported,
    require_delta,
    require_epsilon,
)
from affidavit.accountants.random_allocation.composed import (
    ComposedAllocationCurve,
    Ordered,
    Orders,
    Pass,
    Side,
)
from affidavit.accountants.random_allocation.directions import Curves, Direction
from affidavit.accountants.random_allocation.partial_pass import PartialDirection
from affidavit.accountants.random_allocation.renyi import (
    NOISE_MULTIPLIERS,
    WIDE_STRIDE,
    RenyiAllocationAccountant,
    check_range,
)
from affidavit.accountants.random_allocation.replaced import ReplacedCurve
from affidavit.accountants.registry import AFFIDAVIT_VERSION
from affidavit.plan import (
    Composed,
    Event,
    Leaf,
    RandomAllocationGaussian,
    Repeated,
    ReplacedAllocationGaussian,
)

MIN_WIDTH = 1e-6
"""No bracket of ε is asked to be narrower than this, in nats."""
SIDES: tuple[Literal["remove"], Literal["add"]] = ("remove", "add")
_ROUNDS = 8


# ---- one allocation
#
# A bracket that is too wide is tried again with a smaller step, and one whose crossing lies far
# from where the curves were made is tried again from there, a few times.


def bracket_epsilon(direction: Ordered, delta: float, relative_width: float) -> Bracket:
    """The ε (nats) of one direction at ``delta``, ``relative_width`` of it wide if possible."""
    guess = direction.guess(delta)
    best = Bracket(lower=0.0, upper=math.inf)
    step: float | None = None
    for _ in range(_ROUNDS):
        requested = max(relative_width * guess, MIN_WIDTH)
        slope = _slope(direction, guess)
        try:
            curves = direction.curves(guess, delta, min(0.3, requested * slope), step)
        except OutOfReach:
            if math.isinf(best.upper):
                raise
            break
        best = _narrowed(best, curves, delta, guess, 0.05 / slope)
        narrow = best.width <= max(relative_width * best.upper, MIN_WIDTH)
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
        guess = min(max(MIN_WIDTH, moved), direction.largest_epsilon)
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


MIN_DELTA, MAX_DELTA = 1e-15, 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class AllocationAccountant:
    """Two-sided accounting of random allocations, alone or composed with other releases.

    ``relative_width`` is the width of the brackets of one allocation, relative to ε (or δ).
    """

    relative_width: float = 1e-4
    name: str = "allocation"
    version: str = AFFIDAVIT_VERSION

    def curve(self, event: Event) -> PrivacyCurve:
        """The privacy curve of ``event``; raises ``Unsupported`` or ``OutOfReach``."""
        if isinstance(record := _replaced(event), ReplacedAllocationGaussian):
            return ReplacedCurve(bins=record.bins, rate=1 / record.noise_multiplier)
        above, below = self._curves(event)
        least = above
        if isinstance(above, ComposedAllocationCurve):
            with suppress(Unsupported):
                least = LeastCurve((above, RenyiAllocationAccountant().curve(event)))
        if below is above:
            return least
        return BracketingCurve(above=least, below=() if below is None else (below,))

    def attained(self, event: Event) -> tuple[PrivacyCurve, PrivacyCurve]:
        """The curves of one pair of data sets, one for each order of the two.

        Raises ``Unsupported`` or ``OutOfReach``.
        """
        _, below = self._curves(event)
        if below is None:
            raise Unsupported("no pair of data sets is known.", "Use another accountant.")
        return below.orders

    def lower_ends(self, event: Event) -> PrivacyCurve | None:
        """The curve of what ``event`` attains, capped if it can be; None where none is known."""
        try:
            _, below = self._curves(event)
        except AccountantError:
            return None
        if below is None:
            return None
        try:
            cap = RenyiAllocationAccountant(stride=WIDE_STRIDE).curve(event)
        except AccountantError:
            return below
        return Capped(curve=below, cap=cap)

    def _curves(self, event: Event) -> tuple[TwoOrders, TwoOrders | None]:
        """The curve that dominates ``event``, and the one that it attains, which may be the same.

        Raises ``Unsupported`` or ``OutOfReach``.
        """
        parts = leaves(event)
        if not parts:
            empty = AllocationCurve(directions=(), relative_width=self.relative_width)
            return empty, empty
        allocations = [
            (leaf, count) for leaf, count in parts if isinstance(leaf, RandomAllocationGaussian)
        ]
        if not allocations:
            raise Unsupported(
                "this run does not use random allocation.", "Use the fourier or rdp accountant."
            )
        for leaf, _ in allocations:
            check_range(leaf)
        runs = [(_orders(leaf), count) for leaf, count in allocations]
        attained = [run for leaf, count in allocations for run in _attained(leaf, count)]
        if len(parts) == 1 and parts[0][1] == 1:
            once = self._curve(runs[0][0])
            if attained == runs:
                return once, once
            return once, self._curve(attained[0][0]) if attained else None
        others = directions(
            Composed(
                events=tuple(
                    Repeated(event=leaf, count=count)
                    for leaf, count in parts
                    if not isinstance(leaf, RandomAllocationGaussian)
                )
            )
        )
        whole = _composed(runs, others)
        if attained == runs:
            return whole, whole
        return whole, _composed(attained, others) if attained else None

    def _curve(self, orders: Orders) -> AllocationCurve:
        return AllocationCurve(directions=orders, relative_width=self.relative_width)


def _replaced(event: Event) -> Leaf | None:
    """The one release of ``event``, if it has one."""
    match leaves(event):
        case ((leaf, 1),):
            return leaf
    return None


def _orders(leaf: RandomAllocationGaussian) -> Orders:
    """Both orders of the pair that dominates ``leaf``."""
    if leaf.released is None:
        return _whole(leaf.bins, leaf.noise_multiplier)
    remove, add = _whole(leaf.released, leaf.noise_multiplier)
    share = leaf.released / leaf.bins
    return PartialDirection(inner=remove, share=share), PartialDirection(inner=add, share=share)


@lru_cache(maxsize=64)
def _whole(bins: int, noise_multiplier: float) -> tuple[Direction, Direction]:
    rate = 1 / noise_multiplier
    remove, add = (Direction(bins=bins, rate=rate, side=side) for side in SIDES)
    return remove, add


def _attained(leaf: RandomAllocationGaussian, count: int) -> list[tuple[Orders, int]]:
    """The pairs that ``count`` of ``leaf`` attain; none where none is known."""
    if leaf.attained_at is None or leaf.released is not None:
        return [(_orders(leaf), count)]
    if leaf.attained_at <= NOISE_MULTIPLIERS[1]:
        return [(_whole(leaf.bins, leaf.attained_at), count)]
    return []


def _composed(
    runs: list[tuple[Orders, int]], others: tuple[fourier.Direction, ...]
) -> ComposedAllocationCurve:
    remove = tuple((Pass(this=first, other=second), count) for (first, second), count in runs)
    add = tuple((Pass(this=second, other=first), count) for (first, second), count in runs)
    beside = (None, None) if not others else (others[0], others[-1])
    return ComposedAllocationCurve(
        sides=(Side(passes=remove, beside=beside[0]), Side(passes=add, beside=beside[1]))
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class AllocationCurve:
    """ε against δ of one random allocation, over both directions; ``relative_width`` as above."""

    directions: tuple[Ordered, ...]
    relative_width: float

    def with_width(self, relative_width: float) -> AllocationCurve:
        """The same curve with brackets about ``relative_width`` of ε (or δ) wide."""
        return replace(self, relative_width=relative_width)

    @property
    def orders(self) -> tuple[AllocationCurve, AllocationCurve]:
        """The curves of P against Q, and of Q against P."""
        if not self.directions:
            return self, self
        remove, add = self.directions
        return replace(self, directions=(remove,)), replace(self, directions=(add,))

    def epsilon(self, delta: float) -> Bracket:
        """Bracket of the smallest ε (nats) at ``delta``.

        Raises ``ValueError`` unless 0 < δ < 1, and ``OutOfReach`` beyond the δ that are bounded.
        """
        require_delta(delta)
        if not self.directions:
            return Bracket(lower=0.0, upper=0.0)
        if not MIN_DELTA <= delta <= MAX_DELTA:
            raise OutOfReach(
                f"delta {delta:g} is outside [{MIN_DELTA:g}, {MAX_DELTA:g}].",
                "Ask within that range.",
            )
        first, *others = self.directions
        best = bracket_epsilon(first, delta, self.relative_width)
        for other in others:
            if math.isinf(best.upper) or not ruled_out(other, best.upper, delta):
                best = best.larger(bracket_epsilon(other, delta, self.relative_width))
        return best

    def delta(self, epsilon: float) -> Bracket:
        """Bracket of the smallest δ at ``epsilon`` (nats).

        Raises ``ValueError`` unless ε is finite and at least 0.
        """
        require_epsilon(epsilon)
        best = Bracket(lower=0.0, upper=0.0)
        for direction in sorted(self.directions, key=lambda side: -side.about(epsilon)):
            if best.lower == 0 or not ruled_out(direction, epsilon, best.lower):
                best = best.larger(bracket_delta(direction, epsilon, self.relative_width))
        return best
