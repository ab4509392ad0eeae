"""Several records of a user in lots of fixed size: enumerated lots and adversaries."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.stats import hypergeom

from affidavit.accountants import FourierAccountant
from affidavit.accountants.chains import ChainedCurve
from affidavit.accountants.fourier import group_sampling
from affidavit.accountants.fourier.dominating_pairs import directions
from affidavit.accountants.fourier.group_sampling import hypergeometric_weights
from affidavit.plan import events

Array = NDArray[np.float64]
ALPHAS = np.exp([0.0, 0.1, 0.5, 1.5, 3.0])
LINE = np.linspace(-16.0, 16.0, 1601)
SQRT_2_PI = math.sqrt(2 * math.pi)
QUADRATURE = 1e-5
"""What the kinks of hockey sticks lose on ``LINE``; the curves are some tenths."""


def leaf(records: int, size: int, lot: int, sigma: float) -> events.WithoutReplacementGroupGaussian:
    return events.WithoutReplacementGroupGaussian(
        records=records, dataset_size=size, sample_size=lot, noise_multiplier=sigma
    )


@pytest.mark.parametrize(
    ("records", "size", "lot"), [(2, 1000, 10), (5, 20, 18), (9, 12, 4), (200, 10**9, 10**6)]
)
def test_numbers_of_records_are_hypergeometric(records: int, size: int, lot: int) -> None:
    expected = hypergeom(size, records, lot).pmf(np.arange(min(records, lot) + 1))
    chances = hypergeometric_weights(leaf(records, size, lot, 1.0))
    assert chances == pytest.approx(expected, rel=1e-6, abs=1e-290)
    assert math.fsum(chances) == pytest.approx(1.0, abs=1e-12)


def output(data: Array, lot: int, sigma: float) -> Array:
    """The density of a lot's noisy sum on ``LINE``, over every lot."""
    sums = [sum(data[list(chosen)]) for chosen in combinations(range(len(data)), lot)]
    places, counts = np.unique(np.round(sums, 12), return_counts=True)
    normal = np.exp(-(((LINE[:, None] - places) / sigma) ** 2) / 2) / (sigma * SQRT_2_PI)
    result: Array = normal @ (counts / counts.sum())
    return result


def hockey_stick(p: Array, q: Array) -> Array:
    step = LINE[1] - LINE[0]
    return np.array([np.maximum(p - alpha * q, 0).sum() * step for alpha in ALPHAS])


@pytest.mark.ordinary("2-6-2-*")
@pytest.mark.parametrize(
    ("records", "size", "lot", "sigma"),
    [
        (2, 6, 2, 1.0),
        (2, 6, 3, 2.0),
        (3, 7, 2, 1.3),
        (3, 8, 4, 3.0),
        (4, 6, 3, 1.7),
        (2, 5, 4, 1.0),
    ],
)
def test_no_pair_of_data_sets_exceeds_the_curve_and_one_is_its_lower_end(
    records: int, size: int, lot: int, sigma: float
) -> None:
    """All records at an end or anywhere, by 24 random pairs, and the pair that the page names."""
    rng = np.random.default_rng(size * lot)
    curve = FourierAccountant().curve(leaf(records, size, lot, sigma))
    brackets = [curve.delta(math.log(alpha)) for alpha in ALPHAS]
    upper = np.array([bracket.upper for bracket in brackets])
    worst = np.zeros(len(ALPHAS))
    for trial in range(24):
        data = rng.choice([-1.0, 1.0], size) if trial % 3 else rng.uniform(-1, 1, size)
        other = data.copy()
        other[:records] = -data[:records] if trial % 2 else rng.choice([-1.0, 1.0], records)
        worst = np.maximum(worst, hockey_stick(output(data, lot, sigma), output(other, lot, sigma)))
    named = -np.ones(size)
    moved = named.copy()
    moved[:records] = 1.0
    both = output(moved, lot, sigma), output(named, lot, sigma)
    attained = np.maximum(hockey_stick(*both), hockey_stick(*both[::-1]))
    assert np.all(np.maximum(worst, attained) <= upper + QUADRATURE)
    lower = np.array([bracket.lower for bracket in brackets])
    assert np.all(lower <= attained + QUADRATURE)
    assert lower == pytest.approx(attained, rel=1e-3, abs=QUADRATURE)


