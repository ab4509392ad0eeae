"""Rényi accounting as people run it, quickly enough to be asked hundreds of questions.

Two programs are imitated to their last printed digit: Opacus (orders 1.1 to 10.9 and 12 to
63) and dp_accounting (the same with 11, 128, 256, 512 and 1024). Both convert to (ε, δ) by
the improved bound; the classic conversion of the moments accountant is kept as a reading of
its own. The moments are summed in closed form at whole orders and by the trapezoid rule,
which converges geometrically for them, at fractional ones.

dp_accounting adds the absolute values of an alternating series at fractional orders and
so comes out higher there, by up to some per cent; that series is summed only where the
difference could decide (``library_epsilon``).

References: Mironov, arXiv:1702.07476; Mironov, Talwar and Zhang, arXiv:1908.10530;
Canonne, Kamath and Steinke, arXiv:2004.00010, Proposition 12.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
from scipy.special import gammaln, log_ndtr, logsumexp

from affidavit.certificate.diagnosis.account import Part, Parts

Array = npt.NDArray[np.float64]

_FRACTIONAL = np.array([1 + tenth / 10 for tenth in range(1, 100) if tenth % 10])
_WHOLE = np.array([*range(2, 64), 128, 256, 512, 1024], dtype=np.float64)
_ORDERS = np.concatenate([_FRACTIONAL, _WHOLE])
_OPACUS = (_ORDERS < 64) & (_ORDERS != 11)
_WHOLE_ONLY = np.floor(_ORDERS) == _ORDERS
_NODES_A_SIGMA = 4
_REACH = 13.0
_MOST_NODES = 4000
_LIBRARY_TERMS, _LIBRARY_DECAY = 1000, 30.0
"""dp_accounting's limit of terms, and how far below the sum (in nats) the last must be."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Renyi:
    """ε of one run at δ, in nats, by each list of orders and conversion.

    ``library`` is the range in which dp_accounting's own value lies.
    """

    opacus: float
    classic: float
    library: tuple[float, float]


def renyi(parts: Parts, delta: float) -> Renyi | None:
    """The readings of ``parts``; None where one of them has no such bound."""
    total = _total(parts, _divergence)
    if total is None:
        return None
    improved = _improved(total, delta)
    classic = total - math.log(delta) / (_ORDERS - 1)
    return Renyi(
        opacus=_least(improved[_OPACUS]),
        classic=_least(classic[_OPACUS]),
        library=(_least(improved), _least(improved[_WHOLE_ONLY])),
    )


def _total(parts: Parts, divergence: Callable[[Part], Array | None]) -> Array | None:
    """The divergences of ``parts`` added up, at every order; None where one has none."""
    total = np.zeros_like(_ORDERS)
    for part, times in parts:
        rate = divergence(part)
        if rate is None:
            return None
        total += times * rate
    return total


def _improved(total: Array, delta: float) -> Array:
    """ε at every order by the improved conversion."""
    conversion: Array = np.log1p(-1 / _ORDERS) - (math.log(delta) + np.log(_ORDERS)) / (_ORDERS - 1)
    return total + conversion


def _least(values: Array) -> float:
    return max(0.0, float(values.min()))


@lru_cache(maxsize=20_000)
def _divergence(part: Part) -> Array | None:
    """Rényi divergence of one release at every order.

    Replacing a record under Poisson sampling is read as people read it: as adding
    or removing one at twice the distance.
    """
    sigma, q = part.noise_multiplier, part.probability
    if part.pair == "without_replacement" or not 0.05 <= sigma < 1e9:
        return None
    if part.pair == "replace_one":
        sigma /= 2
    if q is None or q >= 1:
        result: Array = _ORDERS / (2 * sigma * sigma)
        return result
    moments = np.concatenate([_fractional_moments(q, sigma), _whole_moments(q, sigma)])
    divergence: Array = np.maximum(0.0, moments / (_ORDERS - 1))
    return divergence


