"""Measure how many draws the tilts of the Monte-Carlo accountant save, as ratios in one run.

For each bracket, the table shows how many plain draws (losses under P or Q, without tilt) give an
upper bound on δ as close to the truth as the tilted draws, and the ratio of the two numbers. Both
use Chernoff's inequality for draws in [0, 1] at the same confidence. The last column is the proved
bound.

    .venv/bin/python bench/monte_carlo.py
"""

from __future__ import annotations

import math
import sys
import time

import numpy as np

from affidavit.accountants.largest_bin import LargestBinAccountant
from affidavit.accountants.monte_carlo import MonteCarloAccountant
from affidavit.accountants.monte_carlo.importance_sampling import tilts
from affidavit.accountants.monte_carlo.pilot import design_at_delta
from affidavit.plan import events

CASES = (
    (100, 10, 0.0, 3.03, 1e-6),
    (100, 10, 0.0, 1.41, 1e-6),
    (100, 10, 0.9, 13.8, 1e-6),
    (100, 10, 0.9, 3.47, 1e-6),
    (20, 50, 0.5, 10.35, 1e-8),
    (500, 4, 0.95, 5.8, 1e-6),
)
"""Bins, epochs, λ of a bidiagonal inverse, noise multiplier, δ."""


def event(bins: int, epochs: int, rate: float, sigma: float) -> events.BallsInBinsGaussian:
    """Return the run of C[i, j] = λ^(i-j) over a number of epochs."""
    steps = np.arange(bins * epochs)
    lags = np.subtract.outer(steps, steps)
    matrix = np.where(lags >= 0, rate ** np.maximum(lags, 0), 0.0)
    means = np.stack([matrix[:, place::bins].sum(axis=1) for place in range(bins)])
    products = means @ means.T
    products = np.maximum(products, products.T)
    rows = tuple(tuple(row) for row in products.tolist())
    return events.BallsInBinsGaussian(gram=events.Gram(rows), noise_multiplier=sigma)


def plain_draws(delta: float, relative: float, failure: float) -> float:
    """Return the draws in [0, 1] that reject a true mean of (1 + relative)·δ at δ."""
    above = delta * (1 + relative)
    gap = delta * math.log(delta / above) + (1 - delta) * math.log1p((above - delta) / (1 - above))
    return math.log(1 / failure) / gap


def main() -> None:
    """Print a Markdown table with a row for each case."""
    heads = ("bins", "epochs", "λ", "σ", "δ", "ε", "s", "draws", "plain", "plain / draws", "proved")
    sys.stdout.write(f"| {' | '.join(heads)} |\n{'|---' * len(heads)}|\n")
    for bins, epochs, rate, sigma, delta in CASES:
        run = event(bins, epochs, rate, sigma)
        curve = MonteCarloAccountant().curve(run)
        proved = LargestBinAccountant().curve(run).epsilon(delta)
        start = time.perf_counter()
        result = curve.epsilon(delta)
        seconds = time.perf_counter() - start
        assert curve.pair is not None
        design, _ = design_at_delta(tilts(curve.pair, "remove"), delta, 27.0)
        # The slope of log δ at the answer turns the width in ε into one in δ.
        slope = design.tilts[0].decay
        relative = math.expm1(slope * (result.upper - result.lower) / 2)
        plain = plain_draws(delta, relative, curve.failure_probability / 256)
        sys.stdout.write(
            f"| {bins} | {epochs} | {rate:g} | {sigma:g} | {delta:.0e} "
            f"| [{result.lower:.5f}, {result.upper:.5f}] | {seconds:.1f} "
            f"| {design.draws:.1e} | {plain:.1e} | {plain / design.draws:.0f} "
            f"| [{proved.lower:.3f}, {proved.upper:.3f}] |\n"
        )


if __name__ == "__main__":
    main()
