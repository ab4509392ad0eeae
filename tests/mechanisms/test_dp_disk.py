"""DP-DiSK is certified in one form; the others are named with what they really cost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from affidavit.mechanisms.dp_disk import lookahead_weight
from affidavit.mechanisms.lowering import lower
from affidavit.plan import Plan, Reason, RefusedPlan

Make = Callable[..., Plan]


def disk(**fields: Any) -> dict[str, Any]:
    return {"name": "dp_disk", **fields}


def refusal(plan: Plan) -> Reason:
    with pytest.raises(RefusedPlan) as caught:
        lower(plan)
    (reason,) = caught.value.reasons
    return reason


@pytest.mark.parametrize("kappa", [0.1, 0.5, 0.7, 1.0])
@pytest.mark.parametrize("gamma", [0.2, 0.5, 3.0])
def test_combined_then_clipped_costs_what_dp_sgd_costs(
    plan_of: Make, kappa: float, gamma: float
) -> None:
    form = disk(kappa=kappa, gamma=gamma, combine="before_clipping", noise_divisor="one")
    assert lower(plan_of(optimizer=form)).event() == lower(plan_of()).event()
    assert lower(plan_of(optimizer=disk())).event() == lower(plan_of()).event()


@pytest.mark.parametrize(
    ("kappa", "gamma", "left"), [(0.5, 0.5, "0.4472"), (0.3, 0.5, "0.168"), (0.7, 0.5, "1.151")]
)
def test_a_divided_multiplier_is_refused_with_what_is_left_of_it(
    plan_of: Make, kappa: float, gamma: float, left: str
) -> None:
    form = disk(kappa=kappa, gamma=gamma, noise_divisor="filter_norm")
    reason = refusal(plan_of(optimizer=form))
    assert (reason.code, reason.pointer) == ("unsound_optimizer", "/optimizer/noise_divisor")
    assert f"leaves {left}" in reason.message
    assert "σ" in reason.message


def test_sums_combined_after_clipping_are_refused_with_their_true_sensitivity(
    plan_of: Make,
) -> None:
    plan = plan_of(optimizer=disk(kappa=0.3, gamma=0.5, combine="after_clipping"))
    reason = refusal(plan)
    assert (reason.code, reason.pointer) == ("unsound_optimizer", "/optimizer/combine")
    c = lookahead_weight(plan)
    assert f"{abs(c) + abs(1 - c):.4g} C" in reason.message
    # One record whose two gradients point opposite ways attains it.
    u = np.array([0.6, 0.8])
    assert np.linalg.norm(c * u + (1 - c) * -u) == pytest.approx(abs(c) + abs(1 - c))


def test_both_faults_are_named_at_once(plan_of: Make) -> None:
    form = disk(combine="after_clipping", noise_divisor="filter_norm")
    with pytest.raises(RefusedPlan) as caught:
        lower(plan_of(optimizer=form))
    assert len(caught.value.reasons) == 2
