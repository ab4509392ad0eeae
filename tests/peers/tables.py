"""Published values that are not the libraries' that ``docs/reference/library.md`` compares with.

Every row names its source. A value is inside our bracket, or the row is one of those that say
which side is wrong and prove it by another computation. ``docs/explanation/papers.md`` sums up.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from scipy.stats import norm

import affidavit
from affidavit.accountants.gaussian import GaussianCurve

LN3 = math.log(3)


def answer(question: Any = affidavit.epsilon, **changes: Any) -> Any:
    """The answer about one release block, by default on a data set of a thousand."""
    fields: dict[str, Any] = {
        "adjacency": "add_remove",
        "sampling": "full_batch",
        "size": 1000,
        "steps": 1,
        "allow_large_delta": "a published value",
    }
    more: dict[str, Any] = {
        key: changes.pop(key) for key in ("dataset", "noise", "extra") if key in changes
    }
    if "dataset" in more:
        del fields["size"]
    if "noise" in more:
        more["optimizer"] = {"name": "dp_matrix_me"}
    return question(affidavit.Plan.dp_sgd(**fields | changes), **more)


def bins(number: int, epochs: int) -> dict[str, Any]:
    return {
        "sampling": {"scheme": "balls_in_bins", "lot_size": 10, "bins_drawn": "each_epoch"},
        "size": 10 * number,
        "steps": number * epochs,
    }


@pytest.mark.parametrize(
    ("number", "epochs", "noise", "delta", "least", "most"),
    [
        (1000, 1, 0.8, 1e-6, 0.446814, 0.456778),
        (1000, 1, 1.0, 1e-6, 0.168438, 0.175914),
        (100, 10, 1.0, 1e-6, 1.956485, 1.971193),
        (100, 1, 2.0, 1e-8, 0.251458, 0.266532),
        (10, 1, 1.0, 1e-5, 2.184432, 2.191679),
        (10, 3, 0.5, 1e-5, 13.366718, 13.372453),
        (10_000, 1, 0.6, 1e-7, 0.904546, 0.913028),
        (2, 1, 1.0, 1e-5, 3.687312, 3.702334),
        (100, 1, 0.4, 1e-6, 9.844427, 9.847158),
    ],
)
def test_random_allocation(
    number: int, epochs: int, noise: float, delta: float, least: float, most: float
) -> None:
    """Both ends of PLD_accounting 2.0, Feldman and Shenfeld (arXiv:2602.17284)."""
    found = answer(**bins(number, epochs), noise_multiplier=noise, delta=delta)
    assert least <= found.lower <= found <= most


@pytest.mark.parametrize(("epsilon", "noise"), [(4.0, 0.35), (8.0, 0.35), (0.5, 1.0)])
def test_balls_and_bins_cost_at_least_what_the_largest_sum_shows(
    epsilon: float, noise: float
) -> None:
    """The lower bound of δ of Chua et al. (arXiv:2412.16802), of 200 lots."""
    cut = np.linspace(0, 8, 2001)
    others = 199 * norm.logcdf(cut / noise)
    there = -np.expm1(norm.logcdf((cut - 1) / noise) + others)
    absent = -np.expm1(norm.logcdf(cut / noise) + others)
    least = float(np.max(there - math.exp(epsilon) * absent))
    found = answer(affidavit.delta, **bins(200, 1), noise_multiplier=noise, epsilon=epsilon)
    assert 0.6 * found < least < found


@pytest.mark.parametrize(
    ("reach", "epsilon", "delta", "variance"),
    [
        (1, LN3, 1e-10, 28.76478576660),
        (2, 2 * LN3, 1e-10, 30.637955),
        (math.sqrt(2), 2 * LN3, 1e-10, 15.318977),
        (1, 2 * LN3, 1e-10, 7.65948867798),
        (1, LN3, 1e-5, 11.73597717285),
    ],
)
def test_noise_of_one_gaussian_release(
    reach: float, epsilon: float, delta: float, variance: float
) -> None:
    """``gaussian_noise_test.go`` of google/differential-privacy, which rounds σ up by 1e-3."""
    found = answer(affidavit.noise_multiplier, epsilon=epsilon, delta=delta)
    assert math.sqrt(variance) / reach * (1 - 1e-3) < found <= math.sqrt(variance) / reach


@pytest.mark.parametrize(
    ("mu", "epsilon", "delta"),
    [
        (0.1, 0.1, 0.008751768145810),
        (0.5, LN3, 0.004159742234000802),
        (1.0, LN3, 0.10985556344445052),
        (math.sqrt(2), LN3, 0.26546844106038714),
    ],
)
def test_delta_of_one_gaussian_release(mu: float, epsilon: float, delta: float) -> None:
    """The same file; its allowance is 1e-10."""
    found = answer(affidavit.delta, noise_multiplier=1 / mu, epsilon=epsilon)
    assert found.lower - 1e-12 < delta < found + 1e-12


@pytest.mark.parametrize(
    ("records", "rate", "steps", "noise", "epsilon"),
    [(4, 0.01, 500, 2.0, 2.267664), (16, 0.002, 200, 4.0, 0.478769)],
)
def test_users_of_several_records(
    records: int, rate: float, steps: int, noise: float, epsilon: float
) -> None:
    """Mixtures of Gaussians, Charles et al. (arXiv:2407.07737), by dp-accounting's PLD."""
    found = answer(
        dataset={"size": 100_000, "unit": "user", "contributions_per_user": records},
        sampling={"scheme": "poisson", "probability": rate},
        steps=steps,
        noise_multiplier=noise,
        delta=1e-6,
    )
    assert found.lower <= epsilon <= found * (1 + 1e-4)


