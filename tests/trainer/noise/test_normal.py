"""The variates are N(0, 1), independent, and a function of their stream's name alone.

The key is fixed, so the tests do not flicker; with another key each statistical one
would fail with probability ``FALSE_ALARM``.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from affidavit.trainer.noise import normal
from affidavit.trainer.noise.normal import standard_normal, standard_normals

KEY = bytes(range(32))
FALSE_ALARM = 1e-6
COUNT = 1_000_000


@pytest.fixture(scope="module")
def sample() -> Tensor:
    """A million variates of one stream."""
    return standard_normal(KEY, step=3, tensor=1, shape=(COUNT,))


def within(found: float, expected: float, deviation: float) -> bool:
    """Whether a nearly normal statistic is where it is but with ``FALSE_ALARM``."""
    return abs(found - expected) <= float(stats.norm.isf(FALSE_ALARM / 2)) * deviation


def test_moments_are_those_of_the_normal_law(sample: Tensor) -> None:
    z = sample.double()
    for power, moment in ((1, 0), (2, 1), (3, 0), (4, 3), (6, 15)):
        # Var(z^p) = E z^{2p} - (E z^p)², with E z^{2p} = (2p - 1)!!
        square = math.prod(range(1, 2 * power, 2))
        deviation = math.sqrt((square - moment**2) / COUNT)
        assert within(float((z**power).mean()), moment, deviation), power


def test_the_law_is_normal(sample: Tensor) -> None:
    result = stats.kstest(sample.numpy().astype(np.float64), "norm")
    assert result.pvalue > FALSE_ALARM
    assert stats.kstest(sample.numpy().astype(np.float64) * 1.02, "norm").pvalue < FALSE_ALARM


@pytest.mark.parametrize("bound", [3.0, 4.0, 4.5])
def test_tails_hold_what_they_should(sample: Tensor, bound: float) -> None:
    share = float(stats.norm.sf(bound))
    for tail in (sample > bound, sample < -bound):
        low, high = stats.binom.interval(1 - FALSE_ALARM, COUNT, share)
        assert low <= int(tail.sum()) <= high


def test_the_tail_reaches_beyond_nine_deviations() -> None:
    smallest, largest = torch.zeros(1, 3, 4, dtype=torch.int32), torch.full((1, 3, 4), -1).int()
    for raw, low, high in ((smallest, 9.2, 9.5), (largest, 0.0, 1e-3)):
        out = torch.empty(1, 2, 4)
        normal._transform(out, raw)
        radius = out.double().square().sum(1).sqrt()
        assert bool(((radius >= low) & (radius <= high)).all())


def test_neighbours_steps_and_tensors_are_independent(sample: Tensor) -> None:
    others = [
        sample.roll(1),
        sample.roll(normal.PAIRS_PER_GROUP),
        standard_normal(KEY, step=4, tensor=1, shape=(COUNT,)),
        standard_normal(KEY, step=3, tensor=2, shape=(COUNT,)),
    ]
    z = sample.double()
    for other in others:
        y = other.double()
        assert within(float((z * y).mean()), 0, 1 / math.sqrt(COUNT))
        assert within(float(((z**2 - 1) * (y**2 - 1)).mean()), 0, 2 / math.sqrt(COUNT))


@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 0), (255,), (256,), (257,), (7, 11, 13)])
def test_every_shape_begins_the_same_stream(sample: Tensor, shape: tuple[int, ...]) -> None:
    result = standard_normal(KEY, step=3, tensor=1, shape=shape)
    assert result.shape == shape
    assert result.dtype == torch.float32
    assert torch.equal(result.flatten(), sample[: math.prod(shape)])


def test_how_many_are_made_at_a_time_does_not_show(
    monkeypatch: pytest.MonkeyPatch, sample: Tensor
) -> None:
    monkeypatch.setattr(normal, "CHUNK_GROUPS", 7)
    assert torch.equal(standard_normal(KEY, step=3, tensor=1, shape=(20_001,)), sample[:20_001])


def test_streams_that_are_drawn_at_once_are_those_that_are_drawn_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spans = [(3, 0, 32), (4, 255, 2), (0, 700, 5000), (9, 256, 0), (5, 1, 256)]
    alone = [
        standard_normal(KEY, step=2, tensor=tensor, shape=(count,), first=first)
        for tensor, first, count in spans
    ]
    for groups in (1, 3, 512):
        monkeypatch.setattr(normal, "CHUNK_GROUPS", groups)
        for one, other in zip(standard_normals(KEY, step=2, spans=spans), alone, strict=True):
            assert torch.equal(one, other)
