"""The account of each way of making a mistake, in numbers, and where it does not apply."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from affidavit.assessment.diagnosis import CATALOGUE
from affidavit.assessment.diagnosis.accountant_inputs import Part, Parts
from affidavit.assessment.diagnosis.mistake import Case
from affidavit.plan import Plan

PlanOf = Callable[..., Plan]
CORRELATED: dict[str, Any] = {"kind": "bidiagonal", "lambda": 0.5}


def accounted(plan: Plan, code: str) -> list[Parts | None]:
    """The releases that each way of making ``code`` accounts, the likeliest first."""
    case = Case.of(plan, 1e-5)
    ways = sorted(CATALOGUE[code].ways(case), key=lambda way: way.cost)
    return [way.of(case.account, case.facts).parts() for way in ways]


@pytest.mark.parametrize("noise", [{"kind": "independent"}, CORRELATED])
@pytest.mark.parametrize("scheme", ["poisson", "fixed_size", "shuffled", "cyclic", "balls_in_bins"])
def test_where_every_step_sees_everything_no_rate_can_be_mistaken(
    plan_of: PlanOf, scheme: str, noise: dict[str, Any]
) -> None:
    plan = plan_of(sampling={"scheme": scheme, "lot_size": 1000}, noise=noise)
    for code in ("poisson_for_shuffle", "amplified_correlated", "microbatch_rate"):
        assert accounted(plan, code) == []


@pytest.mark.parametrize("adjacency", ["add_remove", "replace_one"])
@pytest.mark.parametrize("scheme", ["poisson", "fixed_size", "shuffled", "cyclic"])
def test_a_lot_of_everything_is_a_full_batch_under_correlated_noise_too(
    plan_of: PlanOf, scheme: str, adjacency: str
) -> None:
    """Taken as independent, ten steps of σ = 20 are ten releases, whoever draws the lots."""
    plan = plan_of(
        sampling={"scheme": scheme, "lot_size": 1000}, noise=CORRELATED, adjacency=adjacency
    )
    sigma = 20.0 if adjacency == "add_remove" else 10.0
    assert accounted(plan, "no_kappa") == [((Part(noise_multiplier=sigma), 10),)]
    full = plan_of(sampling={"scheme": "full_batch"}, noise=CORRELATED, adjacency=adjacency)
    assert accounted(full, "no_kappa") == accounted(plan, "no_kappa")


@pytest.mark.parametrize(
    ("lot", "records", "steps", "squares"),
    # N = 1000: the squared records of one user in all lots of the run.
    [(1, 3, 1000, 3.0), (64, 200, 30, 2 * (3 * 64**2 + 8**2)), (100, 40, 20, 2 * 40**2)],
)
def test_a_lot_holds_no_more_records_of_a_user_than_there_are_in_it(
    plan_of: PlanOf, lot: int, records: int, steps: int, squares: float
) -> None:
    plan = plan_of(
        adjacency="zero_out",
        dataset={"size": 1000, "unit": "user", "contributions_per_user": records},
        sampling={"scheme": "cyclic", "lot_size": lot},
        steps=steps,
    )
    case = Case.of(plan, 1e-5)
    ((part, times),) = case.account.parts() or ()
    (sigma,) = (release.noise_multiplier for release in plan.phases[0].releases)
    assert times * (sigma / part.noise_multiplier) ** 2 == pytest.approx(squares)
    (((alone, _),),) = accounted(plan, "user_as_example")
    assert alone.noise_multiplier == pytest.approx(sigma)


def test_a_physical_batch_that_does_not_divide_the_lot_is_a_rate_of_its_own(
    plan_of: PlanOf,
) -> None:
    plan = plan_of(sampling={"scheme": "poisson", "lot_size": 50})
    rates = {
        parts[0][0].probability
        for parts in accounted(plan, "microbatch_rate")
        if parts is not None and parts[0][1] == 10
    }
    # 2, 5, 10, 25 and 50 batches of a lot of 50 among 1000, and the usual sizes below it.
    assert sorted(rate * 1000 for rate in rates if rate is not None) == pytest.approx(
        [1, 2, 5, 8, 10, 16, 25, 32]
    )


def test_the_layer_with_the_largest_clip_norm_is_the_likeliest_sensitivity(
    plan_of: PlanOf,
) -> None:
    """One noise of 4 for layers that are clipped to 2, 1 and 1/2."""
    releases = [
        {"name": "a", "clip_norm": 0.5, "noise_std": 4, "count": 2},
        {"name": "b", "clip_norm": 2, "noise_std": 4},
        {"name": "c", "clip_norm": 1, "noise_std": 4},
    ]
    assert accounted(plan_of(releases=releases), "clip_not_joint") == [
        ((Part(noise_multiplier=4 / norm), 10),) for norm in (2.0, 1.0, 0.5)
    ]
    case = Case.of(plan_of(releases=releases), 1e-5)
    first, *_ = CATALOGUE["clip_not_joint"].ways(case)
    assert f"sensitivity 2 instead of √(ΣC²) = {math.sqrt(5.5):.6g}" in first.text


def noise_parts(plan: Plan, code: str) -> list[tuple[float, float]]:
    """Noise before what the optimiser makes of it, and distance, of each way, in units of σ."""
    case = Case.of(plan, 1e-5)
    ways = [way.of(case.account, case.facts).phases[0] for way in CATALOGUE[code].ways(case)]
    return [(phase.scale, phase.distance) for phase in ways]


@pytest.mark.parametrize(
    ("options", "ways"),
    [
        ({}, [(math.sqrt(5), 1), (1 / math.sqrt(5), 1), (3, 1)]),
        ({"noise_divisor": "filter_norm"}, [(1, 1)]),
        ({"combine": "after_clipping"}, [(1, 1)]),
        (
            {"noise_divisor": "filter_norm", "combine": "after_clipping"},
            [(1, 3), (1 / math.sqrt(5), 1), (1, 1)],
        ),
    ],
)
def test_a_filter_divides_noise_by_its_norm_and_moves_sums_by_its_distance(
    plan_of: PlanOf, options: dict[str, Any], ways: list[tuple[float, float]]
) -> None:
    """At κ = γ = 1/2 the combination is c = 2 and 1 - c = -1: the norm is √5, the distance 3."""
    plan = plan_of(optimizer={"name": "dp_disk", "kappa": 0.5, "gamma": 0.5, **options})
    result = noise_parts(plan, "filter_norm")
    assert [scale for scale, _ in result] == pytest.approx([scale for scale, _ in ways])
    assert [distance for _, distance in result] == pytest.approx([reach for _, reach in ways])


PLANS: tuple[dict[str, Any], ...] = (
    {"sampling": {"scheme": "poisson", "lot_size": 50}},
    {"sampling": {"scheme": "poisson", "lot_size": 50}, "adjacency": "replace_one"},
    {
        "sampling": {"scheme": "shuffled", "lot_size": 50},
        "adjacency": "replace_one",
        "steps": ...,
        "epochs": 3,
    },
    {"sampling": {"scheme": "cyclic", "lot_size": 50}, "adjacency": "zero_out", "steps": 60},
    {"sampling": {"scheme": "cyclic", "lot_size": 50}, "steps": 60, "noise": CORRELATED},
    {"sampling": {"scheme": "poisson", "lot_size": 50}, "steps": 60, "noise": CORRELATED},
    {"sampling": {"scheme": "shuffled", "lot_size": 50}, "noise": CORRELATED},
    {
        "sampling": {"scheme": "cyclic", "lot_size": 50},
        "steps": 60,
        "noise": {"kind": "toeplitz_inverse", "coefficients": [1.0, -0.5]},
    },
    {
        "releases": [
            {"name": "a", "clip_norm": 0.5, "noise_std": 4, "count": 2},
            {"name": "b", "clip_norm": 2, "noise_std": 4},
        ]
    },
    {"dataset": {"size": 1000, "unit": "user", "contributions_per_user": 3}},
    {"extra": [{"kind": "gaussian", "name": "accuracy", "noise_multiplier": 5}]},
    {
        "extra": [
            {"kind": "repeat_and_select", "name": "best", "distribution": "geometric", "mean": 3}
        ]
    },
    {"optimizer": {"name": "dp_disk", "kappa": 0.5, "gamma": 0.5}},
    {
        "optimizer": {
            "name": "dp_disk",
            "kappa": 0.5,
            "gamma": 0.5,
            "noise_divisor": "filter_norm",
            "combine": "after_clipping",
        }
    },
    {"optimizer": {"name": "dp_dice", "error_clip_norm": 0.5}},
)


def test_a_way_bears_the_code_of_its_mistake(plan_of: PlanOf) -> None:
    seen = set()
    for changes in PLANS:
        case = Case.of(plan_of(**changes), 1e-5)
        for code, mistake in CATALOGUE.items():
            for way in mistake.ways(case):
                assert (mistake.code, way.code) == (code, code)
                assert way.cost > 0
                seen.add(code)
    assert seen == set(CATALOGUE)
