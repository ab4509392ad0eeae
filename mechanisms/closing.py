"""Closing a plan: its open quantities filled in, as a plan that could have been given.

What is certified for a plan that asks for its noise is this closed plan, with the very
multipliers that are printed, so that nothing depends on digits that nobody sees.
"""

from __future__ import annotations

from affidavit.mechanisms.joint import allocate, noise_multiplier, rounded_up
from affidavit.plan.model import Phase, Plan


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


def scaled_noise(phase: Phase, scale: float) -> tuple[float, ...]:
    """The given σ_g of ``phase``, each times ``scale`` and rounded up."""
    return tuple(rounded_up(float(noise_multiplier(release)) * scale) for release in phase.releases)


def _noised(phase: Phase, plan: Plan, joint: float) -> Phase:
    if all(release.has_noise for release in phase.releases):
        return phase
    sigmas = allocate(phase, joint, plan.allocation)
    releases = tuple(
        release.model_copy(update={"noise_multiplier": sigma})
        for release, sigma in zip(phase.releases, sigmas, strict=True)
    )
    return phase.model_copy(update={"releases": releases})
