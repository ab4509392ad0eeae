"""ν_t, ρ_t and Φ are what the noise that is injected really has."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import Parameter

from affidavit.mechanisms import Correlation
from affidavit.mechanisms.strategies import Scheduled, Strategy
from affidavit.mechanisms.strategies.bidiagonal import Bidiagonal
from affidavit.mechanisms.utility import probe_std
from affidavit.plan import Plan, plan_from
from affidavit.trainer.noise.recurrence import recurrence_of
from affidavit.trainer.optimizers.inputs import MeanNoise, optimizer_inputs

NOISES: list[dict[str, Any]] = [
    {"kind": "bidiagonal", "lambda": 0.7},
    {"kind": "bidiagonal", "lambda": 0.7, "normalized": True},
    {"kind": "toeplitz", "coefficients": [1.0, 0.5, 0.375]},
    {"kind": "blt", "decays": [0.9, 0.5], "scales": [0.1, 0.2]},
    {"kind": "dense"},
    {"kind": "tree"},
]


def injected(strategy: Strategy) -> np.ndarray:
    """N by running the recurrence that the run's noise is made by on unit vectors."""
    step, stored = recurrence_of(strategy), []  # type: ignore[var-annotated]
    assert step is not None
    units = torch.eye(strategy.steps, dtype=torch.float64)
    return np.stack([step(t, units[t], stored).numpy() for t in range(strategy.steps)])


@pytest.mark.parametrize("noise", NOISES, ids=lambda noise: str(noise["kind"]))
@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.95])
def test_it_is_the_noise_of_the_recurrence(
    noise: dict[str, Any], momentum: float, plan_with: Callable[..., Plan]
) -> None:
    name = "dp_corrsgd" if noise["kind"] == "bidiagonal" else "dp_matrix_me"
    plan = plan_with(name, steps=20, noise=noise)
    strategy = Correlation(plan=plan, index=0).at(20).strategy
    rows = injected(strategy)
    buffer, result = np.zeros(20), []
    for row in rows:
        buffer = momentum * buffer + row
        result.append(3.0 * np.linalg.norm(buffer))
    path = MeanNoise(scale=(3.0,), strategies=(strategy,), steps=(20,))
    np.testing.assert_allclose(path.momentum_std(momentum, normalised=False), result, rtol=1e-9)
    if momentum == 0:
        np.testing.assert_allclose(path.std(), 3 * np.linalg.norm(rows, axis=1), rtol=1e-9)


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.95, 0.999])
def test_independent_noise_has_the_published_probe_scale(momentum: float) -> None:
    """Lemma C.1: ρ_t² = ν² (1-μ)/(1+μ) (1+μ^t)/(1-μ^t)."""
    path = MeanNoise(scale=(0.25,), strategies=(None,), steps=(50,))
    expected = [probe_std(0.25, momentum=momentum, steps=t) for t in range(1, 51)]
    result = path.momentum_std(momentum, normalised=True)
    np.testing.assert_allclose(result, expected, rtol=1e-10)
    assert path.std().tolist() == [0.25] * 50
    np.testing.assert_allclose(path.second_moment(0.99), [0.0625] * 50, rtol=1e-14)


def test_a_schedule_of_clip_norms_leaves_the_noise_as_it_is(
    plan_with: Callable[..., Plan],
) -> None:
    schedule = [1.0] * 6 + [0.5] * 6
    plain, scheduled = (
        Correlation(plan=plan_with("dp_corrsgd", **changes), index=0).at(12).strategy
        for changes in ({}, {"clip_schedule": schedule})
    )
    assert isinstance(scheduled, Scheduled)
    expected, result = (
        MeanNoise(scale=(1.0,), strategies=(item,), steps=(12,)) for item in (plain, scheduled)
    )
    for beta in (0.0, 0.9):
        np.testing.assert_allclose(
            result.momentum_std(beta, normalised=False),
            expected.momentum_std(beta, normalised=False),
            rtol=1e-12,
        )


def two_phases(plan: Plan) -> Plan:
    """Two steps at noise multiplier 1 and two at 3, on means of 100."""
    document = plan.model_dump(mode="json", by_alias=True, exclude_none=True)
    first = document["phases"][0]
    second = copy.deepcopy(first)
    second["releases"][0]["noise_multiplier"] = 3.0
    first["steps"] = second["steps"] = 2
    return plan_from({**document, "phases": [first, second]})


def test_a_further_phase_brings_its_own_noise(plan_with: Callable[..., Plan]) -> None:
    plan = two_phases(plan_with("dp_adambc"))
    noise = optimizer_inputs(plan, {"all": {"w": Parameter(torch.zeros(2))}}).releases[0].noise
    np.testing.assert_allclose(noise.std(), [0.01, 0.01, 0.03, 0.03])
    variance, phi, weight = 0.0, 0.0, 0.0
    for t, item in enumerate([1e-4, 1e-4, 9e-4, 9e-4]):
        variance, phi, weight = 0.25 * variance + item, 0.9 * phi + item, 0.9 * weight + 1
        std = noise.momentum_std(0.5, normalised=False)[t]
        assert std == pytest.approx(math.sqrt(variance), rel=1e-12)
        assert noise.second_moment(0.9)[t] == pytest.approx(phi / weight, rel=1e-12)


def test_a_strategy_of_another_length_is_refused(plan_with: Callable[..., Plan]) -> None:
    with pytest.raises(ValueError, match="5 steps"):
        optimizer_inputs(
            plan_with("dp_corrsgd"),
            {"all": {"w": Parameter(torch.zeros(2))}},
            strategies=[Bidiagonal.of(0.9, steps=5)],
        )
