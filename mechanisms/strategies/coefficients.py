"""Coefficients: the numbers that a strategy is made of, and one digest for them.

A plan may leave a strategy to be constructed. The same plan then gives the same coefficients
on one machine, and perhaps others, as good, on the next. What was certified is the strategy
with *these* coefficients; a certificate names them by a digest that does not depend on
any file format: sha256 over the arrays' names, shapes and little-endian doubles.

>>> from affidavit.mechanisms.strategies.identity_matrix import identity
>>> {name: array.tolist() for name, array in coefficients_of(identity(2)).items()}
{'noise': [1.0]}
>>> coefficients_digest({"noise": np.eye(1)})[:15]
'sha256:c62b8015'

References: ``affidavit.mechanisms.strategies.store``, which keeps them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from affidavit.mechanisms.strategies.blt import Blt
from affidavit.mechanisms.strategies.dense import Dense
from affidavit.mechanisms.strategies.scheduled import Scheduled
from affidavit.mechanisms.strategies.strategy import Strategy
from affidavit.mechanisms.strategies.toeplitz import Toeplitz
from affidavit.plan import canonical_json

Array = NDArray[np.float64]
Arrays = Mapping[str, Array]


def coefficients_of(strategy: Strategy) -> Arrays:
    """C as ``strategy`` or N as ``noise``, by its first column where it is Toeplitz.

    Shapes (T, T) and (m,). BLT has ``decays`` and ``scales``, shape (d,) each. Empty for
    strategies that their kind and steps determine. A public clip schedule stands in the plan
    and does not count.
    """
    match strategy:
        case Scheduled(unscaled=unscaled):
            return coefficients_of(unscaled)
        case Blt(decays=decays, scales=scales):
            return {"decays": np.array(decays), "scales": np.array(scales)}
        case Toeplitz(column=column, noise_column=noise) | Dense(strategy=column, noise=noise):
            return {
                name: array
                for name, array in (("strategy", column), ("noise", noise))
                if array is not None
            }
        case _:
            return {}


def coefficients_digest(arrays: Arrays) -> str:
    """``sha256:`` and the hexadecimal digest of names, shapes and numbers."""
    found = hashlib.sha256()
    for name in sorted(arrays):
        array = np.asarray(arrays[name], dtype="<f8")
        header = {"name": name, "shape": list(array.shape)}
        found.update(canonical_json(header) + b"\n" + array.tobytes(order="C"))
    return "sha256:" + found.hexdigest()
