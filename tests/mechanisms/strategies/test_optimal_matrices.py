"""Dense and banded strategies, and the lower bound that certifies how good they are."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.linalg import sqrtm
from scipy.optimize import minimize

from affidavit.mechanisms.strategies.optimal.dense import (
    _log_error,
    convergence_aware,
    optimal_banded,
    optimal_dense,
)
from affidavit.mechanisms.strategies.optimal.dual import Dual, error_lower_bound
from affidavit.mechanisms.strategies.optimal.loss import UnsupportedObjective
from affidavit.mechanisms.strategies.participation import Participation
from affidavit.mechanisms.strategies.sensitivity import matrix_sensitivity
from affidavit.mechanisms.strategies.strategy import TooLarge
from affidavit.mechanisms.strategies.workload import Workload
from tests.mechanisms.strategies.brute_force import patterns

Array = NDArray[np.float64]

ONCE = Participation.single()
EPOCHS = Participation.fixed_epoch(participations=3, separation=4)
APART = Participation.min_separation(participations=3, separation=4)
RATED = Workload(momentum=0.8, learning_rates=tuple(np.linspace(1.0, 0.1, 12)))


def squared_error(matrix: Array, workload: Array, objective: str = "rms") -> float:
    variance = np.sum((workload @ np.linalg.inv(matrix)) ** 2, axis=1)
    return float(np.mean(variance) if objective == "rms" else np.max(variance))


def entry_sum(matrix: Array, participation: Participation) -> float:
    """sens² by enumeration: the worst pattern's Σ |X_ij|, an upper bound for any signs."""
    gram = np.abs(matrix.T @ matrix)
    return max(float(np.sum(gram[np.ix_(p, p)])) for p in patterns(participation, len(matrix)))


def attained(matrix: Array, participation: Participation) -> float:
    """sens² from below: contributions that no single change of direction improves."""
    gram, generator, best = matrix.T @ matrix, np.random.default_rng(3), 0.0
    for pattern in patterns(participation, len(matrix)):
        block = gram[np.ix_(pattern, pattern)]
        for _ in range(4):
            vectors = generator.standard_normal((len(pattern), len(pattern)))
            for _ in range(60):
                for place in range(len(pattern)):
                    pulled = block[place] @ vectors
                    vectors[place] = pulled / np.linalg.norm(pulled)
            best = max(best, float(np.sum(block * (vectors @ vectors.T))))
    return best


class TestGolden:
    """T = 1000, b = 100, k = 10, prefix sum, μ = 1, and single participation."""

    @pytest.mark.soak
    def test_ten_epochs(self) -> None:
        epochs = Participation.fixed_epoch(participations=10, separation=100)
        strategy, gap = optimal_dense(np.tri(1000), epochs)
        loss = squared_error(strategy, np.tri(1000)) * entry_sum(strategy, epochs)
        assert np.sqrt(loss) <= 10.56
        assert 0 <= gap <= 1e-3

    @pytest.mark.parametrize("steps", [700, pytest.param(1000, marks=pytest.mark.soak)])
    def test_one_epoch(self, steps: int) -> None:
        strategy, gap = optimal_dense(np.tri(steps), ONCE)
        assert 0 <= gap <= 1e-3
        assert entry_sum(strategy, ONCE) == pytest.approx(1)
        # Fichtenberger et al.: the square root of the prefix sum is near optimal.
        places = np.arange(1, steps)
        root = np.concatenate([[1.0], np.cumprod((2 * places - 1) / (2 * places))])
        errors = float(np.sum((1 - np.arange(steps) / steps) * root**2))
        known = errors * float(np.sum(root**2))
        assert 0.9 * known < squared_error(strategy, np.tri(steps)) < known


