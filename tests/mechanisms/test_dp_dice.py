"""DP-Dice: no stream of records moves the releases by more than the certified bound."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from affidavit.accountants.gaussian import GaussianAccountant
from affidavit.assessment import certify
from affidavit.mechanisms import dp_dice
from affidavit.mechanisms.dp_dice import by_error_clip, by_pre_clip
from affidavit.mechanisms.lowering import lower
from affidavit.plan import (
    MalformedPlan,
    Plan,
    RefusedPlan,
    events,
)
from tests.support.random_seeds import examples

Make = Callable[..., Plan]
Stream = NDArray[np.float64]
DICE = {"name": "dp_dice", "error_clip_norm": 0.05, "pre_clip_norm": 2}
ORDERED: dict[str, Any] = {
    "adjacency": "zero_out",
    "sampling": {"scheme": "cyclic", "lot_size": 100},
    "steps": 20,
}


# ---- the algorithm itself, on one data set -----------------------------------------


def clip(vector: Stream, norm: float) -> Stream:
    length = float(np.linalg.norm(vector))
    return vector if length <= norm else vector * (norm / length)


def released(records: list[list[Stream]], *, c1: float, c2: float, divisor: float) -> Stream:
    """v_1..v_T of DP-Dice; ``records[t]`` are the raw gradients in lot t."""
    error = np.zeros_like(records[0][0])
    means = []
    for lot in records:
        value = sum(clip(g, c1) for g in lot) / divisor + clip(error, c2)
        error = error + sum(lot) / divisor - value
        means.append(value)
    return np.array(means)


def moved(
    others: list[list[Stream]],
    record: dict[int, tuple[Stream, Stream]],
    *,
    c1: float,
    c2: float,
    divisor: float,
) -> float:
    """How far a record moves all releases; it has its two gradients in each of its lots."""
    runs = []
    for side in (0, 1):
        lots = [[*lot, *([record[t][side]] if t in record else [])] for t, lot in enumerate(others)]
        runs.append(released(lots, c1=c1, c2=c2, divisor=divisor))
    return float(np.linalg.norm(runs[0] - runs[1]))


# ---- the bounds hold ---------------------------------------------------------------


@settings(max_examples=examples(300))
@given(
    seed=st.integers(0, 2**32 - 1),
    dimension=st.integers(1, 3),
    steps=st.integers(1, 8),
    participations=st.integers(1, 8),
    pre_clip=st.sampled_from([1.0, 1.2, 2.0, 10.0]),
    error_clip=st.sampled_from([0.001, 0.05, 0.3, 3.0]),
    replaced=st.booleans(),
    wild=st.sampled_from([0.3, 3.0, 100.0]),
)
def test_no_stream_moves_the_releases_by_more_than_either_bound(
    seed: int,
    dimension: int,
    steps: int,
    participations: int,
    pre_clip: float,
    error_clip: float,
    replaced: bool,
    wild: float,
) -> None:
    draw = np.random.default_rng(seed)
    divisor, k = 4.0, min(steps, participations)

    def gradient() -> Stream:
        return clip(draw.normal(size=dimension) * wild, pre_clip)

    others = [[gradient() for _ in range(3)] for _ in range(steps)]
    lots = draw.choice(steps, size=k, replace=False)
    nothing = np.zeros(dimension)
    record = {int(t): (gradient(), gradient() if replaced else nothing) for t in lots}
    result = moved(others, record, c1=1.0, c2=error_clip, divisor=divisor) * divisor
    distance = 2.0 if replaced else 1.0
    assert result <= by_pre_clip(distance=distance, residual=pre_clip - 1, participations=k)
    assert result <= by_error_clip(
        distance=distance, error=divisor * error_clip, participations=k, steps=steps
    )


@pytest.mark.soak
def test_a_search_over_streams_does_not_pass_the_bound_and_comes_near_it() -> None:
    """Hill climbing in the plane, three participations, from random streams."""
    draw = np.random.default_rng(7)
    steps, lots, pre_clip, error_clip = 6, (0, 2, 4), 2.0, 1.0
    bound = by_pre_clip(distance=1, residual=pre_clip - 1, participations=3)

    def reach(point: Stream) -> float:
        # B = 1, so that many other records are one gradient without a clip norm of their own:
        # what they add to the first sum is the same on both sides.
        record = {
            t: (clip(g, pre_clip), np.zeros(2)) for t, g in zip(lots, point[steps:], strict=True)
        }
        return moved([[g] for g in point[:steps]], record, c1=1.0, c2=error_clip, divisor=1.0)

    best = 0.0
    for _ in range(4):
        point = draw.normal(size=(steps + 3, 2)) * 3
        result, width = reach(point), 1.0
        for _ in range(1200):
            trial = point + draw.normal(size=point.shape) * width
            value = reach(trial)
            assert value <= bound
            width = min(3.0, width * 1.5) if value > result else max(1e-3, width * 0.96)
            if value > result:
                point, result = trial, value
        best = max(best, result)
    assert best > 0.85 * bound


# ---- and are attained, or nearly ---------------------------------------------------


@pytest.mark.parametrize(("steps", "participations"), [(1, 1), (5, 1), (6, 3), (9, 9)])
@pytest.mark.parametrize("error_clip", [0.01, 1.0])
def test_bound_a_is_attained_by_one_record_with_unbounded_gradients(
    steps: int, participations: int, error_clip: float
) -> None:
    c1, divisor, far = 1.0, 2.0, 1e4
    others = [[np.array([-far])], *([np.array([0.0])] for _ in range(steps - 1))]
    record = {0: (np.array([2 * far]), np.array([0.0]))}
    record |= {t: (np.array([far]), np.array([0.0])) for t in range(1, participations)}
    result = moved(others, record, c1=c1, c2=error_clip, divisor=divisor) * divisor / c1
    bound = by_error_clip(
        distance=1, error=divisor * error_clip / c1, participations=participations, steps=steps
    )
    assert result == pytest.approx(bound, rel=1e-9)


def test_two_records_of_a_user_in_different_lots_stay_below_the_bound_for_users() -> None:
    """One record parts the states, both come later: more than (A) of one record, doubled."""
    far, error_clip = 1e4, 1.0
    still = np.array([0.0])
    others = [[np.array([-far])], [still], [still]]
    users = ({0: 2 * far, 1: far}, {1: far, 2: far})
    runs = []
    for present in (True, False):
        lots = [
            [*lot, *(np.array([user[t]]) for user in users if present and t in user)]
            for t, lot in enumerate(others)
        ]
        runs.append(released(lots, c1=1.0, c2=error_clip, divisor=1.0))
    result = float(np.linalg.norm(runs[0] - runs[1]))
    shape = {"distance": 2.0, "error": error_clip, "participations": 2, "steps": 3}
    assert by_error_clip(**shape) < result <= by_error_clip(**shape, records=2)


def on_a_line(k: int, c: float, rho: float) -> float:
    """The best stream on a line: each lot releases what is held with its own, or holds it."""

    @cache
    def most(to_come: int, held: int) -> float:
        if to_come == 0:
            return (held * rho) ** 2
        release = (c + held * rho) ** 2 + most(to_come - 1, 1)
        return max(release, c**2 + most(to_come - 1, held + 1))

    return math.sqrt(most(k, 0))


@pytest.mark.parametrize(
    ("k", "residual", "line", "gamma"),
    [
        (1, 1, 1.4142, 1.4142),
        (2, 1, 2.4495, 2.6131),
        (3, 3, 9.1652, 9.2968),
        (10, 0.1, 3.5525, 3.8052),
        (10, 10, 100.0500, 100.1461),
        (100, 0.05, 11.5933, 13.5503),
    ],
)
def test_bound_b_lies_between_the_best_stream_on_a_line_and_k_times_one_participation(
    k: int, residual: float, line: float, gamma: float
) -> None:
    bound = by_pre_clip(distance=1, residual=residual, participations=k)
    assert on_a_line(k, 1, residual) == pytest.approx(line, abs=6e-5)
    assert bound == pytest.approx(gamma, abs=6e-5)
    assert on_a_line(k, 1, residual) <= bound <= k * math.hypot(1, residual) * (1 + 1e-12)


def test_the_best_stream_on_a_line_is_one_of_the_algorithm() -> None:
    """Hold until the last lot, then release: 10 participations with G = 11 C₁, ratio 0.999."""
    k, pre_clip, error_clip = 10, 11.0, 2000.0
    others = [[np.array([0.0])] for _ in range(k + 1)]
    # The other records first push the state beyond its clip norm, and back before the last step.
    others[0], others[k - 1] = [np.array([1e6])], [np.array([-1e6 + 2e3 * (k - 1)])]
    record = {t: (np.array([pre_clip]), np.array([0.0])) for t in range(k)}
    result = moved(others, record, c1=1.0, c2=error_clip, divisor=1.0)
    assert result == pytest.approx(on_a_line(k, 1, pre_clip - 1), rel=0.01)
    assert result <= by_pre_clip(distance=1, residual=pre_clip - 1, participations=k)


@pytest.mark.parametrize("curious", [False, True])
def test_the_losses_of_adaptive_runs_stay_below_the_certified_profile(curious: bool) -> None:
    """40,000 runs with noise, in which the other records' gradients depend on the releases."""
    draw = np.random.default_rng(11)
    runs, steps, lots, sigma, c2, pre_clip = 40_000, 7, (0, 2, 4), 3.0, 2.0, 2.0
    with_it, without, losses = (np.zeros(runs) for _ in range(3))
    last = np.ones(runs)
    for t in range(steps):
        # The other records hold both states beyond C₂, where nothing of the record is released,
        # until the last step but one; the curious ones let go as soon as a release is low.
        let_go = (last < -1) & (t in lots) if curious else np.zeros(runs, dtype=bool)
        own = 1.0 if t in lots else 0.0
        means = [own + np.clip(with_it, -c2, c2), np.clip(without, -c2, c2)]
        others = np.where(let_go | (t == steps - 2), means[1] - without - 1.5, 50.0 * (t == 0))
        release = means[0] + sigma * draw.standard_normal(runs)
        losses += ((release - means[1]) ** 2 - (release - means[0]) ** 2) / (2 * sigma**2)
        with_it += others + own * pre_clip - means[0]
        without += others - means[1]
        last = release
    bound = by_pre_clip(distance=1, residual=pre_clip - 1, participations=len(lots))
    profile = GaussianAccountant().curve(events.Gaussian(noise_multiplier=sigma / bound))
    for epsilon in (0.5, 1.0, 2.0, 3.0):
        chances = np.maximum(0.0, -np.expm1(epsilon - losses))
        error = float(np.std(chances)) / math.sqrt(runs)
        certified = profile.delta(epsilon).upper
        assert float(np.mean(chances)) - 4 * error <= certified
        assert float(np.mean(chances)) > 0.1 * certified, "the attack is no attack"


