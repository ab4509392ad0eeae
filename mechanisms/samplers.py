"""Samplers: what a scheme and an adjacency together allow to be claimed.

Each scheme is one function from a phase to what one *participation or step* costs and
how often it happens; a pair without a theorem is refused with the reason. Distances are
in clip norms: replacing a record moves the sum by up to 2C, adding, removing or zeroing
one by up to C.

================  ================  ==================================================
scheme            adjacency         certified as
================  ================  ==================================================
poisson           add_remove,       subsampled Gaussian at q, once a step
                  zero_out
poisson           replace_one       the replace-one pair at q, once a step
poisson           add_remove,       for a user of several records: the mixture over how many
                  zero_out          of them are drawn, once a step
full_batch        any               Gaussian, once a step
shuffled, cyclic  zero_out,         Gaussian, once a participation (k = epochs);
                  replace_one       no amplification is claimed
fixed_size        replace_one       sampled without replacement, once a step
truncated_        any               truncated Poisson at q and the largest lot, once a
poisson                             step; of users too
balls_in_bins     add_remove,       random allocation of 1 of b bins at σ_joint / √E over
                  zero_out          E epochs, once (a partial last epoch after the first
                                    counts in full); with bins_drawn: each_epoch 1 of b at
                                    σ_joint, E times, and what is released of the last
balls_in_bins     replace_one       Gaussian, once an epoch, or as a replaced record or a chain of
                                    neighbours (lowering)
================  ================  ==================================================

That shuffling claims nothing more: given the permutation, a record takes part in k known
steps, so that the run is one Gaussian mechanism with μ = √k / σ_joint; δ(ε) is convex in
the pair, hence mixing over permutations cannot raise it. The same holds given the bins. What
such a run costs at least is that of attacks (docs/theorems/shuffled-lots.md).

Bins may be kept for all epochs or drawn afresh for each: the first is the allocation above,
the second costs no more (docs/theorems/random-allocation.md).

References: docs/theorems/poisson-add-remove.md, poisson-replace-one.md, truncated-poisson.md and
without-replacement.md for what is sampled; arXiv:2210.00597 and arXiv:2403.17673 on shuffled
batches and their accounting; dp_accounting's ``PoissonSampledDpEvent`` and
``SampledWithoutReplacementDpEvent``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from affidavit.plan import (
    MAX_RECORDS,
    Composed,
    Event,
    Gaussian,
    Leaf,
    Phase,
    Plan,
    PoissonSampledGroupGaussian,
    PoissonSubsampledGaussian,
    RandomAllocationGaussian,
    RefusedPlan,
    Repeated,
    ShuffledEpoch,
    SubsampledPair,
    TruncatedPoissonGaussian,
    TruncatedPoissonGroupGaussian,
    WithoutReplacementGaussian,
    WithoutReplacementGroupGaussian,
    schedule,
)

POISSON = (
    "each record enters each lot independently with probability q, and the sum is divided by the "
    "fixed expected lot size, never by the realised one"
)

StepEvent = Callable[[float], Leaf]
"""From σ_joint (noise std over clip norm, all blocks) to one release's event."""
RunEvent = Callable[[float, int], Event]
"""From σ_joint and the steps to the event of the whole phase."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampled:
    """One phase's sampler, certified: what one release costs and how many there are.

    ``times`` maps steps to releases that touch one record, each with ``probability`` where it
    is sampled. ``distance`` is how far one record moves the sum, in clip norms, where the event
    is a plain Gaussian. ``run`` is the whole phase where that is not ``event`` so many ``times``,
    and ``attained`` what one record can do to it where the lots that it is in are drawn and
    the event does not use that. ``attacked`` is what else costs at least something: so many epochs.
    """

    event: StepEvent
    times: Callable[[int], int] = lambda steps: steps
    probability: float | None
    distance: float
    assumption: str
    run: RunEvent | None = None
    attained: RunEvent | None = None
    attacked: Callable[[float, int], tuple[ShuffledEpoch, int]] | None = None


def sample(plan: Plan, index: int) -> Sampled:
    """How phase ``index`` of ``plan`` is sampled; raises ``RefusedPlan``."""
    scheme = plan.phases[index].sampling.scheme
    if scheme in SAMPLERS:
        return SAMPLERS[scheme](plan, index, plan.phases[index])
    raise _refused(
        plan,
        index,
        "unsupported",
        f"the sampling scheme {scheme} is not supported yet.",
        f"Supported: {', '.join(SAMPLERS)}.",
    )


def distance_of(plan: Plan) -> float:
    """How far one unit moves the sum, in clip norms, when nothing is sampled.

    A user's records move it by at most the sum of what each moves (triangle inequality).
    """
    return plan.dataset.records_per_unit * (2.0 if plan.adjacency == "replace_one" else 1.0)


def subsampled_pair(plan: Plan) -> SubsampledPair:
    """The dominating pair of a Poisson sample."""
    return "replace_one" if plan.adjacency == "replace_one" else "add_remove"


def is_amplified(plan: Plan) -> bool:
    """Whether neighbours differ in one record that one of them lacks.

    Balls in bins and cyclic Poisson sampling are proved to amplify nothing else.
    """
    return distance_of(plan) == 1


def _poisson(plan: Plan, index: int, phase: Phase) -> Sampled:
    exact = schedule.sampling_probability(plan, phase)
    probability = schedule.double_up(exact)
    if probability >= 1:
        return _full_batch(plan)
    return Sampled(
        event=_each_record(
            plan,
            index,
            plan.dataset.records_per_unit,
            (PoissonSubsampledGaussian, PoissonSampledGroupGaussian),
            sampling_probability=probability,
            pair=subsampled_pair(plan),
        ),
        probability=probability,
        distance=distance_of(plan),
        assumption=POISSON,
    )


def _each_record(
    plan: Plan, index: int, records: int, kinds: tuple[Any, Any], **fields: Any
) -> StepEvent:
    """A step in which each of a user's ``records`` is drawn by itself; raises ``RefusedPlan``.

    ``kinds`` are the events of one record and of several, with these ``fields``.
    """
    if records > MAX_RECORDS:
        raise _refused(
            plan,
            index,
            "user_level_sampling",
            f"a user has up to {records} records, and sampling them one by one is accounted for "
            f"at most {MAX_RECORDS}.",
            f"Keep at most {MAX_RECORDS} records a user, or sample users: clip each user's sum "
            "once, with contributions_per_user: 1.",
        )
    one, several = kinds
    kind = one if records == 1 else partial(several, records=records)
    return lambda joint: kind(noise_multiplier=joint, **fields)


def _full_batch(plan: Plan) -> Sampled:
    distance = distance_of(plan)
    return Sampled(
        event=lambda joint: Gaussian(noise_multiplier=joint / distance),
        probability=1.0,
        distance=distance,
        assumption="every record is in every lot",
    )


def _fixed_order(plan: Plan, index: int, phase: Phase) -> Sampled:
    if plan.adjacency == "add_remove":
        raise removal_moves_records(plan, index)
    distance = distance_of(plan)
    known = Sampled(
        event=lambda joint: Gaussian(noise_multiplier=joint / distance),
        times=lambda steps: schedule.participations(plan, phase, steps),
        probability=None,
        distance=distance,
        assumption="each record is in exactly one lot of each epoch; no amplification by "
        "shuffling is claimed",
    )
    return _shuffled(known, plan, phase) if phase.sampling.scheme == "shuffled" else known


def _shuffled(known: Sampled, plan: Plan, phase: Phase) -> Sampled:
    """``known`` in a random order each epoch, of which no amplification is claimed.

    A record is in a random lot of each epoch, if in any. Under replace_one all others have the
    opposite gradient, and so has its replacement. Source: docs/theorems/shuffled-lots.md.
    """
    size, lot = plan.dataset.size, phase.sampling.lot_size
    if size is None or lot is None:
        raise ValueError("a valid plan with shuffled lots has a data set size and a lot size")
    lots = schedule.lots_per_epoch(size, lot)
    places = -(-size // lot)
    if places == 1:
        return known
    distance, without = (2.0, 0.0) if plan.adjacency == "replace_one" else (1.0, 1.0)

    def attained(joint: float, steps: int) -> Event:
        epochs, rest = divmod(steps, lots)

        def epoch(released: int) -> Leaf:
            return RandomAllocationGaussian(
                bins=places,
                noise_multiplier=joint / distance,
                released=released if released < places else None,
            )

        parts = [Repeated(event=epoch(lots), count=epochs)] if epochs else []
        return Composed(events=(*parts, epoch(rest)) if rest else tuple(parts))

    def attacked(joint: float, steps: int) -> tuple[ShuffledEpoch, int]:
        released = min(steps, lots)
        epoch = ShuffledEpoch(
            lots=released,
            drawn=released * lot / size * (1 - 2.0**-52),
            noise_multiplier=joint,
            without=without,
        )
        return epoch, steps // released

    return replace(known, attained=attained, attacked=attacked)


def removal_moves_records(plan: Plan, index: int) -> RefusedPlan:
    """Why a fixed order is not certified under add_remove."""
    return _refused(
        plan,
        index,
        "removal_moves_records",
        f"under add_remove a removed record moves the other records of a "
        f"{plan.phases[index].sampling.scheme} run to other lots, so that its effect is not "
        "bounded by its own clip norm.",
        "Write adjacency: zero_out or replace_one, or sample by poisson.",
    )


def _fixed_size(plan: Plan, index: int, phase: Phase) -> Sampled:
    if plan.adjacency != "replace_one":
        raise _refused(
            plan,
            index,
            "fixed_size_needs_replace_one",
            f"lots of fixed size without replacement are not certified under {plan.adjacency}: "
            "removing a record changes every other record's chance of being drawn.",
            "Write adjacency: replace_one, or sample by poisson.",
        )
    size, lot = plan.dataset.size, phase.sampling.lot_size
    if size is None or lot is None:
        raise ValueError("a valid plan with fixed_size has a data set size and a lot size")
    if lot == size:
        return _full_batch(plan)
    records = min(plan.dataset.records_per_unit, size)
    return Sampled(
        event=_each_record(
            plan,
            index,
            records,
            (WithoutReplacementGaussian, WithoutReplacementGroupGaussian),
            dataset_size=size,
            sample_size=lot,
        ),
        probability=lot / size,
        distance=2.0 * records,
        assumption="each lot is a fresh uniform sample of exactly the lot size, without "
        "replacement",
    )


def _truncated_poisson(plan: Plan, index: int, phase: Phase) -> Sampled:
    size, largest = plan.dataset.size, phase.sampling.max_lot_size
    if size is None or largest is None:
        raise ValueError("a valid plan with truncated_poisson has a data set and a largest lot")
    adds, records = plan.adjacency == "add_remove", plan.dataset.records_per_unit
    if not adds:
        records = min(records, size)
    if largest > size + (records - 1 if adds else 0):
        # No lot of any neighbouring data set is ever cut.
        return _poisson(plan, index, phase)
    probability = schedule.double_up(schedule.sampling_probability(plan, phase))
    if probability >= 1:
        raise _refused(
            plan,
            index,
            "unsupported",
            "every record is drawn and every lot is cut: that is a lot of fixed size.",
            "Write scheme: fixed_size with this lot size.",
        )
    most = "one more" if records == 1 else f"{records} more"
    return Sampled(
        event=_each_record(
            plan,
            index,
            records,
            (TruncatedPoissonGaussian, TruncatedPoissonGroupGaussian),
            dataset_size=size,
            sampling_probability=probability,
            max_lot_size=largest,
            neighbours=plan.adjacency,
        ),
        probability=probability,
        distance=distance_of(plan),
        assumption="each record enters each sample independently with probability q; a sample of "
        f"more than {largest} records is cut to a uniformly random part of exactly {largest}, and "
        "the sum is divided by the fixed expected lot size, never by the realised one; the data "
        f"set has at most {size} records, its neighbours at most {most}",
    )


def _balls_in_bins(plan: Plan, phase: Phase) -> Sampled:
    size, lot = plan.dataset.size, phase.sampling.lot_size
    if size is None or lot is None:
        raise ValueError("a valid plan with balls_in_bins has a data set size and a lot size")
    bins, distance = schedule.lots_per_epoch(size, lot), distance_of(plan)
    amplified = bins > 1 and is_amplified(plan)
    drawn = "afresh for each epoch"
    if phase.sampling.bins_drawn != "each_epoch":
        # Phases are composed as if their draws were independent, so that they have to be.
        several = len(plan.phases) > 1
        within = "phase, and anew for each phase," if several else "run"
        drawn = f"for the whole {within} or {drawn}"

    def epochs(steps: int) -> int:
        return schedule.participations(plan, phase, steps)

    def allocation(joint: float, steps: int) -> Event:
        whole, rest = divmod(steps, bins)
        first = RandomAllocationGaussian(bins=bins, noise_multiplier=joint, released=rest or None)
        if not whole:
            return first
        if phase.sampling.bins_drawn == "each_epoch":
            once = RandomAllocationGaussian(bins=bins, noise_multiplier=joint)
            passes = Repeated(event=once, count=whole)
            return Composed(events=(passes, first)) if rest else passes
        return RandomAllocationGaussian(
            bins=bins,
            # Two roundings, of the root and of the quotient; both are rounded away.
            noise_multiplier=joint / math.sqrt(epochs(steps)) * (1 - 4 * 2.0**-53),
            attained_at=joint / math.sqrt(whole) * (1 + 4 * 2.0**-53) if rest else None,
        )

    return Sampled(
        event=lambda joint: Gaussian(noise_multiplier=joint / distance),
        times=epochs,
        probability=None,
        distance=distance,
        assumption=f"each record is thrown into one of {bins} lots of an epoch, uniformly and "
        f"independently of all other records and of the data, {drawn}; lots keep "
        "the size they come to, and the sum is divided by the fixed expected lot size, never by "
        "the realised one",
        run=allocation if amplified else None,
        attained=allocation if bins > 1 and not amplified else None,
    )


def _refused(plan: Plan, index: int, code: str, message: str, remedy: str) -> RefusedPlan:
    return RefusedPlan.with_reason(
        code=code,
        pointer=plan.pointer(index, "sampling", "scheme"),
        message=message,
        remedy=remedy,
    )


SAMPLERS: dict[str, Callable[[Plan, int, Phase], Sampled]] = {
    "poisson": _poisson,
    "truncated_poisson": _truncated_poisson,
    "full_batch": lambda plan, _index, _phase: _full_batch(plan),
    "shuffled": _fixed_order,
    "cyclic": _fixed_order,
    "fixed_size": _fixed_size,
    "balls_in_bins": lambda plan, _index, phase: _balls_in_bins(plan, phase),
}
"""By scheme, for independent noise; ``correlated_draws`` has those for correlated noise."""
