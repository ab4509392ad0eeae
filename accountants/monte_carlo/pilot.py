"""Bets: confidence bounds for the mean of bounded draws, by one fixed bet.

X_1..X_n are independent with X ≥ 0 and mean μ. For any bet 0 ≤ λ ≤ 1/(1-μ) that does not
depend on them, and X ≤ 1,

    Π (1 + λ (μ - X_i))   is non-negative with mean 1,

so that by Markov's inequality it reaches 1/β with probability at most β: a mean μ for which
it does is rejected. In the same way Π (1 + λ (X_i - μ)), 0 ≤ λ < 1/μ, rejects means from
below and needs no upper bound on X. A bet near √(2 log(1/β) / (n E X²)) makes the interval as
narrow as Bernstein's inequality with the variance known.

Both capitals move one way in every X and in μ. The integrand does not increase in ε, so
that "δ(ε) ≤ δ is not rejected" can fail for a whole search over ε only by failing at its
one true crossing: no union over ε is needed.

References: Waudby-Smith and Ramdas, arXiv:2010.09686, section 4 (betting; here the bet is
fixed beforehand); Maurer and Pontil, arXiv:0907.3740, for the rate.

Design: pilot draws decide how to draw, how much, and how to bet.

Whatever is chosen here, the bounds hold: the deciding draws come from another stream. A
good choice only makes them narrow. Two tilts are mixed: the one of least range, which
limits what a single draw can contribute, and one further out along the same order, under
which about two draws in five reach the loss in question, which limits the variance.

Reference: ``docs/theorems/balls-in-bins-correlated.md``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from affidavit.accountants.monte_carlo.dominating_pair import Array
from affidavit.accountants.monte_carlo.importance_sampling import (
    DIRECTIONS,
    Direction,
    Draws,
    Tilt,
    draw,
    rows_of,
)

MAX_BET = 0.9
"""Bets nearer to ruin than this gain nothing."""


def log_capital_above(values: Array, draws: int, mean: float, bet: float) -> float:
    """log Π (1 + λ(μ - X)): large where ``mean`` is too high to be true; -inf for a μ ≤ 0.

    ``values`` are the positive ones among ``draws``, each at most 1; ``bet`` λ ≤ 0.9.

    ``values`` have shape (n,).
    """
    if mean <= 0:
        return -math.inf
    base = math.log1p(bet * mean)
    return draws * base + float(np.sum(np.log1p(-bet / (1 + bet * mean) * values)))


def log_capital_below(values: Array, draws: int, mean: float, bet: float) -> float:
    """log Π (1 + λ(X - μ)): large where ``mean`` is too low; -inf where the bet is ruinous.

    ``values`` have shape (n,).
    """
    if bet * mean >= MAX_BET:
        return -math.inf
    base = math.log1p(-bet * mean)
    return draws * base + float(np.sum(np.log1p(bet / (1 - bet * mean) * values)))


def best_bet(second_moment: float, draws: int, log_failure: float) -> float:
    """The bet that suits draws of this E X², for ``log_failure`` = log(1/β)."""
    if second_moment <= 0:
        return MAX_BET
    return min(MAX_BET, math.sqrt(2 * log_failure / (draws * second_moment)))


def first_true(holds: Callable[[float], bool], low: float, high: float, fineness: float) -> float:
    """A point at most ``fineness`` above the first at which the monotone ``holds`` is true.

    It was evaluated there, except that ``high`` is taken for granted.
    """
    if holds(low):
        return low
    while high - low > fineness:
        middle = (low + high) / 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def last_true(holds: Callable[[float], bool], low: float, high: float, fineness: float) -> float:
    """A point at most ``fineness`` below the last at which the monotone ``holds`` is true.

    It was evaluated there, except that ``low`` is taken for granted.
    """
    while high - low > fineness:
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


PILOT = 4096
"""Draws of each pilot round."""
ROUNDS = 3
"""Pilot rounds before an ε is settled on."""
REACHED = 0.4
"""Share of draws that should reach the loss under the outer tilt."""
RELATIVE_WIDTH = 0.03
"""Half width of the interval for δ, relative to it, that the number of draws aims at."""
MIN_DRAWS = 1 << 14
MAX_DRAWS = 1 << 22
SECONDS = 6.0
"""About the longest that one direction may take on one core, in seconds."""


@dataclass(frozen=True, kw_only=True)
class Design:
    """How one direction is drawn; bets are on draws over the range at ``base``, an ε in nats."""

    tilts: tuple[Tilt, ...]
    base: float
    draws: int
    bet_above: float
    bet_below: float

    @property
    def shift(self) -> float:
        """The largest multiple of a mean by which draws are moved."""
        return max(tilt.shift for tilt in self.tilts)

    def log_range(self, epsilon: float) -> float:
        """log of what no draw's value at ``epsilon`` (nats) exceeds."""
        return _log_range(self.tilts, epsilon)


