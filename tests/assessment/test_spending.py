"""ε over the steps of a run is never below the cost of those steps, and complete at the end."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import pytest
from scipy.stats import norm

from affidavit.assessment import spending, spending_chart
from affidavit.assessment.charts import (
    Dots,
    Line,
    ReferenceLine,
)
from affidavit.plan import Plan

DELTA = 1e-5
SIGMA, STEPS = 20.0, 97


def drawn(line: Line, steps: float) -> float:
    """The height of the stair that ends at ``steps`` or behind."""
    (height,) = [min(y0, y1) for (x0, y0), (x1, y1) in pairwise(line.points) if x0 < steps <= x1]
    return height


def delta_of(epsilon: float, mu: float) -> float:
    """δ(ε) of one Gaussian of sensitivity μ, by scipy's normal distribution."""
    above, below = norm.cdf(mu / 2 - epsilon / mu), norm.cdf(-mu / 2 - epsilon / mu)
    return float(above - math.exp(epsilon) * below)


def test_what_is_drawn_is_a_bound_after_every_step(plan_of: Callable[..., Plan]) -> None:
    spent = spending(plan_of(steps=STEPS), "gaussian", DELTA, extra_steps=(41,))
    chart = spending_chart(spent, certified=spent[-1].epsilon, delta=DELTA, run=41)
    lines = [mark for mark in chart.marks if isinstance(mark, Line)]
    for steps in range(1, STEPS + 1):
        assert delta_of(drawn(lines[0], steps), steps**0.5 / SIGMA) <= DELTA * (1 + 1e-6), steps
    assert (spent[0].steps, spent[0].epsilon) == (0, 0.0)
    assert [item.steps for item in spent] == sorted({entry.steps for entry in spent})
    assert spent[-1].steps == STEPS
    # The run ends where it was charged, below the whole.
    (charged,) = [mark for mark in chart.marks if isinstance(mark, Dots)]
    assert charged.points == ((41, lines[1].points[-1][1]),)
    assert charged.points[0][1] < spent[-1].epsilon
    (cap,) = [mark for mark in chart.marks if isinstance(mark, ReferenceLine)]
    assert cap.at == spent[-1].epsilon
    assert chart.y.high is not None
    assert chart.y.high > cap.at
    assert "ε grows with the steps" in chart.description
    assert "charged for 41 steps" in chart.description


@pytest.mark.parametrize("noise", [{"kind": "bisr", "bands": 4}, {"kind": "blt", "buffers": 2}])
def test_noise_that_correlates_steps_is_charged_in_full_from_the_first(
    plan_of: Callable[..., Plan], noise: dict[str, object]
) -> None:
    plan = plan_of(
        adjacency="zero_out",
        sampling={"scheme": "cyclic", "lot_size": 100},
        steps=20,
        noise=noise,
    )
    spent = spending(plan, "gaussian", DELTA, points=4)
    assert {item.epsilon for item in spent[1:]} == {spent[-1].epsilon}
    chart = spending_chart(spent, certified=spent[-1].epsilon, delta=DELTA)
    assert "in full from the first step on" in chart.description
