"""The rule: which further run a budget (ε, δ) admits, whatever led to it being asked for.

Later plans are chosen in view of earlier results, so the composition that decides is a
privacy filter. It is two, each with a share of δ, and a run is admitted while either says so:

* **Exact.** If the first run consists of steps on fresh lots, ``base`` is a kind of step that
  dominates them: every later release is such a step too, and the composition of all of them as
  if each were ``base`` meets (ε, share of δ). Otherwise every run is exactly one Gaussian, and
  Σ μ² stays at most the μ² whose curve meets (ε, share of δ).
* **Rényi.** With weights w_α of the orders, fixed when the budget began, and S(α) the sum of
  the divergences, for every x

      δ' Σ w_α exp((α - 1)(x - S(α)))  >=  1 - exp(ε - x),        δ' the other share.

  With one order that is the filter of Feldman and Zrnic. With several it is a test of its own:
  "some order is within its own budget" would spend δ once for every order, and the weights
  are how it is spent here.

A budget that a single run uses up is the one exception: the first run of all, which nothing
that was released could have led to, may be admitted by its own certificate. Its δ is then
gone for both filters.

Guarantees
    * Everything that is ever admitted is (ε, δ)-DP together, for every way of choosing
      runs, their order, their interleaving and when they stop.
    * Beside the first run, whose steps are the base, the sum alone matters, not the order; more
      noise, fewer steps, a larger ε or δ never turn an admission into a refusal, but for the width
      of the accountant's bracket.
    * Rounding never admits: the test is evaluated one-sidedly, with slack.

Proof and references: docs/theorems/privacy-filter.md.

>>> from affidavit.accountants.privacy_filter.cost import Cost
>>> budget = Budget(epsilon=8.0, delta=1e-5, filter=Filter.start(8.0, 1e-5))
>>> run = Cost.of(renyi=[a / 50 for a in ORDERS], mu_squared=0.04, epsilon=0.8, delta=1e-6)
>>> budget.admits(run), budget.admits(run.times(1000))
(True, False)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Self

import numpy as np

from affidavit.accountants.fourier.privacy_loss import Array
from affidavit.accountants.gaussian import MAX_MU, MIN_MU, GaussianCurve
from affidavit.accountants.privacy_filter.cost import DELTA_UNIT, UNIT, Cost, Step
from affidavit.accountants.privacy_filter.renyi_divergences import ORDERS
from affidavit.accountants.protocol import AccountantError
from affidavit.accountants.registry import accountant
from affidavit.plan import Repeated

GAUSSIAN_SHARE = 0.5
"""The share of δ that the exact filter has, of Gaussians or of steps of one kind."""
MARGIN = 1e-9
"""By how much the Rényi test must hold; far above what is lost evaluating it."""
MAX_FORECAST = 10_000
MAX_EPSILON = 1e5
"""Nats; beyond it ``Budget.spent`` is infinite."""
_FURTHEST = 60.0
"""Beyond ε + 60 nats 1 - exp(ε - x) is one."""
_DECAY = 0.3
"""A weight falls like 1/(1 + (distance/_DECAY)²) in log(α - 1) from the Gaussian's best order."""


