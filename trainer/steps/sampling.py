"""Lots: which records take part in which step, drawn from a keyed cryptographic stream.

Each sampler is a pure function of the run's sampling key and the step, so that a lot can
be drawn again after a crash and nothing about it need be stored. What each one does is
what the certificate of its scheme assumes:

poisson         every record by itself with probability q; sizes vary, empty lots happen
truncated       poisson, and a lot above its largest size is cut to a uniform subset
fixed_size      a uniform subset of B records, fresh at each step
shuffled        a uniform permutation for each epoch, B at a time in order
cyclic          the order 0..N-1, B at a time, the same in every epoch
cyclic_poisson  records hashed into b groups; step t Poisson-samples group t mod b
b_min_sep       every record that took part in none of the last b - 1 steps, by itself with
                probability p; before the first step records have waited as after many
balls_in_bins   every record in one uniformly random of b lots, the same in every epoch, or
                drawn afresh for each
full_batch      every record

A lot is a sorted int64 tensor of record numbers, and may be empty. The divisor of a step is
the plan's lot size, never ``len(lot)``. The key serves one sampler alone: each phase of a
plan has its own (``LotSampler``). Where every step draws its lot afresh (Poisson, truncated, fixed
size) the draw of step t has a key of its own, from the ratchet: a checkpoint says nothing of lots
that were drawn. Where something is drawn for longer (permutations, bins, groups) or a lot depends
on those before it the phase has one key, which the checkpoint keeps.

Uniform numbers below n come from 62-bit numbers by rejection (Lemire, arXiv:1805.10941, in
its plain form), so that they are exactly uniform; q is rounded down to a multiple of
2⁻⁶², which never raises a record's chance.

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

from affidavit.plan import Plan, schedule
from affidavit.trainer.noise.chacha import derived_key, raw_words

WHOLE_RUN = 2**63
"""The step number of draws that are made once for the whole run."""

BITS = 62

Sampler = Callable[[int], Tensor]
"""From a step, counted from 0, to the records of its lot."""


class Words:
    """62-bit numbers, uniform and independent, that belong to one step."""

    def __init__(self, key: bytes, step: int) -> None:
        self.key, self.step, self.draws = key, step, 0

    def take(self, count: int) -> Tensor:
        """``count`` numbers in [0, 2⁶²) that no other call has seen. Shape (count,), int64."""
        raw = raw_words(self.key, step=self.step, tensor=self.draws, count=2 * count)
        self.draws += 1
        return raw.view(torch.int64) & ((1 << BITS) - 1)

    def below(self, limit: int, count: int) -> Tensor:
        """``count`` exactly uniform numbers in [0, limit). Shape (count,), int64."""
        ceiling = ((1 << BITS) // limit) * limit
        drawn = self.take(count)
        while bool((over := drawn >= ceiling).any()):
            drawn[over] = self.take(int(over.sum()))
        return drawn % limit

    def order(self, count: int) -> Tensor:
        """A uniform permutation of 0..count-1: the order of distinct random numbers.

        Shape (count,), int64.
        """
        keys = self.take(count)
        while len(torch.unique(keys)) < count:
            keys = self.take(count)
        return torch.argsort(keys)


def poisson(
    key: bytes, *, size: int, probability: Fraction, max_lot_size: int | None = None
) -> Sampler:
    """Each of ``size`` records by itself, with probability at most ``probability``.

    Of a lot above ``max_lot_size`` a uniform subset of so many is taken.
    """

    def lot(step: int) -> Tensor:
        words = Words(key, step)
        drawn = _chosen(words, size, probability)
        if max_lot_size is None or len(drawn) <= max_lot_size:
            return drawn
        return drawn[words.order(len(drawn))[:max_lot_size]].sort().values

    return lot


def fixed_size(key: bytes, *, size: int, lot_size: int) -> Sampler:
    """A uniform subset of ``lot_size`` records, fresh at each step."""
    _lots_per_epoch(size, lot_size)

    def lot(step: int) -> Tensor:
        return Words(key, step).order(size)[:lot_size].sort().values

    return lot


def shuffled(key: bytes, *, size: int, lot_size: int) -> Sampler:
    """Lots in the order of one permutation an epoch; a last partial lot is left out."""
    lots = _lots_per_epoch(size, lot_size)

    @lru_cache(maxsize=1)
    def order_of(epoch: int) -> Tensor:
        return Words(key, epoch).order(size)

    def lot(step: int) -> Tensor:
        epoch, place = divmod(step, lots)
        order = order_of(epoch)
        return order[place * lot_size : (place + 1) * lot_size].sort().values

    return lot


def cyclic(*, size: int, lot_size: int) -> Sampler:
    """Lots in the order of the data set, the same in every epoch; nothing is drawn."""
    lots = _lots_per_epoch(size, lot_size)

    def lot(step: int) -> Tensor:
        first = (step % lots) * lot_size
        return torch.arange(first, first + lot_size)

    return lot


def cyclic_poisson(key: bytes, *, size: int, groups: int, probability: Fraction) -> Sampler:
    """Step t takes each record of group t mod ``groups`` with ``probability``.

    A record's group is drawn for itself, so that it does not depend on other records.
    """
    _require_some(groups, "groups")
    group_of = Words(key, WHOLE_RUN).below(groups, size)

    def lot(step: int) -> Tensor:
        members = torch.nonzero(group_of == step % groups).flatten()
        return members[_chosen(Words(key, step), len(members), probability)]

    return lot


def b_min_sep(key: bytes, *, size: int, separation: int, probability: Fraction) -> Sampler:
    """Each record with ``probability`` that took part in none of the last ``separation`` - 1 steps.

    A lot depends on all before it, so that one that is out of turn takes as long as they did.
    """
    _require_some(separation, "steps between two lots of a record")
    share = probability / (1 + (separation - 1) * probability)

    def begun() -> Tensor:
        """In how many steps each record may take part again: any wait has the same chance."""
        drawn, one = Words(key, WHOLE_RUN).take(size), math.floor(share * (1 << BITS))
        waits = torch.zeros(size, dtype=torch.int64)
        for wait in range(1, separation):
            waits[(drawn >= (wait - 1) * one) & (drawn < wait * one)] = wait
        return waits

    next_step, waits = 0, begun()

    @lru_cache(maxsize=1)
    def lot(step: int) -> Tensor:
        nonlocal next_step, waits
        if step < next_step:
            next_step, waits = 0, begun()
        while next_step <= step:
            rested = torch.nonzero(waits == 0).flatten()
            result = rested[_chosen(Words(key, next_step), len(rested), probability)]
            waits = (waits - 1).clamp(min=0)
            waits[result] = separation - 1
            next_step += 1
        return result

    return lot


def balls_in_bins(key: bytes, *, size: int, bins: int, each_epoch: bool = False) -> Sampler:
    """Every record in one uniformly random lot of ``bins``.

    Bins are kept in every epoch, or with ``each_epoch`` drawn afresh for each.
    """
    _require_some(bins, "bins")

    @lru_cache(maxsize=1)
    def bin_of(draw: int) -> Tensor:
        return Words(key, draw).below(bins, size)

    def lot(step: int) -> Tensor:
        epoch, place = divmod(step, bins)
        return torch.nonzero(bin_of(epoch if each_epoch else WHOLE_RUN) == place).flatten()

    return lot


def full_batch(*, size: int) -> Sampler:
    """Every record at every step."""
    return lambda step: torch.arange(size)  # noqa: ARG005 - a sampler takes a step


def _chosen(words: Words, size: int, probability: Fraction) -> Tensor:
    if not 0 <= probability <= 1:
        raise ValueError(f"{probability} is not a probability")
    threshold = math.floor(probability * (1 << BITS))
    if threshold >= 1 << BITS:
        return torch.arange(size)
    return torch.nonzero(words.take(size) < threshold).flatten()


def _require_some(count: int, what: str) -> None:
    if count < 1:
        raise ValueError(f"the number of {what} must be at least 1, not {count}")


def _lots_per_epoch(size: int, lot_size: int) -> int:
    if not 0 < lot_size <= size:
        raise ValueError(f"a lot has 1 to {size} records, not {lot_size}")
    return size // lot_size


FRESH = frozenset({"poisson", "truncated_poisson", "fixed_size"})
"""Schemes of which every lot is drawn by itself."""


class LotSampler:
    """The lots of phase ``index``; ``key`` is the run's for what outlasts a step."""

    def __init__(self, plan: Plan, index: int, key: bytes) -> None:
        self._plan, self._index = plan, index
        phase_key = derived_key(key, f"affidavit lots of phase {index}")
        fresh = plan.phases[index].sampling.scheme in FRESH
        self._kept = None if fresh else sampler_of(plan, index, phase_key)

    def of(self, place: int, step_key: bytes) -> Tensor:
        """The records of the lot at ``place`` in the phase, sorted; it may be empty.

        Shape (n,), int64.
        """
        if self._kept is not None:
            return self._kept(place)
        return sampler_of(self._plan, self._index, step_key)(place)


