"""Extra events: beside the run, on its lots, and around it."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
from scipy import stats

from affidavit.assessment import certify
from affidavit.mechanisms import draw_repetitions
from affidavit.mechanisms.joint_gaussian import add_same_lot_blocks
from affidavit.mechanisms.lowering import lower
from affidavit.plan import (
    MalformedPlan,
    Plan,
    RefusedPlan,
    Selection,
    events,
)

Make = Callable[..., Plan]
POISSON: dict[str, Any] = {"sampling": {"scheme": "poisson", "lot_size": 100}, "steps": 50}
METRIC = {"kind": "gaussian", "name": "accuracy", "noise_multiplier": 30}
QUANTILE = {"kind": "adaptive_clipping_quantile", "name": "clipped", "noise_std": 5}
SEARCH = {
    "kind": "repeat_and_select",
    "name": "search",
    "distribution": "truncated_negative_binomial",
    "mean": 10,
    "shape": 0.5,
}


# ---- adaptive clipping -------------------------------------------------------------


@pytest.mark.parametrize("adjacency", ["add_remove", "replace_one", "zero_out"])
@pytest.mark.parametrize("sampling", [POISSON["sampling"], {"scheme": "full_batch"}])
def test_a_clipping_count_is_a_block_of_clip_norm_one_half_on_the_same_lot(
    plan_of: Make, adjacency: str, sampling: dict[str, Any]
) -> None:
    shared: dict[str, Any] = {"adjacency": adjacency, "sampling": sampling}
    gradient = {"name": "all", "clip_norm": 3, "noise_multiplier": 2}
    bit = {"name": "bit", "clip_norm": 0.5, "noise_std": 5}
    adapted = lower(plan_of(**shared, releases=[gradient], extra=[QUANTILE])).event().events
    as_block = lower(plan_of(**shared, releases=[gradient, bit])).event().events
    assert len(adapted) == len(as_block) == 1
    (one, two) = adapted[0], as_block[0]
    assert isinstance(one, events.Repeated)
    assert isinstance(two, events.Repeated)
    assert one.count == two.count
    assert one.event.noise_multiplier == pytest.approx(two.event.noise_multiplier, rel=1e-14)
    assert one.event.noise_multiplier <= two.event.noise_multiplier


def test_the_joint_multiplier_is_that_of_the_paper(plan_of: Make) -> None:
    # Andrew et al., Theorem 1: z = (z_Δ^-2 + (2σ_b)^-2)^-1/2.
    assert add_same_lot_blocks(1.1, [2 * 10.0]) == pytest.approx(
        (1.1**-2 + 20.0**-2) ** -0.5, rel=1e-14
    )
    assert add_same_lot_blocks(1.1, []) == 1.1
    result = certify(plan_of(**POISSON, extra=[QUANTILE]), second_opinion=False)
    assert result.joint == pytest.approx((20**-2 + 10**-2) ** -0.5)


def test_it_is_never_a_release_with_a_sample_of_its_own(plan_of: Make) -> None:
    def upper(**changes: Any) -> float:
        result = certify(plan_of(**POISSON, **changes), second_opinion=False).epsilon
        assert result is not None
        return result.upper

    releases = [{"name": "all", "clip_norm": 1, "noise_multiplier": 1}]
    apart = {**METRIC, "noise_multiplier": 1, "count": 50, "sampling_probability": 0.1}
    tight = {**QUANTILE, "noise_std": 0.5}
    assert upper(releases=releases, extra=[tight]) > upper(releases=releases, extra=[apart])


def test_several_counts_are_several_blocks(plan_of: Make) -> None:
    def multiplier(*extra: dict[str, Any]) -> float:
        (run,) = lower(plan_of(**POISSON, extra=list(extra))).event().events
        assert isinstance(run, events.Repeated)
        assert isinstance(run.event, events.PoissonSubsampledGaussian)
        return run.event.noise_multiplier

    twice = multiplier(QUANTILE, {**QUANTILE, "name": "other"})
    assert twice == pytest.approx(multiplier({**QUANTILE, "count": 2}), rel=1e-14)
    assert twice < multiplier(QUANTILE)


def test_noise_is_solved_for_with_the_count_in_it(plan_of: Make) -> None:
    open_noise = [{"name": "all", "clip_norm": 1}]
    result = certify(
        plan_of(**POISSON, releases=open_noise, extra=[QUANTILE]), second_opinion=False
    )
    assert result.verdict == "certified"
    (release,) = result.releases
    assert release.required is not None
    provided = [{**open_noise[0], "noise_multiplier": release.required}]
    again = certify(plan_of(**POISSON, releases=provided, extra=[QUANTILE]), second_opinion=False)
    assert again.epsilon == result.epsilon
    plain = certify(plan_of(**POISSON, releases=open_noise), second_opinion=False)
    assert plain.releases[0].required is not None
    assert plain.releases[0].required < release.required


def test_the_trainer_is_told_how_to_count(plan_of: Make) -> None:
    result = certify(plan_of(extra=[QUANTILE]), second_opinion=False)
    assert "recentred_clipping_count" in {obligation["code"] for obligation in result.obligations}


@pytest.mark.parametrize(
    "changes",
    [
        {
            "adjacency": "zero_out",
            "sampling": {"scheme": "cyclic", "lot_size": 100},
            "noise": {"kind": "bidiagonal", "lambda": 0.5},
        },
        {"optimizer": {"name": "dp_dice", "error_clip_norm": 1}},
    ],
)
def test_adapted_clip_norms_are_refused_where_a_step_remembers(
    plan_of: Make, changes: dict[str, Any]
) -> None:
    with pytest.raises(RefusedPlan) as caught:
        lower(plan_of(**changes, extra=[QUANTILE]))
    assert [(r.code, r.pointer) for r in caught.value.reasons] == [("unsupported", "/extra/0/kind")]


# ---- metrics -----------------------------------------------------------------------


def test_a_sampled_metric_is_amplified_for_a_record_that_is_there_or_not(plan_of: Make) -> None:
    metric = {**METRIC, "count": 4, "sampling_probability": 0.1}
    (_, event) = lower(plan_of(extra=[metric])).event().events
    leaf = events.PoissonSubsampledGaussian(sampling_probability=0.1, noise_multiplier=30)
    assert event == events.Repeated(event=leaf, count=4)
    users = {"size": 1000, "unit": "user", "contributions_per_user": 3}
    (_, event) = lower(plan_of(dataset=users, extra=[metric])).event().events
    group = events.PoissonSampledGroupGaussian(
        records=3, sampling_probability=0.1, noise_multiplier=30
    )
    assert event == events.Repeated(event=group, count=4)


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"adjacency": "replace_one"}, "unsupported"),
        (
            {"dataset": {"size": 1000, "unit": "user", "contributions_per_user": 201}},
            "user_level_sampling",
        ),
    ],
)
def test_and_is_refused_where_no_theorem_amplifies_it(
    plan_of: Make, changes: dict[str, Any], code: str
) -> None:
    with pytest.raises(RefusedPlan) as caught:
        lower(plan_of(**changes, extra=[{**METRIC, "sampling_probability": 0.1}]))
    (reason,) = caught.value.reasons
    assert (reason.code, reason.pointer) == (code, "/extra/0/sampling_probability")
    lower(plan_of(**changes, extra=[{**METRIC, "sampling_probability": 1}]))


def test_a_laplace_metric_composes_with_the_run(plan_of: Make) -> None:
    laplace = {"kind": "laplace", "name": "count", "noise_multiplier": 4, "count": 2}
    users = {"size": 1000, "unit": "user", "contributions_per_user": 2}
    (_, event) = lower(plan_of(extra=[laplace], dataset=users)).event().events
    assert event == events.Repeated(event=events.Laplace(noise_multiplier=2.0), count=2)
    plain = certify(plan_of(), second_opinion=False).epsilon
    result = certify(plan_of(extra=[laplace]))
    assert [opinion.name for opinion in result.accountants] == ["fourier", "pld"]
    assert result.epsilon is not None
    assert plain is not None
    # At most what pure privacy adds, 2/4, and more than nothing.
    assert plain.lower < result.epsilon.lower <= result.epsilon.upper <= plain.upper + 0.5 + 1e-3


# ---- repeat and select -------------------------------------------------------------


def test_the_whole_run_is_repeated_with_the_metrics_that_are_part_of_it(plan_of: Make) -> None:
    score = {**METRIC, "name": "score", "each_repetition": True}
    (selected, beside) = lower(plan_of(extra=[METRIC, SEARCH, score])).event().events
    run = events.Repeated(event=events.Gaussian(noise_multiplier=20.0), count=10)
    metric = events.Repeated(event=events.Gaussian(noise_multiplier=30.0), count=1)
    assert selected == events.RepeatAndSelect(
        event=events.Composed(events=(run, metric)), mean=10, shape=0.5
    )
    assert beside == metric


@pytest.mark.parametrize(
    ("distribution", "shape"), [("poisson", math.inf), ("geometric", 1.0), ("logarithmic", 0.0)]
)
def test_a_distribution_with_a_name_has_its_shape(
    plan_of: Make, distribution: str, shape: float
) -> None:
    named = {key: value for key, value in SEARCH.items() if key != "shape"}
    (event,) = lower(plan_of(extra=[{**named, "distribution": distribution}])).event().events
    assert isinstance(event, events.RepeatAndSelect)
    assert event.shape == shape


def test_a_selection_is_certified_by_the_engines_that_know_it_and_costs_more(plan_of: Make) -> None:
    once = certify(plan_of(), second_opinion=False)
    result = certify(plan_of(extra=[SEARCH]))
    assert result.verdict == "certified"
    assert [opinion.name for opinion in result.accountants] == ["selection", "rdp"]
    assert result.epsilon is not None
    assert once.epsilon is not None
    assert result.epsilon.upper > once.epsilon.upper
    codes = {obligation["code"] for obligation in result.obligations}
    assert {"repetitions_are_drawn", "score_is_accounted"} <= codes


def test_noise_is_solved_for_around_a_selection(plan_of: Make) -> None:
    result = certify(
        plan_of(extra=[SEARCH], releases=[{"name": "all", "clip_norm": 1}]), second_opinion=False
    )
    assert result.verdict == "certified"
    assert result.epsilon is not None
    assert 7.9 < result.epsilon.upper <= 8


# ---- contradictions ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("extra", "code", "pointer"),
    [
        ([SEARCH, {**SEARCH, "name": "b"}], "conflict", "/extra/0/kind"),
        ([{**SEARCH, "shape": None}], "missing_field", "/extra/0/shape"),
        ([{**SEARCH, "distribution": "poisson"}], "conflict", "/extra/0/shape"),
        ([{**SEARCH, "mean": 0.5}], "invalid_value", "/extra/0/mean"),
        ([{**SEARCH, "distribution": "fixed"}], "invalid_value", "/extra/0/distribution"),
        ([{**METRIC, "each_repetition": True}], "conflict", "/extra/0/each_repetition"),
        ([{**METRIC, "quantile": 0.5}], "unknown_field", "/extra/0/quantile"),
        ([{**QUANTILE, "noise_multiplier": 1}], "unknown_field", "/extra/0/noise_multiplier"),
        ([{"kind": "laplace", "name": "l"}], "missing_field", "/extra/0/noise_multiplier"),
        ([{"kind": "exponential", "name": "l"}], "invalid_value", "/extra/0/kind"),
    ],
)
def test_what_cannot_be_meant_is_malformed(
    plan_of: Make, extra: list[dict[str, Any]], code: str, pointer: str
) -> None:
    with pytest.raises(MalformedPlan) as caught:
        plan_of(extra=extra)
    reason = caught.value.reasons[0]
    assert (reason.code, reason.pointer) == (code, pointer)


def test_noise_of_a_fixed_standard_deviation_cannot_follow_an_adapted_clip_norm(
    plan_of: Make,
) -> None:
    with pytest.raises(MalformedPlan) as caught:
        plan_of(releases=[{"name": "a", "clip_norm": 1, "noise_std": 5}], extra=[QUANTILE])
    (reason,) = caught.value.reasons
    assert (reason.code, reason.pointer) == ("conflict", "/releases/0/noise_std")


WHOLE = 1 << 512


def selection(distribution: Any, mean: float, shape: float | None = None) -> Selection:
    return Selection(
        kind="repeat_and_select", name="s", distribution=distribution, mean=mean, shape=shape
    )


def negative_binomial(shape: float, gamma: float) -> Any:
    """Its distribution function, truncated to 1, 2, …"""
    law = stats.nbinom(shape, gamma)
    return lambda k: (law.cdf(k) - law.pmf(0)) / (1 - law.pmf(0))


LAWS = [
    (selection("poisson", 7.5), stats.poisson(7.5).cdf),
    (selection("geometric", 5), stats.geom(0.2).cdf),
    # The mean of logser(p) is p / ((1 - p) · -log(1 - p)).
    (selection("logarithmic", 2.164042561333445), stats.logser(0.75).cdf),
    # That of the truncated law is η (1 - γ) / (γ (1 - γ^η)).
    (
        selection("truncated_negative_binomial", 0.5 * 0.9 / (0.1 * (1 - 0.1**0.5)), 0.5),
        negative_binomial(0.5, 0.1),
    ),
    (
        selection("truncated_negative_binomial", 3 * 0.7 / (0.3 * (1 - 0.3**3)), 3.0),
        negative_binomial(3, 0.3),
    ),
]


@pytest.mark.parametrize(("selected", "below"), LAWS)
def test_the_number_steps_where_the_distribution_function_does(
    selected: Selection, below: Any
) -> None:
    for count in (1, 2, 3, 5, 9):
        edge = float(below(count))
        for side, expected in ((-1e-9, count), (1e-9, count + 1)):
            assert draw_repetitions(selected, int(Fraction(edge + side) * WHOLE)) == expected


@pytest.mark.parametrize(("selected", "_"), LAWS)
def test_the_mean_is_the_certified_one(selected: Selection, _: Any) -> None:
    points = 4000
    drawn = [draw_repetitions(selected, (2 * i + 1) * WHOLE // (2 * points)) for i in range(points)]
    assert sum(drawn) / points == pytest.approx(selected.mean, rel=5e-3)


def test_the_ends() -> None:
    assert draw_repetitions(selection("poisson", 1), 0) == 0
    for once in (selection("geometric", 1), selection("logarithmic", 1)):
        assert draw_repetitions(once, WHOLE - 1) == 1
    assert draw_repetitions(selection("geometric", 2), WHOLE - 1) > 100  # it ends
    for wrong in (-1, WHOLE):
        with pytest.raises(ValueError, match="bits"):
            draw_repetitions(selection("geometric", 2), wrong)