@dataclass(frozen=True, kw_only=True)
class Filter:
    """What stays fixed while a budget lives: orders, weights, and the exact filter's share."""

    orders: tuple[float, ...]
    weights: tuple[float, ...]
    gaussian_share: float

    def __post_init__(self) -> None:
        if len(self.orders) != len(self.weights) or not all(order > 1 for order in self.orders):
            raise ValueError("every order is above one and has a weight")
        if min(self.weights) < 0 or math.fsum(self.weights) > 1:
            raise ValueError("the weights are not negative and sum to one at most")
        if not 0 <= self.gaussian_share <= 1:
            raise ValueError("the Gaussian's share of delta lies between 0 and 1")

    @classmethod
    def start(cls, epsilon: float, delta: float) -> Self:
        """The filter of a budget that begins at (``epsilon``, ``delta``), ε in nats."""
        best = math.log(_best_exponent(epsilon, delta * (1 - GAUSSIAN_SHARE)))
        raw = [1 / (1 + ((math.log(order - 1) - best) / _DECAY) ** 2) for order in ORDERS]
        total = math.fsum(raw) * (1 + 1e-12)
        return cls(
            orders=ORDERS,
            weights=tuple(item / total for item in raw),
            gaussian_share=GAUSSIAN_SHARE,
        )

    def as_document(self) -> dict[str, Any]:
        """JSON data; doubles are written so that they read back as they are."""
        return {
            "orders": [repr(order) for order in self.orders],
            "weights": [repr(weight) for weight in self.weights],
            "gaussian_share": repr(self.gaussian_share),
        }

    @classmethod
    def read(cls, document: Mapping[str, Any]) -> Self:
        """The filter of ``as_document``; raises ``KeyError`` or ``ValueError`` for other data."""
        return cls(
            orders=tuple(float(item) for item in document["orders"]),
            weights=tuple(float(entry) for entry in document["weights"]),
            gaussian_share=float(document["gaussian_share"]),
        )

    @cached_property
    def exponents(self) -> Array:
        """α - 1. One an order, shape (m,)."""
        return np.asarray(np.array(self.orders) - 1, dtype=np.float64)

    @cached_property
    def log_weights(self) -> Array:
        """log w_α, minus infinity for a weight of zero. One an order, shape (m,)."""
        with np.errstate(divide="ignore"):
            logs: Array = np.log(np.array(self.weights))
        return logs


@dataclass(frozen=True, kw_only=True)
class Budget:
    """(ε in nats, δ) and its filter; ``taken`` is δ that a run admitted alone took.

    ``base`` dominates the steps of the first run, and is None where that has other releases.
    """

    epsilon: float
    delta: float
    filter: Filter
    taken: float = 0.0
    base: Step | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.epsilon) and self.epsilon > 0 and 0 < self.delta < 1):
            raise ValueError("a budget has a positive finite epsilon and a delta in (0, 1)")

    def admits(self, total: Cost) -> bool:
        """Whether runs that cost ``total`` together stay within the budget."""
        return self._epsilon_of_steps(total) <= self.epsilon or self._sums_fit(total, self.epsilon)

    def _epsilon_of_steps(self, total: Cost) -> float:
        """ε of all steps as if each were the base, at the exact filter's δ; or infinity."""
        count = None if self.base is None else total.steps.dominated_by(self.base)
        share = self._left * self.filter.gaussian_share
        if self.base is None or count is None or share <= 0:
            return math.inf
        return _epsilon_of_base(self.base, count, share)

    def _sums_fit(self, total: Cost, epsilon: float) -> bool:
        if self._left <= 0:
            return False
        share = self.filter.gaussian_share
        return (
            self.base is None and _gaussian_admits(total, epsilon, self._left * share)
        ) or _renyi_admits(self.filter, total, epsilon, self._left * (1 - share))

    @property
    def _left(self) -> float:
        return (self.delta - self.taken) * (1 - 1e-12)

    def spent(self, total: Cost) -> float:
        """The least ε (nats), rounded up, at which ``total`` would have been admitted; or infinity.

        A reading of how full the budget is, not a guarantee of its own: the budget's is.
        """
        least = math.nextafter(0.0, 1.0)
        if self._sums_fit(total, least):
            return 0.0
        steps = self._epsilon_of_steps(total)
        low, high = 0.0, self.epsilon
        while low < steps and not self._sums_fit(total, high):
            low, high = high, 2 * high
            if high > MAX_EPSILON:
                return steps
        while low < steps and high - low > 1e-6 * high:
            middle = (low + high) / 2
            low, high = (low, middle) if self._sums_fit(total, middle) else (middle, high)
        return min(high, steps)

    def forecast(self, total: Cost, run: Cost) -> int:
        """How many more runs like ``run`` fit beside ``total``; ``MAX_FORECAST`` at most."""
        low, high = 0, 1
        while self.admits(total + run.times(high)):
            low, high = high, 2 * high
            if low >= MAX_FORECAST:
                return MAX_FORECAST
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.admits(total + run.times(middle)) else (low, middle)
        return min(low, MAX_FORECAST)


