"""Lower measures with nodes that owe: how the debts are paid, held against the curves.

The curve of a measure is Σ m_j (1 - e^{ε - l_j}) over the nodes above ε. A node that owes is a
bend the wrong way, which no measure without debts has.
"""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from affidavit.accountants.fourier.discretized_pld import _cut, _followed

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
    paid = _followed(masses, losses)
    assert paid.size == SIZE
    assert paid.min() >= 0.0
    assert paid.sum() == pytest.approx(masses.sum(), rel=1e-11)
    assert paid @ np.exp(-losses) == pytest.approx(masses @ np.exp(-losses), rel=1e-11)
    at = np.linspace(losses[0] - 1, losses[-1], 400)
    assert np.all(curve(paid, losses, at) <= curve(masses, losses, at) + 1e-12)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(("debts", "share"), [(1, 0.5), (5, 1.0), (15, 0.5)])
def test_what_is_cut_lies_nowhere_above_and_owes_nothing(
    seed: int, debts: int, share: float
) -> None:
    masses, losses = drawn(seed, debts, share)
    masses[-3:] = -0.01  # nothing can pay these
    result = _cut(masses, losses)
    stored = losses[: result.size]
    assert result.min() >= 0.0
    at = np.linspace(losses[0] - 1, losses[-1], 400)
    at = at[at <= stored[-1]]
    whole = curve(masses, losses, at)
    assert np.all(curve(result, stored, at) <= whole + 1e-12)
    assert result.size > SIZE // 2
    assert result.sum() > 0.5 * masses.sum()


def test_without_debts_nothing_is_cut() -> None:
    masses, losses = drawn(3, 0, 0.0)
    assert _cut(masses, losses) == pytest.approx(masses, abs=1e-12)
