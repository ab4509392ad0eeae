"""Correlated noise is lowered to what its sampler and its strategy together allow."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from affidavit.accountants.fourier_accountant import FourierAccountant
from affidavit.mechanisms.lowering import Lowered, lower
from affidavit.mechanisms.obligations import obligations_of
from affidavit.mechanisms.strategies.bidiagonal import Bidiagonal
from affidavit.mechanisms.strategies.participation import Participation
from affidavit.plan import (
    Plan,
    Reason,
    RefusedPlan,
    events,
    explain,
)
from tests.mechanisms.strategies.brute_force import bound

Make = Callable[..., Plan]
STREAM: dict[str, Any] = {
    "adjacency": "zero_out",
    "dataset": {"size": 1000},
    "sampling": {"scheme": "cyclic", "lot_size": 100},
    "steps": 30,
    "noise": {"kind": "bidiagonal", "lambda": 0.9},
    "releases": [{"name": "all", "clip_norm": 1, "noise_multiplier": 20}],
}
IN_ORDER = Participation.fixed_epoch(participations=3, separation=10)
CYCLIC_POISSON = {"scheme": "cyclic_poisson", "lot_size": 20, "groups": 10}
BINS = {"scheme": "balls_in_bins", "lot_size": 100}
SENSITIVITY = Bidiagonal.of(0.9, 30).sensitivity(IN_ORDER).value


@pytest.fixture
def stream(plan_of: Make) -> Make:
    return lambda **changes: plan_of(**{**STREAM, **changes})


def only(plan: Plan) -> Any:
    run = lower(plan).event()
    (event,) = (run.events[0] if isinstance(run, events.EitherBound) else run).events
    return event


def refusal(plan: Plan) -> Reason:
    with pytest.raises(RefusedPlan) as caught:
        lower(plan)
    (reason,) = caught.value.reasons
    assert reason.remedy
    assert explain(reason.code)
    return reason


def test_a_fixed_order_is_one_gaussian_with_the_sensitivity_of_the_inverse(stream: Make) -> None:
    event = only(stream())
    assert isinstance(event, events.Gaussian)
    assert event.noise_multiplier <= 20 / SENSITIVITY
    assert event.noise_multiplier == pytest.approx(20 / SENSITIVITY, rel=1e-14)


def test_a_tree_that_is_too_long_for_products_of_bins_is_bounded_without_them(
    stream: Make,
) -> None:
    sizes = {"dataset": {"size": 100_000}, "steps": 5000, "noise": {"kind": "tree"}}
    run = lower(stream(**sizes, sampling={"scheme": "balls_in_bins", "lot_size": 1000}))
    for event in (run.event(), run.attained()):
        assert not any(isinstance(leaf, events.BallsInBinsGaussian) for leaf in event.events)


def test_replacing_moves_twice_as_far_and_a_user_by_its_records(stream: Make) -> None:
    once = only(stream()).noise_multiplier
    assert only(stream(adjacency="replace_one")).noise_multiplier == pytest.approx(once / 2)
    users = {"size": 1000, "unit": "user", "contributions_per_user": 3}
    assert only(stream(dataset=users)).noise_multiplier == pytest.approx(once / 3)


def test_blocks_of_a_step_are_joint(stream: Make) -> None:
    once = only(stream()).noise_multiplier
    blocks = [{"name": "a", "count": 4, "clip_norm": 0.5, "noise_std": 20}]
    assert only(stream(releases=blocks)).noise_multiplier == pytest.approx(once * 2 / math.sqrt(4))


def test_a_removal_moves_the_others_of_a_fixed_order(stream: Make) -> None:
    reason = refusal(stream(adjacency="add_remove"))
    assert (reason.code, reason.pointer) == ("removal_moves_records", "/sampling/scheme")


FRESH = [
    {"scheme": "poisson", "lot_size": 100},
    {"scheme": "truncated_poisson", "lot_size": 100, "max_lot_size": 200},
    {"scheme": "fixed_size", "lot_size": 100},
]


@pytest.mark.parametrize("sampling", FRESH)
@pytest.mark.parametrize("noise", [{"kind": "bsr", "bands": 2}, {"kind": "blt", "buffers": 1}])
def test_fresh_lots_are_those_of_independent_noise_over_the_norm_of_the_strategy(
    stream: Make, sampling: dict[str, Any], noise: dict[str, Any]
) -> None:
    plan = stream(sampling=sampling, noise=noise, adjacency="replace_one")
    at = lower(plan).phases[0].correlation.at(30)
    norm = float(np.linalg.norm(at.strategy.strategy_matrix(), 2))
    assert norm <= at.sensitivity.value <= 1.5 * norm
    alone = stream(
        sampling=sampling,
        noise={"kind": "independent"},
        adjacency="replace_one",
        releases=[{"name": "all", "clip_norm": 1, "noise_multiplier": 20 / at.sensitivity.value}],
    )
    assert at.route == "white_noise"
    run, same = events.alternatives(only(plan))[0], only(alone)
    assert run.count == same.count == 30
    assert run.event.noise_multiplier == pytest.approx(same.event.noise_multiplier, rel=1e-12)
    assert run.event.noise_multiplier <= same.event.noise_multiplier


def test_a_whole_batch_drawn_afresh_is_a_full_batch(stream: Make) -> None:
    whole = stream(sampling={"scheme": "poisson", "probability": 1.0})
    assert only(whole) == only(stream(sampling={"scheme": "full_batch"}))


@pytest.mark.parametrize(("probability", "route"), [(0.001, "white_noise"), (0.999, "gaussian")])
def test_of_sampled_rounds_and_the_whole_run_the_cheaper_is_taken(
    stream: Make, probability: float, route: str
) -> None:
    releases = [{"name": "all", "clip_norm": 1, "noise_multiplier": 200}]
    sampling = {"scheme": "poisson", "probability": probability}
    plan = stream(sampling=sampling, steps=400, releases=releases)
    lowered = lower(plan)
    correlation = lowered.phases[0].correlation
    assert correlation.at(400).route == route
    always = Participation.fixed_epoch(participations=400, separation=1)
    worst = correlation.at(400).strategy.sensitivity(always).value
    whole = events.Gaussian(noise_multiplier=200 / worst)
    bound = FourierAccountant().curve(lowered.event()).epsilon(1e-6).upper
    assert bound <= FourierAccountant().curve(whole).epsilon(1e-6).upper * (1 + 1e-6)


def test_an_order_drawn_anew_each_epoch_costs_more_than_one_order(stream: Make) -> None:
    shuffled = {"scheme": "shuffled", "lot_size": 100}
    fixed = {"schema": "fixed_epoch", "separation": 10}
    reason = refusal(stream(sampling=shuffled, participation=fixed))
    assert (reason.code, reason.pointer) == ("reshuffled_epochs", "/participation")
    event = only(stream(sampling=shuffled))
    stated = {"schema": "min_separation", "participations": 3, "separation": 1}
    assert event == only(stream(sampling=shuffled, participation=stated))
    anywhere = Participation.min_separation(participations=3, separation=1)
    worst = Bidiagonal.of(0.9, 30).sensitivity(anywhere).value
    known, *_ = events.alternatives(event)
    assert isinstance(known, events.Gaussian)
    assert SENSITIVITY < 20 / known.noise_multiplier < worst


def test_one_epoch_has_no_order_to_draw_anew(stream: Make) -> None:
    shuffled = stream(sampling={"scheme": "shuffled", "lot_size": 100}, steps=10)
    assert only(shuffled) == only(stream(steps=10))


@pytest.mark.parametrize(
    "given",
    [
        {"schema": "single"},
        {"schema": "fixed_epoch", "participations": 3, "separation": 12},
        {"schema": "fixed_epoch", "participations": 2, "separation": 10},
        {"schema": "min_separation", "participations": 2, "separation": 10},
        {"schema": "min_separation", "participations": 3, "separation": 11},
    ],
)
def test_a_participation_that_contradicts_the_sampler_is_refused(
    stream: Make, given: dict[str, Any]
) -> None:
    for noise in (STREAM["noise"], {"kind": "independent"}):
        reason = refusal(stream(participation=given, noise=noise))
        assert (reason.code, reason.pointer) == ("participation_mismatch", "/participation")


@pytest.mark.parametrize(
    "given",
    [
        {"schema": "fixed_epoch", "participations": 3, "separation": 10},
        {"schema": "min_separation", "participations": 3, "separation": 10},
        {"schema": "min_separation", "separation": 10},
    ],
)
def test_a_participation_that_says_what_the_sampler_does_changes_nothing(
    stream: Make, given: dict[str, Any]
) -> None:
    assert only(stream(participation=given)) == only(stream())
    plain = only(stream(participation=given, noise={"kind": "independent"}))
    assert plain.noise_multiplier == pytest.approx(20 / math.sqrt(3))


def test_every_record_in_every_lot_takes_part_in_every_step(stream: Make) -> None:
    event = only(stream(sampling={"scheme": "full_batch"}, adjacency="add_remove"))
    always = Participation.fixed_epoch(participations=30, separation=1)
    worst = Bidiagonal.of(0.9, 30).sensitivity(always).value
    assert event.noise_multiplier == pytest.approx(20 / worst)


@pytest.mark.parametrize("adjacency", ["add_remove", "zero_out"])
def test_a_banded_strategy_is_amplified_within_its_group(stream: Make, adjacency: str) -> None:
    noise = {"kind": "toeplitz", "coefficients": [2.0, 1.0, 1.0]}
    event = only(stream(sampling=CYCLIC_POISSON, adjacency=adjacency, noise=noise))
    assert isinstance(event, events.Repeated)
    assert event.count == 3
    assert isinstance(event.event, events.PoissonSubsampledGaussian)
    assert event.event.sampling_probability == pytest.approx(0.2)
    assert event.event.noise_multiplier == pytest.approx(20 / math.sqrt(6))


def test_rounds_that_are_begun_count_in_full_and_a_whole_group_is_not_sampled(
    stream: Make,
) -> None:
    everyone = {**CYCLIC_POISSON, "lot_size": 100}
    event = only(stream(sampling=everyone, noise={"kind": "bsr", "bands": 10}, steps=21))
    assert event.count == 3
    assert isinstance(event.event, events.Gaussian)


def test_a_lot_larger_than_its_group_is_refused(stream: Make) -> None:
    too_many = {**CYCLIC_POISSON, "lot_size": 101}
    assert refusal(stream(sampling=too_many)).code == "lot_above_group"


@pytest.mark.parametrize(
    "changes",
    [
        {"noise": {"kind": "bidiagonal", "lambda": 0.9}},
        {"noise": {"kind": "bisr", "bands": 2}},
        {"noise": {"kind": "bsr", "bands": 11}},
        {"noise": {"kind": "bsr", "bands": 2}, "adjacency": "replace_one"},
    ],
)
def test_what_its_groups_may_not_amplify_costs_no_more_than_one_gaussian(
    stream: Make, changes: dict[str, Any]
) -> None:
    event = only(stream(sampling=CYCLIC_POISSON, **changes))
    whole = only(stream(**changes))
    assert whole in events.alternatives(event)
    assert isinstance(whole, events.Gaussian)


def test_a_shorter_run_that_may_be_cheaper_without_sampling_costs_no_more(stream: Make) -> None:
    def cost(steps: int) -> float:
        changes = {"dataset": {"size": 100}, "noise": {"kind": "bidiagonal", "lambda": -0.9}}
        groups = {"scheme": "cyclic_poisson", "lot_size": 2, "groups": 2}
        releases = [{"name": "all", "clip_norm": 1, "noise_multiplier": 3.36}]
        plan = stream(sampling=groups, steps=steps, releases=releases, **changes)
        return FourierAccountant().curve(lower(plan).event()).epsilon(1e-3).upper

    assert cost(19) <= cost(20)


def test_independent_noise_has_one_band(stream: Make) -> None:
    event = only(stream(sampling=CYCLIC_POISSON, noise={"kind": "independent"}))
    assert event.event.noise_multiplier == pytest.approx(20)
    assert event.count == 3


def test_bins_are_accounted_by_the_products_of_their_means(stream: Make) -> None:
    event = only(stream(sampling=BINS, adjacency="add_remove"))
    assert isinstance(event, events.BallsInBinsGaussian)
    assert event.noise_multiplier == 20
    assert len(event.gram.rows) == 10
    assert event.gram.rows[0][0] == pytest.approx(SENSITIVITY**2)


@pytest.mark.parametrize(
    "changes", [{"noise": {"kind": "bidiagonal", "lambda": -0.9}}, {"adjacency": "replace_one"}]
)
def test_given_the_bin_a_run_is_one_gaussian(stream: Make, changes: dict[str, Any]) -> None:
    given, *_ = events.alternatives(only(stream(sampling=BINS, **changes)))
    assert given == only(stream(**changes))


def test_phases_are_streams_of_their_own(stream: Make) -> None:
    phase = {key: STREAM[key] for key in ("sampling", "steps", "noise", "releases")}
    changes = dict.fromkeys(phase, ...)
    plan = stream(**changes, phases=[phase, {**phase, "steps": 10}])
    first, second = lower(plan).event().events
    assert first == only(stream())
    assert second == only(stream(steps=10))


def test_open_steps_are_lowered_at_any_length(stream: Make) -> None:
    full = {"epsilon": 8, "delta": 1e-5}
    (event,) = lower(stream(steps=None, target=full)).event(steps=30).events
    assert event == only(stream())


@pytest.mark.parametrize(
    ("changes", "pointer"),
    [
        ({"noise": {"kind": "dense"}}, "/noise"),
        ({"noise": {"kind": "blt", "buffers": 2}}, "/noise"),
        ({"noise": {"kind": "banded", "bands": 2}}, "/noise"),
        ({"noise": {"kind": "bidiagonal", "lambda": 0.5, "normalized": True}}, "/noise"),
        ({"noise": {"kind": "matrix", "rows": [[1]]}}, "/noise"),
        (
            {"participation": {"schema": "min_separation", "participations": 3, "separation": 5}},
            "/participation",
        ),
        ({"workload": {"kind": "momentum", "momentum": 0, "learning_rates": [1]}}, "/steps"),
    ],
)
def test_the_most_steps_are_not_asked_of_what_is_made_for_its_steps(
    stream: Make, changes: dict[str, Any], pointer: str
) -> None:
    reason = refusal(stream(steps=None, target={"epsilon": 8, "delta": 1e-5}, **changes))
    assert (reason.code, reason.pointer) == ("steps_not_open", pointer)


@pytest.mark.parametrize(
    ("noise", "code"),
    [
        ({"kind": "matrix", "rows": [[1, 0], [0.5, 1]]}, "steps_mismatch"),
        ({"kind": "toeplitz_inverse", "coefficients": [1, -50]}, "ill_conditioned"),
        ({"kind": "matrix", "file": "n.npy", "sha256": "0" * 64}, "file_not_given"),
    ],
)
def test_noise_that_cannot_be_judged_is_refused(
    stream: Make, noise: dict[str, Any], code: str
) -> None:
    reason = refusal(stream(noise=noise))
    assert (reason.code, reason.pointer) == (code, "/noise")


def test_more_than_is_computed_is_refused_in_little_time(stream: Make) -> None:
    assert refusal(stream(noise={"kind": "sqrt"}, steps=10**9)).code == "too_expensive"
    assert refusal(stream(noise={"kind": "dense"}, steps=10**5)).code == "too_expensive"
    assert refusal(stream(noise={"kind": "blt", "buffers": 64})).code == "too_expensive"
    assert only(stream(steps=10**15))


def test_learning_rates_are_one_a_step(stream: Make) -> None:
    workload = {"kind": "momentum", "momentum": 0.5, "learning_rates": [1.0] * 29}
    reason = refusal(stream(workload=workload))
    assert (reason.code, reason.pointer) == ("steps_mismatch", "/workload/learning_rates")
    workload["learning_rates"] = [1.0] * 30
    assert only(stream(workload=workload)) == only(stream())


def test_a_trainer_is_told_the_recurrence_and_to_keep_its_state(stream: Make) -> None:
    lowered: Lowered = lower(stream())
    codes = [obligation.code for obligation in obligations_of(lowered)]
    assert codes.count("inject_the_strategy") == 1
    assert {"noise_recurrence", "keep_the_noise_state"} <= set(codes)
    plain = lower(stream(noise={"kind": "independent"}))
    assert not {"inject_the_strategy", "keep_the_noise_state"} & {
        item.code for item in obligations_of(plain)
    }


@pytest.mark.parametrize("noise", [STREAM["noise"], {"kind": "independent"}])
def test_a_schedule_of_clip_norms_scales_the_columns(stream: Make, noise: Any) -> None:
    rates = [1.0 + step % 7 for step in range(30)]
    result = 20 / only(stream(noise=noise, clip_schedule=rates)).noise_multiplier
    rate = 0.9 if noise is STREAM["noise"] else 0.0
    scaled = Bidiagonal.of(rate, 30).strategy_matrix() * np.array(rates)
    assert result == pytest.approx(bound(scaled, IN_ORDER), rel=1e-9)
    flat = only(stream(noise=noise, clip_schedule=[3.0] * 30)).noise_multiplier
    once = only(stream(noise=noise, clip_schedule=[1.0] * 30)).noise_multiplier
    assert flat == pytest.approx(once / 3)


@pytest.mark.parametrize(
    ("changes", "code", "pointer"),
    [
        ({"clip_schedule": [1.0] * 29}, "steps_mismatch", "/clip_schedule"),
        (
            {"sampling": {"scheme": "poisson", "lot_size": 100}},
            "unsupported",
            "/clip_schedule",
        ),
        (
            {"extra": [{"kind": "adaptive_clipping_quantile", "name": "q", "noise_std": 9}]},
            "unsupported",
            "/clip_schedule",
        ),
        ({"steps": None, "target": {"epsilon": 8, "delta": 1e-5}}, "steps_not_open", None),
    ],
)
def test_a_schedule_is_not_stretched_to_what_it_does_not_cover(
    stream: Make, changes: dict[str, Any], code: str, pointer: str | None
) -> None:
    schedule = {"clip_schedule": [0.5] * 30, "noise": {"kind": "independent"}}
    reason = refusal(stream(**{**schedule, **changes}))
    assert (reason.code, reason.pointer) == (code, pointer or "/clip_schedule")


def test_participation_says_nothing_about_fresh_lots(stream: Make) -> None:
    reason = refusal(
        stream(
            sampling={"scheme": "poisson", "lot_size": 100},
            noise={"kind": "independent"},
            participation={"schema": "single"},
        )
    )
    assert (reason.code, reason.pointer) == ("unsupported", "/participation")
