"""Planning figures against simulation of what they predict."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from affidavit.mechanisms import utility
from affidavit.mechanisms.newton_schulz import (
    Start,
    coefficients,
    gain,
    singular_value,
    typical_singular_value,
)
from affidavit.trainer.optimizers.muon import orthogonalize

SIGMA, CLIP, DIVISOR, BETA, SIDE = 0.8, 1 / 7, 1024.0, 0.95, 768
"""The setting of SPEC 6: five steps hardly orthogonalise there."""
NU = utility.noise_std_of_the_mean(noise_multiplier=SIGMA, clip_norm=CLIP, divisor=DIVISOR)


def orthogonalise(matrix: np.ndarray, **settings: Any) -> np.ndarray:
    """One matrix through the trainer's iteration, in float64."""
    return orthogonalize(torch.from_numpy(matrix)[None], **settings)[0].numpy()


@pytest.fixture(scope="module")
def momentum() -> np.ndarray:
    """M of the noise alone after 200 steps, 768 x 768."""
    draw = np.random.default_rng(1)
    result = np.zeros((SIDE, SIDE))
    for _ in range(200):
        result = BETA * result + NU * draw.standard_normal((SIDE, SIDE))
    return result


@pytest.mark.soak
def test_the_momentum_has_the_predicted_norm(momentum: np.ndarray) -> None:
    predicted = utility.momentum_norm(NU, entries=SIDE**2, momentum=BETA, steps=200)
    assert predicted == pytest.approx(0.2745, abs=1e-4)
    assert np.linalg.norm(momentum) == pytest.approx(predicted, rel=0.01)


@pytest.mark.soak
def test_five_steps_multiply_it_by_about_the_predicted_gain(momentum: np.ndarray) -> None:
    output = orthogonalise(momentum)
    assert gain(degree=2, steps=5) == pytest.approx(1.875**5)
    # Singular values of the noise reach 2‖M‖_F/√768 = 0.02: nearly all of them in the linear part.
    ratio = np.linalg.norm(output) / np.linalg.norm(momentum)
    assert 22 < ratio < gain(degree=2, steps=5)
    assert np.linalg.norm(output - ratio * momentum) < 0.05 * np.linalg.norm(output)
    assert np.linalg.norm(output) / math.sqrt(SIDE) < 0.3, "far from orthogonal"


@pytest.mark.soak
@pytest.mark.ordinary("paper-*")
@pytest.mark.parametrize(("start", "rough"), [("paper", 0.23), ("frobenius", 0.7)])
def test_the_typical_singular_value_that_comes_out_is_about_the_predicted(
    momentum: np.ndarray, start: Start, rough: float
) -> None:
    result = np.linalg.norm(orthogonalise(momentum, start=start)) / math.sqrt(SIDE)
    predicted = typical_singular_value(
        float(np.linalg.norm(momentum)), entries=SIDE**2, degree=2, steps=5, start=start
    )
    assert predicted == pytest.approx(rough, abs=0.05)
    assert predicted * (1 - 1 / 7) < result < predicted * 1.01


@pytest.mark.soak
@pytest.mark.ordinary("frobenius-*")
@pytest.mark.parametrize(("start", "low", "high"), [("paper", 0, 1e-4), ("frobenius", 0.2, 0.4)])
def test_the_bias_correction_is_a_no_op_without_a_frobenius_start(
    momentum: np.ndarray, start: str, low: float, high: float
) -> None:
    """2Q(M) - mean of Q(M ± ρU) against Q(M), for DP-MuonBC's normalised momentum."""
    normalised = momentum * (1 - BETA) / (1 - BETA**200)
    std = utility.probe_std(NU, momentum=BETA, steps=200)
    probe = std * np.random.default_rng(2).standard_normal((SIDE, SIDE))
    plain, plus, minus = (
        orthogonalise(item, start="paper" if start == "paper" else "frobenius")
        for item in (normalised, normalised + probe, normalised - probe)
    )
    correction = plain - (plus + minus) / 2
    assert low < np.linalg.norm(correction) / np.linalg.norm(plain) < high


