"""The accountant of random allocations, both directions bracketed.

A record falls into one of b bins; each bin's release adds Gaussian noise. The worst pair is
P = (1/b) Σ_i N(e_i, σ² I_b) against Q = N(0, σ² I_b). Its likelihood ratio is a mean of b
independent lognormals under Q. So its law is a b-fold convolution, and both orders of the pair are
means of a convex function of it.

>>> from affidavit.plan.events import RandomAllocationGaussian
>>> event = RandomAllocationGaussian(bins=100, noise_multiplier=1.0)
>>> epsilon = AllocationAccountant().curve(event).epsilon(1e-6)
>>> round(epsilon.lower, 3), round(epsilon.upper, 3)
(0.858, 0.858)

Guarantees
    * ``upper`` is at least, and ``lower`` at most, the tight value over both directions.
    * The bracket of ε is at most ``relative_width`` of ε wide (or 1e-6, if that is larger), unless
      rounding makes it wider.
    * Brackets of several allocations, and releases beside them, are nearly as narrow.
    * Parameters out of range and lattices that are too long are refused.

References: docs/theorems/random-allocation.md for the pair and both bounds; Chua et al.,
"Balls-and-Bins Sampling for DP-SGD", arXiv:2412.16802, for the pair; Feldman and Shenfeld,
arXiv:2502.08202 and arXiv:2602.17284, for random allocation and its convolution.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from affidavit.accountants.bracket import Bracket
from affidavit.accountants.bracketing_curves import (
    BracketingCurve,
    CappedCurve,
    MinimumCurve,
    orders_of,
)
from affidavit.accountants.composition import leaves
from affidavit.accountants.fourier import dominating_pairs as fourier
from affidavit.accountants.fourier.dominating_pairs import directions
from affidavit.accountants.fourier.evaluation import crossing
from affidavit.accountants.fourier.refinement import step_factor
from affidavit.accountants.gaussian import EMPTY_CURVE
from affidavit.accountants.protocol import (
    AccountantError,
    OutOfReach,
    PrivacyCurve,
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
from affidavit.accountants.random_allocation.directions import (
    Curves,
    Direction,
    PartialDirection,
)
from affidavit.accountants.random_allocation.renyi import (
    MAX_NOISE,
    WIDE_STRIDE,
    RenyiAllocationAccountant,
    check_range,
)
from affidavit.accountants.random_allocation.replaced import ReplacedCurve, replaced_orders
from affidavit.accountants.registry import AFFIDAVIT_VERSION
from affidavit.plan import events

Allocation = events.RandomAllocationGaussian | events.ReplacedAllocationGaussian
MIN_WIDTH = 1e-6
"""Width (nats) below which a bracket of ε is not narrowed."""
MIN_DELTA, MAX_DELTA = 1e-15, 0.5
_MAX_ROUNDS = 8


def bracket_epsilon(direction: Ordered, delta: float, relative_width: float) -> Bracket:
    """Return the ε (nats) of one direction at ``delta``, ``relative_width`` of it wide if possible.

    A bracket that is too wide is computed again with a smaller step, and one far from the ε for
    which the curves were computed is computed again there.
    """
    guess = direction.approximate_epsilon(delta)
    best = Bracket(lower=0.0, upper=math.inf)
    step: float | None = None
    for _ in range(_MAX_ROUNDS):
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
            step = curves.step * step_factor(min(0.8, requested * slope / gap))
        # The next curves are computed at the crossing, where they are narrowest.
        middle = math.sqrt(high * low) if low > 0 else high
        # A little beyond, because the part above the cut is bounded loosely past it.
        moved = guess + math.log(middle / delta) / slope + 0.3 * requested
        guess = min(max(MIN_WIDTH, moved), direction.max_epsilon)
    return best


def _narrowed(best: Bracket, curves: Curves, delta: float, guess: float, stride: float) -> Bracket:
    accuracy = max(1e-7 * guess, 1e-9)
    _, upper = crossing(curves.upper, delta, guess, stride, accuracy)
    lower, _ = crossing(curves.lower, delta, min(upper, guess), stride, accuracy)
    return Bracket(lower=max(best.lower, lower), upper=min(best.upper, upper))


def bracket_delta(direction: Ordered, epsilon: float, relative_width: float) -> Bracket:
    """Return the δ of one direction at ``epsilon`` (nats), ``relative_width`` wide if possible."""
    best = Bracket(lower=0.0, upper=1.0)
    guess = min(0.5, max(direction.approximate_delta(epsilon), 1e-280))
    step: float | None = None
    for _ in range(_MAX_ROUNDS):
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
        step = curves.step * step_factor(relative_width * best.upper / best.width)
    return best


def is_ruled_out(direction: Ordered, epsilon: float, delta: float) -> bool:
    """Return whether a coarse bound proves δ at ``epsilon`` (nats) to be below ``delta``."""
    guess = direction.approximate_delta(epsilon)
    gap = math.log(delta / guess) if guess > 0 else math.inf
    if gap < 1e-3:
        return False
    try:
        curves = direction.curves(epsilon, max(guess, delta * 1e-6), min(0.5, 0.3 * gap))
    except OutOfReach:
        return False
    return curves.upper(epsilon) <= delta


def _slope(direction: Ordered, epsilon: float) -> float:
    """Return -d log δ / dε near ``epsilon`` (nats), by a difference."""
    width = 0.01 * max(epsilon, 1e-3)
    here, there = direction.approximate_delta(epsilon), direction.approximate_delta(epsilon + width)
    if not 0 < there < here:
        return 1.0 / max(epsilon, 1e-3)
    return math.log(here / there) / width


@dataclass(frozen=True, kw_only=True, slots=True)
class AllocationAccountant:
    """Two-sided accounting of random allocations, alone or composed with other releases.

    ``relative_width`` is the width of one allocation's brackets, relative to ε (or δ). If it is
    ``provable``, a last, partial pass counts as whole, as the checker does.
    """

    relative_width: float = 1e-4
    provable: bool = False
    name: str = "allocation"
    version: str = AFFIDAVIT_VERSION

    def provable_alone(self) -> AllocationAccountant:
        """Return this accountant with only the bounds that the checker proves."""
        return replace(self, provable=True)

    def curve(self, event: events.Event) -> PrivacyCurve:
        """Return the curve of ``event``; raises ``Unsupported`` or ``OutOfReach``."""
        match leaves(event):
            case ((events.ReplacedAllocationGaussian() as leaf, 1),):
                if self.provable:
                    leaf = replace(leaf, longer=None, others_at=None)
                return ReplacedCurve(tuple(dict.fromkeys(replaced_orders(leaf))))
        above, below = self._curves(event)
        least = above
        if isinstance(above, ComposedAllocationCurve):
            with suppress(Unsupported):
                least = MinimumCurve((above, RenyiAllocationAccountant().curve(event)))
        if below is above:
            return least
        return BracketingCurve(above=least, below=() if below is None else (below,))

    def attained(self, event: events.Event) -> tuple[PrivacyCurve, PrivacyCurve]:
        """Return the curves of one pair of data sets, one for each order.

        Raises ``Unsupported`` or ``OutOfReach``.
        """
        _, below = self._curves(event)
        if below is None:
            raise Unsupported("no attaining pair is known.", "Use another accountant.")
        return orders_of(below)

    def lower_ends(self, event: events.Event) -> PrivacyCurve | None:
        """Return the curve that ``event`` attains, capped if possible, or None if none is known."""
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
        return CappedCurve(curve=below, cap=cap)

    def _curves(self, event: events.Event) -> tuple[PrivacyCurve, PrivacyCurve | None]:
        """Return the curve that dominates ``event`` and the one that it attains, if known.

        Raises ``Unsupported`` or ``OutOfReach``.
        """
        parts = leaves(event)
        if not parts:
            return EMPTY_CURVE, EMPTY_CURVE
        allocations = [(leaf, count) for leaf, count in parts if isinstance(leaf, Allocation)]
        if not allocations:
            raise Unsupported(
                "this run does not use random allocation.", "Use the fourier or rdp accountant."
            )
        for leaf, _ in allocations:
            if isinstance(leaf, events.RandomAllocationGaussian):
                check_range(leaf)
        if self.provable:
            allocations = [(_with_whole_passes(leaf), count) for leaf, count in allocations]
        runs = [(_orders(leaf), count) for leaf, count in allocations]
        attained = [run for leaf, count in allocations for run in _attained(leaf, count)]
        build: Callable[[list[tuple[Orders, int]]], PrivacyCurve]
        if len(parts) == 1 and parts[0][1] == 1:
            build = self._one_curve
        else:
            beside = tuple(
                events.Repeated(event=leaf, count=count)
                for leaf, count in parts
                if not isinstance(leaf, Allocation)
            )
            others = directions(events.Composed(events=beside))
            build = partial(_composed_curve, others)
        above = build(runs)
        if attained == runs:
            return above, above
        return above, build(attained) if attained else None

    def _one_curve(self, runs: list[tuple[Orders, int]]) -> AllocationCurve:
        ((orders, _),) = runs
        return AllocationCurve(directions=orders, relative_width=self.relative_width)


def _with_whole_passes(leaf: Allocation) -> Allocation:
    """Return ``leaf`` with all bins like the longest, those of one more pass."""
    if isinstance(leaf, events.RandomAllocationGaussian):
        return replace(leaf, longer=None)
    return replace(leaf, longer=None, others_at=None)


def _orders(leaf: Allocation) -> Orders:
    """Return both orders of the pair that dominates ``leaf``."""
    if isinstance(leaf, events.ReplacedAllocationGaussian):
        return replaced_orders(leaf)
    if leaf.longer is not None and leaf.attained_at is not None:
        return _full_pass(
            leaf.bins, leaf.noise_multiplier, (leaf.bins - leaf.longer, 1 / leaf.attained_at)
        )
    if leaf.released is None:
        return _full_pass(leaf.bins, leaf.noise_multiplier)
    remove, add = _full_pass(leaf.released, leaf.noise_multiplier)
    share = leaf.released / leaf.bins
    return PartialDirection(inner=remove, share=share), PartialDirection(inner=add, share=share)


def _full_pass(
    bins: int, noise_multiplier: float, slower: tuple[int, float] | None = None
) -> tuple[Direction, Direction]:
    rate = 1 / noise_multiplier
    return Direction(bins=bins, rate=rate, side="remove", slower=slower), Direction(
        bins=bins, rate=rate, side="add", slower=slower
    )


def _attained(leaf: Allocation, count: int) -> list[tuple[Orders, int]]:
    """Return the pairs that ``count`` of ``leaf`` attain, or none if none is known."""
    if isinstance(leaf, events.ReplacedAllocationGaussian):
        return []
    if leaf.attained_at is None or leaf.released is not None or leaf.longer is not None:
        return [(_orders(leaf), count)]
    if leaf.attained_at <= MAX_NOISE:
        return [(_full_pass(leaf.bins, leaf.attained_at), count)]
    return []


def _composed_curve(
    others: tuple[fourier.Direction, ...], runs: list[tuple[Orders, int]]
) -> ComposedAllocationCurve:
    remove = tuple((Pass(this=first, other=second), count) for (first, second), count in runs)
    add = tuple((Pass(this=second, other=first), count) for (first, second), count in runs)
    beside = (None, None) if not others else (others[0], others[-1])
    return ComposedAllocationCurve(
        sides=(Side(passes=remove, beside=beside[0]), Side(passes=add, beside=beside[1]))
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class AllocationCurve:
    """Privacy curve of one random allocation over both directions."""

    directions: tuple[Ordered, ...]
    relative_width: float

    def with_width(self, relative_width: float) -> AllocationCurve:
        """Return this curve with brackets about ``relative_width`` of ε (or δ) wide."""
        return replace(self, relative_width=relative_width)

    @property
    def orders(self) -> tuple[AllocationCurve, AllocationCurve]:
        """The curves of P against Q, and of Q against P."""
        remove, add = self.directions
        return replace(self, directions=(remove,)), replace(self, directions=(add,))

    def epsilon(self, delta: float) -> Bracket:
        """Return the bracket of ε (nats) at ``delta``.

        Raises ``ValueError`` unless 0 < δ < 1, and ``OutOfReach`` for a δ out of range.
        """
        require_delta(delta)
        if not MIN_DELTA <= delta <= MAX_DELTA:
            raise OutOfReach(
                f"delta {delta:g} is outside [{MIN_DELTA:g}, {MAX_DELTA:g}].",
                "Choose δ in that range.",
            )
        first, *others = self.directions
        best = bracket_epsilon(first, delta, self.relative_width)
        for other in others:
            if math.isinf(best.upper) or not is_ruled_out(other, best.upper, delta):
                best = best.larger(bracket_epsilon(other, delta, self.relative_width))
        return best

    def delta(self, epsilon: float) -> Bracket:
        """Return the bracket of δ at ``epsilon`` (nats).

        Raises ``ValueError`` unless ε is finite and at least 0.
        """
        require_epsilon(epsilon)
        best = Bracket(lower=0.0, upper=0.0)
        for direction in sorted(self.directions, key=lambda side: -side.approximate_delta(epsilon)):
            if best.lower == 0 or not is_ruled_out(direction, epsilon, best.lower):
                best = best.larger(bracket_delta(direction, epsilon, self.relative_width))
        return best
