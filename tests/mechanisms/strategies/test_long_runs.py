"""Errors of long runs are those of the recurrence that generates the noise."""

from __future__ import annotations

import numpy as np
import pytest

from affidavit.mechanisms.strategies import Strategy, Workload, blt, identity, toeplitz
from affidavit.mechanisms.strategies.blt import Blt
from affidavit.mechanisms.strategies.toeplitz import Toeplitz

STEPS = 3000


def generated(strategy: Strategy) -> np.ndarray:
    """The response of the injected noise to the first draw, step by step."""
    form, first = strategy.streaming.form, np.zeros(STEPS)
    numbers = np.array(strategy.streaming.coefficients)
    if form == "moving_average":
        first[: numbers.size] = numbers
        return first
    assert form == "buffered"
    decays, scales = np.split(numbers, 2)
    buffers = np.zeros(decays.size)
    for step in range(STEPS):
        first[step] = (step == 0) - scales @ buffers
        buffers = decays * buffers + first[step]
    return first


@pytest.mark.parametrize(
    "strategy",
    [
        Blt.of([0.9999, 0.9, 0.3], [0.01, 0.2, 0.5], STEPS),
        Blt.of([0.4], [0.9], STEPS),
        Toeplitz.from_noise([1.0, -0.7, 0.1], STEPS),
        identity(STEPS),
    ],
    ids=["three buffers", "a negative power", "few coefficients", "independent"],
)
def test_closed_errors_are_those_of_the_recurrence(
    strategy: Strategy, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (blt, toeplitz):
        monkeypatch.setattr(module, "MAX_VECTOR", 10)
    errors, first = strategy.errors(Workload()), generated(strategy)
    variances = np.cumsum(np.cumsum(first) ** 2)
    assert errors.places is not None
    assert errors.per_step == pytest.approx(np.sqrt(variances[errors.places]), rel=1e-9)
    assert errors.rms == pytest.approx(np.sqrt(variances.mean()), rel=1e-9)
    assert errors.max == pytest.approx(np.sqrt(variances[-1]), rel=1e-9)
    injected = np.sqrt(np.cumsum(first**2).mean())
    assert strategy.injected_noise() == pytest.approx(injected, rel=1e-9)


def test_a_hundred_million_steps_have_errors() -> None:
    strategy = Blt.of([0.9999999, 0.999, 0.9], [1e-4, 0.01, 0.1], 100_000_000)
    errors = strategy.errors(Workload())
    assert 0 < strategy.injected_noise() < errors.rms < errors.max < 1e4