def test_without_anything_fed_back_it_is_dp_sgd() -> None:
    assert by_pre_clip(distance=1, residual=0, participations=9) == pytest.approx(3)
    assert by_error_clip(distance=1, error=0, participations=9, steps=50) == pytest.approx(3)


def test_the_closed_form_for_very_many_participations_is_no_smaller() -> None:
    most = dp_dice.MAX_STEPS_OF_RECURSION
    for residual in (0.0, 1e-6, 0.1, 5.0):
        exact = by_pre_clip(distance=1, residual=residual, participations=most)
        closed = by_pre_clip(distance=1, residual=residual, participations=most + 1)
        assert exact < closed


# ---- from a plan -------------------------------------------------------------------


def test_a_plan_is_one_gaussian_with_the_smaller_bound(plan_of: Make) -> None:
    # k = 2 epochs of 10 lots; B C₂/C₁ = 5, (G-C₁)/C₁ = 1.
    plan = plan_of(**ORDERED, optimizer=DICE)
    a = by_error_clip(distance=1, error=5, participations=2, steps=20)
    b = by_pre_clip(distance=1, residual=1, participations=2)
    assert b < a
    (event,) = lower(plan).event().events
    assert isinstance(event, events.Gaussian)
    assert event.noise_multiplier == pytest.approx(20 / b)
    only_a = plan_of(**ORDERED, optimizer={**DICE, "pre_clip_norm": None})
    (event,) = lower(only_a).event().events
    assert isinstance(event, events.Gaussian)
    assert event.noise_multiplier == pytest.approx(20 / a)


