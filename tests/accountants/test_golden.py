"""Numbers of the specification and of the papers, each by the method that made it."""

from __future__ import annotations

import pytest

from affidavit.accountants.gaussian import GaussianCurve
from affidavit.accountants.registry import accountant
from tests.accountants.events import poisson

E2E = 1024 / 42043
DART = 1024 / 60591


@pytest.mark.parametrize(
    ("q", "sigma", "steps", "delta", "published", "rdp"),
    [
        (E2E, 2.3395, 49 * 410, 8e-6, 7.9852, 7.98505),
        (DART, 2.3614, 49 * 885, 1e-5, 7.9800, 7.97976),
        (E2E, 0.7189, 410, 8e-6, 8.0000, 7.979),
    ],
    ids=["e2e muon", "dart muon", "e2e sgd"],
)
def test_independent_sampling_of_every_block_gives_the_published_numbers(
    q: float, sigma: float, steps: int, delta: float, published: float, rdp: float
) -> None:
    """arXiv:2605.12994v1, Table 3: its DP-Muon rows need 49 T independently sampled releases."""
    result = accountant("rdp").curve(poisson(q, sigma, steps)).epsilon(delta).upper
    assert result == pytest.approx(rdp, abs=6e-4)
    assert result == pytest.approx(published, rel=3e-3)


@pytest.mark.ordinary("e2e muon")
@pytest.mark.parametrize(
    ("q", "sigma", "steps", "delta", "truth", "rdp"),
    [
        (E2E, 2.3395 / 7, 410, 8e-6, 61.98, 74.56),
        (DART, 2.3614 / 7, 885, 1e-5, 67.62, None),
        (E2E, 0.7189, 410, 8e-6, 6.966, 7.979),
    ],
    ids=["e2e muon", "dart muon", "e2e sgd"],
)
def test_joint_accounting_of_one_lot(
    q: float, sigma: float, steps: int, delta: float, truth: float, rdp: float | None
) -> None:
    event = poisson(q, sigma, steps)
    ours = accountant("fourier").curve(event).epsilon(delta)
    assert ours.lower == pytest.approx(truth, rel=2e-4)
    assert ours.upper == pytest.approx(truth, rel=2e-4)
    assert ours.meets(accountant("pld").curve(event).epsilon(delta))
    if rdp is not None:
        result = accountant("rdp").curve(event).epsilon(delta).upper
        assert result == pytest.approx(rdp, abs=6e-3)


@pytest.mark.parametrize(
    ("sigma_joint", "participations", "delta", "epsilon"),
    [
        (0.7189, 10, 8e-6, 27.9585),
        (2.3395 / 7, 10, 8e-6, 84.7631),
        (0.7094, 15, 1e-5, 37.4507),
        (2.3614 / 7, 15, 1e-5, 114.0203),
    ],
    ids=["e2e sgd", "e2e muon", "dart sgd", "dart muon"],
)
def test_fixed_order_is_one_gaussian(
    sigma_joint: float, participations: int, delta: float, epsilon: float
) -> None:
    curve = GaussianCurve(mu=participations**0.5 / sigma_joint)
    bracket = curve.epsilon(delta)
    assert bracket.upper == pytest.approx(epsilon, abs=6e-5)
    assert bracket.width < 1e-9


@pytest.mark.parametrize(
    ("q", "sigma", "steps", "delta", "low", "high"),
    [
        (0.004267, 1.1, 14062, 1e-14, 4.5795, 4.5805),
        (0.1, 20.0, 100_000, 1e-10, 10.9194, 10.9198),
        (0.1, 1.0, 10_000, 1e-5, 127.87893, 127.87904),
    ],
    ids=["small delta", "long run", "large epsilon"],
)
def test_where_public_accountants_are_seen_to_be_wrong(
    q: float, sigma: float, steps: int, delta: float, low: float, high: float
) -> None:
    """Cases on which dp-accounting's grid or PRV's interval misses the true value."""
    bracket = accountant("fourier").curve(poisson(q, sigma, steps)).epsilon(delta)
    assert bracket.lower <= high
    assert bracket.upper >= low
    assert bracket.width <= 1.5e-4 * bracket.upper
