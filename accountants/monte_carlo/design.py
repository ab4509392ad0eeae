"""Design: pilot draws decide how to draw, how much, and how to bet.

Whatever is chosen here, the bounds hold: the deciding draws come from another stream. A
good choice only makes them narrow. Two tilts are mixed: the one of least range, which
limits what a single draw can contribute, and one further out along the same order, under
which about two draws in five reach the loss in question, which limits the variance.

Reference: ``docs/theorems/balls-in-bins-correlated.md``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from affidavit.accountants.monte_carlo.bets import (
    LARGEST_BET,
    best_bet,
    first_true,
    log_capital_above,
)
from affidavit.accountants.monte_carlo.draws import Draws, draw, rows_of
from affidavit.accountants.monte_carlo.pair import Pair
from affidavit.accountants.monte_carlo.tilts import DIRECTIONS, Direction, Tilt

PILOT = 4096
"""Draws of each pilot round."""
ROUNDS = 3
"""Pilot rounds before an ε is settled on."""
REACHED = 0.4
"""Share of draws that should reach the loss under the outer tilt."""
RELATIVE_WIDTH = 0.03
"""Half width of the interval for δ, relative to it, that the number of draws aims at."""
LEAST_DRAWS = 1 << 14
MOST_DRAWS = 1 << 22
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
    far = pilot.range_below(LARGEST_BET * draws * delta / (2 * log_failure))
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
    inner = min(family, key=lambda each: each.log_range(epsilon))
    outward = [t for t in family if t.order == inner.order and t.decay >= inner.decay]
    outward.sort(key=lambda each: each.decay)

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
        wanted = math.inf
        if width > 0:
            variance = 2 * self.log_failure * self.square(epsilon) / width**2
            reach = math.exp(_log_range(self.tilts, epsilon))
            wanted = max(variance, self.log_failure * reach / (5 * width))
        pair = self.tilts[0].pair
        most = min(MOST_DRAWS, int(SECONDS * 1e6 / (0.04 * pair.width + 7e-5 * _products(pair))))
        rows = rows_of(pair)
        return rows * -(-int(max(LEAST_DRAWS, min(wanted, most))) // rows)

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


def _products(pair: Pair) -> float:
    return math.fsum(bins.count**2 * bins.copies for bins in pair.bins)
