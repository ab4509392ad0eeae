"""Patterns of participation are those of the definition."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from affidavit.mechanisms.strategies.participation import Participation
from tests.mechanisms.strategies.brute import every_pattern, patterns

schemas = st.sampled_from(["fixed_epoch", "min_separation"])


@given(schema=schemas, k=st.integers(1, 4), b=st.integers(1, 5), steps=st.integers(1, 9))
def test_every_pattern_lies_in_a_maximal_one_and_each_of_those_is_one(
    schema: str, k: int, b: int, steps: int
) -> None:
    turns = Participation(schema=schema, participations=k, separation=b)  # type: ignore[arg-type]
    everything = set(every_pattern(steps, turns))
    maximal = {frozenset(pattern) for pattern in patterns(turns, steps)}
    assert {tuple(sorted(pattern)) for pattern in maximal} <= everything
    assert all(any(set(pattern) <= larger for larger in maximal) for pattern in everything)
    assert max(map(len, everything)) == turns.max_participations(steps)


def test_single_participation_is_one_step() -> None:
    assert list(patterns(Participation.single(), 3)) == [(0,), (1,), (2,)]
    with pytest.raises(ValueError, match="single"):
        Participation(schema="single", participations=2)


def test_a_schema_needs_positive_numbers() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        Participation.fixed_epoch(participations=0, separation=1)