def test_replacing_doubles_and_a_user_multiplies(plan_of: Make) -> None:
    def mu(**changes: Any) -> float:
        (event,) = lower(plan_of(**{**ORDERED, "optimizer": DICE, **changes})).event().events
        assert isinstance(event, events.Gaussian)
        return 1 / event.noise_multiplier

    users = {"name": "toy", "size": 1000, "unit": "user", "contributions_per_user": 3}
    assert mu(adjacency="replace_one") == pytest.approx(2 * mu())
    assert mu(dataset=users) == pytest.approx(3 * mu())


def test_sampling_amplifies_nothing(plan_of: Make) -> None:
    poisson = {"sampling": {"scheme": "poisson", "lot_size": 100}, "steps": 20}
    sampled = plan_of(**poisson, optimizer=DICE)
    b = by_pre_clip(distance=1, residual=1, participations=20)
    (event,) = lower(sampled).event().events
    assert isinstance(event, events.Gaussian)
    assert event.noise_multiplier == pytest.approx(20 / b)
    result = certify(sampled, second_opinion=False)
    assert "no_amplification" in {warning.code for warning in result.warnings}
    assert result.sensitivity == pytest.approx(b)


def test_noise_is_solved_for(plan_of: Make) -> None:
    result = certify(
        plan_of(**ORDERED, optimizer=DICE, releases=[{"name": "all", "clip_norm": 1}]),
        second_opinion=False,
    )
    assert result.verdict == "certified"
    assert result.epsilon is not None
    assert result.epsilon.upper == pytest.approx(8, rel=1e-3)


