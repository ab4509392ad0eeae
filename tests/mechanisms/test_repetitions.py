"""The number of repetitions against SciPy's distributions, and its mean against the plan's."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
from scipy import stats

from affidavit.mechanisms import draw_repetitions
from affidavit.plan import Selection

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