class TestBound:
    @pytest.mark.parametrize("seed", range(6))
    def test_no_strategy_is_below(self, seed: int) -> None:
        generator = np.random.default_rng(seed)
        workload = RATED.matrix(12) if seed % 2 else np.tri(12)
        factors = generator.standard_normal((4, 3, 3))
        weights = generator.dirichlet(np.ones(12))
        bound = error_lower_bound(workload, factors, weights)
        assert bound > 0
        best, _ = optimal_dense(workload, EPOCHS)
        noisy = np.tril(best * (1 + 0.3 * generator.standard_normal((12, 12))))
        for strategy in (np.eye(12), best, noisy, np.tril(generator.standard_normal((12, 12)))):
            variance = np.sum((workload @ np.linalg.inv(strategy)) ** 2, axis=1)
            assert weights @ variance * attained(strategy, EPOCHS) >= bound

    @pytest.mark.parametrize("seed", range(3))
    def test_single_participation_formula(self, seed: int) -> None:
        """tr((V^½ AᵀA V^½)^½)² / Σ v by an independent matrix root, and never above it."""
        generator = np.random.default_rng(seed)
        costs, workload = generator.uniform(0.1, 2, 30), Workload(momentum=0.5).matrix(30)
        half = np.diag(np.sqrt(costs))
        root = np.trace(sqrtm(half @ workload.T @ workload @ half)).real
        exact = root**2 / np.sum(costs) / 30
        bound = error_lower_bound(workload, np.sqrt(costs)[:, None, None], np.full(30, 1 / 30))
        assert exact * (1 - 1e-9) <= bound <= exact * (1 + 1e-13)

    def test_rows_of_no_weight_and_short_last_epochs(self) -> None:
        weights = np.array([0.0, 0.5, 0.0, 0.25, 0.25])
        bound = error_lower_bound(np.tri(5), np.ones((3, 2, 1)), weights)
        loss = float(weights @ np.arange(1, 6))
        assert 0 < bound <= loss * 2


