"""Lower measures with nodes that owe: how the debts are paid, held against the curves.

The curve of a measure is Σ m_j (1 - e^{ε - l_j}) over the nodes above ε. A node that owes is a
bend the wrong way, which no measure without debts has.
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


def drawn(seed: int, debts: int, share: float) -> tuple[Array, Array]:
    """Nodes and masses, of which some owe about ``share`` of what others have."""
    source = np.random.default_rng(seed)
    masses = source.random(SIZE) * np.exp(-np.arange(SIZE) / 20)
    owing = source.choice(np.arange(1, SIZE - 15), debts, replace=False)
    masses[owing] *= -share
    return masses, STEP * np.arange(-20, SIZE - 20, dtype=np.float64)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("debts", [1, 4, 12])
def test_a_debt_that_is_followed_is_paid_along_a_chord(seed: int, debts: int) -> None:
    """A chord keeps the mass and the curve left of it, and lies nowhere above the curve."""
    masses, losses = drawn(seed, debts, 0.5)
    paid = _bridge_negative_masses(masses, losses)
    assert paid.size == SIZE
    assert paid.min() >= 0.0
    assert paid.sum() == pytest.approx(masses.sum(), rel=1e-11)
    assert paid @ np.exp(-losses) == pytest.approx(masses @ np.exp(-losses), rel=1e-11)
    at = np.linspace(losses[0] - 1, losses[-1], 400)
    assert np.all(curve(paid, losses, at) <= curve(masses, losses, at) + 1e-12)


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


@pytest.mark.parametrize("owed", [0.01, 0.05, 0.2])
def test_one_debt_among_many_small_masses_leaves_the_convex_hull(owed: float) -> None:
    """Hundreds of nodes on either side pay it."""
    losses = np.linspace(-4.0, 4.0, 1501)
    masses = np.exp(-((losses - 0.5) ** 2) / 2)
    masses /= masses.sum()
    masses[600] = -owed
    paid = _bridge_negative_masses(masses, losses)
    assert paid.min() >= 0.0
    passed = np.flatnonzero(paid == 0.0)
    assert passed.size > 3
    places = np.append(0.0, np.exp(losses))
    below, at = np.append(masses.sum(), curve(masses, losses, losses)), curve(paid, losses, losses)
    hull = convex_hull(places, below)[1:]
    assert np.all(at <= hull + 1e-14)
    assert at == pytest.approx(hull, abs=1e-11)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(("debts", "share"), [(1, 0.5), (5, 1.0), (15, 0.5)])
def test_what_is_cut_lies_nowhere_above_and_owes_nothing(
    seed: int, debts: int, share: float
) -> None:
    masses, losses = drawn(seed, debts, share)
    masses[-3:] = -0.01  # nothing can pay these
    result = _truncated(masses, losses)
    stored = losses[: result.size]
    assert result.min() >= 0.0
    at = np.linspace(losses[0] - 1, losses[-1], 400)
    at = at[at <= stored[-1]]
    whole = curve(masses, losses, at)
    assert np.all(curve(result, stored, at) <= whole + 1e-12)
    assert result.size > SIZE // 2
    assert result.sum() > 0.5 * masses.sum()


def test_without_debts_nothing_is_truncated() -> None:
    masses, losses = drawn(3, 0, 0.0)
    assert _truncated(masses, losses) == pytest.approx(masses, abs=1e-12)
