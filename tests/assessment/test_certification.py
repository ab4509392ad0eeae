"""Certified noise suffices, and insufficient noise is never certified."""

from __future__ import annotations

from typing import Any

import pytest

from affidavit.accountants import Bracket
from affidavit.accountants import fourier_accountant as accountant
from affidavit.accountants.gaussian import GaussianAccountant, GaussianCurve
from affidavit.assessment import certify
from affidavit.plan import Plan, as_document, plan_from

POISSON: dict[str, Any] = {
    "adjacency": "add_remove",
    "sampling": {"scheme": "poisson", "lot_size": 1024},
    "dataset": {"size": 42043},
    "steps": 410,
}
TEN_EPOCHS: dict[str, Any] = {"steps": 410, "target": {"delta": 8e-6}}
"""With no target for ε, whose noise would be searched for."""
OPEN = [{"name": "hidden", "count": 48, "clip_norm": 0.1}, {"name": "aux", "clip_norm": 0.1}]


def blocks(sigma: float, count: int = 49) -> list[dict[str, Any]]:
    return [{"name": "all", "count": count, "clip_norm": 0.1, "noise_multiplier": sigma}]


def test_the_published_muon_plan_is_under_noised(make_plan: Any) -> None:
    result = certify(make_plan(**POISSON))
    assert result.verdict == "under_noised"
    assert result.epsilon is not None
    assert result.epsilon.upper == pytest.approx(61.98, abs=5e-3)
    assert {opinion.name for opinion in result.accountants} == {"fourier", "checker"}
    (reason,) = result.reasons
    assert reason.code == "under_noised"
    assert reason.pointer == "/target/epsilon"
    assert "61.97" in reason.message
    assert "4.778" in reason.remedy


def test_as_its_appendix_samples_it_the_muon_plan_costs_more(make_plan: Any) -> None:
    result = certify(make_plan(**TEN_EPOCHS), second_opinion=False)
    assert result.mu is None  # it is at most that of a Gaussian mechanism
    assert result.epsilon is not None
    assert result.epsilon.lower > 60
    assert result.epsilon.upper == pytest.approx(84.7631, abs=6e-5)
    assert result.sampling[0]["participations"] == 10


@pytest.mark.parametrize("sampler", [{}, POISSON], ids=["shuffled", "poisson"])
def test_noise_found_certifies_and_a_thousandth_less_does_not(
    make_plan: Any, sampler: dict[str, Any]
) -> None:
    requested = certify(make_plan(**sampler, releases=OPEN), second_opinion=False)
    assert requested.verdict == "certified"
    sigmas = {release.name: release.required for release in requested.releases}
    for factor, verdict in ((1.0, "certified"), (1 - 1e-3, "under_noised")):
        provided = [{**item, "noise_multiplier": sigmas[item["name"]] * factor} for item in OPEN]
        result = certify(make_plan(**sampler, releases=provided), second_opinion=False)
        assert result.verdict == verdict


def test_the_noise_that_is_required_is_one_number_whatever_noise_is_given(make_plan: Any) -> None:
    def required(noise: float | None) -> list[float | None]:
        releases = OPEN if noise is None else [{**item, "noise_multiplier": noise} for item in OPEN]
        plan = make_plan(**POISSON, releases=releases)
        return [release.required for release in certify(plan, second_opinion=False).releases]

    expected = required(None)
    assert expected == [4.778266, 4.778266]
    for noise in (0.7, 2.3395, 4.778265, 4.778266, 31.7):
        assert required(noise) == expected