@pytest.mark.parametrize(
    ("noise", "delta", "selection", "epsilon"),
    [
        (1, 1e-6, {"distribution": "geometric", "mean": 10}, 8.96398),
        (4, 1e-6, {"distribution": "geometric", "mean": 30}, 2.55521),
        (2, 1e-6, {"distribution": "poisson", "mean": 10}, 5.18273),
        (1, 1e-5, {"distribution": "logarithmic", "mean": 5}, 6.88506),
        (
            3,
            1e-8,
            {"distribution": "truncated_negative_binomial", "mean": 20, "shape": 0.5},
            3.27293,
        ),
    ],
)
def test_the_best_of_several_runs(
    noise: float, delta: float, selection: dict[str, Any], epsilon: float
) -> None:
    """Rényi bounds of Papernot and Steinke (arXiv:2110.03620), by dp-accounting."""
    extra = [{"kind": "repeat_and_select", "name": "search", **selection}]
    assert answer(noise_multiplier=noise, delta=delta, extra=extra) < epsilon


def test_poisson_samples() -> None:
    """Moments accountant of Abadi et al. (arXiv:1607.00133), section 5.1; and as autodp does it.

    autodp (Zhu, Dong and Wang) inverts characteristic functions. Its release 0.2.3.1 answers -0.005
    for one Gaussian release; the method, written anew, gives δ = 1.000004e-5.
    """
    sampled: dict[str, Any] = {"sampling": {"scheme": "poisson", "probability": 0.01}}
    published = answer(**sampled, steps=10_000, noise_multiplier=4, delta=1e-5)
    assert published < 1.26
    found = answer(affidavit.delta, **sampled, steps=500, noise_multiplier=2, epsilon=0.4319821)
    assert found.lower <= 1.000004e-5 * (1 + 1e-5)
    assert found >= 1.000004e-5 * (1 - 1e-5)


@pytest.mark.parametrize(
    ("adjacency", "rate", "noise", "steps", "epsilon", "delta"),
    [
        ("add_remove", 0.01, 2.0, 10_000, 1.0, 0.010224911209191894),
        ("add_remove", 0.01, 2.0, 100_000, 1.0, 0.39205728853284305),
        ("replace_one", 0.01, 2.0, 10_000, 0.8, 0.16803207353601804),
        ("replace_one", 0.02, 2.0, 10_000, 1.0, 0.5113118821506575),
        ("replace_one", 0.01, 4.0, 10_000, 1.9931200626285734, 1e-5),
    ],
)
def test_poisson_samples_by_their_fourier_transform(
    adjacency: str, rate: float, noise: float, steps: int, epsilon: float, delta: float
) -> None:
    """``tests/test_compute_delta.py`` of Koskela et al.'s fourier_accountant (arXiv:1906.03049).

    The last is printed in its ``examples/simple_usage_example.py``, for 1,000 steps.
    """
    sampling = {"scheme": "poisson", "probability": rate}
    given: dict[str, Any] = {"adjacency": adjacency, "sampling": sampling}
    found = answer(affidavit.delta, **given, steps=steps, noise_multiplier=noise, epsilon=epsilon)
    assert found.lower * (1 - 1e-7) <= delta <= found * (1 + 1e-7)


def tree(epochs: int, steps: int, noise: float, *, restart: bool) -> tuple[Any, float]:
    """Ours, and ``compute_epsilon_tree`` of google-research/DP-FTRL (arXiv:2103.00039)."""
    found = answer(
        adjacency="zero_out",
        sampling="cyclic",
        size=10 * steps,
        lot_size=10,
        steps=epochs * steps,
        noise_multiplier=noise,
        delta=1e-5,
        noise={"kind": "tree", "restart": restart},
    )
    levels = math.ceil(math.log2(steps if restart else epochs * steps))
    alpha, square = np.arange(1, 200, 0.1)[1:], noise**2 / (levels * epochs)
    published = alpha / 2 / square + np.log1p(-1 / alpha) * alpha / (alpha - 1)
    return found, float(np.min(published - np.log(1e-5 * (alpha - 1)) / (alpha - 1)))


@pytest.mark.parametrize(
    ("epochs", "steps", "noise"), [(1, 100, 10), (5, 100, 10), (20, 100, 10), (1, 128, 10)]
)
def test_trees_of_one_participation(epochs: int, steps: int, noise: float) -> None:
    found, published = tree(epochs, steps, noise, restart=True)
    assert found < published


@pytest.mark.parametrize(
    ("epochs", "steps", "noise", "restart"),
    [(1, 64, 2, True), (1, 128, 1, True), (20, 100, 10, False), (5, 64, 10, False)],
)
def test_trees_that_the_published_code_accounts_too_low(
    epochs: int, steps: int, noise: float, restart: bool
) -> None:
    """Of 2^h steps it counts h nodes above a step, and there are h + 1. Without a restart it
    counts a node once for each of its participations, and j of them move it by j.
    """
    found, published = tree(epochs, steps, noise, restart=restart)
    seen = 0
    for first in range(steps):  # nodes that prefix sums show: left children, and the root
        taken = np.arange(first, epochs * steps, steps)
        nodes = [
            np.unique(taken >> level, return_counts=True)
            for level in range((epochs * steps).bit_length())
        ]
        squares = [
            int(count) ** 2
            for level, (places, counts) in enumerate(nodes)
            for place, count in zip(places, counts, strict=True)
            if place % 2 == 0 and (place + 1) << level <= epochs * steps
        ]
        seen = max(seen, sum(squares))
    truth = GaussianCurve(mu=math.sqrt(seen) / noise).epsilon(1e-5)
    assert published < truth.lower <= found
    assert published < found.lower
