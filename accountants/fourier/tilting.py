"""Tilts and windows: where a composition's curve is read. Nothing here bounds anything.

With K(λ) = Σ count · log E[exp(λ L)] over the releases, the hockey-stick curve is

    δ(ε) = (1/2πi) ∫ exp(K(s) - s ε) / (s (s + 1)) ds    along Re s = λ > 0,

and the integrand is least along the real axis at the λ with K'(λ) = ε + 1/λ + 1/(λ+1).
``Saddle`` is that λ with ε, log δ and the first moments of the tilted law. Its δ is the leading
term of the Laplace expansion, good to some per cent where many releases are composed: **not a
bound**.

Exponential tilting is efficient where many losses, each a little larger than usual, make up δ. At
small sampling probabilities and small δ one loss as large as ε itself decides, whose law has a
heavier tail than any exponential. A tilt that brings the composition to ε then favours still larger
losses, loses the digits in which δ stands, and widens the window. There the losses are split at a
share of ε into two strata: the part whose losses never exceed it is tilted as strongly as it needs,
and the part with at least one larger loss, which is rare already, hardly at all. Each gets the
tilt with the shortest window among those whose rounding is affordable.

References: Daniels, "Saddlepoint approximations in statistics" (1954); Zheng, Dong, Long and Su,
arXiv:2003.04493; Alghamdi et al., "The Saddle-Point Method in Differential Privacy", ICML 2023;
docs/theorems/fourier-lattice.md, two strata.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from affidavit.accountants.fourier.cache import down
from affidavit.accountants.fourier.privacy_loss import UNIT_ROUNDOFF, Array, Atoms

Composition = Sequence[tuple[Atoms, int]]
"""The laws of the releases with their counts."""

STRATUM_CUT = 0.5
"""Share of ε above which a loss belongs to the rare stratum."""
_MIN_LOG_ORDER, _MAX_LOG_ORDER = math.log(1e-6), math.log(1e7)
_MAX_NEWTON_STEPS = 30
"""Steps of Newton's method before bisection alone."""
_MIN_SHIFT, _SHIFT_COUNT = 0.1, 15
"""The smallest further tilt that bounds a window, in units of one over the tilted deviation, and
the number of further tilts, each √2 times the one before."""
_MIN_STRATUM_ORDER, _MAX_STRATUM_ORDER = 0.06, 4e4
"""Orders tried for a stratum, in units of 1 / ε; the smallest is also at most this in 1/nat."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Saddle:
    """A point of the curve by its tilt: order λ, ε, log δ, and the tilted law's moments.

    ε and ``mean`` in nats, ``variance`` in nats², λ in 1/nat.
    """

    order: float
    epsilon: float
    log_delta: float
    mean: float
    variance: float

    @property
    def curvature(self) -> float:
        """The second derivative of the integrand's logarithm, in nats²: d epsilon / d order."""
        return self.variance + self.order**-2 + (self.order + 1) ** -2


def at_order(laws: Composition, order: float) -> Saddle:
    """Return the point of the approximate curve whose saddle is ``order`` (1/nat)."""
    log_moment = mean = variance = 0.0
    for atoms, count in laws:
        exponents = order * atoms.losses
        peak = float(exponents.max())
        weights = atoms.weights * np.exp(exponents - peak)
        total = float(weights.sum())
        first = float(weights @ atoms.losses) / total
        centred = atoms.losses - first
        second = float(weights @ (centred * centred)) / total
        log_moment += count * (peak + math.log(total))
        mean += count * first
        variance += count * second
    # Strong tilts concentrate a bounded law on its last atom; a tiny spread keeps the parameters
    # finite there.
    variance = max(variance, (1e-6 / (1 + order)) ** 2)
    epsilon = mean - 1 / order - 1 / (order + 1)
    result = Saddle(order=order, epsilon=epsilon, log_delta=0.0, mean=mean, variance=variance)
    log_delta = (
        log_moment
        - order * epsilon
        - math.log(order)
        - math.log1p(order)
        - 0.5 * math.log(2 * math.pi * result.curvature)
    )
    return replace(result, log_delta=log_delta)


def at_delta(laws: Composition, delta: float) -> Saddle:
    """Return the saddle near ``delta``; its ε may be negative."""

    def excess(point: Saddle) -> tuple[float, float]:
        return point.log_delta - math.log(delta), point.order**2 * point.curvature

    return _search(laws, excess, 1e-3)


def at_epsilon(laws: Composition, epsilon: float) -> Saddle:
    """Return the saddle near ``epsilon`` (nats)."""

    def excess(point: Saddle) -> tuple[float, float]:
        return epsilon - point.epsilon, point.order * point.curvature

    return _search(laws, excess, 5e-3)


def _search(
    laws: Composition, excess: Callable[[Saddle], tuple[float, float]], accuracy: float
) -> Saddle:
    """Return the order where ``excess``, decreasing in the order, changes sign, to ``accuracy``.

    ``excess`` also returns about how fast it falls with log λ. Newton's method in log λ starts at
    λ = 1 and moves by at most a factor of e² at once; bisection replaces it where it leaves the
    bracket or is slow.
    """
    low, high, at = _MIN_LOG_ORDER, _MAX_LOG_ORDER, 0.0
    for turn in itertools.count():
        point = at_order(laws, math.exp(at))
        value, fall = excess(point)
        if value > 0:
            low = at
        else:
            high = at
        move = max(-2.0, min(2.0, value / fall))
        if abs(move) <= accuracy / 2 or high - low <= accuracy:
            break
        follow = turn < _MAX_NEWTON_STEPS and low < at + move < high
        at = at + move if follow else (low + high) / 2
    return point


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """The composed losses that a transform represents, and the tilts that shape it.

    ``low`` and ``high`` are in nats and tilts in 1/nat: ``order`` is λ, and ``below`` and ``above``
    are the further tilts with which Chernoff's bound holds the mass outside. Any positive values
    are sound, good ones are tight.
    """

    low: float
    high: float
    order: float
    below: float
    above: float

    def points(self, step: float) -> int:
        """Return the number of points at a ``step`` in nats; very large for an infinite window."""
        return math.ceil(min((self.high - self.low) / step, 1e18)) + 2


