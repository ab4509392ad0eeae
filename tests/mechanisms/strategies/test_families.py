"""Laws of every kind of strategy: what it says of itself agrees with its matrices."""

from __future__ import annotations

import functools
import json
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from pydantic import TypeAdapter

from affidavit.mechanisms.strategies.bidiagonal import Bidiagonal
from affidavit.mechanisms.strategies.blt import Blt
from affidavit.mechanisms.strategies.dense import Dense
from affidavit.mechanisms.strategies.participation import Participation
from affidavit.mechanisms.strategies.registry import BUILDERS, Setting, StepsMismatch, build
from affidavit.mechanisms.strategies.scheduled import Scheduled
from affidavit.mechanisms.strategies.sensitivity import Unaffordable
from affidavit.mechanisms.strategies.strategy import Strategy, TooLarge, column_norms, gram
from affidavit.mechanisms.strategies.toeplitz import (
    Toeplitz,
    banded_inverse_fractional_root,
    banded_inverse_root,
    banded_root,
    identity,
    square_root,
)
from affidavit.mechanisms.strategies.tree import Tree
from affidavit.mechanisms.strategies.workload import Workload
from affidavit.plan import NOISE_KINDS, Noise, noise_forms
from tests.mechanisms.strategies.brute_force import Array, bound, signed

STEPS = 12
EPOCHS = Participation.fixed_epoch(participations=3, separation=4)
VARIANTS: list[dict[str, Any]] = [
    {"kind": "bidiagonal", "lambda": 0.8, "normalized": True},
    {"kind": "bidiagonal", "lambda": -0.5},
    {"kind": "bidiagonal"},
    {"kind": "toeplitz", "coefficients": [2, -1, 0.5, 1]},
    {"kind": "toeplitz_inverse", "coefficients": [0.5, 0.4]},
    {"kind": "bsr", "bands": 40},
    {"kind": "bisr", "bands": 40},
    {"kind": "blt", "decays": [0.9, 0.4], "scales": [0.3, 0.2]},
    {"kind": "blt", "buffers": 2},
    {"kind": "dense", "objective": "max"},
    {"kind": "dense", "convergence_aware": {"tau": 5}},
    {
        "kind": "matrix",
        "rows": np.tril(np.random.default_rng(5).normal(size=(STEPS, STEPS))).tolist(),
    },
    {"kind": "matrix", "rows": (np.eye(STEPS) - 0.5 * np.eye(STEPS, k=-1)).tolist()},
]
"""Beside the examples that every form of noise brings along."""
NOISE = [*(example for form in noise_forms() for example in form.examples), *VARIANTS]
CASES = [
    (noise["kind"], {name: value for name, value in noise.items() if name != "kind"})
    for noise in NOISE
]
every_kind = pytest.mark.parametrize(
    ("kind", "fields"), CASES, ids=[f"{kind}-{number}" for number, (kind, _) in enumerate(CASES)]
)
WORKLOADS = [
    Workload(),
    Workload(momentum=0.9),
    Workload(momentum=0.5, learning_rates=tuple(np.linspace(1, 0.1, STEPS).tolist())),
]


@functools.cache
def _parsed(kind: str, fields: str) -> Noise:
    return TypeAdapter(Noise).validate_python({"kind": kind, **json.loads(fields)})


@functools.cache
def _built(noise: Noise, setting: Setting) -> Strategy:
    return build(noise, setting)


def built(kind: str, fields: dict[str, Any], **changes: Any) -> Strategy:
    setting = Setting(**{"steps": STEPS, "participation": EPOCHS, "period": 4, **changes})
    return _built(_parsed(kind, json.dumps(fields)), setting)


def test_every_kind_that_a_plan_may_name_is_built_and_checked_here() -> None:
    assert set(BUILDERS) == NOISE_KINDS
    assert {noise["kind"] for noise in NOISE} == {
        kind for form in noise_forms() for kind in form.kinds()
    }


