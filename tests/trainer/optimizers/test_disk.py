"""DP-DiSK: the points of the loop, and a whole run against the algorithm's own lines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from affidavit.trainer.optimizers.disk import DiSK

KAPPA, GAMMA, ETA, C = 0.6, 0.8, 0.1, 0.7
SETTINGS = {"kappa": KAPPA, "gamma": GAMMA}
WEIGHT = (1 - KAPPA) / (KAPPA * GAMMA)


def record_gradients(theta: Tensor, records: Tensor) -> Tensor:
    """Of Σ (θ - x)⁴/4 for each record: not linear, so the two points matter."""
    return (theta - records) ** 3


def clipped(gradients: Tensor) -> Tensor:
    norms = gradients.flatten(1).norm(dim=1).clamp(min=C)
    return (gradients * (C / norms)[:, None, None]).sum(0)


def test_a_run_equals_algorithm_4(run_of: Callable[..., Any]) -> None:
    run = run_of("dp_disk", SETTINGS)
    generator = torch.Generator().manual_seed(1)
    records = torch.randn(6, 4, 3, generator=generator, dtype=torch.float64)
    tensor = run.tensors["all"]["weight"]
    theta, direction, smooth = tensor.detach().clone(), torch.zeros(4, 3).double(), None
    for _ in range(6):
        noise = 0.1 * torch.randn(4, 3, generator=generator, dtype=torch.float64)
        gradients = torch.zeros_like(records)
        for point in run.optimizer.points():
            with point.activate():
                gradients += point.weight * record_gradients(tensor.detach(), records)
        for parameter in run.parameters().values():
            parameter.grad = torch.zeros_like(parameter)
        tensor.grad = (clipped(gradients) + noise) / 100
        run.optimizer.step()

        # lines 8 to 16 of the thesis' Algorithm 4
        ahead = record_gradients(theta + GAMMA * direction, records)
        mean = clipped(WEIGHT * ahead + (1 - WEIGHT) * record_gradients(theta, records))
        released = (mean + noise) / 100
        smooth = released if smooth is None else (1 - KAPPA) * smooth + KAPPA * released
        direction = -ETA * smooth
        theta = theta + direction
        torch.testing.assert_close(tensor.detach(), theta, rtol=1e-12, atol=1e-13)


def test_points_have_the_published_weights(run_of: Callable[..., Any]) -> None:
    run = run_of("dp_disk", SETTINGS)
    assert [point.weight for point in run.optimizer.points()] == [1.0]
    run.take([1])
    assert [point.weight for point in run.optimizer.points()] == pytest.approx([WEIGHT, 1 - WEIGHT])


def test_one_point_is_enough_where_its_weight_is_one(run_of: Callable[..., Any]) -> None:
    run = run_of("dp_disk", {"kappa": 0.5, "gamma": 1.0})
    run.take([1])
    assert [point.weight for point in run.optimizer.points()] == [1.0]
    with run.optimizer.points()[0].activate():
        assert not torch.equal(run.values()["all.bias"], run_of("dp_disk").take([1])["all.bias"])


def test_standing_ahead_leaves_no_trace(run_of: Callable[..., Any]) -> None:
    run = run_of("dp_disk", SETTINGS, dtype=torch.float32)
    run.take([1, 2])
    optimizer: DiSK = run.optimizer
    before = run.values()
    ahead = optimizer.points()[0]
    with ahead.activate():
        there = run.values()
        assert not any(torch.equal(before[name], there[name]) for name in before)
    with pytest.raises(ZeroDivisionError), ahead.activate():
        _ = 1 / 0
    after = run.values()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_the_point_ahead_survives_a_checkpoint(run_of: Callable[..., Any]) -> None:
    run, other = run_of("dp_disk", SETTINGS), run_of("dp_disk", SETTINGS)
    run.take([1, 2])
    other.optimizer.load_state_dict(run.optimizer.state_dict())
    for parameter, value in zip(other.parameters().values(), run.values().values(), strict=True):
        parameter.data.copy_(value)
    with run.optimizer.points()[0].activate(), other.optimizer.points()[0].activate():
        mine, theirs = run.values(), other.values()
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)
