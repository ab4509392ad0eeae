"""What mistakes about correlated noise need to know of a phase's strategy.

The strategy is built here even for plans that are refused, because a refused plan is
where most of these mistakes are made. Its numbers explain; none of them is certified.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from affidavit.mechanisms import correlation as correlated
from affidavit.mechanisms.strategies import Participation, Setting, Strategy, build
from affidavit.plan import FIXED_ORDER, Phase, Plan, RefusedPlan, schedule


@dataclass(frozen=True, kw_only=True, slots=True)
class Correlation:
    """A strategy's numbers, all in clip norms.

    ``sensitivity`` is that of the run, ``column`` that of one participation (the largest
    column norm of C = N⁻¹), ``injected`` the largest column norm of N itself, and
    ``participations`` the most steps in which one record takes part.
    """

    kind: str
    sensitivity: float
    column: float
    injected: float
    participations: int


def correlation(plan: Plan, index: int, steps: int) -> Correlation | None:
    """The numbers of phase ``index``; None where its noise is independent or not built."""
    phase = plan.phases[index]
    if phase.noise.kind == "independent":
        return None
    try:
        strategy, takes_part = _streamed(plan, index, steps)
        return Correlation(
            kind=phase.noise.kind,
            sensitivity=strategy.sensitivity(takes_part).value,
            column=strategy.sensitivity(Participation.single()).value,
            injected=_column_norm_of_noise(strategy),
            participations=takes_part.most(steps),
        )
    except (LookupError, ValueError):
        return None


def _streamed(plan: Plan, index: int, steps: int) -> tuple[Strategy, Participation]:
    """The strategy and its participation, as certified or as a refused plan suggests them."""
    certified = correlated.Correlation(plan=plan, index=index)
    try:
        found = certified.at(steps)
        return found.strategy, found.participation
    except RefusedPlan:
        phase = plan.phases[index]
        takes_part = _participation(plan, phase, steps)
        setting = Setting(steps=steps, participation=takes_part, workload=certified.workload)
        return build(phase.noise, setting), takes_part


def _participation(plan: Plan, phase: Phase, steps: int) -> Participation:
    """When a record takes part, as the plan says or as its sampler suggests."""
    given = phase.participation
    if given is not None:
        return Participation(
            schema=given.schema_,
            participations=given.participations or 1,
            separation=given.separation or 1,
        )
    if phase.sampling.scheme in FIXED_ORDER and plan.dataset.size and phase.sampling.lot_size:
        lots = schedule.lots_per_epoch(plan.dataset.size, phase.sampling.lot_size)
        times = math.ceil(steps / lots)
        if phase.sampling.scheme == "cyclic" or times == 1:
            return Participation.fixed_epoch(participations=times, separation=lots)
        return Participation.min_separation(participations=times, separation=1)
    if schedule.sampling_probability(plan, phase) >= 1:
        return Participation.min_separation(participations=steps, separation=1)
    return Participation.single()


def _column_norm_of_noise(strategy: Strategy) -> float:
    """The largest column norm of N; its first column is the longest where N is Toeplitz."""
    first = strategy.noise_coefficients
    if first is not None:
        return float(np.linalg.norm(first))
    return float(np.linalg.norm(strategy.noise_matrix(), axis=0).max())
