"""The strategies that a plan can name; a new one is a file and a line here.

``build`` turns the plan's ``noise`` into a ``Strategy`` of so many steps. What the plan
leaves to be optimised (λ, buffers, bands, a dense matrix) is optimised for the workload and
the participation, deterministically; its sensitivity is then computed like that of any other.
Each kind's module gives its sources.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import toeplitz

from affidavit.mechanisms.strategies import optimised
from affidavit.mechanisms.strategies.bidiagonal import Bidiagonal, NormalizedBidiagonal
from affidavit.mechanisms.strategies.contents import noise_of
from affidavit.mechanisms.strategies.dense import Dense
from affidavit.mechanisms.strategies.identity_matrix import identity
from affidavit.mechanisms.strategies.participation import Participation
from affidavit.mechanisms.strategies.square_root import (
    banded_inverse_root,
    banded_root,
    square_root,
)
from affidavit.mechanisms.strategies.strategy import (
    LARGEST_DENSE,
    LARGEST_VECTOR,
    Strategy,
    TooLarge,
)
from affidavit.mechanisms.strategies.toeplitz import Toeplitz
from affidavit.mechanisms.strategies.tree import Tree
from affidavit.mechanisms.strategies.workload import Workload
from affidavit.plan import Noise

Array = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """What a strategy is built for. ``period`` is the steps of one epoch, if they are known."""

    steps: int
    participation: Participation
    workload: Workload = field(default_factory=Workload)
    period: int | None = None


class WrongSteps(ValueError):
    """A strategy that is given for another number of steps."""


def build(noise: Noise, setting: Setting) -> Strategy:
    """The strategy of ``noise``.

    Raises ``TooLarge`` and ``Unaffordable`` (more steps than this kind can be computed for),
    ``NotOffered`` (an objective that this kind is not optimised for),
    ``WrongSteps``, ``NotRemembered`` (a file that nobody handed over) and ``ValueError``
    (a matrix that is not lower triangular with a diagonal).
    """
    if noise.kind != "bidiagonal" and setting.steps > LARGEST_VECTOR:
        raise TooLarge(f"a strategy of kind {noise.kind} over {setting.steps} steps")
    return BUILDERS[noise.kind](noise, setting)


def _bidiagonal(noise: Any, setting: Setting) -> Strategy:
    if noise.lambda_ is None:
        return optimised.bidiagonal(setting)
    if noise.normalized:
        return NormalizedBidiagonal.of(noise.lambda_, setting.steps)
    return Bidiagonal.of(noise.lambda_, setting.steps)


def _matrix(noise: Any, setting: Setting) -> Strategy:
    given = np.array(noise.rows) if noise.file is None else noise_of(noise.sha256)
    if given.ndim == 1:
        return Toeplitz.from_noise(given, setting.steps, kind="matrix")
    if len(given) != setting.steps:
        raise WrongSteps(f"the matrix has {len(given)} rows and the run {setting.steps} steps")
    if len(given) > LARGEST_DENSE:
        raise TooLarge(f"a matrix of {len(given)} rows")
    dense = Dense.from_noise(given)
    column = given[:, 0]
    if np.array_equal(given, toeplitz(column, np.zeros_like(column))):
        return Toeplitz.from_noise(np.trim_zeros(column, "b"), setting.steps, kind="matrix")
    return dense


Builder = Callable[[Any, Setting], Strategy]

BUILDERS: dict[str, Builder] = {
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
    "banded": optimised.banded,
    "banded_inverse": optimised.banded_inverse,
    "blt": optimised.blt,
    "dense": optimised.dense,
    "tree": lambda noise, at: Tree.of(at.steps, period=at.period if noise.restart else None),
    "matrix": _matrix,
}
