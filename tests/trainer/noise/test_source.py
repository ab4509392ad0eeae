"""The noise of a run is N z of the strategy that was certified, for every strategy."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from pydantic import TypeAdapter
from scipy import stats
from torch import Tensor

from affidavit.mechanisms.strategies import (
    Dense,
    Participation,
    Scheduled,
    Setting,
    Strategy,
    Tree,
    build,
    identity,
)
from affidavit.mechanisms.strategies.bidiagonal import Bidiagonal, NormalizedBidiagonal
from affidavit.mechanisms.strategies.blt import Blt
from affidavit.mechanisms.strategies.registry import BUILDERS
from affidavit.mechanisms.strategies.toeplitz import (
    Toeplitz,
    banded_inverse_root,
    banded_root,
    square_root,
)
from affidavit.plan import Noise, noise_forms
from affidavit.trainer.noise import normal
from affidavit.trainer.noise.normal import standard_normal
from affidavit.trainer.noise.recurrence import recurrence_of
from affidavit.trainer.noise.source import NoiseSource, TensorNoise, WrongState

KEY = bytes(range(32))
STEPS = 11
FALSE_ALARM = 1e-6

Array = NDArray[np.float64]


def lower(bands: int) -> Array:
    """A lower-triangular matrix with ``bands`` bands that no other structure has."""
    full = np.tril(np.random.default_rng(bands).uniform(-0.4, 0.4, (STEPS, STEPS)), -1)
    return np.triu(full, 1 - bands) + np.diag(np.linspace(0.8, 1.3, STEPS))


STRATEGIES: dict[str, Strategy] = {
    "independent": identity(STEPS),
    "bidiagonal": Bidiagonal.of(0.9, STEPS),
    "bidiagonal, λ = -1": Bidiagonal.of(-1.0, STEPS),
    "bidiagonal, normalized": NormalizedBidiagonal.of(0.7, STEPS),
    "toeplitz": Toeplitz.from_strategy([2.0, 0.5, 0.0, 0.375], STEPS),
    "toeplitz_inverse": Toeplitz.from_noise([0.5, -0.5, 0.25, 0.0], STEPS),
    "sqrt": square_root(STEPS),
    "bsr": banded_root(STEPS, bands=4),
    "bisr": banded_inverse_root(STEPS, bands=4),
    "blt": Blt.of((0.99, 0.6), (0.04, 0.3), STEPS),
    "dense": Dense.from_strategy(lower(STEPS)),
    "banded": Dense.from_strategy(lower(3)),
    "matrix": Dense.from_noise(lower(STEPS)),
    "matrix, banded": Dense.from_noise(lower(3)),
    "diagonal": Dense.from_strategy(lower(1)),
    "tree": Tree.of(STEPS),
    "tree, restarted": Tree.of(STEPS, period=5),
    "scheduled": Scheduled.of(Dense.from_strategy(lower(3)), [1.0 + t for t in range(STEPS)]),
}
STRATEGIES |= {
    f"{example}": build(
        TypeAdapter(Noise).validate_python(example),
        Setting(steps=STEPS, participation=Participation.single(), period=5),
    )
    for form in noise_forms()
    for example in form.examples
}


def injected(strategy: Strategy) -> Array:
    """N, without the columns of noise that is never seen."""
    matrix = strategy.noise_matrix()
    seen = matrix[:, np.any(matrix != 0, axis=0)]
    return seen[:, np.argsort(np.argmax(seen != 0, axis=0))]


def run(
    source: NoiseSource, shapes: dict[str, tuple[int, ...]], steps: int, key: bytes = KEY
) -> list[Tensor]:
    """What is added to sums of zero, all tensors in one row a step."""
    result = []
    for _ in range(steps):
        sums = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in shapes.items()}
        source.add_to(sums, key)
        result.append(torch.cat([item.flatten() for item in sums.values()]))
    return result


SHAPES = {"weight": (3, 4), "bias": (5,)}


def source_of(strategy: Strategy | None, scale: float = 1.0) -> NoiseSource:
    """In float64."""
    tensors = {name: TensorNoise(shape=shape, scale=scale) for name, shape in SHAPES.items()}
    return NoiseSource(tensors, strategy=strategy, dtype=torch.float64)


def draws(steps: int) -> Tensor:
    """z of every step, all tensors in one row."""
    rows = [
        torch.cat(
            [
                standard_normal(KEY, step=step, tensor=place, shape=shape).flatten()
                for place, shape in enumerate(SHAPES.values())
            ]
        )
        for step in range(steps)
    ]
    return torch.stack(rows).double()


@pytest.mark.parametrize("name", STRATEGIES)
def test_noise_is_the_matrix_times_the_draws(name: str) -> None:
    strategy = STRATEGIES[name]
    expected = 0.5 * torch.from_numpy(injected(strategy)) @ draws(STEPS)
    result = torch.stack(run(source_of(strategy, 0.5), SHAPES, STEPS))
    assert float((result - expected).abs().max()) <= 1e-11 * float(expected.abs().max())


def test_every_kind_of_noise_of_a_plan_is_among_them() -> None:
    assert BUILDERS.keys() <= {strategy.kind for strategy in STRATEGIES.values()}


@pytest.mark.parametrize(
    "strategy", [None, identity(STEPS), Bidiagonal.of(0.0, STEPS), NormalizedBidiagonal.of(0.0, 11)]
)
def test_without_correlation_the_noise_is_the_draws_bit_for_bit(strategy: Strategy | None) -> None:
    tensors = {name: TensorNoise(shape=shape, scale=1.0) for name, shape in SHAPES.items()}
    source = NoiseSource(tensors, strategy=strategy)
    for row in draws(STEPS).float():
        sums = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
        source.add_to(sums, KEY)
        assert torch.equal(torch.cat([item.flatten() for item in sums.values()]), row)
    assert not any(source.state_dict()["kept"].values())


@pytest.mark.parametrize("name", STRATEGIES)
def test_as_many_tensors_are_kept_as_the_certificate_says(name: str) -> None:
    strategy = STRATEGIES[name]
    source = source_of(strategy)
    most = 0
    for _ in range(STEPS):
        source.add_to({n: torch.zeros(shape).double() for n, shape in SHAPES.items()}, KEY)
        most = max(most, len(source.state_dict()["kept"]["weight"]))
    assert most <= strategy.streaming.buffers


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_run_goes_on_from_its_state(name: str) -> None:
    strategy = STRATEGIES[name]
    whole = run(source_of(strategy), SHAPES, STEPS)
    before = source_of(strategy)
    run(before, SHAPES, 6)
    state = before.state_dict()
    run(before, SHAPES, 2)
    after = source_of(strategy)
    after.load_state_dict(state)
    assert after.step == 6
    assert all(map(torch.equal, run(after, SHAPES, STEPS - 6), whole[6:]))


def test_a_new_key_changes_what_is_to_come_and_keeps_the_past() -> None:
    strategy = Bidiagonal.of(0.5, STEPS)
    old, new = source_of(strategy), source_of(strategy)
    run(old, SHAPES, 3)
    run(new, SHAPES, 3)
    fresh = NoiseSource({"all": TensorNoise(shape=(12,), scale=1.0)})
    fresh.load_state_dict({**fresh.state_dict(), "step": 3})
    expected = run(fresh, {"all": (12,)}, 1, bytes(32))[0] - 0.5 * draws(3)[2][:12]
    assert torch.allclose(run(new, SHAPES, 1, bytes(32))[0][:12], expected, atol=1e-6)


def covariance_is(found: Array, expected: Array, entries: int) -> bool:
    """Whether every empirical covariance is within its interval, all but ``FALSE_ALARM``."""
    size = len(expected)
    spread = np.sqrt((np.outer(np.diag(expected), np.diag(expected)) + expected**2) / entries)
    bound = stats.norm.isf(FALSE_ALARM / (size * (size + 1)))
    return bool(np.all(np.abs(found - expected) <= bound * spread))


@pytest.mark.parametrize("name", STRATEGIES)
def test_the_covariance_is_the_certified_one(name: str) -> None:
    """In float32, as a run has it; another strategy's covariance would not pass."""
    entries, strategy = 20_000, STRATEGIES[name]
    source = NoiseSource({"w": TensorNoise(shape=(entries,), scale=3.0)}, strategy=strategy)
    rows = torch.stack(run(source, {"w": (entries,)}, STEPS)).numpy()
    result, matrix = rows @ rows.T / entries, 3 * injected(strategy)
    assert covariance_is(result, matrix @ matrix.T, entries)
    wrong = matrix @ matrix.T + 0.2 * np.eye(STEPS) * np.max(np.diag(matrix @ matrix.T))
    assert not covariance_is(result, wrong, entries)


