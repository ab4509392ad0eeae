"""The filter of steps of one kind: whatever chooses each, the base's composition bounds all."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from affidavit.accountants.fourier_accountant import FourierAccountant
from affidavit.accountants.privacy_filter import Budget, Cost, Filter, Steps, divergences
from affidavit.accountants.privacy_filter.privacy_filter import GAUSSIAN_SHARE
from affidavit.plan import events

Array = NDArray[np.float64]
DELTA = 1e-5


def step(q: float, sigma: float) -> events.PoissonSubsampledGaussian:
    return events.PoissonSubsampledGaussian(sampling_probability=q, noise_multiplier=sigma)


def cost_of(*kinds: tuple[events.PoissonSubsampledGaussian, int]) -> Cost:
    event = events.Composed(
        events=tuple(events.Repeated(event=kind, count=count) for kind, count in kinds)
    )
    return Cost.of(
        renyi=divergences(event), mu_squared=math.inf, epsilon=1, delta=1e-6, steps=Steps.of(event)
    )


def budget(base: events.PoissonSubsampledGaussian | None, epsilon: float = 8.0) -> Budget:
    return Budget(epsilon=epsilon, delta=DELTA, filter=Filter.start(epsilon, DELTA), base=base)


# ---- an adversary who chooses each step in view of all losses so far -----------------

LOSSES = np.linspace(-12, 12, 801)
PLACES = np.linspace(-8, 9, 601)


def gained(value: Array, kind: events.PoissonSubsampledGaussian, *, removed: bool) -> Array:
    """The mean of ``value`` after one step of ``kind``, at each loss before it; by quadrature."""
    q, sigma = kind.sampling_probability, kind.noise_multiplier
    z = PLACES * max(1.0, sigma)
    base = np.exp(-(z**2) / (2 * sigma**2)) / (sigma * math.sqrt(2 * math.pi))
    mixed = base * (1 - q + q * np.exp((2 * z - 1) / (2 * sigma**2)))
    law, loss = (mixed, np.log(mixed / base)) if removed else (base, np.log(base / mixed))
    at = np.interp(LOSSES[:, None] + loss[None, :], LOSSES, value)
    return np.asarray(np.trapezoid(at * law, z, axis=1))


def hardest(kinds: list[events.PoissonSubsampledGaussian], steps: int, *, removed: bool) -> float:
    """δ(1) of the best adaptive choice among ``kinds``, and of stopping, for so many steps."""
    value = np.maximum(0.0, -np.expm1(1.0 - LOSSES))
    for _ in range(steps):
        value = np.max([value, *(gained(value, kind, removed=removed) for kind in kinds)], axis=0)
    return float(np.interp(0.0, LOSSES, value))


@pytest.mark.parametrize("removed", [False, True])
def test_no_adaptive_choice_passes_the_composition_of_the_base(removed: bool) -> None:
    base = step(0.2, 0.8)
    weaker = [step(0.05, 0.8), step(0.2, 1.1), step(0.12, 0.9)]
    bound = FourierAccountant().curve(events.Repeated(event=base, count=4)).delta(1.0).upper
    assert hardest([base, *weaker], 4, removed=removed) <= bound * (1 + 1e-3)
    assert hardest([*weaker, step(0.2, 0.7)], 4, removed=True) > bound * 1.1


# ---- the rule ---------------------------------------------------------------------------


@pytest.mark.parametrize(("q", "sigma", "size"), [(0.01, 0.6, 2), (0.004, 1.1, 99), (0.05, 3, 60)])
def test_steps_of_one_kind_are_read_as_their_composition(q: float, sigma: float, size: int) -> None:
    """At the exact filter's share of δ; and a budget is used up to within 6 %."""
    run = cost_of((step(q, sigma), size))
    rule = budget(step(q, sigma))
    exact = FourierAccountant().curve(events.Repeated(event=step(q, sigma), count=30 * size))
    expected = exact.epsilon(DELTA * GAUSSIAN_SHARE * (1 - 1e-12)).upper
    assert rule.spent(run.times(30)) == pytest.approx(expected, rel=1e-6)
    most = rule.forecast(cost_of(), run)
    assert rule.admits(run.times(most))
    assert not rule.admits(run.times(most + 1))
    tight = FourierAccountant().curve(events.Repeated(event=step(q, sigma), count=size * most))
    assert 0.94 * rule.epsilon < tight.epsilon(DELTA).lower <= rule.epsilon


def test_a_step_that_the_base_does_not_dominate_has_no_exact_reading() -> None:
    base, small = step(0.01, 0.6), budget(step(0.01, 0.6), epsilon=3.0)
    covered = cost_of((base, 5), (step(0.005, 0.7), 3))
    assert small.admits(covered)
    for other in (step(0.011, 0.6), step(0.01, 0.59), replace(base, pair="replace_one")):
        assert not small.admits(covered + cost_of((other, 1)))
    beside = Cost.of(
        renyi=divergences(events.Gaussian(noise_multiplier=50.0)),
        mu_squared=1 / 2500,
        epsilon=1,
        delta=0,
    )
    assert not small.admits(covered + beside)
    assert small.admits(covered + beside - beside)


def test_a_budget_without_a_base_reads_no_steps() -> None:
    run = cost_of((step(0.01, 0.6), 1))
    assert budget(run.steps.worst(), epsilon=3.0).admits(run)
    assert not budget(None, epsilon=3.0).admits(run)


def test_the_base_of_several_kinds_dominates_each() -> None:
    steps = cost_of((step(0.01, 0.9), 5), (step(0.003, 0.6), 7)).steps
    assert steps.worst() == step(0.01, 0.6)
    assert steps.dominated_by(step(0.01, 0.6)) == 12
    assert Steps(others=1).worst() is None
    assert (steps + Steps.of(replace(step(0.01, 1.0), pair="replace_one"))).worst() is None


def test_other_lots_are_composed_with_their_own_kind_and_more_noise_alone() -> None:
    """A base of a larger lot is no channel before a step of a smaller one."""
    fixed = events.WithoutReplacementGaussian(
        dataset_size=1000, sample_size=10, noise_multiplier=1.0
    )
    steps = Steps.of(events.Composed(events=(fixed, replace(fixed, noise_multiplier=2.0))))
    assert steps.worst() == fixed
    assert Steps.of(replace(fixed, sample_size=9)).dominated_by(fixed) is None
    assert Steps.of(step(0.01, 1.0)).dominated_by(fixed) is None
    run = Cost.of(
        renyi=divergences(fixed), mu_squared=math.inf, epsilon=1, delta=1e-6, steps=Steps.of(fixed)
    )
    rule = Budget(epsilon=3.0, delta=DELTA, filter=Filter.start(3.0, DELTA), base=fixed)
    exact = FourierAccountant().curve(events.Repeated(event=fixed, count=20)).epsilon(DELTA).lower
    assert exact < rule.spent(run.times(20)) < replace(rule, base=None).spent(run.times(20))


def test_steps_add_subtract_and_are_written_exactly() -> None:
    one = cost_of((step(0.01, 0.9), 5), (step(0.003, 0.6), 7))
    other = cost_of((step(0.01, 0.9), 2))
    assert one + other - other == one
    assert other.within(one)
    assert not one.within(other)
    assert one.least(other).steps == other.steps
    assert Cost.read(one.as_document()) == one
    assert "steps" not in Cost.zero(2).as_document()
    with pytest.raises(ValueError, match="kind of step"):
        Steps.read(
            {
                "kinds": [{"event": {"kind": "Gaussian", "noise_multiplier": 1.0}, "count": 1}],
                "others": 0,
            }
        )
