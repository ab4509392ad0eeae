"""The least Gaussian curve above a run's: it bounds the run, hardly less does, and its regret."""

from __future__ import annotations

import numpy as np
import pytest

from affidavit.accountants import GaussianCurve, accountant, gaussian_bound, sample_trade_off
from affidavit.plan import events

EPSILONS = np.linspace(0.0, 8.0, 97).tolist()


@pytest.mark.ordinary("not 6.0")
@pytest.mark.parametrize("mu", [0.1, 1.0, 6.0])
def test_a_gaussian_curve_is_its_own_bound(mu: float) -> None:
    curve = GaussianCurve(mu=mu)
    bound = gaussian_bound(sample_trade_off(curve), curve)
    assert bound is not None
    assert mu <= bound.mu <= 1.005 * mu
    assert bound.regret < 1e-3
    assert bound.remainder < 1e-11


@pytest.mark.ordinary("0.1-*")
@pytest.mark.parametrize(("rate", "sigma", "steps"), [(0.1, 2.0, 100), (0.05, 5.0, 2000)])
def test_it_bounds_a_sampled_run_and_hardly_less_does(
    rate: float, sigma: float, steps: int
) -> None:
    leaf = events.PoissonSubsampledGaussian(sampling_probability=rate, noise_multiplier=sigma)
    curve = accountant("fourier").curve(events.Repeated(event=leaf, count=steps))
    trade_off = sample_trade_off(curve)
    bound = gaussian_bound(trade_off, curve)
    assert bound is not None
    above, less = GaussianCurve(mu=bound.mu), GaussianCurve(mu=0.97 * bound.mu)
    deltas = [curve.delta(epsilon) for epsilon in EPSILONS]
    for epsilon, delta in zip(EPSILONS, deltas, strict=True):
        assert delta.lower <= above.delta(epsilon).upper + bound.remainder
    assert any(
        delta.lower > less.delta(epsilon).upper + bound.remainder
        for epsilon, delta in zip(EPSILONS, deltas, strict=True)
    )
    reported = sample_trade_off(above)
    kappa = bound.regret
    alphas = np.linspace(0.0, 1.0 - kappa, 400)

    def excess(shift: float) -> float:
        return max(
            trade_off.type_two(a + shift).lower - shift - reported.type_two(a).upper for a in alphas
        )

    assert excess(kappa) <= 1e-9
    assert excess(0.6 * kappa) > 0


def test_samples_that_do_not_begin_at_zero_show_none() -> None:
    curve = GaussianCurve(mu=1.0)
    trade_off = sample_trade_off(curve)
    later = type(trade_off)(epsilons=trade_off.epsilons[1:], deltas=trade_off.deltas[1:])
    assert gaussian_bound(later, curve) is None
