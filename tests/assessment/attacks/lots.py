"""How many records of a unit, and how many others, are in each lot: the samplers in numpy.

``test_lots.py`` holds each of them to the sampler that the trainer runs. Each returns an array of
shape (runs, steps, 2), with the numbers of the unit's records and of other records.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from affidavit.plan import Plan, schedule

Counts = NDArray[np.int64]
FRESH = ("poisson", "truncated_poisson", "fixed_size", "full_batch")
"""Schemes whose steps are drawn independently."""


def draw_lots(
    plan: Plan,
    index: int,
    steps: int,
    runs: int,
    source: np.random.Generator,
    *,
    records: int = 1,
    others: int | None = None,
    places: Sequence[int] = (),
) -> Counts:
    """Return the lots of phase ``index`` with ``records`` of the unit among ``others``.

    In a fixed order the unit's records are at the ``places``, and in groups they are of the group
    ``places[0]``.
    """
    phase = plan.phases[index]
    sampling, scheme = phase.sampling, phase.sampling.scheme
    q = float(schedule.sampling_probability(plan, phase))
    if others is None:
        others = max(0, (plan.dataset.size or records) - records)
    size, shape = records + others, (runs, steps)
    turn = schedule.lots_in_turn(plan, phase)
    if scheme == "full_batch":
        return _pair(np.full(shape, records), np.full(shape, others))
    if scheme in ("poisson", "truncated_poisson"):
        own, rest = source.binomial(records, q, shape), source.binomial(others, q, shape)
        if scheme == "truncated_poisson":
            largest = sampling.max_lot_size or 0
            drawn = own + rest
            kept = source.hypergeometric(own, rest, np.minimum(largest, drawn))
            own, rest = kept, np.minimum(drawn, largest) - kept
        return _pair(own, rest)
    lot = sampling.lot_size or 0
    if scheme == "fixed_size":
        own = source.hypergeometric(records, others, lot, shape)
        return _pair(own, lot - own)
    if scheme == "cyclic":
        members = np.bincount(np.array(places) // lot, minlength=-(-size // lot))[:turn]
        own = np.broadcast_to(members[np.arange(steps) % turn], shape)
        return _pair(own, lot - own)
    if scheme == "shuffled":
        own = np.zeros(shape, dtype=np.int64)
        for epoch in range(-(-steps // turn)):
            if records == 1:
                order = source.integers(size, size=(runs, 1))
            else:
                order = source.random((runs, size)).argsort(axis=1)
            for record in range(records):
                at = epoch * turn + order[:, record] // lot
                inside = (at < steps) & (at < (epoch + 1) * turn)
                np.add.at(own, (np.flatnonzero(inside), at[inside]), 1)
        return _pair(own, lot - own)
    if scheme == "balls_in_bins":
        own = np.zeros(shape, dtype=np.int64)
        kept = sampling.bins_drawn != "each_epoch"
        for _ in range(records):
            place = source.integers(turn, size=(runs, 1 if kept else -(-steps // turn)))
            own += np.repeat(place, steps if kept else turn, axis=1)[:, :steps] == (
                np.arange(steps) % turn
            )
        return _pair(own, source.binomial(others, 1 / turn, shape))
    if scheme == "random_allocation":
        taken = sampling.participations or 0
        own = np.zeros(shape, dtype=np.int64)
        for _ in range(records):
            own += source.random(shape).argsort(axis=1) < taken
        return _pair(own, source.binomial(others, taken / steps, shape))
    if scheme == "cyclic_poisson":
        mine = np.arange(steps) % turn == places[0]
        own = source.binomial(records, q * turn, shape) * mine
        return _pair(own, source.binomial(others, q, shape))
    if scheme == "b_min_sep":
        return _pair(_separated(plan, index, shape, source, records), np.zeros(shape, np.int64))
    raise NotImplementedError(scheme)


def _separated(
    plan: Plan, index: int, shape: tuple[int, int], source: np.random.Generator, records: int
) -> Counts:
    phase = plan.phases[index]
    apart = phase.sampling.separation or 1
    p = float(schedule.highest_probability(plan, phase))
    own = np.zeros(shape, dtype=np.int64)
    for _ in range(records):
        # After many steps a wait of 1, 2, ... has probability q each, one participation's share.
        drawn = source.random(shape[0]) / (p / (1 + (apart - 1) * p))
        wait = np.where(drawn < apart - 1, np.floor(drawn) + 1, 0).astype(np.int64)
        for step in range(shape[1]):
            taken = (wait == 0) & (source.random(shape[0]) < p)
            own[:, step] += taken
            wait = np.where(taken, apart - 1, np.maximum(wait - 1, 0))
    return own


def _pair(own: Counts, others: Counts) -> Counts:
    return np.stack([own, np.broadcast_to(others, own.shape)], axis=2)
