"""Confidence bounds for means of draws, and pilot draws that design the deciding ones.

**Bets.** X_1..X_n are independent with X ≥ 0 and mean μ. For any bet 0 ≤ λ ≤ 1/(1-μ) that does not
depend on them, and X ≤ 1,

    Π (1 + λ (μ - X_i))   is non-negative with mean 1,

so by Markov's inequality it reaches 1/β with probability at most β, and a mean μ for which it does
is rejected. In the same way Π (1 + λ (X_i - μ)), 0 ≤ λ < 1/μ, rejects means from below and needs no
upper bound on X. A bet near √(2 log(1/β) / (n E X²)) makes the interval as narrow as Bernstein's
inequality with known variance. Both products are monotone in every X and in μ. Since the integrand
does not increase in ε, "δ(ε) ≤ δ is not rejected" can fail in a whole search over ε only by failing
at its one true crossing, and no union over ε is needed.

**Design.** Pilot draws decide the tilts, the number of draws and the bets. The bounds hold for any
design, because the deciding draws come from another stream; a good design makes them narrow. Two
tilts are mixed: the one of least range, which limits the contribution of a single draw, and one
further out along the same order, under which about two draws in five reach the loss, which limits
the variance.

References: Waudby-Smith and Ramdas, arXiv:2010.09686, section 4 (betting; here the bet is fixed
beforehand); Maurer and Pontil, arXiv:0907.3740, for the rate;
docs/theorems/balls-in-bins-correlated.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from affidavit.accountants.monte_carlo.importance_sampling import (
    DIRECTIONS,
    Direction,
    Draws,
    Tilt,
    chunk_rows,
    draw,
)
from affidavit.accountants.rounding import Array

MAX_BET = 0.9
"""Larger bets gain nothing."""


def log_capital_above(values: Array, draws: int, mean: float, bet: float) -> float:
    """Return log Π (1 + λ(μ - X)), which is large if ``mean`` is too high.

    It is -inf for a mean μ ≤ 0. ``values``, shape (n,), are the positive ones among ``draws``, each
    at most 1. ``bet`` is λ ≤ 0.9.
    """
    if mean <= 0:
        return -math.inf
    base = math.log1p(bet * mean)
    return draws * base + float(np.sum(np.log1p(-bet / (1 + bet * mean) * values)))


def log_capital_below(values: Array, draws: int, mean: float, bet: float) -> float:
    """Return log Π (1 + λ(X - μ)), which is large if ``mean`` is too low.

    It is -inf for a bet that may lose everything. ``values`` have shape (n,).
    """
    if bet * mean >= MAX_BET:
        return -math.inf
    base = math.log1p(-bet * mean)
    return draws * base + float(np.sum(np.log1p(bet / (1 - bet * mean) * values)))


def best_bet(second_moment: float, draws: int, log_failure: float) -> float:
    """Return the best bet for draws of this E X² and ``log_failure`` = log(1/β)."""
    if second_moment <= 0:
        return MAX_BET
    return min(MAX_BET, math.sqrt(2 * log_failure / (draws * second_moment)))


def find_first_true(
    holds: Callable[[float], bool], low: float, high: float, accuracy: float
) -> float:
    """Return a point at most ``accuracy`` above the first at which the monotone ``holds`` is true.

    ``holds`` was evaluated there unless it is ``high``.
    """
    if holds(low):
        return low
    while high - low > accuracy:
        middle = (low + high) / 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def find_last_true(
    holds: Callable[[float], bool], low: float, high: float, accuracy: float
) -> float:
    """Return a point at most ``accuracy`` below the last at which the monotone ``holds`` is true.

    ``holds`` was evaluated there unless it is ``low``.
    """
    while high - low > accuracy:
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


PILOT_DRAWS = 4096
"""Draws of each pilot round."""
PILOT_ROUNDS = 3
"""Pilot rounds before ε is chosen."""
TARGET_SHARE = 0.4
"""Share of draws that should reach the loss under the outer tilt."""
RELATIVE_WIDTH = 0.03
"""Target half width of the interval for δ, relative to δ."""
MIN_DRAWS = 1 << 14
MAX_DRAWS = 1 << 22
MAX_SECONDS = 6.0
"""About the maximal duration of one direction on one core."""


@dataclass(frozen=True, kw_only=True)
class Design:
    """The design of one direction. Bets are on draws over the range at ``base``, an ε in nats."""

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
        """Return log of an upper bound of a draw's value at ``epsilon`` (nats)."""
        return _log_range(self.tilts, epsilon)


def stream_number(direction: Direction, purpose: int) -> int:
    """Return the number of a stream of draws. Purpose 0 decides, others are pilots."""
    return 64 * DIRECTIONS.index(direction) + purpose


def predicted_epsilon(family: Sequence[Tilt], delta: float, log_failure: float) -> float:
    """Return about the upper bound (nats) of the draws at ``delta``; **not a bound**."""
    design, pilot = design_at_delta(family, delta, log_failure)
    top = math.exp(design.log_range(design.base))
    share = design.draws / len(pilot.drawn)

    def rejects(epsilon: float) -> bool:
        values = np.minimum(pilot.drawn.values(epsilon) / top, 1.0)
        capital = log_capital_above(values, len(pilot.drawn), delta / top, design.bet_above)
        return share * capital >= log_failure

    ceiling = min(tilt.epsilon(delta) for tilt in family)
    return find_first_true(rejects, min(design.base, ceiling), ceiling, 1e-5 * max(1e-3, ceiling))


