"""GridParameters for compositions that one rare loss decides: two strata, each with its own tilt.

Exponential tilting is efficient where δ is made by many losses that are each a little
larger than usual. At small sampling probabilities and small δ it is made instead by one
loss as large as ε itself, whose law has a heavier tail than any exponential; a tilt that
brings the composition to ε then draws still larger losses to itself, loses the digits in
which δ stands, and widens the window. So the losses are split at a share of ε: what never
exceeds it is tilted as strongly as it needs, and what exceeds it at least once, which is
rare already, hardly at all.

Chosen here: the tilt with the shortest window among those whose rounding can be afforded.
Nothing here bounds anything.

Reference: ``docs/theorems/fourier-lattice.md``, two strata.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from affidavit.accountants.fourier.normal_masses import UNIT_ROUNDOFF, Array
from affidavit.accountants.fourier.privacy_loss import Atoms
from affidavit.accountants.fourier.transform import Window

CUT = 0.5
"""The losses above this share of ε are the rare ones."""
_MIN_ORDER, _MAX_ORDER = 0.06, 4e4
"""Orders tried, the smallest at most as much itself, both in units of 1 / ε."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stratum:
    """log moments at the orders (1/nat) of a ladder, both signs, increasing; shape (m,) each."""

    orders: Array
    log_moments: Array


def strata(
    laws: Sequence[tuple[Atoms, int]], epsilon: float, cut: float, step: float
) -> tuple[Stratum, ...]:
    """The stratum without and the one with a loss above ``cut``, on grids of ``step`` (nats).

    A loss at distance d from its node goes to one beside it with probability d / step, at
    most 1/6 on average: that spread is not small where the steps are many and coarse.
    """
    smallest = _MIN_ORDER * min(1.0, 1.0 / epsilon)
    rungs = math.ceil(2 * math.log2(_MAX_ORDER / epsilon / smallest))
    ladder = smallest * 2.0 ** (0.5 * np.arange(rungs + 1))
    orders = np.concatenate((-ladder[::-1], ladder))
    common = np.zeros(orders.size)
    ratio = np.zeros(orders.size)
    log_ratio = np.full(orders.size, -np.inf)
    moves = np.cosh(np.minimum(np.abs(orders) * step, 100.0)) - 1.0
    for atoms, count in laws:
        distance = np.abs(atoms.losses - atoms.median(0.0)) / step
        common += count * float(atoms.weights @ np.minimum(distance, 1 / 6)) * moves
        split = int(np.searchsorted(atoms.losses, cut, side="right"))
        losses, weights = atoms.losses, atoms.weights
        low = _log_moments(
            np.append(losses[:split], cut), np.append(weights[:split], weights[split - 1]), orders
        )
        high = np.full(orders.size, -np.inf)
        if split < losses.size:
            # The atoms are coarse: there are losses between the last below the cut and it.
            high = _log_moments(
                np.insert(losses[split:], 0, cut),
                np.insert(weights[split:], 0, weights[split]),
                orders,
            )
        common += count * low
        ratio += count * np.logaddexp(0.0, high - low)
        log_ratio = np.logaddexp(log_ratio, high - low + math.log(count))
    several = np.log(np.expm1(np.clip(ratio, 1e-9, 30.0)))
    rare = common + np.where(ratio < 1e-9, log_ratio, np.where(ratio > 30.0, ratio, several))
    return (
        Stratum(orders=orders, log_moments=common),
        Stratum(orders=orders, log_moments=rare),
    )


def window_of(
    stratum: Stratum, epsilon: float, delta: float, tolerance: float, step: float, steps: int
) -> Window:
    """The tilt and window for a stratum whose curve is read at ``epsilon``.

    ``delta`` and ``steps`` (releases) are the whole composition's; ``tolerance`` is the
    relative error of δ allowed, ``step`` that of the grids in nats.
    """
    positive = (stratum.orders > 0) & np.isfinite(stratum.log_moments)
    orders = stratum.orders[positive]
    if orders.size == 0:
        # Nothing of this stratum is there: any window will do.
        near = 8.0 * step
        order = 1.0 / epsilon
        return Window(
            low=epsilon - near, high=epsilon + near, order=order, below=order, above=order
        )
    peaks = -np.log1p(orders) - orders * np.log1p(1 / orders)
    tails = math.log(1e-3 * min(0.1, tolerance) * delta) - peaks + orders * epsilon
    shifts = stratum.orders - orders[:, None]
    with np.errstate(divide="ignore", invalid="ignore"):
        ends = (stratum.log_moments - tails[:, None]) / shifts
    lows = np.where(shifts < -1e-9 * orders[:, None], ends, -np.inf)
    highs = np.where(shifts > 1e-9 * orders[:, None], ends, np.inf)
    low, high = np.argmax(lows, axis=1), np.argmin(highs, axis=1)
    row = np.arange(orders.size)
    bottom = np.minimum(lows[row, low], epsilon) - 8 * step
    top = np.maximum(highs[row, high], epsilon) + 8 * step
    scales = stratum.log_moments[positive] - orders * epsilon
    spreads = peaks + np.log1p(1 / (step * orders * (orders + 1)))
    rounding = scales + 0.5 * spreads + math.log(400.0 * UNIT_ROUNDOFF * steps)
    losses = np.maximum(0.0, rounding - math.log(0.03 * min(1.0, tolerance) * delta))
    lengths = np.where(np.isfinite(top), top, 1e300) - bottom
    best = int(np.lexsort((lengths, losses))[0])
    return Window(
        low=float(bottom[best]),
        high=float(top[best]),
        order=float(orders[best]),
        below=-float(shifts[best, low[best]]),
        above=float(shifts[best, high[best]]),
    )


def _log_moments(losses: Array, weights: Array, orders: Array) -> Array:
    # The largest loss may be too rare for its weight and the others' exponentials to meet.
    with np.errstate(divide="ignore"):
        exponents = orders[:, None] * losses + np.log(weights)
    peaks = exponents.max(axis=1)
    sums: Array = peaks + np.log(np.exp(exponents - peaks[:, None]).sum(axis=1))
    return sums
