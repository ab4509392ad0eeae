"""Singular-value denoising keeps the norm, comes nearer to the signal, and costs nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from affidavit.mechanisms.lowering import lower
from affidavit.plan import MalformedPlan, Plan
from affidavit.trainer.optimizers.base import denoise_matrices

Make = Callable[..., Plan]


def spiked(rows: int, columns: int, strength: float, seed: int) -> tuple[Any, Any]:
    """A rank-two signal, and it with noise of standard deviation 1."""
    draw = np.random.default_rng(seed)
    left = np.linalg.qr(draw.standard_normal((rows, 2)))[0]
    right = np.linalg.qr(draw.standard_normal((columns, 2)))[0]
    signal = left @ np.diag([strength, strength / 2]) @ right.T
    return signal, signal + draw.standard_normal((rows, columns))


def shrink(matrix: Any, noise_std: float, threshold: float = 1.02) -> Any:
    """One matrix, denoised."""
    return denoise_matrices(torch.from_numpy(matrix)[None], noise_std, threshold=threshold)[
        0
    ].numpy()


def cosine(one: Any, other: Any) -> float:
    return float(np.sum(one * other) / np.linalg.norm(one) / np.linalg.norm(other))


@pytest.mark.parametrize(("rows", "columns"), [(80, 120), (120, 80), (50, 50)])
@pytest.mark.parametrize("seed", range(3))
def test_what_is_kept_has_the_norm_and_more_of_the_signal(
    rows: int, columns: int, seed: int
) -> None:
    signal, noisy = spiked(rows, columns, 60.0, seed)
    result = shrink(noisy, 1.0)
    assert np.linalg.norm(result) == pytest.approx(np.linalg.norm(noisy))
    assert cosine(result, signal) > cosine(noisy, signal) + 0.1
    assert np.linalg.matrix_rank(result) == 2


def test_the_optimal_shrinkage_is_the_one_of_the_paper() -> None:
    """λ̃ is what equation 3 makes of λ; η is λ times both alignments of equations 4 and 5."""
    rows, columns, true = 30, 50, 40.0
    seen = np.sqrt((true + columns / true) * (true + rows / true))
    matrix = np.zeros((rows, columns))
    matrix[0, 0], matrix[1, 1] = seen, np.sqrt((20 + columns / 20) * (20 + rows / 20))
    result = shrink(matrix, 1.0)

    def eta(value: float) -> float:
        stored = value**4 - rows * columns
        along = stored / (value**4 + rows * value**2) * stored / (value**4 + columns * value**2)
        return value * float(np.sqrt(along))

    assert result[0, 0] / result[1, 1] == pytest.approx(eta(40.0) / eta(20.0))


@pytest.mark.parametrize("strength", [0.0, 5.0])
def test_noise_alone_is_left_as_it_is(strength: float) -> None:
    _, noisy = spiked(60, 60, strength, 1)
    assert np.array_equal(shrink(noisy, 1.0, threshold=1.2), noisy)
    assert not shrink(np.zeros((2, 3)), 1.0).any()


def test_it_changes_no_event_and_takes_a_threshold(plan_of: Make) -> None:
    for denoise in (True, {}, {"threshold": 2}):
        plan = plan_of(optimizer={"name": "dp_adam", "denoise": denoise})
        assert lower(plan).event() == lower(plan_of()).event()
        assert plan.optimizer.denoise is not None
    assert plan_of(optimizer={"denoise": False}).optimizer.denoise is None
    for wrong in ({"threshold": 0.5}, {"treshold": 2}, "yes", 1):
        with pytest.raises(MalformedPlan, match="denoise"):
            plan_of(optimizer={"denoise": wrong})
