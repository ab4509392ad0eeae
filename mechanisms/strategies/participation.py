"""Participation: in which steps of a run one privacy unit may take part, and how much of it.

A pattern is a set of steps. The schemas differ in the patterns that they allow:

=================  =====================================================================
schema             patterns
=================  =====================================================================
``single``         one step
``fixed_epoch``    o, o + b, o + 2b, ...: at most k of them, any first step o
``one_per_epoch``  at most one of the steps 0 ... b - 1, one of b ... 2b - 1, and so on: k epochs
``min_separation`` at most k steps, any two of them at least b apart
=================  =====================================================================

A record may always take part less often, because its contribution to a step may be zero, so only
maximal patterns matter. With T = k·b steps, ``fixed_epoch`` is k passes over the data in one order,
and ``one_per_epoch`` is k passes in an order of their own. Each of their patterns is one of
``min_separation``, with separation b or 1.

The records of a user follow the pattern one by one. A lot of B records has at most B of them, so
that m records fill m/B lots of an epoch (``lots_filled``) if m is larger, and one otherwise.

>>> Participation.fixed_epoch(participations=2, separation=3).max_participations(steps=6)
2
>>> Participation.one_per_epoch(participations=2, epoch=3).separation
1

References: Choquette-Choo, McMahan, Rush and Thakurta, arXiv:2211.06530 (fixed epochs);
Choquette-Choo et al., arXiv:2306.08153 (minimum separation).

``participation_of`` derives the participation of a plan from its sampler:

=================  ==================================================================
scheme             participation of a record
=================  ==================================================================
``cyclic``         ``fixed_epoch``: k = ⌈T/b⌉ epochs of b lots, in the same order
``shuffled``       ``one_per_epoch``: the same, each epoch in an order of its own
``balls_in_bins``  as ``cyclic``, given the bin, which is kept for all epochs
``cyclic_poisson`` the same with b groups: at most once per round of the groups
``full_batch``     ``fixed_epoch`` with b = 1: every step
fresh random lots  the same: it may take part in any of them
``b_min_sep``      ``min_separation`` with the b of the sampler, and k = ⌈T/b⌉
=================  ==================================================================

A participation in the plan must cover that of the sampler; anything else contradicts the sampler
and is refused. ``min_separation`` may cover more, and then costs more, at the upper end only. What
depends on epochs is tighter than any participation that a plan can state, and replaces it.

Reference: docs/theorems/correlated-noise.md, Theorems 8 and 19.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Literal

from affidavit.plan import FIXED_ORDER, FRESH_LOTS, Phase, Plan, Reason, RefusedPlan, schedule

Schema = Literal["single", "fixed_epoch", "one_per_epoch", "min_separation"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Participation:
    """A schema with its k (``participations``) and b (``separation``), both at least 1.

    ``epoch`` is the number of steps of an epoch of ``one_per_epoch``, whose separation is 1.
    ``lots_filled``, at least 1, is the number of lots of an epoch that one unit can fill; the last
    of them may be filled in part.
    """

    schema: Schema
    participations: int = 1
    separation: int = 1
    epoch: int | None = None
    lots_filled: Fraction = Fraction(1)

    def __post_init__(self) -> None:
        if self.participations < 1 or self.separation < 1 or self.turn < 1:
            raise ValueError("participations and separation must be at least 1")
        if self.schema == "single" and self.participations != 1:
            raise ValueError("single participation has one participation")
        if (self.schema == "one_per_epoch") != (self.epoch is not None):
            raise ValueError("one participation per epoch needs its steps, and nothing else does")

    @classmethod
    def single(cls) -> Participation:
        """Return the participation in one step."""
        return cls(schema="single")

    @classmethod
    def fixed_epoch(cls, *, participations: int, separation: int) -> Participation:
        """Return the participation in at most k steps, exactly b apart."""
        return cls(schema="fixed_epoch", participations=participations, separation=separation)

    @classmethod
    def min_separation(cls, *, participations: int, separation: int) -> Participation:
        """Return the participation in at most k steps, at least b apart."""
        return cls(schema="min_separation", participations=participations, separation=separation)

    @classmethod
    def one_per_epoch(
        cls, *, participations: int, epoch: int, lots_filled: Fraction = Fraction(1)
    ) -> Participation:
        """Return the participation in one step of each of k epochs of ``epoch`` steps."""
        return cls(
            schema="one_per_epoch",
            participations=participations,
            epoch=epoch,
            lots_filled=lots_filled,
        )

    @property
    def turn(self) -> int:
        """The steps after which the turn of a record may come again, on average."""
        return self.separation if self.epoch is None else self.epoch

    @property
    def by_separation(self) -> Participation:
        """All patterns of as many steps that are as far apart at least, in one lot each."""
        return self.min_separation(participations=self.participations, separation=self.separation)

    def max_participations(self, steps: int) -> int:
        """Return the most participations of one record in ``steps``: min(k, ⌈T/b⌉)."""
        return min(self.participations, -(-steps // self.turn))

    def squares(self, steps: int) -> Fraction:
        """Return the largest Σ n_t², n_t the share of lot t that one unit fills (Theorem 19)."""
        epochs, rest = divmod(steps, self.turn)
        return epochs * squares_of(self.lots_filled, self.turn) + squares_of(self.lots_filled, rest)


def squares_of(filled: Fraction, lots: int) -> Fraction:
    """Return the largest Σ n_t² over ``lots`` lots, for 0 ≤ n_t ≤ 1 that add up to ``filled``."""
    whole = min(math.floor(filled), lots)
    return whole + (filled - whole) ** 2 * (whole < lots)


def records_per_lot(plan: Plan, index: int) -> int:
    """Return the most records of one privacy unit in a lot of phase ``index``."""
    sampling, records = plan.phases[index].sampling, plan.dataset.records_per_unit
    if sampling.scheme in FIXED_ORDER or sampling.scheme == "fixed_size":
        return min(records, sampling.lot_size or records)
    return min(records, sampling.max_lot_size or records)


def lots_filled(plan: Plan, index: int) -> Fraction:
    """Return how many lots of an epoch one privacy unit can fill."""
    if plan.phases[index].sampling.scheme not in FIXED_ORDER:
        return Fraction(1)
    return Fraction(plan.dataset.records_per_unit, records_per_lot(plan, index))


def participation_of(plan: Plan, index: int, steps: int) -> Participation:
    """Return the participation certified for phase ``index``; raises ``RefusedPlan``."""
    phase = plan.phases[index]
    by_sampler = sampler_participation(plan, index, steps)
    provided = _plan_participation(phase, by_sampler)
    if provided is None or _covers(provided, by_sampler):
        return by_sampler if provided is None or _by_epoch(by_sampler) else provided
    apart = provided.schema != "min_separation" or provided.separation > 1
    if by_sampler.schema == "one_per_epoch" and apart:
        raise RefusedPlan(_reshuffled(plan, index))
    raise RefusedPlan.with_reason(
        code="participation_mismatch",
        pointer=plan.pointer(index, "participation"),
        message=f"{phase.sampling.scheme} sampling over {steps} steps means "
        f"{_describe(by_sampler)}; the plan says {_describe(provided)}.",
        remedy="Leave participation out, or correct it, the steps or the sampling.",
    )


def optimised_participation(plan: Plan, index: int, steps: int) -> Participation:
    """Return what the noise of phase ``index`` is optimised for: the plan's or the sampler's."""
    certified = participation_of(plan, index, steps)
    provided = _plan_participation(plan.phases[index], certified)
    if provided is None and certified.epoch is not None:
        return certified.by_separation
    return provided or certified


def is_replaced(plan: Plan, index: int, steps: int) -> bool:
    """Whether the plan states a participation in phase ``index`` that is not the certified one."""
    provided = plan.phases[index].participation is not None
    return provided and _by_epoch(participation_of(plan, index, steps))


def _by_epoch(turns: Participation) -> bool:
    return turns.epoch is not None or turns.lots_filled > 1


def sampler_participation(plan: Plan, index: int, steps: int) -> Participation:
    """Return the patterns that the sampler of phase ``index`` can draw; raises ``RefusedPlan``."""
    phase = plan.phases[index]
    if phase.sampling.scheme in FRESH_LOTS and phase.noise.kind == "independent":
        raise RefusedPlan(_unsupported_field(plan, index))
    if (apart := phase.sampling.separation) is not None:
        return Participation.min_separation(participations=-(-steps // apart), separation=apart)
    turn = schedule.lots_in_turn(plan, phase)
    epochs, filled = -(-steps // turn), lots_filled(plan, index)
    if phase.sampling.scheme == "shuffled" and epochs > 1 and turn > 1:
        return Participation.one_per_epoch(participations=epochs, epoch=turn, lots_filled=filled)
    return Participation(
        schema="fixed_epoch", participations=epochs, separation=turn, lots_filled=filled
    )


def _plan_participation(phase: Phase, by_sampler: Participation) -> Participation | None:
    """Return the participation in the plan; a missing number is that of the sampler."""
    provided = phase.participation
    if provided is None:
        return None
    if provided.schema_ == "single":
        return Participation.single()
    return Participation(
        schema=provided.schema_,
        participations=provided.participations or by_sampler.participations,
        separation=provided.separation or 1,
    )


def _covers(provided: Participation, by_sampler: Participation) -> bool:
    """Whether ``provided`` allows every pattern of the sampler and does not contradict it."""
    most = by_sampler.participations
    if most == 1:
        return provided.participations == 1 or provided.schema == "min_separation"
    if provided.schema == "min_separation":
        return provided.participations >= most and provided.separation <= by_sampler.separation
    return provided == replace(by_sampler, lots_filled=Fraction(1))


def _describe(turns: Participation) -> str:
    if turns.participations == 1:
        return "one participation"
    if turns.epoch is not None:
        return f"{turns.participations} participations, one in each {turns.epoch} steps"
    apart = "exactly" if turns.schema == "fixed_epoch" else "at least"
    return f"{turns.participations} participations, {apart} {turns.separation} apart"


def _reshuffled(plan: Plan, index: int) -> Reason:
    return Reason(
        code="reshuffled_epochs",
        pointer=plan.pointer(index, "participation"),
        message="each epoch has a new order, so two participations of a record may have any "
        "distance; a sensitivity for a fixed distance would claim too little.",
        remedy="Leave participation out, or keep one order for all epochs (scheme: cyclic).",
    )


def _unsupported_field(plan: Plan, index: int) -> Reason:
    phase = plan.phases[index]
    field = "clip_schedule" if phase.participation is None else "participation"
    return Reason(
        code="unsupported",
        pointer=plan.pointer(index, field),
        message=f"under {phase.sampling.scheme} sampling a record may take part in any steps, and "
        f"each step is accounted by itself, without {field}.",
        remedy=f"Remove {field}; for clip norms that change, write phases.",
    )
