"""Optimisers that act entry by entry equal the papers' recurrences in Python floats."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

ETA, STEPS = 0.1, 12
Reference = Callable[..., float]


def sgd(theta: float, means: list[float], momentum: float = 0.0, decay: float = 0.0) -> float:
    """Algorithm 1 of arXiv:1607.00133 with the heavy ball and an l2 penalty."""
    buffer = 0.0
    for mean in means:
        buffer = momentum * buffer + mean + decay * theta
        theta -= ETA * buffer
    return theta


def normalised_average(values: list[float], decay: float) -> float:
    """Σ decay^(t-s) x_s / Σ decay^(t-s): a moving average that starts at zero, corrected."""
    weights = [decay ** (len(values) - 1 - s) for s in range(len(values))]
    return sum(w * x for w, x in zip(weights, values, strict=True)) / sum(weights)


def low_pass_sgd(theta: float, means: list[float], smoothing: float, **kept: float) -> float:
    """SGD on the filtered means."""
    smooth = [normalised_average(means[: t + 1], smoothing) for t in range(len(means))]
    return sgd(theta, smooth, **kept)


def adam(
    theta: float,
    means: list[float],
    beta1: float = 0.9,
    beta2: float = 0.999,
    penalty: float = 0.0,
    decoupled: float = 0.0,
    smoothing: float = 0.0,
    root: Callable[[float], float] = lambda v: math.sqrt(v) + 1e-8,
) -> float:
    """Adam from its weighted averages, not from its recursion."""
    seen: list[float] = []
    firsts: list[float] = []
    for mean in means:
        theta *= 1 - ETA * decoupled
        seen.append(mean + penalty * theta)
        firsts.append(normalised_average(seen, beta1))
        second = normalised_average([x * x for x in seen], beta2)
        theta -= ETA * normalised_average(firsts, smoothing) / root(second)
    return theta


def disk(
    theta: float, means: list[float], kappa: float, step: Reference = sgd, **kept: Any
) -> float:
    """Algorithm 4 of the thesis, from line 11 on."""
    smooth = [means[0]]
    for mean in means[1:]:
        smooth.append((1 - kappa) * smooth[-1] + kappa * mean)
    return step(theta, smooth, **kept)


PHI = (1.0 * 1.0 / 100) ** 2
"""(σC/B)² of the mechanisms' example."""
NOISY = [{"name": "all", "clip_norm": 2, "noise_multiplier": 15}]
NOISY_PHI = (15 * 2 / 100) ** 2
"""About the variance of the means themselves, so that the subtraction matters."""

CASES: dict[str, tuple[str, dict[str, Any], Reference, dict[str, Any], dict[str, Any]]] = {
    "sgd": ("dp_sgd", {}, sgd, {}, {}),
    "sgd, all": (
        "dp_sgd",
        {"momentum": 0.9, "weight_decay": 0.3},
        sgd,
        {"momentum": 0.9, "decay": 0.3},
        {},
    ),
    "sgd low-pass": (
        "dp_sgd_lowpass",
        {"smoothing": 0.6, "momentum": 0.5, "weight_decay": 0.1},
        low_pass_sgd,
        {"smoothing": 0.6, "momentum": 0.5, "decay": 0.1},
        {},
    ),
    "sgd low-pass, none": ("dp_sgd_lowpass", {"smoothing": 0}, sgd, {}, {}),
    "adam": ("dp_adam", {}, adam, {}, {}),
    "adam, all": (
        "dp_adam",
        {"beta1": 0.5, "beta2": 0.8, "weight_decay": 0.3},
        adam,
        {"beta1": 0.5, "beta2": 0.8, "penalty": 0.3},
        {},
    ),
    "adam without memory": (
        "dp_adam",
        {"beta1": 0, "beta2": 0},
        adam,
        {"beta1": 0, "beta2": 0},
        {},
    ),
    "adamw": ("dp_adamw", {"weight_decay": 0.3}, adam, {"decoupled": 0.3}, {}),
    "adambc": (
        "dp_adambc",
        {"floor": 1e-4, "beta2": 0.9},
        adam,
        {"beta2": 0.9, "root": lambda v: math.sqrt(max(v - NOISY_PHI, 1e-4))},
        {"releases": NOISY},
    ),
    "adambc, floor not given": (
        "dp_adambc",
        {},
        adam,
        {"root": lambda v: math.sqrt(max(v - PHI, 1e-8))},
        {},
    ),
    "adam floor": (
        "dp_adam_floor",
        {"floor": 0.09},
        adam,
        {"root": lambda v: math.sqrt(max(v, 0.09))},
        {},
    ),
    "adam low-pass": ("dp_adam_lowpass", {"smoothing": 0.7}, adam, {"smoothing": 0.7}, {}),
    "corrmom": ("dp_corrmom", {}, adam, {}, {}),
    "corrmom, heavy ball": ("dp_corrmom", {"momentum": 0.9}, sgd, {"momentum": 0.9}, {}),
    "corrsgd": ("dp_corrsgd", {}, sgd, {}, {}),
    "disk": ("dp_disk", {}, disk, {"kappa": 0.7}, {}),
    "disk, heavy ball": (
        "dp_disk",
        {"kappa": 0.3, "momentum": 0.9},
        disk,
        {"kappa": 0.3, "momentum": 0.9},
        {},
    ),
    "disk, adam": (
        "dp_disk",
        {"kappa": 0.3, "beta1": 0.9},
        disk,
        {"kappa": 0.3, "step": adam},
        {},
    ),
    "dice": ("dp_dice", {"momentum": 0.9}, sgd, {"momentum": 0.9}, {}),
    "matrix": ("dp_matrix_me", {"momentum": 0.9}, sgd, {"momentum": 0.9}, {"steps": 20}),
}


