"""The saddle point of a composition, which steers everything and bounds nothing.

With K(λ) = Σ count · log E[exp(λ L)] over the releases, the hockey-stick curve is

    δ(ε) = (1/2πi) ∫ exp(K(s) - s ε) / (s (s + 1)) ds    along Re s = λ > 0,

and the integrand is least along the real axis at the λ with K'(λ) = ε + 1/λ + 1/(λ+1).
``Saddle`` is that λ with ε, log δ and the first moments of the tilted law. Its δ is the
leading term of the Laplace expansion, good to some per cent of δ where many releases are
composed, and what ``approximate_epsilon`` gives: **not a bound**.

References: Daniels, "Saddlepoint approximations in statistics" (1954); Zheng, Dong, Long
and Su, arXiv:2003.04493; Alghamdi et al., "The Saddle-Point Method in Differential
Privacy", ICML 2023.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from affidavit.accountants.fourier.cache import down
from affidavit.accountants.fourier.normal_masses import Array
from affidavit.accountants.fourier.privacy_loss import Atoms

Composition = Sequence[tuple[Atoms, int]]
"""The laws of the releases with how often each runs."""

_MIN_LOG_ORDER = math.log(1e-6)
_MAX_LOG_ORDER = math.log(1e7)
_NEWTON = 30
"""Steps of Newton's method at most, before bisection alone."""
_NEAREST, _TRIED = 0.1, 15
"""The least of the further tilts tried by ``tilted_reach``, in units of one over the tilted
deviation, and how many there are, each √2 times as much as the one before."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Saddle:
    """A point of the curve by its tilt: order λ, ε, log δ, and the tilted law's moments.

    ε, ``mean`` in nats, ``variance`` in nats², λ in 1/nat.
    """

    order: float
    epsilon: float
    log_delta: float
    mean: float
    variance: float

    @property
    def curvature(self) -> float:
        """Of the integrand's logarithm along the real axis, in nats²: d epsilon / d order."""
        return self.variance + self.order**-2 + (self.order + 1) ** -2


def at_order(laws: Composition, order: float) -> Saddle:
    """The point of the approximate curve whose saddle is ``order`` (1/nat)."""
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
    # Strong tilts pile a bounded law up on its last atom; a hair of spread keeps the
    # parameters finite there.
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
    """The saddle near ``delta``; ε is not cut at zero."""

    def excess(point: Saddle) -> tuple[float, float]:
        return point.log_delta - math.log(delta), point.order**2 * point.curvature

    return _search(laws, excess, 1e-3)


def at_epsilon(laws: Composition, epsilon: float) -> Saddle:
    """The saddle near ``epsilon`` (nats)."""

    def excess(point: Saddle) -> tuple[float, float]:
        return epsilon - point.epsilon, point.order * point.curvature

    return _search(laws, excess, 5e-3)


def _search(
    laws: Composition, excess: Callable[[Saddle], tuple[float, float]], accuracy: float
) -> Saddle:
    """The order where ``excess``, decreasing in the order, changes sign, to ``accuracy`` of it.

    ``excess`` comes with about how fast it falls with log λ. Newton's method in log λ from
    λ = 1, by at most a factor of e² at once; bisection where it leaves the bracket or is slow.
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
        follow = turn < _NEWTON and low < at + move < high
        at = at + move if follow else (low + high) / 2
    return point


@dataclass(frozen=True, kw_only=True, slots=True)
class Reach:
    """Losses that bound the bulk of a tilted composition, and the further tilts that say so.

    ``low`` and ``high`` in nats, ``below`` and ``above`` in 1/nat.
    """

    low: float
    high: float
    below: float
    above: float


def tilted_reach(laws: Composition, point: Saddle, log_tail: float) -> Reach:
    """Losses below and above which the tilted composition has about exp(``log_tail``) mass.

    Chernoff's bound with the best of a ladder of further tilts on either side.
    """
    shifts = down(_NEAREST / math.sqrt(point.variance), 2) * 2.0 ** (0.5 * np.arange(_TRIED))
    orders = point.order + np.concatenate((-shifts, [0.0], shifts))
    moments = sum((count * atoms.log_moments(orders) for atoms, count in laws), np.zeros(1))
    further = moments - moments[shifts.size]
    lows = (log_tail - further[: shifts.size]) / shifts
    highs = (further[shifts.size + 1 :] - log_tail) / shifts
    low, high = int(np.argmax(lows)), int(np.argmin(highs))
    return Reach(
        low=float(lows[low]),
        high=float(highs[high]),
        below=float(shifts[low]),
        above=float(shifts[high]),
    )


def tilted_floor(atoms: Atoms, order: float, mass: float) -> float:
    """A loss (nats) below which the tilted law of one release has at most ``mass``."""
    cumulative: Array = np.cumsum(atoms.tilted(order))
    index = max(0, int(np.searchsorted(cumulative, mass)) - 1)
    return float(atoms.losses[index])
