"""Bins by their products at each lag: never below quadrature, or simulated runs of whole epochs."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from affidavit.accountants.overlapping_bins import OverlappingBinsCurve, _sums
from affidavit.accountants.random_allocation import AllocationAccountant
from affidavit.mechanisms import lower
from affidavit.mechanisms.strategies.lots_apart import overlapping_lots
from affidavit.mechanisms.strategies.toeplitz import Toeplitz
from affidavit.plan import events, plan_from

Pair = events.SubsampledPair
PAIRS: tuple[Pair, ...] = ("add_remove", "replace_one")


def run_of(
    column: list[float], bins: int, steps: int, square: float, pair: Pair
) -> tuple[events.OverlappingBins, NDArray[np.float64]]:
    """A run whose longest bin has this ``square``, and the products of its bins, over the noise."""
    strategy = Toeplitz.from_strategy(column, steps=steps)
    added = np.stack(
        [strategy.strategy_matrix()[:, place::bins].sum(axis=1) for place in range(bins)], axis=1
    )
    products = added.T @ added
    lots, sigma = overlapping_lots(strategy, turn=bins), math.sqrt(products.max() / square)
    event = events.OverlappingBins(
        products=lots.products,
        noise_multiplier=sigma,
        longer=lots.longer,
        less=lots.less,
        pair=pair,
    )
    return event, products / sigma**2


@pytest.mark.ordinary("column1-4-8-0.3-replace_one")
@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize(
    ("column", "bins", "steps", "square"),
    [([1.0, 0.5, 0.25], 30, 75, 2.0), ([1.0, 0.9, 0.7], 4, 8, 0.3), ([1.0], 3, 4, 4.0)],
)
def test_the_sums_bound_simulated_runs(
    column: list[float], bins: int, steps: int, square: float, pair: Pair
) -> None:
    """Means over 20,000 runs with the record, in whose bin outputs are drawn farther out."""
    event, products = run_of(column, bins, steps, square, pair)
    draws, half = np.random.default_rng(5), np.diag(products) / 2
    values, vectors = np.linalg.eigh(products)
    normal = draws.standard_normal((20_000, bins)) @ (vectors * np.sqrt(np.maximum(values, 0))).T
    place = draws.integers(bins, size=len(normal))
    for stretch in (1.0, 1.6):
        u = normal + stretch * products[place]
        drawn = np.exp(stretch * u - stretch**2 * half).mean(axis=1)
        over = np.exp(u - half).mean(axis=1)
        under = np.exp(-u - half).mean(axis=1) if pair == "replace_one" else 1.0
        for epsilon in (0.1, 0.5, 1.5, 3.0):
            bound, ratio = _sums(event).delta(epsilon), math.exp(epsilon)
            for gain in (over - ratio * under, under - ratio * over):
                paid = np.maximum(gain, 0.0) / drawn
                assert paid.mean() - 5 * paid.std() / math.sqrt(paid.size) <= bound


@pytest.mark.ordinary("5.0-1.2-replace_one")
@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("product", [0.0, 1.2])
@pytest.mark.parametrize("epsilon", [1.0, 3.0, 5.0])
def test_two_bins_by_quadrature(pair: Pair, product: float, epsilon: float) -> None:
    """Two normals on a grid, as deep into the tail as δ is."""
    square, ratio = 2.0, math.exp(epsilon)
    z = np.arange(-10.0, 12.0, 0.05)
    weights = 0.05 * np.exp(-z * z / 2) / math.sqrt(2 * math.pi)
    first = math.sqrt(square) * z[:, None]
    second = product / square * first + math.sqrt(square - product**2 / square) * z
    over = (np.exp(first - square / 2) + np.exp(second - square / 2)) / 2
    under = (np.exp(-first - square / 2) + np.exp(-second - square / 2)) / 2
    if pair == "add_remove":
        under = np.ones_like(over)
    event = events.OverlappingBins(products=(square, product), noise_multiplier=1.0, pair=pair)
    exact = max(
        float(weights @ np.maximum(0.0, gain) @ weights)
        for gain in (over - ratio * under, under - ratio * over)
    )
    assert exact <= _sums(event).delta(epsilon) <= 8 * exact


@pytest.mark.soak
def test_independent_noise_is_not_far_from_its_exact_bracket() -> None:
    event = events.OverlappingBins(products=(1.0, *(0.0,) * 499), noise_multiplier=0.8)
    exact = AllocationAccountant().curve(
        events.RandomAllocationGaussian(bins=500, noise_multiplier=0.8)
    )
    found = OverlappingBinsCurve(event).epsilon(1e-6).upper
    assert exact.epsilon(1e-6).lower <= found <= 1.5 * exact.epsilon(1e-6).upper


def test_a_replaced_record_has_the_bound_in_its_own_form() -> None:
    plan = plan_from(
        {
            "version": 1,
            "adjacency": "replace_one",
            "dataset": {"size": 100_000},
            "sampling": {"scheme": "balls_in_bins", "lot_size": 100},
            "steps": 1200,
            "noise": {"kind": "toeplitz", "coefficients": [1.0, 0.5]},
            "releases": [{"name": "all", "clip_norm": 1, "noise_multiplier": 1.3}],
            "target": {"delta": 1e-6},
        }
    )
    bounds = events.alternatives(lower(plan).event())
    (whole,) = [one for bound in bounds if isinstance(one := only(bound), events.OverlappingBins)]
    assert whole.pair == "replace_one"
    assert (len(whole.products), whole.longer) == (1000, 200)


def only(bound: events.Event) -> events.Event:
    return bound.events[0] if isinstance(bound, events.Composed) else bound


@pytest.mark.parametrize("pair", PAIRS)
def test_independent_bins_are_bounded_by_the_formula_of_the_theorem(pair: Pair) -> None:
    """Sums over fine grids, of the record's bin and of each of two others alike."""
    square, bins, ratio = 0.3, 3, math.exp(0.25)
    event = events.OverlappingBins(products=(square, 0.0, 0.0), noise_multiplier=1.0, pair=pair)
    z = np.linspace(-8, 8, 801)
    chances = np.exp(-z * z / 2) / np.exp(-z * z / 2).sum()
    tilts = np.geomspace(0.2 / max(ratio - 1, 0.5), 60 / (ratio - 1), 36)[:, None]
    deviation = math.sqrt(square)
    opposite = np.exp(-deviation * z - square / 2) if pair == "replace_one" else np.ones(len(z))
    delta = 0.0
    for at, chance in zip(z, chances, strict=True):
        largest = math.exp(deviation * at + square / 2)  # with the record in this bin
        others = np.minimum(np.exp(deviation * z - square / 2), largest) - ratio * opposite
        mean = np.exp(np.minimum(tilts * others / bins, 300)) @ chances
        x = largest / bins - (ratio / bins if pair == "add_remove" else 0.0)
        logs = tilts[:, 0] * x - 1 - np.log(tilts[:, 0]) + 2 * np.log(mean)
        excess = math.exp(min(float(logs.min()), 300))
        least = ratio if pair == "add_remove" else math.exp(-square / 2) * math.sqrt(ratio)
        if largest > least:
            delta += bins * chance * min(excess / largest, 1.0)
    shown = _sums(event).delta(0.25)
    assert delta * (1 - 1e-6) <= shown <= 1.2 * delta
