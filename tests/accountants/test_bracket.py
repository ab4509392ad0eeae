"""Brackets and their decimals never move a bound inward."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from affidavit.accountants.bracket import Bracket, decimal_down, decimal_up

positive = st.floats(1e-300, 1e300)


@given(value=positive, digits=st.integers(1, 17))
def test_decimals_are_outward(value: float, digits: int) -> None:
    assert float(decimal_down(value, digits)) <= value <= float(decimal_up(value, digits))


@given(value=positive)
def test_seventeen_digits_are_exact(value: float) -> None:
    assert float(decimal_up(value, 17)) == value == float(decimal_down(value, 17))


@pytest.mark.parametrize(
    ("value", "text"), [(1e-5, "1e-5"), (8.0, "8"), (0.0, "0"), (100.0, "100"), (0.5, "0.5")]
)
def test_short_decimals_stay_short(value: float, text: str) -> None:
    assert decimal_up(value) == decimal_down(value) == text


def test_infinity_is_written_and_nan_refused() -> None:
    assert decimal_up(math.inf) == "Infinity"
    assert decimal_down(-math.inf) == "-Infinity"
    with pytest.raises(ValueError, match="NaN"):
        decimal_up(math.nan)


@pytest.mark.parametrize(("lower", "upper"), [(2.0, 1.0), (math.nan, 1.0), (0.0, math.nan)])
def test_a_bracket_that_is_none_is_refused(lower: float, upper: float) -> None:
    with pytest.raises(ValueError, match="bracket"):
        Bracket(lower=lower, upper=upper)


def test_brackets_meet_when_they_overlap_or_nearly_do() -> None:
    low, high = Bracket(lower=1.0, upper=2.0), Bracket(lower=2.001, upper=3.0)
    assert not low.meets(high)
    assert low.meets(high, 1e-3)
    assert high.meets(low, 1e-3)


@given(st.lists(st.tuples(positive, positive, positive), min_size=2, max_size=2))
def test_the_larger_of_two_values_lies_in_the_larger_bracket(
    numbers: list[tuple[float, float, float]],
) -> None:
    (low, one, high), (other_low, other, other_high) = map(sorted, numbers)
    result = Bracket(lower=low, upper=high).larger(Bracket(lower=other_low, upper=other_high))
    assert result.lower <= max(one, other) <= result.upper


@given(st.lists(st.tuples(positive, positive), min_size=2, max_size=2), positive)
def test_what_lies_in_two_brackets_lies_in_what_they_have_in_common(
    around: list[tuple[float, float]], value: float
) -> None:
    (down, up), (other_down, other_up) = around
    one = Bracket(lower=value - down, upper=value + up)
    other = Bracket(lower=value - other_down, upper=value + other_up)
    result = one.intersect(other)
    assert result.lower <= value <= result.upper
    assert {result.lower, result.upper} <= {one.lower, one.upper, other.lower, other.upper}
    assert result == other.intersect(one)
    assert result.width <= min(one.width, other.width)
