"""Lot sampling: which records take part in which step, from a keyed cryptographic stream.

Each sampler is a pure function of the run's sampling key and the step, so that a lot can
be drawn again after a crash and need not be stored. The samplers match what the certificate of
their scheme assumes:

poisson         each record independently with probability q; sizes vary, empty lots happen
truncated       poisson, and a lot above its largest size is cut to a uniform subset
fixed_size      a uniform subset of B records, fresh in each step
shuffled        a uniform permutation per epoch, B at a time in order
cyclic          the order 0..N-1, B at a time, the same in every epoch
cyclic_poisson  records hashed into b groups; step t Poisson-samples group t mod b
b_min_sep       each record that took part in none of the last b - 1 steps, independently with
                probability p; before the first step, records have waited as after many steps
balls_in_bins   each record in one uniformly random of b lots, the same in every epoch, or
                drawn again for each epoch
random_         each record in exactly k of the T steps, every such set of steps with the same
allocation      probability
full_batch      all records

A lot is a sorted int64 tensor of record numbers, and may be empty. The divisor of a step is
the plan's lot size, never ``len(lot)``. A key serves one sampler: each phase of a
plan has its own (``LotSampler``). If each step draws its lot afresh (Poisson, truncated, fixed
size), the draw of step t has its own key from the ratchet, so that a checkpoint reveals nothing
about lots that were drawn. If draws last longer (permutations, bins, groups) or a lot depends on
earlier lots, the phase has one key, which checkpoints contain.

Uniform numbers below n come from 62-bit numbers by rejection (Lemire, arXiv:1805.10941, in
its plain form), so they are exactly uniform. q is rounded down to a multiple of
2⁻⁶², which never raises a record's probability.

>>> lot = poisson(bytes(32), size=1000, probability=Fraction(1, 100))
>>> len(lot(0)), len(lot(1)), bool((lot(0) == lot(0)).all())
(7, 11, True)

>>> from affidavit.plan.parse import plan_from
>>> plan = plan_from({"version": 1, "adjacency": "zero_out", "steps": 3, "dataset": {"size": 9},
...     "sampling": {"scheme": "cyclic", "lot_size": 3}, "target": {"delta": 1e-5},
...     "releases": [{"name": "all", "clip_norm": 0.5, "noise_multiplier": 4}]})
>>> LotSampler(plan, 0, bytes(32)).of(1, bytes(32)).tolist()
[3, 4, 5]
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache

import torch
from torch import Tensor

from affidavit.plan import FRESH_LOTS, Plan, schedule
from affidavit.trainer.noise.chacha import derived_key, raw_words

RUN_STEP = 2**63
"""The step number of draws that are made once per run."""

WORD_BITS = 62

Sampler = Callable[[int], Tensor]
"""Returns the records of the lot of a step, counted from 0."""


class UniformIntegers:
    """Uniform and independent 62-bit numbers of one step."""

    def __init__(self, key: bytes, step: int) -> None:
        self.key, self.step, self.draws = key, step, 0

    def take(self, count: int) -> Tensor:
        """Return ``count`` new numbers in [0, 2⁶²). Shape (count,), int64."""
        raw = raw_words(self.key, step=self.step, tensor=self.draws, count=2 * count)
        self.draws += 1
        return raw.view(torch.int64) & ((1 << WORD_BITS) - 1)

    def below(self, limit: int, count: int) -> Tensor:
        """Return ``count`` exactly uniform numbers in [0, limit). Shape (count,), int64."""
        ceiling = ((1 << WORD_BITS) // limit) * limit
        drawn = self.take(count)
        while bool((over := drawn >= ceiling).any()):
            drawn[over] = self.take(int(over.sum()))
        return drawn % limit

    def order(self, count: int) -> Tensor:
        """Return a uniform permutation of 0..count-1: the order of distinct random numbers.

        Shape (count,), int64.
        """
        keys = self.take(count)
        while len(torch.unique(keys)) < count:
            keys = self.take(count)
        return torch.argsort(keys)


def poisson(
    key: bytes, *, size: int, probability: Fraction, max_lot_size: int | None = None
) -> Sampler:
    """Sample each of ``size`` records independently, with at most ``probability``.

    A lot above ``max_lot_size`` is cut to a uniform subset of that size.
    """

    def lot(step: int) -> Tensor:
        words = UniformIntegers(key, step)
        drawn = _sample(words, size, probability)
        if max_lot_size is None or len(drawn) <= max_lot_size:
            return drawn
        return drawn[words.order(len(drawn))[:max_lot_size]].sort().values

    return lot


def fixed_size(key: bytes, *, size: int, lot_size: int) -> Sampler:
    """Sample a uniform subset of ``lot_size`` records, fresh in each step."""
    _lots_per_epoch(size, lot_size)

    def lot(step: int) -> Tensor:
        return UniformIntegers(key, step).order(size)[:lot_size].sort().values

    return lot


def shuffled(key: bytes, *, size: int, lot_size: int) -> Sampler:
    """Take lots in the order of one permutation per epoch; a last partial lot is skipped."""
    lots = _lots_per_epoch(size, lot_size)

    @lru_cache(maxsize=1)
    def order_of(epoch: int) -> Tensor:
        return UniformIntegers(key, epoch).order(size)

    def lot(step: int) -> Tensor:
        epoch, place = divmod(step, lots)
        order = order_of(epoch)
        return order[place * lot_size : (place + 1) * lot_size].sort().values

    return lot


def cyclic(*, size: int, lot_size: int) -> Sampler:
    """Take lots in the order of the data set, the same in every epoch, without draws."""
    lots = _lots_per_epoch(size, lot_size)

    def lot(step: int) -> Tensor:
        first = (step % lots) * lot_size
        return torch.arange(first, first + lot_size)

    return lot


def cyclic_poisson(key: bytes, *, size: int, groups: int, probability: Fraction) -> Sampler:
    """Sample each record of group t mod ``groups`` with ``probability`` in step t.

    A record's group is drawn independently, so it does not depend on other records.
    """
    _require_positive(groups, "groups")
    group_of = UniformIntegers(key, RUN_STEP).below(groups, size)

    def lot(step: int) -> Tensor:
        members = torch.nonzero(group_of == step % groups).flatten()
        return members[_sample(UniformIntegers(key, step), len(members), probability)]

    return lot


def b_min_sep(key: bytes, *, size: int, separation: int, probability: Fraction) -> Sampler:
    """Sample each record that skipped the last ``separation`` - 1 steps with ``probability``.

    A lot depends on all earlier lots, so drawing one out of order draws all of those again.
    """
    _require_positive(separation, "steps between two lots of a record")
    share = probability / (1 + (separation - 1) * probability)

    def initial_waits() -> Tensor:
        """Draw the steps until each record may take part: any wait has the same probability."""
        drawn, one = UniformIntegers(key, RUN_STEP).take(size), math.floor(share * (1 << WORD_BITS))
        waits = torch.zeros(size, dtype=torch.int64)
        for wait in range(1, separation):
            waits[(drawn >= (wait - 1) * one) & (drawn < wait * one)] = wait
        return waits

    next_step, waits = 0, initial_waits()

    @lru_cache(maxsize=1)
    def lot(step: int) -> Tensor:
        nonlocal next_step, waits
        if step < next_step:
            next_step, waits = 0, initial_waits()
        while next_step <= step:
            rested = torch.nonzero(waits == 0).flatten()
            result = rested[_sample(UniformIntegers(key, next_step), len(rested), probability)]
            waits = (waits - 1).clamp(min=0)
            waits[result] = separation - 1
            next_step += 1
        return result

    return lot


def balls_in_bins(key: bytes, *, size: int, bins: int, each_epoch: bool = False) -> Sampler:
    """Assign each record to one uniformly random lot of ``bins``.

    Bins stay in every epoch, or are drawn again with ``each_epoch``.
    """
    _require_positive(bins, "bins")

    @lru_cache(maxsize=1)
    def bin_of(draw: int) -> Tensor:
        return UniformIntegers(key, draw).below(bins, size)

    def lot(step: int) -> Tensor:
        epoch, place = divmod(step, bins)
        return torch.nonzero(bin_of(epoch if each_epoch else RUN_STEP) == place).flatten()

    return lot


def random_allocation(key: bytes, *, size: int, steps: int, participations: int) -> Sampler:
    """Assign each record to ``participations`` of ``steps``, every set with the same probability.

    Draws use Floyd's algorithm (Bentley and Floyd, CACM 30(9), 1987): the i-th step is uniform
    below T - k + i, or T - k + i - 1 itself if the record is in it already. Raises ``ValueError``
    unless 1 <= k <= T.
    """
    if not 0 < participations <= steps:
        raise ValueError(f"a record takes part in 1 to {steps} steps, not {participations}")

    words = UniformIntegers(key, RUN_STEP)
    taken = torch.full((participations, size), -1)
    for place in range(participations):
        last = steps - participations + place
        drawn = words.below(last + 1, size)
        taken[place] = torch.where((taken == drawn).any(dim=0), last, drawn)
    by_step, order = taken.flatten().sort(stable=True)
    records = order % size

    def lot(step: int) -> Tensor:
        first, end = torch.searchsorted(by_step, torch.tensor([step, step + 1]))
        return records[first:end].sort().values

    return lot


def full_batch(*, size: int) -> Sampler:
    """Take all records in every step."""
    return lambda step: torch.arange(size)  # noqa: ARG005 - a sampler takes a step


def _sample(words: UniformIntegers, size: int, probability: Fraction) -> Tensor:
    if not 0 <= probability <= 1:
        raise ValueError(f"{probability} is not a probability")
    threshold = math.floor(probability * (1 << WORD_BITS))
    if threshold >= 1 << WORD_BITS:
        return torch.arange(size)
    return torch.nonzero(words.take(size) < threshold).flatten()


def _require_positive(count: int, what: str) -> None:
    if count < 1:
        raise ValueError(f"the number of {what} must be at least 1, not {count}")


def _lots_per_epoch(size: int, lot_size: int) -> int:
    if not 0 < lot_size <= size:
        raise ValueError(f"a lot has 1 to {size} records, not {lot_size}")
    return size // lot_size


class LotSampler:
    """The lots of phase ``index``; ``key`` is the run's key for draws that outlast a step."""

    def __init__(self, plan: Plan, index: int, key: bytes) -> None:
        self._plan, self._index = plan, index
        phase_key = derived_key(key, f"affidavit lots of phase {index}")
        fresh = plan.phases[index].sampling.scheme in FRESH_LOTS
        self._phase_sampler = None if fresh else build_sampler(plan, index, phase_key)

    def of(self, place: int, step_key: bytes) -> Tensor:
        """Return the sorted records of the lot at ``place`` in the phase, which may be empty.

        Shape (n,), int64.
        """
        if self._phase_sampler is not None:
            return self._phase_sampler(place)
        return build_sampler(self._plan, self._index, step_key)(place)


