"""Every curve refuses an ε and a δ that are none, rather than bound something with them."""

from __future__ import annotations

import math

import pytest

from affidavit.accountants.analytic_gaussian import AnalyticGaussianAccountant
from affidavit.accountants.fourier_accountant import FourierAccountant
from affidavit.accountants.gaussian import GaussianAccountant
from affidavit.accountants.monte_carlo.accountant import MonteCarloAccountant
from affidavit.accountants.pld import PldAccountant
from affidavit.accountants.protocol import Accountant, PrivacyCurve
from affidavit.accountants.prv import PrvAccountant
from affidavit.accountants.random_allocation.accountant import AllocationAccountant
from affidavit.accountants.random_allocation.renyi import RenyiAllocationAccountant
from affidavit.accountants.rdp import RdpAccountant
from affidavit.plan import events

PLAIN = events.Gaussian(noise_multiplier=2.0)
ALLOCATED = events.RandomAllocationGaussian(bins=3, noise_multiplier=2.0)
EVENTS: dict[type[Accountant], events.Event] = {
    AllocationAccountant: ALLOCATED,
    AnalyticGaussianAccountant: PLAIN,
    FourierAccountant: PLAIN,
    GaussianAccountant: PLAIN,
    MonteCarloAccountant: events.BallsInBinsGaussian(
        gram=events.Gram(((1.0, 0.0), (0.0, 1.0))), noise_multiplier=2.0
    ),
    PldAccountant: PLAIN,
    PrvAccountant: PLAIN,
    RdpAccountant: PLAIN,
    RenyiAllocationAccountant: ALLOCATED,
}


@pytest.fixture(params=sorted(EVENTS, key=lambda kind: kind.__name__), ids=lambda of: of.__name__)
def curve(request: pytest.FixtureRequest) -> PrivacyCurve:
    return request.param().curve(EVENTS[request.param])  # type: ignore[no-any-return]


@pytest.mark.parametrize("epsilon", [-1e-9, math.nan, math.inf, -math.inf])
def test_no_delta_at_what_is_no_epsilon(curve: PrivacyCurve, epsilon: float) -> None:
    with pytest.raises(ValueError, match="epsilon must be finite and not negative"):
        curve.delta(epsilon)


@pytest.mark.parametrize("delta", [0.0, 1.0, -1e-9, math.nan, math.inf])
def test_no_epsilon_at_what_is_no_delta(curve: PrivacyCurve, delta: float) -> None:
    with pytest.raises(ValueError, match="delta must lie strictly between 0 and 1"):
        curve.epsilon(delta)
