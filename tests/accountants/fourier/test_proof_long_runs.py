"""Long runs, by a tilted transform written for this file alone.

The loss of one release is put on the middles of equal cells, which is neither an upper nor
a lower bound; the tilt solves K'(λ) = ε on that very lattice; the composition is one power
of one transform, read on a window about ε. What the cells' width does to ε falls by four
when they are halved, so the difference of two widths both removes it and says how large
the rest can be.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Literal

import numpy as np
import pytest
from scipy.special import ndtr

from affidavit.accountants.fourier_accountant import FourierAccountant
from affidavit.accountants.gaussian import GaussianCurve
from affidavit.plan import events

Side = Literal["remove", "add", "replace"]
Array = np.ndarray[tuple[int], np.dtype[np.float64]]


pytestmark = pytest.mark.usefixtures("each_method")


def loss_at(side: Side, q: float, mu: float) -> Callable[[Array], Array]:
    """log dP/dQ as a function of z, increasing."""

    def log_mixture(t: Array) -> Array:
        return np.logaddexp(math.log1p(-q), math.log(q) + t)

    def loss(z: Array) -> Array:
        up, down = log_mixture(mu * z - mu * mu / 2), -log_mixture(-mu * z - mu * mu / 2)
        return up if side == "remove" else down if side == "add" else up + down

    return loss


def lattice(side: Side, q: float, sigma: float, h: float) -> tuple[Array, Array]:
    """Middles of cells of width ``h`` and their masses under P."""
    mu = 1 / sigma
    loss = loss_at(side, q, mu)
    low, high = -14.0, 14.0 + mu
    first, last = loss(np.array([low, high]))
    edges = first - 0.3 * h + h * np.arange(math.ceil((last - first) / h) + 2)
    # The inverse by bisection, all edges at once: nothing of the loss's algebra is used.
    left, right = np.full(edges.size, low - 1), np.full(edges.size, high + 1)
    for _ in range(60):
        middle = (left + right) / 2
        below = loss(middle) < edges
        left, right = np.where(below, middle, left), np.where(below, right, middle)
    mixture = [(1.0, 0.0)] if side == "add" else [(1 - q, 0.0), (q, mu)]
    masses = np.zeros(edges.size - 1)
    for weight, mean in mixture:
        at = left - mean
        upward = at[:-1] > 0
        masses += weight * np.where(
            upward, ndtr(-at[:-1]) - ndtr(-at[1:]), ndtr(at[1:]) - ndtr(at[:-1])
        )
    return edges[:-1] + h / 2, np.maximum(masses, 0)


class Tilted:
    """The curve of ``steps`` releases near the ε at which its saddle has ``delta``."""

    def __init__(self, losses: Array, masses: Array, steps: int, delta: float) -> None:
        self._losses, self._masses, self._steps = losses, masses, steps
        low, high = 1e-3, 1e4
        for _ in range(40):
            order = math.sqrt(low * high)
            low, high = (order, high) if self._excess(order, delta) > 0 else (low, order)
        self._order = order
        self._log_moment, mean, variance = self._moments(order)
        h = losses[1] - losses[0]
        self._size = 1 << math.ceil(math.log2(30 * math.sqrt(steps * variance) / h))
        tilted = masses * np.exp(order * losses - self._log_moment)
        folded = np.bincount(np.arange(tilted.size) % self._size, tilted, self._size)
        powered = np.fft.irfft(np.fft.rfft(folded) ** steps, self._size)
        start = math.floor((steps * mean - steps * losses[0]) / h) - self._size // 2
        index = start + np.arange(self._size)
        self._at = steps * losses[0] + index * h
        self._composed = powered[index % self._size]

    def _moments(self, order: float) -> tuple[float, float, float]:
        with np.errstate(divide="ignore"):
            exponents = order * self._losses + np.log(self._masses)
        peak = exponents.max()
        weights = np.exp(exponents - peak)
        total = weights.sum()
        mean = weights @ self._losses / total
        variance = weights @ (self._losses - mean) ** 2 / total
        return float(peak + np.log(total)), float(mean), float(variance)

    def _excess(self, order: float, delta: float) -> float:
        log_moment, mean, variance = self._moments(order)
        epsilon = self._steps * mean - 1 / order
        spread = math.log(order * (order + 1) * math.sqrt(2 * math.pi * self._steps * variance + 1))
        return self._steps * log_moment - order * epsilon - spread - math.log(delta)

    def log_delta(self, epsilon: float) -> float:
        """log δ at ``epsilon``."""
        gaps = self._at - epsilon
        inside = gaps > 0
        terms = np.exp(-self._order * gaps[inside]) * -np.expm1(-gaps[inside])
        return (
            self._steps * self._log_moment
            - self._order * epsilon
            + math.log(max(float(self._composed[inside] @ terms), 1e-300))
        )

    def epsilon(self, delta: float) -> float:
        """Where the curve passes ``delta``."""
        low, high = max(0.0, float(self._at[0])), float(self._at[-1])
        for _ in range(60):
            middle = (low + high) / 2
            above = self.log_delta(middle) > math.log(delta)
            low, high = (middle, high) if above else (low, middle)
        return low


@cache
def extrapolated(
    side: Side, q: float, sigma: float, steps: int, delta: float, h: float
) -> tuple[float, float]:
    """ε with what the cells' width does to it removed, and how far off it can still be."""
    coarse, fine = (
        Tilted(*lattice(side, q, sigma, width), steps, delta).epsilon(delta) for width in (h, h / 2)
    )
    return fine + (fine - coarse) / 3, abs(fine - coarse)


