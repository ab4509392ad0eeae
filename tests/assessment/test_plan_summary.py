"""A result describes the strategy of correlated noise and what is not amplified."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from affidavit.assessment import certify
from affidavit.plan import Plan, as_document, plan_from

Make = Callable[..., Plan]
STREAM: dict[str, Any] = {
    "adjacency": "zero_out",
    "sampling": {"scheme": "cyclic", "lot_size": 100},
    "steps": 30,
    "noise": {"kind": "bidiagonal", "lambda": 0.9},
}
FULL = {"epsilon": 4, "delta": 1e-5}
SMALL = {"delta": 1e-16}
OPEN = [{"name": "all", "clip_norm": 1}]


def result(plan: Plan) -> dict[str, Any]:
    return certify(plan).as_result()


def test_the_result_has_the_strategy_and_its_errors_at_unit_noise(plan_of: Make) -> None:
    outcome = result(plan_of(**STREAM))
    strategy = outcome["strategy"]
    assert strategy["kind"] == "bidiagonal"
    assert strategy["exact"] is True
    assert strategy["sensitivity"] == pytest.approx(4.80, abs=5e-3)
    assert strategy["rms_error"] ** 2 == pytest.approx(1 + 0.01 * 29 / 2)
    assert strategy["max_error"] ** 2 == pytest.approx(1 + 0.01 * 29)
    assert strategy["coefficients"] == [1.0, -0.9]
    assert outcome["sensitivity"] == strategy["sensitivity"]
    assert outcome["mu"] == pytest.approx(strategy["sensitivity"] / 20)


def test_a_plan_that_gives_no_lambda_gets_the_best_one_for_its_workload(plan_of: Make) -> None:
    about: dict[str, Any] = {
        **STREAM,
        "dataset": {"name": "toy", "size": 10_000},
        "steps": 1000,
        "releases": [{"name": "all", "clip_norm": 1, "noise_multiplier": 20}],
    }

    def loss(noise: dict[str, Any]) -> float:
        strategy = result(plan_of(**{**about, "noise": noise}))["strategy"]
        return float(strategy["rms_error"] * strategy["sensitivity"])

    left = result(plan_of(**{**about, "noise": {"kind": "bidiagonal"}}))
    best = -left["strategy"]["coefficients"][1]
    named = result(plan_of(**{**about, "noise": {"kind": "bidiagonal", "lambda": best}}))
    assert left["epsilon"] == named["epsilon"]
    assert left["strategy"] == named["strategy"]
    assert left["plan_digest"] != named["plan_digest"]
    outcome = loss({"kind": "bidiagonal"})
    assert outcome <= 15.26
    for aside in (-0.01, -0.001, 0.001, 0.01):
        assert outcome < loss({"kind": "bidiagonal", "lambda": best + aside})


def test_lambda_zero_is_independent_noise_exactly(plan_of: Make) -> None:
    zero = result(plan_of(**{**STREAM, "noise": {"kind": "bidiagonal", "lambda": 0}}))
    none = result(plan_of(**{**STREAM, "noise": {"kind": "independent"}}))
    assert zero["epsilon"]["upper"] == pytest.approx(none["epsilon"]["upper"], rel=1e-12)
    assert zero["strategy"]["sensitivity"] == pytest.approx(3**0.5, rel=1e-15)


def test_independent_noise_has_no_strategy(plan_of: Make) -> None:
    assert "strategy" not in result(plan_of())
    in_turn = {"schema": "fixed_epoch", "participations": 3, "separation": 10}
    data = plan_of(**{**STREAM, "noise": {"kind": "independent"}, "participation": in_turn})
    assert "strategy" not in result(data)


def test_a_replaced_record_counts_twice_beside_its_strategy(plan_of: Make) -> None:
    outcome = result(plan_of(**{**STREAM, "adjacency": "replace_one"}))
    assert outcome["sensitivity"] == pytest.approx(2 * outcome["strategy"]["sensitivity"])
    assert outcome["mu"] == pytest.approx(outcome["sensitivity"] / 20)


def test_the_workload_shapes_the_errors_and_not_the_guarantee(plan_of: Make) -> None:
    plain = result(plan_of(**STREAM))
    other = result(plan_of(**STREAM, workload={"kind": "momentum", "momentum": 0.9}))
    assert other["epsilon"] == plain["epsilon"]
    assert other["strategy"]["rms_error"] > plain["strategy"]["rms_error"]


def test_noise_is_solved_for_through_the_sensitivity(plan_of: Make) -> None:
    outcome = result(plan_of(**STREAM, releases=OPEN, target=FULL))
    assert outcome["verdict"] == "certified"
    assert 3.99 < outcome["epsilon"]["upper"] <= 4
    (release,) = outcome["noise_multiplier"]["releases"]
    once = {**STREAM, "noise": {"kind": "independent"}}
    (plain,) = result(plan_of(**once, releases=OPEN, target=FULL))["noise_multiplier"]["releases"]
    ratio = outcome["strategy"]["sensitivity"] / 3**0.5
    assert release["required"] / plain["required"] == pytest.approx(ratio, rel=1e-3)


def test_the_most_steps_are_the_last_that_meet_the_target(plan_of: Make) -> None:
    outcome = result(plan_of(**{**STREAM, "steps": None}, target=FULL))
    steps = outcome["sampling"]["steps"]
    assert outcome["verdict"] == "certified"
    at = {"target": FULL}
    assert result(plan_of(**{**STREAM, "steps": steps}, **at))["verdict"] == "certified"
    assert result(plan_of(**{**STREAM, "steps": steps + 1}, **at))["verdict"] == "under_noised"


@pytest.mark.ordinary("not changes1-*")
@pytest.mark.parametrize(
    ("changes", "code"),
    [
        (
            {
                "adjacency": "replace_one",
                "sampling": {"scheme": "cyclic_poisson", "lot_size": 10, "groups": 10},
            },
            "no_amplification",
        ),
        (
            {
                "sampling": {"scheme": "balls_in_bins", "lot_size": 100},
                "noise": {"kind": "bidiagonal", "lambda": -0.5},
            },
            "no_amplification",
        ),
        (
            {
                "noise": {
                    "kind": "toeplitz",
                    "coefficients": ([1] + [0] * 9 + 2 * ([-0.5] + [0] * 9)),
                }
            },
            "sensitivity_is_a_bound",
        ),
    ],
)
def test_what_a_reader_should_know_is_said(
    plan_of: Make, changes: dict[str, Any], code: str
) -> None:
    outcome = result(plan_of(**{**STREAM, **changes}))
    assert code in [warning["code"] for warning in outcome["warnings"]]
    assert outcome["strategy"]["exact"] == (code == "no_amplification")


@pytest.mark.parametrize(
    ("lot", "restart", "warned"), [(100, True, True), (125, True, False), (100, False, False)]
)
def test_a_tree_that_is_cut_short_is_warned_of(
    plan_of: Make, lot: int, restart: bool, warned: bool
) -> None:
    """1,000 records make trees of 10 and of 8 steps; the last tree of a run is followed by none."""
    noise = {"kind": "tree", "restart": restart}
    sampling = {"scheme": "cyclic", "lot_size": lot}
    outcome = result(plan_of(**{**STREAM, "noise": noise, "sampling": sampling}))
    codes = [warning["code"] for warning in outcome["warnings"]]
    assert ("tree_not_completed" in codes) == warned


def test_a_tree_that_another_phase_follows_is_warned_of(plan_of: Make) -> None:
    document = as_document(plan_of(**{**STREAM, "noise": {"kind": "tree"}}))
    shared = ("steps", "sampling", "noise", "releases", "clipping")
    phase = {name: document.pop(name) for name in shared if name in document}
    for steps, warned in ((30, True), (32, False)):
        plan = plan_from({**document, "phases": [{**phase, "steps": steps}, phase]})
        codes = [warning["code"] for warning in result(plan)["warnings"]]
        assert ("tree_not_completed" in codes) == warned


def test_a_dense_strategy_is_told_by_the_digest_of_its_noise(plan_of: Make) -> None:
    outcome = result(plan_of(**{**STREAM, "noise": {"kind": "dense"}}))["strategy"]
    assert len(outcome["noise_sha256"]) == 64
    assert "coefficients" not in outcome


def test_phases_have_a_strategy_each(plan_of: Make) -> None:
    phase = {**{key: STREAM[key] for key in ("sampling", "steps", "noise")}}
    phase["releases"] = [{"name": "all", "clip_norm": 1, "noise_multiplier": 20}]
    plain = {**phase, "noise": {"kind": "independent"}}
    changes = dict.fromkeys(phase, ...)
    plan = plan_of(adjacency="zero_out", **changes, phases=[phase, plain, {**phase, "steps": 5}])
    strategies = result(plan)["strategy"]
    assert [strategy["participation"]["participations"] for strategy in strategies] == [3, 1]


def test_errors_are_known_for_runs_of_any_length(plan_of: Make) -> None:
    endless = {**STREAM, "steps": 10**12, "releases": [{**OPEN[0], "noise_multiplier": 1e9}]}
    dataset = {"size": 10**15}
    endless |= {"dataset": dataset, "sampling": {"scheme": "cyclic", "lot_size": 1000}}
    strategy = result(plan_of(**endless, target=SMALL))["strategy"]
    # A prefix sum of n steps has 0.1² of each step's noise, and the last whole.
    assert strategy["rms_error"] == pytest.approx(0.1 * (10**12 / 2) ** 0.5, rel=1e-6)
    assert strategy["sensitivity"] == pytest.approx((1 - 0.81) ** -0.5)
