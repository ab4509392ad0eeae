"""Bounds of exponential moments against integrals of another making."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.stats import norm

from affidavit.accountants.fourier.loss_laws import Kind, NormalMixtureLaw
from affidavit.accountants.privacy_filter import renyi_divergences

LAWS = [
    NormalMixtureLaw(kind=kind, noise_multiplier=sigma, sampling_probability=q)
    for kind, q in (("gaussian", 1.0), ("remove", 0.9), ("add", 0.9), ("replace", 0.9))
    for sigma in (0.8, 2.0)
]


def means(kind: Kind, q: float, mu: float) -> list[tuple[float, float]]:
    """Weights and means of the law of z under P."""
    whole: dict[str, list[tuple[float, float]]] = {"gaussian": [(1, mu)], "add": [(1, 0)]}
    return whole.get(kind, [(1 - q, 0.0), (q, mu)])


def moment_above(law: NormalMixtureLaw, edge: float, exponent: float) -> float:
    """E_P[exp(λL); L > edge], by quadrature over z."""
    mu = law.distance / law.noise_multiplier
    place = float(law.inverse_loss(np.array([edge]))[0])
    parts = means(law.kind, law.sampling_probability, mu)

    def integrand(z: float) -> float:
        density = sum(weight * norm.pdf(z, mean) for weight, mean in parts)
        return math.exp(exponent * float(law.loss(np.array([z]))[0])) * density

    highest = 12 + mu + 2 * exponent * mu
    result, _ = quad(integrand, place, highest, points=[0.0, mu], limit=400, epsabs=1e-13)
    return float(result)


@pytest.mark.parametrize("law", LAWS, ids=lambda law: f"{law.kind}-{law.noise_multiplier}")
@pytest.mark.parametrize("exponent", [0.5, 2.0, 6.0])
def test_the_tail_is_bounded(law: NormalMixtureLaw, exponent: float) -> None:
    """And by no more than what a loss that is linear in z costs."""
    mu = law.distance / law.noise_multiplier
    edge = float(law.loss(np.array([mu + 1.0]))[0])
    exact = math.log(moment_above(law, edge, exponent))
    bound = renyi_divergences._log_tail(law, edge, exponent)
    assert exact <= bound * (1 + 1e-12) + 1e-9
    q = law.sampling_probability
    slack = exponent * -(math.log(q) + math.log1p(-q)) if q < 1 else 0.0
    assert bound <= exact + slack + 1e-6 + 2e-9 * abs(bound)


@pytest.mark.ordinary("*-0.8")
@pytest.mark.parametrize("law", LAWS, ids=lambda law: f"{law.kind}-{law.noise_multiplier}")
def test_the_whole_is_bounded_and_nearly_met(law: NormalMixtureLaw) -> None:
    lowest = float(law.loss(np.array([-12.0]))[0])
    for exponent in (0.5, 2.0, 6.0):
        exact = math.log(moment_above(law, lowest, exponent))
        (bound,) = renyi_divergences.log_moments(law, np.array([exponent]))
        assert exact - 1e-9 <= bound <= exact + 1e-3


@pytest.mark.parametrize("law", LAWS, ids=lambda law: f"{law.kind}-{law.noise_multiplier}")
def test_moments_beyond_a_double_are_infinite_and_no_warning(law: NormalMixtureLaw) -> None:
    orders = np.array([0.5, 1e3, 1e150, 1e300])
    result = renyi_divergences.log_moments(law, orders)
    assert not np.isnan(result).any()
    assert np.all(np.diff(result) >= 0)


def test_above_its_ceiling_there_is_nothing() -> None:
    law = NormalMixtureLaw(kind="add", noise_multiplier=1.0, sampling_probability=0.3)
    assert renyi_divergences._log_tail(law, law.max_loss, 2.0) == -math.inf
