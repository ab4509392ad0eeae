"""DP-Muon and DP-MuonBC equal Algorithm 1, section 4 and appendix C, written with loops."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from affidavit.trainer.noise.normal import standard_normal
from affidavit.trainer.optimizers.inputs import optimizer_inputs
from affidavit.trainer.optimizers.registry import optimizer_of

ETA, STEPS = 0.1, 6
BETA = 0.95
NU = 4 * 0.1 / 100
"""σC/B of the mechanism's example."""
KEY = bytes(range(32))


def product(one: list[list[float]], other: list[list[float]]) -> list[list[float]]:
    return [
        [
            sum(a * b for a, b in zip(row, column, strict=True))
            for column in zip(*other, strict=True)
        ]
        for row in one
    ]


def transposed(matrix: list[list[float]]) -> list[list[float]]:
    return [list(row) for row in zip(*matrix, strict=True)]


def newton_schulz(
    matrix: list[list[float]], degree: int = 2, steps: int = 5, start: str = "paper"
) -> list[list[float]]:
    """Lines 16 to 20 of Algorithm 1, with the polynomial summed power by power."""
    tall = len(matrix) > len(matrix[0])
    y = transposed(matrix) if tall else matrix
    norm = math.sqrt(sum(x * x for row in y for x in row))
    scale = max(1.0, norm) if start == "paper" else norm
    y = [[x / scale for x in row] for row in y]
    size = range(len(y))
    for _ in range(steps):
        gram = product(y, transposed(y))
        rest = [[(i == j) - gram[i][j] for j in size] for i in size]
        power = [[float(i == j) for j in size] for i in size]
        total = [[0.0 for _ in size] for _ in size]
        for s in range(degree + 1):
            factor = math.factorial(2 * s) / (4**s * math.factorial(s) ** 2)
            total = [[total[i][j] + factor * power[i][j] for j in size] for i in size]
            power = product(power, rest)
        y = product(total, y)
    return transposed(y) if tall else y


def flat(tensor: Tensor) -> list[list[float]]:
    result: list[list[float]] = tensor.flatten(1).tolist()
    return result


def muon(theta: Tensor, means: list[Tensor], decay: float = 0.0, **constants: Any) -> Tensor:
    """Algorithm 1 for one matrix."""
    buffer = [[0.0] * len(row) for row in flat(theta)]
    weights = flat(theta)
    for mean in means:
        buffer = [
            [BETA * m + g for m, g in zip(*rows, strict=True)]
            for rows in zip(buffer, flat(mean), strict=True)
        ]
        direction = newton_schulz(buffer, **constants)
        weights = [
            [w - ETA * decay * w - ETA * o for w, o in zip(*rows, strict=True)]
            for rows in zip(weights, direction, strict=True)
        ]
    return torch.tensor(weights, dtype=torch.float64).view(theta.shape)


def muonbc(
    theta: Tensor, means: list[Tensor], number: int, probes: int, std: float = NU, **constants: Any
) -> Tensor:
    """Section 4 for one matrix, which is tensor ``number`` of the model."""
    momentum, weights = torch.zeros_like(theta).flatten(1), theta.flatten(1)
    for t, mean in enumerate(means, start=1):
        momentum = BETA * momentum + mean.flatten(1)
        powers = [BETA**j for j in range(t)]
        normalised = momentum / sum(powers)
        rho = std * math.sqrt(sum(x * x for x in powers)) / sum(powers)
        rows = flat(normalised)
        zeroth = torch.tensor(newton_schulz(rows, **constants), dtype=torch.float64)
        second = torch.zeros_like(zeroth)
        for j in range(probes):
            drawn = standard_normal(
                KEY, step=t, tensor=number * probes + j, shape=normalised.shape
            ).double()
            for sign in (1, -1):
                shifted = flat(normalised + sign * rho * drawn)
                second += torch.tensor(newton_schulz(shifted, **constants), dtype=torch.float64)
        weights = weights - ETA * (2 * zeroth - second / (2 * probes))
    return weights.view(theta.shape)


def adamw(theta: Tensor, means: list[Tensor], decay: float = 0.0, rate: float = ETA) -> Tensor:
    twin = theta.clone().requires_grad_()
    optimizer = torch.optim.AdamW([twin], lr=rate, weight_decay=decay)
    for mean in means:
        twin.grad = mean
        optimizer.step()
    return twin.detach()


