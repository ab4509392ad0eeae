"""Watching noise: whether what was added to each sum is the Gaussian noise that it is said to be.

For a right run the squared norm of a tensor's noise over its variance is chi-square with as
many degrees of freedom as the tensor has entries, in one release and summed over all of them.
A tensor whose noise is missing, too small or too large, or was used in the release before or in
the first one (the difference of two releases' noise is then too small), has a value that a
right run practically never shows.

Guarantees
    * A right run is stopped with a probability of at most 1e-12 (``FALSE_ALARM``), however
      long it is and however many tensors it has: release t spends 6/(π² t²) of it, in equal
      parts on every test. That models the noise as exactly Gaussian; rounding of the sum's own
      type is bounded and allowed for, and a relative ``MODEL_ERROR`` of the generator's.
    * In float32 a tensor of 16 entries or more without noise is found in its first release,
      before it leaves the process; a smaller one within a few.

>>> import numpy as np
>>> watch, zeros = NoiseWatch(), np.zeros(100)
>>> watch.see({"weight": (noise_in(np.random.default_rng(1).normal(size=100), zeros), 1.0)})
>>> watch.see({"weight": (noise_in(zeros, zeros), 1.0)})
Traceback (most recent call last):
affidavit.gate.guard.stopping.GuardStop: tensor_not_noised: release 2 has no noise on weight. \
Put every trainable tensor under the private optimiser, or freeze it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from scipy.special import gammainc, gammaincc

from affidavit.gate.guard.arrays import Noise, noise_in
from affidavit.gate.guard.stopping import GuardStop

__all__ = ["FALSE_ALARM", "NoiseWatch", "noise_in"]

FALSE_ALARM = 1e-12
"""Probability that a right run is ever stopped by what is seen of its noise."""
MODEL_ERROR = 1e-3
"""Relative room for a generator's normal numbers to have another standard deviation."""
TESTS = 6
"""Of each tensor in each release: two sides, of one release and of all, and two repetitions."""
NOTHING = 1e-2
"""Of its standard deviation: noise below is called none, and not merely too little."""
PROBES = 4096
"""Entries, of all tensors together, that are compared with other releases."""


class NoiseWatch:
    """Every release's noise by tensor, each with the standard deviation it should have."""

    def __init__(self) -> None:
        self._seen = 0
        self._sums: dict[str, tuple[float, float, int]] = {}
        self._first: tuple[float, ...] = ()
        self._last: tuple[float, ...] = ()
        self._room = 0.0

    def see(self, noises: Mapping[str, tuple[Noise, float]]) -> None:
        """One more release; raises ``GuardStop`` if its noise is not as it should be."""
        self._seen += 1
        share = 6 / (math.pi * self._seen) ** 2
        level = FALSE_ALARM * share / (TESTS * max(1, len(noises)))
        probe: list[float] = []
        error = 0.0
        for name, (noise, std) in noises.items():
            self._see(name, noise, std, level)
            probe += [item / std for item in noise.probe]
            error += noise.rounding / std
        self._repeated(tuple(probe[:PROBES]), error, level)

    def _see(self, name: str, noise: Noise, std: float, level: float) -> None:
        if not math.isfinite(noise.norm):
            raise GuardStop(
                "non_finite",
                f"release {self._seen} of {name} is not finite, which tells of a record.",
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
            f"release {self._seen}: the noise on {name} has {ratio:.3g} times the standard "
            "deviation that it is said to have.",
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
                    f"release {self._seen} has the noise of an earlier one: their difference "
                    "shows the data.",
                    "Never seed the generator of the noise a second time.",
                )
        self._first = self._first or probe
        self._last, self._room = probe, max(self._room, error)


def _too_small(root: float, room: float, entries: int) -> float:
    """P(a chi of ``entries`` degrees is at most as small), for the largest norm it may be."""
    return float(gammainc(entries / 2, ((root + room) * (1 + MODEL_ERROR)) ** 2 / 2))


def _too_large(root: float, room: float, entries: int) -> float:
    """P(a chi of ``entries`` degrees is at least as large), for the least norm it may be."""
    return float(gammaincc(entries / 2, (max(0.0, root - room) * (1 - MODEL_ERROR)) ** 2 / 2))
