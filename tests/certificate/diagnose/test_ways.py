"""What a way of being mistaken accounts, in numbers, and where it cannot be made."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from affidavit.certificate.diagnose.account import Part, Parts
from affidavit.certificate.diagnose.case import Case
from affidavit.certificate.diagnose.catalogue import CATALOGUE
from affidavit.plan.model import Plan

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
    assert f"sensitivity 2 instead of √(ΣC²) = {math.sqrt(5.5):.6g}" in first.said
