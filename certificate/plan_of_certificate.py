"""The plan that a certificate is about, with what it left open filled in as it was certified.

A plan may leave its noise, its steps, its lot size or its sampling probability to be solved
for. The certificate then carries the plan as it was asked, and beside it what was found;
``certified_plan`` puts the two together. A trainer runs this plan and no other, and whoever
checks what it ran compares with this one.

Guarantees
    * Noise that was solved for is the ``required`` multiplier, digit for digit as it was signed.
    * A sampling probability is rounded down to the digits that it was found to, so that the
      outward rounding of a signed decimal never raises it.
"""

from __future__ import annotations

from typing import Any

from affidavit.mechanisms import with_lot_size, with_probability, with_steps
from affidavit.plan import Plan, plan_from


class NotClosed(ValueError):
    """The certificate does not say what its plan left open, so nothing can be run from it."""


def certified_plan(predicate: dict[str, Any]) -> Plan:
    """The closed plan of a certificate's predicate.

    Raises ``NotClosed``, and ``MalformedPlan`` for a plan of another schema.
    """
    plan = plan_from(predicate["plan"])
    try:
        entry = predicate["sampling"][0]
        if plan.asks_for_lot_size:
            plan = with_lot_size(plan, int(entry["lot_size"]))
        if plan.asks_for_probability:
            plan = with_probability(plan, float(entry["probability"]))
        if plan.asks_for_steps:
            plan = with_steps(plan, int(entry["steps"]))
        if plan.asks_for_noise:
            plan = _with_noise(plan, predicate["noise_multiplier"]["releases"])
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise NotClosed(f"the certificate does not say what its plan left open ({error})") from None
    return plan


def _with_noise(plan: Plan, found: list[dict[str, Any]]) -> Plan:
    required = {(entry.get("phase", 0), entry["name"]): float(entry["required"]) for entry in found}
    phases = []
    for index, phase in enumerate(plan.phases):
        releases = tuple(
            release
            if release.has_noise
            else release.model_copy(update={"noise_multiplier": required[index, release.name]})
            for release in phase.releases
        )
        phases.append(phase.model_copy(update={"releases": releases}))
    return plan.model_copy(update={"phases": tuple(phases)})
