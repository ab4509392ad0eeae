"""Constructed bidiagonal, Toeplitz, banded-inverse and buffered strategies.

Everything is judged by ``slow_loss``: matrices, an explicit inverse, and the worst pattern
by enumeration, none of which the constructions use.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.linalg import toeplitz

from affidavit.mechanisms.strategies.bidiagonal import Bidiagonal
from affidavit.mechanisms.strategies.blt import Blt
from affidavit.mechanisms.strategies.geometric_sums import cross_sums, geometric_sums
from affidavit.mechanisms.strategies.optimal import toeplitz as module
from affidavit.mechanisms.strategies.optimal.blt import optimal_blt
from affidavit.mechanisms.strategies.optimal.loss import (
    DIVERGED_LOSS,
    ToeplitzLoss,
    UnsupportedObjective,
)
from affidavit.mechanisms.strategies.optimal.toeplitz import (
    best_gamma,
    best_lambda,
    optimal_banded_inverse,
    optimal_toeplitz,
)
from affidavit.mechanisms.strategies.participation import Participation
from affidavit.mechanisms.strategies.registry import Setting, build
from affidavit.mechanisms.strategies.strategy import TooLarge
from affidavit.mechanisms.strategies.toeplitz import (
    Toeplitz,
    banded_inverse_fractional_root,
    banded_root,
)
from affidavit.mechanisms.strategies.workload import Workload
from affidavit.plan.strategies import BufferedLinearToeplitz
from tests.mechanisms.strategies import brute_force

Array = NDArray[np.float64]

ONCE = Participation.single()
EPOCHS = Participation.fixed_epoch(participations=10, separation=100)
APART = Participation.min_separation(participations=10, separation=100)
FALLING = tuple(np.linspace(1.0, 0.1, 40))
WORKLOADS = [Workload(), Workload(momentum=0.8), Workload(momentum=0.8, learning_rates=FALLING)]
FEW = [
    ONCE,
    Participation.fixed_epoch(participations=3, separation=4),
    Participation.min_separation(participations=3, separation=4),
]


@functools.cache
def patterns(participation: Participation, steps: int) -> list[NDArray[np.int_]]:
    """Every pattern, those of one length together in rows."""
    result: dict[int, list[tuple[int, ...]]] = {}
    for pattern in brute_force.patterns(participation, steps):
        result.setdefault(len(pattern), []).append(pattern)
    return [np.array(group) for group in result.values()]


def slow_loss(
    matrix: Array, workload: Workload, participation: Participation, objective: str = "rms"
) -> float:
    """Error times sensitivity of C, all of it by enumeration and dense algebra."""
    steps = len(matrix)
    variance = np.sum((workload.matrix(steps) @ np.linalg.inv(matrix)) ** 2, axis=1)
    gram = np.abs(matrix.T @ matrix)
    squared = max(
        float(np.max(np.sum(gram[group[:, :, None], group[:, None, :]], axis=(1, 2))))
        for group in patterns(participation, steps)
    )
    error = np.mean(variance) if objective == "rms" else np.max(variance)
    return float(np.sqrt(error * squared))


def lower(column: Array, steps: int) -> Array:
    full = np.zeros(steps)
    full[: len(column)] = column
    return np.asarray(toeplitz(full, np.zeros(steps)))


def lambda_column(rate: float, steps: int) -> Array:
    return np.asarray(np.power(rate, np.arange(steps)))


def buffered_column(decays: Array, scales: Array, steps: int) -> Array:
    times = np.arange(steps - 1)[:, None]
    return np.concatenate([[1.0], np.sum(scales * decays**times, axis=1)])


def one_step_better(loss: Callable[[Array], float], point: Array, size: float = 1e-3) -> float:
    """By how much the best of many small moves improves the loss, relatively."""
    generator = np.random.default_rng(7)
    here, best = loss(point), np.inf
    for _ in range(40):
        best = min(best, loss(point * (1 + size * generator.standard_normal(len(point)))))
    return here / best - 1


class TestGolden:
    """T = 1000, b = 100, k = 10, prefix sum, μ = 1."""

    def test_bidiagonal(self) -> None:
        rate = best_lambda(1000, Workload(), APART)
        loss = slow_loss(lower(lambda_column(rate, 1000), 1000), Workload(), EPOCHS)
        assert loss <= 15.26
        own = Bidiagonal.of(rate, 1000)
        assert own.sensitivity(APART).value * own.errors(Workload()).rms == pytest.approx(loss)

    def test_banded_toeplitz(self) -> None:
        column = optimal_toeplitz(1000, Workload(), APART, bands=100)
        loss = slow_loss(lower(column, 1000), Workload(), EPOCHS)
        assert loss <= 11.60
        own = Toeplitz.from_strategy(column, 1000)
        assert own.sensitivity(APART).exact
        assert own.sensitivity(APART).value * own.errors(Workload()).rms == pytest.approx(loss)

    @pytest.mark.soak
    def test_banded_inverse(self) -> None:
        column = optimal_banded_inverse(1000, Workload(), APART, bands=4)
        own = Toeplitz.from_noise(column, 1000)
        proved = own.sensitivity(APART).value * own.errors(Workload()).rms
        assert proved <= 13.45
        matrix = np.linalg.inv(lower(column, 1000))
        in_order = slow_loss(matrix, Workload(), EPOCHS)
        assert 0.98 * proved <= in_order <= proved
        column = optimal_banded_inverse(1000, Workload(), EPOCHS, bands=4)
        assert slow_loss(np.linalg.inv(lower(column, 1000)), Workload(), EPOCHS) <= in_order

    def test_two_buffers(self) -> None:
        decays, scales = optimal_blt(1000, 2, Workload(), APART)
        column = buffered_column(decays, scales, 1000)
        loss = slow_loss(lower(column, 1000), Workload(), EPOCHS)
        assert loss <= 12.25
        own = Blt.of(decays.tolist(), scales.tolist(), steps=1000)
        assert own.sensitivity(APART).exact
        assert own.sensitivity(APART).value * own.errors(Workload()).rms == pytest.approx(loss)


class TestSums:
    @pytest.mark.parametrize("count", [1, 2, 3, 7, 64, 101])
    def test_equal_brute_force(self, count: int) -> None:
        rates = np.array([0.0, 1e-12, 1e-3, 0.7, 40.0])
        powers = np.exp(-rates * np.arange(count)[:, None])
        partial = np.cumsum(powers, axis=0)
        last, total = geometric_sums(rates, count)
        result = cross_sums(rates, count)
        np.testing.assert_allclose(last, partial[-1], rtol=1e-14)
        np.testing.assert_allclose(total, partial.sum(axis=0), rtol=1e-14)
        np.testing.assert_allclose(result.products, partial.T @ partial, rtol=1e-14)
        np.testing.assert_array_equal(result.last, last)
        np.testing.assert_array_equal(result.total, total)


class TestLoss:
    @pytest.mark.parametrize("workload", WORKLOADS)
    @pytest.mark.parametrize("participation", FEW)
    @pytest.mark.parametrize("bands", [3, 40])
    def test_value_and_gradient(
        self, workload: Workload, participation: Participation, bands: int
    ) -> None:
        generator = np.random.default_rng(bands)
        loss = ToeplitzLoss.of(steps=40, workload=workload, participation=participation)
        falling = np.exp(-0.3 * np.arange(bands))
        column = falling * generator.uniform(0.5, 1.5, bands)
        noise = np.concatenate([[1.0], -0.3 * falling[1:] * generator.uniform(0, 1, bands - 1)])
        direction = generator.standard_normal(bands) * falling
        for function, point, inverted in (
            (loss.of_strategy, column, False),
            (loss.of_noise, noise, True),
        ):
            value, gradient = function(point)
            slope = (
                function(point + 1e-6 * direction)[0] - function(point - 1e-6 * direction)[0]
            ) / 2e-6
            assert gradient @ direction == pytest.approx(slope, rel=1e-5, abs=1e-6)
            matrix = lower(point, 40)
            matrix = np.linalg.inv(matrix) if inverted else matrix
            by_hand = slow_loss(matrix, workload, participation)
            if participation.schema != "min_separation":
                assert np.exp(value / 2) == pytest.approx(by_hand)
            assert np.exp(value / 2) >= by_hand * (1 - 1e-12)

    def test_noise_without_an_inverse_is_turned_away(self) -> None:
        loss = ToeplitzLoss.of(steps=2000, workload=Workload(), participation=ONCE)
        value, gradient = loss.of_noise(np.array([1.0, -9.0]))
        assert value == DIVERGED_LOSS
        assert not np.any(gradient)

    def test_learning_rates_have_limits(self) -> None:
        rated = Workload(learning_rates=(1.0,) * 5000)
        with pytest.raises(UnsupportedObjective, match="dense"):
            optimal_blt(10, 1, rated, ONCE, objective="max")
        with pytest.raises(TooLarge, match="5000"):
            optimal_blt(5000, 1, rated, ONCE)


class TestBidiagonal:
    @pytest.mark.parametrize("workload", WORKLOADS)
    @pytest.mark.parametrize("participation", FEW)
    def test_no_lambda_is_better(self, workload: Workload, participation: Participation) -> None:
        def loss(rate: float) -> float:
            return slow_loss(lower(lambda_column(rate, 24), 24), workload, participation)

        best = loss(best_lambda(24, workload, participation))
        assert all(best <= loss(rate) * (1 + 1e-9) for rate in np.linspace(-1, 1, 81))

    def test_one_step_needs_no_memory(self) -> None:
        assert best_lambda(1, Workload(), ONCE) == 0.0


class TestToeplitz:
    @pytest.mark.ordinary("4-*", "30-participation2-*")
    @pytest.mark.parametrize("workload", WORKLOADS)
    @pytest.mark.parametrize("participation", FEW)
    @pytest.mark.parametrize("bands", [2, 4, 30])
    def test_is_a_minimum(
        self, workload: Workload, participation: Participation, bands: int
    ) -> None:
        column = optimal_toeplitz(30, workload, participation, bands=bands)

        def loss(candidate: Array) -> float:
            return ToeplitzLoss.of(
                steps=30, workload=workload, participation=participation
            ).of_strategy(candidate)[0]

        assert column.shape == (min(bands, 30),)
        assert column[0] == 1
        assert one_step_better(loss, column) < 1e-5

    @pytest.mark.ordinary("not participation2")
    @pytest.mark.parametrize("participation", FEW)
    def test_more_bands_are_never_worse(self, participation: Participation) -> None:
        losses = [
            Toeplitz.from_strategy(column, 60).sensitivity(participation).value
            * Toeplitz.from_strategy(column, 60).errors(Workload()).rms
            for bands in (1, 2, 4, 8, 60)
            for column in [optimal_toeplitz(60, Workload(), participation, bands=bands)]
        ]
        assert np.all(np.diff(losses) <= 1e-7 * losses[0])

    def test_wide_columns_stay_exact_for_every_separation(self) -> None:
        apart = Participation.min_separation(participations=4, separation=5)
        column = optimal_toeplitz(40, Workload(), apart)
        assert np.all(np.diff(column) <= 0)
        assert column[-1] >= 0
        assert Toeplitz.from_strategy(column, 40).sensitivity(apart).exact


def test_a_search_that_is_cut_short_is_still_no_worse_than_its_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def optimum() -> tuple[Array, float]:
        column = optimal_toeplitz(300, Workload(), EPOCHS, bands=60)
        return column, loss.of_strategy(column)[0]

    loss = ToeplitzLoss.of(steps=300, workload=Workload(), participation=EPOCHS)
    start = loss.of_strategy(banded_root(60, bands=60).strategy_coefficients)[0]
    whole, least = optimum()
    monkeypatch.setattr(module, "MAX_EVALUATIONS", 1)
    short, less = optimum()
    assert least < less < start
    assert len(short) == len(whole)


class TestBandedInverse:
    @pytest.mark.parametrize("workload", WORKLOADS)
    @pytest.mark.parametrize("participation", FEW)
    def test_two_bands_are_the_best_lambda(
        self, workload: Workload, participation: Participation
    ) -> None:
        column = optimal_banded_inverse(30, workload, participation, bands=2)
        assert -column[1] == pytest.approx(best_lambda(30, workload, participation), abs=1e-4)

    def test_more_bands_help(self) -> None:
        losses = []
        for bands in (1, 2, 4, 8):
            column = optimal_banded_inverse(200, Workload(), ONCE, bands=bands)
            losses.append(slow_loss(np.linalg.inv(lower(column, 200)), Workload(), ONCE))
        assert np.all(np.diff(losses) < 0)


class TestFractionalRoot:
    def test_two_bands_are_the_best_lambda(self) -> None:
        best = best_gamma(30, Workload(), FEW[1], bands=2)
        assert best == pytest.approx(best_lambda(30, Workload(), FEW[1]), abs=1e-4)

    @pytest.mark.parametrize("workload", WORKLOADS)
    def test_no_gamma_is_better(self, workload: Workload) -> None:
        def loss(power: float) -> float:
            root = banded_inverse_fractional_root(
                24, bands=4, gamma=power, momentum=workload.momentum
            )
            return slow_loss(root.strategy_matrix(), workload, FEW[1])

        best = loss(best_gamma(24, workload, FEW[1], bands=4))
        assert all(best <= loss(power) * (1 + 1e-6) for power in np.linspace(0.1, 1, 46))
        assert best < 0.999 * loss(0.5)


class TestBuffered:
    @pytest.mark.parametrize("workload", WORKLOADS)
    @pytest.mark.parametrize("participation", FEW)
    def test_is_valid_and_a_minimum(self, workload: Workload, participation: Participation) -> None:
        decays, scales = optimal_blt(32, 2, workload, participation)
        assert np.all((decays > 0) & (decays < 1))
        assert np.all(scales > 0)
        assert scales.sum() < 1

        def loss(candidate: Array) -> float:
            column = buffered_column(np.exp(-candidate[:2]), candidate[2:], 32)
            return float(np.log(slow_loss(lower(column, 32), workload, participation)))

        point = np.concatenate([-np.log(decays), scales])
        # Momentum pulls N's fastest pole to zero, where this family of strategies ends.
        assert one_step_better(loss, point) < (1e-4 if workload.momentum else 1e-6)

    @pytest.mark.soak
    @pytest.mark.ordinary("0.9-rms")
    @pytest.mark.parametrize("objective", ["rms", "max"])
    @pytest.mark.parametrize("momentum", [0.0, 0.9])
    def test_many_steps(self, objective: str, momentum: float) -> None:
        """At a million steps, within 3 % of all Toeplitz strategies for one participation."""
        workload = Workload(momentum=momentum)
        decays, scales = optimal_blt(
            10**6,
            5,
            workload,
            ONCE,
            objective=objective,  # type: ignore[arg-type]
        )
        own = Blt.of(decays.tolist(), scales.tolist(), steps=10**6)
        errors = own.errors(workload)
        loss = own.sensitivity(ONCE).value * (errors.rms if objective == "rms" else errors.max)
        root = Toeplitz.from_strategy(_root(10**6, momentum), 10**6)
        reference = root.errors(workload)
        least = root.sensitivity(ONCE).value * (
            reference.rms if objective == "rms" else reference.max
        )
        assert loss < 1.03 * least

    @pytest.mark.soak
    def test_same_input_same_bits(self) -> None:
        first, second = (optimal_blt(500, 3, Workload(), APART) for _ in range(2))
        assert first[0].tobytes() == second[0].tobytes()
        assert first[1].tobytes() == second[1].tobytes()

    def test_no_buffers(self) -> None:
        with pytest.raises(ValueError, match="at least one buffer"):
            optimal_blt(10, 0, Workload(), ONCE)


def _root(steps: int, momentum: float) -> Array:
    from affidavit.mechanisms.strategies.toeplitz import square_root

    result = square_root(steps, momentum=momentum).strategy_coefficients
    assert result is not None
    return result


# Sizes, buffers and factors of jax_privacy 2.0.0's buffered_toeplitz_test.py.
@pytest.mark.parametrize(
    ("steps", "buffers", "factor"),
    [
        (10, 1, 1.04),
        (100, 2, 1.03),
        (100, 3, 1.03),
        (1_000, 2, 1.04),
        (1_000, 3, 1.03),
        (10_000, 1, 1.45),
        (10_000, 3, 1.03),
        (10_000, 4, 1.03),
        (100_000, 2, 1.16),
        (100_000, 4, 1.03),
    ],
)
def test_the_largest_error_of_buffers_is_as_near_the_optimum_as_the_peer_tests(
    steps: int, buffers: int, factor: float
) -> None:
    """Against 1 + log(T) / π, near the least largest error of any Toeplitz strategy."""
    noise = BufferedLinearToeplitz(kind="blt", buffers=buffers, objective="max")
    own = build(noise, Setting(steps=steps, participation=ONCE))
    loss = own.sensitivity(ONCE).value * own.errors(Workload()).max
    assert loss <= factor * (1 + np.log(steps) / np.pi)


def test_the_peer_finds_the_same_buffers_for_the_largest_error() -> None:
    """jax_privacy 2.0.0, test_optimize_single_participation_golden."""
    noise = BufferedLinearToeplitz(kind="blt", buffers=2, objective="max")
    own = build(noise, Setting(steps=100_000, participation=ONCE))
    np.testing.assert_allclose(own.coefficients["decays"], [0.9999528892, 0.9857068667], rtol=1e-6)
    np.testing.assert_allclose(own.coefficients["scales"], [0.0122853238, 0.1878393665], rtol=1e-3)
    loss = own.sensitivity(ONCE).value * own.errors(Workload()).max
    assert loss == pytest.approx(5.2967, abs=5e-5)
