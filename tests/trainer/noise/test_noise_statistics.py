"""The noise test stops what has not the certified noise, and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from affidavit.mechanisms.strategies import Strategy
from affidavit.trainer.errors import RunFailure
from affidavit.trainer.noise.noise_statistics import NoiseTest
from affidavit.trainer.noise.source import NoiseSource, TensorNoise
from affidavit.trainer.run_config import strategies_of
from tests.support.random_seeds import examples
from tests.trainer.loop.small_run import MadeUpData, entries_of, plan_with, train_small

STD = {"w": 2.0, "v": 2.0, "b": 0.5}
RELEASES = {"w": "hidden", "v": "hidden", "b": "auxiliary"}
SHAPES = {"w": (40, 40), "v": (300,), "b": (700,)}
SIZES = {"w": 1600, "v": 300, "b": 700}


def zeros() -> dict[str, Tensor]:
    """Sums without noise."""
    return {name: torch.zeros(shape) for name, shape in SHAPES.items()}


def released(steps: int, noise: Any, seed: int = 0) -> NoiseTest:
    """The test after ``steps`` of ``noise(step, drawn)``, standard normal tensors by name."""
    test, drawn = NoiseTest(RELEASES, SIZES), torch.Generator().manual_seed(seed)
    for step in range(steps):
        sums = {name: item + 50 for name, item in zeros().items()}
        before = test.read(sums)
        for name, z in noise(step, drawn).items():
            sums[name] += STD[name] * z
        test.observe(before, sums, STD)
    return test


def certified(step: int, drawn: torch.Generator) -> dict[str, Tensor]:
    """As it should be."""
    del step
    return {name: torch.randn(shape, generator=drawn) for name, shape in SHAPES.items()}


def test_certified_noise_passes() -> None:
    for seed in range(examples(40)):
        squares = released(200, certified, seed).squares
        assert all(abs(total / size - 1) < 0.02 for total, size in squares.values())


def scaled(factor: float, name: str | None = None) -> Any:
    """Noise of ``factor`` times the certified deviation, of one tensor or all."""

    def noise(step: int, drawn: torch.Generator) -> dict[str, Tensor]:
        result = certified(step, drawn)
        return {n: z * (factor if name in (None, n) else 1) for n, z in result.items()}

    return noise


def repeated(step: int, drawn: torch.Generator) -> dict[str, Tensor]:
    """A tenth of the first step's noise in every step, at the right scale."""
    first = certified(0, torch.Generator().manual_seed(9))
    result = certified(step, drawn)
    if step == 0:
        return first
    return {n: 0.99498744 * z + 0.1 * first[n] for n, z in result.items()}


def shared(step: int, drawn: torch.Generator) -> dict[str, Tensor]:
    """One draw for two releases."""
    result = certified(step, drawn)
    return {**result, "b": result["w"].flatten()[:700]}


@pytest.mark.parametrize(
    ("noise", "within"),
    [
        (scaled(0.98), 100),
        (scaled(1.02), 100),
        (scaled(0.9), 5),
        (scaled(0.0, "b"), 1),
        (scaled(0.5, "v"), 10),
        (repeated, 100),
        (shared, 2),
    ],
)
def test_other_noise_is_stopped(noise: Any, within: int) -> None:
    for seed in range(3):
        with pytest.raises(RunFailure) as failure:
            released(within, noise, seed)
        assert failure.value.code == "noise_not_certified"


def banded() -> tuple[Strategy, int]:
    """A strategy with bands, whose clip norms are scheduled, and its steps."""
    from affidavit.assessment import Execution

    plan = plan_with(
        adjacency="zero_out",
        sampling={"scheme": "cyclic", "lot_size": 12},
        steps=40,
        noise={"kind": "banded", "bands": 3},
        clip_schedule=[1.0] * 20 + [0.5] * 20,
        releases=[{"name": "all", "clip_norm": 0.5, "noise_multiplier": 2.0}],
    )
    (strategy,) = strategies_of(Execution.of(plan))
    assert strategy is not None
    return strategy, 40


@pytest.mark.parametrize("fault", [None, "independent", "scale"])
def test_correlated_noise_is_solved_for_what_it_is_made_of(fault: str | None) -> None:
    strategy, steps = banded()
    tensors = {"w": TensorNoise(shape=(2000,), scale=3.0 * (0.97 if fault == "scale" else 1))}
    source = NoiseSource(tensors, strategy=None if fault == "independent" else strategy)
    test = NoiseTest({"w": "all"}, {"w": 2000})

    def go() -> None:
        for step in range(steps):
            sums = {"w": torch.zeros(2000)}
            before = test.read(sums)
            source.add_to(sums, bytes(32))
            test.observe(before, sums, {"w": 3.0}, strategy=strategy, place=step)

    if fault is None:
        go()
        total, size = test.squares["all"]
        assert abs(total / size - 1) < 0.02
    else:
        with pytest.raises(RunFailure, match=r"deviation|independent"):
            go()


def test_a_run_says_how_much_noise_was_tested_and_no_statistic_of_it(tmp_path: Path) -> None:
    """With the released sums, a statistic of the noise would tell which records were there."""
    train_small(plan_with(), out=tmp_path, data=MadeUpData())
    tested = entries_of(tmp_path)[-1]["noise_test"]
    assert tested["steps"] == 12
    assert tested["entries"] % 12 == 0 < tested["entries"]
    assert tested.keys() == {"steps", "entries", "false_alarm"}


def test_a_run_with_less_noise_is_stopped_before_it_releases(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_to = NoiseSource.add_to

    def less(self: NoiseSource, sums: dict[str, Tensor], *given: Any) -> None:
        before = {name: item.clone() for name, item in sums.items()}
        add_to(self, sums, *given)
        for name, item in sums.items():
            item.copy_(before[name] + 0.1 * (item - before[name]))

    monkeypatch.setattr(NoiseSource, "add_to", less)
    with pytest.raises(RunFailure, match="times the certified deviation"):
        train_small(plan_with(), out=tmp_path)


def test_tensors_that_are_read_at_once_are_read_as_alone() -> None:
    """Also tensors of one size with sums of other lengths, where some entries are to spare."""
    drawn = torch.Generator().manual_seed(9)
    sizes = {f"w{place}": (1024, 32, 32, 70_000, 1)[place % 5] for place in range(60)}
    test = NoiseTest({name: name[-1] for name in sizes}, sizes)
    assert len({test._lengths[name] for name, size in sizes.items() if size == 1024}) > 1
    sums = {
        name: torch.randn(size, generator=drawn, dtype=torch.float64)
        for name, size in sizes.items()
    }
    parts = test._by_tensor(test.read(sums))
    assert list(parts) == test._order
    for name, part in parts.items():
        expected = [item.sum() for item in sums[name].split(test._lengths[name])]
        assert torch.allclose(part, torch.stack(expected), rtol=1e-12, atol=1e-12)