@pytest.mark.parametrize(("share", "verdict"), [(0.9, "certified"), (0.1, "under_noised")])
def test_a_target_inside_the_bracket_is_told_from_the_true_value(
    make_plan: Any, share: float, verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # By lattices, whose brackets are as wide as requested.
    monkeypatch.setattr(accountant, "invert_epsilon", lambda *_: None)
    monkeypatch.setattr(accountant, "invert_delta", lambda *_: None)
    releases, delta = blocks(4.8), {"delta": 1e-5}
    wide = certify(make_plan(**POISSON, releases=releases, target=delta), second_opinion=False)
    assert wide.epsilon is not None
    target = wide.epsilon.lower + share * wide.epsilon.width
    requested = {"epsilon": target, **delta}
    result = certify(
        make_plan(**POISSON, releases=releases, target=requested), second_opinion=False
    )
    assert result.verdict == verdict
    assert result.epsilon is not None
    assert wide.epsilon.lower <= result.epsilon.lower <= result.epsilon.upper <= wide.epsilon.upper
    assert result.epsilon.width < 0.2 * wide.epsilon.width


TRUNCATED = {"sampling": {"scheme": "truncated_poisson", "lot_size": 500, "max_lot_size": 520}}


@pytest.mark.by_turns
@pytest.mark.ordinary("not *-certified")
@pytest.mark.parametrize(
    ("target", "verdict"), [(3.1, "under_noised"), (3.7, "unproved"), (4.3, "certified")]
)
def test_a_target_between_the_proved_ends_is_neither_met_nor_missed(
    make_plan: Any, target: float, verdict: str
) -> None:
    plan = make_plan(
        **TRUNCATED,
        dataset={"size": 50_000},
        adjacency="zero_out",
        steps=1000,
        epochs=None,
        optimizer={"name": "dp_sgd"},
        releases=[{"name": "all", "clip_norm": 1, "noise_multiplier": 0.88}],
        target={"epsilon": target, "delta": 1e-6},
    )
    result = certify(plan, second_opinion=False)
    assert result.epsilon is not None
    assert result.epsilon.lower < 3.7 < result.epsilon.upper
    assert result.verdict == verdict
    assert {reason.code for reason in result.reasons} <= {verdict}


@pytest.mark.soak
def test_lots_of_fixed_size_that_the_wide_bracket_leaves_open_are_decided(make_plan: Any) -> None:
    def judged(target: float | None) -> Any:
        plan = make_plan(
            sampling={"scheme": "fixed_size", "lot_size": 500},
            dataset={"size": 10_000},
            adjacency="replace_one",
            steps=200,
            epochs=None,
            optimizer={"name": "dp_sgd"},
            releases=[{"name": "all", "clip_norm": 1, "noise_multiplier": 1.5}],
            target={"delta": 1e-6} | ({} if target is None else {"epsilon": target}),
        )
        return certify(plan)

    wide, decided, free = judged(100.0), judged(11.1), judged(None)
    assert free.epsilon.upper == decided.epsilon.upper < 11.1
    assert wide.epsilon.lower < 11.1 < wide.epsilon.upper
    assert (wide.verdict, decided.verdict) == ("certified", "certified")
    assert [release.required for release in decided.releases] == [1.5]
    # The checker proves what is certified elsewhere.
    assert decided.accountants[1].epsilon.upper == pytest.approx(wide.epsilon.upper, rel=1e-3)


@pytest.mark.ordinary("optimal")
@pytest.mark.parametrize("allocation", ["uniform", "proportional", "optimal"])
def test_every_allocation_certifies_as_given(make_plan: Any, allocation: str) -> None:
    shaped = [
        {"name": "a", "count": 3, "clip_norm": 0.1, "dimension": 1000, "weight": 1},
        {"name": "b", "count": 1, "clip_norm": 0.5, "dimension": 90000, "weight": 2.5},
    ]
    requested = certify(make_plan(releases=shaped, allocation=allocation), second_opinion=False)
    provided = [
        {**item, "noise_multiplier": release.required}
        for item, release in zip(shaped, requested.releases, strict=True)
    ]
    result = certify(make_plan(releases=provided, allocation=allocation), second_opinion=False)
    assert result.verdict == requested.verdict == "certified"
    assert result.epsilon is not None
    assert requested.epsilon is not None
    assert result.epsilon.upper == pytest.approx(requested.epsilon.upper, rel=1e-9)


def test_steps_found_fit_and_one_more_does_not(make_plan: Any) -> None:
    full = {"sampling": {"scheme": "full_batch"}, "releases": blocks(200.0)}
    requested = certify(make_plan(**full, steps=None), second_opinion=False)
    steps = requested.sampling[0]["steps"]
    assert requested.verdict == "certified"
    assert certify(make_plan(**full, steps=steps), second_opinion=False).verdict == "certified"
    more = certify(make_plan(**full, steps=steps + 1), second_opinion=False)
    assert more.verdict == "under_noised"


@pytest.mark.soak
def test_epsilon_is_answered_and_its_delta_is_found_again(make_plan: Any) -> None:
    requested = certify(make_plan(target={"delta": 1e-6}), second_opinion=False)
    assert requested.verdict == "certified"
    assert requested.epsilon is not None
    back = certify(make_plan(target={"epsilon": requested.epsilon.upper}), second_opinion=False)
    assert back.delta is not None
    assert back.delta.upper == pytest.approx(1e-6, rel=1e-6)


@pytest.mark.soak
def test_k_equal_blocks_cost_what_one_block_at_sigma_over_root_k_costs(make_plan: Any) -> None:
    many = certify(make_plan(releases=blocks(14.0)), second_opinion=False)
    one = certify(make_plan(releases=blocks(2.0, count=1)), second_opinion=False)
    assert many.epsilon == one.epsilon


@pytest.mark.soak
def test_replacing_costs_what_half_the_noise_costs(make_plan: Any) -> None:
    replaced = certify(make_plan(adjacency="replace_one"), second_opinion=False)
    halved = certify(make_plan(releases=blocks(2.3395 / 2)), second_opinion=False)
    assert replaced.epsilon is not None
    assert halved.epsilon is not None
    assert replaced.epsilon.upper == pytest.approx(halved.epsilon.upper, rel=1e-12)


def test_phases_are_composed(make_plan: Any) -> None:
    phase = {
        "sampling": {"scheme": "shuffled", "lot_size": 1024},
        "steps": 205,
        "releases": blocks(2.3395),
    }
    gone = {"sampling": ..., "steps": ..., "releases": ...}
    split = make_plan(**{**TEN_EPOCHS, **gone}, phases=[phase, phase])
    whole = make_plan(**TEN_EPOCHS, releases=blocks(2.3395))
    a, b = certify(split, second_opinion=False), certify(whole, second_opinion=False)
    assert a.epsilon is not None
    assert b.epsilon is not None
    assert a.epsilon.upper == pytest.approx(b.epsilon.upper, rel=1e-9)


def test_a_large_delta_is_refused_unless_the_plan_says_why(make_plan: Any) -> None:
    large = {"target": {"epsilon": 100, "delta": 1 / (41 * 1024)}}
    refused = certify(make_plan(**large))
    assert refused.verdict == "refused"
    assert refused.reasons[0].code == "large_delta"
    stated = certify(make_plan(**large, allow_large_delta="a demonstration"), second_opinion=False)
    assert stated.verdict == "certified"
    assert any("a demonstration" in warning.message for warning in stated.warnings)


def test_a_delta_that_comes_out_large_is_refused_too(make_plan: Any) -> None:
    result = certify(make_plan(target={"epsilon": 1}))
    assert (result.verdict, result.reasons[0].code) == ("refused", "large_delta")


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"adjacency": "add_remove"}, "removal_moves_records"),
        (
            {
                "steps": 82,
                "noise": {"kind": "bidiagonal", "lambda": 0.9},
                "participation": {"schema": "fixed_epoch", "separation": 41},
            },
            "reshuffled_epochs",
        ),
        ({"optimizer": {"name": "dp_dice"}}, "unsound_optimizer"),
    ],
)
def test_what_nothing_covers_is_refused_with_a_reason(
    make_plan: Any, changes: dict[str, Any], code: str
) -> None:
    result = certify(make_plan(**changes))
    assert result.verdict == "refused"
    assert result.epsilon is None
    assert code in {reason.code for reason in result.reasons}
    assert len(result.reasons) == 1
    assert all(reason.remedy for reason in result.reasons)


