"""An assessment as a result document."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from affidavit.accountants import Bracket
from affidavit.assessment import certify, interval, malformed_result
from affidavit.plan import Reason

REASON = Reason(code="wrong", pointer="/steps", message="It is wrong.", remedy="Mend it.")


def test_of_phases_each_release_says_which_it_is_of(make_plan: Any) -> None:
    phase = {
        "sampling": {"scheme": "shuffled", "lot_size": 1024},
        "steps": 41,
        "releases": [{"name": "all", "clip_norm": 1, "noise_multiplier": 9.0}],
    }
    gone = {"sampling": ..., "steps": ..., "releases": ...}
    result = certify(make_plan(**gone, phases=[phase, phase]), second_opinion=False).as_result()
    assert [item["phase"] for item in result["noise_multiplier"]["releases"]] == [0, 1]
    assert len(result["sampling"]) == 2


def test_what_is_alone_stands_without_a_list(make_plan: Any) -> None:
    result = certify(make_plan(), second_opinion=False)
    data = result.as_result()
    assert "strategy" not in data
    assert data["sampling"]["scheme"] == "shuffled"
    assert all("phase" not in item for item in data["noise_multiplier"]["releases"])
    one, other = {"name": "one"}, {"name": "other"}
    assert replace(result, strategies=(one,)).as_result()["strategy"] == one
    assert replace(result, strategies=(one, other)).as_result()["strategy"] == [one, other]


def test_every_number_has_its_own_place(make_plan: Any) -> None:
    result = replace(
        certify(make_plan(), second_opinion=False),
        epsilon=Bracket(lower=1.0, upper=2.0),
        delta=Bracket(lower=3.0, upper=4.0),
        target_epsilon=5.0,
        target_delta=6.0,
        joint=7.0,
        sensitivity=8.0,
        mu=9.0,
        reasons=(REASON,),
    )
    data = result.as_result()
    assert data["epsilon"] == {"lower": 1.0, "upper": 2.0}
    assert data["delta"] == {"lower": 3.0, "upper": 4.0}
    assert data["target"] == {"epsilon": 5.0, "delta": 6.0}
    assert (data["noise_multiplier"]["joint"], data["sensitivity"], data["mu"]) == (
        7.0,
        8.0,
        9.0,
    )
    assert data["reasons"] == [REASON.as_dict()]
    assert data["confidence"] is None
    assert (data["adjacency"], data["unit"]) == ("zero_out", result.unit)
    assert data["plan_digest"] == result.plan_digest
    assert data["obligations"] == list(result.obligations)
    assert data["assumptions"] == list(result.assumptions)


def test_what_has_no_bound_is_null_and_never_infinite() -> None:
    assert interval(Bracket(lower=0.5, upper=math.inf)) == {"lower": 0.5, "upper": None}
    assert interval(None) is None


def test_a_line_that_is_no_plan_is_refused_with_the_fields_of_a_result() -> None:
    data = malformed_result((REASON,))
    assert data["verdict"] == "refused"
    assert data["reasons"] == [REASON.as_dict()]
    assert data["plan_digest"] is data["epsilon"] is data["delta"] is None
    assert data["accountants"] == data["warnings"] == data["obligations"] == []
