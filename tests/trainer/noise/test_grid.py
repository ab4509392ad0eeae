"""Noise on a grid: exact by an independent computation, Gaussian, and blind to attacks on low bits.

The attacks: from two neighbouring sums a mechanism in floating point releases different sets of
numbers, and a release that only one of them can make tells which it was. They are run against the
ordinary noise too, where they have to succeed.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import mpmath
import pytest
import torch
from scipy import stats
from torch import Tensor

from affidavit.trainer.noise import grid
from affidavit.trainer.noise.chacha import WORDS_PER_BLOCK, derived_key, raw_words
from affidavit.trainer.noise.grid import add_grid_noise, grid_step
from affidavit.trainer.noise.normal import standard_normal
from affidavit.trainer.noise.source import NoiseSource, TensorNoise

KEY = bytes(range(32))
COUNT = 200_001


def released(x: Tensor, scale: float, step: int = 0) -> Tensor:
    """``x`` with noise on the grid."""
    sums = x.clone()
    add_grid_noise(sums, KEY, step=step, tensor=1, scale=scale)
    return sums


def words(key: bytes, *, count: int) -> Tensor:
    """The first words of the stream, not negative."""
    return raw_words(key, step=0, tensor=1, count=count).long() & 0xFFFFFFFF


def by_mpmath(x: float, place: int, scale: float) -> int:
    """The steps of the grid at ``place`` in 400 digits, from the words of the streams."""
    pair, side = divmod(place, 2)
    stream = words(KEY, count=4 * pair + 4).tolist()[-4:]
    own = derived_key(KEY, "affidavit further bits of grid noise")
    more = words(own, count=WORDS_PER_BLOCK * (pair + 1)).tolist()[-16:]
    with mpmath.workdps(400):
        uniform, turn = (
            mpmath.fsum(
                mpmath.mpf(word) / mpmath.mpf(2) ** (32 * (at + 1))
                for at, word in enumerate([*stream[2 * one : 2 * one + 2], *more[8 * one :][:8]])
            )
            for one in (0, 1)
        )
        radius = mpmath.sqrt(-2 * mpmath.log(uniform))
        wave = mpmath.sinpi if side else mpmath.cospi
        exact = (mpmath.mpf(x) + mpmath.mpf(scale) * radius * wave(2 * turn)) / grid_step(scale)
        return int(mpmath.floor(exact + mpmath.mpf(1) / 2))


def border_at(place: int) -> float:
    """The sum, to float64, at which the release at ``place`` goes from 0 to a step; scale 1."""
    low, high = -16.0, 16.0
    while (middle := (low + high) / 2) not in (low, high) and high - low > 2.0**-51:
        if by_mpmath(middle, place, 1.0) <= 0:
            low = middle
        else:
            high = middle
    return middle


@pytest.mark.parametrize("scale", [1.0, 0.37, 5e-9, 1e7])
def test_entries_are_the_exact_sums_rounded(scale: float) -> None:
    x = (torch.rand(101, dtype=torch.float64) - 0.5) * 1000 * scale
    steps = (released(x, scale) / grid_step(scale)).tolist()
    assert [int(item) for item in steps] == [by_mpmath(float(x[i]), i, scale) for i in range(101)]


def test_where_float64_does_not_settle_the_rounding_more_bits_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x = torch.randn(64, dtype=torch.float64)
    expected = released(x, 1.0)
    rounded, asked = grid._round_in_float64, []

    def unsettled(*arguments: object) -> tuple[Tensor, Tensor]:
        steps, _ = rounded(*arguments)  # type: ignore[arg-type]
        asked.append(len(steps))
        return torch.full_like(steps, math.nan), torch.ones_like(steps, dtype=torch.bool)

    monkeypatch.setattr(grid, "_round_in_float64", unsettled)
    assert torch.equal(released(x, 1.0), expected)
    assert asked


def test_the_bound_of_the_error_holds_and_leaves_few_entries_open() -> None:
    """Whatever is settled is right also where x puts the sum close to the border of a step."""
    scale = 1.0
    for place in range(0, 40, 7):  # a sum just below and just above the border of a step
        border = border_at(place)
        for x in (border - 2.0**-52, border + 2.0**-52, border - 2.0**-40, border + 2.0**-40):
            sums = torch.full((place + 1,), x, dtype=torch.float64)
            assert int(released(sums, scale)[place] / grid_step(scale)) == by_mpmath(
                x, place, scale
            )
    stream = words(KEY, count=2 * COUNT + 2).view(-1, 4)
    open_ = grid._round_in_float64(torch.zeros(len(stream), 2, dtype=torch.float64), stream, scale)[
        1
    ]
    assert int(open_.sum()) <= 5


def test_the_law_is_normal() -> None:
    scale = 3.0
    noise = released(torch.zeros(COUNT), scale).double() / scale
    assert stats.kstest(noise.numpy(), "norm").pvalue > 1e-6
    assert stats.kstest(noise.numpy() * 1.02, "norm").pvalue < 1e-6
    even, odd = noise[:-1:2], noise[1::2]
    assert abs(float((even * odd).mean())) < 5 / math.sqrt(len(even))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_set_of_releases_does_not_depend_on_the_sum(dtype: torch.dtype) -> None:
    scale = 1.0
    for sum_ in (0.0, 1 / 3, 1e-30):
        out = released(torch.full((4096,), sum_, dtype=dtype), scale).double()
        assert bool((out / grid_step(scale) == (out / grid_step(scale)).round()).all())


def ordinary(x: Tensor, scale: float) -> Tensor:
    """``x`` with noise in floating point, as the trainer adds it."""
    sums = {"w": x.clone()}
    NoiseSource({"w": TensorNoise(shape=tuple(x.shape), scale=scale)}).add_to(sums, KEY)
    return sums["w"]


def low_bits(releases: Tensor) -> float:
    """Mironov, CCS 2012: how many of the releases near 0 are no multiple of 2^-26.

    Near 0 a float32 variate has finer bits; the sum of 1/3 and a variate near -1/3 has not.
    """
    small = releases[(releases.abs() < 2.0**-6) & (releases != 0)].double()
    assert len(small) > 1000
    return float((small * 2.0**26 % 1 != 0).double().mean())


def precision(releases: Tensor) -> float:
    """Haney et al., arXiv:2207.13793: how many releases have a digit below 2^-24.

    No sum with 1 has one: from 1/2 on float32 has no such digit, and a smaller sum is exact.
    """
    return float((releases.double() * 2.0**24 % 1 != 0).double().mean())


def attainable(releases: Tensor) -> float:
    """Jin et al., arXiv:2112.05307: how many pairs the sampler can return, if the sum is 0.

    Of a pair (z, w) with a small z the angle is near a right one, where float32 has few: not
    every z is some r cos a with r sin a = w. All angles and radii nearby are tried.
    """
    pairs = releases[: COUNT // 256 * 256].view(-1, 2, 128)
    z, w = pairs[:, 0].flatten(), pairs[:, 1].flatten()
    near = (z.abs() < 2.0**-8) & (w.abs() > 0.1)
    z, w = z[near], w[near]
    assert len(z) > 200
    angle = torch.atan2(w.double(), z.double()).float()
    found = torch.zeros_like(z, dtype=torch.bool)
    for a in neighbours(angle):
        for r in neighbours(w / a.sin()):
            found |= (r * a.cos() == z) & (r * a.sin() == w)
    return float(found.double().mean())


def neighbours(x: Tensor) -> list[Tensor]:
    """The float32 numbers up to three steps from each of ``x``."""
    steps = x.view(torch.int32)
    return [(steps + more).view(torch.float32) for more in range(-3, 4)]


@pytest.mark.parametrize(
    ("attack", "other", "at_zero", "at_other"),
    [(low_bits, 1 / 3, 0.9, 0.0), (precision, 1.0, 0.25, 0.0), (attainable, 1 / 3, 0.99, 0.05)],
)
def test_attacks_tell_sums_with_ordinary_noise_apart_and_not_those_on_the_grid(
    attack: Callable[[Tensor], float], other: float, at_zero: float, at_other: float
) -> None:
    one, two = torch.zeros(COUNT), torch.full((COUNT,), other)
    assert attack(ordinary(one, 1.0)) > at_zero
    assert attack(ordinary(two, 1.0)) <= at_other
    assert abs(attack(released(one, 1.0)) - attack(released(two, 1.0))) < 0.01


def test_no_small_delta_holds_for_ordinary_noise() -> None:
    """Theorem 4: a quarter of the releases of 0, and none of 1, has a digit below 2^-24."""
    exposed = precision(ordinary(torch.zeros(COUNT), 1.0))
    assert stats.binomtest(round(exposed * COUNT), COUNT, 0.25, "greater").pvalue < 1e-6
    assert precision(ordinary(torch.ones(COUNT), 1.0)) == 0


def test_a_source_with_exact_noise_draws_it_for_every_tensor_and_step() -> None:
    tensors = {name: TensorNoise(shape=(3, 2), scale=0.5) for name in "ab"}
    source = NoiseSource(tensors, exact=True)
    seen = []
    for _ in range(2):
        sums = {name: torch.zeros(2, 3).t() for name in "ab"}  # not contiguous
        source.add_to(sums, KEY)
        seen += [sums["a"].flatten(), sums["b"].flatten()]
    assert len({tuple(item.tolist()) for item in seen}) == 4
    assert all(bool((item != 0).all()) for item in seen)
    drawn = standard_normal(KEY, step=0, tensor=0, shape=(6,))
    assert not torch.allclose(seen[0], 0.5 * drawn)


def test_sums_that_are_no_numbers_stay_so() -> None:
    out = released(torch.tensor([math.nan, math.inf, 1e30, 0.0]), 1.0)
    assert out[0].isnan()
    assert out[1] == math.inf
    assert out[2] == 1e30
    assert out[3] != 0
