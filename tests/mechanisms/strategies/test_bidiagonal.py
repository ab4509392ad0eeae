"""Bidiagonal noise: closed forms against sums, matrices and the published numbers."""

from __future__ import annotations

from itertools import product

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.linalg import toeplitz

from affidavit.mechanisms.strategies.bidiagonal import Bidiagonal, NormalizedBidiagonal
from affidavit.mechanisms.strategies.participation import Participation
from affidavit.mechanisms.strategies.workload import Workload
from tests.mechanisms.strategies.brute_force import attained, bound, every_pattern
from tests.support.random_seeds import examples

rates = st.one_of(
    st.floats(-1, 1),
    st.sampled_from([0.0, 1.0, -1.0, 1 - 2.0**-53, 1 - 1e-12, -(1 - 1e-9), 1e-300]),
)


@st.composite
def turns(draw: st.DrawFn) -> Participation:
    make = draw(st.sampled_from([Participation.fixed_epoch, Participation.min_separation]))
    return make(participations=draw(st.integers(1, 5)), separation=draw(st.integers(1, 5)))


def column(rate: float, steps: int) -> np.ndarray:
    return np.power(rate, np.arange(steps))


@settings(max_examples=examples(80))
@given(rate=rates, steps=st.integers(1, 12), at=turns())
def test_the_closed_form_is_the_worst_of_all_patterns(
    rate: float, steps: int, at: Participation
) -> None:
    strategy = toeplitz(column(rate, steps), np.zeros(steps))
    result = Bidiagonal.of(rate, steps).sensitivity(at)
    assert result.exact
    assert result.value == pytest.approx(bound(strategy, at), rel=1e-12)


@settings(max_examples=examples(80))
@given(rate=rates, steps=st.integers(1, 12), at=turns())
def test_so_is_the_form_of_normalised_columns(rate: float, steps: int, at: Participation) -> None:
    strategy = toeplitz(column(rate, steps), np.zeros(steps))
    strategy = strategy / np.linalg.norm(strategy, axis=0)
    result = NormalizedBidiagonal.of(rate, steps).sensitivity(at)
    assert result.exact
    assert result.value == pytest.approx(bound(strategy, at), rel=1e-11)


def test_alternating_noise_is_attained_by_vectors_that_alternate() -> None:
    at = Participation.min_separation(participations=4, separation=3)
    strategy = toeplitz(column(-0.9, 12), np.zeros(12))
    result = Bidiagonal.of(-0.9, 12).sensitivity(at).value
    assert result == pytest.approx(6.30, abs=5e-3)
    assert attained(strategy, at, np.random.default_rng(0)) == pytest.approx(result, rel=1e-6)
    ones = max(
        float(np.linalg.norm(strategy[:, list(pattern)].sum(axis=1)))
        for pattern in every_pattern(12, at)
    )
    assert ones == pytest.approx(4.93, abs=5e-3)


def test_published_numbers() -> None:
    once = Participation.single()
    assert Bidiagonal.of(0.9, 8).sensitivity(once).value == pytest.approx(2.0707, abs=5e-5)
    assert Bidiagonal.of(0.9, 10**12).sensitivity(once).value == pytest.approx(2.2942, abs=5e-5)
    assert Bidiagonal.of(0.9, 2).sensitivity(once).value == pytest.approx(1.81**0.5)


def test_an_order_drawn_anew_each_epoch_costs_more_than_the_formula_for_a_fixed_one() -> None:
    """λ = 0.9, b = 10, k = 3: one turn in each epoch, anywhere in it."""
    size, epochs = 10, 3
    strategy = toeplitz(column(0.9, 30), np.zeros(30))
    gram = strategy.T @ strategy
    reshuffled = max(
        float(gram[np.ix_(places, places)].sum()) ** 0.5
        for turn in product(range(size), repeat=epochs)
        if (places := [epoch * size + place for epoch, place in enumerate(turn)])
    )
    in_order = Participation.fixed_epoch(participations=epochs, separation=size)
    anywhere = Participation.min_separation(participations=epochs, separation=1)
    result = Bidiagonal.of(0.9, 30)
    assert reshuffled == pytest.approx(5.52, abs=5e-3)
    assert result.sensitivity(in_order).value == pytest.approx(4.80, abs=5e-3)
    assert result.sensitivity(anywhere).value >= reshuffled


