"""Predicted work and memory against the work that was counted and the memory that was traced."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
from scipy import fft

from affidavit.accountants.fourier import estimate_cost
from affidavit.accountants.fourier.cost import points_of, seconds_a_point
from affidavit.accountants.fourier.discretization import Laws, Work
from affidavit.accountants.fourier.dominating_pairs import directions
from affidavit.accountants.fourier.refinement import EpsilonSearch
from affidavit.accountants.protocol import OutOfReach
from affidavit.plan import Composed, Event, PoissonSubsampledGaussian, Repeated
from tests.accountants.soundness import draw, ours


def plan(q: float, sigma: float, steps: int) -> Repeated:
    leaf = PoissonSubsampledGaussian(sampling_probability=q, noise_multiplier=sigma)
    return Repeated(event=leaf, count=steps)


def spent(event: Event, delta: float) -> tuple[Work, int]:
    """The work of one direction, counted, and its peak of bytes, traced."""
    search = EpsilonSearch(Laws.of(directions(event)[0]), delta)
    tracemalloc.start()
    search.refine(1e-4)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return search.work, peak


def test_work_and_memory_are_within_a_factor_of_three_for_nine_plans_in_ten() -> None:
    source = np.random.default_rng(21)
    near_work = near_memory = total = 0
    while total < 20:
        case = draw(source)
        base = ours(case.event, case.delta)
        if base is None or base.upper <= 1e-6:
            continue
        total += 1
        work, peak = spent(case.event, case.delta)
        cost = estimate_cost(case.event, case.delta)
        near_work += cost.points / 3 <= points_of(work) <= 3 * cost.points
        near_memory += cost.bytes / 3 <= peak <= 3 * cost.bytes
    assert near_work >= 18
    assert near_memory >= 18


@pytest.mark.parametrize(
    ("event", "delta"),
    [
        (plan(0.01, 1.0, 10_000), 1e-6),
        (Composed(events=(plan(0.01, 1.0, 1000), plan(0.02, 2.0, 500))), 1e-6),
        (plan(1e-5, 0.5, 1000), 1e-9),
        (Composed(events=(plan(1e-5, 0.5, 1000), plan(0.02, 2.0, 500))), 1e-6),
    ],
    ids=["one law", "two laws", "rare", "two laws and rare"],
)
def test_the_work_that_is_counted_is_that_which_is_done(
    event: Event, delta: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformed = 0
    transform = fft.rfft

    def counted(values: np.ndarray[Any, Any]) -> Any:
        nonlocal transformed
        transformed += values.size
        return transform(values)

    monkeypatch.setattr(fft, "rfft", counted)
    work, _ = spent(event, delta)
    # Beside them there are a few transforms by which the grids are with_parameters.
    assert 1 <= transformed / work.frequencies < 1.25


def test_cost_grows_with_precision_and_is_refused_out_of_range() -> None:
    event = plan(0.01, 1.0, 10_000)
    rough = estimate_cost(event, 1e-6, relative_width=1e-3)
    fine = estimate_cost(event, 1e-6, relative_width=1e-5)
    assert rough.seconds < fine.seconds
    assert rough.bytes < fine.bytes
    assert estimate_cost(Composed(events=()), 1e-6).seconds == 0.0
    with pytest.raises(OutOfReach):
        estimate_cost(plan(0.01, 0.01, 100), 1e-6)


def test_seconds_follow_the_machine_s_own_rate() -> None:
    event = plan(0.001, 0.8, 10_000)
    slow = estimate_cost(event, 1e-8, seconds_a_point=1e-6)
    quick = estimate_cost(event, 1e-8, seconds_a_point=1e-7)
    assert slow.points == quick.points
    assert quick.seconds < slow.seconds < 10 * quick.seconds
    assert 0 < seconds_a_point() < 1e-3
