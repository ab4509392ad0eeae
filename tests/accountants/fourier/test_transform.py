"""Each error of the transform, made or measured, stays inside the bound for it."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import fft

from affidavit.accountants.fourier.composed_delta import ComposedTransform
from affidavit.accountants.fourier.composed_transform import TiltedLaw, composed
from affidavit.accountants.fourier.discretized_pld import Grid, LatticeMeasure
from affidavit.accountants.fourier.privacy_loss import UNIT_ROUNDOFF
from affidavit.accountants.fourier.tilting import Window, log_peak


def measure(step: float = 0.05, size: int = 41, loss_error: float = 0.0) -> LatticeMeasure:
    losses = -0.6 + step * np.arange(size)
    masses = np.exp(-((losses - 0.1) ** 2) / 0.2)
    return LatticeMeasure(
        grid=Grid(origin=-0.6, step=step, size=size),
        masses=masses / masses.sum(),
        infinite=0.0,
        loss_error=loss_error,
    )


def direct(part: LatticeMeasure, count: int, epsilon: float) -> float:
    """δ by plain convolution."""
    composed = np.ones(1)
    for _ in range(count):
        composed = np.convolve(composed, part.masses)
    losses = part.grid.origin * count + part.grid.step * np.arange(composed.size)
    return float(np.sum(composed * np.maximum(0.0, -np.expm1(epsilon - losses))))


WIDE = Window(low=-8.013, high=40.013, order=1.5, below=1.0, above=1.0)


@pytest.mark.parametrize("count", [1, 2, 7, 12])
@pytest.mark.parametrize("epsilon", [0.0, 0.7, 3.0])
@pytest.mark.parametrize("order", [0.3, 1.5, 6.0])
def test_both_sides_hold_the_plain_convolution(count: int, epsilon: float, order: float) -> None:
    window = Window(low=-8.0, high=20.0, order=order, below=1.0, above=1.0)
    transform = ComposedTransform([(measure(), count)], window)
    value = direct(measure(), count, epsilon)
    assert transform.lower(epsilon) * (1 - 1e-12) <= value <= transform.upper(epsilon) * (1 + 1e-12)


@pytest.mark.parametrize(
    ("low", "high"), [(-1.0, 2.5), (-0.5, 1.5), (0.3, 4.0), (-3.0, 3.0), (0.5, 0.9)]
)
def test_wrapping_around_a_short_window_is_covered(low: float, high: float) -> None:
    window = Window(low=low, high=high, order=1.5, below=1.0, above=1.0)
    transform = ComposedTransform([(measure(), 7)], window)
    for epsilon in np.linspace(low, high, 9):
        value = direct(measure(), 7, float(epsilon))
        assert transform.lower(float(epsilon)) <= value * (1 + 1e-12)
        assert transform.upper(float(epsilon)) >= value * (1 - 1e-12)


def test_outside_the_window_the_bounds_are_loose_but_hold() -> None:
    window = Window(low=0.5, high=2.0, order=1.5, below=1.0, above=1.0)
    transform = ComposedTransform([(measure(), 5)], window)
    for epsilon in (-2.0, 0.0, 3.0, 9.0):
        value = direct(measure(), 5, epsilon)
        assert transform.lower(epsilon) <= value * (1 + 1e-12)
        assert transform.upper(epsilon) >= value * (1 - 1e-12)


@pytest.mark.parametrize("cut", [-0.4, 0.3, 0.9, 1.3])
@pytest.mark.parametrize("epsilon", [0.1, 1.2, 3.0])
@pytest.mark.parametrize(("low", "high"), [(-8.0, 20.0), (-0.5, 2.5)])
def test_the_two_strata_add_up_to_the_whole(
    cut: float, epsilon: float, low: float, high: float
) -> None:
    """What never exceeds the cut and what does at least once, each with its own tilt."""
    common = Window(low=low, high=high, order=4.0, below=1.0, above=1.0)
    rare = Window(low=low, high=high, order=0.4, below=1.0, above=1.0)
    below = ComposedTransform([(measure().up_to(cut), 7)], common)
    above = ComposedTransform([(measure(), 7)], rare, cut)
    value = direct(measure(), 7, epsilon)
    upper = below.upper(epsilon) + above.upper(epsilon)
    lower = below.lower(epsilon) + above.lower(epsilon)
    assert lower <= value * (1 + 1e-12)
    assert upper >= value * (1 - 1e-12)
    if high > 10:
        assert upper - lower <= 0.1 * value


def test_a_rare_stratum_keeps_its_digits() -> None:
    """One loss in 1e30 decides, and is told from rounding."""
    masses = np.zeros(41)
    masses[12], masses[40] = 1.0, 1e-30
    part = LatticeMeasure(grid=Grid(origin=-0.6, step=0.05, size=41), masses=masses, infinite=0.0)
    window = Window(low=-8.0, high=20.0, order=0.5, below=1.0, above=1.0)
    transform = ComposedTransform([(part, 9)], window, 0.5)
    value = direct(part, 9, 1.0)
    assert 0 < transform.lower(1.0) <= value * (1 + 1e-12)
    assert value <= transform.upper(1.0) <= value * (1 + 1e-9)


def test_a_rare_part_that_cancels_the_common_one_is_within_its_rounding() -> None:
    """A smooth law that is cut in the middle: far out its halves cancel to their last digits."""
    size = 1024
    nodes = (np.arange(size, dtype=np.longdouble) - 500) / 24
    law = np.exp(-nodes * nodes / 2)
    law /= law.sum()
    common, rare = np.where(nodes <= 1, law, 0), np.where(nodes > 1, law, 0)
    one = TiltedLaw(
        losses=nodes.astype(float),
        common=common.astype(float),
        rare=rare.astype(float),
        count=1,
        log_total=0.0,
        relative_error=0.0,
    )
    spectrum = composed([one], size)
    off = np.abs(spectrum.values - fft.rfft(rare)[spectrum.indices])
    rounding = UNIT_ROUNDOFF * (64 + 16) * spectrum.sizes
    assert np.all(off <= spectrum.error * math.sqrt(size) + rounding)


def test_phases_are_a_product() -> None:
    parts = [(measure(), 3), (measure(), 4)]
    split, whole = ComposedTransform(parts, WIDE), ComposedTransform([(measure(), 7)], WIDE)
    assert split.upper(1.0) == pytest.approx(whole.upper(1.0), rel=1e-10)
    assert split.lower(1.0) == pytest.approx(whole.lower(1.0), rel=1e-10)


def test_a_shift_of_every_node_is_paid_for_once_a_step() -> None:
    shifted = ComposedTransform([(measure(loss_error=1e-3), 7)], WIDE)
    plain = ComposedTransform([(measure(), 7)], WIDE)
    assert shifted.upper(1.0) == pytest.approx(plain.upper(1.0 - 7e-3), rel=1e-9)
    assert shifted.lower(1.0) == pytest.approx(plain.lower(1.0 + 7e-3), rel=1e-9)


def test_infinite_mass_is_added_once_a_step() -> None:
    part = measure()
    leaking = LatticeMeasure(grid=part.grid, masses=part.masses, infinite=1e-3, loss_error=0.0)
    with_mass = ComposedTransform([(leaking, 5)], WIDE).upper(1.0)
    assert with_mass == pytest.approx(ComposedTransform([(part, 5)], WIDE).upper(1.0) + 5e-3)


def test_nothing_left_on_the_grid_is_the_infinite_mass_alone() -> None:
    empty = LatticeMeasure(grid=measure().grid, masses=np.zeros(41), infinite=1e-9, loss_error=0.0)
    transform = ComposedTransform([(empty, 3)], WIDE)
    assert transform.upper(0.5) == pytest.approx(3e-9)
    assert transform.lower(0.5) == 0.0


@pytest.mark.parametrize("size", [1 << 10, 3 << 12, 5**6, 7**4 * 32, 1 << 18])
@pytest.mark.parametrize("kind", ["spread", "atom"])
def test_the_transform_is_within_its_rounding_bound(size: int, kind: str) -> None:
    """Against the transform in extended precision, in the 2-norm."""
    law = np.exp(-(np.linspace(-6, 6, size) ** 2)) if kind == "spread" else np.full(size, 1e-12)
    if kind == "atom":
        law[size // 3] = 1.0
    law /= law.sum()
    error = fft.rfft(law) - fft.rfft(law.astype(np.longdouble))
    bound = 16 * UNIT_ROUNDOFF * math.log2(size) * math.sqrt(size) * math.sqrt(float(law @ law))
    assert float(np.sqrt(np.sum(np.abs(error) ** 2))) <= bound / math.sqrt(2)


def test_a_peak_that_a_sample_of_the_nodes_misses_is_found() -> None:
    """It is e^1000 times what the sampled nodes weigh, where a double would overflow."""
    grid = Grid(origin=0.0, step=1.0, size=4100)
    masses = np.zeros(grid.size)
    masses[0], masses[4097] = 1.0, 1e-5
    law = TiltedLaw.of(LatticeMeasure(grid=grid, masses=masses, infinite=0.0), 1, 0.5, None)
    assert law is not None
    assert law.log_total == pytest.approx(math.log(1e-5) + 0.5 * 4097, rel=1e-12)
    assert law.common[4097] == pytest.approx(1.0, rel=1e-12)
    assert law.common.sum() == pytest.approx(1.0, rel=1e-12)


def test_the_peak_of_g() -> None:
    for order in (0.1, 1.0, 30.0):
        places = np.linspace(1e-6, 40.0, 2_000_001)
        largest = float(np.max(np.exp(-order * places) * -np.expm1(-places)))
        assert largest == pytest.approx(math.exp(log_peak(order)), rel=1e-6)


def test_wrapping_a_law_many_times_is_in_the_error_of_its_transform() -> None:
    """Against the sum and the transform in extended precision, in the 2-norm."""
    rows, size = 1 << 15, 32
    index = np.arange(rows * size)
    law = 1.0 + 0.3 * np.sin(0.37 * index) ** 2
    law /= law.sum()
    part = LatticeMeasure(grid=Grid(origin=0.0, step=1e-9, size=law.size), masses=law, infinite=0.0)
    tilted = TiltedLaw.of(part, 1, 1e-3, None)
    assert tilted is not None
    result = composed([tilted], size)
    folded = tilted.common.astype(np.longdouble).reshape(rows, size).sum(axis=0)
    true = fft.rfft(folded)[result.indices]
    twice = np.where((result.indices == 0) | (2 * result.indices == size), 1.0, 2.0)
    off = math.sqrt(float(np.sum(twice * np.abs(result.values - true) ** 2)) / size)
    assert off <= result.error