@pytest.mark.by_turns
@every_kind
@pytest.mark.parametrize(
    "at",
    [
        Participation.single(),
        EPOCHS,
        Participation.min_separation(participations=3, separation=4),
        Participation.min_separation(participations=3, separation=1),
    ],
    ids=str,
)
def test_the_sensitivity_is_at_least_that_of_the_noise_and_exact_where_it_says(
    kind: str, fields: dict[str, Any], at: Participation
) -> None:
    strategy = built(kind, fields)
    true, result = bound(strategy.strategy_matrix(), at), strategy.sensitivity(at)
    if strategy.is_nonnegative or result.exact:
        assert result.value >= true * (1 - 1e-12)
    if result.exact:
        assert result.value == pytest.approx(true, rel=1e-6)
    assert 0 < result.attained <= signed(strategy.strategy_matrix(), at) * (1 + 1e-12)


@every_kind
def test_the_noise_is_the_inverse_of_the_strategy(kind: str, fields: dict[str, Any]) -> None:
    strategy = built(kind, fields)
    noise, matrix = strategy.noise_matrix(), strategy.strategy_matrix()
    if kind == "tree":
        # C has a row a node; N·C gives back what the steps released.
        assert noise @ matrix == pytest.approx(np.eye(STEPS), abs=1e-12)
        return
    assert matrix @ noise == pytest.approx(np.eye(STEPS), abs=1e-8)
    assert not np.any(np.triu(matrix, 1))
    assert not np.any(np.tril(matrix, -strategy.bands))
    assert strategy.is_nonnegative == bool(np.all(matrix >= 0))


@every_kind
@pytest.mark.parametrize("workload", WORKLOADS, ids=["prefix", "momentum", "rates"])
def test_errors_are_the_row_norms_of_the_workload_times_the_noise(
    kind: str, fields: dict[str, Any], workload: Workload
) -> None:
    strategy = built(kind, fields)
    result = strategy.errors(workload)
    rows = np.linalg.norm(workload.matrix(STEPS) @ strategy.noise_matrix(), axis=1)
    assert result.per_step == pytest.approx(rows, rel=1e-8)
    assert result.max == pytest.approx(rows.max())
    assert result.rms == pytest.approx(float(np.sqrt(np.mean(rows**2))))
    injected = np.sum(strategy.noise_matrix() ** 2, axis=1)
    assert strategy.variances(lambda noise: noise) == pytest.approx(injected, rel=1e-9)


@every_kind
def test_a_strategy_says_how_its_noise_is_streamed(kind: str, fields: dict[str, Any]) -> None:
    strategy = built(kind, fields)
    streaming, z = strategy.streaming, np.random.default_rng(6).normal(size=STEPS)
    assert streaming.buffers <= STEPS - 1
    if streaming.form in ("rows", "tree") or streaming.scaled:
        return
    assert strategy.noise_matrix() @ z == pytest.approx(STREAMS[streaming.form](streaming, z))


def _moving_average(streaming: Any, z: Array) -> Array:
    return np.convolve(streaming.coefficients, z)[: len(z)]


def _autoregressive(streaming: Any, z: Array) -> Array:
    result = np.zeros_like(z)
    for step in range(len(z)):
        past = sum(
            a * result[step - place]
            for place, a in enumerate(streaming.coefficients)
            if 0 < place <= step
        )
        result[step] = (z[step] - past) / streaming.coefficients[0]
    return result


def _buffered(streaming: Any, z: Array) -> Array:
    decays, scales = np.split(np.array(streaming.coefficients), 2)
    state, result = np.zeros_like(decays), np.zeros_like(z)
    for step in range(len(z)):
        result[step] = z[step] - scales @ state
        state = decays * state + result[step]
    return result


STREAMS: dict[str, Callable[[Any, Array], Array]] = {
    "moving_average": _moving_average,
    "autoregressive": _autoregressive,
    "buffered": _buffered,
}


@every_kind
def test_the_means_of_bins_have_the_products_of_the_columns_they_sum(
    kind: str, fields: dict[str, Any]
) -> None:
    strategy = built(kind, fields)
    if not strategy.is_nonnegative:
        with pytest.raises(ValueError, match="negative"):
            gram(strategy, 4)
        return
    matrix = strategy.strategy_matrix()
    means = np.stack([matrix[:, place::4].sum(axis=1) for place in range(4)], axis=1)
    result = gram(strategy, 4)
    assert result == pytest.approx(means.T @ means, rel=1e-5)
    assert np.all(result >= means.T @ means * (1 - 1e-15))
    assert np.array_equal(result, result.T)


