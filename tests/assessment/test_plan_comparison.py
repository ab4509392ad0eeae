"""The comparison of two plans: differences, single changes, and unranked guarantees."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from affidavit.assessment import certify, compare_plans, comparison_of
from affidavit.assessment.assessment import Confidence
from affidavit.plan import ABSENT, Change, Plan, apply_changes, digest, find_changes, plan_from
from tests.conftest import DOCUMENT

PlanOf = Callable[..., Plan]

POISSON: dict[str, Any] = {"sampling": {"scheme": "poisson", "lot_size": 50}, "steps": 40}
PARTS: dict[str, list[Any]] = {
    "sampling": [
        {"scheme": "full_batch"},
        POISSON["sampling"],
        {"scheme": "poisson", **{"probability": 0.1}},
    ],
    "steps": [10, 20],
    "releases": [
        [{"name": "all", "clip_norm": 1, "noise_multiplier": 20}],
        [{"name": "all", "clip_norm": 2}],
        [
            {"name": "a", "clip_norm": 1, "noise_std": 9},
            {"name": "b", "clip_norm": 1, "count": 3, "noise_multiplier": 8},
        ],
    ],
    "optimizer": [{"name": "dp_sgd"}, {"name": "dp_adam"}],
    "target": [{"epsilon": 8, "delta": 1e-5}, {"epsilon": 4, "delta": 1e-6}],
    "name": ["quick", "slow"],
}
documents = st.fixed_dictionaries({name: st.sampled_from(each) for name, each in PARTS.items()})


@given(documents, documents)
def test_making_every_change_leads_from_the_one_plan_to_the_other(
    one: dict[str, Any], other: dict[str, Any]
) -> None:
    first, second = plan_from({**DOCUMENT, **one}), plan_from({**DOCUMENT, **other})
    result = find_changes(first, second)
    edits = tuple(edit for item in result for edit in item.edits)
    if not result:
        assert first == second
        return
    whole = Change(pointer="", before=None, after=None, edits=edits)
    assert digest(apply_changes(first, whole)) == digest(second)
    back = find_changes(second, first)
    assert sorted((c.before, c.after) for c in result if c.pointer == "/steps") == sorted(
        (c.after, c.before) for c in back if c.pointer == "/steps"
    )


def test_what_is_only_written_differently_is_no_change(plan_of: PlanOf) -> None:
    phase = {name: DOCUMENT[name] for name in ("sampling", "steps", "releases")}
    other = plan_of(sampling=..., steps=..., releases=..., phases=[phase], extra=[])
    assert find_changes(plan_of(), other) == ()


def test_fields_of_which_one_is_given_are_one_change(plan_of: PlanOf) -> None:
    (result,) = find_changes(plan_of(**POISSON), plan_of(**{**POISSON, "steps": ..., "epochs": 2}))
    assert (result.before, result.after) == ({"steps": 40}, {"epochs": 2.0})
    assert apply_changes(plan_of(**POISSON), result).phases[0].epochs == 2


def test_a_part_of_another_kind_is_one_change(plan_of: PlanOf) -> None:
    (result,) = find_changes(plan_of(), plan_of(sampling={"scheme": "poisson", "lot_size": 50}))
    assert result.pointer == "/sampling"
    (added,) = find_changes(plan_of(), plan_of(notes="why"))
    assert (added.before, added.is_text_only) == (ABSENT, True)


def test_a_phase_that_is_added_is_a_change_of_the_phases(plan_of: PlanOf) -> None:
    phase = {name: DOCUMENT[name] for name in ("sampling", "steps", "releases")}
    two = plan_of(sampling=..., steps=..., releases=..., phases=[phase, phase])
    (result,) = find_changes(plan_of(), two)
    assert result.pointer == "/phases"
    assert digest(apply_changes(plan_of(), result)) == digest(two)


def test_each_change_alone_is_certified_as_that_plan_is(plan_of: PlanOf) -> None:
    first = plan_of()
    second = plan_of(steps=40, releases=[{"name": "all", "clip_norm": 1, "noise_multiplier": 30}])
    result = compare_plans(first, second)
    noise, steps = result.effects
    assert steps.assessment is not None
    assert steps.assessment.epsilon == certify(plan_of(steps=40), second_opinion=False).epsilon
    assert (noise.moved, steps.moved) == ("lowered", "raised")
    # One Gaussian: 40 steps at 30 are μ = √40/30, 10 at 20 are √10/20, so the second leaks more.
    assert math.sqrt(40) / 30 > math.sqrt(10) / 20
    assert result.ranking == "first"
    assert result.strongest is steps


@pytest.mark.parametrize(
    ("other", "code"),
    [
        ({"adjacency": "replace_one"}, "different_adjacency"),
        ({"target": {"epsilon": 8, "delta": 1e-6}}, "different_delta"),
        (
            {"dataset": {"name": "toy", "size": 1000, "unit": "user", "contributions_per_user": 1}},
            "different_unit",
        ),
        ({"sampling": {"scheme": "fixed_size", "lot_size": 50}}, "nothing_claimed"),
    ],
)
def test_guarantees_that_do_not_mean_the_same_are_not_ranked(
    plan_of: PlanOf, other: dict[str, Any], code: str
) -> None:
    for pair in (plan_of(), plan_of(**other)), (plan_of(**other), plan_of()):
        result = compare_plans(*pair)
        assert result.ranking is None
        assert [obstacle.code for obstacle in result.obstacles] == [code]
        assert all(item.remedy for item in result.obstacles)
        assert result.act_together is False
        # The one change is what makes them incomparable, so that it has not moved ε either.
        assert all(entry.moved in (None, "unmoved") for entry in result.effects)


def test_a_guarantee_with_a_confidence_is_not_ranked_beside_a_certain_one(plan_of: PlanOf) -> None:
    sure = certify(plan_of(), second_opinion=False)
    likely = replace(sure, confidence=Confidence(level=0.99, seed="1"))
    result = comparison_of(sure, likely, [])
    assert [obstacle.code for obstacle in result.obstacles] == ["different_confidence"]
    assert comparison_of(likely, likely, []).ranking == "not_told_apart"


def test_brackets_that_overlap_are_not_told_apart(plan_of: PlanOf) -> None:
    result = compare_plans(plan_of(), plan_of(name="other"))
    assert result.ranking == "not_told_apart"
    assert [item.moved for item in result.effects] == [None]
    assert result.strongest is None


@pytest.mark.soak
def test_a_change_within_the_width_of_the_brackets_is_not_told_apart(plan_of: PlanOf) -> None:
    """Lots without replacement have wide brackets; a change that is clear still has its sign."""
    wide: dict[str, Any] = {"sampling": {"scheme": "fixed_size", "lot_size": 50}, "steps": 40}
    first = plan_of(adjacency="replace_one", **wide, **_noise(2.0))
    for noise, moved in ((2.0001, "not_told_apart"), (1.9999, "not_told_apart")):
        (noise_alone,) = compare_plans(
            first, plan_of(adjacency="replace_one", **wide, **_noise(noise))
        ).effects
        assert noise_alone.moved == moved, noise
    for noise, moved, other in ((4.0, "lowered", "raised"), (1.0, "raised", "lowered")):
        (noise_alone,) = compare_plans(
            first, plan_of(adjacency="replace_one", **wide, **_noise(noise))
        ).effects
        assert (noise_alone.moved, noise_alone.noise_moved) == (moved, other)


def test_noise_that_was_given_is_told_apart_however_near(plan_of: PlanOf) -> None:
    (alone,) = compare_plans(plan_of(**_noise(20.0)), plan_of(**_noise(20.0002))).effects
    assert (alone.moved, alone.noise_moved) == ("lowered", "raised")


def _noise(sigma: float) -> dict[str, Any]:
    return {"releases": [{"name": "all", "clip_norm": 1, "noise_multiplier": sigma}]}


def test_where_the_noise_is_open_it_is_the_noise_that_moves(plan_of: PlanOf) -> None:
    requested = [{"name": "all", "clip_norm": 1}]
    first = plan_of(releases=requested)
    result = compare_plans(first, plan_of(releases=requested, steps=40))
    (steps,) = result.effects
    assert steps.noise_moved == "raised"
    assert steps.moved in ("not_told_apart", "unmoved")
    assert steps.assessment is not None
    assert result.first.joint is not None
    # Four times the steps need twice the noise.
    assert steps.assessment.joint == pytest.approx(2 * result.first.joint, rel=1e-3)


def test_the_strongest_change_is_the_one_that_moved_furthest(plan_of: PlanOf) -> None:
    """Four times the steps double the noise; a change that is refused counts for none."""
    requested: dict[str, Any] = {"releases": [{"name": "all", "clip_norm": 1}]}
    tighter: dict[str, Any] = {"steps": 40, "target": {"epsilon": 7, "delta": 1e-5}}
    for one, other in ((requested, requested | tighter), (requested | tighter, requested)):
        result = compare_plans(plan_of(**one), plan_of(**other))
        assert {element.change.pointer for element in result.effects} == {
            "/steps",
            "/target/epsilon",
        }
        assert result.strongest_on_noise is not None
        assert result.strongest_on_noise.change.pointer == "/steps"
    provided: dict[str, Any] = {**_noise(20), "steps": 40}
    other = {**_noise(22), "steps": 10, "sampling": {"scheme": "fixed_size", "lot_size": 50}}
    result = compare_plans(plan_of(**provided), plan_of(**other))
    assert [entry.change.pointer for entry in result.effects if entry.moved is None] == [
        "/sampling"
    ]
    assert result.strongest is not None
    assert result.strongest.change.pointer == "/steps"
    (noise,) = [item for item in result.effects if item.noise_moved == "raised"]
    assert result.strongest_on_noise is noise


@pytest.mark.parametrize(
    ("epsilon", "moved"),
    [
        (7.999, "not_told_apart"),
        (8.001, "not_told_apart"),
        (8.01, "lowered"),
        (7.99, "raised"),
    ],
)
def test_noise_that_was_solved_for_is_told_apart_beyond_what_solving_leaves_open(
    plan_of: PlanOf, epsilon: float, moved: str
) -> None:
    """A thousandth of this ε is a ten-thousandth of the noise."""
    requested: dict[str, Any] = {"releases": [{"name": "all", "clip_norm": 1}]}
    second = plan_of(**requested, target={"epsilon": epsilon, "delta": 1e-5})
    (target,) = compare_plans(plan_of(**requested), second).effects
    assert target.noise_moved == moved


def test_the_sentence_names_the_stronger_guarantee_with_both_numbers(plan_of: PlanOf) -> None:
    little, much = plan_of(**_noise(10.0)), plan_of(**_noise(20.0))
    for first, second, stated in (
        (much, little, "The first guarantee is stronger: ε ≤ "),
        (little, much, "The second guarantee is stronger: ε ≤ "),
        (much, much, "The guarantees are indistinguishable: ε ≤ "),
    ):
        sentence = compare_plans(first, second).sentence
        assert sentence.startswith(stated)
        assert sentence.endswith("at δ = 1e-5 (add_remove, per example).")


def test_several_obstacles_are_one_sentence(plan_of: PlanOf) -> None:
    first = plan_of(target={"delta": 1e-5})
    second = plan_of(target={"delta": 1e-6}, adjacency="zero_out")
    result = compare_plans(first, second)
    assert len(result.obstacles) == 2
    assert result.sentence.count("; ") == 1
    assert result.sentence.count(". ") == 0


def test_a_change_that_is_refused_alone_has_the_reasons_of_that_plan(plan_of: PlanOf) -> None:
    """Under add_remove lots in a fixed order are not certified; the sampler changes too."""
    first = plan_of(adjacency="zero_out", sampling={"scheme": "cyclic", "lot_size": 50})
    second = plan_of(adjacency="add_remove", **POISSON)
    result = {item.change.pointer: item for item in compare_plans(first, second).effects}
    refused = result["/adjacency"]
    assert refused.assessment is not None
    assert [reason.code for reason in refused.reasons] == ["removal_moves_records"]


def test_a_change_that_cannot_stand_alone_says_why(plan_of: PlanOf) -> None:
    release = {"name": "all", "clip_norm": 1}
    first = plan_of(releases=[release])
    second = plan_of(allocation="optimal", releases=[{**release, "dimension": 9}])
    result = {item.change.pointer: item for item in compare_plans(first, second).effects}
    assert result["/allocation"].assessment is None
    assert result["/allocation"].reasons[0].remedy


def test_a_field_of_several_blocks_is_one_change(plan_of: PlanOf) -> None:
    """Blocks are solved for together or not at all: one without noise is no plan."""

    def with_noise(*sigmas: float | None) -> Plan:
        blocks = [{"name": f"b{i}", "clip_norm": 1} for i in range(len(sigmas))]
        noise = [{} if s is None else {"noise_multiplier": s} for s in sigmas]
        return plan_of(releases=[{**a, **b} for a, b in zip(blocks, noise, strict=True)])

    (noise,) = compare_plans(with_noise(9, 9, 9), with_noise(None, None, None)).effects
    assert (noise.change.pointer, noise.moved) == ("/releases/*/noise_multiplier", "raised")
    assert (noise.change.before, noise.change.after) == (9.0, ABSENT)
    (change,) = find_changes(with_noise(9, 9, 9), with_noise(9, 10, 12))
    assert (change.before, change.after) == (9.0, {"b1": 10.0, "b2": 12.0})
    assert apply_changes(with_noise(9, 9, 9), change) == with_noise(9, 10, 12)


@pytest.mark.soak
@given(documents, documents)
@settings(max_examples=15)
def test_contributions_sum_to_the_difference_of_the_bounds(
    one: dict[str, Any], other: dict[str, Any]
) -> None:
    first, second = plan_from({**DOCUMENT, **one}), plan_from({**DOCUMENT, **other})
    result = compare_plans(first, second)
    effective = [item.change for item in result.effects if not item.change.is_text_only]
    if result.obstacles or not effective:
        assert result.contributions == ()
        return
    total = sum(item.difference for item in result.contributions)
    ends = [Decimal(each.epsilon_text or "") for each in (result.first, result.second)]
    assert total == ends[1] - ends[0]
    assert result.contributions[0].before is result.first
    assert result.contributions[-1].after is result.second
    made = [change for item in result.contributions for change in item.changes]
    assert sorted(made, key=str) == sorted(effective, key=str)


def test_changes_that_act_together_say_so(plan_of: PlanOf) -> None:
    block = {"name": "all", "clip_norm": 1, "noise_multiplier": 20}
    blocks = [{**block, "noise_multiplier": 30, "count": 4}]
    result = compare_plans(
        plan_of(clipping="flat", releases=[block]), plan_of(clipping="per_block", releases=blocks)
    )
    # A flat clip of four blocks is one release; four clips of their own are twice as sensitive.
    assert result.ranking == "first"
    alone = {item.change.pointer: item.moved for item in result.effects}
    assert alone["/clipping"] == "unmoved"
    assert result.act_together == all(moved != "raised" for moved in alone.values())
    assert result.as_document()["act_together"] is result.act_together