PLANS: list[tuple[events.SubsampledPair, float, float, int, float, float]] = [
    ("add_remove", 0.1, 20.0, 100_000, 1e-10, 4e-4),
    ("add_remove", 0.004267, 1.1, 14_062, 1e-14, 2e-4),
    ("add_remove", 0.01, 1.0, 1_000, 1e-9, 4e-4),
    ("add_remove", 0.2, 4.0, 300, 1e-16, 2e-3),
    ("add_remove", 0.024, 2.0, 10_000, 1e-10, 4e-4),
    ("add_remove", 0.08192, 3.0, 875, 1e-12, 1e-3),
    ("add_remove", 0.03, 8.0, 50_000, 1e-15, 2e-4),
    ("replace_one", 0.02, 1.5, 2_000, 1e-12, 4e-4),
    ("replace_one", 0.3, 15.0, 5_000, 1e-16, 1e-3),
]


@pytest.mark.ordinary("*-0.2-4.0-300-*", "*-0.08192-*", "*-replace_one-0.3-*")
@pytest.mark.parametrize(("pair", "q", "sigma", "steps", "delta", "h"), PLANS)
def test_long_runs_agree_with_another_transform(
    pair: events.SubsampledPair, q: float, sigma: float, steps: int, delta: float, h: float
) -> None:
    leaf = events.PoissonSubsampledGaussian(
        sampling_probability=q, noise_multiplier=sigma, pair=pair
    )
    result = FourierAccountant().curve(events.Repeated(event=leaf, count=steps)).epsilon(delta)
    sides: tuple[Side, ...] = ("replace",) if pair == "replace_one" else ("remove", "add")
    value, error = max(extrapolated(side, q, sigma, steps, delta, h) for side in sides)
    assert error <= 2e-4 * value
    # What is left after the extrapolation is of fourth order.
    assert result.lower - error / 4 <= value <= result.upper + error / 4
    assert result.width <= 1e-4 * result.upper


@pytest.mark.ordinary("*0.1-20.0-*")
@pytest.mark.parametrize(
    ("q", "sigma", "steps", "delta", "lowest", "highest"),
    [
        (0.1, 20.0, 100_000, 1e-10, 10.9194, 10.9198),
        (0.004267, 1.1, 14_062, 1e-14, 4.5793, 4.5800),
    ],
)
def test_the_transform_of_this_file_meets_what_was_found_elsewhere(
    q: float, sigma: float, steps: int, delta: float, lowest: float, highest: float
) -> None:
    value, _ = extrapolated("remove", q, sigma, steps, delta, 4e-4 if q == 0.1 else 2e-4)
    assert lowest <= value <= highest


@pytest.mark.ordinary("inversion first")
def test_the_width_s_effect_falls_by_four() -> None:
    """Without that the extrapolation, and the error it states, would mean nothing."""
    result = [
        Tilted(*lattice("remove", 0.1, 20.0, h), 100_000, 1e-10).epsilon(1e-10)
        for h in (8e-4, 4e-4, 2e-4)
    ]
    assert (result[0] - result[1]) / (result[1] - result[2]) == pytest.approx(4.0, abs=0.3)


@pytest.mark.ordinary("inversion first-*", "lattice alone-*-100000000")
@pytest.mark.parametrize(
    ("q", "sigma", "steps"), [(1e-4, 10.0, 10**8), (1e-4, 10.0, 10**9), (1e-3, 50.0, 10**9)]
)
def test_beyond_ten_million_steps_the_bracket_is_near_the_gaussian_limit(
    q: float, sigma: float, steps: int
) -> None:
    """Losses this small and this many add up to a nearly Gaussian one.

    Its variance is T q² (e^{1/σ²} - 1). Their skewness is some 3e-5 here, and ε differs by less.
    """
    event = events.PoissonSubsampledGaussian(sampling_probability=q, noise_multiplier=sigma)
    result = FourierAccountant().curve(events.Repeated(event=event, count=steps)).epsilon(1e-6)
    limit = GaussianCurve(mu=q * math.sqrt(steps * math.expm1(sigma**-2))).epsilon(1e-6).upper
    assert result.lower <= limit * (1 + 3e-5)
    assert limit * (1 - 3e-5) <= result.upper <= 1.06 * result.lower
