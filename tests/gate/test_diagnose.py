"""``diagnose`` says what was claimed, what is true, which step went wrong, and the fix."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Make = Callable[..., dict[str, Any]]
PUBLISHED = str(Path(__file__).parents[2] / "examples" / "e2e-dp-muon-published.yaml")
DP_SGD = str(Path(__file__).parents[2] / "examples" / "e2e-dp-sgd-published.yaml")


def test_the_published_row_is_named_and_blocked(answer: Any) -> None:
    code, result = answer("diagnose", PUBLISHED, "--claimed-epsilon", "7.9852", "--json")
    assert code == 1
    assert result["certified"]["verdict"] == "under_noised"
    (only,) = result["explanations"]
    assert (only["mistakes"], only["accountant"]) == (["independent_blocks"], "rdp")
    assert only["reproduces"] == pytest.approx(7.98505, abs=1e-5)
    assert only["differs_by"] == pytest.approx(-0.00015, abs=1e-5)
    assert result["corrected"]["verdict"] == "certified"
    assert result["corrected"]["epsilon"]["upper"] <= 7.9852


@pytest.mark.parametrize(
    "claim",
    [("--claimed-epsilon", "8.0000"), ("--claimed-noise-multiplier", "0.7189")],
)
def test_a_right_claim_is_none_and_passes(answer: Any, claim: tuple[str, str]) -> None:
    code, result = answer("diagnose", DP_SGD, *claim, "--json")
    assert (code, result["explanations"]) == (0, [{"mistakes": ["none"]}])
    assert result["corrected"] is None


@pytest.mark.by_turns
@pytest.mark.parametrize(
    ("changes", "exit_code", "codes"),
    [
        ({"claim": "2.0"}, 0, []),
        ({"claim": "1.8"}, 3, ["claim_not_decided"]),
        ({"claim": "0.1234"}, 1, ["claim_below_certified"]),
        ({"claim": "1.8", "target": {"epsilon": 3, "delta": 1e-5}}, 3, ["claim_not_decided"]),
        (
            {"claim": "1.8", "target": {"epsilon": 1.7, "delta": 1e-5}},
            1,
            ["unproved", "claim_not_decided"],
        ),
    ],
)
def test_every_command_answers_a_claim_in_one_of_three_ways(
    answer: Any, run: Any, save: Any, document: Make, changes: Any, exit_code: int, codes: list[str]
) -> None:
    """Ten shuffled lots with σ = 2 have ε in [1.489, 1.994]."""
    shuffled = {
        "dataset": {"size": 1000},
        "adjacency": "zero_out",
        "sampling": {"scheme": "shuffled", "lot_size": 100},
        "releases": [{"name": "all", "clip_norm": 1, "noise_multiplier": 2}],
        "target": {"delta": 1e-5},
    }
    plan = document(**{**shuffled, **changes})
    path = save(plan)
    checked, results = answer("check", path, "--format", "json")
    certified, result = answer("certify", path, "--json")
    batch = run("batch", save(json.dumps(plan) + "\n", "plans.jsonl"), "--jobs", "1")
    assert (checked, certified, batch.exit_code) == (exit_code, exit_code, exit_code)
    found = [item["rule"] for item in results["plans"][0]["findings"] if item["blocks"]]
    assert found == codes
    assert [reason["code"] for reason in result["reasons"]][: len(codes)] == codes
    told, diagnosis = answer("diagnose", path, "--json")
    expected = {0: "holds", 1: "refuted", 3: "not_decided"}[told]
    assert diagnosis["answer"] == expected
    assert (diagnosis["answer"] == "not_decided") == ("claim_not_decided" in codes)


def test_a_privacy_officer_reads_five_things(run: Any) -> None:
    told = run("diagnose", PUBLISHED, "--claimed-epsilon", "7.9852").stdout
    claimed, true = "ε = 7.9852 at δ = 8e-6 is claimed", "ε is at least 61.97"
    step, source, fix = "20090 releases", "arXiv:2605.12994v1", "one release at the joint noise"
    for part in (claimed, true, step, source, fix, "to make the claim hold: noise multipliers"):
        assert part in told


def test_the_claim_of_the_plan_is_taken_where_none_is_given(
    answer: Any, document: Make, save: Any
) -> None:
    code, result = answer("diagnose", save(document(claim="0.01")), "--json")
    assert (code, result["claim"]) == (1, {"epsilon": "0.01"})


@pytest.mark.parametrize(
    ("arguments", "changes", "code"),
    [
        ((), {}, "invalid_claim"),
        (("--claimed-epsilon", "eight"), {}, "invalid_claim"),
        (("--claimed-epsilon", "-1"), {}, "invalid_claim"),
        (("--claimed-epsilon", "0"), {}, "invalid_claim"),
        (("--claimed-epsilon", "1e400"), {}, "invalid_claim"),
        (("--claimed-epsilon", "1", "--claimed-noise-multiplier", "1"), {}, "invalid_claim"),
        (("--claimed-epsilon", "1"), {"steps": None}, "claim_unanswerable"),
        (("--claimed-epsilon", "1"), {"target": {"epsilon": 8}}, "claim_unanswerable"),
        (("--claimed-noise-multiplier", "1"), {"target": {"delta": 1e-5}}, "claim_unanswerable"),
        (("--claimed-epsilon", "1"), {"steps": 0}, "invalid_value"),
    ],
)
def test_what_cannot_be_diagnosed_is_a_mistake_of_use(
    run: Any, answer: Any, document: Make, save: Any, arguments: Any, changes: Any, code: str
) -> None:
    path = save(document(**changes))
    exit_code, result = answer("diagnose", path, *arguments, "--json")
    assert exit_code == 2
    assert result["reasons"][0]["code"] == code
    assert result["reasons"][0]["remedy"]
    told = run("diagnose", path, *arguments)
    assert (told.exit_code, told.stdout) == (2, "")
    assert code in told.stderr


def test_check_and_certify_name_the_mistake_of_a_claim(run: Any, answer: Any, save: Any) -> None:
    plan = save(Path(PUBLISHED).read_text() + "claim: 7.9852\n", "claimed.yaml")
    told = run("check", plan)
    assert told.exit_code == 1
    assert re.search(r"claimed\.yaml:15:\d+: claim_below_certified /claim/epsilon", told.stderr)
    assert "Known mistake: independent_blocks." in told.stderr
    code, result = answer("certify", plan, "--json")
    assert (code, result["verdict"]) == (1, "under_noised")
    assert "independent_blocks" in [reason["code"] for reason in result["reasons"]]
