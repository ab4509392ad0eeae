"""From the ``noise`` of a plan to its strategy.

The kinds of this package are built by ``BUILDERS``. Any other kind is a ``StrategyForm``, which has
the fields of the plan, builds itself, and says whether it depends on the number of steps. One file
and one entry point of the group ``affidavit.strategies`` add it to plans, their JSON Schema, the
certified sensitivity and the noise of the trainer.

What a plan leaves to be optimised (λ, γ, buffers, bands, a dense matrix) is optimised for the
workload and the participation, deterministically, and stored (``store``) so that it can be loaded
again bit for bit. The certified sensitivity is always that of the resulting strategy, so a search
that ends early costs accuracy and never privacy. The banded strategy has its columns normalised
to 1, so participations at least b̂ apart cost √k.

References: those of each kind's module and of ``affidavit.mechanisms.strategies.optimal``.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from scipy.linalg import toeplitz

from affidavit.mechanisms.noise_files import registered_noise
from affidavit.mechanisms.strategies.bidiagonal import Bidiagonal, NormalizedBidiagonal
from affidavit.mechanisms.strategies.blt import Blt
from affidavit.mechanisms.strategies.dense import Dense
from affidavit.mechanisms.strategies.optimal.blt import optimal_blt
from affidavit.mechanisms.strategies.optimal.dense import (
    MAX_OPTIMISED,
    convergence_aware,
    optimal_banded,
    optimal_dense,
)
from affidavit.mechanisms.strategies.optimal.toeplitz import (
    best_gamma,
    best_lambda,
    optimal_banded_inverse,
    optimal_toeplitz,
)
from affidavit.mechanisms.strategies.participation import Participation
from affidavit.mechanisms.strategies.store import Arrays, default_store
from affidavit.mechanisms.strategies.strategy import (
    MAX_VECTOR,
    Strategy,
    TooLarge,
)
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
from affidavit.plan import MAX_MATRIX_STEPS, Noise, NoiseForm

MAX_BUFFERS = 16
"""Buffers that are optimised, in about ten seconds; more have no visible benefit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """The run that a strategy is built for; ``period`` is the steps of one epoch, if known."""

    steps: int
    participation: Participation
    workload: Workload = field(default_factory=Workload)
    period: int | None = None


class StrategyForm(NoiseForm):
    """A form of ``noise`` that builds its own strategy."""

    @abstractmethod
    def build(self, setting: Setting) -> Strategy:
        """Return the strategy of these fields for ``setting``, with the ``kind`` of the plan."""


class StepsMismatch(ValueError):
    """The given strategy has another number of steps."""


class TooManyBuffers(TooLarge):
    """The plan asks for more buffers than are optimised; they may still be given."""


def build(noise: Noise, setting: Setting) -> Strategy:
    """Return the strategy of ``noise``.

    Raises ``TooLarge`` and ``Unaffordable`` (too many steps for this kind),
    ``UnsupportedObjective``, ``StepsMismatch``, ``UnregisteredNoise`` (a file that is not loaded)
    and ``ValueError`` (a matrix that is not lower triangular with a nonzero diagonal).
    """
    if not noise.any_length and setting.steps > MAX_VECTOR:
        raise TooLarge(f"a strategy of kind {noise.kind} over {setting.steps} steps")
    if isinstance(noise, StrategyForm):
        return noise.build(setting)
    return BUILDERS[noise.kind](noise, setting)


def _bidiagonal(noise: Any, at: Setting) -> Strategy:
    if noise.lambda_ is not None:
        family = NormalizedBidiagonal if noise.normalized else Bidiagonal
        return family.of(noise.lambda_, at.steps)
    if not at.workload.is_prefix_sum and at.steps > MAX_VECTOR:
        raise TooLarge(f"optimising λ for {at.steps} steps of a workload with momentum")
    # This is O(1) for the prefix sum and not stored.
    return Bidiagonal.of(best_lambda(at.steps, at.workload, at.participation), at.steps)


def _blt(noise: Any, at: Setting) -> Strategy:
    """Return BLT with the given buffers, or with as many optimised ones."""
    if noise.decays is not None and noise.scales is not None:
        return Blt.of(noise.decays, noise.scales, at.steps)
    if noise.buffers > MAX_BUFFERS:
        raise TooManyBuffers(f"{noise.buffers} buffers; at most {MAX_BUFFERS} are optimised")

    def search() -> Arrays:
        decays, scales = optimal_blt(
            at.steps,
            noise.buffers,
            at.workload,
            at.participation,
            objective=noise.objective or "rms",
        )
        return {"decays": decays, "scales": scales}

    request = {"kind": "blt", "buffers": noise.buffers}
    if noise.objective == "max":
        request["objective"] = "max"
    arrays = _stored(at, request, search)
    return Blt.of(arrays["decays"].tolist(), arrays["scales"].tolist(), at.steps)