@pytest.mark.parametrize("case", CASES)
def test_it_equals_the_papers_recurrence(case: str, run_of: Callable[..., Any]) -> None:
    name, settings, reference, constants, changes = CASES[case]
    run = run_of(name, settings, **changes)
    start = run.values()
    means = [run.means(step) for step in range(1, STEPS + 1)]
    result = run.take(range(1, STEPS + 1))
    for tensor in start:
        entries = zip(
            start[tensor].flatten().tolist(),
            *[mean[tensor].flatten().tolist() for mean in means],
            strict=True,
        )
        expected = [reference(theta, list(of_steps), **constants) for theta, *of_steps in entries]
        assert result[tensor].flatten().tolist() == pytest.approx(expected, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize(
    ("name", "settings", "known"),
    [
        (
            "dp_sgd",
            {"momentum": 0.9, "weight_decay": 0.3},
            lambda p: torch.optim.SGD(p, lr=ETA, momentum=0.9, weight_decay=0.3),
        ),
        (
            "dp_adam",
            {"weight_decay": 0.3},
            lambda p: torch.optim.Adam(p, lr=ETA, weight_decay=0.3),
        ),
        (
            "dp_adamw",
            {"weight_decay": 0.3},
            lambda p: torch.optim.AdamW(p, lr=ETA, weight_decay=0.3),
        ),
    ],
)
def test_it_equals_torch_where_torch_has_it(
    name: str,
    settings: dict[str, Any],
    known: Callable[..., torch.optim.Optimizer],
    run_of: Callable[..., Any],
) -> None:
    run, twin = run_of(name, settings), run_of(name, settings)
    twin.optimizer = known(list(twin.parameters().values()))
    result, expected = run.take(range(1, STEPS + 1)), twin.take(range(1, STEPS + 1))
    for tensor in expected:
        torch.testing.assert_close(result[tensor], expected[tensor], rtol=1e-12, atol=1e-13)


def test_decay_of_adamw_is_decoupled_from_the_moments(run_of: Callable[..., Any]) -> None:
    plain, decayed = run_of("dp_adamw"), run_of("dp_adamw", {"weight_decay": 0.5})
    start = plain.values()
    one, other = plain.take([1]), decayed.take([1])
    for tensor in start:
        torch.testing.assert_close(one[tensor] - other[tensor], ETA * 0.5 * start[tensor])


def test_what_noise_adds_to_the_second_moment_is_taken_off(run_of: Callable[..., Any]) -> None:
    """E[v̂ - Φ] = v_true: over noise alone the mean of v̂ is Φ."""
    run = run_of("dp_adambc", {"beta2": 0.99}, releases=NOISY, steps=500)
    generator = torch.Generator().manual_seed(3)
    tensor = run.tensors["all"]["weight"]
    for _ in range(500):
        for parameter in run.parameters().values():
            noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            parameter.grad = math.sqrt(NOISY_PHI) * noise
        run.optimizer.step()
    # 12 entries of relative deviation √(2 (1-β₂)/(1+β₂)) = 0.1: five of their mean's.
    second = float(run.optimizer.state[tensor]["second"].mean())
    assert second == pytest.approx(NOISY_PHI, rel=0.15)