def log_peak(order: float) -> float:
    """Return the logarithm of λ^λ / (1+λ)^(1+λ), the largest e^{-λy} (1 - e^{-y})_+."""
    return -math.log1p(order) - order * math.log1p(1 / order)


def bounded_exp(exponent: float) -> float:
    """Return e^``exponent``, infinite where a double overflows."""
    return math.exp(exponent) if exponent < 700.0 else math.inf


def tilted_window(
    atoms: Composition,
    saddle: Saddle,
    epsilon: float,
    delta: float,
    tolerance: float,
    step: float,
) -> Window:
    """Return a window outside of which ``atoms`` hold too little to matter near ``epsilon`` (nats).

    ``saddle`` is that of the tilt, and log δ, about that of ``delta``, is bracketed to
    ``tolerance``. The ends are Chernoff's bounds with the best of a ladder of further tilts.
    """
    order, spread = saddle.order, math.sqrt(saddle.variance)
    # Mass outside the window enters δ at most e^{K - λε} max(g) times.
    scale = sum(count * law.log_moment(order) for law, count in atoms) - order * epsilon
    log_tail = math.log(1e-3 * min(0.1, tolerance) * delta) - scale - log_peak(order)
    shifts = down(_MIN_SHIFT / spread, 2) * 2.0 ** (0.5 * np.arange(_SHIFT_COUNT))
    orders = order + np.concatenate((-shifts, [0.0], shifts))
    moments = sum((count * law.log_moments(orders) for law, count in atoms), np.zeros(1))
    further = moments - moments[shifts.size]
    lows = (log_tail - further[: shifts.size]) / shifts
    highs = (further[shifts.size + 1 :] - log_tail) / shifts
    low, high = int(np.argmax(lows)), int(np.argmin(highs))
    return Window(
        low=min(float(lows[low]), epsilon - 0.01 * spread) - step,
        high=max(float(highs[high]), epsilon + 0.01 * spread) + step,
        order=order,
        below=float(shifts[low]),
        above=float(shifts[high]),
    )


def tilted_floor(atoms: Atoms, order: float, mass: float) -> float:
    """Return a loss (nats) below which the tilted law of one release has at most ``mass``."""
    cumulative: Array = np.cumsum(atoms.tilted(order))
    index = max(0, int(np.searchsorted(cumulative, mass)) - 1)
    return float(atoms.losses[index])


def strata(
    laws: Composition, epsilon: float, cut: float, step: float
) -> tuple[Array, tuple[Array, Array]]:
    """Return orders (1/nat) and the log moments without and with a loss above ``cut``, (m,) each.

    ``step`` is that of the grids, in nats.

    A loss at distance d from its node moves to a neighbour with probability d / step, at most 1/6
    on average. That spread is not small where the steps are many and coarse.
    """
    smallest = _MIN_STRATUM_ORDER * min(1.0, 1.0 / epsilon)
    rungs = math.ceil(2 * math.log2(_MAX_STRATUM_ORDER / epsilon / smallest))
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
            # The atoms are coarse: there are losses between the cut and the first atom above it.
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
    return orders, (common, rare)


def stratum_window(
    ladder: Array,
    log_moments: Array,
    epsilon: float,
    delta: float,
    tolerance: float,
    step: float,
    steps: int,
) -> Window:
    """Return the tilt and window for a stratum whose curve is read at ``epsilon``.

    ``log_moments`` are the stratum's at a ``ladder`` of orders (1/nat), of shape (m,) each.
    ``delta`` and ``steps`` (releases) are the whole composition's, ``tolerance`` the allowed
    relative error of δ, and ``step`` that of the grids in nats.
    """
    positive = (ladder > 0) & np.isfinite(log_moments)
    orders = ladder[positive]
    if orders.size == 0:
        # The stratum has no mass, so any window is good.
        near = 8.0 * step
        order = 1.0 / epsilon
        return Window(
            low=epsilon - near, high=epsilon + near, order=order, below=order, above=order
        )
    peaks = -np.log1p(orders) - orders * np.log1p(1 / orders)
    tails = math.log(1e-3 * min(0.1, tolerance) * delta) - peaks + orders * epsilon
    shifts = ladder - orders[:, None]
    with np.errstate(divide="ignore", invalid="ignore"):
        ends = (log_moments - tails[:, None]) / shifts
    lows = np.where(shifts < -1e-9 * orders[:, None], ends, -np.inf)
    highs = np.where(shifts > 1e-9 * orders[:, None], ends, np.inf)
    low, high = np.argmax(lows, axis=1), np.argmin(highs, axis=1)
    row = np.arange(orders.size)
    bottom = np.minimum(lows[row, low], epsilon) - 8 * step
    top = np.maximum(highs[row, high], epsilon) + 8 * step
    scales = log_moments[positive] - orders * epsilon
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
    # The largest loss may be too rare for the product of its weight and the exponentials.
    with np.errstate(divide="ignore"):
        exponents = orders[:, None] * losses + np.log(weights)
    peaks = exponents.max(axis=1)
    sums: Array = peaks + np.log(np.exp(exponents - peaks[:, None]).sum(axis=1))
    return sums