def build_sampler(plan: Plan, index: int, key: bytes) -> Sampler:
    """Return the sampler of phase ``index`` under ``key``."""
    phase = plan.phases[index]
    sampling, size = phase.sampling, plan.dataset.size
    assert size is not None  # a run is bound to a plan that says it
    probability = schedule.sampling_probability(plan, phase)
    lot_size = sampling.lot_size or 0  # of schemes that have none it is not read
    match sampling.scheme:
        case "poisson" | "truncated_poisson":
            max_lot_size = sampling.max_lot_size
            return poisson(key, size=size, probability=probability, max_lot_size=max_lot_size)
        case "fixed_size":
            return fixed_size(key, size=size, lot_size=lot_size)
        case "shuffled":
            return shuffled(key, size=size, lot_size=lot_size)
        case "cyclic":
            return cyclic(size=size, lot_size=lot_size)
        case "cyclic_poisson":
            groups = sampling.groups or 0
            return cyclic_poisson(key, size=size, groups=groups, probability=probability * groups)
        case "b_min_sep":
            return b_min_sep(
                key,
                size=size,
                separation=sampling.separation or 0,
                probability=schedule.highest_probability(plan, phase),
            )
        case "balls_in_bins":
            return balls_in_bins(
                key,
                size=size,
                bins=schedule.lots_per_epoch(size, lot_size),
                each_epoch=sampling.bins_drawn == "each_epoch",
            )
        case "random_allocation":
            return random_allocation(
                key,
                size=size,
                steps=phase.steps or 0,
                participations=sampling.participations or 0,
            )
        case "full_batch":
            return full_batch(size=size)
