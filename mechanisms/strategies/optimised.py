"""Optimised strategies: what a plan leaves to be found, found for its workload.

The search is deterministic. Whatever it returns, the sensitivity that is certified is that of
the strategy itself, so that a search that ends early costs accuracy of the run and never
privacy. What was found is kept (``store``), so that it is had again, bit by bit. The banded
strategy has its columns normalised to 1, so that a record's participations at least b̂ apart
cost √k.

References: those of the ``optimal_...`` modules, which search.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from affidavit.mechanisms.strategies.bidiagonal import Bidiagonal
from affidavit.mechanisms.strategies.blt import Blt
from affidavit.mechanisms.strategies.coefficients import Arrays
from affidavit.mechanisms.strategies.dense import Dense
from affidavit.mechanisms.strategies.optimal_banded import optimal_banded
from affidavit.mechanisms.strategies.optimal_bidiagonal import best_lambda
from affidavit.mechanisms.strategies.optimal_blt import optimal_blt
from affidavit.mechanisms.strategies.optimal_dense import (
    LARGEST_OPTIMISED,
    convergence_aware,
    optimal_dense,
)
from affidavit.mechanisms.strategies.optimal_toeplitz import (
    optimal_banded_inverse,
    optimal_toeplitz,
)
from affidavit.mechanisms.strategies.participation import Participation
from affidavit.mechanisms.strategies.store import default_store
from affidavit.mechanisms.strategies.strategy import LARGEST_VECTOR, Strategy, TooLarge
from affidavit.mechanisms.strategies.toeplitz import Toeplitz
from affidavit.mechanisms.strategies.workload import Workload
from affidavit.plan import BufferedLinearToeplitz, SquareRoot
from affidavit.plan import Dense as DenseNoise

if TYPE_CHECKING:
    from affidavit.mechanisms.strategies.registry import Setting


MOST_BUFFERS = 16
"""Buffers that are optimised, in some ten seconds; more gain nothing that can be seen."""


class TooManyBuffers(TooLarge):
    """More buffers than are optimised; as many may be given."""


def bidiagonal(at: Setting) -> Strategy:
    """The best λ; O(1) for the prefix sum, so that it is not kept.

    Raises ``TooLarge`` for more than ``LARGEST_VECTOR`` steps of another workload.
    """
    if not at.workload.is_prefix_sum and at.steps > LARGEST_VECTOR:
        raise TooLarge(f"optimising λ for {at.steps} steps of a workload with momentum")
    best = best_lambda(at.steps, at.workload, at.participation)
    return Bidiagonal.of(best, at.steps)


def blt(noise: BufferedLinearToeplitz, at: Setting) -> Strategy:
    """The given buffers, or as many optimised ones as the plan asks for.

    Raises ``TooManyBuffers`` where more than ``MOST_BUFFERS`` are to be optimised.
    """
    if noise.decays is not None and noise.scales is not None:
        return Blt.of(noise.decays, noise.scales, at.steps)
    assert noise.buffers is not None
    buffers = noise.buffers
    if buffers > MOST_BUFFERS:
        raise TooManyBuffers(f"{buffers} buffers; at most {MOST_BUFFERS} are optimised")

    def search() -> Arrays:
        decays, scales = optimal_blt(at.steps, buffers, at.workload, at.participation)
        return {"decays": decays, "scales": scales}

    kept = _kept(at, {"kind": "blt", "buffers": buffers}, search)
    return Blt.of(kept["decays"].tolist(), kept["scales"].tolist(), at.steps)


def banded_inverse(noise: SquareRoot, at: Setting) -> Strategy:
    """N Toeplitz with the best ``bands`` coefficients."""
    assert noise.bands is not None
    bands = noise.bands

    def search() -> Arrays:
        return {"noise": optimal_banded_inverse(*_asked(at), bands=bands)}

    kept = _kept(at, {"kind": "banded_inverse", "bands": bands}, search)
    return Toeplitz.from_noise(kept["noise"], at.steps, kind="banded_inverse")


def banded(noise: SquareRoot, at: Setting) -> Strategy:
    """C with the best ``bands`` diagonals and columns of norm 1; Toeplitz for many steps."""
    assert noise.bands is not None
    bands, many = noise.bands, at.steps > LARGEST_OPTIMISED

    def search() -> Arrays:
        if many:
            return {"strategy": optimal_toeplitz(*_asked(at), bands=bands)}
        return {"strategy": optimal_banded(at.workload.matrix(at.steps), bands)}

    kept = _kept(at, {"kind": "banded", "bands": bands}, search)["strategy"]
    if many:
        return Toeplitz.from_strategy(kept, at.steps, kind="banded")
    return Dense.from_strategy(kept, kind="banded")


def dense(noise: DenseNoise, at: Setting) -> Strategy:
    """The best C of all for the objective, which alone Λ_τ changes.

    Raises ``TooLarge`` for more than ``LARGEST_OPTIMISED`` steps.
    """
    if at.steps > LARGEST_OPTIMISED:
        raise TooLarge(f"optimising a dense strategy over {at.steps} steps")
    tau = None if noise.convergence_aware is None else noise.convergence_aware.tau

    def search() -> Arrays:
        matrix = at.workload.matrix(at.steps)
        if tau is not None:
            matrix = convergence_aware(at.steps, tau) @ matrix
        strategy, gap = optimal_dense(matrix, at.participation, noise.objective)
        return {"strategy": strategy, "gap": np.array(gap)}

    kept = _kept(at, {"kind": "dense", "objective": noise.objective, "tau": tau}, search)
    return Dense.from_strategy(kept["strategy"], kind="dense", gap=float(kept["gap"]))


def _asked(at: Setting) -> tuple[int, Workload, Participation]:
    return at.steps, at.workload, at.participation


def _kept(at: Setting, request: dict[str, Any], search: Callable[[], Arrays]) -> Arrays:
    """The arrays of this request, from the store if they are there."""
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
    return default_store().construct(whole, search).arrays
