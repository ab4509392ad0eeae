"""Test whether the noise added to each sum is the declared Gaussian noise.

For a correct run, the squared norm of a tensor's noise over its variance is chi-square with as
many degrees of freedom as the tensor has entries, in one release and summed over all. Missing, too
small, too large or repeated noise (the difference to the previous or first release is too small)
has a value that a correct run practically never shows.

Arrays may be NumPy's, PyTorch's (recognised by ``detach``, never imported, and left on their
device) or convertible to NumPy's. Half precision is measured in float64 and its rounding bounded.

Guarantees
    * A correct run is stopped with a probability of at most 1e-12 (``FALSE_ALARM``), however
      long it is and however many tensors it has: release t spends 6/(π² t²) of it, in equal
      parts on every test. This models the noise as exactly Gaussian; rounding of the sum's own
      type is bounded and allowed for, and so is a relative ``MODEL_ERROR`` of the generator.
    * In float32 a tensor of 16 entries or more without noise is detected in its first release,
      before it leaves the process; a smaller one within a few releases.

>>> import numpy as np
>>> noise = noise_in(np.array([4.0, 8.0]), np.array([1.0, 4.0]))
>>> noise.norm, noise.size, noise.probe
(5.0, 2, (3.0, 4.0))
>>> test, zeros = NoiseTest(), np.zeros(100)
>>> test.see({"weight": (noise_in(np.random.default_rng(1).normal(size=100), zeros), 1.0)})
>>> test.see({"weight": (noise_in(zeros, zeros), 1.0)})
Traceback (most recent call last):
affidavit.gate.guard.errors.GuardStop: tensor_not_noised: release 2 has no noise on weight. \
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
from scipy.special import gammainc, gammaincc

from affidavit.gate.guard.errors import GuardStop

PROBED = 64
"""Entries of a tensor's noise stored until the next release."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Noise:
    """Noise added to one sum: its l2 norm, size, first entries, and an error bound.

    ``rounding`` bounds the l2 norm of the rounding errors of the sum's own type.
    """

    norm: float
    size: int
    probe: tuple[float, ...]
    rounding: float


def noise_in(released: Any, total: Any) -> Noise:
    """``released`` less ``total``, arrays with the same number of entries."""
    if hasattr(released, "detach"):
        x, before = released.detach().double().reshape(-1), total.detach().double().reshape(-1)
        unit = float(sys.modules["torch"].finfo(released.dtype).eps)
    else:
        after = np.asarray(released)
        x, before = after.astype(np.float64).ravel(), np.asarray(total).astype(np.float64).ravel()
        exact = not np.issubdtype(after.dtype, np.floating)
        unit = 0.0 if exact else float(np.finfo(after.dtype).eps)
    difference = x - before
    norm = float((difference @ difference) ** 0.5)
    return Noise(
        norm=norm,
        size=len(difference),
        probe=tuple(difference[:PROBED].tolist()),
        rounding=unit * (float((x @ x) ** 0.5) + norm),
    )


def shape_of(array: Any) -> list[int]:
    """The shape of any array."""
    return [int(side) for side in getattr(array, "shape", np.shape(array))]


def digest_of_arrays(arrays: Mapping[str, Any]) -> str:
    """sha256 over name, shape and float64 value of every array, in the order of names."""
    digest = hashlib.sha256()
    for name in sorted(arrays):
        array = arrays[name]
        if hasattr(array, "detach"):
            array = array.detach().cpu().double().numpy()
        values = np.ascontiguousarray(np.asarray(array, dtype="<f8"))
        digest.update(f"{name} {list(values.shape)}\n".encode() + values.tobytes())
    return "sha256:" + digest.hexdigest()


FALSE_ALARM = 1e-12
"""Probability that a correct run is ever stopped by the noise test."""
MODEL_ERROR = 1e-3
"""Allowed relative error of the generator's standard deviation."""
TESTS = 6
"""Tests per tensor and release: two sides, of one and of all releases, and two repetitions."""
NOTHING = 1e-2
"""Fraction of the standard deviation below which noise counts as missing."""
PROBES = 4096
"""Entries of all tensors together that are compared with other releases."""


class NoiseTest:
    """Tests the noise of every release by tensor, against its declared standard deviation."""

    def __init__(self) -> None:
        self._seen = 0
        self._sums: dict[str, tuple[float, float, int]] = {}
        self._first: tuple[float, ...] = ()
        self._last: tuple[float, ...] = ()
        self._room = 0.0

    def see(self, noises: Mapping[str, tuple[Noise, float]]) -> None:
        """Test a release; raises ``GuardStop`` if its noise is not as declared."""
        self._seen += 1
        share = 6 / (math.pi * self._seen) ** 2
        level = FALSE_ALARM * share / (TESTS * max(1, len(noises)))
        probe: list[float] = []
        error = 0.0
        for name, (noise, std) in noises.items():
            self._see(name, noise, std, level)
            probe += [entry / std for entry in noise.probe]
            error += noise.rounding / std
        self._repeated(tuple(probe[:PROBES]), error, level)

    def _see(self, name: str, noise: Noise, std: float, level: float) -> None:
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
        for root, room, entries in (
            (norm, error, noise.size),
            (math.sqrt(squares), math.sqrt(errors), size),
        ):
            if entries and _too_small(root, room, entries) < level:
                raise self._wrong(name, root / math.sqrt(entries))
            if entries and _too_large(root, room, entries) < level:
                raise self._wrong(name, root / math.sqrt(entries))

    def _wrong(self, name: str, ratio: float) -> GuardStop:
        if ratio < NOTHING:
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

    def _repeated(self, probe: tuple[float, ...], error: float, level: float) -> None:
        for before in (self._first, self._last):
            if len(before) != len(probe) or not probe:
                continue
            difference = math.dist(before, probe) / math.sqrt(2)
            if _too_small(difference, (error + self._room) / math.sqrt(2), len(probe)) < level:
                raise GuardStop(
                    "noise_repeated",
                    f"release {self._seen} repeats the noise of an earlier one: their difference "
                    "reveals the data.",
                    "Do not seed the noise generator twice.",
                )
        self._first = self._first or probe
        self._last, self._room = probe, max(self._room, error)


def _too_small(root: float, room: float, entries: int) -> float:
    """P(a chi of ``entries`` degrees is at most as small), for the largest norm it may be."""
    return float(gammainc(entries / 2, ((root + room) * (1 + MODEL_ERROR)) ** 2 / 2))


def _too_large(root: float, room: float, entries: int) -> float:
    """P(a chi of ``entries`` degrees is at least as large), for the least norm it may be."""
    return float(gammaincc(entries / 2, (max(0.0, root - room) * (1 - MODEL_ERROR)) ** 2 / 2))
