"""Lots of fixed size against an adversary who chooses the data anew at each step."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.stats import norm

from affidavit.accountants import FourierAccountant
from affidavit.accountants.fourier.adaptive_pairs import AdaptiveCurve, Displacement
from affidavit.accountants.fourier.cache import SharedCache
from affidavit.accountants.fourier.dominating_pairs import directions
from affidavit.plan import events

Array = NDArray[np.float64]


def lots(rate: float, sigma: float, steps: int) -> events.Event:
    leaf = events.WithoutReplacementGaussian(
        sample_size=round(10_000 * rate), dataset_size=10_000, noise_multiplier=sigma
    )
    return events.Repeated(event=leaf, count=steps)


def adaptive(event: events.Event) -> AdaptiveCurve:
    curve = AdaptiveCurve.of(directions(event), SharedCache())
    assert curve is not None
    return curve


@pytest.mark.by_turns
@pytest.mark.parametrize(("rate", "sigma"), [(0.01, 1.0), (0.1, 2.0), (0.5, 0.7), (0.05, 8.0)])
def test_one_curve_is_above_that_of_any_three_points_of_the_ball(rate: float, sigma: float) -> None:
    """Random and extreme triangles, by quadrature over the plane that holds them."""
    rng, step = np.random.default_rng(3), 0.1
    rows = Displacement(probability=rate, radius=1 / sigma).curves(60, step)
    losses = step * np.arange(-59, 60)
    side = np.linspace(-7.0 - 1 / sigma, 7.0 + 1 / sigma, 241)
    cell = (side[1] - side[0]) ** 2
    plane = np.stack(np.meshgrid(side, side), axis=-1)

    def density(centre: Array) -> Array:
        result: Array = norm.pdf(plane - centre / sigma).prod(axis=-1) * cell
        return result

    angles = rng.uniform(0, 2 * math.pi, (10, 3))
    radii = np.where(rng.random((10, 3)) < 0.6, 1.0, rng.random((10, 3)))
    angles[0], angles[1] = (0.0, math.pi, math.pi), (0.0, math.pi, 0.0)
    angles[2], angles[3] = (0.0, math.pi, 3.0), (0.0, 2 * math.pi / 3, 4 * math.pi / 3)
    radii[:4] = 1.0
    for turns, lengths in zip(angles, radii, strict=True):
        points = lengths[:, None] * np.stack((np.cos(turns), np.sin(turns)), axis=-1)
        own, other, displaced = map(density, points)
        p, q = (1 - rate) * displaced + rate * own, (1 - rate) * displaced + rate * other
        curve = np.array([np.maximum(p - math.exp(loss) * q, 0.0).sum() for loss in losses])
        assert (rows >= curve - 3e-4 * rate).all(axis=1).any()


def recursion(rate: float, sigma: float, steps: int, step: float) -> tuple[Array, Array]:
    """The largest curve of an adversary with two pairs, each data set's, at each step.

    Losses are rounded to the nearest node, so that the curve is off by some 1e-3 of itself.
    """
    z = np.linspace(-12.0, 12.0 + 2 / sigma, 40_001)
    near, far = norm.pdf(z) * (z[1] - z[0]), norm.pdf(z - 2 / sigma) * (z[1] - z[0])
    mixed = (1 - rate) * near + rate * far
    size = round(24 / step)
    kernels = []
    for p, q in ((mixed, near), (near, mixed)):
        places = np.rint(np.log(p / q) / step).astype(int) + size
        inside = (places >= 0) & (places <= 2 * size)
        kernels.append(np.bincount(places[inside], p[inside], 2 * size + 1))
    losses = step * np.arange(-size, size + 1)
    # The value of a run whose loss is so far above ε.
    value = np.maximum(0.0, -np.expm1(np.minimum(-losses, 0.0)))
    for _ in range(steps):
        padded = np.concatenate((np.zeros(size), value, np.ones(size)))
        value = np.max([np.convolve(padded, k[::-1], mode="valid") for k in kernels], axis=0)
    return -losses[::-1], value[::-1]


@pytest.mark.parametrize(("rate", "sigma", "steps"), [(0.2, 1.0, 12), (0.05, 0.8, 30)])
def test_it_is_above_what_an_adaptive_adversary_attains(
    rate: float, sigma: float, steps: int
) -> None:
    losses, deltas = recursion(rate, sigma, steps, 0.02)
    event, at = lots(rate, sigma, steps), 3.0
    attained = float(np.interp(at, losses, deltas))
    both = FourierAccountant().curve(event).delta(at)
    assert both.lower < attained * 1.01
    assert attained * 0.99 < adaptive(event).delta(at).upper < both.upper


@pytest.mark.ordinary("long")
@pytest.mark.parametrize(
    ("event", "delta", "closed"),
    [
        (lots(0.01, 1.0, 300), 1e-6, 0.5),
        (lots(0.05, 2.0, 300), 1e-9, 0.5),
        (
            events.Composed(events=(lots(0.05, 2.0, 200), events.Gaussian(noise_multiplier=3.0))),
            1e-5,
            0.4,
        ),
        (
            events.Repeated(
                event=events.WithoutReplacementGroupGaussian(
                    records=3, dataset_size=10_000, sample_size=100, noise_multiplier=2.0
                ),
                count=100,
            ),
            1e-6,
            0.1,
        ),
    ],
    ids=["long", "small δ", "beside a Gaussian release", "users"],
)
def test_a_narrower_bracket_is_asked_for_where_it_decides(
    event: events.Event, delta: float, closed: float
) -> None:
    """At least so much of the gap is closed, and both ends of ε and δ agree."""
    curve = FourierAccountant().curve(event)
    wide, narrow = curve.epsilon(delta), curve.with_width(1e-5).epsilon(delta)
    assert narrow.lower == pytest.approx(wide.lower, rel=1e-3)
    assert narrow.lower < narrow.upper < wide.upper - closed * wide.width
    assert curve.with_width(1e-5).delta(narrow.upper).upper == pytest.approx(delta, rel=0.1)


def test_a_chain_of_few_links_is_refined_and_a_long_one_is_not() -> None:
    def curve(records: int) -> Any:
        leaf = events.WithoutReplacementGroupGaussian(
            records=records, dataset_size=10_000, sample_size=100, noise_multiplier=2.0
        )
        return FourierAccountant().curve(events.Repeated(event=leaf, count=100))

    wide = curve(2)
    assert wide.refined.epsilon(1e-6).upper < 0.98 * wide.epsilon(1e-6).upper
    assert curve(30).refined is None


@pytest.mark.by_turns
@pytest.mark.parametrize("delta", [1e-13, 0.3])
@pytest.mark.parametrize("event", [lots(0.0001, 0.3, 5000), lots(0.9, 100.0, 3)])
def test_extremes_are_bounded_or_left_to_the_wide_bracket(
    event: events.Event, delta: float
) -> None:
    curve = FourierAccountant().curve(event)
    wide, narrow = curve.epsilon(delta), curve.with_width(1e-5).epsilon(delta)
    assert wide.lower * (1 - 1e-3) <= narrow.lower <= narrow.upper <= wide.upper * (1 + 1e-12)