def sampler_of(plan: Plan, index: int, key: bytes) -> Sampler:
    """The sampler of phase ``index`` under ``key``."""
    phase = plan.phases[index]
    provided, size = phase.sampling, plan.dataset.size
    assert size is not None  # a run is bound to a plan that says it
    probability = schedule.sampling_probability(plan, phase)
    lot_size = provided.lot_size or 0  # of schemes that have none it is not read
    match provided.scheme:
        case "poisson" | "truncated_poisson":
            most = provided.max_lot_size
            return poisson(key, size=size, probability=probability, max_lot_size=most)
        case "fixed_size":
            return fixed_size(key, size=size, lot_size=lot_size)
        case "shuffled":
            return shuffled(key, size=size, lot_size=lot_size)
        case "cyclic":
            return cyclic(size=size, lot_size=lot_size)
        case "cyclic_poisson":
            groups = provided.groups or 0
            return cyclic_poisson(key, size=size, groups=groups, probability=probability * groups)
        case "b_min_sep":
            return b_min_sep(
                key,
                size=size,
                separation=provided.separation or 0,
                probability=schedule.highest_probability(plan, phase),
            )
        case "balls_in_bins":
            return balls_in_bins(
                key,
                size=size,
                bins=schedule.lots_per_epoch(size, lot_size),
                each_epoch=provided.bins_drawn == "each_epoch",
            )
        case "full_batch":
            return full_batch(size=size)