def _fractional_moments(q: float, sigma: float) -> Array:
    """log E[((1-q) + q e^L)^α] under N(0, σ²), L = (2x - 1) / 2σ², by the trapezoid rule."""
    low, high = -_REACH * sigma, _FRACTIONAL[-1] + _REACH * sigma
    step = max(sigma / _NODES_A_SIGMA, (high - low) / _MOST_NODES)
    nodes = np.arange(low, high, step)
    ratio = np.logaddexp(math.log1p(-q), math.log(q) + (2 * nodes - 1) / (2 * sigma**2))
    exponents = np.outer(_FRACTIONAL, ratio)
    exponents -= nodes**2 / (2 * sigma**2)
    peak = exponents.max(axis=1)
    np.exp(exponents - peak[:, None], out=exponents)
    moments: Array = peak + np.log(
        exponents.sum(axis=1) * (step / (sigma * math.sqrt(2 * math.pi)))
    )
    return moments


_TERMS = np.arange(1025.0)
_LOG_BINOMIALS = [
    gammaln(order + 1)
    - gammaln(_TERMS[: int(order) + 1] + 1)
    - gammaln(order - _TERMS[: int(order) + 1] + 1)
    for order in _WHOLE
]
_SMALL = np.full((62, 64), -np.inf)
for _row, _each in enumerate(_LOG_BINOMIALS[:62]):
    _SMALL[_row, : len(_each)] = _each


def _whole_moments(q: float, sigma: float) -> Array:
    """log Σ binom(α, i) q^i (1-q)^(α-i) e^((i² - i) / 2σ²) at every whole order."""
    log_q, log_p = math.log(q), math.log1p(-q)
    steep = (_TERMS**2 - _TERMS) / (2 * sigma**2) + _TERMS * (log_q - log_p)
    small = logsumexp(_SMALL + steep[:64], axis=1)
    large = [
        float(logsumexp(binomials + steep[: len(binomials)])) for binomials in _LOG_BINOMIALS[62:]
    ]
    moments: Array = np.concatenate([small, large]) + _WHOLE * log_p
    return moments


def library_epsilon(parts: Parts, delta: float) -> float | None:
    """What dp_accounting answers, whose fractional orders are higher than they need be."""
    total = _total(parts, _library_divergence)
    return None if total is None else _least(_improved(total, delta))


@lru_cache(maxsize=4096)
def _library_divergence(part: Part) -> Array | None:
    result = _divergence(part)
    if result is None or part.probability is None or part.probability >= 1:
        return result
    sigma = part.noise_multiplier / (2 if part.pair == "replace_one" else 1)
    result = result.copy()
    slow = len(_FRACTIONAL[_FRACTIONAL < 3])
    for orders, terms, place in (
        (_FRACTIONAL[:slow], _LIBRARY_TERMS, slice(0, slow)),
        (_FRACTIONAL[slow:], 160, slice(slow, len(_FRACTIONAL))),
    ):
        result[place] = _absolute_moments(part.probability, sigma, orders, terms) / (orders - 1)
    return result


def _absolute_moments(q: float, sigma: float, orders: Array, terms: int) -> Array:
    """The series of Mironov, Talwar and Zhang, section 3.3, of absolute values.

    An order at which the library's own limit of terms does not suffice counts for nothing
    there, and is infinite here.
    """
    alpha = orders[:, None]
    i = np.arange(float(terms))
    j = alpha - i
    cut = sigma**2 * math.log(1 / q - 1) + 0.5
    log_q, log_p = math.log(q), math.log1p(-q)
    binomial = gammaln(alpha + 1) - gammaln(i + 1) - gammaln(j + 1)
    below = binomial + i * log_q + j * log_p + (i * i - i) / (2 * sigma**2)
    above = binomial + j * log_q + i * log_p + (j * j - j) / (2 * sigma**2)
    below += log_ndtr((cut - i) / sigma)
    above += log_ndtr((j - cut) / sigma)
    largest = np.maximum(below, above)
    total: Array = np.logaddexp(logsumexp(below, axis=1), logsumexp(above, axis=1))
    if terms == _LIBRARY_TERMS:
        total[largest[:, -1] >= total - _LIBRARY_DECAY] = np.inf
    return total
