"""Lower measures with negative masses, and how they are removed, compared with the curves.

The curve of a measure is Σ m_j (1 - e^{ε - l_j}) over the nodes above ε. A negative mass bends it
the wrong way, which no measure of positive masses does.
"""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from affidavit.accountants.fourier.discretized_pld import _bridge_negative_masses, _truncated

Array = NDArray[np.float64]
SIZE, STEP = 60, 0.07


def curve(masses: Array, losses: Array, at: Array) -> Array:
    """The curve at each of ``at`` (nats)."""
    result: Array = (masses * np.maximum(0.0, -np.expm1(at[:, None] - losses))).sum(axis=1)
    return result


def random_measure(seed: int, negative: int, share: float) -> tuple[Array, Array]:
    """Masses and nodes; ``negative`` of the masses are about -``share`` of the others."""
    source = np.random.default_rng(seed)
    masses = source.random(SIZE) * np.exp(-np.arange(SIZE) / 20)
    places = source.choice(np.arange(1, SIZE - 15), negative, replace=False)
    masses[places] *= -share
    return masses, STEP * np.arange(-20, SIZE - 20, dtype=np.float64)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("negative", [1, 4, 12])
def test_a_negative_mass_is_replaced_by_a_chord(seed: int, negative: int) -> None:
    """A chord keeps the mass and the curve left of it, and lies nowhere above the curve."""
    masses, losses = random_measure(seed, negative, 0.5)
    result = _bridge_negative_masses(masses, losses)
    assert result.size == SIZE
    assert result.min() >= 0.0
    assert result.sum() == pytest.approx(masses.sum(), rel=1e-11)
    assert result @ np.exp(-losses) == pytest.approx(masses @ np.exp(-losses), rel=1e-11)
    at = np.linspace(losses[0] - 1, losses[-1], 400)
    assert np.all(curve(result, losses, at) <= curve(masses, losses, at) + 1e-12)


def convex_hull(places: Array, values: Array) -> Array:
    """The greatest convex function below the points, at ``places`` (monotone chain)."""
    corners: list[int] = []
    for index in range(places.size):
        while len(corners) > 1:
            first, last = corners[-2:]
            rise = (values[last] - values[first]) * (places[index] - places[first])
            if rise < (values[index] - values[first]) * (places[last] - places[first]):
                break
            corners.pop()
        corners.append(index)
    result: Array = np.interp(places, places[corners], values[corners])
    return result


@pytest.mark.parametrize("mass", [0.01, 0.05, 0.2])
def test_one_negative_mass_among_many_small_ones_leaves_the_convex_hull(mass: float) -> None:
    """Hundreds of nodes on either side are needed to outweigh it."""
    losses = np.linspace(-4.0, 4.0, 1501)
    masses = np.exp(-((losses - 0.5) ** 2) / 2)
    masses /= masses.sum()
    masses[600] = -mass
    result = _bridge_negative_masses(masses, losses)
    assert result.min() >= 0.0
    passed = np.flatnonzero(result == 0.0)
    assert passed.size > 3
    places = np.append(0.0, np.exp(losses))
    below, at = (
        np.append(masses.sum(), curve(masses, losses, losses)),
        curve(result, losses, losses),
    )
    hull = convex_hull(places, below)[1:]
    assert np.all(at <= hull + 1e-14)
    assert at == pytest.approx(hull, abs=1e-11)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(("negative", "share"), [(1, 0.5), (5, 1.0), (15, 0.5)])
def test_a_truncated_measure_lies_nowhere_above_and_has_no_negative_mass(
    seed: int, negative: int, share: float
) -> None:
    masses, losses = random_measure(seed, negative, share)
    masses[-3:] = -0.01  # nothing above outweighs these
    result = _truncated(masses, losses)
    stored = losses[: result.size]
    assert result.min() >= 0.0
    at = np.linspace(losses[0] - 1, losses[-1], 400)
    at = at[at <= stored[-1]]
    whole = curve(masses, losses, at)
    assert np.all(curve(result, stored, at) <= whole + 1e-12)
    assert result.size > SIZE // 2
    assert result.sum() > 0.5 * masses.sum()


def test_without_negative_masses_nothing_is_truncated() -> None:
    masses, losses = random_measure(3, 0, 0.0)
    assert _truncated(masses, losses) == pytest.approx(masses, abs=1e-12)
