"""Closing a plan: its open quantities filled in, as a plan that could have been given.

What is certified for a plan that asks for its noise is this closed plan, with the very
multipliers that are printed, so that nothing depends on digits that nobody sees.
"""

from __future__ import annotations

from collections.abc import Sequence
from decimal import ROUND_FLOOR, Context

from affidavit.mechanisms.joint_gaussian import allocate, noise_multiplier, rounded_up
from affidavit.plan import Phase, Plan

DIGITS = 7
"""Significant digits of a sampling probability that is solved for."""
MIN_PROBABILITY = 1e-9
"""The sampling probability that stands in for an open one."""


def with_noise(plan: Plan, joint: float) -> Plan:
    """``plan`` with σ_g of every open phase such that its σ_joint is at least ``joint``."""
    return plan.model_copy(
        update={"phases": tuple(_noised(phase, plan, joint) for phase in plan.phases)}
    )


def with_steps(plan: Plan, steps: int) -> Plan:
    """``plan`` with its open length set to ``steps``."""
    return plan.model_copy(
        update={
            "phases": tuple(
                phase.model_copy(update={"steps": steps})
                if phase.steps is None and phase.epochs is None
                else phase
                for phase in plan.phases
            )
        }
    )


def with_lot_size(plan: Plan, lot_size: int) -> Plan:
    """``plan`` with its open lot size set to ``lot_size`` records."""
    return _sampled(plan, {"lot_size": lot_size})


def with_probability(plan: Plan, probability: float) -> Plan:
    """``plan`` with its open sampling probability set to at most ``probability``."""
    return _sampled(plan, {"probability": rounded_down(probability)})


def with_placeholder_sampling(plan: Plan) -> Plan:
    """``plan`` with the least lot or probability for one that is open."""
    if plan.asks_for_lot_size:
        return with_lot_size(plan, 1)
    return with_probability(plan, MIN_PROBABILITY) if plan.asks_for_probability else plan


def with_scaled_noise(plan: Plan, scale: float) -> Plan:
    """``plan`` with every given σ_g times ``scale`` and rounded up, as it is printed."""
    return plan.model_copy(
        update={"phases": tuple(_rescaled(phase, scale) for phase in plan.phases)}
    )


def scaled_noise(phase: Phase, scale: float) -> tuple[float, ...]:
    """The given σ_g of ``phase``, each times ``scale`` and rounded up."""
    return tuple(rounded_up(float(noise_multiplier(release)) * scale) for release in phase.releases)


def _rescaled(phase: Phase, scale: float) -> Phase:
    return _with_sigmas(phase, scaled_noise(phase, scale))


def _sampled(plan: Plan, changes: dict[str, float]) -> Plan:
    (phase,) = plan.phases
    sampling = phase.sampling.model_copy(update=changes)
    return plan.model_copy(update={"phases": (phase.model_copy(update={"sampling": sampling}),)})


def rounded_down(probability: float) -> float:
    """``probability`` as the greatest decimal of ``DIGITS`` digits that is not above it."""
    rounded = Context(prec=DIGITS, rounding=ROUND_FLOOR).create_decimal(repr(probability))
    return float(str(rounded))


def _noised(phase: Phase, plan: Plan, joint: float) -> Phase:
    if all(release.has_noise for release in phase.releases):
        return phase
    return _with_sigmas(phase, allocate(phase, joint, plan.allocation))


def _with_sigmas(phase: Phase, sigmas: Sequence[float]) -> Phase:
    releases = tuple(
        release.model_copy(update={"noise_multiplier": sigma, "noise_std": None})
        for release, sigma in zip(phase.releases, sigmas, strict=True)
    )
    return phase.model_copy(update={"releases": releases})