def stream_of(direction: Direction, purpose: int) -> int:
    """The number of a stream of draws; purpose 0 decides, others are pilots."""
    return 64 * DIRECTIONS.index(direction) + purpose


def design_at_delta(
    family: Sequence[Tilt], delta: float, log_failure: float, workers: int
) -> Design:
    """A design for the ε at which the curve of this direction crosses ``delta``.

    Here and below ``log_failure`` is log(1/β), β the probability with which one bound may fail.
    """
    return _at_delta(family, delta, log_failure, workers)[0]


def predicted_epsilon(
    family: Sequence[Tilt], delta: float, log_failure: float, workers: int
) -> float:
    """About the upper end (nats) that the draws will give at ``delta``; **not a bound**."""
    design, pilot = _at_delta(family, delta, log_failure, workers)
    top = math.exp(design.log_range(design.base))
    share = design.draws / len(pilot.drawn)

    def rejects(epsilon: float) -> bool:
        values = np.minimum(pilot.drawn.values(epsilon) / top, 1.0)
        capital = log_capital_above(values, len(pilot.drawn), delta / top, design.bet_above)
        return share * capital >= log_failure

    ceiling = min(tilt.epsilon(delta) for tilt in family)
    return first_true(rejects, min(design.base, ceiling), ceiling, 1e-5 * max(1e-3, ceiling))


def _at_delta(
    family: Sequence[Tilt], delta: float, log_failure: float, workers: int
) -> tuple[Design, _Pilot]:
    ceiling = min(tilt.epsilon(delta) for tilt in family)
    epsilon = ceiling
    for number in range(ROUNDS):
        chosen = _mixture(family, epsilon, number)
        drawn = _drawn(chosen, number, workers)
        epsilon = _crossing(drawn, delta, ceiling)
    pilot = _Pilot(tilts=chosen, drawn=drawn, log_failure=log_failure)
    draws = pilot.enough(epsilon, RELATIVE_WIDTH * delta)
    near = max(0.0, epsilon - 0.5 / chosen[0].decay)
    # So few draws say nothing of a δ far below their range: then look where the range is less.
    far = pilot.range_below(MAX_BET * draws * delta / (2 * log_failure))
    return pilot.design(max(near, min(far, ceiling)), epsilon, draws), pilot


def design_at_epsilon(
    family: Sequence[Tilt], epsilon: float, log_failure: float, workers: int
) -> Design:
    """A design for δ at ``epsilon`` (nats)."""
    chosen = _mixture(family, epsilon, 0)
    drawn = _drawn(chosen, 0, workers)
    pilot = _Pilot(tilts=chosen, drawn=drawn, log_failure=log_failure)
    draws = pilot.enough(epsilon, RELATIVE_WIDTH * pilot.mean(epsilon))
    return pilot.design(epsilon, epsilon, draws)


def design_to_rule_out(
    family: Sequence[Tilt], epsilon: float, delta: float, log_failure: float, workers: int
) -> Design | None:
    """A design to show that δ at ``epsilon`` (nats) is below ``delta``; None if it is too near."""
    chosen = _mixture(family, epsilon, 0)
    drawn = _drawn(chosen, 0, workers)
    pilot = _Pilot(tilts=chosen, drawn=drawn, log_failure=log_failure)
    gap = delta - pilot.mean(epsilon)
    if gap < 0.2 * delta:
        return None
    return pilot.design(epsilon, epsilon, pilot.enough(epsilon, gap / 2))


