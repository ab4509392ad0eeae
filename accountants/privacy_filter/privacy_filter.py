"""The rule by which a budget (ε, δ) admits a further run, for adaptively chosen runs.

Later plans are chosen in view of earlier results, so composition needs a privacy filter. There are
two filters, each with a share of δ, and a run is admitted if either admits it:

* **Exact.** If the first run consists of steps on fresh lots, ``base`` is a kind of step that
  dominates them. Every later release must be such a step too, and the composition of all of them,
  with each step replaced by ``base``, must meet (ε, share of δ). Otherwise every run must be
  exactly one Gaussian, and Σ μ² at most the μ² whose curve meets (ε, share of δ).
* **Rényi.** With weights w_α of the orders, fixed when the budget is created, and S(α) the sum of
  the divergences, for every x

      δ' Σ w_α exp((α - 1)(x - S(α)))  >=  1 - exp(ε - x),        δ' the other share.

  With one order this is the filter of Feldman and Zrnic. With several orders, the rule "some order
  is within its own budget" would spend δ once for every order. The weights distribute δ instead.

There is one exception: the first run, which no release could have influenced, may be admitted by
its own certificate and use up the budget. Both filters then lose its δ.

Guarantees
    * All admitted runs together are (ε, δ)-DP, for every adaptive choice of the runs, their order,
      their interleaving and the time at which they stop.
    * Except for the first run, whose steps define the base, only the sum matters and not the order.
      More noise, fewer steps, or a larger ε or δ never turn an admission into a refusal, up to the
      width of the accountant's bracket.
    * Rounding never admits a run: the test is evaluated one-sidedly, with slack.

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

from affidavit.accountants.gaussian import MAX_MU, MIN_MU, GaussianCurve
from affidavit.accountants.privacy_filter.cost import DELTA_UNIT, UNIT, Cost, Step
from affidavit.accountants.privacy_filter.renyi_divergences import ORDERS
from affidavit.accountants.protocol import AccountantError
from affidavit.accountants.registry import accountant
from affidavit.accountants.rounding import Array
from affidavit.plan import events

GAUSSIAN_SHARE = 0.5
"""The share of δ of the exact filter, of Gaussians or of steps of one kind."""
RENYI_MARGIN = 1e-9
"""Margin of the Rényi test, far above its rounding."""
MAX_FORECAST = 10_000
"""Runs."""
MAX_EPSILON = 1e5
"""Nats. Above it ``Budget.spent`` is infinite."""
_MAX_U = 60.0
"""Nats. At x = ε + 60, 1 - exp(ε - x) is one."""
_WEIGHT_SCALE = 0.3
"""Weights decrease as 1/(1 + (d/scale)²), d the distance in log(α - 1) from the best order."""


@dataclass(frozen=True, kw_only=True)
class Filter:
    """The constants of a budget: orders, weights, and the exact filter's share of δ."""

    orders: tuple[float, ...]
    weights: tuple[float, ...]
    gaussian_share: float

    def __post_init__(self) -> None:
        if len(self.orders) != len(self.weights) or not all(order > 1 for order in self.orders):
            raise ValueError("every order must be above one and have a weight")
        if min(self.weights) < 0 or math.fsum(self.weights) > 1:
            raise ValueError("the weights must not be negative and must sum to at most one")
        if not 0 <= self.gaussian_share <= 1:
            raise ValueError("the exact filter's share of delta must lie between 0 and 1")

    @classmethod
    def start(cls, epsilon: float, delta: float) -> Self:
        """Return the filter of a budget that starts at (``epsilon``, ``delta``), ε in nats."""
        best = math.log(_best_exponent(epsilon, delta * (1 - GAUSSIAN_SHARE)))
        raw = [1 / (1 + ((math.log(order - 1) - best) / _WEIGHT_SCALE) ** 2) for order in ORDERS]
        total = math.fsum(raw) * (1 + 1e-12)
        return cls(
            orders=ORDERS,
            weights=tuple(item / total for item in raw),
            gaussian_share=GAUSSIAN_SHARE,
        )

    def as_document(self) -> dict[str, Any]:
        """Return JSON data that ``read`` parses exactly."""
        return {
            "orders": [repr(order) for order in self.orders],
            "weights": [repr(weight) for weight in self.weights],
            "gaussian_share": repr(self.gaussian_share),
        }

    @classmethod
    def read(cls, document: Mapping[str, Any]) -> Self:
        """Parse the data of ``as_document``; raises ``KeyError`` or ``ValueError``."""
        return cls(
            orders=tuple(float(item) for item in document["orders"]),
            weights=tuple(float(entry) for entry in document["weights"]),
            gaussian_share=float(document["gaussian_share"]),
        )

    @cached_property
    def exponents(self) -> Array:
        """α - 1 of each order, shape (m,)."""
        return np.asarray(np.array(self.orders) - 1, dtype=np.float64)

    @cached_property
    def log_weights(self) -> Array:
        """log w_α of each order, minus infinity for a weight of zero, shape (m,)."""
        with np.errstate(divide="ignore"):
            logs: Array = np.log(np.array(self.weights))
        return logs


