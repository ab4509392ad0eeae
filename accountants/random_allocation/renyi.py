"""Rényi accounting of random allocations: an upper bound that composes.

Rényi divergences add up under adaptive composition, separately for each direction of the adjacency.
This bounds runs of several allocations and of releases beside them, and is a second opinion on a
single allocation, because it shares no step with the lattice. Gaussian releases beside it,
unsampled or Poisson-sampled, add their own divergences.

With S the mean of b independent lognormals X = exp(z/σ - 1/(2σ²)):

* remove, integer a: E S^a = a!/b^a [t^a] (Σ_k e^{k(k-1)/(2σ²)} t^k/k!)^b, a power of a series
  with positive coefficients, taken in logarithms;
* add: E S^{-n}, n = a - 1, is the integral of t^{n-1} G(t) / Γ(n) with the convex and decreasing
  G(t) = (E e^{-tX/b})^b. Chords of G over a grid bound it from above, the smallest t by
  G <= 1, the largest by e^{-y} <= (m/(ey))^m; E e^{-τX} itself by chords over cells of X.

Guarantees
    * ``upper`` is a proved bound; ``lower`` is always 0.

References: Feldman and Shenfeld, arXiv:2502.08202, for the series; Mironov, Talwar and
Zhang, arXiv:1908.10530, Theorem 5 and §3.3, for Poisson sampling; Mironov, arXiv:1702.07476,
for composition; Canonne, Kamath and Steinke, arXiv:2004.00010, for the conversion.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from scipy.special import gammaln, logsumexp

from affidavit.accountants.bracket import Bracket
from affidavit.accountants.composition import leaves
from affidavit.accountants.fourier.schedules import MAX_KINDS
from affidavit.accountants.protocol import OutOfReach, Unsupported, require_delta, require_epsilon
from affidavit.accountants.random_allocation.tail_truncation import log_laplace
from affidavit.accountants.registry import AFFIDAVIT_VERSION
from affidavit.accountants.rounding import UNIT_ROUNDOFF, Array
from affidavit.plan import events

MIN_NOISE, MAX_NOISE = 0.1, 1000.0
"""Range of σ over the root of the number of epochs with the same bins."""
MAX_BINS = 1_000_000


def check_range(leaf: events.RandomAllocationGaussian) -> None:
    """Raise ``OutOfReach`` for parameters out of range."""
    if not MIN_NOISE <= leaf.noise_multiplier <= MAX_NOISE:
        raise OutOfReach(
            f"noise multiplier {leaf.noise_multiplier:.4g} (over the root of the epochs) is "
            f"outside [{MIN_NOISE:g}, {MAX_NOISE:g}], the range of the allocation accountant.",
            "Choose a noise multiplier nearer to what training uses.",
        )
    if leaf.bins > MAX_BINS:
        raise OutOfReach(
            f"{leaf.bins} bins exceed the limit of {MAX_BINS}.",
            "Use larger lots.",
        )


MAX_ORDER = 200
ORDERS = np.arange(2, MAX_ORDER + 1)
"""Orders of the Rényi divergences, shape (m,)."""
_LOG_T, STRIDE, WIDE_STRIDE = (-10.0, 12.0), 4e-3, 0.03
"""The grid of log t. The chords' error is of second order in its stride."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RenyiAllocationCurve:
    """Upper bounds from the divergences (nats) of both directions at ``ORDERS``, (m,) each."""

    divergences: tuple[Array, ...]

    def epsilon(self, delta: float) -> Bracket:
        """Return ``[0, least ε over the orders]`` (nats) at ``delta``.

        The conversion is that of Canonne, Kamath and Steinke, arXiv:2004.00010. Raises
        ``ValueError`` unless 0 < δ < 1.
        """
        require_delta(delta)
        gain = np.log1p(-1 / ORDERS) - (math.log(delta) + np.log(ORDERS)) / (ORDERS - 1)
        result = [float((divergence + gain).min()) for divergence in self.divergences]
        return Bracket(lower=0.0, upper=_up(max((0.0, *result))))

    def delta(self, epsilon: float) -> Bracket:
        """Return ``[0, least δ over the orders]`` at ``epsilon`` (nats).

        Raises ``ValueError`` unless ε is finite and at least 0.
        """
        require_epsilon(epsilon)
        gain = (ORDERS - 1) * np.log1p(-1 / ORDERS) - np.log(ORDERS)
        result = [
            float(((ORDERS - 1) * (divergence - epsilon) + gain).min())
            for divergence in self.divergences
        ]
        if not result:
            return Bracket(lower=0.0, upper=0.0)
        return Bracket(lower=0.0, upper=min(1.0, _up(math.exp(min(0.0, max(result))))))