def _mixture(family: Sequence[Tilt], epsilon: float, number: int) -> tuple[Tilt, ...]:
    """The tilt of least range at ``epsilon``, and one further out if that reaches it rarely."""
    inner = min(family, key=lambda item: item.log_range(epsilon))
    outward = [t for t in family if t.order == inner.order and t.decay >= inner.decay]
    outward.sort(key=lambda item: item.decay)

    def reaches(index: int) -> bool:
        drawn = draw(outward[index : index + 1], 512, stream=_stream(inner, 8 * number + 1))
        return len(drawn.values(epsilon)) >= REACHED * len(drawn)

    low, high = 0, len(outward) - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if reaches(middle) else (middle + 1, high)
    return (inner,) if low == 0 else (inner, outward[low])


def _drawn(chosen: tuple[Tilt, ...], number: int, workers: int) -> Draws:
    return draw(chosen, PILOT, stream=_stream(chosen[0], 8 * number + 2), workers=workers)


def _stream(tilt: Tilt, purpose: int) -> int:
    return stream_of(tilt.direction, purpose)


def _crossing(drawn: Draws, delta: float, ceiling: float) -> float:
    """Where the mean of pilot draws falls to ``delta``."""
    return first_true(
        lambda epsilon: math.fsum(drawn.values(epsilon)) <= delta * len(drawn), 0.0, ceiling, 1e-4
    )


@dataclass(frozen=True, kw_only=True)
class _Pilot:
    """Pilot draws and what they say about the deciding ones."""

    tilts: tuple[Tilt, ...]
    drawn: Draws
    log_failure: float

    def mean(self, epsilon: float) -> float:
        """An estimate of δ at ``epsilon``."""
        return math.fsum(self.drawn.values(epsilon)) / len(self.drawn)

    def square(self, epsilon: float) -> float:
        """An estimate of the second moment of one draw at ``epsilon``."""
        return math.fsum(self.drawn.values(epsilon) ** 2) / len(self.drawn)

    def enough(self, epsilon: float, width: float) -> int:
        """Draws for a half width of δ of ``width``, within what a person waits for."""
        requested = math.inf
        if width > 0:
            variance = 2 * self.log_failure * self.square(epsilon) / width**2
            reach = math.exp(_log_range(self.tilts, epsilon))
            requested = max(variance, self.log_failure * reach / (5 * width))
        pair = self.tilts[0].pair
        products = math.fsum(bins.count**2 * bins.copies for bins in pair.bins)
        most = min(MAX_DRAWS, int(SECONDS * 1e6 / (0.04 * pair.width + 7e-5 * products)))
        rows = rows_of(pair)
        return rows * -(-int(max(MIN_DRAWS, min(requested, most))) // rows)

    def range_below(self, bound: float) -> float:
        """The ε from which the range is at most ``bound``."""
        room = math.log(len(self.tilts)) - math.log(bound)
        return min((tilt.log_range(0.0) + room) / tilt.decay for tilt in self.tilts)

    def design(self, base: float, epsilon: float, draws: int) -> Design:
        """The design with the bets that suit what is seen at ``epsilon``, or at ``base``."""
        top = math.exp(_log_range(self.tilts, base))
        at = max(base, epsilon)
        bet = best_bet(self.square(at) / top**2, draws, self.log_failure)
        # A bet from below is ruined by a mean above 1/λ; this one stays clear of it threefold.
        below = min(bet, 0.3 * top / max(self.mean(epsilon), 1e-9 * top))
        return Design(tilts=self.tilts, base=base, draws=draws, bet_above=bet, bet_below=below)


def _log_range(chosen: Sequence[Tilt], epsilon: float) -> float:
    return min(tilt.log_range(epsilon) for tilt in chosen) + math.log(len(chosen))
