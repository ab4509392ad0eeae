"""Participation: in which steps of a run one record may take part.

A pattern is a set of steps. The schemas differ in the patterns that they allow:

=================  =====================================================================
schema             patterns
=================  =====================================================================
``single``         one step
``fixed_epoch``    o, o + b, o + 2b, ...: at most k of them, any first step o
``min_separation`` at most k steps, any two of them at least b apart
=================  =====================================================================

A record may always take part less often, because its contribution to a step may be zero, so only
maximal patterns matter. With T = k·b steps, ``fixed_epoch`` is k passes over the data in one order.
Every ``fixed_epoch`` pattern is a ``min_separation`` pattern.

>>> Participation.fixed_epoch(participations=2, separation=3).max_participations(steps=6)
2

References: Choquette-Choo, McMahan, Rush and Thakurta, arXiv:2211.06530 (fixed epochs);
Choquette-Choo et al., arXiv:2306.08153 (minimum separation).

``participation_of`` derives the participation of a plan from its sampler:

=================  ==================================================================
scheme             participation of a record
=================  ==================================================================
``cyclic``         ``fixed_epoch``: k = ⌈T/b⌉ epochs of b lots, in the same order
``balls_in_bins``  the same, given the bin, which is kept for all epochs
``cyclic_poisson`` the same with b groups: at most once per round of the groups
``full_batch``     ``fixed_epoch`` with b = 1: every step
fresh random lots  the same: it may take part in any of them
``b_min_sep``      ``min_separation`` with the b of the sampler, and k = ⌈T/b⌉
``shuffled``       a new order each epoch, so the last lot of an epoch may be followed by
                   the first of the next: ``min_separation`` with b = 1 and k epochs. A
                   (k, b) formula assumes something else, so the plan must state it
=================  ==================================================================

A participation in the plan is used if it covers that of the sampler; ``min_separation`` may cover
more, and then costs more. Anything else contradicts the sampler and is refused.

Reference: docs/theorems/correlated-noise.md, Theorem 8.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from affidavit.plan import FRESH_LOTS, Phase, Plan, Reason, RefusedPlan, schedule

Schema = Literal["single", "fixed_epoch", "min_separation"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Participation:
    """A schema with its k (``participations``) and b (``separation``), both at least 1."""

    schema: Schema
    participations: int = 1
    separation: int = 1

    def __post_init__(self) -> None:
        if self.participations < 1 or self.separation < 1:
            raise ValueError("participations and separation must be at least 1")
        if self.schema == "single" and self.participations != 1:
            raise ValueError("single participation has one participation")

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

    def max_participations(self, steps: int) -> int:
        """Return the most participations of one record in ``steps``: min(k, ⌈T/b⌉)."""
        return min(self.participations, -(-steps // self.separation))


def participation_of(plan: Plan, index: int, steps: int) -> Participation:
    """Return the participation certified for phase ``index``; raises ``RefusedPlan``."""
    phase = plan.phases[index]
    by_sampler = _sampler_participation(plan, index, steps)
    provided = _plan_participation(phase, by_sampler)
    if phase.sampling.scheme == "shuffled" and by_sampler.participations > 1:
        if provided is None or provided.schema != "min_separation" or provided.separation > 1:
            raise RefusedPlan(_reshuffled(plan, index, by_sampler.participations))
    elif provided is None:
        return by_sampler
    assert provided is not None
    if _covers(provided, by_sampler):
        return provided
    raise RefusedPlan.with_reason(
        code="participation_mismatch",
        pointer=plan.pointer(index, "participation"),
        message=f"{phase.sampling.scheme} sampling over {steps} steps means "
        f"{_describe(by_sampler)}; the plan says {_describe(provided)}.",
        remedy="Leave participation out, or correct it, the steps or the sampling.",
    )


def _sampler_participation(plan: Plan, index: int, steps: int) -> Participation:
    phase = plan.phases[index]
    if phase.sampling.scheme in FRESH_LOTS and phase.noise.kind == "independent":
        raise RefusedPlan(_unsupported_field(plan, index))
    if (apart := phase.sampling.separation) is not None:
        return Participation.min_separation(participations=-(-steps // apart), separation=apart)
    turn = schedule.lots_in_turn(plan, phase)
    epochs = -(-steps // turn)
    if phase.sampling.scheme == "shuffled":
        return Participation.min_separation(participations=epochs, separation=1)
    return Participation.fixed_epoch(participations=epochs, separation=turn)


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
    return provided == by_sampler


def _describe(turns: Participation) -> str:
    if turns.participations == 1:
        return "one participation"
    apart = "exactly" if turns.schema == "fixed_epoch" else "at least"
    return f"{turns.participations} participations, {apart} {turns.separation} apart"


def _reshuffled(plan: Plan, index: int, epochs: int) -> Reason:
    return Reason(
        code="reshuffled_epochs",
        pointer=plan.pointer(index, "participation"),
        message="each epoch has a new order, so two participations of a record may have any "
        "distance; a sensitivity for a fixed distance would claim too little.",
        remedy="Write participation: {schema: min_separation, participations: "
        f"{epochs}, separation: 1}}, or keep one order for all epochs (scheme: cyclic).",
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
