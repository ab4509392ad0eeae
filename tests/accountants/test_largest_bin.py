"""Proved bounds of balls in bins: never below quadrature, exact laws, or simulated runs."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.integrate import quad
from scipy.special import ndtr

from affidavit.accountants.gaussian import GaussianAccountant
from affidavit.accountants.largest_bin import (
    LargestBinAccountant,
    build_integrals,
    disclosed_bins,
)
from affidavit.accountants.monte_carlo.dominating_pair import build_pair
from affidavit.accountants.post_processing import PostProcessedCurve
from affidavit.accountants.protocol import OutOfReach, PrivacyCurve, Unsupported
from affidavit.accountants.random_allocation import AllocationAccountant
from affidavit.plan import events

Matrix = NDArray[np.float64]


def binned(products: Matrix) -> events.BallsInBinsGaussian:
    rows = np.maximum(products, products.T).tolist()
    return events.BallsInBinsGaussian(
        gram=events.Gram(tuple(tuple(row) for row in rows)), noise_multiplier=1.0
    )


def curve(products: Matrix) -> PrivacyCurve:
    return LargestBinAccountant().curve(binned(products))


def products_of(coefficients: list[float], bins: int, epochs: int, largest: float) -> Matrix:
    """Those of the lots of a Toeplitz strategy, scaled so that the largest is ``largest``."""
    steps = bins * epochs
    column = np.pad(np.asarray(coefficients), (0, steps))[:steps]
    means = np.zeros((bins, steps))
    for step in range(steps):
        means[step % bins, step:] += column[: steps - step]
    result = means @ means.T
    return np.asarray(result * (largest / result.max()))


def ratios(products: Matrix, random: np.random.Generator, count: int) -> tuple[Matrix, Matrix]:
    """Likelihood ratios of as many runs with the record, and as many without it."""
    values, vectors = np.linalg.eigh(products)
    root = vectors * np.sqrt(np.maximum(values, 0.0))
    normal = random.standard_normal((count, len(products))) @ root.T
    place = random.integers(len(products), size=count)
    half = np.diag(products) / 2
    with_record, without = normal + products[place] - half, normal - half
    return np.exp(with_record).mean(axis=1), np.exp(without).mean(axis=1)


SHAPES = {
    "banded": products_of([1.0, 0.5, 0.4], 12, 3, 3.0),
    "a short run": products_of([1.0, 0.6], 10, 1, 4.0),
    "no band": products_of([0.9**lag for lag in range(60)], 20, 3, 3.0),
    "far bins alike": 0.2 * np.ones((9, 9)) + products_of([1.0, 0.7], 9, 2, 2.0),
    "no order": (lambda means: means @ means.T)(np.random.default_rng(3).random((7, 4))),
}
shapes = pytest.mark.parametrize("products", SHAPES.values(), ids=SHAPES.keys())


@pytest.mark.ordinary("no order", "banded", "a short run")
@shapes
def test_bounds_contain_delta_of_simulated_runs(products: Matrix) -> None:
    """Plain means over 200,000 runs of each hypothesis, at ε where δ is 1e-1 to 1e-3."""
    result = curve(products)
    present, absent = ratios(products, np.random.default_rng(1), 200_000)
    for epsilon in (0.5, 1.5, 3.0):
        remove = np.maximum(0.0, 1 - math.exp(epsilon) / present)
        add = np.maximum(0.0, 1 - math.exp(epsilon) * absent)
        bracket = result.delta(epsilon)
        for values in (remove, add):
            assert values.mean() - 5 * values.std() / math.sqrt(values.size) <= bracket.upper
        largest = max((remove, add), key=np.mean)
        error = 5 * largest.std() / math.sqrt(largest.size)
        assert bracket.lower <= largest.mean() + error


@pytest.mark.parametrize("own", [0.1, 2.0])
def test_a_lower_end_counts_what_all_bins_show_together(own: float) -> None:
    """Bins that have much in common, against simulated runs and a bin that is known."""
    spread = np.linspace(0.0, 0.3, 9)
    products = 2.0 + own * np.eye(9) + np.add.outer(spread, spread)
    present, absent = ratios(products, np.random.default_rng(4), 200_000)
    values = np.maximum(0.0, 1 - math.e / present), np.maximum(0.0, 1 - math.e * absent)
    truth = max(float(item.mean()) for item in values)
    for lower in (
        PostProcessedCurve(event=binned(products)).delta(1.0).lower,
        curve(products).delta(1.0).lower,
    ):
        assert 0.85 * truth <= lower <= truth * 1.02


@pytest.mark.ordinary("banded", "no order")
@shapes
def test_each_integral_alone_bounds_simulated_runs(products: Matrix) -> None:
    (bins,) = build_pair(((binned(products), 1),)).bins
    present, _ = ratios(products, np.random.default_rng(2), 200_000)
    for integral in build_integrals(bins):
        for epsilon in (0.0, 1.0, 2.5):
            values = np.maximum(0.0, 1 - math.exp(epsilon) / present)
            error = 5 * values.std() / math.sqrt(values.size)
            assert values.mean() - error <= integral.delta(epsilon)


@pytest.mark.ordinary("1.0-2.5", "4.0-0.4", "8.0-0.0")
@pytest.mark.parametrize("product", [0.0, 0.4, 2.5])
@pytest.mark.parametrize("epsilon", [1.0, 4.0, 8.0])
def test_two_bins_by_quadrature(product: float, epsilon: float) -> None:
    """One normal by quadrature, the other in closed form, deep into the tail."""
    square = 3.0
    slope = product / math.sqrt(square)
    rest = math.sqrt(square - slope**2)

    def remove(z: float) -> float:
        fixed = math.exp(math.sqrt(square) * z - square / 2) / 2
        scale = math.exp(slope * z - slope**2 / 2) / 2
        threshold = math.exp(epsilon) - fixed
        density = math.exp(-z * z / 2) / math.sqrt(2 * math.pi)
        if threshold <= 0:
            return (fixed + scale - math.exp(epsilon)) * density
        ahead = math.log(scale / threshold) / rest
        return density * (scale * ndtr(ahead + rest / 2) - threshold * ndtr(ahead - rest / 2))

    exact = sum(
        quad(remove, low, low + 2, epsabs=0, epsrel=1e-9, limit=200)[0] for low in range(-12, 16, 2)
    )
    bracket = curve(np.array([[square, product], [product, square]])).delta(epsilon)
    assert bracket.lower <= exact <= bracket.upper


@pytest.mark.ordinary("20-*")
@pytest.mark.parametrize(("bins", "square", "loose"), [(20, 2.0, 1.25), (100, 6.0, 1.01)])
def test_independent_noise_is_near_its_exact_bracket(
    bins: int, square: float, loose: float
) -> None:
    leaf = events.RandomAllocationGaussian(bins=bins, noise_multiplier=1 / math.sqrt(square))
    exact = AllocationAccountant().curve(leaf).epsilon(1e-6)
    result = curve(square * np.eye(bins)).epsilon(1e-6)
    assert result.lower <= exact.upper
    assert exact.lower <= result.upper <= loose * exact.upper


def test_bins_alike_are_one_gaussian_mechanism() -> None:
    exact = GaussianAccountant().curve(events.Gaussian(noise_multiplier=0.5)).epsilon(1e-5).upper
    assert curve(4 * np.ones((6, 6))).epsilon(1e-5).upper == pytest.approx(exact, rel=1e-6)


def test_gaussian_releases_beside_and_runs_of_their_own_cost_more() -> None:
    one = binned(products_of([1.0, 0.5], 12, 2, 2.0))
    alone = LargestBinAccountant().curve(one).epsilon(1e-6).upper
    for beside in (events.Gaussian(noise_multiplier=1.0), one):
        both = (
            LargestBinAccountant().curve(events.Composed(events=(one, beside))).epsilon(1e-6).upper
        )
        assert both > 1.1 * alone


@pytest.mark.soak
def test_bounds_fall_with_delta_and_agree_with_their_inverse() -> None:
    result = curve(products_of([1.0, 0.5], 30, 4, 5.0))
    uppers = [result.epsilon(delta).upper for delta in (1e-3, 1e-6, 1e-9)]
    assert uppers == sorted(uppers)
    assert result.delta(uppers[1]).upper <= 1e-6 * 1.1


def test_other_releases_are_refused() -> None:
    with pytest.raises(Unsupported):
        LargestBinAccountant().curve(
            events.PoissonSubsampledGaussian(sampling_probability=0.1, noise_multiplier=1.0)
        )


def disclosed_products(seed: int) -> Matrix:
    """Bins of a random short memory, some of which are in one epoch more."""
    random = np.random.default_rng(seed)
    bins, bands = int(random.integers(9, 30)), int(random.integers(2, 5))
    coefficients = np.append(1.0, random.uniform(0.0, 1.0, bands - 1))
    if seed % 3 == 0:
        coefficients = np.append(coefficients, 0.05 * random.uniform(0.0, 1.0, 3 * bands))
    steps = bins + int(random.integers(1, bins))
    column = np.pad(coefficients, (0, steps))[:steps]
    means = np.zeros((bins, steps))
    for step in range(steps):
        means[step % bins, step:] += column[: steps - step]
    result = means @ means.T
    return np.asarray(result * (random.uniform(0.3, 2.0) / result.max()))


@pytest.mark.parametrize("seed", range(60))
def test_noise_of_disclosed_bins_is_a_part_of_the_noise(seed: int) -> None:
    """The products of the bins of every place, over what each is allotted, stretch nothing."""
    products = disclosed_products(seed)
    (bins,) = build_pair(((binned(products), 1),)).bins
    few = disclosed_bins(replace(bins, products=bins.products * 1e-3))
    if few is None:
        return
    most = 1e3 / few.noise_multiplier**2
    less = most if few.attained_at is None else 1e3 / few.attained_at**2
    shortest, count = products.diagonal().min(), len(products)
    widths = [width for width in range(1, count // 2 + 1) if count // width == few.bins]
    fits = []
    for width in widths:
        fits.append(True)
        for first in range(count):
            places = (first + width * np.arange(few.bins)) % count
            own = products[np.ix_(places, places)]
            is_long = own.diagonal() > shortest * (1 + 1e-9)
            allotted = np.sqrt(np.where(is_long, most, less))
            if few.longer is not None:
                fits[-1] &= bool(np.count_nonzero(is_long) <= few.longer)
            stretch = float(np.linalg.norm(own / np.outer(allotted, allotted), 2))
            fits[-1] &= stretch <= 1 + 1e-9
    assert any(fits)


@pytest.mark.parametrize("seed", range(4))
def test_bins_that_are_disclosed_cost_no_less_than_simulated_runs(seed: int) -> None:
    means = np.zeros((60, 100))
    column = np.array([[1.0, 0.8, 0.6], [1.0, 0.5, 0.0], [1.0, 1.0, 1.0], [1.0, 0.9, 0.1]][seed])
    for step in range(100):
        means[step % 60, step : step + 3] += column[: 100 - step]
    products = means @ means.T * 0.4
    result = curve(products)
    assert (
        result.epsilon(1e-5).upper
        < 0.7
        * GaussianAccountant()
        .curve(events.Gaussian(noise_multiplier=1 / math.sqrt(products.max())))
        .epsilon(1e-5)
        .upper
    )
    present, absent = ratios(products, np.random.default_rng(seed), 100_000)
    for epsilon in (0.1, 0.3):
        for values in (
            np.maximum(0.0, 1 - math.exp(epsilon) / present),
            np.maximum(0.0, 1 - math.exp(epsilon) * absent),
        ):
            error = 5 * values.std() / math.sqrt(values.size)
            assert values.mean() - error <= result.delta(epsilon).upper


def test_disclosed_bins_out_of_reach_leave_the_other_bounds() -> None:
    """Bins that are never run have next to no square, and need a lattice of their own."""
    products = np.diag(np.where(np.arange(100) < 10, 1.25, 0.0))
    (bins,) = build_pair(((binned(products), 1),)).bins
    few = disclosed_bins(bins)
    assert few is not None
    with pytest.raises(OutOfReach):
        AllocationAccountant().curve(few).delta(0.3)
    bounded = curve(products)
    known = GaussianAccountant().curve(events.Gaussian(noise_multiplier=1 / math.sqrt(1.25)))
    assert 0 < bounded.delta(0.3).upper < known.delta(0.3).upper
    assert 0 < bounded.epsilon(1e-2).upper < known.epsilon(1e-2).upper