def assert_equal(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("start", ["paper", "frobenius"])
@pytest.mark.parametrize(("degree", "steps"), [(1, 3), (2, 5), (4, 2)])
def test_it_equals_algorithm_1(
    start: str, degree: int, steps: int, run_of: Callable[..., Any]
) -> None:
    settings = {
        "weight_decay": 0.2,
        "newton_schulz_degree": degree,
        "newton_schulz_steps": steps,
        "newton_schulz_start": start,
    }
    run = run_of("dp_muon", settings)
    begin, means = run.values(), [run.means(t) for t in range(1, STEPS + 1)]
    result = run.take(range(1, STEPS + 1))
    for name in begin:
        of_tensor = [mean[name] for mean in means]
        if name.startswith("hidden"):
            constants = {"degree": degree, "steps": steps, "start": start}
            expected = muon(begin[name], of_tensor, decay=0.2, **constants)
        else:
            expected = adamw(begin[name], of_tensor, decay=0.2)
        assert_equal(result[name], expected)


def test_what_a_plan_leaves_out_is_as_published(run_of: Callable[..., Any]) -> None:
    run = run_of("dp_muon")
    begin, means = run.values(), [run.means(t) for t in range(1, STEPS + 1)]
    result = run.take(range(1, STEPS + 1))
    assert_equal(
        result["hidden.tall"], muon(begin["hidden.tall"], [m["hidden.tall"] for m in means])
    )


@pytest.mark.ordinary("*-1")
@pytest.mark.parametrize("probes", [1, 3])
@pytest.mark.parametrize("start", ["paper", "frobenius"])
def test_bias_correction_equals_section_4(
    probes: int, start: str, run_of: Callable[..., Any]
) -> None:
    settings = {"newton_schulz_start": start, "probes": probes}
    run = run_of("dp_muonbc", settings)
    begin, means = run.values(), [run.means(t) for t in range(1, STEPS + 1)]
    result = run.take(range(1, STEPS + 1))
    for number, name in enumerate(begin):
        of_tensor = [mean[name] for mean in means]
        if name.startswith("hidden"):
            expected = muonbc(begin[name], of_tensor, number, probes, start=start)
        else:
            expected = adamw(begin[name], of_tensor)
        assert_equal(result[name], expected)


def test_correction_does_nothing_where_newton_schulz_is_linear(run_of: Callable[..., Any]) -> None:
    """Antithetic probes cancel in any odd power, so a small M̂ is only multiplied by 23.2."""
    run = run_of("dp_muonbc", releases=_releases(1e-6))
    name = "hidden.square"
    for parameter in run.parameters().values():
        parameter.grad = torch.full_like(parameter, 1e-7)
    before = run.values()[name]
    run.optimizer.step()
    moved = (before - run.values()[name]) / ETA
    torch.testing.assert_close(moved, torch.full_like(moved, 1.875**5 * 1e-7), rtol=1e-6, atol=0)


def test_correction_moves_the_expected_output_towards_that_of_the_signal() -> None:
    """Theorem 4.1 on 1 x 1: |E O^bc - Q(H)| < |E O⁰ - Q(H)|, by quadrature over the noise."""
    rho, signal = 0.3, 0.5

    def q(x: float) -> float:
        return newton_schulz([[x]])[0][0] if abs(x) > 0 else 0.0

    def smoothed(x: float, std: float) -> float:
        nodes = torch.linspace(-8, 8, 1601, dtype=torch.float64)
        density = torch.exp(-nodes.square() / 2)
        values = torch.tensor([q(x + std * float(u)) for u in nodes], dtype=torch.float64)
        return float((density * values).sum() / density.sum())

    plain = smoothed(signal, rho)
    corrected = 2 * plain - smoothed(signal, math.sqrt(2) * rho)
    assert abs(corrected - q(signal)) < abs(plain - q(signal))


def _releases(noise_multiplier: float) -> list[dict[str, Any]]:
    return [
        {"name": "hidden", "count": 4, "clip_norm": 0.1, "noise_multiplier": noise_multiplier},
        {"name": "auxiliary", "clip_norm": 0.1, "noise_multiplier": noise_multiplier},
    ]


def test_probes_need_a_key_of_their_own(
    plan_with: Callable[..., Any], run_of: Callable[..., Any]
) -> None:
    with pytest.raises(ValueError, match="probe_key"):
        optimizer_of(optimizer_inputs(plan_with("dp_muonbc"), run_of("dp_muonbc").tensors))


@pytest.mark.parametrize("rate", [None, 0.03])
def test_a_flat_norm_orthogonalises_matrices_and_leaves_vectors_to_adamw(
    rate: float | None, run_of: Callable[..., Any]
) -> None:
    settings = {} if rate is None else {"auxiliary_learning_rate": rate}
    releases = [{"name": "all", "clip_norm": 1, "noise_multiplier": 4}]
    run = run_of("dp_muon", settings, releases=releases)
    begin, means = run.values(), [run.means(t) for t in range(1, STEPS + 1)]
    result = run.take(range(1, STEPS + 1))
    assert_equal(result["all.wide"], muon(begin["all.wide"], [mean["all.wide"] for mean in means]))
    for name in ("all.bias", "all.scalar"):
        expected = adamw(begin[name], [mean[name] for mean in means], rate=rate or ETA)
        assert_equal(result[name], expected)


def test_bfloat16_products_change_only_the_orthogonalised(run_of: Callable[..., Any]) -> None:
    settings = {"newton_schulz_start": "frobenius"}
    exact = run_of("dp_muon", settings, dtype=torch.float32).take([1])
    quick = run_of(
        "dp_muon",
        settings,
        dtype=torch.float32,
        performance={"newton_schulz_dtype": torch.bfloat16},
    ).take([1])
    for name in exact:
        if name.startswith("hidden"):
            assert 0 < float((exact[name] - quick[name]).abs().max()) < 0.05 * ETA
        else:
            assert torch.equal(exact[name], quick[name])
