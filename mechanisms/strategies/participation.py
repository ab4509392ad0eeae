"""Participation: in which steps of a run one record may take part.

A pattern is a set of steps. The schemas differ in which patterns they allow:

=================  =====================================================================
schema             patterns
=================  =====================================================================
``single``         one step
``fixed_epoch``    o, o + b, o + 2b, ...: at most k of them, any first step o
``min_separation`` at most k steps, any two of them at least b apart
=================  =====================================================================

A record may always take part less often, because its contribution to a step may be zero;
only maximal patterns matter. With T = k·b steps, ``fixed_epoch`` is k passes over the data
in one order. Every ``fixed_epoch`` pattern is a ``min_separation`` pattern.

>>> Participation.fixed_epoch(participations=2, separation=3).most(steps=6)
2

References: Choquette-Choo, McMahan, Rush and Thakurta, arXiv:2211.06530 (fixed epochs);
Choquette-Choo et al., arXiv:2306.08153 (minimum separation).

``participation_of`` reads a plan's participation from its sampler:

=================  ==================================================================
scheme             participation of a record
=================  ==================================================================
``cyclic``         ``fixed_epoch``: k = ⌈T/b⌉ epochs, b lots an epoch, the same order
``balls_in_bins``  the same, given the record's bin, which is kept for all epochs
``cyclic_poisson`` the same with b groups: at most once in each round of the groups
``full_batch``     ``fixed_epoch`` with b = 1: every step
fresh random lots  the same: it may take part in any of them
``b_min_sep``      ``min_separation`` with the sampler's b, and k = ⌈T/b⌉
``shuffled``       a new order each epoch: the last lot of one epoch may be followed by
                   the first of the next, so ``min_separation`` with b = 1, and k epochs.
                   This is not what a (k, b) formula assumes, so the plan must say it
=================  ==================================================================

What the plan gives is taken when it covers what the sampler does; ``min_separation`` may say
more than that, and then costs more. Anything else contradicts the sampler and is refused.

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
        """Every record takes part in one step."""
        return cls(schema="single")

    @classmethod
    def fixed_epoch(cls, *, participations: int, separation: int) -> Participation:
        """At most k steps, exactly b apart."""
        return cls(schema="fixed_epoch", participations=participations, separation=separation)

    @classmethod
    def min_separation(cls, *, participations: int, separation: int) -> Participation:
        """At most k steps, at least b apart."""
        return cls(schema="min_separation", participations=participations, separation=separation)

    def most(self, steps: int) -> int:
        """The most participations of one record in a run of ``steps``: min(k, ⌈T/b⌉)."""
        return min(self.participations, -(-steps // self.separation))


def participation_of(plan: Plan, index: int, steps: int) -> Participation:
    """The participation certified for ``steps`` of phase ``index``; raises ``RefusedPlan``."""
    phase = plan.phases[index]
    by_sampler = _by_sampler(plan, index, steps)
    provided = _given(phase, by_sampler)
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
        f"{_words(by_sampler)}; the plan says {_words(provided)}.",
        remedy="Leave participation out, or correct it, the steps or the sampling.",
    )


def _by_sampler(plan: Plan, index: int, steps: int) -> Participation:
    phase = plan.phases[index]
    if phase.sampling.scheme in FRESH_LOTS and phase.noise.kind == "independent":
        raise RefusedPlan(_no_turns(plan, index))
    if (apart := phase.sampling.separation) is not None:
        return Participation.min_separation(participations=-(-steps // apart), separation=apart)
    turn = schedule.lots_in_turn(plan, phase)
    epochs = -(-steps // turn)
    if phase.sampling.scheme == "shuffled":
        return Participation.min_separation(participations=epochs, separation=1)
    return Participation.fixed_epoch(participations=epochs, separation=turn)


def _given(phase: Phase, by_sampler: Participation) -> Participation | None:
    """What the plan says; the participations that it leaves out are the sampler's."""
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


def _covers(given: Participation, by_sampler: Participation) -> bool:
    """Whether every pattern of the sampler is one of those given, and nothing contradicts."""
    most = by_sampler.participations
    if most == 1:
        return given.participations == 1 or given.schema == "min_separation"
    if given.schema == "min_separation":
        return given.participations >= most and given.separation <= by_sampler.separation
    return given == by_sampler


def _words(turns: Participation) -> str:
    if turns.participations == 1:
        return "one participation"
    apart = "exactly" if turns.schema == "fixed_epoch" else "at least"
    return f"{turns.participations} participations, {apart} {turns.separation} apart"


def _reshuffled(plan: Plan, index: int, epochs: int) -> Reason:
    return Reason(
        code="reshuffled_epochs",
        pointer=plan.pointer(index, "participation"),
        message="the order is drawn anew each epoch, so that two turns of a record may come at "
        "any distance; sensitivities for a fixed distance would claim too little.",
        remedy="Write participation: {schema: min_separation, participations: "
        f"{epochs}, separation: 1}}, or keep one order for all epochs (scheme: cyclic).",
    )


def _no_turns(plan: Plan, index: int) -> Reason:
    phase = plan.phases[index]
    field = "clip_schedule" if phase.participation is None else "participation"
    return Reason(
        code="unsupported",
        pointer=plan.pointer(index, field),
        message=f"under {phase.sampling.scheme} sampling a record may take part in any steps, and "
        f"each step is accounted by itself, without {field}.",
        remedy=f"Remove {field}; for clip norms that change, write phases.",
    )