@dataclass(frozen=True, kw_only=True, slots=True)
class RenyiAllocationAccountant:
    """Rényi bounds of random allocations composed with Gaussian releases beside them.

    ``stride`` is that of the grids. With ``WIDE_STRIDE`` a bound takes milliseconds.
    """

    stride: float = STRIDE
    name: str = "allocation_rdp"
    version: str = AFFIDAVIT_VERSION

    def curve(self, event: events.Event) -> RenyiAllocationCurve:
        """Return the curve of ``event``; raises ``Unsupported`` or ``OutOfReach``."""
        parts = leaves(event)
        if not parts:
            return RenyiAllocationCurve(divergences=())
        if not any(isinstance(leaf, events.RandomAllocationGaussian) for leaf, _ in parts):
            raise Unsupported(
                "this run does not use random allocation.", "Use the fourier or rdp accountant."
            )
        if len(parts) > MAX_KINDS:
            raise OutOfReach(
                f"the run has {len(parts)} kinds of release; the limit beside random allocations "
                f"is {MAX_KINDS}.",
                "Join steps with equal sampling and noise into one phase.",
            )
        divergences = np.zeros((2, ORDERS.size))
        for leaf, count in parts:
            divergences += count * np.stack(_divergences(leaf, self.stride))
        if np.isnan(divergences).any():
            raise OutOfReach(
                "the Rényi orders failed numerically.", "Change the noise or the rate."
            )
        return RenyiAllocationCurve(divergences=tuple(divergences * (1 + 1e-13)))


def _divergences(leaf: events.Leaf, stride: float) -> tuple[Array, Array]:
    """Return the Rényi divergences of both directions at ``ORDERS``, rounded up."""
    match leaf:
        case events.Gaussian(noise_multiplier=sigma):
            alone = ORDERS / (2 * sigma * sigma) * (1 + 1e-14)
            return alone, alone
        case events.PoissonSubsampledGaussian(
            sampling_probability=q, noise_multiplier=sigma, pair="add_remove"
        ):
            sampled = _sampled(q, 1 / sigma)
            return sampled, sampled
        case events.RandomAllocationGaussian(bins=bins, noise_multiplier=sigma):
            check_range(leaf)
            return _remove(bins, 1 / sigma), _add(bins, 1 / sigma, stride)
        case _:
            raise Unsupported(
                "this accountant takes random allocations and, beside them, Gaussian releases, "
                "unsampled or Poisson-sampled under add_remove.",
                "Use another accountant.",
            )


@lru_cache(maxsize=64)
def _sampled(probability: float, rate: float) -> Array:
    """Return bounds by E (1 - q + q X)^a, which hold in both directions at integer orders."""
    k = np.arange(MAX_ORDER + 1)
    order = ORDERS[:, None]
    terms = gammaln(order + 1) - gammaln(k + 1) - gammaln(np.maximum(order - k, 0) + 1)
    terms = terms + (order - k) * math.log1p(-probability) + k * math.log(probability)
    terms = np.where(k <= order, terms + rate**2 * k * (k - 1) / 2, -np.inf)
    size = rate**2 * ORDERS**2 / 2 + 4 * gammaln(ORDERS + 1) - ORDERS * math.log(probability)
    slack = UNIT_ROUNDOFF * 64 * (1 + size)
    return np.asarray((np.maximum(logsumexp(terms, axis=1), 0.0) + slack) / (ORDERS - 1))


