"""Compare conditional composition (MMCC) with our bound, for correlated noise and Poisson lots.

    python bench/fresh_lots.py

ε of arXiv:2310.15526, Algorithm 1, over that of Theorem 11 of docs/theorems/correlated-noise.md,
and the ε of the latter, at δ = 1e-6. A tenth of δ covers the chance that a posterior exceeds
its bound. Sums of drawn entries are rounded to a grid that keeps their mean, and dp-accounting
composes the mixtures.
"""

from __future__ import annotations

import math
import sys
from functools import reduce

import numpy as np
from dp_accounting.pld.privacy_loss_distribution import (
    PrivacyLossDistribution,
    from_mixture_gaussian_mechanism,
)
from numpy.typing import NDArray
from scipy.special import ndtri

from affidavit.accountants import accountant
from affidavit.plan import events

DELTA = 1e-6
NOISES = (1.0, 5.0, 20.0, 100.0)
"""σ in norms of the longest column."""
GRID = 48
"""Values of a sum of drawn entries."""
Matrix = NDArray[np.float64]


def toeplitz(column: Matrix) -> Matrix:
    """Return the lower triangular Toeplitz matrix with this first column."""
    lags = np.subtract.outer(np.arange(column.size), np.arange(column.size))
    return np.where(lags >= 0, column[np.maximum(lags, 0)], 0.0)


def square_root(steps: int, bands: int) -> Matrix:
    """Return the square root of prefix sums, truncated to ``bands`` bands."""
    ratios: Matrix = 1 - 1 / (2.0 * np.arange(1, steps))
    column: Matrix = np.append(1.0, np.cumprod(ratios))
    column[bands:] = 0.0
    return toeplitz(column)


def tree(steps: int) -> Matrix:
    """Return the tree matrix, with a row for each node in order of completion."""
    rows = []
    for step in range(1, steps + 1):
        size = 1
        while step % size == 0 and size <= steps:
            rows.append((np.arange(steps) >= step - size) & (np.arange(steps) < step))
            size *= 2
    return np.array(rows, dtype=np.float64)


def strategies(steps: int) -> dict[str, Matrix]:
    """Return the strategies by name."""
    return {
        "bidiagonal, λ = 0.5": toeplitz(np.exp2(-np.arange(steps, dtype=np.float64))),
        "square root, 4 bands": square_root(steps, 4),
        "square root": square_root(steps, steps),
        "tree": tree(steps),
    }


def drawn(chances: Matrix, entries: Matrix) -> tuple[Matrix, Matrix]:
    """Return grid values and probabilities of the sum of drawn entries; its mean is exact."""
    step = entries.sum() / GRID
    result = np.zeros(2 * GRID + 2)
    result[0] = 1.0
    for chance, entry in zip(chances, entries, strict=True):
        share, moved = math.modf(entry / step)
        with_it = (1 - share) * np.roll(result, int(moved)) + share * np.roll(
            result, int(moved) + 1
        )
        result = (1 - chance) * result + chance * with_it
    return np.arange(result.size) * step, result


def posteriors(matrix: Matrix, rate: float, noise: float, failure: float) -> Matrix:
    """Bound the probability of each draw, given the previous rows (Algorithm 2)."""
    result = np.zeros_like(matrix)
    one = failure / (2 * np.count_nonzero(matrix) - matrix.shape[1])
    deviations = -float(ndtri(one))
    for row in range(len(matrix)):
        products = matrix[:row].T @ matrix[:row]
        for place in np.flatnonzero(matrix[row]):
            square, beside = products[place, place], products[place][products[place] > 0]
            most = 0.0
            if square > 0:
                values, chances = drawn(np.full(beside.size, rate), beside)
                tail = np.append(np.cumsum(chances[::-1])[::-1][1:], 0.0)
                most = values[np.argmax(tail <= one)]
            exponent = deviations * math.sqrt(square) / noise + (2 * most - square) / 2 / noise**2
            odds = rate / (1 - rate) * math.exp(min(exponent, 600.0))
            result[row, place] = odds / (1 + odds)
    return result


def conditional_composition(matrix: Matrix, rate: float, noise: float, failure: float) -> float:
    """Return ε by MMCC."""
    bounds = posteriors(matrix, rate, noise, failure)
    counts: dict[tuple[tuple[float, ...], tuple[float, ...]], int] = {}
    for chances, row in zip(bounds, matrix, strict=True):
        held = row > 0
        key = (tuple(np.round(chances[held], 9)), tuple(row[held]))
        counts[key] = counts.get(key, 0) + 1

    def step(chances: tuple[float, ...], entries: tuple[float, ...]) -> PrivacyLossDistribution:
        values, weights = drawn(np.array(chances), np.array(entries))
        likely = weights > 1e-13
        weights = weights[likely] / weights[likely].sum()
        return from_mixture_gaussian_mechanism(
            noise,
            values[likely].tolist(),
            weights.tolist(),
            value_discretization_interval=0.02 / noise,
        )

    parts = [step(*key).self_compose(count) for key, count in counts.items()]
    whole = reduce(lambda first, second: first.compose(second), parts)
    return float(whole.get_epsilon_for_delta(DELTA - failure))


def white_noise(matrix: Matrix, rate: float, noise: float) -> float:
    """Return ε by Theorem 11."""
    multiplier = noise / float(np.linalg.norm(matrix, 2))
    leaf = events.PoissonSubsampledGaussian(sampling_probability=rate, noise_multiplier=multiplier)
    event = events.Repeated(event=leaf, count=matrix.shape[1])
    return accountant("fourier").curve(event).epsilon(DELTA).upper


def main() -> None:
    """Print a Markdown table with a row for each strategy."""
    heads = ["strategy", "steps", "q", *(f"σ = {noise:g} columns" for noise in NOISES)]
    sys.stdout.write(f"| {' | '.join(heads)} |\n{'|---' * len(heads)}|\n")
    for steps, rate in ((16, 1 / 16), (16, 0.01)):
        for name, matrix in strategies(steps).items():
            longest = math.sqrt(float((matrix**2).sum(axis=0).max()))
            cells = []
            for noise in NOISES:
                ours = white_noise(matrix, rate, noise * longest)
                theirs = conditional_composition(matrix, rate, noise * longest, 0.1 * DELTA)
                cells.append(f"{theirs / ours:.2f} ({ours:.4g})")
            sys.stdout.write(f"| {name} | {steps} | {rate:.4g} | {' | '.join(cells)} |\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
