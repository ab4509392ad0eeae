"""The blocks of one step are one Gaussian, and its multiplier is never rounded up."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from affidavit.mechanisms.joint_gaussian import joint_noise_multiplier, noise_multiplier
from affidavit.plan import Plan

Make = Callable[..., Plan]
SIGMAS = st.floats(1e-3, 1e3)
BLOCKS = st.lists(st.tuples(st.integers(1, 100), SIGMAS), min_size=1, max_size=6)


def releases(blocks: list[tuple[int, float]]) -> list[dict[str, Any]]:
    """One release a (count, σ)."""
    return [
        {"name": f"b{i}", "count": count, "clip_norm": 0.1, "noise_multiplier": sigma}
        for i, (count, sigma) in enumerate(blocks)
    ]


def joint(plan_of: Make, blocks: list[tuple[int, float]], **changes: Any) -> float:
    """σ_joint of a step with these blocks."""
    result = joint_noise_multiplier(plan_of(releases=releases(blocks), **changes).phases[0])
    assert result is not None
    return result


def exact_square(blocks: list[tuple[int, float]]) -> Fraction:
    """σ_joint² without rounding, of the doubles that a trainer would use."""
    return 1 / sum(count / Fraction(sigma) ** 2 for count, sigma in blocks)


@given(BLOCKS)
def test_the_joint_multiplier_is_the_greatest_double_not_above_the_exact_one(
    plan_of: Make, blocks: list[tuple[int, float]]
) -> None:
    result = joint(plan_of, blocks)
    exact = exact_square(blocks)
    assert Fraction(result) ** 2 <= exact < Fraction(math.nextafter(result, math.inf)) ** 2


@given(st.integers(1, 10**6), SIGMAS)
def test_k_equal_blocks_are_one_at_sigma_over_root_k(plan_of: Make, k: int, sigma: float) -> None:
    assert joint(plan_of, [(k, sigma)]) == pytest.approx(sigma / math.sqrt(k), rel=1e-14)


@given(BLOCKS, st.randoms(use_true_random=False))
def test_order_does_not_matter(plan_of: Make, blocks: Any, random: Any) -> None:
    other = random.sample(blocks, len(blocks))
    assert joint(plan_of, other) == joint(plan_of, blocks)


@given(BLOCKS, st.integers(1, 50), SIGMAS)
def test_splitting_a_release_does_not_matter(
    plan_of: Make, blocks: list[tuple[int, float]], count: int, sigma: float
) -> None:
    whole = joint(plan_of, [*blocks, (count + 1, sigma)])
    assert joint(plan_of, [*blocks, (count, sigma), (1, sigma)]) == whole


@given(BLOCKS, SIGMAS)
def test_a_further_block_costs_and_more_noise_helps(
    plan_of: Make, blocks: list[tuple[int, float]], sigma: float
) -> None:
    before = joint(plan_of, blocks)
    assert joint(plan_of, [*blocks, (1, sigma)]) <= before
    assert joint(plan_of, [(count, 2 * item) for count, item in blocks]) > before
    assert before <= min(item for _, item in blocks)


@given(BLOCKS)
def test_under_flat_clipping_the_least_sigma_counts(
    plan_of: Make, blocks: list[tuple[int, float]]
) -> None:
    assert joint(plan_of, blocks, clipping="flat") == min(sigma for _, sigma in blocks)


SCALES = st.floats(1e-100, 1e15) | st.floats(1e21, 1e100)
"""What a plan takes."""


@given(SCALES, SCALES)
def test_noise_std_is_sigma_times_the_clip_norm(plan_of: Make, std: float, clip: float) -> None:
    plan = plan_of(releases=[{"name": "a", "clip_norm": clip, "noise_std": std}])
    (release,) = plan.phases[0].releases
    exact = Fraction(std) / Fraction(clip)
    assert noise_multiplier(release) == exact
    result = joint_noise_multiplier(plan.phases[0])
    assert result is not None
    assert Fraction(result) <= exact < Fraction(math.nextafter(result, math.inf))


def test_clip_norms_do_not_enter_a_given_multiplier(plan_of: Make) -> None:
    for clip in (1e-6, 1.0, 1e6):
        plan = plan_of(
            releases=[{"name": "a", "count": 4, "clip_norm": clip, "noise_multiplier": 3}]
        )
        assert joint_noise_multiplier(plan.phases[0]) == 1.5


def test_the_published_dp_muon_noise_is_a_seventh_of_what_it_seems(plan_of: Make) -> None:
    """arXiv:2605.12994v1: σ = 2.3395 on 48 hidden and one auxiliary block."""
    result = joint(plan_of, [(48, 2.3395), (1, 2.3395)])
    assert Fraction(result) <= Fraction(2.3395) / 7
    assert result == pytest.approx(0.334214, abs=5e-7)
    assert joint(plan_of, [(49, 2.3614)]) == pytest.approx(2.3614 / 7, rel=1e-15)


def test_open_noise_has_no_joint_multiplier(plan_of: Make) -> None:
    plan = plan_of(releases=[{"name": "a", "clip_norm": 1}])
    assert joint_noise_multiplier(plan.phases[0]) is None
    with pytest.raises(ValueError, match="no noise"):
        noise_multiplier(plan.phases[0].releases[0])