class TestDense:
    @pytest.mark.parametrize("workload", [np.tri(4), Workload(momentum=0.9).matrix(4)])
    @pytest.mark.parametrize("objective", ["rms", "max"])
    def test_equals_a_search_over_all_matrices(self, workload: Array, objective: str) -> None:
        def strategy_of(entries: Array) -> Array:
            result = np.zeros((4, 4))
            result[np.tril_indices(4)] = entries[:10]
            return result / np.linalg.norm(result, axis=0)

        def variance(entries: Array) -> Array:
            return np.asarray(np.sum((workload @ np.linalg.inv(strategy_of(entries))) ** 2, axis=1))

        def room(entries: Array) -> Array:
            error = variance(entries)
            return entries[10] - (error if objective == "max" else np.mean(error, keepdims=True))

        begin = np.append((np.eye(4) + 0.3 * np.tri(4))[np.tril_indices(4)], 40.0)
        searched = minimize(
            lambda entries: entries[10],
            begin,
            method="SLSQP",
            constraints={"type": "ineq", "fun": room},
            options={"maxiter": 500, "ftol": 1e-12},
        ).fun
        strategy, gap = optimal_dense(workload, ONCE, objective)  # type: ignore[arg-type]
        result = squared_error(strategy, workload, objective) * entry_sum(strategy, ONCE)
        assert result == pytest.approx(searched, rel=1e-3 if objective == "max" else 2e-5)
        assert gap < 1e-3

    @pytest.mark.parametrize("steps", [11, 12])
    @pytest.mark.parametrize("objective", ["rms", "max"])
    @pytest.mark.parametrize("workload", [Workload(), RATED])
    def test_epochs_close_the_gap(self, steps: int, objective: str, workload: Workload) -> None:
        matrix = workload.matrix(steps)
        strategy, gap = optimal_dense(matrix, EPOCHS, objective)  # type: ignore[arg-type]
        # Falling rates leave the last steps alone to be the largest error.
        assert gap < (5e-3 if objective == "max" and workload is RATED else 1e-3)
        assert not np.any(np.triu(strategy, 1))
        assert entry_sum(strategy, EPOCHS) == pytest.approx(1, rel=1e-12)
        assert attained(strategy, EPOCHS) == pytest.approx(1, rel=1e-9)

    @pytest.mark.parametrize("separation", [1, 4])
    def test_any_separation_is_bounded_by_the_same_dual(self, separation: int) -> None:
        apart = Participation.min_separation(participations=3, separation=separation)
        strategy, gap = optimal_dense(np.tri(12), apart)
        loss = squared_error(strategy, np.tri(12)) * entry_sum(strategy, apart)
        ordered, _ = optimal_dense(np.tri(12), EPOCHS)
        least = squared_error(ordered, np.tri(12)) * entry_sum(ordered, EPOCHS)
        assert least * (1 - 1e-4) <= loss <= least * (1 + gap) * (1 + 1e-4)

    @pytest.mark.parametrize("momentum", [0.0, pytest.param(0.9, marks=pytest.mark.soak)])
    @pytest.mark.parametrize("schedule", ["linear", "cosine", "warmup"])
    def test_learning_rates_that_fall_to_nothing(self, schedule: str, momentum: float) -> None:
        place = np.arange(48) / 48
        rates = {
            "linear": 1 - place,
            "cosine": (1 + np.cos(np.pi * place)) / 2,
            "warmup": np.minimum(1, 8 * (place + 1 / 48)) * (1 - place),
        }[schedule]
        matrix = Workload(momentum=momentum, learning_rates=tuple(rates.tolist())).matrix(48)
        epochs = Participation.fixed_epoch(participations=4, separation=12)
        assert optimal_dense(matrix, epochs)[1] < 1e-3
        assert optimal_dense(matrix, epochs, "max")[1] < 0.15

    @pytest.mark.parametrize("scale", [1e-200, 1e200])
    def test_the_unit_of_the_workload_does_not_matter(self, scale: float) -> None:
        strategy, gap = optimal_dense(scale * np.tri(12), EPOCHS)
        assert gap < 1e-4
        np.testing.assert_allclose(strategy, optimal_dense(np.tri(12), EPOCHS)[0], rtol=1e-9)

    def test_rates_over_three_hundred_powers_of_ten(self) -> None:
        rates = tuple(np.geomspace(1, 1e-300, 24).tolist())
        strategy, gap = optimal_dense(Workload(learning_rates=rates).matrix(24), ONCE)
        assert gap < 0.01
        assert entry_sum(strategy, ONCE) == pytest.approx(1)

    @pytest.mark.parametrize(("steps", "most", "separation"), [(9, 3, 4), (12, 2, 4), (11, 9, 3)])
    def test_the_bound_for_separation_is_that_of_its_own_patterns(
        self, steps: int, most: int, separation: int
    ) -> None:
        """Residues closer than b are no patterns; residues farther apart than b are."""
        apart = Participation.min_separation(participations=most, separation=separation)
        strategy, gap = optimal_dense(np.tri(steps), apart)
        loss = (
            squared_error(strategy, np.tri(steps)) * matrix_sensitivity(strategy, apart).value ** 2
        )
        wide = max(separation, -(-steps // most))
        epochs = Participation.fixed_epoch(participations=-(-steps // wide), separation=wide)
        assert set(patterns(epochs, steps)) <= set(patterns(apart, steps))
        ordered, _ = optimal_dense(np.tri(steps), epochs)
        least = squared_error(ordered, np.tri(steps)) * entry_sum(ordered, epochs)
        assert loss / (1 + gap) == pytest.approx(least, rel=1e-4)

    def test_from_the_lower_right(self) -> None:
        """chol(X) itself would have the wrong column norms: the published mistake."""
        strategy, _ = optimal_dense(
            np.tri(20), Participation.fixed_epoch(participations=2, separation=10)
        )
        wrong = np.linalg.cholesky(strategy.T @ strategy)
        epochs = Participation.fixed_epoch(participations=2, separation=10)
        assert entry_sum(wrong, epochs) > 1.2 * entry_sum(strategy, epochs)

    def test_same_input_same_bits(self) -> None:
        first, second = (optimal_dense(np.tri(40), ONCE)[0] for _ in range(2))
        assert first.tobytes() == second.tobytes()

    def test_what_is_not_offered(self) -> None:
        with pytest.raises(TooLarge, match="2049"):
            optimal_dense(np.tri(2049), ONCE)
        with pytest.raises(UnsupportedObjective, match="epoch"):
            optimal_dense(np.tri(13), EPOCHS)


class TestConvergenceAware:
    def test_rows(self) -> None:
        root = 1 / np.sqrt(2)
        np.testing.assert_allclose(
            convergence_aware(5, 2),
            [
                [root, 0, 0, 0, 0],
                [0, 1, 0, 0, 0],
                [0, -root, root, 0, 0],
                [0, -1, 0, 1, 0],
                [0, 0, 0, -root, root],
            ],
        )
        np.testing.assert_array_equal(convergence_aware(3, 1)[1:], np.diff(np.eye(3), axis=0))

    def test_only_the_objective_changes(self) -> None:
        aware = convergence_aware(12, 4) @ np.tri(12)
        strategy, gap = optimal_dense(aware, EPOCHS)
        plain, _ = optimal_dense(np.tri(12), EPOCHS)
        assert gap < 1e-4
        assert entry_sum(strategy, EPOCHS) == pytest.approx(1)
        assert squared_error(strategy, aware) < squared_error(plain, aware)

    def test_tau_is_positive(self) -> None:
        with pytest.raises(ValueError, match="at least 1"):
            convergence_aware(4, 0)


class TestDual:
    @pytest.mark.parametrize(
        ("steps", "patterns", "most", "searched"),
        [(12, 12, 1, False), (12, 4, 3, False), (11, 4, 3, True), (10, 10, 1, True)],
    )
    def test_gradient(self, steps: int, patterns: int, most: int, searched: bool) -> None:
        generator = np.random.default_rng(steps)
        weights = generator.dirichlet(5 * np.ones(steps))
        dual = Dual.of(
            RATED.matrix(steps), weights, patterns=patterns, most=most, searched=searched
        )
        size = patterns + (most > 1) * patterns * most**2 + searched * steps
        point, direction = 0.1 * generator.standard_normal((2, size))
        ahead, behind = (dual._loss(point + move * direction)[0] for move in (1e-5, -1e-5))
        slope = dual._loss(point)[1] @ direction
        assert slope == pytest.approx((ahead - behind) / 2e-5, rel=1e-5, abs=1e-7)


class TestBanded:
    @pytest.mark.parametrize("objective", ["rms", "max"])
    @pytest.mark.parametrize("workload", [Workload(), RATED])
    def test_shape_sensitivity_and_gain(self, objective: str, workload: Workload) -> None:
        matrix = workload.matrix(12)
        strategy = optimal_banded(matrix, 4, objective)  # type: ignore[arg-type]
        assert not np.any(np.triu(strategy, 1))
        assert not np.any(np.tril(strategy, -4))
        np.testing.assert_allclose(np.linalg.norm(strategy, axis=0), 1, rtol=1e-14)
        assert entry_sum(strategy, APART) == pytest.approx(3)
        best = squared_error(strategy, matrix, objective)
        generator = np.random.default_rng(1)
        for _ in range(30):
            moved = strategy * (1 + 0.02 * generator.standard_normal(strategy.shape))
            moved /= np.linalg.norm(moved, axis=0)
            assert squared_error(moved, matrix, objective) >= best * (1 - 5e-3)
        assert best < squared_error(np.eye(12), matrix, objective)

    def test_one_band_is_independent_noise(self) -> None:
        np.testing.assert_array_equal(optimal_banded(np.tri(5), 1), np.eye(5))

    def test_more_bands_are_never_worse(self) -> None:
        losses = [squared_error(optimal_banded(np.tri(40), b), np.tri(40)) for b in (1, 3, 10, 40)]
        assert np.all(np.diff(losses) < 0)
        optimum, _ = optimal_dense(np.tri(40), ONCE)
        assert losses[-1] >= squared_error(optimum, np.tri(40)) * (1 - 1e-5)
        assert losses[-1] <= squared_error(optimum, np.tri(40)) * 1.001

    def test_too_many_steps(self) -> None:
        with pytest.raises(TooLarge, match="2049"):
            optimal_banded(np.tri(2049), 2)


@pytest.mark.parametrize("power", [1, 4])
@pytest.mark.parametrize("bands", [1, 3, 12])
def test_the_loss_of_a_band_is_that_of_the_whole_matrix(bands: int, power: int) -> None:
    """Σ w variance^p by a dense inverse, and its gradient by differences."""
    steps, draws = 12, np.random.default_rng(bands)
    weights = draws.random(steps) + 0.1
    for matrix in (np.tri(steps), np.tril(draws.normal(size=(steps, steps)))):
        columns = np.where(
            np.add.outer(np.arange(steps), np.arange(bands)) < steps,
            draws.uniform(-0.5, 0.5, (steps, bands)),
            0.0,
        )
        columns[:, 0] = 1.0 + draws.random(steps)

        def dense(band: np.ndarray, matrix: np.ndarray = matrix) -> float:
            whole = np.zeros((steps, steps))
            for column in range(steps):
                height = min(bands, steps - column)
                whole[column : column + height, column] = band[column, :height]
            variance = np.sum((matrix @ np.linalg.inv(whole)) ** 2, axis=1)
            return float(np.log(weights @ variance**power) / power)

        value, gradient = _log_error(columns, matrix, weights, power)
        assert value == pytest.approx(dense(columns), rel=1e-12, abs=1e-12)
        for place in np.ndindex(columns.shape):
            if sum(place) < steps:
                moved = np.zeros_like(columns)
                moved[place] = 1e-6
                slope = (dense(columns + moved) - dense(columns - moved)) / 2e-6
                assert gradient[place] == pytest.approx(slope, rel=1e-5, abs=1e-7)