@pytest.mark.parametrize("steps", [1, 7, 100])
def test_rho_t_is_the_noise_in_one_entry_of_the_normalised_momentum(steps: int) -> None:
    draw = np.random.default_rng(3)
    noise = draw.standard_normal((steps, 20000))
    weights = BETA ** np.arange(steps)[::-1]
    result = float(np.std(weights @ noise / weights.sum()))
    assert utility.probe_std(1.0, momentum=BETA, steps=steps) == pytest.approx(result, rel=0.02)
    norm = utility.momentum_norm(1, entries=9, momentum=BETA, steps=steps, normalised=True)
    assert norm == pytest.approx(3 * utility.probe_std(1, momentum=BETA, steps=steps))


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_momentum_that_forgets_at_once_leaves_the_noise_of_a_step(momentum: float) -> None:
    one = utility.momentum_norm(2.0, entries=25, momentum=momentum, steps=1)
    assert one == pytest.approx(10)
    assert utility.probe_std(2.0, momentum=momentum, steps=1) == pytest.approx(2)


@pytest.mark.parametrize("lambda_", [0.0, 0.5, 0.9, 1.0, -0.5])
@pytest.mark.parametrize("steps", [1, 2, 50])
def test_the_sum_of_all_releases_carries_the_predicted_noise(steps: int, lambda_: float) -> None:
    draw = np.random.default_rng(4)
    z = draw.standard_normal((steps, 40000))
    w = z - lambda_ * np.vstack([np.zeros(40000), z[:-1]])
    result = float(np.std(w.sum(axis=0)))
    assert utility.prefix_sum_std(1.0, steps=steps, lambda_=lambda_) == pytest.approx(
        result, rel=0.02
    )


def test_phi_is_what_noise_adds_to_adams_second_moment() -> None:
    draw = np.random.default_rng(5)
    true, beta2, phi = 2e-4, 0.9, 1e-8
    gradients = true + math.sqrt(phi) * draw.standard_normal((60, 50000))
    second = np.zeros(50000)
    for gradient in gradients:
        second = beta2 * second + (1 - beta2) * gradient**2
    corrected = second / (1 - beta2**60)
    assert float(np.mean(corrected)) == pytest.approx(true**2 + phi, rel=0.01)


def test_an_average_entry_has_at_least_the_least_noise_share() -> None:
    """A mean of clipped gradients of norm C, the best case, has v = C²/d in an average entry."""
    entries, clip = 100, 0.3
    nu = utility.noise_std_of_the_mean(noise_multiplier=2, clip_norm=clip, divisor=40)
    least = utility.least_noise_share(noise_multiplier=2, divisor=40, entries=entries)
    assert least == pytest.approx(nu**2 / (clip**2 / entries + nu**2))
    most = utility.most_signal_to_noise(noise_multiplier=2, divisor=40, entries=entries)
    assert most == pytest.approx(clip / (nu * math.sqrt(entries)))


# ---- Newton-Schulz -----------------------------------------------------------------


def test_the_polynomial_is_the_taylor_series_of_the_inverse_root() -> None:
    for x in (0.7, 1.0, 1.2):
        series = sum(c * (1 - x) ** s for s, c in enumerate(coefficients(40)))
        assert series == pytest.approx(x**-0.5, rel=1e-9)
    assert coefficients(1) == (1.0, 0.5)


@pytest.mark.parametrize("shape", [(3, 7), (7, 3), (4, 4), (1, 5)])
@pytest.mark.parametrize("degree", [1, 2, 5])
def test_it_acts_on_singular_values_alone(shape: tuple[int, int], degree: int) -> None:
    matrix = np.random.default_rng(6).standard_normal(shape)
    left, values, right = np.linalg.svd(matrix, full_matrices=False)
    start = values / np.linalg.norm(matrix)
    mapped = [singular_value(float(v), degree=degree, steps=4) for v in start]
    result = orthogonalise(matrix, degree=degree, steps=4)
    assert result == pytest.approx(left @ np.diag(mapped) @ right, abs=1e-12)


def test_many_steps_reach_the_polar_factor_from_either_start() -> None:
    matrix = np.random.default_rng(7).standard_normal((5, 8))
    left, _, right = np.linalg.svd(matrix, full_matrices=False)
    assert orthogonalise(matrix, steps=40) == pytest.approx(left @ right, abs=1e-9)
    small = orthogonalise(matrix * 1e-6, steps=60, start="frobenius")
    assert small == pytest.approx(left @ right, abs=1e-9)


def test_nothing_stays_nothing() -> None:
    for start in ("paper", "frobenius"):
        result = orthogonalise(np.zeros((2, 3)), start="paper" if start == "paper" else "frobenius")
        assert not result.any()
