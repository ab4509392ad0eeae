"""Advice and strategy comparison: every row is certified, measured at its noise, and distinct."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from affidavit.assessment import (
    Advice,
    Assessment,
    MechanismCost,
    StrategyComparison,
    advise,
    certify,
    compare,
)
from affidavit.assessment.strategy_comparison import (
    INDEPENDENT,
    attempt,
    measure,
    strategy_of,
    variant,
)
from affidavit.plan import Plan, RefusedPlan

MakePlan = Callable[..., Plan]

FIXED_ORDER: dict[str, Any] = {
    "dataset": {"name": "toy", "size": 400},
    "adjacency": "zero_out",
    "sampling": {"scheme": "cyclic", "lot_size": 20},
    "steps": 60,
    "releases": [{"name": "all", "clip_norm": 1}],
    "noise": {"kind": "bidiagonal", "lambda": 0.8},
    "target": {"epsilon": 4, "delta": 1e-4},
}


@pytest.fixture(scope="module")
def advice(plan_of: MakePlan) -> Advice:
    return advise(plan_of(**FIXED_ORDER))


@pytest.fixture(scope="module")
def comparison(plan_of: MakePlan) -> StrategyComparison:
    result = compare(plan_of(**FIXED_ORDER))
    assert isinstance(result, StrategyComparison)
    return result


def rows(found: Advice) -> dict[str, MechanismCost]:
    return {row.label: row for _, group in found.groups for row in group}


def test_every_mechanism_of_the_table_is_there(advice: Advice) -> None:
    labels = " ".join(rows(advice))
    requested = (
        "independent, amplified",
        "bidiagonal",
        "BIFR",
        "BandInvMF",
        "cyclic Poisson",
        "BLT",
        "dense",
    )
    assert all(name in labels for name in requested)


def test_every_row_is_certified_for_the_budget_at_the_noise_it_shows(advice: Advice) -> None:
    for row in rows(advice).values():
        assert row.certified, row.reasons
        result = row.assessment
        assert result is not None
        assert result.epsilon is not None
        assert result.epsilon.upper <= 4.0
        assert result.target_delta == 1e-4
        assert result.joint is not None


def test_the_noise_of_a_row_when_given_is_certified_again(plan_of: MakePlan) -> None:
    """What the table says of independent noise is what its plan says when it is written down."""
    row = measure("", plan_of(**FIXED_ORDER | {"noise": INDEPENDENT}))
    assert row.assessment is not None
    sigma = row.assessment.joint
    release = {"name": "all", "clip_norm": 1, "noise_multiplier": sigma}
    again = certify(plan_of(**FIXED_ORDER | {"noise": INDEPENDENT, "releases": [release]}))
    assert again.verdict == "certified"


def test_figures_are_those_of_the_noise_matrix(plan_of: MakePlan) -> None:
    row = measure("", plan_of(**FIXED_ORDER))
    assert row.assessment is not None
    assert row.assessment.joint is not None
    assert row.errors is not None
    assert row.step is not None
    noise = np.eye(60) - 0.8 * np.eye(60, k=-1)
    sigma = row.assessment.joint
    sums = sigma * np.sqrt(np.sum(np.cumsum(noise, axis=0) ** 2, axis=1))
    assert np.allclose(row.errors.per_step, sums, rtol=1e-9)
    assert row.rms == pytest.approx(float(np.sqrt(np.mean(sums**2))))
    assert row.max == pytest.approx(float(sums.max()))
    assert row.step == pytest.approx(sigma * math.sqrt(np.mean(np.sum(noise**2, axis=1))))
    assert row.buffers == 1


def test_independent_noise_has_the_error_of_a_random_walk(plan_of: MakePlan) -> None:
    row = measure("", plan_of(**FIXED_ORDER | {"noise": INDEPENDENT}))
    assert row.assessment is not None
    assert row.errors is not None
    sigma = row.assessment.joint
    assert np.allclose(row.errors.per_step, sigma * np.sqrt(np.arange(1, 61)))
    assert row.buffers == 0


def test_correlated_noise_beats_independent_noise_in_the_same_order(advice: Advice) -> None:
    result = rows(advice)
    error = {label: row.rms or math.inf for label, row in result.items()}
    assert error["dense"] <= min(error["bidiagonal"], error["BLT-2"], error["BIFR-60"])
    assert error["bidiagonal"] < error["independent, fixed order"]
    # The best λ is no worse than the plan's own.
    assert error["bidiagonal"] <= error["as planned (bidiagonal)"]


def test_no_row_of_the_front_is_beaten_and_every_other_is(advice: Advice) -> None:
    for _, group in advice.groups:
        front = advice.front(group)
        for row in group:
            better = [
                other
                for other in group
                if (other.rms or 0) <= (row.rms or 0)
                and (other.buffers or 0) <= (row.buffers or 0)
                and (other.rms, other.buffers) != (row.rms, row.buffers)
            ]
            twins = [f for f in front if (f.rms, f.buffers) == (row.rms, row.buffers)]
            assert bool(better) != bool(twins)


@pytest.mark.soak
@pytest.mark.usefixtures("few_draws")
def test_under_add_remove_a_fixed_order_stands_in_a_group_of_its_own(plan_of: MakePlan) -> None:
    changes = {
        "adjacency": "add_remove",
        "sampling": {"scheme": "poisson", "lot_size": 20},
        "noise": INDEPENDENT,
        "steps": 20,
    }
    result = advise(plan_of(**FIXED_ORDER | changes))
    (first, amplified), (second, ordered) = result.groups
    assert (first, second) == ("add_remove", "zero_out")
    assert {row.sampler for row in amplified} == {
        *("poisson", "cyclic_poisson", "balls_in_bins", "random_allocation")
    }
    assert {row.sampler for row in ordered} == {"cyclic"}
    assert {row.adjacency for row in amplified} == {"add_remove"}
    assert {row.adjacency for row in ordered} == {"zero_out"}
    certified = [row.assessment for row in (*amplified, *ordered) if row.assessment is not None]
    assert {item.plan["adjacency"] for item in certified} == {"add_remove", "zero_out"}


@pytest.mark.soak
@pytest.mark.usefixtures("few_draws")
def test_of_one_number_of_bands_that_fails_the_reason_is_shown(plan_of: MakePlan) -> None:
    """Lots of which only two fit the data set, at a target that nothing reaches."""
    changes = {
        "adjacency": "add_remove",
        "sampling": {"scheme": "poisson", "lot_size": 400},
        "dataset": {"name": "toy", "size": 1000},
        "noise": INDEPENDENT,
        "steps": 20,
        "target": {"epsilon": 1e-9, "delta": 1e-9},
    }
    (_, amplified), *_ = advise(plan_of(**FIXED_ORDER | changes)).groups
    (banded,) = [row for row in amplified if row.label.startswith("banded-2, cyclic")]
    assert banded.label.startswith("banded-2")
    assert not banded.certified
    assert banded.reasons


@pytest.mark.soak
def test_a_plan_whose_lots_are_cut_learns_which_cap_costs_nothing(plan_of: MakePlan) -> None:
    def noise(cap: int | None) -> float:
        scheme = "poisson" if cap is None else "truncated_poisson"
        sampling = {"scheme": scheme, "lot_size": 20} | ({"max_lot_size": cap} if cap else {})
        row = attempt("", plan, 60, (4, 1e-4), noise=INDEPENDENT, sampling=sampling)
        assert row.assessment is not None
        assert row.assessment.joint is not None
        return row.assessment.joint

    sampling = {"scheme": "truncated_poisson", "lot_size": 20, "max_lot_size": 22}
    plan = plan_of(**FIXED_ORDER | {"sampling": sampling, "noise": INDEPENDENT})
    labels = [label.split() for label in rows(advise(plan)) if "at no cost" in label]
    (cap,) = (int(words[3]) for words in labels)
    assert noise(cap) < 1.0015 * noise(None) < noise(cap - 1) < noise(22)


def test_what_cannot_be_certified_stays_in_the_table_with_its_reason(plan_of: MakePlan) -> None:
    plan = plan_of(**FIXED_ORDER)
    fixed, removed = {"scheme": "fixed_size", "lot_size": 20}, "add_remove"
    noise = {"kind": "dense"}
    row = attempt("", plan, 60, (4.0, 1e-4), noise=noise, sampling=fixed, adjacency=removed)
    assert not row.certified
    assert row.as_dict()["verdict"] == "refused"
    assert row.reasons[0].code == "fixed_size_needs_replace_one"
    malformed = attempt(
        "", plan, 60, (4.0, 1e-4), noise=INDEPENDENT, sampling={"scheme": "cyclic_poisson"}
    )
    assert malformed.assessment is None
    assert malformed.reasons


@pytest.mark.parametrize(
    ("changes", "pointer"),
    [
        ({"target": {"delta": 1e-5}, "releases": [
            {"name": "all", "clip_norm": 1, "noise_multiplier": 9}]}, "/target"),
        ({"sampling": {"scheme": "full_batch"}}, "/sampling"),
        ({"steps": None, "releases": [
            {"name": "all", "clip_norm": 1, "noise_multiplier": 9}]}, "/steps"),
    ],
)  # fmt: skip
def test_without_a_budget_there_is_no_advice(
    plan_of: MakePlan, changes: dict[str, Any], pointer: str
) -> None:
    with pytest.raises(RefusedPlan) as refused:
        advise(plan_of(**FIXED_ORDER | changes))
    assert (refused.value.reasons[0].code, refused.value.reasons[0].pointer) == (
        "no_budget",
        pointer,
    )


def test_a_variant_keeps_the_budget_and_forgets_the_noise(plan_of: MakePlan) -> None:
    plan = plan_of(**FIXED_ORDER, epochs=...)
    result = variant(plan, 60, (2.0, 1e-5), noise=INDEPENDENT)
    assert result.asks_for_noise
    assert (result.target.epsilon, result.target.delta) == (2.0, 1e-5)
    assert result.phases[0].steps == 60


def test_the_comparison_is_at_the_plan_s_own_guarantee(comparison: StrategyComparison) -> None:
    own, independent, amplified = comparison.rows
    assert (independent.sampler, amplified.sampler) == ("cyclic", "poisson")
    assert own.assessment is not None
    assert own.assessment.epsilon is not None
    for row in (independent, amplified):
        assert row.assessment is not None
        assert row.assessment.target_epsilon == own.assessment.epsilon.upper
    assert len(comparison.remarks) == 2


def test_a_row_that_is_not_certified_is_passed_over_and_the_others_are_not(
    comparison: StrategyComparison,
) -> None:
    own, independent, amplified = comparison.rows
    first, second = comparison.remarks

    def lost(row: MechanismCost) -> MechanismCost:
        return replace(row, assessment=None, errors=None)

    for rows, stated in (
        ((own, lost(independent), amplified), (second,)),
        ((own, independent, lost(amplified)), (first,)),
        ((lost(own), independent, amplified), ()),
        ((own,), ()),
    ):
        assert replace(comparison, rows=rows).remarks == stated
    for remark, row in ((first, independent), (second, amplified)):
        assert own.rms is not None
        assert row.rms is not None
        assert f"{own.rms / row.rms:.2f} times" in remark
        assert f"{row.label} noise under {row.sampler} sampling" in remark


def test_it_says_so_when_amplified_independent_noise_wins(plan_of: MakePlan) -> None:
    small = {"target": {"epsilon": 0.1, "delta": 1e-4}, "steps": 20}
    result = compare(plan_of(**FIXED_ORDER | small))
    assert isinstance(result, StrategyComparison)
    own, _, amplified = result.rows
    assert own.rms is not None
    assert amplified.rms is not None
    assert amplified.rms < own.rms
    assert any("has the smaller rms error" in remark for remark in result.remarks)


def test_pictures_are_svg_with_every_mechanism_in_them(
    advice: Advice, comparison: StrategyComparison
) -> None:
    for picture, names in (
        (advice.picture(), ["dense", "bidiagonal", "Pareto front"]),
        (comparison.picture(), ["this plan, cyclic", "independent, amplified, poisson"]),
    ):
        text = " ".join(ElementTree.fromstring(picture).itertext())
        assert all(name in text for name in names)


def test_a_comparison_s_document_says_what_its_assessment_does(
    comparison: StrategyComparison,
) -> None:
    data, same = comparison.as_document(), comparison.assessment.as_result()
    for field in ("verdict", "plan_digest", "epsilon", "delta", "adjacency", "mu"):
        assert data[field] == same[field], field
    assert data["noise_multiplier"] == same["noise_multiplier"]
    assert (data["reasons"], data["warnings"]) == (same["reasons"], same["warnings"])
    assert data["remarks"] == list(comparison.remarks)
    assert data["comparison"] == [row.as_dict() for row in comparison.rows]
    own = comparison.rows[0]
    shown = data["strategy"]
    assert (shown["step_noise"], shown["rms_error_at_noise"]) == (own.step, own.rms)
    assert (shown["max_error_at_noise"], shown["steps"]) == (own.max, 60)
    assert shown["streaming"]["buffers"] == own.buffers


def test_every_certified_mechanism_is_named_at_its_dot(advice: Advice) -> None:
    stated = [text.strip() for text in ElementTree.fromstring(advice.picture()).itertext()]
    certified = [row for row in rows(advice).values() if row.certified and row.rms is not None]
    assert {row.label for row in certified} <= set(stated)


def test_a_refused_plan_is_its_assessment(plan_of: MakePlan) -> None:
    result = compare(plan_of(**FIXED_ORDER | {"adjacency": "add_remove"}))
    assert isinstance(result, Assessment)
    assert result.verdict == "refused"


def test_the_strategy_of_open_steps_is_refused(plan_of: MakePlan) -> None:
    release = {"name": "all", "clip_norm": 1, "noise_multiplier": 9}
    with pytest.raises(RefusedPlan) as refusal:
        strategy_of(plan_of(**FIXED_ORDER | {"steps": None, "releases": [release]}))
    (reason,) = refusal.value.reasons
    assert (reason.code, reason.pointer) == ("steps_open", "/steps")


def test_a_row_s_document_says_what_its_assessment_does(plan_of: MakePlan) -> None:
    row = measure("mine", plan_of(**FIXED_ORDER))
    result = row.assessment
    assert result is not None
    data = row.as_dict()
    same = result.as_result()
    assert {key: data[key] for key in ("verdict", "adjacency", "epsilon", "delta")} == {
        key: same[key] for key in ("verdict", "adjacency", "epsilon", "delta")
    }
    assert data["mechanism"] == "mine"
    assert data["sampler"] == "cyclic"
    assert data["noise"]["kind"] == "bidiagonal"
    assert data["noise_multiplier"] == result.joint
    assert data["confidence"] is None
    assert data["reasons"] == []
    assert data["step_noise"] == row.step
    assert row.errors is not None
    assert row.max == max(row.errors.per_step)
    assert row.rms == pytest.approx(math.sqrt(np.mean(row.errors.per_step**2)))
    assert data["rms_error"] == row.rms
    assert data["max_error"] == row.max
    assert data["buffers"] == 1


def test_open_steps_have_no_errors_yet(plan_of: MakePlan) -> None:
    release = {"name": "all", "clip_norm": 1, "noise_multiplier": 9}
    with pytest.raises(RefusedPlan, match="plan_open"):
        compare(plan_of(**FIXED_ORDER | {"steps": None, "releases": [release]}))


def test_phases_have_no_one_strategy(plan_of: MakePlan) -> None:
    phase = {key: FIXED_ORDER[key] for key in ("sampling", "steps", "releases")}
    gone = {"sampling": ..., "steps": ..., "releases": ..., "noise": ...}
    plan = plan_of(**FIXED_ORDER | gone | {"phases": [phase, phase]})
    with pytest.raises(RefusedPlan, match="one_phase"):
        compare(plan)
    with pytest.raises(RefusedPlan, match="several phases"):
        advise(plan)
