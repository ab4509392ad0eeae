"""Noise, rate and steps of a run against a plan."""

from __future__ import annotations

from typing import Any

import pytest

from affidavit import Plan
from affidavit.replay import ReplayRefused
from affidavit.replay.plan_comparison import execution_of, plan_findings

PLAN = Plan.dp_sgd(
    adjacency="add_remove",
    sampling="poisson",
    size=200,
    lot_size=20,
    steps=30,
    noise_multiplier=1.1,
    delta=1e-5,
)


def first_run(**changes: float) -> dict[str, Any]:
    """What the first run of a loop records that keeps to the plan, with changes."""
    numbers = {"noise_std": 0.55, "rate": 0.1, "lots": 10} | changes
    release = {
        "kind": "release",
        "noise_std": numbers["noise_std"],
        "clip_norm": 0.5,
        "line": "a:1",
    }
    draw = {"kind": "draw", "rate": numbers["rate"], "line": "a:2"}
    passes = [{"kind": "pass", "lots": numbers["lots"]}] * 3
    release["noise_std"] = numbers["noise_std"]
    return {"events": [*passes, draw, release], "ended": "normally"}


@pytest.mark.parametrize(
    ("changes", "codes"),
    [
        ({}, []),
        ({"noise_std": 0.6, "rate": 0.05, "lots": 5}, []),
        ({"noise_std": 0.54}, ["noise_below_plan"]),
        ({"rate": 0.11}, ["rate_above_plan"]),
        ({"lots": 11}, ["steps_above_plan"]),
    ],
)
def test_what_costs_more_than_the_plan_is_found(
    changes: dict[str, float], codes: list[str]
) -> None:
    findings = plan_findings(first_run(**changes), execution_of(PLAN))
    assert [finding.code for finding in findings] == codes
    assert all(finding.refutes for finding in findings)


def test_a_plan_that_is_not_comparable_is_refused() -> None:
    changed = PLAN.model_copy(
        update={
            "phases": (PLAN.phases[0].model_copy(update={"releases": PLAN.phases[0].releases * 2}),)
        }
    )
    with pytest.raises(ReplayRefused) as refused:
        execution_of(changed)
    assert refused.value.code == "plan_not_comparable"
