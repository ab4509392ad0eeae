"""Tilts: where to draw, so that rare losses are common and every weight is bounded.

With v_i the likelihood ratio of N(m_i, I) to N(0, I) at a draw y, the ratio of the pair is
S = mean(v), and its two curves are, for ε ≥ 0,

    remove  δ(ε) = E_Q (S - e^ε)_+          add  δ(ε) = E_Q (1 - e^ε S)_+ .

A tilt of exponent t and order m draws from dP̃/dQ = mean(v^t)^m / Z. That is again a mixture
of Gaussians with identity covariance: i_1..i_m fall with probability proportional to
exp(Σ (t²-t)/2 ‖m_i‖² + t² Σ_{k<l} Γ_{i_k i_l}), y ~ N(t Σ m_{i_k}, I), and Z is a finite sum.
Powers are convex, so mean(v^t) ≥ S^t for t ≥ 1 and for t < 0, and the integrand over P̃,

    remove  (S - e^ε)_+ Z / mean(v^t)^m  ≤  Z (S - e^ε) S^{-mt}          t ≥ 1
    add     (1 - e^ε S)_+ Z / mean(v^t)^m  ≤  Z (1 - e^ε S) S^{-mt}      t < 0

is at most Z e^{-κε} κ^κ / (1+κ)^{1+κ}, κ = mt - 1 for remove and -mt for add: a Rényi bound on
δ, reached where it is tight. With orders 3 and 4 it lies within a few powers of ten of δ itself,
which is what lets a bound for bounded means see δ = 1e-8 in seconds. In a composition S, the
powers and Z are products over its runs.

In the direction ``add`` all v must be small together. The limit t → 0, mt = -κ draws from
N(-κ m̄, I), m̄ the mean of the m_i; exp(mean(log v)) ≤ S takes the place of the powers, and
log Z = κ/2 · mean ‖m_i‖² + κ²/2 · ‖m̄‖². It is written as order 0 with exponent -κ.

Source: the convexity argument is ours (docs/theorems/balls-in-bins-correlated.md, lemma 3);
importance sampling for balls in bins: Chua et al., arXiv:2412.16802, section 4.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from affidavit.accountants.monte_carlo.pair import Array, Bins, Pair

Direction = Literal["remove", "add"]
DIRECTIONS: tuple[Direction, Direction] = ("remove", "add")
ORDERS: dict[Direction, tuple[int, ...]] = {"remove": (1, 2, 3, 4), "add": (0, 1, 2, 3)}
"""Orders m; the normaliser of order m is a sum of b^m terms, done in that many flops from 3 on."""
MOST_BINS_OF_FOUR = 128
"""Bins up to which order 4 is worth its sums; it narrows what is rare at small ε."""
DISTANCES = 24
"""Exponents tried, in geometric progression; a coarser choice costs draws, nothing else."""
NORMALISER = 1e-9
"""Relative allowance for the rounding of Z, a sum of positive terms."""


@dataclass(frozen=True, kw_only=True)
class Tilt:
    """One tilted law; ``exponent`` t, ``order`` m and ``log_normaliser`` log Z as above."""

    pair: Pair
    direction: Direction
    exponent: float
    order: int
    log_normaliser: float

    def tables(self) -> tuple[Table, ...]:
        """How bins are picked, run by run."""
        return tuple(_table(bins, self.exponent, self.order) for bins in self.pair.bins)

    @property
    def decay(self) -> float:
        """κ > 0: the range falls as e^{-κε}."""
        return self.shift - 1 if self.direction == "remove" else self.shift

    @property
    def shift(self) -> float:
        """m|t|: the multiple of a mean by which draws are moved."""
        return max(self.order, 1) * abs(self.exponent)

    def log_range(self, epsilon: float) -> float:
        """log of a bound on the integrand at ``epsilon`` (nats), and so on δ; rounded up."""
        k = self.decay
        peak = k * math.log(k) - (1 + k) * math.log1p(k)
        return self.log_normaliser - k * epsilon + peak + 2 * NORMALISER

    def epsilon(self, delta: float) -> float:
        """The ε (nats) from which the bound on δ alone is at most ``delta``; rounded up."""
        exact = (self.log_range(0.0) - math.log(delta)) / self.decay
        return max(0.0, exact * (1 + 1e-12))


@dataclass(frozen=True, kw_only=True)
class Table:
    """The law of i_1..i_m of one run with bins, unnormalised, as cumulative sums.

    ``links`` exp(t²Γ) and ``ones`` exp((t²-t)/2 ‖m_i‖²), each over its largest, are there for
    the third pick; order 0 picks nothing, and every draw is moved along the mean of all. From
    order 2 on ``cumulative`` has shape (b²,) and ``links`` (b, b); else both (b,), like ``ones``.
    """

    order: int
    cumulative: Array
    links: Array
    ones: Array

    def pick(self, rows: int, generator: np.random.Generator) -> list[NDArray[np.intp]]:
        """m arrays of ``rows`` bins. Each has shape (rows,)."""
        if self.order == 0:
            return []
        total = self.cumulative[-1]
        places = np.searchsorted(self.cumulative, generator.random(rows) * total, "right")
        places = np.minimum(places, self.cumulative.size - 1)
        if self.order == 1:
            return [places]
        first, second = np.divmod(places, len(self.ones))
        if self.order == 2:
            return [first, second]
        others = self.links[first] * self.links[second] * self.ones
        if self.order == 3:
            return [first, second, _pick(others, generator)]
        third = _pick((others @ self.links) * others, generator)
        return [first, second, third, _pick(others * self.links[third], generator)]


def _pick(weights: Array, generator: np.random.Generator) -> NDArray[np.intp]:
    """One bin for each row of ``weights``, in proportion to them."""
    along = np.cumsum(weights, axis=1)
    picked = np.sum(along <= (generator.random(len(weights)) * along[:, -1])[:, None], axis=1)
    return np.asarray(np.minimum(picked, weights.shape[1] - 1), dtype=np.intp)


def tilts(pair: Pair, direction: Direction) -> tuple[Tilt, ...]:
    """Tilts of every order over the exponents that can be of use."""
    start, sign = (1.0, 1.0) if direction == "remove" else (0.0, -1.0)
    found = []
    widest = max(bins.count for bins in pair.bins)
    for order in ORDERS[direction]:
        if order == 4 and widest > MOST_BINS_OF_FOUR:
            continue
        square = pair.largest if order else pair.square_of_mean
        count = DISTANCES if order < 4 else DISTANCES // 2
        distances = np.geomspace(0.02, math.sqrt(60 / square) + 2, count).tolist()
        nearest = [0.0] if direction == "remove" and order > 1 else []
        for distance in [*nearest, *distances]:
            exponent = start + sign * distance
            normaliser = math.fsum(
                _log_normaliser(bins, exponent, order) * bins.copies for bins in pair.bins
            )
            found.append(
                Tilt(
                    pair=pair,
                    direction=direction,
                    exponent=exponent,
                    order=order,
                    log_normaliser=normaliser,
                )
            )
    return tuple(found)


def _log_normaliser(bins: Bins, exponent: float, order: int) -> float:
    if order == 0:
        return exponent**2 / 2 * bins.square_of_mean - exponent / 2 * float(bins.squares.mean())
    weights, divided, _, _ = _weights(bins, exponent, order)
    return math.log(float(np.sum(weights))) + divided - order * math.log(bins.count)


def _table(bins: Bins, exponent: float, order: int) -> Table:
    weights, _, links, ones = _weights(bins, exponent, order)
    return Table(order=order, cumulative=np.cumsum(weights), links=links, ones=ones)


def _weights(bins: Bins, exponent: float, order: int) -> tuple[Array, float, Array, Array]:
    """Weights of the first min(m, 2) picks, the log of what they were divided by, links, ones."""
    if order == 0:
        nothing = np.ones(bins.count)
        return nothing, 0.0, nothing, nothing
    single = (exponent**2 - exponent) / 2 * bins.squares
    top = float(single.max())
    ones = np.exp(single - top)
    if order == 1:
        return ones, top, ones, ones
    pairs = exponent**2 * bins.products
    highest = float(pairs.max())
    links = np.exp(pairs - highest)
    both = ones[:, None] * ones * links
    if order == 2:
        return both, 2 * top + highest, links, ones
    if order == 3:
        return both * ((links * ones) @ links.T), 3 * (top + highest), links, ones
    # Order 4: for each first pick, the third and fourth summed over what links all of them.
    rest = np.empty_like(both)
    for first in range(bins.count):
        others = links[first] * links * ones
        rest[first] = np.sum((others @ links) * others, axis=1)
    return both * rest, 4 * top + 6 * highest, links, ones
