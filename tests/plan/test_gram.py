"""A Gram matrix is square, symmetric, not negative, and told apart by its digest."""

from __future__ import annotations

import math

import pytest

from affidavit.plan.events import MAX_BINS, BallsInBinsGaussian, Gram


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
        (tuple((0.0,) * (MAX_BINS + 1) for _ in range(MAX_BINS + 1)), "bins"),
    ],
)
def test_what_is_no_gram_matrix_is_not_one(rows: tuple[tuple[float, ...], ...], what: str) -> None:
    with pytest.raises(ValueError, match=what):
        Gram(rows)


def test_equal_matrices_are_equal_events_and_others_are_not() -> None:
    first, again = Gram(((1.0, 0.5), (0.5, 2.0))), Gram(((1.0, 0.5), (0.5, 2.0)))
    other = Gram(((1.0, 0.5), (0.5, math.nextafter(2.0, 3.0))))
    assert (first, hash(first), repr(first)) == (again, hash(again), repr(again))
    assert first != other
    assert first.digest != other.digest
    assert len({BallsInBinsGaussian(gram=g, noise_multiplier=1.0) for g in (first, again)}) == 1


def test_its_text_is_short_however_many_bins_it_has() -> None:
    rows = tuple(tuple(float(i == j) for j in range(200)) for i in range(200))
    assert len(repr(Gram(rows))) < 120


@pytest.mark.parametrize("sigma", [0.0, -1.0, math.inf, math.nan])
def test_its_noise_is_positive_and_finite(sigma: float) -> None:
    with pytest.raises(ValueError, match="noise_multiplier"):
        BallsInBinsGaussian(gram=Gram(((1.0,),)), noise_multiplier=sigma)