def _banded_inverse(noise: Any, at: Setting) -> Strategy:
    """Return a Toeplitz N with the best ``bands`` coefficients."""

    def search() -> Arrays:
        return {
            "noise": optimal_banded_inverse(
                at.steps, at.workload, at.participation, bands=noise.bands
            )
        }

    arrays = _stored(at, {"kind": "banded_inverse", "bands": noise.bands}, search)
    return Toeplitz.from_noise(arrays["noise"], at.steps, kind="banded_inverse")


def _fractional_root(noise: Any, at: Setting) -> Strategy:
    """Return the banded inverse of the workload's γ-th root, with the γ of the plan or the best."""
    power = noise.gamma
    if power is None:

        def search() -> Arrays:
            best = best_gamma(at.steps, at.workload, at.participation, bands=noise.bands)
            return {"gamma": np.array(best)}

        power = float(_stored(at, {"kind": "bifr", "bands": noise.bands}, search)["gamma"])
    return banded_inverse_fractional_root(
        at.steps, bands=noise.bands, gamma=power, momentum=at.workload.momentum
    )


def _banded(noise: Any, at: Setting) -> Strategy:
    """Return C with the best ``bands`` diagonals, columns of norm 1; Toeplitz for many steps."""
    many = at.steps > MAX_OPTIMISED

    def search() -> Arrays:
        if many:
            column = optimal_toeplitz(at.steps, at.workload, at.participation, bands=noise.bands)
            return {"strategy": column}
        return {"strategy": optimal_banded(at.workload.matrix(at.steps), noise.bands)}

    strategy = _stored(at, {"kind": "banded", "bands": noise.bands}, search)["strategy"]
    if many:
        return Toeplitz.from_strategy(strategy, at.steps, kind="banded")
    return Dense.from_strategy(strategy, kind="banded")


def _dense(noise: Any, at: Setting) -> Strategy:
    """Return the best C for the objective; Λ_τ changes only the objective."""
    if at.steps > MAX_OPTIMISED:
        raise TooLarge(f"optimising a dense strategy over {at.steps} steps")
    tau = None if noise.convergence_aware is None else noise.convergence_aware.tau

    def search() -> Arrays:
        matrix = at.workload.matrix(at.steps)
        if tau is not None:
            matrix = convergence_aware(at.steps, tau) @ matrix
        strategy, gap = optimal_dense(matrix, at.participation, noise.objective)
        return {"strategy": strategy, "gap": np.array(gap)}

    arrays = _stored(at, {"kind": "dense", "objective": noise.objective, "tau": tau}, search)
    return Dense.from_strategy(arrays["strategy"], kind="dense", gap=float(arrays["gap"]))


def _matrix(noise: Any, at: Setting) -> Strategy:
    matrix = np.array(noise.rows) if noise.file is None else registered_noise(noise.sha256)
    if matrix.ndim == 1:
        return Toeplitz.from_noise(matrix, at.steps, kind="matrix")
    if len(matrix) != at.steps:
        raise StepsMismatch(f"the matrix has {len(matrix)} rows and the run {at.steps} steps")
    if len(matrix) > MAX_MATRIX_STEPS:
        raise TooLarge(f"a matrix of {len(matrix)} rows")
    dense = Dense.from_noise(matrix)
    column = matrix[:, 0]
    if np.array_equal(matrix, toeplitz(column, np.zeros_like(column))):
        return Toeplitz.from_noise(np.trim_zeros(column, "b"), at.steps, kind="matrix")
    return dense


BUILDERS: dict[str, Callable[[Any, Setting], Strategy]] = {
    "independent": lambda _, at: identity(at.steps),
    "bidiagonal": _bidiagonal,
    "toeplitz": lambda noise, at: Toeplitz.from_strategy(noise.coefficients, at.steps),
    "toeplitz_inverse": lambda noise, at: Toeplitz.from_noise(noise.coefficients, at.steps),
    "sqrt": lambda _, at: square_root(at.steps, momentum=at.workload.momentum),
    "bsr": lambda noise, at: banded_root(
        at.steps, bands=noise.bands, momentum=at.workload.momentum
    ),
    "bisr": lambda noise, at: banded_inverse_root(
        at.steps, bands=noise.bands, momentum=at.workload.momentum
    ),
    "bifr": _fractional_root,
    "banded": _banded,
    "banded_inverse": _banded_inverse,
    "blt": _blt,
    "dense": _dense,
    "tree": lambda noise, at: Tree.of(at.steps, period=at.period if noise.restart else None),
    "matrix": _matrix,
}
"""The builder of each kind that this package defines."""


def _stored(at: Setting, request: dict[str, Any], search: Callable[[], Arrays]) -> Arrays:
    """Return the arrays of this request, from the store if possible."""
    turns, workload = at.participation, at.workload
    whole = {
        **request,
        "steps": at.steps,
        "participation": [turns.schema, turns.participations, turns.separation],
        "momentum": workload.momentum,
        "learning_rates": None
        if workload.learning_rates is None
        else list(workload.learning_rates[: at.steps]),
    }
    return default_store().get_or_compute(whole, search)
