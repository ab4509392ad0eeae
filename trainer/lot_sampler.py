"""Lots: the sampler of each phase of a plan, with the keys that its scheme needs.

Where every step draws its lot afresh (Poisson, truncated, fixed size) the draw of step t has a
key of its own, from the ratchet: a checkpoint says nothing of lots that were drawn. Where
something is drawn for longer (permutations, bins, groups) the phase has one key, which the
checkpoint keeps.

>>> from affidavit.plan.parse import plan_from
>>> plan = plan_from({"version": 1, "adjacency": "zero_out", "steps": 3, "dataset": {"size": 9},
...     "sampling": {"scheme": "cyclic", "lot_size": 3}, "target": {"delta": 1e-5},
...     "releases": [{"name": "all", "clip_norm": 0.5, "noise_multiplier": 4}]})
>>> LotSampler(plan, 0, bytes(32)).of(1, bytes(32)).tolist()
[3, 4, 5]
"""

from __future__ import annotations

from torch import Tensor

from affidavit.plan import Plan, schedule
from affidavit.trainer import sampling
from affidavit.trainer.noise.chacha import derived_key

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


def sampler_of(plan: Plan, index: int, key: bytes) -> sampling.Sampler:
    """The sampler of phase ``index`` under ``key``."""
    phase = plan.phases[index]
    provided, size = phase.sampling, plan.dataset.size
    assert size is not None  # a run is bound to a plan that says it
    probability = schedule.sampling_probability(plan, phase)
    lot_size = provided.lot_size or 0  # of schemes that have none it is not read
    match provided.scheme:
        case "poisson":
            return sampling.poisson(key, size=size, probability=probability)
        case "truncated_poisson":
            return sampling.truncated_poisson(
                key, size=size, probability=probability, max_lot_size=provided.max_lot_size or 0
            )
        case "fixed_size":
            return sampling.fixed_size(key, size=size, lot_size=lot_size)
        case "shuffled":
            return sampling.shuffled(key, size=size, lot_size=lot_size)
        case "cyclic":
            return sampling.cyclic(size=size, lot_size=lot_size)
        case "cyclic_poisson":
            groups = provided.groups or 0
            return sampling.cyclic_poisson(
                key, size=size, groups=groups, probability=probability * groups
            )
        case "balls_in_bins":
            return sampling.balls_in_bins(
                key,
                size=size,
                bins=schedule.lots_per_epoch(size, lot_size),
                each_epoch=provided.bins_drawn == "each_epoch",
            )
        case "full_batch":
            return sampling.full_batch(size=size)
