"""Newton-Schulz acts on singular values alone, as p_κ says, in batches as one by one."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from affidavit.trainer.optimizers.muon import map_matrices, orthogonalize
from tests.support.random_seeds import examples


def p(x: float, degree: int) -> float:
    """p_κ as published."""
    return sum(
        math.factorial(2 * s) / (4**s * math.factorial(s) ** 2) * (1 - x) ** s
        for s in range(degree + 1)
    )


def by_singular_values(matrix: Tensor, degree: int, steps: int, start: str) -> np.ndarray:
    """U f(S) Vᵀ: an orthogonal change of basis goes through every step of the iteration."""
    left, values, right = np.linalg.svd(matrix.numpy(), full_matrices=False)
    norm = math.sqrt(sum(float(v) ** 2 for v in values))
    scale = max(1.0, norm) if start == "paper" else norm
    mapped = []
    for value in values:
        y = float(value) / scale
        for _ in range(steps):
            y *= p(y * y, degree)
        mapped.append(y)
    result: np.ndarray = (left * np.array(mapped)) @ right
    return result


def random_matrix(shape: tuple[int, ...], scale: float = 1.0, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(shape, generator=generator, dtype=torch.float64)


@settings(max_examples=examples(40))
@given(
    rows=st.integers(1, 7),
    columns=st.integers(1, 7),
    degree=st.integers(1, 6),
    steps=st.integers(1, 8),
    start=st.sampled_from(["paper", "frobenius"]),
    exponent=st.integers(-6, 3),
    seed=st.integers(0, 99),
)
def test_singular_values_are_mapped_as_published(
    rows: int, columns: int, degree: int, steps: int, start: str, exponent: int, seed: int
) -> None:
    matrix = random_matrix((rows, columns), 10.0**exponent, seed)
    result = orthogonalize(matrix[None], degree=degree, steps=steps, start=start)[0]  # type: ignore[arg-type]
    expected = by_singular_values(matrix, degree, steps, start)
    np.testing.assert_allclose(
        result.numpy(), expected, rtol=0, atol=1e-12 * max(1e-6, np.abs(expected).max())
    )


@pytest.mark.parametrize("shape", [(6, 6), (3, 8), (8, 3), (1, 5), (5, 1)])
@pytest.mark.parametrize("scale", [1e-8, 1.0, 1e6])
def test_frobenius_start_reaches_singular_values_of_one(
    shape: tuple[int, int], scale: float
) -> None:
    result = orthogonalize(random_matrix((1, *shape), scale), steps=40, start="frobenius")[0]
    values = torch.linalg.svdvals(result)
    torch.testing.assert_close(values, torch.ones_like(values), rtol=1e-12, atol=0)


def test_paper_start_multiplies_a_small_momentum_by_23() -> None:
    """Specification, section 6: C = 1/7, B = 1024, σ = 0.8, β = 0.95 on 768 x 768."""
    nu = 0.8 / 7 / 1024
    matrix = random_matrix((1, 768, 768)).float() * nu / math.sqrt(1 - 0.95**2)
    assert float(torch.linalg.matrix_norm(matrix)[0]) == pytest.approx(0.27, abs=0.01)
    along = (orthogonalize(matrix) * matrix).sum() / matrix.square().sum()
    assert float(along) == pytest.approx(23.2, rel=0.05)
    tiny = 1e-3 * matrix[:, :64, :64].double()
    gain = torch.linalg.matrix_norm(orthogonalize(tiny) / 1.875**5 - tiny)
    assert float(gain[0] / torch.linalg.matrix_norm(tiny)[0]) < 1e-6
    assert round(1.875**5, 1) == 23.2


def test_paper_start_is_continuous_and_normalises_only_above_one() -> None:
    matrix = random_matrix((1, 4, 4))
    unit = matrix / torch.linalg.matrix_norm(matrix)
    for factor in (1.0, 3.0, 1e9):
        torch.testing.assert_close(orthogonalize(factor * unit), orthogonalize(unit))
    assert float((orthogonalize(0.5 * unit) - orthogonalize(unit)).abs().max()) > 0.01


def test_zero_stays_zero_beside_others_in_a_batch() -> None:
    matrices = torch.stack([torch.zeros(3, 4), torch.ones(3, 4)])
    for start in ("paper", "frobenius"):
        result = orthogonalize(matrices, start=start)  # type: ignore[arg-type]
        assert bool((result[0] == 0).all())
        assert bool(torch.isfinite(result[1]).all())


def test_a_transpose_goes_through() -> None:
    matrix = random_matrix((1, 7, 3))
    torch.testing.assert_close(
        orthogonalize(matrix.mT), orthogonalize(matrix).mT, rtol=1e-13, atol=1e-14
    )


def test_batches_by_shape_equal_one_by_one() -> None:
    shapes = [(4, 3), (3, 4), (3, 3), (4, 3), (5, 2), (2, 5), (1, 1)]
    matrices = [random_matrix(shape, seed=seed) for seed, shape in enumerate(shapes)]
    sizes: list[torch.Size] = []

    def counted(batch: Tensor) -> Tensor:
        sizes.append(batch.shape)
        return orthogonalize(batch)

    together = map_matrices(matrices, counted)
    assert sorted(sizes) == [(1, 1, 1), (1, 3, 3), (2, 2, 5), (3, 3, 4)]
    for matrix, result in zip(matrices, together, strict=True):
        torch.testing.assert_close(result, orthogonalize(matrix[None])[0], rtol=1e-13, atol=1e-14)


def test_bfloat16_has_its_twin_in_float32() -> None:
    matrices = random_matrix((3, 32, 48)).float()
    exact = orthogonalize(matrices, start="frobenius", steps=12)
    quick = orthogonalize(matrices, start="frobenius", steps=12, dtype=torch.bfloat16)
    assert quick.dtype == torch.float32
    # 8 bits of a product of 32 terms: a few percent of singular values that are all 1.
    assert float(torch.linalg.matrix_norm(exact - quick, ord=2).max()) < 0.05
    assert float((exact - quick).abs().max()) > 0