def refused(change: Callable[[NoiseSource], object], kind: type[Exception], message: str) -> None:
    """A change that is refused and leaves the step as it was."""
    source = source_of(Bidiagonal.of(0.5, STEPS))
    with pytest.raises(kind, match=message):
        change(source)
    assert source.step == 0


def test_what_is_not_this_run_is_refused() -> None:
    other = source_of(Bidiagonal.of(0.4, STEPS)).state_dict()
    refused(lambda s: s.load_state_dict(other), WrongState, "another strategy")
    louder = source_of(Bidiagonal.of(0.5, STEPS), 2.0).state_dict()
    refused(lambda s: s.load_state_dict(louder), WrongState, "another strategy")
    part = {"weight": torch.zeros(3, 4)}
    refused(lambda s: s.add_to(part, KEY), ValueError, "bias: not among the tensors")
    wrong = {"weight": torch.zeros(4, 3), "bias": torch.zeros(5)}
    refused(lambda s: s.add_to(wrong, KEY), ValueError, "weight: not among the tensors")


def test_no_noise_is_made_beyond_the_steps_certified() -> None:
    source = source_of(Bidiagonal.of(0.5, 2))
    run(source, SHAPES, 2)
    with pytest.raises(WrongState, match="certified for 2 steps"):
        run(source, SHAPES, 1)


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_a_scale_that_is_no_noise_is_refused(scale: float) -> None:
    with pytest.raises(ValueError, match="positive"):
        TensorNoise(shape=(1,), scale=scale)


