"""A claim that cannot be certified blocks its plan; a correct claim does not."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from affidavit.accountants import Bracket
from affidavit.assessment import certify
from affidavit.assessment.diagnose import diagnose
from affidavit.assessment.diagnosis import claims
from affidavit.assessment.diagnosis.claims import Explanation, claimed_plan
from affidavit.assessment.diagnosis.mistake import Way
from affidavit.assessment.diagnosis.readings import Agreement, Reading
from affidavit.plan import Claim, Plan

PlanOf = Callable[..., Plan]
BLOCKS = {
    "dataset": {"size": 42043},
    "sampling": {"scheme": "poisson", "lot_size": 1024},
    "steps": 410,
    "releases": [{"name": "all", "count": 49, "clip_norm": 0.1, "noise_multiplier": 2.3395}],
    "target": {"delta": 8e-6},
}


def truth(plan: Plan) -> Bracket:
    result = certify(plan, second_opinion=False).epsilon
    assert result is not None
    return result


def rounded(value: float, digits: int, direction: float = 0.0) -> str:
    unit = 10.0 ** (math.floor(math.log10(value)) + 1 - digits)
    places = max(0, digits - 1 - math.floor(math.log10(value)))
    return f"{(round(value / unit) + direction) * unit:.{places}f}"


@pytest.mark.parametrize("digits", [2, 3, 4, 5])
def test_a_right_claim_holds_to_its_digits(plan_of: PlanOf, digits: int) -> None:
    exact = truth(plan_of()).lower
    for text in (rounded(exact, digits), rounded(exact, digits, 1), str(3 * exact)[:8]):
        assert certify(plan_of(claim=text), second_opinion=False).verdict == "certified"


def test_a_claim_far_below_blocks_even_a_plan_that_meets_its_target(plan_of: PlanOf) -> None:
    exact = truth(plan_of()).lower
    assert certify(plan_of(), second_opinion=False).verdict == "certified"
    result = certify(plan_of(claim=exact / 2), second_opinion=False)
    assert result.verdict == "under_noised"
    assert result.reasons[0].code == "claim_below_certified"
    assert result.reasons[0].pointer == "/claim/epsilon"


def test_the_mistake_stands_among_the_reasons(plan_of: PlanOf) -> None:
    result = certify(plan_of(**BLOCKS, claim="7.9852"), second_opinion=False)
    assert [reason.code for reason in result.reasons] == [
        "claim_below_certified",
        "independent_blocks",
    ]
    assert result.reasons[1].pointer == "/releases"
    assert "7.98505" in result.reasons[1].message
    assert all(reason.remedy for reason in result.reasons)


def test_a_claimed_noise_multiplier_is_compared_with_the_target(plan_of: PlanOf) -> None:
    plan = {**BLOCKS, "target": {"epsilon": 8, "delta": 8e-6}}
    wrong = certify(plan_of(**plan, claim={"noise_multiplier": "2.3395"}), second_opinion=False)
    assert [reason.code for reason in wrong.reasons] == [
        "under_noised",
        "claim_below_certified",
        "independent_blocks",
    ]
    needed = wrong.releases[0].required
    assert needed is not None
    right = {"noise_multiplier": f"{needed:.5g}"}
    open_noise = [{"name": "all", "count": 49, "clip_norm": 0.1}]
    assert (
        certify(
            plan_of(**{**plan, "releases": open_noise}, claim=right), second_opinion=False
        ).verdict
        == "certified"
    )


def test_a_claim_rounded_to_below_the_bound_is_told_of(plan_of: PlanOf) -> None:
    exact = truth(plan_of()).lower
    down = rounded(exact, 3, 0 if float(rounded(exact, 3)) < exact else -1)
    result = certify(plan_of(claim=down), second_opinion=False)
    assert result.verdict == "certified"
    assert [warning.code for warning in result.warnings if warning.code == "claim_rounded_down"]
    for claimed, is_below in ((down, True), (rounded(exact, 3, 1), False)):
        summary = diagnose(plan_of(), Claim(epsilon=claimed)).summary
        assert ("rounded down" in summary) is is_below


def test_a_refused_plan_stays_refused_and_its_claim_is_explained(plan_of: PlanOf) -> None:
    plan = plan_of(**{**BLOCKS, "sampling": {"scheme": "shuffled", "lot_size": 1024}})
    result = diagnose(plan, Claim(epsilon="7.9852"))
    assert result.certified.verdict == "refused"
    assert result.answer == "not_decided"
    assert set(result.explanations[0].mistakes) == {"independent_blocks", "poisson_for_shuffle"}
    assert result.corrected is None
    assert (result.as_result()["corrected"], result.corrected_summary) == (None, None)


@pytest.mark.parametrize("effort", [0, pytest.param(10_000, marks=pytest.mark.soak)])
def test_whether_every_pair_was_tried_is_told(
    plan_of: PlanOf, effort: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims, "PAIR_EFFORT", effort)
    monkeypatch.setattr(claims, "MAX_COST", -1.0)
    result = diagnose(plan_of(**BLOCKS), Claim(epsilon="1.2345678"))
    assert result.explanations == ()
    assert ("not every pair" in result.summary) == (effort == 0)


def test_what_nothing_explains_is_wrong_all_the_same(plan_of: PlanOf) -> None:
    result = diagnose(plan_of(), Claim(epsilon="0.0017312345"))
    assert not result.holds
    assert "no known mistake" in result.summary or result.explanations
    assert result.corrected is not None
    assert result.corrected.epsilon is not None
    assert result.corrected.epsilon.upper <= 0.0017312345 * (1 + 1e-6)


@pytest.mark.soak
def test_beyond_the_two_sided_engine_a_claim_still_meets_a_floor(plan_of: PlanOf) -> None:
    """σ_joint = 0.1 is below what the two-sided engine takes."""
    blocks = [{**BLOCKS["releases"][0], "noise_multiplier": 0.7}]  # type: ignore[index]
    plan = plan_of(**{**BLOCKS, "releases": blocks})
    assert truth(plan).lower > 100
    assert diagnose(plan, Claim(epsilon="8.31")).holds is False
    assert diagnose(plan, Claim(epsilon="5000")).holds is True


def test_a_claimed_multiplier_is_that_of_every_block(plan_of: PlanOf) -> None:
    """It takes the place of a noise in the sum's own units, too, and of nothing else."""
    releases = [
        {"name": "one", "clip_norm": 2.0, "noise_std": 7.0},
        {"name": "two", "clip_norm": 0.5, "noise_multiplier": 3.0},
    ]
    plan = plan_of(releases=releases, claim={"noise_multiplier": "1.250"})
    assert plan.claim is not None
    meant = claimed_plan(plan, plan.claim)
    provided = [{**release, "noise_multiplier": 1.25} for release in releases]
    provided[0].pop("noise_std")
    assert meant == plan_of(releases=provided)
    assert claimed_plan(plan, Claim(epsilon=1)) == plan_of(releases=releases)


def test_what_is_nearly_right_counts_for_more_where_the_program_is_no_better() -> None:
    way = Way(code="single_block", text="", cost=1.0)
    for agreement, above, against in (
        (Agreement.EXACTLY, 0.0, 0.0),
        (Agreement.EXACTLY, 0.1, 0.0),
        (Agreement.CUT, 0.0, 1.2),
        (Agreement.CUT, 0.1, 1.2),
        (Agreement.APPROXIMATELY, 0.0, 1.6),
        (Agreement.APPROXIMATELY, 0.1, 0.8),
    ):
        reading = Reading(accountant="prv", epsilon=1.0, cost=0.5, above=above)
        data = Explanation(ways=(way, way), reading=reading, agreement=agreement, differs_by=0.0)
        assert data.cost == pytest.approx(2.5 + against), (agreement, above)
