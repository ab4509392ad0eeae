"""Solving: what a plan leaves open, and the noise that its target requires.

Both are one-sided searches with one accountant, over the proved upper bound alone.
"""

from __future__ import annotations

from collections.abc import Callable

from affidavit.accountants.calibration import least_noise, most_steps
from affidavit.accountants.protocol import Accountant
from affidavit.mechanisms.closing import with_noise, with_steps
from affidavit.mechanisms.lowering import Lowered
from affidavit.plan.model import Plan

UpperEpsilon = Callable[[float, int | None], float]


def close(lowered: Lowered, engine: Accountant) -> Plan:
    """The plan with its noise or its steps filled in, if it leaves them open.

    Raises ``AccountantError`` where the engine does not cover the run, and ``NoSolution``
    where the open quantity has no value that meets the target.
    """
    plan = lowered.plan
    if plan.asks_for_steps:
        upper, target = _upper_epsilon(lowered, engine)
        return with_steps(plan, most_steps(lambda steps: upper(1.0, steps), target))
    if plan.asks_for_noise:
        return with_noise(plan, required_scale(lowered, engine))
    return plan


def required_scale(lowered: Lowered, engine: Accountant) -> float:
    """The least scale of the noise (see ``Lowered.event``) that meets the full target."""
    upper, target = _upper_epsilon(lowered, engine)
    return least_noise(lambda scale: upper(scale, None), target)


def _upper_epsilon(lowered: Lowered, engine: Accountant) -> tuple[UpperEpsilon, float]:
    epsilon, delta = lowered.plan.target.epsilon, lowered.plan.target.delta
    if epsilon is None or delta is None:
        raise ValueError("solving needs a full target")

    def upper(scale: float, steps: int | None) -> float:
        return engine.curve(lowered.event(scale=scale, steps=steps)).epsilon(delta).upper

    return upper, epsilon