def test_the_noise_of_each_tensor_does_not_depend_on_chunks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    shapes = {"a": (3,), "b": (70, 11), "c": (256,), "d": (1,), "e": (40, 40)}
    tensors = {name: TensorNoise(shape=shape, scale=0.3) for name, shape in shapes.items()}
    start = {name: torch.randn(shape) for name, shape in shapes.items()}
    noise = {
        name: standard_normal(KEY, step=0, tensor=place, shape=shape)
        for place, (name, shape) in enumerate(shapes.items())
    }
    for groups in (1, 2, 5, 100):
        monkeypatch.setattr(normal, "CHUNK_GROUPS", groups)
        sums = {name: item.clone() for name, item in start.items()}
        NoiseSource(tensors).add_to(sums, KEY)
        for name, result in sums.items():
            assert torch.equal(result, start[name].add(noise[name], alpha=0.3))
    transposed = {**start, "e": start["e"].clone().mT}  # whose memory is in another order
    before = transposed["e"].clone()
    NoiseSource(tensors).add_to(transposed, KEY)
    assert torch.allclose(transposed["e"], before + 0.3 * noise["e"], atol=1e-6)


@pytest.mark.parametrize("name", STRATEGIES)
def test_noise_is_taken_as_it_is_drawn_only_where_that_is_certified(name: str) -> None:
    strategy = STRATEGIES[name]
    same = np.array_equal(strategy.noise_matrix(), np.eye(STEPS))
    assert (recurrence_of(strategy) is None) == same
