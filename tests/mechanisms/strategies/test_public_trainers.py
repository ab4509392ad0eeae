"""Three public trainers whose noise is not that of the strategy they account for.

Each is rebuilt here as a matrix from its own formulas, with an optimiser of its own, and
certified for what it injects. The vectors hold a plan of each, what it claims, and what
is true.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.linalg import LinAlgError, cho_solve, cholesky
from scipy.optimize import minimize

from affidavit.assessment import certify
from affidavit.mechanisms.strategies.dense import Dense
from affidavit.mechanisms.strategies.participation import Participation
from affidavit.mechanisms.strategies.toeplitz import identity
from affidavit.plan import plan_from

Array = NDArray[np.float64]
VECTORS = Path(__file__).parents[2] / "vectors" / "strategies"
NAMES = ["cholesky-of-the-gram-matrix", "increments-of-weighted-sums", "identity-counted-once"]


def vector(name: str) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((VECTORS / f"{name}.json").read_text())
    return result


def banded_gram(steps: int, bands: int) -> Array:
    """X with unit diagonal and X_ij = 0 for |i-j| ≥ bands that minimises tr(A X⁻¹ Aᵀ)."""
    prefix = np.tri(steps)
    target = prefix.T @ prefix
    rows, columns = np.triu_indices(steps, 1)
    inside = columns - rows < bands
    rows, columns = rows[inside], columns[inside]

    def loss(entries: Array) -> tuple[float, Array]:
        gram = np.eye(steps)
        gram[rows, columns] = gram[columns, rows] = entries
        try:
            factor = cholesky(gram, lower=True)
        except LinAlgError:
            return 1e12, np.zeros_like(entries)
        half = cho_solve((factor, True), target)
        slope = cho_solve((factor, True), half.T)
        return float(np.trace(half)), -2 * slope[rows, columns]

    start = np.where(columns - rows == 1, 0.3, 0.0)
    result = minimize(
        loss, start, jac=True, method="L-BFGS-B", options={"maxiter": 150, "ftol": 1e-10}
    )
    gram = np.eye(steps)
    gram[rows, columns] = gram[columns, rows] = result.x
    return gram


def by_cholesky(steps: int, separation: int) -> Array:
    """N = chol(X)⁻¹ where X = CᵀC is meant, one band short of the separation."""
    return np.asarray(np.linalg.inv(cholesky(banded_gram(steps, separation - 1), lower=True)))


def single_optimum(gram: Array) -> Array:
    """C of largest column norm 1 for the quadratic form ``gram``: v ← diag((V^½ G V^½)^½)."""
    weights = np.ones(len(gram))
    for _ in range(30):
        root = np.sqrt(weights)
        values, vectors = np.linalg.eigh(root[:, None] * gram * root)
        half = (vectors * np.sqrt(np.maximum(values, 0))) @ vectors.T
        weights = np.diagonal(half).copy()
    result = half / np.outer(root, root)
    return np.asarray(cholesky(result[::-1, ::-1], lower=True).T[::-1, ::-1])


def by_increments(steps: int) -> Array:
    """N = A⁻¹ Λ_τ A C⁻¹ with τ = T: rows of Λ are 1/√T, the last is 1."""
    prefix = np.tri(steps)
    weights = np.full(steps, steps**-0.5)
    weights[-1] = 1.0
    weighted = weights[:, None] * prefix
    strategy = single_optimum(weighted.T @ weighted)
    assert np.linalg.norm(strategy, axis=0).max() == pytest.approx(1, abs=1e-3)
    return np.asarray(np.linalg.inv(prefix) @ weighted @ np.linalg.inv(strategy))


@pytest.mark.ordinary("not 200-*")
@pytest.mark.parametrize(("steps", "separation", "true"), [(40, 10, 2.513), (200, 50, 3.996)])
def test_the_cholesky_factor_of_a_gram_matrix_is_not_its_strategy(
    steps: int, separation: int, true: float
) -> None:
    at = Participation.min_separation(participations=4, separation=separation)
    result = Dense.from_noise(np.tril(by_cholesky(steps, separation))).sensitivity(at)
    assert result.value == pytest.approx(true, rel=1e-3)
    assert result.exact
    assert result.value > 1.2 * 4**0.5


@pytest.mark.parametrize(("steps", "true"), [(64, 9.4), (256, 19.7)])
def test_increments_of_weighted_sums_carry_too_little_noise(steps: int, true: float) -> None:
    noise = np.tril(by_increments(steps))
    result = Dense.from_noise(noise).sensitivity(Participation.single())
    assert result.value == pytest.approx(true, rel=5e-3)
    assert result.exact


def test_independent_noise_is_paid_for_at_every_participation() -> None:
    always = Participation.fixed_epoch(participations=1000, separation=1)
    assert identity(1000).sensitivity(always).value == pytest.approx(1000**0.5)


@pytest.mark.parametrize("name", NAMES)
def test_the_plan_of_each_is_certified_for_what_it_injects(name: str) -> None:
    outcome = vector(name)
    result = certify(plan_from(outcome["plan"])).as_result()
    true, claimed = outcome["true"], outcome["claimed"]
    assert result["sensitivity"] == pytest.approx(true["sensitivity"], rel=1e-3)
    assert result["epsilon"]["lower"] > 1.2 * claimed["epsilon"]
    assert result["epsilon"]["upper"] == pytest.approx(true["epsilon"], rel=1e-3)
    sigma = outcome["plan"]["releases"][0]["noise_multiplier"]
    reported = {**outcome["plan"], "steps": 1, "noise": {"kind": "independent"}}
    reported.pop("participation", None)
    reported["releases"] = [
        {**reported["releases"][0], "noise_multiplier": sigma / claimed["sensitivity"]}
    ]
    reported["sampling"], reported["dataset"] = {"scheme": "full_batch"}, {"size": 1000}
    told = certify(plan_from(reported)).as_result()["epsilon"]["upper"]
    assert told == pytest.approx(claimed["epsilon"], rel=1e-3)


@pytest.mark.parametrize(
    ("name", "noise"), [(NAMES[0], by_cholesky(40, 10)), (NAMES[1], by_increments(64))]
)
def test_the_rows_of_a_vector_are_those_of_the_formula(name: str, noise: Array) -> None:
    rows = np.array(vector(name)["plan"]["noise"]["rows"])
    assert rows == pytest.approx(np.tril(noise), abs=1e-3)