@pytest.mark.parametrize(
    ("changes", "code", "pointer"),
    [
        ({"optimizer": {"name": "dp_dice"}}, "unsound_optimizer", "/optimizer/name"),
        (
            {"optimizer": {"name": "dp_dice", "pre_clip_norm": 2}},
            "unsound_optimizer",
            "/optimizer/name",
        ),
        (
            {"releases": [{"name": "a", "count": 2, "clip_norm": 1, "noise_multiplier": 9}]},
            "unsound_optimizer",
            "/releases",
        ),
        (
            {
                "optimizer": {"name": "dp_dice", "error_clip_norm": 1},
                "dataset": {"name": "toy"},
                "adjacency": "add_remove",
                "sampling": {"scheme": "poisson", "probability": 0.1},
            },
            "missing_divisor",
            "/sampling/lot_size",
        ),
        (
            {"sampling": {"scheme": "balls_in_bins", "lot_size": 100}},
            "unsupported",
            "/sampling/scheme",
        ),
    ],
)
def test_any_other_form_is_refused(
    plan_of: Make, changes: dict[str, Any], code: str, pointer: str
) -> None:
    with pytest.raises(RefusedPlan) as caught:
        lower(plan_of(**{**ORDERED, "optimizer": DICE, **changes}))
    reason = caught.value.reasons[0]
    assert (reason.code, reason.pointer) == (code, pointer)
    assert reason.remedy


def test_phases_with_one_state_are_refused(plan_of: Make) -> None:
    phase = {key: ORDERED[key] for key in ("sampling", "steps")}
    phase["releases"] = [{"name": "a", "clip_norm": 1, "noise_multiplier": 9}]
    changes: dict[str, Any] = dict.fromkeys(("sampling", "steps", "releases"), ...)
    plan = plan_of(**changes, adjacency="zero_out", phases=[phase, phase], optimizer=DICE)
    with pytest.raises(RefusedPlan) as caught:
        lower(plan)
    assert [reason.pointer for reason in caught.value.reasons] == ["/phases"]


def test_a_pre_clip_below_the_clip_norm_is_a_contradiction(plan_of: Make) -> None:
    with pytest.raises(MalformedPlan, match="pre_clip_norm"):
        plan_of(**ORDERED, optimizer={**DICE, "pre_clip_norm": 0.5})
