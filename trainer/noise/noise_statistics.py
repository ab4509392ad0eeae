"""A statistical test of the released noise: its scale and its independence.

The noise of a step is the difference of some entries of each tensor after and before it was added.
Divided by its certified deviation, it is standard normal; correlated noise is first solved for the
independent z from which it was computed. For each release and for all releases together, the test
checks the sum of squares (is the scale as certified?) and the products with the previous step, with
the first step and with the next release (is anything repeated?). Sums run over all steps, so that
small errors are found too: noise of 0.98 times the certified deviation within a hundred steps, if a
thousand entries are read per step.

Guarantees
    * A run with the certified noise is stopped with a probability of at most ``FALSE_ALARM``,
      however long it is: step t spends 6 / (π² t²) of it, in equal parts on every test. The
      squares are tested by the exact chi-square tails, the products by the bound
      P(Σ x_i y_i ≥ s) ≤ exp(-min(s² / (4 n), s / 4)) for independent standard normal x and y.
    * A relative error of ``MODEL_ERROR`` of the deviation is allowed for rounding.

Reference for the bound: the moment generating function of x y is (1 - u²)^(-1/2) ≤ exp(u²) for
|u| ≤ 1/√2, with u = s / (2 n) or 1/2 in Chernoff's inequality.

>>> test = NoiseTest({"w": "all"}, {"w": 1000})
>>> drawn = torch.Generator().manual_seed(1)
>>> for step in range(20):
...     sums = {"w": torch.zeros(1000)}
...     before = test.entries(sums, {"w": 3.0})
...     sums["w"] += 3 * torch.randn(1000, generator=drawn)
...     test.observe(before, sums, {"w": 3.0})
>>> round(test.as_entry()["scale"]["all"], 1)
1.0
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from scipy.special import gammainc, gammaincc
from torch import Tensor

from affidavit.mechanisms.strategies import Strategy
from affidavit.trainer.errors import RunFailure

Array = np.ndarray[Any, np.dtype[np.float64]]
Squares = Mapping[str, tuple[float, int]]

FALSE_ALARM = 1e-9
"""Probability that a run with the certified noise is ever stopped."""

MODEL_ERROR = 5e-4
"""Relative error of a standard deviation that is allowed for rounding."""

MAX_TESTED_ENTRIES = 4096
"""Entries of all tensors together that are tested per step; at least one of each tensor."""

MAX_CORRELATED_STEPS = 512
"""Length of a phase of correlated noise above which its noise is not solved for z."""


class NoiseTest:
    """A test of the noise of all releases of a run; ``release_of`` and ``sizes`` are by tensor.

    Each of ``ranks`` ranks with their own noise spends an equal part of ``FALSE_ALARM``.
    """

    def __init__(
        self, release_of: Mapping[str, str], sizes: Mapping[str, int], *, ranks: int = 1
    ) -> None:
        self._false_alarm = FALSE_ALARM / ranks
        sizes = {name: size for name, size in sizes.items() if size}
        release_of = {name: of for name, of in release_of.items() if name in sizes}
        self._names: dict[str, list[str]] = {}
        for name, release in release_of.items():
            self._names.setdefault(release, []).append(name)
        least = max(1, MAX_TESTED_ENTRIES // max(1, len(sizes)))
        spare = MAX_TESTED_ENTRIES - sum(min(least, size) for size in sizes.values())
        self._tested_sizes = {}
        for name, size in sizes.items():
            more = min(max(0, spare), max(0, size - least))
            self._tested_sizes[name], spare = min(size, least) + more, spare - more
        self._steps = 0
        self._squares: dict[str, tuple[float, int]] = {}
        self._products: dict[str, tuple[float, int]] = {}
        self._first: dict[str, Tensor] = {}
        self._last: dict[str, Tensor] = {}
        self._matrix: Array | None = None
        self._observed: dict[int, dict[str, Tensor]] = {}

    def entries(
        self, sums: Mapping[str, Tensor], noise_std: Mapping[str, float]
    ) -> dict[str, Tensor]:
        """Copy the tested entries by release, divided by the ``noise_std`` of their tensor.

        Each sum has its tensor's shape.
        """
        return {
            release: torch.cat(
                [sums[n].reshape(-1)[: self._tested_sizes[n]].double() / noise_std[n] for n in of]
            )
            for release, of in self._names.items()
        }

    def observe(
        self,
        before: Mapping[str, Tensor],
        sums: Mapping[str, Tensor],
        noise_std: Mapping[str, float],
        *,
        strategy: Strategy | None = None,
        place: int = 0,
    ) -> None:
        """Test the noise of a step, at ``place`` in its phase.

        ``before`` are the ``entries`` of ``sums`` before the noise was added, and ``noise_std`` is
        the certified deviation by tensor. Each sum has its tensor's shape. Raises ``RunFailure``
        (``noise_not_certified``).
        """
        after = self.entries(sums, noise_std)
        noise = {release: (after[release] - before[release]).cpu() for release in after}
        if strategy is not None:
            z_of = self._independent(noise, strategy, place)
            if z_of is None:
                return
            noise = z_of
        self._steps += 1
        for release, z in noise.items():
            _add_sum(self._squares, release, float(z.square().sum()), z.numel())
            for what, other in (("last", self._last), ("first", self._first)):
                if release in other:
                    product = float((z * other[release]).sum())
                    _add_sum(self._products, f"{release} with its {what}", product, z.numel())
        releases = list(noise)
        for one, next_one in pairwise(releases):
            size = min(noise[one].numel(), noise[next_one].numel())
            product = float((noise[one][:size] * noise[next_one][:size]).sum())
            _add_sum(self._products, f"{one} with {next_one}", product, size)
        self._last = noise
        self._first = self._first or noise
        self._require_likely()

    def _independent(
        self, noise: dict[str, Tensor], strategy: Strategy, place: int
    ) -> dict[str, Tensor] | None:
        """Return z_t = Σ_s C_ts w_s of the observed steps of a phase, or None if one is missing."""
        if strategy.steps > MAX_CORRELATED_STEPS or strategy.draws != strategy.steps:
            return None
        if place == 0 or self._matrix is None:
            self._matrix, self._observed = strategy.injected.strategy_matrix(), {}
        self._observed[place] = noise
        row = self._matrix[place]
        parts = [(float(row[s]), self._observed.get(s)) for s in range(place + 1) if row[s]]
        if any(part is None for _, part in parts):
            return None
        return {
            release: torch.stack([factor * w[release] for factor, w in parts if w]).sum(0)
            for release in noise
        }

    def _require_likely(self) -> None:
        tests = 2 * (len(self._squares) + 1 + len(self._products))
        level = self._false_alarm * 6 / (math.pi * self._steps) ** 2 / tests
        every = (
            sum(s for s, _ in self._squares.values()),
            sum(n for _, n in self._squares.values()),
        )
        for release, (squares, size) in [*self._squares.items(), ("every release", every)]:
            if not size:
                continue
            low = float(gammainc(size / 2, squares * (1 + MODEL_ERROR) ** 2 / 2))
            high = float(gammaincc(size / 2, squares * (1 - MODEL_ERROR) ** 2 / 2))
            if not min(low, high) >= level:
                ratio = math.sqrt(squares / size)
                raise _failure(f"{release} has noise of {ratio:.4f} times the certified deviation")
        for pair, (product, size) in self._products.items():
            room = abs(product) * (1 - 2 * MODEL_ERROR)
            if not min(room**2 / (4 * size), room / 4) <= -math.log(level):
                raise _failure(f"the noise of {pair} is not independent")

    @property
    def squares(self) -> dict[str, tuple[float, int]]:
        """The sum of squares of the observed noise, and its number of entries, by release."""
        return dict(self._squares)

    def as_entry(self, of: Sequence[Squares] | None = None) -> dict[str, Any]:
        """Return the entry of a run record: the scale of the noise relative to the certified one.

        ``of`` has the ``squares`` of every rank, if each rank observed its own noise.
        """
        total: dict[str, tuple[float, int]] = {}
        for part in [self.squares] if of is None else of:
            for release, (squares, size) in part.items():
                _add_sum(total, release, squares, size)
        return {
            "steps": self._steps,
            "entries": sum(size for _, size in total.values()),
            "false_alarm": FALSE_ALARM,
            "scale": {
                release: round(math.sqrt(squares / size), 6)
                for release, (squares, size) in total.items()
            },
        }


def _add_sum(sums: dict[str, tuple[float, int]], name: str, value: float, size: int) -> None:
    before, entries = sums.get(name, (0.0, 0))
    sums[name] = before + value, entries + size


def _failure(what: str) -> RunFailure:
    return RunFailure(
        "noise_not_certified",
        f"{what}. The step was not released and stays charged. Look for code that changes the "
        "noise, or the sums after their noise was added.",
    )
