"""A claim is one positive decimal, and about something that the plan decides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from affidavit.plan import Plan
from affidavit.plan.diagnostics import MalformedPlan
from affidavit.plan.serialization import digest


@pytest.mark.parametrize("claim", [7.98, "7.9800", {"epsilon": 8}, {"noise_multiplier": "1.10"}])
def test_a_claim_is_a_number_or_its_text(plan_of: Callable[..., Plan], claim: Any) -> None:
    result = plan_of(claim=claim).claim
    assert result is not None
    provided = claim if not isinstance(claim, dict) else next(iter(claim.values()))
    assert float(result.text) == float(provided)
    if isinstance(provided, str):
        assert result.text == provided


@pytest.mark.parametrize(
    "claim",
    [
        0,
        -1,
        True,
        "nan",
        "inf",
        "",
        " 7",
        "1e999",
        "1e-999",
        "0x8",
        "7,98",
        "٧",
        [8],
        {},
        {"epsilon": 8, "noise_multiplier": 1},
        {"epsilon": None},
        {"delta": 1e-5},
        1e300,
    ],
)
def test_anything_else_is_refused_at_its_place(plan_of: Callable[..., Plan], claim: Any) -> None:
    with pytest.raises(MalformedPlan) as caught:
        plan_of(claim=claim)
    assert caught.value.reasons[0].pointer.startswith("/claim")


@pytest.mark.parametrize(
    ("claim", "changes", "pointer"),
    [
        (8, {"steps": None}, "/target"),
        (8, {"target": {"epsilon": 8}}, "/target/delta"),
        (
            8,
            {"releases": [{"name": "all", "clip_norm": 1}]},
            "/releases/0/noise_multiplier",
        ),
        ({"noise_multiplier": 1}, {"target": {"delta": 1e-5}}, "/target/epsilon"),
    ],
)
def test_a_claim_about_what_is_left_open_is_refused(
    plan_of: Callable[..., Plan], claim: Any, changes: dict[str, Any], pointer: str
) -> None:
    with pytest.raises(MalformedPlan) as caught:
        plan_of(claim=claim, **changes)
    assert (caught.value.reasons[0].code, caught.value.reasons[0].pointer) == (
        "claim_unanswerable",
        pointer,
    )


def test_a_claimed_noise_multiplier_may_stand_in_for_open_noise(
    plan_of: Callable[..., Plan],
) -> None:
    assert plan_of(claim={"noise_multiplier": 2}, releases=[{"name": "all", "clip_norm": 1}])


def test_a_plan_without_a_claim_keeps_its_digest(plan_of: Callable[..., Plan]) -> None:
    assert digest(plan_of()) == digest(plan_of(claim=None))
    assert digest(plan_of()) != digest(plan_of(claim=8))
