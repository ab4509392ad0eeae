"""Denoising equals equations 3 to 9, keeps norms, and leaves weak means alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from affidavit.trainer.optimizers.base import denoise_matrices, map_batches

SIGMA = 0.01


def reference(matrix: torch.Tensor, sigma: float, threshold: float) -> np.ndarray:
    """Equations 3, 7 and 8 with the inverse of F found by bisection."""
    m, n = matrix.shape
    left, values, right = np.linalg.svd(matrix.numpy(), full_matrices=False)
    edge = sigma * (math.sqrt(m) + math.sqrt(n))
    if values[0] <= threshold * edge:
        return matrix.numpy()

    def f(x: float) -> float:
        return math.sqrt((x + sigma**2 * n / x) * (x + sigma**2 * m / x))

    def eta(value: float) -> float:
        if value <= edge:
            return 0.0
        low, high = sigma * (m * n) ** 0.25, value
        for _ in range(200):
            middle = (low + high) / 2
            low, high = (middle, high) if f(middle) < value else (low, middle)
        x = (low + high) / 2
        top = x**4 - m * n * sigma**4
        return (
            x
            * math.sqrt(top / (x**4 + m * x**2 * sigma**2))
            * math.sqrt(top / (x**4 + n * x**2 * sigma**2))
        )

    stored = np.array([eta(float(value)) for value in values])
    result: np.ndarray = (left * (stored * np.linalg.norm(values) / np.linalg.norm(stored))) @ right
    return result


def noisy(shape: tuple[int, int], signal: float, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64)

    left, right = normal(shape[0], 2), normal(2, shape[1])
    return signal * left @ right + SIGMA * normal(*shape)


@pytest.mark.parametrize("shape", [(12, 20), (20, 12), (15, 15), (1, 9), (9, 1), (1, 1)])
@pytest.mark.parametrize("signal", [0.0, 0.02, 0.3])
def test_it_equals_the_papers_equations(shape: tuple[int, int], signal: float) -> None:
    for seed in range(3):
        matrix = noisy(shape, signal, seed)
        result = denoise_matrices(matrix[None], SIGMA, threshold=1.02)[0].numpy()
        np.testing.assert_allclose(result, reference(matrix, SIGMA, 1.02), atol=1e-12)
        assert np.linalg.norm(result) == pytest.approx(float(matrix.norm()), rel=1e-12)


def test_a_batch_is_one_by_one_and_weak_means_stay_bit_for_bit() -> None:
    means = [noisy((8, 6), 0.3), noisy((8, 6), 0.0, 1), noisy((6, 8), 0.3)]
    result = map_batches(means, lambda of: denoise_matrices(of, SIGMA, threshold=1.5))
    assert torch.equal(result[1], means[1])
    for place in (0, 2):
        alone = denoise_matrices(means[place][None], SIGMA, threshold=1.5)[0]
        assert not torch.equal(result[place], means[place])
        torch.testing.assert_close(result[place], alone, rtol=1e-13, atol=1e-15)


def test_nothing_changes_between_the_edge_and_the_threshold() -> None:
    edge = 2 * math.sqrt(3.0)
    matrix = torch.diag(torch.tensor([1.2 * edge, 0.5, 0.1], dtype=torch.float64))
    assert torch.equal(denoise_matrices(matrix[None], 1.0, threshold=1.3)[0], matrix)
    assert not torch.equal(denoise_matrices(matrix[None], 1.0, threshold=1.1)[0], matrix)


def test_a_value_just_above_the_edge_gives_no_nan() -> None:
    edge = 2 * math.sqrt(3.0)
    for value in (edge, math.nextafter(edge, 9), edge * (1 + 1e-12)):
        matrix = torch.diag(torch.tensor([value, 0.5, 0.1], dtype=torch.float64))
        result = denoise_matrices(matrix[None], 1.0, threshold=1.0)
        assert bool(torch.isfinite(result).all())
        assert float(result.norm()) == pytest.approx(float(matrix.norm()))


def test_it_works_where_powers_of_the_noise_underflow() -> None:
    matrix = noisy((12, 20), 0.3)
    small = denoise_matrices((1e-18 * matrix).float()[None], 1e-18 * SIGMA, threshold=1.02)[0]
    expected = denoise_matrices(matrix[None], SIGMA, threshold=1.02)[0]
    torch.testing.assert_close((small.double() * 1e18), expected, rtol=1e-4, atol=1e-5)


def test_it_comes_nearer_to_the_signal() -> None:
    clean = noisy((40, 30), 0.02) - noisy((40, 30), 0.0)
    released = noisy((40, 30), 0.02, 7)
    generator = torch.Generator().manual_seed(9)
    released = clean + SIGMA * torch.randn(40, 30, generator=generator, dtype=torch.float64)
    result = denoise_matrices(released[None], SIGMA, threshold=1.02)[0]
    cosine = torch.nn.functional.cosine_similarity
    assert cosine(result.flatten(), clean.flatten(), 0) > cosine(
        released.flatten(), clean.flatten(), 0
    )


def test_an_optimiser_reads_the_denoised_means(run_of: Callable[..., Any]) -> None:
    noise = [{"name": "all", "clip_norm": 1, "noise_multiplier": 2}]
    run, twin = run_of("dp_sgd", {"denoise": True}, releases=noise), run_of("dp_sgd")
    result = run.take([1])
    for name, mean in twin.means(1).items():
        read = (
            denoise_matrices(mean[None], 2 * 1 / 100, threshold=1.02)[0] if mean.ndim == 2 else mean
        )
        twin.parameters()[name].grad = read
    twin.optimizer.step()
    expected = twin.values()
    assert all(torch.equal(result[name], expected[name]) for name in expected)
    assert not torch.equal(result["all.weight"], run_of("dp_sgd").take([1])["all.weight"])