def test_the_workload_of_momentum_is_its_sum() -> None:
    rates, momentum = (0.5, 2.0, 1.0, 3.0), 0.3
    result = Workload(momentum=momentum, learning_rates=rates).matrix(4)
    for step in range(4):
        for place in range(4):
            entry = sum(rates[s] * momentum ** (s - place) for s in range(place, step + 1))
            assert result[step, place] == pytest.approx(entry)
    plain = Workload(momentum=momentum)
    assert plain.coefficients(4) == pytest.approx(plain.matrix(4)[:, 0])
    assert plain.gram(4) == pytest.approx(plain.matrix(4).T @ plain.matrix(4))
    with pytest.raises(ValueError, match="learning rates"):
        Workload(learning_rates=(1.0,)).matrix(2)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_square_root_squares_to_the_workload(momentum: float) -> None:
    workload = Workload(momentum=momentum)
    root = square_root(STEPS, momentum=momentum).strategy_matrix()
    assert root @ root == pytest.approx(workload.matrix(STEPS))
    assert np.all(np.diff(root[:, 0]) < 0)
    inverse = banded_inverse_root(STEPS, bands=STEPS, momentum=momentum).noise_matrix()
    assert inverse @ root == pytest.approx(np.eye(STEPS))
    banded = banded_root(STEPS, bands=3, momentum=momentum)
    assert banded.strategy_coefficients[:3] == pytest.approx(root[:3, 0])
    assert banded.bands == 3


@pytest.mark.parametrize("bands", [2, 3, 7])
@pytest.mark.parametrize("gamma", [0.2, 0.5, 0.8, 1.0])
def test_fractional_roots_lie_between_known_families_and_their_sensitivity_is_exact(
    gamma: float, bands: int
) -> None:
    root = banded_inverse_fractional_root(STEPS, bands=bands, gamma=gamma)
    if gamma == 0.5:
        square = banded_inverse_root(STEPS, bands=bands)
        assert np.array_equal(root.noise_coefficients, square.noise_coefficients)
    if bands == 2:
        one = Bidiagonal.of(gamma, STEPS)
        assert root.noise_matrix() == pytest.approx(one.noise_matrix())
        assert root.sensitivity(EPOCHS).value == pytest.approx(one.sensitivity(EPOCHS).value)
    for separation in (1, 3):
        at = Participation.min_separation(participations=4, separation=separation)
        assert root.sensitivity(at).exact
        assert root.sensitivity(at).value == pytest.approx(bound(root.strategy_matrix(), at))


@pytest.mark.parametrize("steps", [1, 2, 3, 8, 100, 1023, 1024, 10**6])
def test_one_participation_in_a_tree_is_in_every_level(steps: int) -> None:
    once = Participation.single()
    assert Tree.of(steps).sensitivity(once).value ** 2 == pytest.approx(int(np.log2(steps)) + 1)
    restarted = Tree.of(steps, period=8).sensitivity(once).value
    assert restarted**2 == pytest.approx(int(np.log2(min(steps, 8))) + 1)


@pytest.mark.parametrize("period", [None, 3, 4])
@pytest.mark.parametrize("steps", [1, 5, 9, 12])
@pytest.mark.parametrize("k", [2, 3])
@pytest.mark.parametrize("b", [1, 2, 5])
def test_more_participations_in_a_tree_are_bounded_by_its_nodes(
    steps: int, period: int | None, k: int, b: int
) -> None:
    tree = Tree.of(steps, period=period)
    for at in (
        Participation.fixed_epoch(participations=k, separation=b),
        Participation.min_separation(participations=k, separation=b),
    ):
        result, true = tree.sensitivity(at), bound(tree.strategy_matrix(), at)
        assert result.value == pytest.approx(true, rel=1e-12)
        attained = bound(tree.visible_matrix(), at)
        assert result.attained <= attained * (1 + 1e-15)
        if at.schema == "fixed_epoch":
            assert result.attained == pytest.approx(attained, rel=1e-12)


