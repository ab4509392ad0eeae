"""Test whether the noise added to each sum is the declared Gaussian noise.

Each tensor's noise is tested in one release and summed over all (``mechanisms.noise_law``).
Missing, too small, too large or repeated noise (the difference from the previous or first release
is too small) has a norm of negligible probability.

Arrays are NumPy's, PyTorch's (recognised by ``detach``, not imported, and left on their device) or
convertible to NumPy's. Half precision is measured in float64 with a bound on its rounding.

Guarantees
    * A correct run is stopped with a probability of at most ``noise_law.FALSE_ALARM``, for any
      number of releases and tensors.
    * In float32, a tensor of 16 entries or more without noise is detected in its first release,
      before it leaves the process; a smaller tensor within a few releases.

>>> import numpy as np
>>> noise = measure_noise(np.array([4.0, 8.0]), np.array([1.0, 4.0]))
>>> noise.norm, noise.size, noise.probe
(5.0, 2, (3.0, 4.0))
>>> test, zeros = NoiseTest(), np.zeros(100)
>>> test.check({"weight": (measure_noise(np.random.default_rng(1).normal(size=100), zeros), 1.0)})
>>> test.check({"weight": (measure_noise(zeros, zeros), 1.0)})
Traceback (most recent call last):
affidavit.guard.errors.GuardStop: tensor_not_noised: release 2 has no noise on weight. \
Put every trainable tensor under the private optimiser, or freeze it.
"""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from affidavit.guard.errors import GuardStop
from affidavit.mechanisms import noise_law

PROBE_ENTRIES = 64
"""Entries of a tensor's noise that are stored to detect repetitions."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Noise:
    """Noise added to one sum: its l2 norm, size, first entries, and an error bound.

    ``rounding`` bounds the l2 norm of the rounding errors of the sum's own type.
    """

    norm: float
    size: int
    probe: tuple[float, ...]
    rounding: float


def measure_noise(released: Any, total: Any) -> Noise:
    """Measure ``released`` minus ``total``, two arrays of the same number of entries."""
    if hasattr(released, "detach"):
        x, clean = released.detach().double().reshape(-1), total.detach().double().reshape(-1)
        unit = float(sys.modules["torch"].finfo(released.dtype).eps)
    else:
        after = np.asarray(released)
        x, clean = after.astype(np.float64).ravel(), np.asarray(total).astype(np.float64).ravel()
        exact = not np.issubdtype(after.dtype, np.floating)
        unit = 0.0 if exact else float(np.finfo(after.dtype).eps)
    difference = x - clean
    norm = float((difference @ difference) ** 0.5)
    return Noise(
        norm=norm,
        size=len(difference),
        probe=tuple(difference[:PROBE_ENTRIES].tolist()),
        rounding=unit * (float((x @ x) ** 0.5) + norm),
    )


def shape_of(array: Any) -> list[int]:
    """Return the shape of any array."""
    return [int(side) for side in getattr(array, "shape", np.shape(array))]


def digest_of_arrays(arrays: Mapping[str, Any]) -> str:
    """Return the SHA-256 of the names, shapes and float64 values of arrays, ordered by name."""
    digest = hashlib.sha256()
    for name in sorted(arrays):
        array = arrays[name]
        if hasattr(array, "detach"):
            array = array.detach().cpu().double().numpy()
        values = np.ascontiguousarray(np.asarray(array, dtype="<f8"))
        digest.update(f"{name} {list(values.shape)}\n".encode() + values.tobytes())
    return "sha256:" + digest.hexdigest()


TESTS_PER_TENSOR = 6
"""Tests per tensor and release: two sides, of one and of all releases, and two repetitions."""
MISSING_NOISE_RATIO = 1e-2
"""Fraction of the standard deviation below which noise counts as missing."""
MAX_PROBE_ENTRIES = 4096
"""Entries of all tensors that are compared with other releases."""


class NoiseTest:
    """Tests the noise of every release by tensor, against its declared standard deviation."""

    def __init__(self) -> None:
        self._seen = 0
        self._sums: dict[str, tuple[float, float, int]] = {}
        self._first: tuple[float, ...] = ()
        self._last: tuple[float, ...] = ()
        self._max_error = 0.0

    def check(self, noises: Mapping[str, tuple[Noise, float]]) -> None:
        """Test a release; raises ``GuardStop`` if its noise is not as declared."""
        self._seen += 1
        level = noise_law.level(self._seen, tests=TESTS_PER_TENSOR * max(1, len(noises)))
        probe: list[float] = []
        error = 0.0
        for name, (noise, std) in noises.items():
            self._check_tensor(name, noise, std, level)
            probe += [entry / std for entry in noise.probe]
            error += noise.rounding / std
        self._check_repetition(tuple(probe[:MAX_PROBE_ENTRIES]), error, level)

    def _check_tensor(self, name: str, noise: Noise, std: float, level: float) -> None:
        if not math.isfinite(noise.norm):
            raise GuardStop(
                "non_finite",
                f"release {self._seen} of {name} is not finite, which reveals a record.",
                "Let records whose gradient is not finite contribute zero.",
            )
        norm, error = noise.norm / std, noise.rounding / std
        squares, errors, size = self._sums.get(name, (0.0, 0.0, 0))
        squares, errors, size = squares + norm**2, errors + error**2, size + noise.size
        self._sums[name] = squares, errors, size
        for root, root_error, entries in (
            (norm, error, noise.size),
            (math.sqrt(squares), math.sqrt(errors), size),
        ):
            if entries and min(noise_law.tails(root, root_error, entries)) < level:
                raise self._wrong_noise(name, root / math.sqrt(entries))

    def _wrong_noise(self, name: str, ratio: float) -> GuardStop:
        if ratio < MISSING_NOISE_RATIO:
            return GuardStop(
                "tensor_not_noised",
                f"release {self._seen} has no noise on {name}.",
                "Put every trainable tensor under the private optimiser, or freeze it.",
            )
        return GuardStop(
            "noise_not_as_said",
            f"release {self._seen}: the noise on {name} has {ratio:.3g} times the "
            "declared standard deviation.",
            "Add σ·C of independent Gaussian noise once to the clipped sum, and nothing else.",
        )

    def _check_repetition(self, probe: tuple[float, ...], error: float, level: float) -> None:
        for earlier in (self._first, self._last):
            if len(earlier) != len(probe) or not probe:
                continue
            difference = math.dist(earlier, probe) / math.sqrt(2)
            combined_error = (error + self._max_error) / math.sqrt(2)
            if noise_law.tails(difference, combined_error, len(probe))[0] < level:
                raise GuardStop(
                    "noise_repeated",
                    f"release {self._seen} repeats the noise of an earlier one: their difference "
                    "reveals the data.",
                    "Do not seed the noise generator twice.",
                )
        self._first = self._first or probe
        self._last, self._max_error = probe, max(self._max_error, error)