@pytest.mark.parametrize(("factor", "contradicted_by"), [(0.9, "analytic"), (1.1, "checker")])
def test_engines_that_contradict_each_other_decide_nothing(
    make_plan: Any, monkeypatch: pytest.MonkeyPatch, factor: float, contradicted_by: str
) -> None:
    """What is too low has no proof, so that the next engine is asked; what is too high has one."""
    real = GaussianCurve.epsilon

    def lie(curve: GaussianCurve, delta: float) -> Bracket:
        bracket = real(curve, delta)
        return Bracket(lower=bracket.lower * factor, upper=bracket.upper * factor)

    monkeypatch.setattr(GaussianCurve, "epsilon", lie)
    found = certify(make_plan(sampling={"scheme": "cyclic", "lot_size": 1024}))
    assert found.verdict == "undecided"
    assert found.reasons[0].code == "engines_disagree"
    assert [opinion.name.split("_")[0] for opinion in found.accountants] == [
        "gaussian",
        contradicted_by,
    ]


def test_a_faulty_engine_decides_nothing(make_plan: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan(sampling={"scheme": "cyclic", "lot_size": 1024})

    def fail(_self: Any, _event: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(GaussianAccountant, "curve", fail)
    assert certify(plan).accountants[0].name != "gaussian"
    alone = certify(plan, engine="gaussian")
    assert (alone.verdict, alone.reasons[0].code) == ("refused", "engine_failed")


def test_no_noise_meets_a_target_that_other_events_already_pass(make_plan: Any) -> None:
    metric = [{"kind": "gaussian", "name": "metric", "noise_multiplier": 0.1}]
    result = certify(make_plan(**POISSON, extra=metric, releases=OPEN))
    assert (result.verdict, result.reasons[0].code) == ("refused", "no_solution")
    provided = certify(make_plan(**POISSON, extra=metric), second_opinion=False)
    assert provided.verdict == "under_noised"
    assert "No noise meets" in provided.reasons[0].remedy


def test_a_run_of_very_many_kinds_is_certified(make_plan: Any) -> None:
    phases = [
        {
            "sampling": {"scheme": "cyclic", "lot_size": 1024},
            "steps": 1,
            "releases": blocks(1 + place / 1000),
        }
        for place in range(300)
    ]
    result = certify(make_plan(sampling=..., steps=..., releases=..., phases=phases))
    # A record is in the one lot of each phase, with 49 blocks of one noise.
    assert result.mu == pytest.approx(7 * sum((1 + n / 1000) ** -2 for n in range(300)) ** 0.5)


def test_a_certified_document_is_the_plan_that_was_given(plan: Plan) -> None:
    result = certify(plan, second_opinion=False)
    assert plan_from(result.plan) == plan
    assert result.plan == as_document(plan)


@pytest.mark.ordinary("not changes2-*", "not changes3-*")
@pytest.mark.parametrize(
    ("changes", "codes"),
    [
        ({}, {"bins_taken_as_kept"}),
        ({"adjacency": "replace_one"}, {"no_amplification"}),
        (
            {
                "sampling": {
                    "scheme": "balls_in_bins",
                    "lot_size": 100,
                    "bins_drawn": "each_epoch",
                }
            },
            set(),
        ),
        ({"steps": 10}, set()),
    ],
)
def test_what_is_taken_of_balls_in_bins_is_said(
    plan_of: Any, changes: dict[str, Any], codes: set[str]
) -> None:
    lots = {"scheme": "balls_in_bins", "lot_size": 100}
    result = certify(plan_of(**{"sampling": lots, "steps": 20, **changes}), second_opinion=False)
    assert {warning.code for warning in result.warnings} == codes
    assert result.verdict == "certified"
    assert result.sampling[0]["bins"] == 10


@pytest.mark.soak
def test_balls_in_bins_beside_a_metric_are_bracketed(plan_of: Any) -> None:
    lots = {"scheme": "balls_in_bins", "lot_size": 100}
    metric = {"kind": "gaussian", "name": "accuracy", "noise_multiplier": 50}
    alone = certify(plan_of(sampling=lots, steps=20))
    beside = certify(plan_of(sampling=lots, steps=20, extra=[metric]))
    assert [accountant.name for accountant in alone.accountants] == ["allocation", "checker"]
    assert alone.epsilon is not None
    assert beside.epsilon is not None
    assert alone.epsilon.upper < beside.epsilon.lower
    assert beside.epsilon.upper < 1.001 * beside.epsilon.lower


@pytest.mark.parametrize("kind", ["laplace", pytest.param("gaussian", marks=pytest.mark.soak)])
def test_a_metric_that_only_another_engine_reaches_lowers_nothing(plan_of: Any, kind: str) -> None:
    """That engine's round-off in a long run took 0.4 % of ε away: it must not decide there."""
    run: dict[str, Any] = {
        "dataset": {"name": "d", "size": 100_000_000},
        "adjacency": "add_remove",
        "sampling": {"scheme": "poisson", "probability": 1e-5},
        "steps": 999_999,
        "releases": [{"name": "all", "clip_norm": 1, "noise_multiplier": 0.5}],
        "target": {"epsilon": 2.83, "delta": 1e-9},
    }
    alone = certify(plan_of(**run), second_opinion=False)
    assert alone.verdict == "under_noised"
    metric = {"kind": kind, "name": "metric", "noise_multiplier": 10_000, "count": 1}
    result = certify(plan_of(**run, extra=[metric]))
    assert result.verdict != "certified"
    if result.epsilon is not None:
        assert result.epsilon.upper >= alone.epsilon.lower


@pytest.mark.soak
@pytest.mark.ordinary("once")
@pytest.mark.parametrize("drawn", ["once", "each_epoch"])
def test_bins_that_are_kept_within_a_phase_are_thrown_anew_for_the_next(
    plan_of: Any, drawn: str
) -> None:
    lots = {"scheme": "balls_in_bins", "lot_size": 100, "bins_drawn": drawn}
    phase = {
        "sampling": lots,
        "steps": 10,
        "releases": [{"name": "all", "clip_norm": 1, "noise_multiplier": 20}],
    }
    left_out = {"sampling": ..., "steps": ..., "releases": ...}
    result = certify(plan_of(phases=[phase, phase], **left_out), second_opinion=False)
    codes = {warning.code for warning in result.warnings}
    assert ("bins_thrown_anew" in codes) == (drawn == "once")