@settings(max_examples=examples(40))
@given(
    gap=st.floats(1e-16, 1e-3),
    k=st.integers(2, 400),
    b=st.integers(1, 10**6),
    tail=st.integers(1, 10**6),
)
def test_near_one_no_digit_is_lost(gap: float, k: int, b: int, tail: int) -> None:
    rate, steps = 1 - gap, (k - 1) * b + min(tail, b)
    result = Bidiagonal.of(rate, steps)
    at = Participation.min_separation(participations=k, separation=b)
    with mpmath.workdps(60):
        exact, share = mpmath.mpf(rate), mpmath.mpf(rate) ** b
        if exact == 1:
            return
        last = steps - (k - 1) * b
        ladder = [(1 - share**m) / (1 - share) for m in range(1, k + 1)]
        norm = [(1 - exact ** (2 * n)) / (1 - exact**2) for n in (b, last)]
        square = norm[0] * sum(m**2 for m in ladder[:-1]) + norm[1] * ladder[-1] ** 2
        ratio = mpmath.mpf(result.sensitivity(at).value) / mpmath.sqrt(square)
        assert 1 <= ratio < 1 + 1e-15


def test_a_rate_of_one_is_the_limit() -> None:
    at = Participation.fixed_epoch(participations=4, separation=25)
    limit = Bidiagonal.of(1.0, 100).sensitivity(at).value
    assert limit**2 == pytest.approx(25 * (1 + 4 + 9 + 16))
    near = Bidiagonal.of(1 - 1e-14, 100).sensitivity(at).value
    assert near == pytest.approx(limit, rel=1e-11)
    assert near < limit


def test_steps_do_not_cost_time_or_memory() -> None:
    at = Participation.min_separation(participations=10**6, separation=10**8)
    assert Bidiagonal.of(0.999, 10**15).sensitivity(at).exact


@pytest.mark.parametrize("rate", [1.0001, -1.5, float("nan")])
def test_a_rate_beyond_one_is_refused(rate: float) -> None:
    for make in (Bidiagonal.of, NormalizedBidiagonal.of):
        with pytest.raises(ValueError, match="λ"):
            make(rate, 10)


@pytest.mark.parametrize("rate", [0.0, 0.5, 0.95, 1.0])
@pytest.mark.parametrize("steps", [1, 2, 50])
def test_errors_of_the_prefix_sum_are_closed(rate: float, steps: int) -> None:
    result = Bidiagonal.of(rate, steps).errors(Workload())
    assert result.rms**2 == pytest.approx(1 + (1 - rate) ** 2 * (steps - 1) / 2)
    assert result.max**2 == pytest.approx(1 + (1 - rate) ** 2 * (steps - 1))


def test_the_gain_over_independent_noise_tends_to_one_minus_over_one_plus() -> None:
    """Variance of the last sum, at κ: ν² (1 + (1-λ)² (T-1)) against T."""
    steps, rate = 10**6, 0.9
    result = Bidiagonal.of(rate, steps)
    kappa = result.sensitivity(Participation.single()).value
    variance = (result.errors(Workload()).per_step[-1] * kappa) ** 2
    assert variance / steps == pytest.approx((1 - rate) / (1 + rate), rel=1e-3)


def test_the_noise_is_streamed_as_it_says() -> None:
    rng = np.random.default_rng(4)
    z = rng.normal(size=9)
    plain, normal = Bidiagonal.of(0.7, 9), NormalizedBidiagonal.of(0.7, 9)
    streamed = z - 0.7 * np.concatenate([[0.0], z[:-1]])
    assert plain.streaming.coefficients == (1.0, -0.7)
    assert plain.noise_matrix() @ z == pytest.approx(streamed)
    norms = np.linalg.norm(plain.strategy_matrix(), axis=0)
    assert normal.noise_matrix() @ z == pytest.approx(norms * streamed)