def admits_alone(budget: Budget, run: Cost) -> bool:
    """Whether the first run of all fits by its own certificate, which must be certain."""
    return run.epsilon.at_most(budget.epsilon, UNIT) and run.delta.at_most(budget.delta, DELTA_UNIT)


@lru_cache(maxsize=4096)
def _epsilon_of_base(base: Step, count: int, delta: float) -> float:
    """ε of ``count`` steps of the kind ``base`` at ``delta``, rounded up; or infinity."""
    if count == 0:
        return 0.0
    try:
        curve = accountant("fourier").curve(Repeated(event=base, count=count))
        return curve.epsilon(delta).upper
    except AccountantError:
        return math.inf


def _gaussian_admits(total: Cost, epsilon: float, delta: float) -> bool:
    mu = math.sqrt(total.mu_squared.value(UNIT)) * (1 + 1e-15)
    if mu == 0:
        return not any(item.units or item.unbounded for item in total.renyi)
    if mu > MAX_MU or delta <= 0:
        return False
    return GaussianCurve(mu=max(mu, MIN_MU)).delta(epsilon).upper <= delta


def _renyi_admits(filter_: Filter, total: Cost, epsilon: float, delta: float) -> bool:
    """The test for every x = ε + u: f(u) = Σ exp(a + λ u) + exp(-u) is at least one.

    f is convex. Its least value is enclosed between two points where its slope changes sign,
    and bounded there by the two tangents.
    """
    if delta <= 0:
        return False
    spent = np.array([item.value(UNIT) for item in total.renyi])
    rates = filter_.exponents
    heights = math.log(delta) + filter_.log_weights + rates * (epsilon - spent)
    # What is lost in a height is a rounding of its terms.
    heights = heights - 1e-15 * (np.abs(rates) * (epsilon + spent) + 1e3)
    stored = np.isfinite(heights)
    if not stored.any():
        return False
    rates, heights = rates[stored], heights[stored]

    def at(u: float) -> tuple[float, float]:
        terms = np.exp(np.minimum(heights + rates * u, 700.0))
        return float(terms.sum()) + math.exp(-u), float(terms @ rates) - math.exp(-u)

    low, high = 0.0, _FURTHEST
    below, above = at(low), at(high)
    if below[1] >= 0:
        # Never below its value at 0, which is above one.
        return True
    if above[1] <= 0:
        return False
    for _ in range(60):
        middle = (low + high) / 2
        value = at(middle)
        if value[0] < 1 + MARGIN:
            return False
        if value[1] < 0:
            low, below = middle, value
        else:
            high, above = middle, value
    width = high - low
    return max(below[0] + below[1] * width, above[0] - above[1] * width) >= 1 + MARGIN


@lru_cache(maxsize=64)
def _best_exponent(epsilon: float, delta: float) -> float:
    """The α - 1 at which a Gaussian that just meets (ε, δ) is best accounted, about."""
    exponents = np.array(ORDERS) - 1
    best, result = -math.inf, 1.0
    for rate in np.geomspace(exponents[0], exponents[-1], 400):
        # δ of order α: log δ = λ(D - ε) + log of what Canonne, Kamath and Steinke prove.
        gain = rate * math.log1p(-1 / (rate + 1)) - math.log(rate + 1)
        rho = (epsilon + (math.log(delta) - gain) / rate) / (rate + 1)
        if rho > best:
            best, result = rho, float(rate)
    return result