@pytest.mark.parametrize("period", [None, 1, 3, 4, 7])
@pytest.mark.parametrize("steps", [1, 2, 7, 12, 21])
def test_what_is_seen_of_a_tree_is_the_inverse_of_its_noise(steps: int, period: int | None) -> None:
    """Right children are in no prefix sum: of two steps √5 is attained, not √6."""
    tree = Tree.of(steps, period=period)
    noise = tree.noise_matrix()
    noise = noise[:, np.any(noise != 0, axis=0)]
    assert noise @ tree.visible_matrix() == pytest.approx(np.eye(steps))
    scheduled = Scheduled.of(tree, np.linspace(0.5, 1.5, steps).tolist())
    every = Participation.fixed_epoch(participations=steps, separation=1)
    for strategy in (tree, scheduled):
        reached = np.linalg.norm(strategy.visible_matrix().sum(axis=1))
        assert strategy.sensitivity(every).attained <= reached * (1 + 1e-12)
        norms = np.linalg.norm(strategy.visible_matrix(), axis=0)
        assert np.all(column_norms(strategy) <= norms)


@pytest.mark.ordinary("not 100000-*")
@pytest.mark.parametrize(
    ("steps", "k", "b", "squared"), [(24, 8, 3, 88), (2000, 6, 400, 60), (100_000, 10, 5000, 340)]
)
def test_the_worst_pattern_of_a_tree_is_neither_missed_nor_invented(
    steps: int, k: int, b: int, squared: int
) -> None:
    """88 is TensorFlow Privacy's own value; a random search never passes any of them."""
    at = Participation.min_separation(participations=k, separation=b)
    result = Tree.of(steps).sensitivity(at)
    assert result.value**2 == pytest.approx(squared)
    rng, k = np.random.default_rng(steps), at.max_participations(steps)
    for _ in range(300):
        spare = steps - 1 - (k - 1) * b
        pattern = np.sort(rng.integers(0, spare + 1, size=k)) + b * np.arange(k)
        levels = [np.unique(pattern >> level, return_counts=True) for level in range(17)]
        total = sum(
            int(np.sum(counts[(nodes + 1) << level <= steps] ** 2))
            for level, (nodes, counts) in enumerate(levels)
        )
        assert total <= squared


def test_a_tree_of_too_many_participations_is_refused_before_memory_is_taken() -> None:
    tracemalloc.start()
    try:
        with pytest.raises(Unaffordable):
            Tree.of(1_000_000).sensitivity(
                Participation.fixed_epoch(participations=100, separation=10_000)
            )
        assert tracemalloc.get_traced_memory()[1] < 10_000_000
    finally:
        tracemalloc.stop()


def test_a_tree_that_restarts_every_epoch_costs_each_epoch_once() -> None:
    at = Participation.min_separation(participations=5, separation=100)
    result = Tree.of(500, period=100).sensitivity(at)
    assert result.value**2 == pytest.approx(5 * 7)
    assert result.exact


def test_a_tree_sums_as_many_nodes_as_the_step_has_bits() -> None:
    result = Tree.of(1000).errors(Workload()).per_step ** 2
    assert result == pytest.approx([step.bit_count() for step in range(1, 1001)])


def test_a_buffer_that_forgets_at_once_is_a_buffer_of_one_coefficient() -> None:
    once = Participation.single()
    assert Blt.of([1e-20], [0.5], 1).sensitivity(once).value == pytest.approx(1)
    assert Blt.of([1e-20], [0.5], 9).sensitivity(once).value == pytest.approx(1.25**0.5)


def test_one_participation_in_a_buffered_strategy_is_closed_for_any_number_of_steps() -> None:
    decays, scales = [0.999, 0.5], [0.2, 0.3]
    once = Participation.single()
    short = Blt.of(decays, scales, 2000)
    column = short.strategy_coefficients
    assert short.sensitivity(once).value == pytest.approx(float(np.linalg.norm(column)))
    long = Blt.of(decays, scales, 10**12).sensitivity(once)
    assert long.value > short.sensitivity(once).value
    for bad in (([1.0], [0.1]), ([0.5], [0.0]), ([0.5], []), ([], [])):
        with pytest.raises(ValueError, match=r"decays|scales"):
            Blt.of(*bad, steps=3)


