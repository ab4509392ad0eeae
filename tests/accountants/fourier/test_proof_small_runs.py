"""Runs of two to six releases, by plain convolution in extended precision.

Nothing here comes from the engine. Cells of equal width cover the losses; their masses
(P, Q) are differences of normal tails in 64-bit mantissas. From above, a cell's P and Q
are divided between its two ends, and what lies beyond the last is infinite. From below, a
cell becomes one atom (merging outcomes is post-processing) no higher than its log(P/Q),
and what lies outside the cells is dropped. Both are second order in the cell's width.
Convolving by the definition adds positive terms only, so 1e-12 covers every rounding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import mpmath
import numpy as np
import pytest

from affidavit.accountants.fourier_accountant import FourierAccountant
from affidavit.plan import events
from tests.accountants.fourier.closed_forms import Side, distance, one_release

Array = np.ndarray[tuple[int], np.dtype[np.longdouble]]

ROUNDING = np.longdouble(1e-12)
PI = np.longdouble("3.14159265358979323846264338328")
CELLS = 1600
TOLERANCE = 4e-4
"""How far apart, relatively, the two may leave ε."""
REACH = 10.5
"""Normal deviations covered; what is beyond has mass 5e-26."""

pytestmark = pytest.mark.usefixtures("each_method")


def upper_tail(x: Array) -> Array:
    """P(Z > x): Marsaglia's series near zero, Laplace's continued fraction beyond 2.5."""
    size = np.minimum(np.abs(x), np.longdouble(60))
    density = np.exp(-size * size / 2) / np.sqrt(2 * PI)
    near = np.minimum(size, 2.5)
    term = near.copy()
    total = near.copy()
    for k in range(1, 60):
        term = term * near * near / (2 * k + 1)
        total += term
    far = np.maximum(size, 2.5)
    fraction = far.copy()
    for k in range(220, 0, -1):
        fraction = far + k / fraction
    tail = np.where(size < 2.5, 0.5 - density * total, density / fraction)
    return np.asarray(np.where(x < 0, 1 - tail, tail), dtype=np.longdouble)


def masses(z: Array, mean: np.longdouble) -> Array:
    """Masses of N(mean, 1) between increasing ``z``, from the tail that is small."""
    at = z - mean
    right, left = upper_tail(at), upper_tail(-at)
    return np.asarray(np.where(at[:-1] > 0, right[:-1] - right[1:], left[1:] - left[:-1]))


@dataclass(frozen=True, kw_only=True, slots=True)
class Release:
    """One subsampled Gaussian."""

    q: float
    sigma: float
    count: int

    @property
    def mu(self) -> np.longdouble:
        """The distance of the means in noise standard deviations."""
        return np.longdouble(1) / np.longdouble(self.sigma)

    def loss(self, side: Side, z: Array) -> Array:
        """log dP/dQ at ``z``."""
        q, mu = np.longdouble(self.q), self.mu
        up = np.log1p(q * np.expm1(mu * z - mu * mu / 2))
        down = -np.log1p(q * np.expm1(-mu * z - mu * mu / 2))
        match side:
            case "remove":
                return up
            case "add":
                return down
            case "replace":
                return up + down

    def place(self, side: Side, loss: Array) -> Array:
        """The z of ``loss``, clipped where there is none."""
        q, mu = np.longdouble(self.q), self.mu
        if side == "replace":
            k, rest = q * np.exp(-mu * mu / 2), (1 - q) * np.expm1(loss)
            root = np.sqrt(rest * rest + 4 * k * k * np.exp(loss))
            return np.log((rest + root) / (2 * k)) / mu
        sign = 1 if side == "remove" else -1
        inner = np.maximum(1 + np.expm1(sign * loss) / q, np.longdouble("1e-4000"))
        return sign * (np.log(inner) / mu + mu / 2)

    def mixtures(self, side: Side) -> tuple[list[tuple[float, int]], list[tuple[float, int]]]:
        """Weights and means (in μ) of P and Q."""
        sampled, none = [(1 - self.q, 0), (self.q, 1)], [(1.0, 0)]
        mirrored = [(1 - self.q, 0), (self.q, -1)]
        pairs = {
            "remove": (sampled, none),
            "add": (none, mirrored),
            "replace": (sampled, mirrored),
        }
        return pairs[side]

    def ends(self, side: Side) -> tuple[float, float]:
        """The losses that bound what is covered."""
        z = np.array([-REACH - float(self.mu), REACH + float(self.mu)], dtype=np.longdouble)
        low, high = self.loss(side, z)
        return float(low), float(high)


@dataclass(frozen=True, kw_only=True, slots=True)
class Measure:
    """Masses at ``origin + i h``, and at infinity."""

    origin: np.longdouble
    masses: Array
    infinite: np.longdouble


def above_and_below(release: Release, side: Side, h: np.longdouble) -> tuple[Measure, Measure]:
    """A measure whose curve is above the release's, and one whose curve is below."""
    low, high = release.ends(side)
    edges = np.longdouble(low) - h / 3 + h * np.arange(math.ceil((high - low) / float(h)) + 2)
    z = release.place(side, edges)
    p, q = (
        sum(np.longdouble(w) * masses(z, mean * release.mu) for w, mean in mixture)
        for mixture in release.mixtures(side)
    )
    most_p, least_q = p * (1 + ROUNDING), q * (1 - ROUNDING)
    share = np.minimum((most_p - np.exp(edges[:-1]) * least_q) / -np.expm1(-h), most_p)
    share = np.maximum(share, 0)
    raised = np.zeros(edges.size, dtype=np.longdouble)
    raised[:-1] += most_p - share
    raised[1:] += share
    beyond = np.longdouble(1e-24)
    raised[0] += beyond
    held = p > 1e-26
    atoms = np.log(p[held] / q[held]) - ROUNDING
    lowest = np.min(atoms - edges[:-1][held])
    return (
        Measure(origin=edges[0], masses=raised, infinite=beyond),
        Measure(
            origin=edges[0] + lowest,
            masses=np.where(held, p * (1 - ROUNDING), 0),
            infinite=np.longdouble(0),
        ),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Composition:
    """A convolution by the definition."""

    losses: Array
    masses: Array
    infinite: np.longdouble

    @classmethod
    def of(cls, parts: Sequence[tuple[Measure, int]], h: np.longdouble) -> Composition:
        """The convolution of the measures, each as often as it is counted."""
        masses, origin = np.ones(1, dtype=np.longdouble), np.longdouble(0)
        infinite = np.longdouble(0)
        for measure, count in parts:
            for _ in range(count):
                masses = np.convolve(masses, measure.masses)
                origin, infinite = origin + measure.origin, infinite + measure.infinite
        return cls(
            losses=origin + h * np.arange(masses.size, dtype=np.longdouble),
            masses=masses,
            infinite=infinite,
        )

    def delta(self, epsilon: float) -> float:
        """The hockey-stick curve."""
        gaps = np.maximum(0, -np.expm1(np.longdouble(epsilon) - self.losses))
        return float(self.masses @ gaps + self.infinite)


Bounds = tuple[Composition, Composition]


@cache
def bounds(run: tuple[Release, ...], side: Side) -> Bounds:
    """The composition from above and from below."""
    spans = [high - low for low, high in (release.ends(side) for release in run)]
    h = np.longdouble(max(spans) / CELLS)
    pairs = [(above_and_below(release, side, h), release.count) for release in run]
    above, below = ([(pair[k], count) for pair, count in pairs] for k in (0, 1))
    return Composition.of(above, h), Composition.of(below, h)


def event(run: Sequence[Release], *, replace: bool) -> events.Event:
    """The run as the engine takes it."""
    return events.Composed(
        events=tuple(
            events.Repeated(
                event=events.PoissonSubsampledGaussian(
                    sampling_probability=release.q,
                    noise_multiplier=release.sigma,
                    pair="replace_one" if replace else "add_remove",
                ),
                count=release.count,
            )
            for release in run
        )
    )


def release(q: float, sigma: float, count: int = 1) -> Release:
    return Release(q=q, sigma=sigma, count=count)


RUNS = [
    (False, (release(0.1, 1.0, 2),), 1e-5),
    (False, (release(0.3, 0.7, 3),), 1e-8),
    (False, (release(0.5, 2.0, 6),), 1e-11),
    (False, (release(0.05, 0.9, 4),), 1e-4),
    (False, (release(0.2, 1.0, 2), release(0.4, 1.5, 3)), 1e-6),
    (False, (release(0.6, 0.8, 1), release(0.3, 2.0, 2), release(0.2, 1.2, 2)), 1e-10),
    (True, (release(0.1, 1.0, 2),), 1e-6),
    (True, (release(0.4, 1.5, 5),), 1e-12),
    (True, (release(0.2, 0.8, 1), release(0.5, 2.0, 3)), 1e-7),
    (True, (release(0.7, 3.0, 4), release(0.9, 5.0, 2)), 1e-3),
]


@pytest.mark.by_turns
@pytest.mark.ordinary("inversion first-*-run[0789]-*", "lattice alone-*")
@pytest.mark.parametrize(("replace", "run", "delta"), RUNS)
def test_small_runs_agree_with_plain_convolution(
    replace: bool, run: tuple[Release, ...], delta: float
) -> None:
    """Neither bracket contradicts the other, and the two agree to within 4e-4."""
    sides: tuple[Side, ...] = ("replace",) if replace else ("remove", "add")
    result = FourierAccountant().curve(event(run, replace=replace)).epsilon(delta)
    held = [bounds(run, side) for side in sides]

    def most(epsilon: float) -> float:
        return max(above.delta(epsilon) for above, _ in held)

    def least(epsilon: float) -> float:
        return max(below.delta(epsilon) for _, below in held)

    assert least(result.upper) <= delta <= most(result.lower)
    assert most(result.upper * (1 + TOLERANCE)) < delta < least(result.lower * (1 - TOLERANCE))


@pytest.mark.parametrize("side", ["remove", "add", "replace"])
@pytest.mark.parametrize(("q", "sigma"), [(0.1, 1.0), (0.6, 0.7), (0.3, 5.0)])
def test_one_release_of_the_convolution_holds_the_closed_form(
    side: Side, q: float, sigma: float
) -> None:
    """The oracle itself, checked where it can be."""
    one = release(q, sigma)
    above, below = bounds((one,), side)
    _, high = one.ends(side)
    for share in (0.01, 0.1, 0.3, 0.5):
        exact = one_release(side, q, distance(sigma), share * high)
        assert below.delta(share * high) <= exact <= above.delta(share * high)


def test_tails_are_those_of_the_normal_law() -> None:
    places = np.array([-8.0, -2.6, -1.0, 0.0, 0.7, 2.4999, 2.5, 4.0, 11.0, 25.0])
    with mpmath.workdps(40):
        for place, tail in zip(places, upper_tail(places.astype(np.longdouble)), strict=True):
            exact = mpmath.ncdf(-mpmath.mpf(float(place)))
            assert abs(mpmath.mpf(repr(tail).split("'")[1]) / exact - 1) < 1e-16
