"""The charts of a plan's curves show the certified numbers and the reference without leakage."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from affidavit.accountants import decimal_up
from affidavit.assessment import (
    CURVE_CHARTS,
    Assessment,
    Curves,
    curves,
    draw_curves,
)
from affidavit.assessment.charts import (
    Band,
    Chart,
    Dots,
    Line,
)
from affidavit.plan import Plan


@pytest.fixture(scope="module")
def plan_curves(plan_of: Callable[..., Plan]) -> Curves:
    result = curves(plan_of())
    assert not isinstance(result, Assessment)
    return result


@pytest.fixture(scope="module")
def charts(plan_curves: Curves) -> dict[str, Chart]:
    return {kind: draw(plan_curves) for kind, draw in CURVE_CHARTS.items()}


def test_the_profile_is_a_band_of_proved_ends_with_the_target(charts: dict[str, Chart]) -> None:
    band, target = charts["profile"].marks
    assert isinstance(band, Band)
    assert all(lower <= upper for _, lower, upper in band.points)
    assert isinstance(target, Dots)
    assert target.points == ((8.0, 1e-5),)


def test_the_document_says_what_was_asked_beside_what_was_found(plan_curves: Curves) -> None:
    data = plan_curves.as_document()
    assert data["target"] == {"epsilon": 8.0, "delta": 1e-5}
    assert (data["verdict"], data["adjacency"], data["unit"]) == (
        "certified",
        "add_remove",
        "example",
    )
    # One Gaussian of ten steps at 20.
    assert data["mu"] == pytest.approx(math.sqrt(10) / 20, rel=1e-12)
    assert data["rho"] == pytest.approx(10 / 20**2 / 2, rel=1e-12)
    alphas = [item["type_one"] for item in data["trade_off"]]
    tenths = [place / 20 for place in range(2, 20)]
    assert alphas == [1e-4, 1e-3, 0.01, 0.05, *tenths, 0.99, 0.999]


def test_every_curve_is_at_the_usual_levels_and_at_the_target(
    plan_of: Callable[..., Plan], plan_curves: Curves
) -> None:
    usual = [0.0, 0.1, 0.25, 0.5, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 10.0, 16.0]
    assert [epsilon for epsilon, _ in plan_curves.delta_of] == usual
    for target, levels in (({"delta": 1e-5}, usual), ({"epsilon": 5, "delta": 1e-5}, [*usual, 5])):
        other = curves(plan_of(target=target))
        assert not isinstance(other, Assessment)
        assert [epsilon for epsilon, _ in other.delta_of] == sorted(levels)
        assert 1e-5 in [delta for delta, _ in other.epsilon_of]


def test_the_trade_off_runs_between_no_alarm_and_no_miss(
    plan_curves: Curves, charts: dict[str, Chart]
) -> None:
    band, blind = charts["trade-off"].marks
    assert isinstance(band, Band)
    assert (band.points[0][0], band.points[-1][0]) == (0.0, 1.0)
    for alpha, lower, upper in band.points:
        assert lower <= upper <= 1 - alpha + 1e-12
        assert plan_curves.trade_off.type_two(alpha).lower == lower
    assert isinstance(blind, Line)
    assert (blind.points, blind.faint) == (((0.0, 1.0), (1.0, 0.0)), True)


def test_an_attack_finds_at_least_what_a_guess_does(charts: dict[str, Chart]) -> None:
    band, blind = charts["attack"].marks
    assert isinstance(band, Band)
    assert all(rate <= upper + 1e-12 for rate, _, upper in band.points)
    assert isinstance(blind, Line)
    assert blind.faint
    assert all(x == y for x, y in blind.points)


def test_the_renyi_divergence_of_a_gaussian_is_a_line_through_zero(
    plan_curves: Curves, charts: dict[str, Chart]
) -> None:
    (line,) = charts["renyi"].marks
    assert isinstance(line, Line)
    assert line.name == "exact"
    assert plan_curves.mu is not None
    for order, divergence in line.points:
        assert divergence == pytest.approx(order * plan_curves.mu**2 / 2, rel=1e-6)


def test_beliefs_move_by_the_odds_of_epsilon_and_no_more(
    plan_curves: Curves, charts: dict[str, Chart]
) -> None:
    after, unmoved = charts["belief"].marks
    assert isinstance(after, Line)
    assert isinstance(unmoved, Line)
    assert (after.faint, unmoved.faint) == (False, True)
    assert all(x == y for x, y in unmoved.points)
    assert len(after.points) == len(unmoved.points) - 1
    for prior, posterior in after.points:
        moved = math.log(posterior / (1 - posterior)) - math.log(prior / (1 - prior))
        assert moved == pytest.approx(plan_curves.odds_exponent, rel=1e-6)
    assert decimal_up(plan_curves.delta, 6) in after.name
    assert (charts["belief"].y.low, charts["belief"].y.high) == (0.0, 1.0)
    assert charts["belief"].x.high == 1.0


def test_every_axis_says_what_and_in_which_unit(charts: dict[str, Chart]) -> None:
    labels = {kind: (chart.x.label, chart.y.label) for kind, chart in charts.items()}
    assert labels["profile"] == ("ε (nats)", "δ (probability)")
    assert labels["renyi"] == ("order", "divergence (nats)")
    assert len({chart.title for chart in charts.values()}) == len(CURVE_CHARTS)
    scales = {kind: (chart.x.scale, chart.y.scale) for kind, chart in charts.items()}
    assert scales == {
        "profile": ("linear", "log"),
        "trade-off": ("linear", "linear"),
        "attack": ("log", "log"),
        "renyi": ("log", "log"),
        "belief": ("log", "linear"),
    }


def test_pictures_stand_two_in_a_row(plan_curves: Curves) -> None:
    for kinds, size in (
        (("belief",), 'width="480" height="320"'),
        (("belief", "attack"), 'width="960" height="350"'),
        (("belief", "attack", "profile"), 'width="960" height="670"'),
        ((), 'width="960" height="990"'),
    ):
        assert size in draw_curves(plan_curves, kinds)


def test_a_picture_holds_what_was_asked_for(plan_curves: Curves) -> None:
    alone = draw_curves(plan_curves, ("belief",))
    assert "Belief about one record" in alone
    assert "Trade-off" not in alone
    every = draw_curves(plan_curves)
    assert all(draw(plan_curves).title in every for draw in CURVE_CHARTS.values())
    assert "quick: ε ≤" in every
