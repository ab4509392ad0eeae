"""Solving: what a plan leaves open, found with one accountant and put into the plan.

The answer is a plan with nothing open, the one that is then assessed; and, when the plan
has a full target, the least factor on its noise that meets it (the noise it *requires*).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from affidavit.accountants.calibration import least_noise, most_steps
from affidavit.accountants.protocol import Accountant, NoSolution
from affidavit.mechanisms.closing import with_noise, with_steps
from affidavit.mechanisms.lowering import Lowered
from affidavit.plan.model import Plan


@dataclass(frozen=True, kw_only=True, slots=True)
class Solved:
    """A closed plan; ``required_scale`` times its own noise meets the target.

    ``required_scale`` is None where there is no full target, or where no noise meets it.
    """

    plan: Plan
    required_scale: float | None


def solve(lowered: Lowered, accountant: Accountant) -> Solved:
    """Fill in the noise or the steps that ``lowered.plan`` leaves open.

    Raises ``AccountantError`` where the accountant does not cover the run, and
    ``NoSolution`` where the open quantity has no value that meets the target.
    """
    plan = lowered.plan
    epsilon, delta = plan.target.epsilon, plan.target.delta
    if epsilon is None or delta is None:
        return Solved(plan=plan, required_scale=None)

    def upper(scale: float = 1.0, steps: int | None = None) -> float:
        return accountant.curve(lowered.event(scale=scale, steps=steps)).epsilon(delta).upper

    if plan.asks_for_steps:
        steps = most_steps(lambda length: upper(steps=length), epsilon)
        return Solved(plan=with_steps(plan, steps), required_scale=None)
    if plan.asks_for_noise:
        joint = least_noise(upper, epsilon)
        return Solved(plan=with_noise(plan, joint), required_scale=1.0)
    return Solved(plan=plan, required_scale=_required_scale(upper, epsilon))


def _required_scale(upper: Callable[[float], float], epsilon: float) -> float | None:
    try:
        return least_noise(upper, epsilon)
    except NoSolution:
        return None