@pytest.mark.ordinary("2-6-3-*")
@pytest.mark.parametrize(
    ("records", "size", "lot", "sigma"), [(2, 6, 3, 1.2), (3, 7, 2, 2.0), (4, 6, 3, 0.8)]
)
def test_no_user_who_is_set_to_zero_exceeds_the_curve(
    records: int, size: int, lot: int, sigma: float
) -> None:
    """Others on either side of the user's records, or anywhere; nobody else is the lower end."""
    rng, some = np.random.default_rng(size * lot), slice(1, 4, 2)
    curve = FourierAccountant().curve(replace(leaf(records, size, lot, sigma), zeroed=True))
    brackets = [curve.delta(math.log(alpha)) for alpha in ALPHAS[some]]
    for trial in range(9):
        data = np.full(size, (-1.0, 0.0, 1.0)[trial]) if trial < 3 else rng.uniform(-1, 1, size)
        data[:records] = 1.0 if trial < 6 else rng.choice([-1.0, 1.0], records)
        zeroed = np.where(np.arange(size) < records, 0.0, data)
        both = output(data, lot, sigma), output(zeroed, lot, sigma)
        shown = np.maximum(hockey_stick(*both), hockey_stick(*both[::-1]))[some]
        assert np.all(shown <= [bracket.upper + QUADRATURE for bracket in brackets])
        if trial == 1:
            lower = [bracket.lower for bracket in brackets]
            assert lower == pytest.approx(shown, rel=1e-3, abs=QUADRATURE)


@pytest.mark.soak
def test_two_steps_of_one_pair_of_data_sets_are_below_two_steps_of_the_curve() -> None:
    """A product on the plane, on a coarser grid."""
    records, size, lot, sigma = 2, 6, 2, 1.5
    curve = FourierAccountant().curve(
        events.Repeated(event=leaf(records, size, lot, sigma), count=2)
    )
    line = LINE[::4]
    named = -np.ones(size)
    moved = named.copy()
    moved[:records] = 1.0
    p, q = (output(data, lot, sigma)[::4] for data in (moved, named))
    area = (line[1] - line[0]) ** 2
    for alpha in ALPHAS:
        exact = max(
            np.maximum(np.outer(one, one) - alpha * np.outer(other, other), 0).sum() * area
            for one, other in ((p, q), (q, p))
        )
        bracket = curve.delta(math.log(alpha))
        assert bracket.lower - 1e-3 <= exact <= bracket.upper + 1e-3


@pytest.mark.ordinary("2")
@pytest.mark.parametrize("records", [2, 3, 12])
def test_users_cost_more_than_one_record_and_less_than_all_records_in_one(records: int) -> None:
    steps, sigma = 300, 3.0 * records
    run = events.Repeated(event=leaf(records, 10_000, 100, sigma), count=steps)
    result = FourierAccountant().curve(run).epsilon(1e-6)
    one = events.WithoutReplacementGaussian(
        dataset_size=10_000, sample_size=100, noise_multiplier=sigma
    )
    single = FourierAccountant().curve(events.Repeated(event=one, count=steps)).epsilon(1e-6)
    everywhere = events.Gaussian(noise_multiplier=sigma / (2 * records))
    whole = FourierAccountant().curve(events.Repeated(event=everywhere, count=steps)).epsilon(1e-6)
    assert single.lower < result.lower <= result.upper < 1.5 * result.lower
    assert result.upper < whole.lower


def test_a_chain_of_neighbours_bounds_users_whose_numbers_are_revealed() -> None:
    """Two records of a user are hardly ever in one lot, but which of both laws it is is known."""
    run = events.Repeated(event=leaf(2, 50_000, 500, 2.0), count=1000)
    curve = FourierAccountant().curve(run)
    assert isinstance(curve, ChainedCurve)
    bound, anew = curve.epsilon(1e-6), curve.above[0].epsilon(1e-6)
    assert anew.lower == bound.lower
    assert bound.upper < 0.92 * anew.upper
    assert curve.delta(bound.upper).upper == pytest.approx(1e-6, rel=0.02)


@pytest.mark.soak
def test_numbers_that_hardly_happen_count_as_all_records(monkeypatch: pytest.MonkeyPatch) -> None:
    many = leaf(30, 10**6, 2, 14.0)
    (direction,) = directions(many)
    cells = direction.laws[0][0].cells(np.linspace(-3.0, 3.0, 50))
    assert cells.p.sum() == pytest.approx(1.0, abs=1e-12)
    monkeypatch.setattr(group_sampling, "_MIN_CHANCE", 0.05)
    some = leaf(3, 100, 12, 4.0)
    assert 0.03 < hypergeometric_weights(some)[2] < 0.05
    curve = FourierAccountant().curve(some)
    # The lower end is that of a pair of data sets, which the shortcut does not touch.
    assert all(curve.delta(at).lower < curve.delta(at).upper for at in (0.1, 1.0, 2.0))
