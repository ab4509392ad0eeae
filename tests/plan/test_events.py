"""An event is valid at construction, and then never changes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import FrozenInstanceError
from typing import Any

import pytest

from affidavit.plan import events

NOT_A_MULTIPLIER = [0.0, -1.0, math.inf, math.nan]
NOT_A_PROBABILITY = [0.0, 1.0, -0.1, 1.5, math.nan]


def poisson(sampling_probability: float = 0.1, noise_multiplier: float = 1.0) -> Any:
    return events.PoissonSubsampledGaussian(
        sampling_probability=sampling_probability, noise_multiplier=noise_multiplier
    )


def drawn(sample_size: int = 1, dataset_size: int = 2, noise_multiplier: float = 1.0) -> Any:
    return events.WithoutReplacementGaussian(
        sample_size=sample_size, dataset_size=dataset_size, noise_multiplier=noise_multiplier
    )


@pytest.mark.parametrize("sigma", NOT_A_MULTIPLIER)
@pytest.mark.parametrize("make", [events.Gaussian, poisson, drawn])
def test_noise_is_positive_and_finite(make: Callable[..., Any], sigma: float) -> None:
    with pytest.raises(ValueError, match="noise_multiplier"):
        make(noise_multiplier=sigma)


@pytest.mark.parametrize("probability", NOT_A_PROBABILITY)
def test_a_probability_lies_strictly_between_0_and_1(probability: float) -> None:
    with pytest.raises(ValueError, match="sampling_probability"):
        poisson(sampling_probability=probability)


@pytest.mark.parametrize(("sample", "size"), [(0, 2), (2, 2), (3, 2), (-1, 2)])
def test_a_sample_is_a_proper_part(sample: int, size: int) -> None:
    with pytest.raises(ValueError, match="sample_size"):
        drawn(sample, size)


def test_a_count_is_not_negative_and_may_be_zero() -> None:
    assert events.Repeated(event=events.Gaussian(noise_multiplier=1.0), count=0).count == 0
    with pytest.raises(ValueError, match="count"):
        events.Repeated(event=events.Gaussian(noise_multiplier=1.0), count=-1)


def test_events_are_frozen_values() -> None:
    leaf = events.Gaussian(noise_multiplier=1.0)
    whole = events.Composed(events=(events.Repeated(event=leaf, count=2),))
    assert whole == events.Composed(
        events=(events.Repeated(event=events.Gaussian(noise_multiplier=1.0), count=2),)
    )
    assert hash(whole) == hash(events.Composed(events=whole.events))
    with pytest.raises(FrozenInstanceError):
        leaf.noise_multiplier = 2.0  # type: ignore[misc]


@pytest.mark.parametrize(("largest", "size"), [(0, 10), (11, 10), (-1, 10)])
def test_the_largest_lot_is_at_least_one_record_and_at_most_all(largest: int, size: int) -> None:
    with pytest.raises(ValueError, match="max_lot_size"):
        events.TruncatedPoissonGaussian(
            dataset_size=size,
            sampling_probability=0.1,
            max_lot_size=largest,
            noise_multiplier=1.0,
        )


def test_an_allocation_has_a_bin_and_noise() -> None:
    with pytest.raises(ValueError, match="bins"):
        events.RandomAllocationGaussian(bins=0, noise_multiplier=1.0)
    with pytest.raises(ValueError, match="noise_multiplier"):
        events.RandomAllocationGaussian(bins=3, noise_multiplier=math.nan)
    with pytest.raises(ValueError, match="attained_at"):
        events.RandomAllocationGaussian(bins=3, noise_multiplier=1.0, attained_at=0.9)
    with pytest.raises(ValueError, match="longer"):
        events.RandomAllocationGaussian(bins=3, noise_multiplier=1.0, attained_at=2.0, longer=3)
    with pytest.raises(ValueError, match="longer"):
        events.RandomAllocationGaussian(bins=3, noise_multiplier=1.0, longer=1)


@pytest.mark.parametrize(
    ("rows", "what"),
    [
        ((), "bins"),
        (((1.0, 0.0),), "square"),
        (((1.0, 0.5), (0.4, 1.0)), "symmetric"),
        (((1.0, -0.5), (-0.5, 1.0)), "at least zero"),
        (((1.0, math.nan), (math.nan, 1.0)), "at least zero"),
        (((math.inf,),), "at least zero"),
        (((0.0, 0.0), (0.0, 0.0)), "all zero"),
        (tuple((0.0,) * (events.MAX_BINS + 1) for _ in range(events.MAX_BINS + 1)), "bins"),
    ],
)
def test_what_is_no_gram_matrix_is_not_one(rows: tuple[tuple[float, ...], ...], what: str) -> None:
    with pytest.raises(ValueError, match=what):
        events.Gram(rows)


def test_equal_matrices_are_equal_events_and_others_are_not() -> None:
    first, again = events.Gram(((1.0, 0.5), (0.5, 2.0))), events.Gram(((1.0, 0.5), (0.5, 2.0)))
    other = events.Gram(((1.0, 0.5), (0.5, math.nextafter(2.0, 3.0))))
    assert (first, hash(first), repr(first)) == (again, hash(again), repr(again))
    assert first != other
    assert first.digest != other.digest
    assert (
        len({events.BallsInBinsGaussian(gram=g, noise_multiplier=1.0) for g in (first, again)}) == 1
    )


def test_its_text_is_short_however_many_bins_it_has() -> None:
    rows = tuple(tuple(float(i == j) for j in range(200)) for i in range(200))
    assert len(repr(events.Gram(rows))) < 120


@pytest.mark.parametrize("sigma", [0.0, -1.0, math.inf, math.nan])
def test_its_noise_is_positive_and_finite(sigma: float) -> None:
    with pytest.raises(ValueError, match="noise_multiplier"):
        events.BallsInBinsGaussian(gram=events.Gram(((1.0,),)), noise_multiplier=sigma)
