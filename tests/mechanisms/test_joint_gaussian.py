"""The blocks of one step are one Gaussian, and its multiplier is never rounded up."""

from __future__ import annotations

import math
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from affidavit.mechanisms.joint_gaussian import (
    allocate,
    joint_noise_multiplier,
    noise_energy,
    noise_multiplier,
    rounded_up,
)
from affidavit.mechanisms.resolve import with_noise
from affidavit.plan import Allocation, Phase, Plan

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


ALLOCATIONS: tuple[Allocation, ...] = ("uniform", "proportional", "optimal")
JOINTS = st.floats(1e-2, 1e3)


@st.composite
def open_blocks(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Releases without noise, of any dimension, weight and clip norm."""
    return [
        {
            "name": f"b{i}",
            "count": draw(st.integers(1, 100)),
            "clip_norm": draw(st.floats(1e-3, 1e3)),
            "dimension": draw(st.integers(1, 10**9)),
            "weight": draw(st.floats(0.1, 10)),
        }
        for i in range(draw(st.integers(1, 5)))
    ]


def allocated(plan: Plan, joint: float) -> tuple[float, ...]:
    """σ_g of the only phase."""
    return allocate(plan.phases[0], joint, plan.allocation)


def energy(phase: Phase, sigmas: tuple[float, ...], joint: float) -> float:
    """Total noise energy of one step."""
    result = noise_energy(phase, sigmas, joint)
    assert result is not None
    return result.allocated


@given(open_blocks(), st.sampled_from(ALLOCATIONS), st.booleans(), JOINTS)
def test_the_joint_of_what_is_allocated_is_at_least_what_was_asked(
    plan_of: Make, blocks: Any, allocation: Allocation, flat: bool, joint: float
) -> None:
    if flat:
        blocks = [{**block, "clip_norm": 1} for block in blocks]
    plan = plan_of(releases=blocks, allocation=allocation, clipping="flat" if flat else "per_block")
    result = joint_noise_multiplier(with_noise(plan, joint).phases[0])
    assert result is not None
    assert joint <= result <= joint * (1 + 1e-5)


@given(open_blocks(), JOINTS)
def test_uniform_is_equal_and_proportional_keeps_to_the_weights(
    plan_of: Make, blocks: Any, joint: float
) -> None:
    equal = allocated(plan_of(releases=blocks), joint)
    assert len(set(equal)) == 1
    weighted = allocated(plan_of(releases=blocks, allocation="proportional"), joint)
    shares = [sigma / block["weight"] for sigma, block in zip(weighted, blocks, strict=True)]
    assert shares == pytest.approx([shares[0]] * len(shares), rel=1e-5)


@given(open_blocks(), JOINTS, st.data())
def test_optimal_needs_no_more_energy_than_any_other_that_reaches_the_joint(
    plan_of: Make, blocks: Any, joint: float, data: st.DataObject
) -> None:
    optimal = plan_of(releases=blocks, allocation="optimal")
    phase = optimal.phases[0]
    least = energy(phase, allocated(optimal, joint), joint)
    rivals = [{**block, "weight": data.draw(st.floats(0.01, 100))} for block in blocks]
    rival = plan_of(releases=rivals, allocation="proportional")
    assert least <= energy(phase, allocated(rival, joint), joint) * (1 + 1e-5)
    assert least <= energy(phase, allocated(plan_of(releases=blocks), joint), joint) * (1 + 1e-5)


@given(open_blocks(), JOINTS)
def test_optimal_meets_lagranges_condition(plan_of: Make, blocks: Any, joint: float) -> None:
    sigmas = allocated(plan_of(releases=blocks, allocation="optimal"), joint)
    slopes = [
        block["dimension"] * block["clip_norm"] ** 2 * sigma**4
        for sigma, block in zip(sigmas, blocks, strict=True)
    ]
    assert slopes == pytest.approx([slopes[0]] * len(slopes), rel=1e-5)


WIDTH = 768
HIDDEN = {
    "attention": 3 * WIDTH * WIDTH,
    "attention_out": WIDTH * WIDTH,
    "expand": 4 * WIDTH * WIDTH,
    "contract": 4 * WIDTH * WIDTH,
}
EMBEDDINGS = 2 * 50257 * WIDTH + 1024 * WIDTH
NORMS = (12 * 2 + 1) * 2 * WIDTH
BIASES = 12 * (3 + 1 + 4 + 1) * WIDTH


def gpt2(clip_norm: float = 0.1) -> list[dict[str, Any]]:
    """GPT-2 small with an untied head: 48 hidden matrices and one auxiliary block."""
    hidden = [
        {"name": name, "count": 12, "clip_norm": clip_norm, "dimension": dimension}
        for name, dimension in HIDDEN.items()
    ]
    rest = {"name": "auxiliary", "clip_norm": clip_norm, "dimension": EMBEDDINGS + NORMS + BIASES}
    return [*hidden, rest]


def test_optimal_saves_37_percent_on_gpt2_small(plan_of: Make) -> None:
    assert round((EMBEDDINGS + NORMS + BIASES) / 1e6, 1) == 78.1
    plan = plan_of(releases=gpt2(), allocation="optimal")
    joint = 2.0
    result = noise_energy(plan.phases[0], allocated(plan, joint), joint)
    assert result is not None
    assert result.saving == pytest.approx(0.37, abs=0.005)
    # In closed form: 1 - (Σ n √d)² / (K Σ n d).
    blocks = [(block.get("count", 1), block["dimension"]) for block in gpt2()]
    root = sum(n * math.sqrt(d) for n, d in blocks)
    whole = 49 * sum(n * d for n, d in blocks)
    assert result.saving == pytest.approx(1 - root**2 / whole, abs=1e-5)


def test_uniform_saves_nothing_and_unknown_dimensions_say_nothing(plan_of: Make) -> None:
    plan = plan_of(releases=gpt2())
    result = noise_energy(plan.phases[0], allocated(plan, 2.0), 2.0)
    assert result is not None
    assert result.saving == pytest.approx(0, abs=1e-5)
    bare = plan_of(releases=[{"name": "a", "clip_norm": 1}])
    assert noise_energy(bare.phases[0], (1.0,), 1.0) is None


@given(st.floats(1e-90, 1e90))
def test_a_required_multiplier_is_rounded_up_to_seven_digits(sigma: float) -> None:
    up = rounded_up(sigma)
    assert sigma <= up <= sigma * (1 + 1.0000001e-6)
    assert len(Decimal(repr(up)).normalize().as_tuple().digits) <= 7


def test_given_noise_is_left_as_it_is_and_open_noise_is_filled_in(plan_of: Make) -> None:
    given_ = {"name": "a", "clip_norm": 1, "noise_multiplier": 3}
    phase = {"sampling": {"scheme": "full_batch"}, "steps": 2, "releases": [given_]}
    open_ = {**phase, "releases": [{"name": "a", "clip_norm": 1, "count": 4}]}
    plan = plan_of(sampling=..., steps=..., releases=..., phases=[phase, open_])
    first, second = with_noise(plan, 1.5).phases
    assert first == plan.phases[0]
    assert [float(noise_multiplier(r)) for r in second.releases] == [3.000001]
    assert plan.asks_for_noise
    assert not with_noise(plan, 1.5).asks_for_noise
