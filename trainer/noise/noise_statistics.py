"""A statistical test of the released noise: where it is, its scale and its independence.

Each tensor is read once before and once after its noise, in up to ``MAX_SUMS`` sums of consecutive
entries over all tensors (single entries of small ones). The differences, divided by the certified
deviation of a sum, are standard normal; correlated noise is first solved for the independent z from
which it was computed. The test checks that none of them is zero, and for each tensor, each release
and all together the sum of squares (is the scale as certified?). For each release, it checks the
products with the previous step, with the first step and with the next release (is anything
repeated?). Sums run over all steps, so that small errors are found too: noise of 0.98 times the
certified deviation within a hundred steps, if a thousand entries are read per step.

Guarantees
    * A run with the certified noise is stopped with a probability of at most
      ``noise_law.FALSE_ALARM``, however long it is (``mechanisms.noise_law``). The squares are
      tested by the exact chi-square tails, the products by the bound
      P(Σ x_i y_i ≥ s) ≤ exp(-min(s² / (4 n), s / 4)) for independent standard normal x and y.
    * k of a tensor's n sums that did not change in their last steps have, by any choice of them, a
      probability of at most n (n choose k) Π p, where p is that of each to stay in a step: a sum of
      one entry x stays if its noise is below half a unit in the last place of x, or half a step of
      the grid of exact noise, so p ≤ 2^-21 + 2^-24 |x| / σ. A sum of m entries that is below
      2^10 σ √m stays if its own noise is below half a unit in its last place: p ≤ 2^-12.

Reference for the bound: the moment generating function of x y is (1 - u²)^(-1/2) ≤ exp(u²) for
|u| ≤ 1/√2, with u = s / (2 n) or 1/2 in Chernoff's inequality.

>>> test = NoiseTest({"w": "all"}, {"w": 1000})
>>> drawn = torch.Generator().manual_seed(1)
>>> for step in range(20):
...     sums = {"w": torch.zeros(1000)}
...     before = test.read(sums)
...     sums["w"] += 3 * torch.randn(1000, generator=drawn)
...     test.observe(before, sums, {"w": 3.0})
>>> test.as_entry()["entries"]
20000
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import groupby, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from affidavit.mechanisms import noise_law
from affidavit.mechanisms.strategies import Strategy
from affidavit.trainer.errors import RunFailure
from affidavit.trainer.noise.normal import has_kernel
from affidavit.trainer.norm_bounds import HALF_TYPES

Array = np.ndarray[Any, np.dtype[np.float64]]

ROUNDING = 2.0**-16
"""Error of a difference by rounding, in deviations, where few differences are near zero."""

MAX_SUMS = 1 << 15
"""Sums of entries of all tensors together that are tested per step; at least one of each tensor."""

MAX_STACKED = 1 << 16
"""Entries of a tensor up to which it is copied to be added up with others of its kind."""

STAYING_ENTRY, STAYING_SUM = 2.0**-21, 2.0**-12
"""Bounds on the probability that noise leaves an entry near 0, or a sum of entries, as it was."""

CORRELATED = 16.0
"""Factor of both for correlated noise, whose new part has a deviation of at least σ / 16."""

MAX_CORRELATED_STEPS = 512
"""Length of a phase of correlated noise above which its noise is not solved for z."""


class NoiseTest:
    """A test of the noise of all releases of a run; ``release_of`` and ``sizes`` are by tensor.

    Each of ``ranks`` ranks with their own noise spends an equal part of the false-alarm rate.
    """

    def __init__(
        self, release_of: Mapping[str, str], sizes: Mapping[str, int], *, ranks: int = 1
    ) -> None:
        self._ranks = ranks
        sizes = {name: size for name, size in sizes.items() if size}
        release_of = {name: of for name, of in release_of.items() if name in sizes}
        self._names: dict[str, list[str]] = {}
        for name, release in release_of.items():
            self._names.setdefault(release, []).append(name)
        least = max(1, MAX_SUMS // max(1, len(sizes)))
        spare = MAX_SUMS - sum(min(least, size) for size in sizes.values())
        self._lengths: dict[str, int] = {}
        for name, size in sizes.items():
            more = min(max(0, spare), max(0, size - least))
            self._lengths[name], spare = -(-size // (min(size, least) + more)), spare - more
        self._order = [name for of in self._names.values() for name in of]
        kinds = {name: (sizes[name], self._lengths[name]) for name in self._order}
        by_kind = sorted(self._order, key=kinds.__getitem__)
        self._alike = [list(of) for _, of in groupby(by_kind, key=kinds.__getitem__)]
        counts = [_count_entries(sizes[name], self._lengths[name]) for name in self._order]
        self._counts = torch.tensor([len(item) for item in counts], dtype=torch.long)
        parts = torch.arange(int(self._counts.sum())).split(self._counts.tolist() or [0])
        places = dict(zip(self._order, parts, strict=False))
        self._permutation = torch.cat([places[name] for name in by_kind] or [*parts]).argsort()
        self._terms = torch.tensor([self._lengths[name] for name in self._order])
        self._roots = torch.cat(counts).sqrt() if counts else torch.zeros(0, dtype=torch.float64)
        self._stayed: dict[str, Tensor] = {}
        self._released = torch.zeros(0)
        self._tensor_squares = np.zeros((2, len(sizes)))
        self._observations = 0
        self._steps = 0
        self._squares: dict[str, tuple[float, int]] = {}
        self._products: dict[str, tuple[float, int]] = {}
        self._first: dict[str, Tensor] = {}
        self._last: dict[str, Tensor] = {}
        self._matrix: Array | None = None
        self._observed: dict[int, dict[str, Tensor]] = {}

    def read(self, sums: Mapping[str, Tensor]) -> Tensor:
        """Return sums of consecutive entries of all tensors, in float64, of one dimension.

        Each of ``sums`` has its tensor's shape. Small tensors of one kind are added up at once, or
        all by a kernel where there is one.
        """
        every = [sums[name] for name in self._order]
        if every and all(has_kernel(item) and item.is_contiguous() for item in every):
            from affidavit.trainer.noise.fused import piece_sums

            return piece_sums(every, self._terms.tolist())
        parts: list[Tensor] = []
        for names in self._alike:
            entries, length = [sums[name].reshape(-1) for name in names], self._lengths[names[0]]
            if len(entries[0]) <= MAX_STACKED:
                parts.append(_add_up(torch.stack(entries), length))
            else:
                parts += [_add_up(item[None], length) for item in entries]
        if not parts:
            return torch.zeros(0, dtype=torch.float64)
        result = torch.cat(parts)
        return result[self._permutation.to(result.device)]

    def _by_tensor(self, values: Tensor) -> dict[str, Tensor]:
        return dict(zip(self._order, values.split(self._counts.tolist()), strict=True))

    def _repeat(self, of_tensors: Sequence[float]) -> Tensor:
        """Return a value for each sum from one for each tensor."""
        return torch.repeat_interleave(torch.tensor(of_tensors, dtype=torch.float64), self._counts)

    def observe(
        self,
        before: Tensor,
        sums: Mapping[str, Tensor],
        noise_std: Mapping[str, float],
        *,
        strategy: Strategy | None = None,
        place: int = 0,
    ) -> None:
        """Test the noise of a step, at ``place`` in its phase.

        ``before`` is what was ``read`` of ``sums`` before the noise was added, and ``noise_std`` is
        the certified deviation by tensor. Each sum has its tensor's shape. Raises ``RunFailure``
        (``noise_not_certified``).
        """
        if not self._order:
            return
        self._released = self.read(sums)
        self._observations += 1
        gaps = (self._released - before).cpu()
        scaled = gaps / (self._roots * self._repeat([noise_std[name] for name in self._order]))
        self._require_noise_everywhere(before, scaled, noise_std, strategy is not None)
        counts = iter(self._counts.tolist())
        sizes = [sum(next(counts) for _ in names) for names in self._names.values()]
        noise = dict(zip(self._names, scaled.split(sizes), strict=True))
        if strategy is not None:
            z_of = self._independent(noise, strategy, place)
            if z_of is None:
                return
            noise = z_of
        self._steps += 1
        self._require_scale_of_tensors(noise, before, noise_std)
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

    def _require_noise_everywhere(
        self,
        before: Tensor,
        noise: Tensor,
        noise_std: Mapping[str, float],
        is_correlated: bool,
    ) -> None:
        """Test that no sum stayed as it was ``before``, in this step and those just before it."""
        stayed, self._stayed = self._stayed, {}
        if not bool((noise == 0).any()):
            return
        entries = self._by_tensor(before.cpu())
        for name, z in self._by_tensor(noise).items():
            stays = z == 0
            if not bool(stays.any()):
                continue
            chance = torch.full_like(z, STAYING_SUM)
            if self._lengths[name] == 1:
                chance = STAYING_ENTRY + 2.0**-24 * entries[name].abs() / noise_std[name]
            chance = (chance * (CORRELATED if is_correlated else 1.0)).clamp_(max=1.0).log_()
            together = torch.where(stays, stayed.get(name, torch.zeros_like(z)) + chance, 0.0)
            self._stayed[name] = together
            count, every = int(stays.sum()), len(z)
            choices = math.lgamma(every + 1) - math.lgamma(count + 1)
            choices += math.log(every) - math.lgamma(every - count + 1)
            if float(together.sum()) + choices < math.log(self._level()):
                raise _failure(f"{name} got no noise on {100 * count / every:.3g} % of its entries")

    def _require_scale_of_tensors(
        self,
        noise: Mapping[str, Tensor],
        before: Tensor,
        noise_std: Mapping[str, float],
    ) -> None:
        """Add up the squares of each tensor, and test them."""
        z = torch.cat(list(noise.values())).numpy()
        counts = self._counts.numpy()
        starts = np.concatenate([[0], np.cumsum(counts)[:-1]])
        self._tensor_squares += np.stack([np.add.reduceat(z * z, starts), counts])
        squares, sizes = self._tensor_squares
        for place in np.flatnonzero(~(_likelihood(squares, sizes) >= self._level())):
            name = self._order[place]
            # Noise below the last digit of an entry is rounded to zero, or to a digit.
            largest = float(self._by_tensor(before)[name].abs().max()) / noise_std[name]
            rounding = ROUNDING + 2.0**-22 * largest / self._lengths[name] ** 0.5
            if not _likelihood(squares[place], sizes[place], rounding) >= self._level():
                ratio = math.sqrt(squares[place] / sizes[place])
                raise _failure(f"{name} has noise of {ratio:.4f} times the certified deviation")

    def _level(self) -> float:
        """Return the probability that each test of this step spends."""
        releases = len(self._names)
        tests = 2 * (releases + 1 + 3 * releases) + 3 * len(self._order)
        return noise_law.level(self._observations, tests=tests, ranks=self._ranks)

    def require_released(self, means: Mapping[str, Tensor | None], divisor: float) -> None:
        """Raise ``RunFailure`` unless ``means`` times ``divisor`` are the tested sums.

        Each mean has its tensor's shape.
        """
        tensors: dict[str, Tensor] = {}
        for name in self._order:
            if (mean := means[name]) is None:
                raise _failure(f"the optimiser gets no mean of {name}")
            tensors[name] = mean
        halves = [item.dtype in HALF_TYPES for item in tensors.values()]
        device = self._released.device
        unit = self._repeat([2.0**-7 if half else 2.0**-20 for half in halves]).to(device)
        least = self._repeat([2.0**-24 if half else 2.0**-120 for half in halves]).to(device)
        lengths = torch.repeat_interleave(self._terms, self._counts).to(device)
        gap = (self.read(tensors) * divisor - self._released).abs_()
        room = unit * self._released.abs() + least * divisor * lengths
        if bool((gap <= room).all()):
            return
        # The terms of a longer sum may cancel each other.
        sizes = self.read({name: item.abs() for name, item in tensors.items()})
        room += torch.where(lengths > 1, unit * divisor * sizes, 0.0)
        for name, is_same in self._by_tensor(gap <= room).items():
            if not bool(is_same.all()):
                raise _failure(
                    f"the optimiser gets other means of {name} than the tested sums divided by "
                    f"{divisor:g}"
                )

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
        level = self._level()
        every = (
            sum(s for s, _ in self._squares.values()),
            sum(n for _, n in self._squares.values()),
        )
        for release, (squares, size) in [*self._squares.items(), ("every release", every)]:
            if not size:
                continue
            if not float(_likelihood(squares, size)) >= level:
                ratio = math.sqrt(squares / size)
                raise _failure(f"{release} has noise of {ratio:.4f} times the certified deviation")
        for pair, (product, size) in self._products.items():
            room = abs(product) * (1 - 2 * noise_law.MODEL_ERROR)
            if not min(room**2 / (4 * size), room / 4) <= -math.log(level):
                raise _failure(f"the noise of {pair} is not independent")

    @property
    def squares(self) -> dict[str, tuple[float, int]]:
        """The sum of squares of the observed noise, and its number of entries, by release."""
        return dict(self._squares)

    @property
    def entries(self) -> int:
        """The number of observed sums of all releases."""
        return sum(size for _, size in self._squares.values())

    def as_entry(self, of: Sequence[int] | None = None) -> dict[str, Any]:
        """Return the entry of a run record, which says how much noise was tested.

        No statistic of the noise is in it: together with the released sums it would tell whether a
        record was there. ``of`` has the ``entries`` of every rank, if
        each rank observed its own noise.
        """
        return {
            "steps": self._steps,
            "entries": self.entries if of is None else sum(of),
            "false_alarm": noise_law.FALSE_ALARM,
        }


def _likelihood(squares: Any, size: Any, rounding: float = ROUNDING) -> Any:
    """Return the probability of sums of squares as far from their mean, by chi-square tails."""
    return np.minimum(*noise_law.tails(np.sqrt(squares), rounding * np.sqrt(size), size))


def _count_entries(size: int, length: int) -> Tensor:
    """Return the number of entries of each sum; the last may have fewer."""
    counts = torch.full((-(-size // length),), float(length), dtype=torch.float64)
    counts[-1] = size - length * (len(counts) - 1)
    return counts


def _add_up(entries: Tensor, length: int) -> Tensor:
    """Return the sums of ``length`` consecutive entries of each of (k, m), one after the other."""
    whole = entries.shape[1] // length * length
    first = entries[:, :whole]
    sums = first.unflatten(1, (-1, length)).sum(2) if length > 1 and whole else first
    if whole < entries.shape[1]:
        sums = torch.cat([sums, entries[:, whole:].sum(1, keepdim=True)], 1)
    return sums.flatten().double()


def _add_sum(sums: dict[str, tuple[float, int]], name: str, value: float, size: int) -> None:
    before, entries = sums.get(name, (0.0, 0))
    sums[name] = before + value, entries + size


def _failure(what: str) -> RunFailure:
    return RunFailure(
        "noise_not_certified",
        f"{what}. The step was not released and stays charged. Look for code that changes the "
        "noise, or the sums after their noise was added, also in hooks of the optimiser.",
    )
