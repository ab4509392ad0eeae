"""Every bound against brute force over all patterns, and against unit vectors."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.linalg import toeplitz

from affidavit.mechanisms.strategies.dense import Dense, factor_of_gram
from affidavit.mechanisms.strategies.participation import Participation
from affidavit.mechanisms.strategies.sensitivity import (
    Unaffordable,
    gram_sensitivity,
    matrix_sensitivity,
    max_separated_sum,
    row_wise_bounds,
    toeplitz_sensitivity,
)
from affidavit.mechanisms.strategies.strategy import IllConditioned
from affidavit.mechanisms.strategies.toeplitz import Toeplitz
from tests.mechanisms.strategies.brute_force import Array, attained, bound, every_pattern, patterns
from tests.support.random_seeds import examples

CLOSE = 1e-10
signed = st.floats(-2, 2, allow_subnormal=False).map(lambda value: round(value, 3))
positive = st.floats(0, 2).map(lambda value: round(value, 3))


@st.composite
def turns(draw: st.DrawFn, *, most: int = 4) -> Participation:
    schema = draw(st.sampled_from(["single", "fixed_epoch", "min_separation"]))
    if schema == "single":
        return Participation.single()
    return Participation(
        schema=schema,  # type: ignore[arg-type]
        participations=draw(st.integers(1, most)),
        separation=draw(st.integers(1, 5)),
    )


@st.composite
def lower(draw: st.DrawFn, entries: st.SearchStrategy[float], *, largest: int = 12) -> Array:
    steps = draw(st.integers(1, largest))
    matrix = np.tril(draw(arrays(float, (steps, steps), elements=entries)))
    np.fill_diagonal(matrix, 1.0)
    return matrix


@settings(max_examples=examples(60))
@given(matrix=lower(positive), at=turns())
def test_a_strategy_without_negative_entries_meets_brute_force(
    matrix: Array, at: Participation
) -> None:
    result, true = matrix_sensitivity(matrix, at), bound(matrix, at)
    assert result.value >= true * (1 - 1e-15)
    if at.schema != "min_separation":
        assert result.exact
    if result.exact:
        assert result.value == pytest.approx(true, rel=CLOSE)


@settings(max_examples=examples(60))
@given(matrix=lower(signed), at=turns())
def test_a_signed_strategy_is_bounded_and_exact_only_where_it_is(
    matrix: Array, at: Participation
) -> None:
    result, size = matrix_sensitivity(matrix, at), bound(matrix, at)
    assert result.value >= size * (1 - 1e-15)
    if at.schema == "fixed_epoch":
        assert result.value == pytest.approx(size, rel=CLOSE)


@settings(max_examples=15)
@given(matrix=lower(signed, largest=7), at=turns(most=3))
def test_unit_vectors_of_any_direction_stay_below_the_bound_and_reach_an_exact_one(
    matrix: Array, at: Participation
) -> None:
    result = matrix_sensitivity(matrix, at)
    reached = attained(matrix, at, np.random.default_rng(0))
    assert reached <= result.value * (1 + 1e-12)
    if result.exact:
        assert reached == pytest.approx(result.value, rel=1e-6)


@settings(max_examples=examples(80))
@given(column=st.lists(signed, min_size=1, max_size=12), at=turns(), more=st.integers(0, 4))
def test_a_toeplitz_strategy_is_bounded_for_every_sign(
    column: list[float], at: Participation, more: int
) -> None:
    coefficients = np.array([1.0, *column])[:12]
    steps = min(len(coefficients) + more, 12)
    padded = np.zeros(steps)
    padded[: min(steps, len(coefficients))] = coefficients[:steps]
    true = bound(toeplitz(padded, np.zeros(steps)), at)
    result = toeplitz_sensitivity(coefficients, steps, at)
    assert result.value >= true * (1 - 1e-15)
    if result.exact or at.schema == "fixed_epoch":
        assert result.value == pytest.approx(true, rel=CLOSE)


@settings(max_examples=examples(60))
@given(column=st.lists(positive, min_size=1, max_size=11), at=turns())
def test_a_toeplitz_strategy_that_decreases_is_exact_for_every_schema(
    column: list[float], at: Participation
) -> None:
    coefficients = np.array([2.0, *sorted(column, reverse=True)])
    result = toeplitz_sensitivity(coefficients, len(coefficients), at)
    assert result.exact
    true = bound(toeplitz(coefficients, np.zeros(len(coefficients))), at)
    assert result.value == pytest.approx(true, rel=CLOSE)


@pytest.mark.parametrize("column", [[1, 0, 0, 1, 0, 0, 1], [1, 0, 0, 1, 0, 0, 0]])
def test_coefficients_that_increase_are_not_evaluated_at_the_first_steps(
    column: list[float],
) -> None:
    """The evaluation at 0, b, 2b, ... is the value for a fixed order, and too little here."""
    at = Participation.min_separation(participations=3, separation=2)
    in_order = Participation.fixed_epoch(participations=3, separation=2)
    steps = len(column)
    true = bound(toeplitz(column, np.zeros(steps)), at)
    naive = toeplitz_sensitivity(np.array(column, dtype=float), steps, in_order).value
    result = toeplitz_sensitivity(np.array(column, dtype=float), steps, at)
    assert naive * 1.1 < true <= result.value
    assert not result.exact


def test_bands_within_the_separation_are_exact_whatever_their_signs() -> None:
    rng = np.random.default_rng(1)
    matrix = np.triu(np.tril(rng.normal(size=(12, 12))), -2)
    at = Participation.min_separation(participations=3, separation=3)
    result = matrix_sensitivity(matrix, at)
    assert result.exact
    assert result.value == pytest.approx(bound(matrix, at), rel=CLOSE)
    unit = matrix / np.linalg.norm(matrix, axis=0)
    assert matrix_sensitivity(unit, at).value == pytest.approx(3**0.5, rel=CLOSE)


@settings(max_examples=examples(40))
@given(values=st.lists(positive, min_size=1, max_size=10), k=st.integers(1, 4), b=st.integers(1, 4))
def test_the_dynamic_programme_over_a_diagonal_is_exact(
    values: list[float], k: int, b: int
) -> None:
    at = Participation.min_separation(participations=k, separation=b)
    diagonal = np.diag(np.sqrt(values))
    assert max_separated_sum(np.array(values), at) == pytest.approx(bound(diagonal, at) ** 2)


@settings(max_examples=30)
@given(matrix=lower(signed, largest=9), k=st.integers(1, 4), b=st.integers(1, 3))
def test_a_row_is_never_below_what_one_pattern_takes_from_it(matrix: Array, k: int, b: int) -> None:
    at = Participation.min_separation(participations=k, separation=b)
    size = np.abs(matrix.T @ matrix)
    rows = row_wise_bounds(size, at)
    for pattern in patterns(at, len(size)):
        taken = size[np.ix_(pattern, pattern)].sum(axis=1)
        assert np.all(taken <= rows[list(pattern)] * (1 + 1e-12))


def test_more_participations_and_less_separation_never_cost_less() -> None:
    matrix = np.tril(np.random.default_rng(2).normal(size=(10, 10)))
    for schema in (Participation.fixed_epoch, Participation.min_separation):
        by_k = [
            matrix_sensitivity(matrix, schema(participations=k, separation=2)).value
            for k in range(1, 6)
        ]
        assert by_k == sorted(by_k)
    by_b = [
        matrix_sensitivity(
            matrix, Participation.min_separation(participations=3, separation=b)
        ).value
        for b in range(1, 6)
    ]
    assert by_b == sorted(by_b, reverse=True)


def test_identity_costs_the_root_of_the_participations() -> None:
    at = Participation.fixed_epoch(participations=7, separation=3)
    assert matrix_sensitivity(np.eye(21), at).value == pytest.approx(7**0.5, rel=CLOSE)
    assert toeplitz_sensitivity(np.array([1.0]), 21, at).value == pytest.approx(7**0.5, rel=CLOSE)


def test_a_tiny_off_diagonal_entry_is_charged_and_not_dropped() -> None:
    gram = np.eye(4)
    gram[0, 2] = gram[2, 0] = 1e-17
    at = Participation.min_separation(participations=2, separation=2)
    assert gram_sensitivity(gram, at, operations=4).value > 2**0.5


def test_work_without_bound_is_refused() -> None:
    at = Participation.min_separation(participations=1000, separation=1)
    with pytest.raises(Unaffordable):
        row_wise_bounds(np.ones((2000, 2000)), at)


def test_the_factor_of_a_gram_matrix_is_lower_triangular_and_is_not_its_cholesky_factor() -> None:
    strategy = np.tril(np.random.default_rng(3).uniform(0.1, 1, size=(6, 6)))
    gram = strategy.T @ strategy
    assert factor_of_gram(gram) == pytest.approx(strategy)
    assert not np.allclose(np.linalg.cholesky(gram), strategy)
    with pytest.raises(ValueError, match="positive"):
        factor_of_gram(-gram)


@settings(max_examples=examples(40))
@given(matrix=lower(signed, largest=8), at=turns())
def test_the_sensitivity_is_that_of_the_inverse_of_the_noise(
    matrix: Array, at: Participation
) -> None:
    result = Dense.from_noise(matrix).sensitivity(at)
    true = Dense.from_strategy(np.tril(np.linalg.inv(matrix))).sensitivity(at)
    assert result.value == pytest.approx(true.value, rel=1e-6)


@pytest.mark.parametrize(
    ("matrix", "message"),
    [
        ([[1, 2], [0, 1]], "lower triangular"),
        ([[1, 0], [1, 0]], "diagonal"),
        ([[1, 0]], "square"),
        ([[np.inf]], "finite"),
    ],
)
def test_noise_without_a_causal_inverse_is_refused(matrix: list[list[float]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Dense.from_noise(np.array(matrix, dtype=float))


def test_an_inverse_that_is_not_known_is_refused() -> None:
    growing = np.eye(80) - 3 * np.eye(80, k=-1)
    growing[-1] = 1.0
    with pytest.raises(IllConditioned):
        Dense.from_noise(growing).sensitivity(Participation.single())
    with pytest.raises(IllConditioned):
        Toeplitz.from_noise([1.0, -30.0], 300).sensitivity(Participation.single())


def test_rounding_above_the_diagonal_of_a_computed_inverse_is_accepted_and_counted() -> None:
    noise = np.linalg.inv(np.tril(np.full((8, 8), 0.5)) + np.eye(8))
    noise[0, 3] = 9e-18
    twice = Participation.fixed_epoch(participations=2, separation=4)
    assert Dense.from_noise(noise).sensitivity(twice).value == pytest.approx(
        Dense.from_noise(np.tril(noise)).sensitivity(twice).value, rel=1e-12
    )
    # What is counted, by the inverse of the whole matrix, where it is large enough to be seen.
    for sign in (1, -1):
        above = sign * 1e-8 * np.triu(np.ones((8, 8)), 1)
        bound = Dense(kind="matrix", steps=8, noise=np.tril(noise), above=above).sensitivity(twice)
        strategy = np.linalg.inv(np.tril(noise) + above)
        worst = max(float(np.linalg.norm(strategy[:, i] + strategy[:, i + 4])) for i in range(4))
        assert bound.attained <= worst <= bound.value


def test_an_entry_above_the_diagonal_that_is_no_rounding_is_refused() -> None:
    noise = np.eye(3)
    noise[0, 2] = 1e-11
    with pytest.raises(ValueError, match="lower triangular"):
        Dense.from_noise(noise)


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


@pytest.mark.parametrize(("steps", "separation"), [(800, 1), (900, 2), (901, 2)])
def test_steps_that_go_on_to_the_end_of_a_long_run_are_counted(steps: int, separation: int) -> None:
    """The first turn's patterns have all others in them, which are not enumerated."""
    draws = np.random.default_rng(separation)
    matrix = np.tril(np.triu(draws.random((steps, steps)), -3)) + np.eye(steps)
    at = Participation.fixed_epoch(participations=-(-steps // separation), separation=separation)
    gram = matrix.T @ matrix
    most = max(gram[first::separation, first::separation].sum() for first in range(separation + 1))
    result = matrix_sensitivity(matrix, at)
    assert result.value**2 == pytest.approx(most, rel=1e-6)
    assert result.attained == pytest.approx(result.value, rel=1e-6)