@pytest.mark.parametrize("schema", ["fixed_epoch", "min_separation"])
def test_many_participations_in_a_buffered_strategy_are_closed_for_any_number_of_steps(
    schema: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(len(schema))
    for _ in range(60):
        buffers, steps = int(rng.integers(1, 5)), int(rng.integers(2, 300))
        decays = (1 - 10 ** rng.uniform(-6, -0.01, buffers)).tolist()
        scales = (rng.dirichlet(np.ones(buffers + 1))[:buffers] * 0.999).tolist()
        apart = int(rng.integers(1, 60))
        most = int(rng.integers(2, 12)) if schema == "min_separation" else -(-steps // apart)
        at = getattr(Participation, schema)(participations=most, separation=apart)
        strategy = Blt.of(decays, scales, steps)
        direct = strategy.sensitivity(at)
        monkeypatch.setattr("affidavit.mechanisms.strategies.blt.MAX_VECTOR", 1)
        closed = strategy.sensitivity(at)
        monkeypatch.undo()
        assert closed.value == pytest.approx(direct.value, rel=1e-10)
        assert closed.attained <= direct.value
        assert direct.attained <= closed.value
    far = getattr(Participation, schema)(participations=10, separation=10**7)
    assert Blt.of([0.999, 0.9], [0.01, 0.1], 10**8).sensitivity(far).exact


def test_scales_of_a_long_run_that_add_up_to_more_than_one_are_refused() -> None:
    at = Participation.min_separation(participations=3, separation=2)
    with pytest.raises(Unaffordable):
        Blt.of([0.9, 0.8], [1.5, 0.5], 10**8).sensitivity(at)


def test_scales_that_add_up_to_more_than_one_are_bounded_not_evaluated() -> None:
    at = Participation.min_separation(participations=3, separation=2)
    strategy = Blt.of([0.9, 0.8], [1.5, 0.5], STEPS)
    result = strategy.sensitivity(at)
    assert not result.exact
    assert result.value >= bound(strategy.strategy_matrix(), at)


def test_what_is_too_large_is_not_tried() -> None:
    with pytest.raises(TooLarge):
        built("sqrt", {}, steps=10**7)
    with pytest.raises(TooLarge):
        built("dense", {}, steps=10**5)
    with pytest.raises(TooLarge):
        identity(10**5).noise_matrix()
    rates = Workload(learning_rates=(1.0,) * 30_000)
    with pytest.raises(TooLarge):
        Toeplitz.from_strategy([1.0, 0.5], 30_000).errors(rates)
    with pytest.raises(TooLarge):
        gram(square_root(10**6), 1000)


def test_a_matrix_is_for_its_own_number_of_steps() -> None:
    with pytest.raises(StepsMismatch):
        built("matrix", {"rows": [[1.0]]})


def test_a_matrix_with_equal_diagonals_has_the_exact_value_of_its_coefficients() -> None:
    at = Participation.min_separation(participations=3, separation=2)
    strategy = built("matrix", {"rows": VARIANTS[-1]["rows"]})
    assert strategy.sensitivity(at).exact
    assert strategy.sensitivity(at).value == pytest.approx(
        built("bidiagonal", {"lambda": 0.5}).sensitivity(at).value
    )


def test_the_inverse_of_a_band_is_never_taken_for_a_band() -> None:
    """λ^t vanishes in doubles long before the last step, and not in truth."""
    assert Toeplitz.from_noise([1.0, -0.5], 3000).bands == 3000
    assert Toeplitz.from_noise([2.0], 3000).bands == 1
    noise = np.eye(20) - 1e-40 * np.eye(20, k=-1)
    assert Dense.from_noise(noise).bands == 20
    assert Dense.from_noise(2 * np.eye(20)).bands == 1
    assert Dense.from_strategy(np.eye(20) + np.eye(20, k=-1)).bands == 2
