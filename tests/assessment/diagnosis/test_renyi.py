"""The quick Rényi readings equal those of the programs that they reproduce."""

from __future__ import annotations

import logging
import math

import mpmath
import pytest
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
from dp_accounting.rdp import RdpAccountant
from hypothesis import given, settings
from hypothesis import strategies as st

from affidavit.assessment.diagnosis.accountant_inputs import Part
from affidavit.assessment.diagnosis.readings import library_epsilon, renyi
from tests.support.random_seeds import examples

runs = st.tuples(
    st.floats(-9.0, -1.0).map(math.exp),
    st.floats(math.log(0.4), math.log(30)).map(math.exp),
    st.integers(1, 20_000),
    st.floats(-9, -4).map(lambda power: 10.0**power),
)


@given(run=runs)
@settings(max_examples=examples(40))
def test_the_library_is_imitated_to_the_last_printed_digit(
    run: tuple[float, float, int, float],
) -> None:
    q, sigma, steps, delta = run
    logging.disable(logging.WARNING)  # it warns of every order at which its series fails
    ledger = RdpAccountant()
    ledger.compose(PoissonSampledDpEvent(q, GaussianDpEvent(sigma)), steps)
    stated = float(ledger.get_epsilon(delta))
    logging.disable(logging.NOTSET)
    parts = ((Part(noise_multiplier=sigma, probability=q), steps),)
    result = renyi(parts, delta)
    assert result is not None
    assert library_epsilon(parts, delta) == pytest.approx(stated, rel=1e-6, abs=1e-9)
    low, high = result.library
    assert low - 1e-9 <= stated <= high * (1 + 1e-9)


@pytest.mark.parametrize("q", [None, 1.0])
def test_a_lot_of_everything_is_read_as_no_sampling(q: float | None) -> None:
    ledger = RdpAccountant()
    ledger.compose(GaussianDpEvent(4.0), 30)
    parts = ((Part(noise_multiplier=4.0, probability=q), 30),)
    assert library_epsilon(parts, 1e-6) == pytest.approx(float(ledger.get_epsilon(1e-6)), rel=2e-9)


@pytest.mark.parametrize(
    ("sigma", "read"),
    [(math.nextafter(0.05, 0), False), (0.05, True), (math.nextafter(1e9, 0), True), (1e9, False)],
)
def test_noise_is_read_from_a_twentieth_to_below_a_billion(sigma: float, read: bool) -> None:
    result = renyi(((Part(noise_multiplier=sigma), 1),), 1e-6)
    assert (result is not None) == read
    if result is not None:
        # The classic conversion is in closed form, α/2σ² + log(1/δ)/(α-1), at Opacus's orders.
        orders = [*(order / 10 for order in range(11, 110)), *range(12, 64)]
        classic = min(a / (2 * sigma**2) - math.log(1e-6) / (a - 1) for a in orders)
        assert result.classic == pytest.approx(classic, rel=1e-12)


@pytest.mark.parametrize(
    ("q", "sigma", "best"), [(0.02, 0.8, 3.8), (0.3, 2.0, 2.2), (0.001, 5.0, 63.0)]
)
def test_opacus_orders_are_true_moments(q: float, sigma: float, best: float) -> None:
    """Opacus sums the same series with its signs, which is the integral itself."""
    steps, delta = 500, 1e-5

    def improved(order: float) -> float:
        moment = mpmath.quad(
            lambda x: (
                mpmath.npdf(x, 0, sigma)
                * ((1 - q) + q * mpmath.exp((2 * x - 1) / (2 * sigma**2))) ** order
            ),
            [-12 * sigma, 0, order, order + 12 * sigma],
        )
        rate = steps * mpmath.log(moment) / (order - 1)
        return float(
            rate + mpmath.log1p(-1 / order) - (math.log(delta) + math.log(order)) / (order - 1)
        )

    result = renyi(((Part(noise_multiplier=sigma, probability=q), steps),), delta)
    assert result is not None
    assert result.opacus == pytest.approx(improved(best), rel=1e-9)
    assert all(result.opacus < improved(best + step) for step in (-0.1, 0.1) if best < 60)
