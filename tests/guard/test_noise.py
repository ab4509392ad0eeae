"""Right noise is never stopped, and every wrong one is: counted, not hoped."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
from scipy import stats

from affidavit.guard import GuardStop
from affidavit.guard.noise_statistics import (
    NoiseTest,
    digest_of_arrays,
    measure_noise,
)
from affidavit.guard.sampler import KeyStream
from affidavit.mechanisms import noise_law

SIZES = {"one": 1, "bias": 7, "weight": 400}
SUMS = {name: np.linspace(-30, 30, size) for name, size in SIZES.items()}


def seen(
    watch: NoiseTest, draws: np.random.Generator, dtype: str = "float64", **factors: float
) -> None:
    """One release, the noise of some tensors multiplied."""
    noises = {}
    for name, total in SUMS.items():
        before = total.astype(dtype)
        noise = 2 * factors.get(name, 1.0) * draws.normal(size=total.size)
        noises[name] = (measure_noise((before + noise.astype(dtype)).astype(dtype), before), 2.0)
    watch.check(noises)


def stopped_within(
    releases: int, draws: Callable[[int], np.random.Generator], **factors: float
) -> GuardStop:
    """What stopped a watch in that many releases."""
    watch = NoiseTest()
    for step in range(releases):
        try:
            seen(watch, draws(step), **factors)
        except GuardStop as stop:
            return stop
    raise AssertionError("nothing was found")


@pytest.mark.ordinary("float32")
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
def test_right_noise_passes_in_every_type(dtype: str) -> None:
    for seed in range(20):
        watch, draws = NoiseTest(), np.random.default_rng(seed)
        for _ in range(100):
            seen(watch, draws, dtype)


def test_right_runs_are_stopped_no_more_often_than_promised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    promised, runs, alarms = 0.2, 300, 0
    monkeypatch.setattr(noise_law, "FALSE_ALARM", promised)
    monkeypatch.setattr(noise_law, "MODEL_ERROR", 0.0)
    for seed in range(runs):
        watch, draws = NoiseTest(), np.random.default_rng(seed)
        try:
            for _ in range(15):
                seen(watch, draws)
        except GuardStop:
            alarms += 1
    assert 0 < alarms <= promised * runs


@pytest.mark.parametrize(("name", "within"), [("weight", 1), ("bias", 3), ("one", 60)])
def test_a_tensor_without_noise_is_found(name: str, within: int) -> None:
    stop = stopped_within(within, np.random.default_rng, **{name: 0.0})
    assert (stop.code, name in stop.message) == ("tensor_not_noised", True)


@pytest.mark.parametrize("factor", [0.5, 0.7, 1.5])
def test_noise_of_another_size_is_found(factor: float) -> None:
    assert stopped_within(3, np.random.default_rng, weight=factor).code == "noise_not_as_said"


@pytest.mark.parametrize("again", [1, 5])
def test_the_noise_of_the_first_or_the_last_release_is_known_again(again: int) -> None:
    stop = stopped_within(6, lambda step: np.random.default_rng(step % again))
    assert stop.code == "noise_repeated"


def test_a_sum_that_is_not_finite_is_not_let_out() -> None:
    with pytest.raises(GuardStop) as stop:
        NoiseTest().check({"w": (measure_noise(np.array([np.nan, 1]), np.zeros(2)), 1.0)})
    assert stop.value.code == "non_finite"


def test_numbers_of_a_stream_are_normal_and_of_no_other_stream() -> None:
    stream, other = KeyStream(bytes(32)), KeyStream()
    drawn = stream.normal(200_001)
    assert drawn.shape == (200_001,)
    assert stats.kstest(drawn, "norm").pvalue > 1e-6
    halves = np.corrcoef(drawn[:100_000], drawn[100_000:200_000])[0, 1]
    assert abs(halves) < 6 / np.sqrt(100_000)
    assert not np.array_equal(other.normal(8), drawn[:8])
    assert stream.commitment != other.commitment
    assert stream.commitment == KeyStream(bytes(32)).commitment


def test_lots_are_poisson_lots() -> None:
    stream, q = KeyStream(bytes(32)), Fraction(1, 50)
    sizes = [len(stream.lot(1000, q)) for _ in range(2000)]
    assert abs(np.mean(sizes) - 20) < 6 * np.sqrt(1000 * 0.02 * 0.98 / 2000)
    assert 0.8 < np.var(sizes) / (1000 * 0.02 * 0.98) < 1.2
    assert stream.lot(1000, Fraction(0)) == []


def test_a_digest_is_of_names_shapes_and_values() -> None:
    one = {"a": np.ones((2, 3)), "b": np.zeros(2)}
    same = {"b": [0.0, 0.0], "a": np.ones((2, 3), dtype="float32")}
    assert digest_of_arrays(one) == digest_of_arrays(same)
    others = ({**one, "a": np.ones((3, 2))}, {"a": one["a"], "c": one["b"]}, {**one, "b": [0, 1]})
    assert len({digest_of_arrays(item) for item in (one, *others)}) == 4