@dataclass(frozen=True, kw_only=True)
class Budget:
    """A budget (ε in nats, δ) and its filter.

    ``delta_taken`` is the δ of a run admitted by its own certificate. ``base`` dominates the steps
    of the first run, and is None if that has other releases.
    """

    epsilon: float
    delta: float
    filter: Filter
    delta_taken: float = 0.0
    base: Step | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.epsilon) and self.epsilon > 0 and 0 < self.delta < 1):
            raise ValueError("a budget needs a positive finite epsilon and a delta in (0, 1)")

    def admits(self, total: Cost) -> bool:
        """Return whether runs with a total cost of ``total`` stay within the budget."""
        return self._epsilon_of_steps(total) <= self.epsilon or self._sums_fit(total, self.epsilon)

    def _epsilon_of_steps(self, total: Cost) -> float:
        """Return ε of the composition of base steps at the exact filter's δ, or infinity."""
        count = None if self.base is None else total.steps.dominated_by(self.base)
        share = self._free_delta * self.filter.gaussian_share
        if self.base is None or count is None or share <= 0:
            return math.inf
        return _epsilon_of_base(self.base, count, share)

    def _sums_fit(self, total: Cost, epsilon: float) -> bool:
        if self._free_delta <= 0:
            return False
        share = self.filter.gaussian_share
        return (
            self.base is None and _gaussian_admits(total, epsilon, self._free_delta * share)
        ) or _renyi_admits(self.filter, total, epsilon, self._free_delta * (1 - share))

    @property
    def _free_delta(self) -> float:
        return (self.delta - self.delta_taken) * (1 - 1e-12)

    def spent(self, total: Cost) -> float:
        """Return the least ε (nats), rounded up, that admits ``total``, or infinity.

        It shows the state of the budget and is no guarantee of its own.
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
        """Return how many more runs like ``run`` fit beside ``total``, at most ``MAX_FORECAST``."""
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
    """Return whether the first run fits by its own certificate, which must be certain."""
    return run.epsilon.at_most(budget.epsilon, UNIT) and run.delta.at_most(budget.delta, DELTA_UNIT)


@lru_cache(maxsize=4096)
def _epsilon_of_base(base: Step, count: int, delta: float) -> float:
    """Return ε of ``count`` steps of the kind ``base`` at ``delta``, rounded up, or infinity."""
    if count == 0:
        return 0.0
    try:
        curve = accountant("fourier").curve(events.Repeated(event=base, count=count))
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
    """Return whether f(u) = Σ exp(a + λ u) + exp(-u) is at least one for every x = ε + u.

    f is convex. Its minimum is enclosed between two points where its slope changes sign, and
    bounded there by the two tangents.
    """
    if delta <= 0:
        return False
    spent = np.array([item.value(UNIT) for item in total.renyi])
    rates = filter_.exponents
    heights = math.log(delta) + filter_.log_weights + rates * (epsilon - spent)
    # A height has a rounding of its terms.
    heights = heights - 1e-15 * (np.abs(rates) * (epsilon + spent) + 1e3)
    finite = np.isfinite(heights)
    if not finite.any():
        return False
    rates, heights = rates[finite], heights[finite]

    def at(u: float) -> tuple[float, float]:
        terms = np.exp(np.minimum(heights + rates * u, 700.0))
        return float(terms.sum()) + math.exp(-u), float(terms @ rates) - math.exp(-u)

    low, high = 0.0, _MAX_U
    below, above = at(low), at(high)
    if below[1] >= 0:
        # f is never below its value at 0, which is above one.
        return True
    if above[1] <= 0:
        return False
    for _ in range(60):
        middle = (low + high) / 2
        value = at(middle)
        if value[0] < 1 + RENYI_MARGIN:
            return False
        if value[1] < 0:
            low, below = middle, value
        else:
            high, above = middle, value
    width = high - low
    return max(below[0] + below[1] * width, above[0] - above[1] * width) >= 1 + RENYI_MARGIN


@lru_cache(maxsize=64)
def _best_exponent(epsilon: float, delta: float) -> float:
    """Return about the best α - 1 of a Gaussian that just meets (ε, δ)."""
    exponents = np.array(ORDERS) - 1
    best, result = -math.inf, 1.0
    for rate in np.geomspace(exponents[0], exponents[-1], 400):
        # log δ of order α is λ(D - ε) plus the log of the factor of Canonne, Kamath and Steinke.
        gain = rate * math.log1p(-1 / (rate + 1)) - math.log(rate + 1)
        rho = (epsilon + (math.log(delta) - gain) / rate) / (rate + 1)
        if rho > best:
            best, result = rho, float(rate)
    return result
