"""Arrays of whoever brings them: NumPy's, PyTorch's, or anything that becomes one of NumPy's.

Nothing is imported for them. PyTorch's are known by ``detach`` and stay on their device: only
norms and a few entries leave it. Half precision is measured in float64 and its rounding bounded.

>>> import numpy as np
>>> found = noise_in(np.array([4.0, 8.0]), np.array([1.0, 4.0]))
>>> found.norm, found.size, found.probe
(5.0, 2, (3.0, 4.0))
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

PROBED = 64
"""Entries of a tensor's noise that are kept until the next release."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Noise:
    """What was added to one sum: its l2 norm, entries, the first of them, and an error bound.

    ``rounding`` bounds the l2 norm of what the arithmetic of the sum's own type changed.
    """

    norm: float
    size: int
    probe: tuple[float, ...]
    rounding: float


def noise_in(released: Any, total: Any) -> Noise:
    """``released`` less ``total``, arrays with the same number of entries."""
    if hasattr(released, "detach"):
        return _torch_noise(released, total)
    after, before = np.asarray(released), np.asarray(total)
    x = after.astype(np.float64).ravel()
    difference = x - before.astype(np.float64).ravel()
    exact = not np.issubdtype(after.dtype, np.floating)
    unit = 0.0 if exact else float(np.finfo(after.dtype).eps)
    norm = float(np.linalg.norm(difference))
    return Noise(
        norm=norm,
        size=difference.size,
        probe=tuple(difference[:PROBED].tolist()),
        rounding=unit * (float(np.linalg.norm(x)) + norm),
    )


def _torch_noise(released: Any, total: Any) -> Noise:
    x = released.detach().double().reshape(-1)
    difference = x - total.detach().double().reshape(-1)
    unit = float(sys.modules["torch"].finfo(released.dtype).eps)
    norm = float(difference.norm())
    return Noise(
        norm=norm,
        size=difference.numel(),
        probe=tuple(difference[:PROBED].tolist()),
        rounding=unit * (float(x.norm()) + norm),
    )


def shape_of(array: Any) -> list[int]:
    """The shape of any array."""
    return [int(side) for side in getattr(array, "shape", np.shape(array))]


def digest_of_arrays(arrays: Mapping[str, Any]) -> str:
    """sha256 over name, shape and float64 value of every array, in the order of names."""
    found = hashlib.sha256()
    for name in sorted(arrays):
        array = arrays[name]
        if hasattr(array, "detach"):
            array = array.detach().cpu().double().numpy()
        values = np.ascontiguousarray(np.asarray(array, dtype="<f8"))
        found.update(f"{name} {list(values.shape)}\n".encode() + values.tobytes())
    return "sha256:" + found.hexdigest()
