"""Resolving a plan: its open quantities filled in, as a plan that could have been given.

A plan that solves for its noise is certified as this resolved plan, with exactly the printed
multipliers, so nothing depends on digits that are not shown.
"""

from __future__ import annotations

from collections.abc import Sequence
from decimal import ROUND_FLOOR, Context

from affidavit.mechanisms.joint_gaussian import allocate, noise_multiplier, rounded_up
from affidavit.plan import Phase, Plan

PROBABILITY_DIGITS = 7
"""Significant digits of a sampling probability that is solved for."""
MIN_PROBABILITY = 1e-9
"""The placeholder for an open sampling probability."""


def with_noise(plan: Plan, joint: float) -> Plan:
    """Return ``plan`` with σ_g of every open phase such that its σ_joint is at least ``joint``."""
    multipliers = [
        allocate(phase, joint, plan.allocation) if phase.asks_for_noise else None
        for phase in plan.phases
    ]
    return _with_multipliers(plan, multipliers)


def with_scaled_noise(plan: Plan, scale: float) -> Plan:
    """Return ``plan`` with every given σ_g times ``scale``, rounded up as it is printed."""
    return _with_multipliers(plan, [scaled_noise(phase, scale) for phase in plan.phases])


def scaled_noise(phase: Phase, scale: float) -> tuple[float, ...]:
    """Return the given σ_g of ``phase``, each times ``scale`` and rounded up."""
    return tuple(rounded_up(float(noise_multiplier(release)) * scale) for release in phase.releases)


def with_steps(plan: Plan, steps: int) -> Plan:
    """Return ``plan`` with its open length set to ``steps``."""
    phases = tuple(
        phase.model_copy(update={"steps": steps}) if phase.asks_for_steps else phase
        for phase in plan.phases
    )
    return plan.model_copy(update={"phases": phases})


def with_lot_size(plan: Plan, lot_size: int) -> Plan:
    """Return ``plan`` with its open lot size set to ``lot_size`` records."""
    return _with_sampling(plan, {"lot_size": lot_size})


def with_probability(plan: Plan, probability: float) -> Plan:
    """Return ``plan`` with its open sampling probability set to at most ``probability``."""
    return _with_sampling(plan, {"probability": rounded_down(probability)})


def with_placeholder_sampling(plan: Plan) -> Plan:
    """Return ``plan`` with an open lot size or probability set to the least one."""
    if plan.asks_for_lot_size:
        return with_lot_size(plan, 1)
    return with_probability(plan, MIN_PROBABILITY) if plan.asks_for_probability else plan


def rounded_down(probability: float) -> float:
    """Return ``probability`` rounded down to ``PROBABILITY_DIGITS`` significant digits."""
    context = Context(prec=PROBABILITY_DIGITS, rounding=ROUND_FLOOR)
    return float(str(context.create_decimal(repr(probability))))


def _with_sampling(plan: Plan, changes: dict[str, float]) -> Plan:
    (phase,) = plan.phases
    sampling = phase.sampling.model_copy(update=changes)
    return plan.model_copy(update={"phases": (phase.model_copy(update={"sampling": sampling}),)})


def _with_multipliers(plan: Plan, multipliers: Sequence[Sequence[float] | None]) -> Plan:
    """Return ``plan`` with these σ_g in each phase; None leaves a phase unchanged."""
    required = {
        (index, release.name): sigma
        for index, (phase, sigmas) in enumerate(zip(plan.phases, multipliers, strict=True))
        if sigmas is not None
        for release, sigma in zip(phase.releases, sigmas, strict=True)
    }
    return plan.with_noise_multipliers(lambda index, release: required.get((index, release.name)))
