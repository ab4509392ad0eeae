"""Scales have round ends around the shown values, few ticks, and texts with their values."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from affidavit.assessment.charts import (
    MAX_SHOWN_VALUE,
    Axis,
    Scale,
    is_shown,
    power_of_ten,
    text_of,
)

LINEAR, LOG = Axis(label="ε"), Axis(label="δ", scale="log")
numbers = st.floats(-1e9, 1e9).filter(lambda value: value == 0 or abs(value) > 1e-9)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (0.001, "0.001"),
        (9999.0, "9999"),
        (1e4, "10⁴"),
        (2e-5, "2·10⁻⁵"),
        (1.25e7, "1.25·10⁷"),
        (-0.5, "−0.5"),
        (-2e6, "−2·10⁶"),
        (1e-5, "10⁻⁵"),
    ],
)
def test_a_text_says_its_value(value: float, text: str) -> None:
    assert text_of(value) == text


def test_powers_are_written_as_such_but_one_and_ten() -> None:
    shown = [power_of_ten(value) for value in (1e-3, 0.1, 1.0, 10.0, 100.0, 0.2, 1e30)]
    assert shown == ["10⁻³", "10⁻¹", "1", "10", "10²", "2·10⁻¹", "10³⁰"]


@given(st.lists(numbers, min_size=1, max_size=5))
def test_the_ends_are_around_all_values_and_ticks_are_even(
    values: list[float],
) -> None:
    scale = Scale.over(LINEAR, values, start=0, end=100)
    assert all(scale.contains(value) for value in values)
    assert all(-1e-6 <= scale.position(value) <= 100 + 1e-6 for value in values)
    ticks = scale.ticks()
    assert 2 <= len(ticks) <= 8
    assert all(scale.contains(tick.value) for tick in ticks)
    gaps = [after.value - before.value for before, after in itertools.pairwise(ticks)]
    assert gaps == pytest.approx([gaps[0]] * len(gaps), rel=1e-6)
    assert ticks[0].value - scale.low < gaps[0]
    assert scale.high - ticks[-1].value < gaps[0]


@given(st.lists(st.floats(-30, 3), min_size=1, max_size=5))
def test_decades_around_all_values_of_a_logarithm(exponents: list[float]) -> None:
    values = [10.0**exponent for exponent in exponents]
    scale = Scale.over(LOG, values, start=50, end=0)
    assert all(scale.contains(value) for value in values)
    for end in (scale.low, scale.high):
        assert math.log10(end) == pytest.approx(round(math.log10(end)), abs=1e-9)
    assert scale.position(scale.low) == pytest.approx(50)
    assert scale.position(math.sqrt(scale.low * scale.high)) == pytest.approx(25)
    assert all(scale.contains(tick.value) for tick in scale.ticks())
    assert 1 <= len(scale.ticks()) <= 8


def test_what_an_axis_says_of_its_ends_holds() -> None:
    scale = Scale.over(Axis(label="x", low=0.25, high=7.3), [3.0], start=0, end=1)
    assert (scale.low, scale.high) == (0.25, 7.3)
    assert not scale.contains(7.4)
    assert not scale.contains(0.2)


def test_what_no_axis_has_a_place_for_is_not_shown() -> None:
    assert is_shown(LINEAR, 0.0)
    assert not is_shown(LOG, 0.0)
    assert is_shown(LOG, 1 / MAX_SHOWN_VALUE)
    assert not is_shown(LOG, 0.5 / MAX_SHOWN_VALUE)
    assert not is_shown(LINEAR, 2 * MAX_SHOWN_VALUE)
    assert is_shown(LINEAR, MAX_SHOWN_VALUE)


def test_far_outside_is_as_good_as_just_outside() -> None:
    scale = Scale.over(LINEAR, [0.0, 10.0], start=0, end=100)
    assert (scale.position(1e12), scale.position(-1e12)) == (200, -100)


@pytest.mark.parametrize("size", [1e-12, 1e-6, 1.0, 1e9])
def test_ends_lie_close_around_values_of_any_size(size: float) -> None:
    scale = Scale.over(LINEAR, [2 * size, 8 * size], start=0, end=100)
    assert (scale.low, scale.high) == pytest.approx((2 * size, 8 * size), rel=1e-9)
    scale = Scale.over(LINEAR, [0.0, 0.93 * size], start=0, end=100)
    assert (scale.low, scale.high) == pytest.approx((0.0, size), rel=1e-9)


def test_a_single_value_has_a_scale_around_it() -> None:
    for value in (0.0, 5.0, -3.0, 1e-12):
        scale = Scale.over(LINEAR, [value], start=0, end=1)
        assert scale.low < scale.high
        assert scale.contains(value)
    assert Scale.over(LOG, [1e-3], start=0, end=1).low < 1e-3
    assert Scale.over(LOG, [], start=0, end=1).contains(1.0)