def design_at_delta(
    family: Sequence[Tilt], delta: float, log_failure: float
) -> tuple[Design, Pilot]:
    """Return a design for the ε at which this direction reaches ``delta``, and its pilot.

    ``log_failure`` is log(1/β), β the probability with which one bound may fail.
    """
    ceiling = min(tilt.epsilon(delta) for tilt in family)
    epsilon = ceiling
    for number in range(PILOT_ROUNDS):
        pilot = _run_pilot(family, epsilon, log_failure, number)
        epsilon = _crossing(pilot.drawn, delta, ceiling)
    draws = pilot.required_draws(epsilon, RELATIVE_WIDTH * delta)
    near = max(0.0, epsilon - 0.5 / pilot.tilts[0].decay)
    # Few draws bound no δ far below their range, so start where the range is smaller.
    far = pilot.epsilon_of_range(MAX_BET * draws * delta / (2 * log_failure))
    return pilot.design(max(near, min(far, ceiling)), epsilon, draws), pilot


def design_at_epsilon(family: Sequence[Tilt], epsilon: float, log_failure: float) -> Design:
    """Return a design for δ at ``epsilon`` (nats)."""
    pilot = _run_pilot(family, epsilon, log_failure)
    draws = pilot.required_draws(epsilon, RELATIVE_WIDTH * pilot.mean(epsilon))
    return pilot.design(epsilon, epsilon, draws)


def design_to_rule_out(
    family: Sequence[Tilt], epsilon: float, delta: float, log_failure: float
) -> Design | None:
    """Return a design to show that δ at ``epsilon`` (nats) is below ``delta``, or None.

    It is None if δ is too close to ``delta``.
    """
    pilot = _run_pilot(family, epsilon, log_failure)
    gap = delta - pilot.mean(epsilon)
    if gap < 0.2 * delta:
        return None
    return pilot.design(epsilon, epsilon, pilot.required_draws(epsilon, gap / 2))


def _run_pilot(
    family: Sequence[Tilt], epsilon: float, log_failure: float, number: int = 0
) -> Pilot:
    tilts = _mixture(family, epsilon, number)
    stream = stream_number(tilts[0].direction, 8 * number + 2)
    return Pilot(
        tilts=tilts, drawn=draw(tilts, PILOT_DRAWS, stream=stream), log_failure=log_failure
    )


def _mixture(family: Sequence[Tilt], epsilon: float, number: int) -> tuple[Tilt, ...]:
    """Return the tilt of least range at ``epsilon``, and one further out if that is too rare."""
    inner = min(family, key=lambda item: item.log_range(epsilon))
    outward = [t for t in family if t.order == inner.order and t.decay >= inner.decay]
    outward.sort(key=lambda item: item.decay)
    stream = stream_number(inner.direction, 8 * number + 1)

    def is_frequent(index: int) -> bool:
        drawn = draw(outward[index : index + 1], 512, stream=stream)
        return len(drawn.values(epsilon)) >= TARGET_SHARE * len(drawn)

    low, high = 0, len(outward) - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if is_frequent(middle) else (middle + 1, high)
    return (inner,) if low == 0 else (inner, outward[low])


def _crossing(drawn: Draws, delta: float, ceiling: float) -> float:
    """Return the ε (nats) at which the mean of pilot draws is ``delta``."""
    return find_first_true(
        lambda epsilon: math.fsum(drawn.values(epsilon)) <= delta * len(drawn), 0.0, ceiling, 1e-4
    )


@dataclass(frozen=True, kw_only=True)
class Pilot:
    """Pilot draws and their estimates for the deciding ones."""

    tilts: tuple[Tilt, ...]
    drawn: Draws
    log_failure: float

    def mean(self, epsilon: float) -> float:
        """Return an estimate of δ at ``epsilon`` (nats)."""
        return math.fsum(self.drawn.values(epsilon)) / len(self.drawn)

    def second_moment(self, epsilon: float) -> float:
        """Return an estimate of the second moment of one draw at ``epsilon`` (nats)."""
        return math.fsum(self.drawn.values(epsilon) ** 2) / len(self.drawn)

    def required_draws(self, epsilon: float, width: float) -> int:
        """Return the draws for a half width of δ of ``width``, within ``MAX_SECONDS``."""
        requested = math.inf
        if width > 0:
            variance = 2 * self.log_failure * self.second_moment(epsilon) / width**2
            reach = math.exp(_log_range(self.tilts, epsilon))
            requested = max(variance, self.log_failure * reach / (5 * width))
        pair = self.tilts[0].pair
        products = math.fsum(bins.count**2 * bins.copies for bins in pair.bins)
        most = min(MAX_DRAWS, int(MAX_SECONDS * 1e6 / (0.04 * pair.width + 7e-5 * products)))
        rows = chunk_rows(pair)
        return rows * -(-int(max(MIN_DRAWS, min(requested, most))) // rows)

    def epsilon_of_range(self, bound: float) -> float:
        """Return the ε (nats) from which the range is at most ``bound``."""
        room = math.log(len(self.tilts)) - math.log(bound)
        return min((tilt.log_range(0.0) + room) / tilt.decay for tilt in self.tilts)

    def design(self, base: float, epsilon: float, draws: int) -> Design:
        """Return the design with the best bets at ``epsilon`` or ``base`` (nats)."""
        top = math.exp(_log_range(self.tilts, base))
        at = max(base, epsilon)
        bet = best_bet(self.second_moment(at) / top**2, draws, self.log_failure)
        # A mean above 1/λ ruins a bet from below; this bet keeps a threefold distance.
        below = min(bet, 0.3 * top / max(self.mean(epsilon), 1e-9 * top))
        return Design(tilts=self.tilts, base=base, draws=draws, bet_above=bet, bet_below=below)


def _log_range(chosen: Sequence[Tilt], epsilon: float) -> float:
    return min(tilt.log_range(epsilon) for tilt in chosen) + math.log(len(chosen))
