"""What the first run shows against a plan: noise, rate and number of steps."""

from __future__ import annotations

from typing import Any

from affidavit.assessment import Execution, PlanNotClosed
from affidavit.evidence import ReplayFinding
from affidavit.plan import Plan, schedule
from affidavit.replay.errors import ReplayRefused

TOLERANCE = 1e-6
"""Relative error of a number that a script computed."""


def execution_of(plan: Plan) -> Execution:
    """Return the steps of ``plan``; raises ``ReplayRefused`` for one that replay cannot compare."""
    phase = plan.phases[0]
    is_simple = len(plan.phases) == 1 and len(phase.releases) == 1
    if not is_simple or phase.sampling.scheme != "poisson" or phase.noise.kind != "independent":
        raise ReplayRefused(
            "plan_not_comparable",
            "replay compares plans of one phase and one release, with Poisson lots and independent "
            "noise.",
            "Leave out --plan: the loop is then compared with its own accountant.",
        )
    try:
        return Execution.of(plan)
    except (PlanNotClosed, ValueError) as error:
        raise ReplayRefused(
            "plan_not_closed",
            f"the plan leaves a number to be solved for: {error}",
            "State the noise and the steps that affidavit certify solved.",
        ) from None


def plan_findings(first: dict[str, Any], execution: Execution) -> list[ReplayFinding]:
    """Return where the noise, the rate of lots or the number of steps costs more than the plan."""
    findings = []
    required = execution.at(0)
    (name,) = required.noise_std
    planned = required.noise_std[name] / required.clip_norm[name]
    for number, event in enumerate(
        event for event in first["events"] if event["kind"] == "release" and event["noise_std"]
    ):
        norm = event["clip_norm"]
        joint = sum(item**2 for item in norm) ** 0.5 if isinstance(norm, list) else norm
        multiplier = event["noise_std"] / joint
        if multiplier < planned * (1 - TOLERANCE):
            findings.append(
                ReplayFinding(
                    code="noise_below_plan",
                    check="noise",
                    message=f"release {number + 1} has noise multiplier {multiplier:.6g}, the plan "
                    f"{planned:.6g}.",
                    remedy="Use the plan's noise, or certify what the loop does.",
                    where=event["line"],
                    release=number,
                )
            )
            break
    plan = execution.plan
    rate = float(schedule.sampling_probability(plan, plan.phases[0]))
    draws = [event for event in first["events"] if event["kind"] == "draw" and event["rate"]]
    highest = max(draws, key=lambda event: event["rate"], default=None)
    if highest is not None and highest["rate"] > rate * (1 + TOLERANCE):
        findings.append(
            ReplayFinding(
                code="rate_above_plan",
                check="lots",
                message=f"lots are drawn at rate {highest['rate']:.6g}, the plan has {rate:.6g}.",
                remedy="Use the plan's rate, or certify what the loop does.",
                where=highest["line"],
            )
        )
    steps = sum(event["lots"] for event in first["events"] if event["kind"] == "pass")
    if first["ended"] == "normally" and steps > execution.steps:
        findings.append(
            ReplayFinding(
                code="steps_above_plan",
                check="lots",
                message=f"the loop's passes have {steps} lots, the plan {execution.steps} steps.",
                remedy="Train for the plan's steps, or certify what the loop does.",
            )
        )
    return findings
