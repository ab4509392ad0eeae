"""Hockey-stick curves of mixtures of normals with one standard deviation, from their densities.

The excess of P over Q at α is ∫(P - αQ)₊ for α ≥ 1 and ∫(αQ - P)₊ for α < 1, which is
H_α(P ‖ Q) - (1 - α)₊ for laws of mass one. On a line it is computed to rounding, from the places
where P = αQ. In more dimensions it is computed for outputs that are rounded to cells: that is
post-processing, so that the result is at most the truth.

>>> present, absent = Line(np.arange(2), np.array([0.9, 0.1])), Line(np.zeros(1), np.ones(1))
>>> float(line_excess(present, absent, np.ones(1))[0].round(9))  # 0.1 (2Φ(1/2) - 1)
0.038292492
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr

Array = NDArray[np.float64]
REACH = 9.0
"""Standard deviations around the outermost centres within which densities are compared."""
STEP, BISECTIONS = 0.05, 20
"""Standard deviations between compared places; an error of a root changes little: P = αQ there."""
CELLS = {1: 500, 2: 250, 3: 60}
"""Cells in each dimension."""
TAILS = 10.0 ** -np.array([0.5, 1, 1.5, 2.5, 4, 6, 9])
"""Probabilities of the losses above, and below, the α at which laws are compared."""


@dataclass(frozen=True)
class Law:
    """A mixture of normals: centres in clip norms, shape (n, dimensions), and their weights."""

    centres: Array
    weights: Array


def merged(centres: Array, weights: Array) -> Law:
    """The law with equal centres added up, without what is too rare to matter."""
    rounded = np.round(centres, 12) + 0.0
    unique, index = np.unique(rounded, axis=0, return_inverse=True)
    total = np.bincount(index.ravel(), weights, len(unique))
    return Law(unique[total > 1e-30], total[total > 1e-30])


@dataclass(frozen=True)
class Line:
    """A mixture on a line, in standard deviations, of any mass."""

    centres: Array
    weights: Array

    @property
    def mirrored(self) -> Line:
        return Line(-self.centres, self.weights)

    def log_density(self, places: Array) -> Array:
        """But for a constant."""
        if not self.weights.any():
            return np.full(len(places), -np.inf)
        exponents = np.log(np.maximum(self.weights, 1e-300)) - (
            (places[:, None] - self.centres) ** 2 / 2
        )
        top = exponents.max(axis=1, keepdims=True)
        return np.asarray(top[:, 0] + np.log(np.exp(exponents - top).sum(axis=1)))

    def mass(self, start: Array, stop: Array) -> Array:
        """The probabilities between places, with small relative errors in both tails."""
        return between(start[:, None] - self.centres, stop[:, None] - self.centres) @ self.weights


def between(low: Array, high: Array) -> Array:
    """Φ(high) - Φ(low), computed in the tail in which it lies."""
    flip = low > 0
    return np.asarray(ndtr(np.where(flip, -low, high)) - ndtr(np.where(flip, -high, low)))


def excesses(over: Law, under: Law, sigma: float) -> tuple[Array, Array]:
    """Return α > 0 at which the laws differ in telling ways, and the excess at each."""
    p, q = cells(over, under, sigma)
    alphas = telling_alphas(p, q)
    if over.centres.shape[1] > 1:
        return alphas, cell_excess(p, q, alphas)
    lines = (Line(one.centres[:, 0] / sigma, one.weights) for one in (over, under))
    return alphas, line_excess(*lines, alphas)


def cell_excess(p: Array, q: Array, alphas: Array) -> Array:
    """The excess of finitely many outcomes with the probabilities ``p`` over those with ``q``."""
    gains = ((p - alpha * q) * (1 if alpha >= 1 else -1) for alpha in alphas)
    return np.array([np.maximum(gain, 0.0).sum() for gain in gains])


def line_excess(
    over: Line, under: Line, alphas: Array, start: float = -np.inf, stop: float = np.inf
) -> Array:
    """∫(P - αQ)₊ between two places where α ≥ 1, ∫(αQ - P)₊ where α < 1, for any masses."""
    means = np.concatenate((over.centres, under.centres))
    low, high = (float(np.clip(m, start, stop)) for m in (means.min() - REACH, means.max() + REACH))
    grid = np.linspace(low, high, 3 + int((high - low) / STEP))
    with np.errstate(invalid="ignore"):
        ratio = over.log_density(grid) - under.log_density(grid)
    sign, logs = np.where(alphas >= 1, 1.0, -1.0), np.log(alphas)
    above = (ratio - logs[:, None]) * sign[:, None] > 0
    row, column = np.nonzero(above[:, 1:] != above[:, :-1])
    left, right, before = grid[column], grid[column + 1], above[row, column]
    for _ in range(BISECTIONS):
        middle = (left + right) / 2
        at = (over.log_density(middle) - under.log_density(middle) - logs[row]) * sign[row] > 0
        left, right = np.where(at == before, middle, left), np.where(at == before, right, middle)
    roots = (left + right) / 2
    # An interval begins at the start or a root, and ends at the next one of its α or at the stop.
    rows = np.arange(len(alphas))
    of = np.concatenate((rows, row))
    order = np.lexsort((np.concatenate((np.full(len(alphas), -np.inf), roots)), of))
    begins = np.concatenate((np.full(len(alphas), start), roots))[order]
    positive = np.concatenate((above[:, 0], ~before))[order]
    of = of[order]
    last = np.append(of[1:] != of[:-1], True)
    ends = np.where(last, stop, np.append(begins[1:], stop))
    begins, ends, of = begins[positive], ends[positive], of[positive]
    gains = over.mass(begins, ends) - alphas[of] * under.mass(begins, ends)
    return np.bincount(of, np.maximum(gains * sign[of], 0.0), len(alphas))


def cells(over: Law, under: Law, sigma: float) -> tuple[Array, Array]:
    """The probabilities of cells that fill the space, under each law, of shape (cells,)."""
    dimensions = over.centres.shape[1]
    centres = np.concatenate((over.centres, under.centres)) / sigma
    factors: list[list[Array]] = [[], []]
    for axis in range(dimensions):
        low, high = centres[:, axis].min() - REACH, centres[:, axis].max() + REACH
        edges = np.concatenate(([-np.inf], np.linspace(low, high, CELLS[dimensions]), [np.inf]))
        for one, side in ((over, factors[0]), (under, factors[1])):
            shifted = edges - one.centres[:, axis, None] / sigma
            side.append(between(shifted[:, :-1], shifted[:, 1:]))
    letters = "abc"[:dimensions]
    product = ",".join(["n", *(f"n{letter}" for letter in letters)]) + f"->{letters}"
    p, q = (
        np.einsum(product, one.weights, *side, optimize=True).ravel()
        for one, side in zip((over, under), factors, strict=True)
    )
    return p, q


def telling_alphas(p: Array, q: Array) -> Array:
    """One, and each α that the ratio is above or below with a probability of ``TAILS``."""
    seen = (p > 1e-290) & (q > 1e-290)
    ratios, p, q = p[seen] / q[seen], p[seen], q[seen]
    order = np.argsort(ratios)
    ratios, above, below = ratios[order], p[order][::-1].cumsum()[::-1], q[order].cumsum()
    high = ratios[np.minimum(np.searchsorted(-above, -TAILS), len(ratios) - 1)]
    low = ratios[np.minimum(np.searchsorted(below, TAILS), len(ratios) - 1)]
    return np.unique(np.concatenate(([1.0], high, low)))
