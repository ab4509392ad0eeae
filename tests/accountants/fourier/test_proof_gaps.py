"""Bounds that must hold in corners which the engine's own parameters seldom visits."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from scipy import fft

from affidavit.accountants.fourier import FourierAccountant, spectrum
from affidavit.accountants.fourier.discretized_pld import Grid, LatticeMeasure
from affidavit.accountants.fourier.loss_laws import NormalMixtureLaw
from affidavit.accountants.fourier.truncated_poisson import truncated_law
from affidavit.plan import TruncatedPoissonGaussian


@pytest.mark.ordinary("0.1", "1e-06")
@pytest.mark.parametrize("delta", [1e-1, 3.1622776601683794e-3, 1e-6, 1e-12])
def test_a_truncated_release_s_top_is_exceeded_no_oftener_than_asked(delta: float) -> None:
    """Both laws of a revealed mixture can exceed it, and together no more than that."""
    leaf = TruncatedPoissonGaussian(
        dataset_size=30,
        sampling_probability=0.05,
        max_lot_size=4,
        noise_multiplier=0.2,
        neighbours="add_remove",
    )
    law = truncated_law(leaf, "remove")
    assert law.tails(np.array([law.upper_quantile(delta)]))[0][0] <= delta * (1 + 1e-9)
    curve = FourierAccountant().curve(leaf)
    # The two brackets are of the same dominating law, so one inverts the other.
    assert curve.delta(curve.epsilon(delta).upper).upper <= delta * (1 + 1e-3)


def test_wrapping_a_law_many_times_is_in_the_error_of_its_transform() -> None:
    """Against the sum and the transform in extended precision, in the 2-norm."""
    rows, size = 1 << 15, 32
    index = np.arange(rows * size)
    law = 1.0 + 0.3 * np.sin(0.37 * index) ** 2
    law /= law.sum()
    part = LatticeMeasure(grid=Grid(origin=0.0, step=1e-9, size=law.size), masses=law, infinite=0.0)
    tilted = spectrum.TiltedLaw.of(part, 1, 1e-3, None)
    assert tilted is not None
    result = spectrum.composed([tilted], size)
    folded = tilted.common.astype(np.longdouble).reshape(rows, size).sum(axis=0)
    true = fft.rfft(folded)[result.indices]
    twice = np.where((result.indices == 0) | (2 * result.indices == size), 1.0, 2.0)
    off = math.sqrt(float(np.sum(twice * np.abs(result.values - true) ** 2)) / size)
    assert off <= result.error


def test_an_edge_near_zero_is_off_by_roundings_of_the_origin() -> None:
    law = NormalMixtureLaw(kind="add", noise_multiplier=0.2, sampling_probability=1e-4)
    grid = Grid(origin=-30.0000123, step=1e-3 / 3, size=100_000)
    cells, edges = grid.cells(law), grid.edges()
    for index in np.argsort(np.abs(edges))[:2000]:
        true = Fraction(grid.origin) + Fraction(grid.step) * Fraction(int(index) - 1, 2)
        error = abs(Fraction(float(edges[index])) - true)
        assert error <= min(cells.edge_error[index], cells.edge_error[index + 1])