@lru_cache(maxsize=64)
def _remove(bins: int, rate: float) -> Array:
    k = np.arange(MAX_ORDER + 1)
    power = power_of_series(rate**2 * k * (k - 1) / 2 - gammaln(k + 1), bins)
    moments = (power + gammaln(k + 1) - k * math.log(bins))[2:]
    # Each coefficient is a sum of positive terms; its exponents are rounded.
    size = rate**2 * ORDERS**2 / 2 + 2 * gammaln(ORDERS + 1) + ORDERS * math.log(bins + 1)
    slack = UNIT_ROUNDOFF * 64 * (1 + math.log2(bins + 1)) * (1 + size)
    # No mixture of bins costs more than a known bin.
    alone = ORDERS * rate**2 / 2
    return np.asarray(np.minimum((np.maximum(moments, 0.0) + slack) / (ORDERS - 1), alone))


def power_of_series(base: Array, exponent: int) -> Array:
    """Return the log coefficients, shape (k,), of a power of a series with those of ``base``."""
    power = np.full(base.size, -np.inf)
    power[0] = 0.0
    while exponent:
        if exponent & 1:
            power = _product(power, base)
        exponent >>= 1
        if exponent:
            base = _product(base, base)
    return power


def _product(first: Array, second: Array) -> Array:
    """Return the log coefficients of a product of two truncated series."""
    size = first.size
    index = np.arange(size)[:, None] - np.arange(size)[None, :]
    terms = np.where(index >= 0, first[None, :] + second[np.maximum(index, 0)], -np.inf)
    return np.asarray(logsumexp(terms, axis=1))


@lru_cache(maxsize=64)
def _add(bins: int, rate: float, stride: float) -> Array:
    t = np.exp(np.arange(*_LOG_T, stride))
    pieces = [log_laplace(item / bins, rate) for item in np.array_split(t, 20)]
    log_g = np.minimum.accumulate(np.minimum(bins * np.concatenate(pieces), 0.0))
    n = (ORDERS - 1).astype(np.float64)
    # On every cell of the geometric grid the ends of the chord have the same weights, by t^{n-1}.
    whole = np.expm1(n * stride)
    share = (n / (n + 1) * np.expm1((n + 1) * stride) / whole - 1) / math.expm1(stride)
    share = np.clip(share - 1e-9, 0.0, 1.0)[:, None]
    values = np.exp(log_g)
    logs = np.outer(n, np.log(t[:-1])) + log_g[:-1]
    drop = 1 - share * (1 - np.minimum(values[1:] / np.maximum(values[:-1], 1e-300), 1.0))
    inside = logsumexp(logs, b=drop, axis=1) + np.log(whole / n)
    below = n * math.log(t[0]) - np.log(n)
    total = logsumexp(np.stack((inside, below, _log_tail(bins, rate, n, float(t[-1])))), axis=0)
    slack = UNIT_ROUNDOFF * 64 * (bins + n * 32 + np.abs(total) + gammaln(n + 1)) + bins * 1e-12
    result = np.maximum(total - gammaln(n) + slack, 0.0) / n
    return np.asarray(np.minimum(result, ORDERS * rate**2 / 2))


def _log_tail(bins: int, rate: float, n: Array, end: float) -> Array:
    """Return the log of a bound of the integral of t^{n-1} G(t) beyond ``end``."""
    m = (2 * n + 2) / bins
    power = bins * (m * np.log(m * bins / math.e) + rate**2 * m * (m + 1) / 2)
    return np.asarray(power + (n - m * bins) * math.log(end) - np.log(m * bins - n))


def _up(value: float) -> float:
    return value * (1 + 1e-12)
