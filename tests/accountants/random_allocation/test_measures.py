"""The measures of one term bound its call function, and a power of them its payoff."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from affidavit.accountants.random_allocation.directions import Direction
from affidavit.accountants.random_allocation.lattice import (
    Array,
    ConvolutionPower,
    Term,
    Window,
    chernoff_payoffs,
    lower_masses,
    upper_masses,
)
from affidavit.accountants.random_allocation.tail_truncation import (
    LargeTerms,
    choose_cut,
    shortfall,
)
from tests.support.random_seeds import examples


def call(nodes: Array, masses: Array, at: float) -> float:
    return float(masses @ np.maximum(nodes - at, 0.0))


@settings(max_examples=examples(60))
@given(rate=st.floats(0.05, 3.0), cells=st.integers(8, 400), place=st.floats(-0.2, 1.1))
def test_the_call_functions_of_the_measures_enclose_the_terms(
    rate: float, cells: int, place: float
) -> None:
    removed = Term(rate=rate, side="remove", top=math.exp(6 * rate - rate**2 / 2))
    added = Term(rate=rate, side="add", top=-math.exp(-8 * rate - rate**2 / 2))
    span = removed.top
    for term in (removed, added):
        nodes = term.top - span / cells * np.arange(cells, -1, -1)
        nodes[-1] = term.top
        above = upper_masses(term, nodes)
        under = nodes + 0.3 * span / cells
        below = lower_masses(term, under, open_left=False)
        at = nodes[0] + place * (nodes[-1] - nodes[0])
        true = term.calls(np.array([at]))
        exact, error = float(true.value[0]), float(true.error[0])
        assert (above >= 0).all()
        assert (below >= 0).all()
        assert call(nodes, above, at) >= exact - error
        assert call(under, below, at) <= exact + error


def test_the_open_first_cell_keeps_the_mean() -> None:
    """A step far above the median: nearly all mass is in the first cell, and none is lost."""
    term = Term(rate=2.0, side="remove", top=5000.0)
    step = 10.0
    first = 0.5
    nodes = first + step * np.arange(400)
    closed = lower_masses(term, nodes, open_left=False)
    opened = lower_masses(term, nodes, open_left=True)
    for at in (0.0, 1.0, 7.0, 100.0):
        true = float(term.calls(np.array([at])).value[0])
        assert call(nodes, closed, at) <= call(nodes, opened, at) * (1 + 1e-12) <= true
    assert call(nodes, opened, 0.0) > 0.999 * float(term.calls(np.zeros(1)).value[0])


def at(bound: Callable[[Array], Array], value: float) -> Array:
    return bound(np.array([value]))


@pytest.mark.parametrize("copies", [1, 2, 5])
@pytest.mark.parametrize("tilt", [0.3, 2.0])
def test_a_power_pays_what_direct_convolution_pays(copies: int, tilt: float) -> None:
    generator = np.random.Generator(np.random.PCG64(copies))
    nodes = 0.25 + 0.125 * np.arange(40)
    masses = generator.random(40) / 40
    sums, law = np.array([0.0]), np.array([1.0])
    for _ in range(copies):
        law = np.convolve(law, masses)
    sums = copies * 0.25 + 0.125 * np.arange(law.size)
    window = Window(
        low=float(sums[0]) - 1, high=float(sums[-1]) + 1, tilt=tilt, below=60.0, above=60.0
    )
    power = ConvolutionPower([(nodes, masses, copies)], window)
    ceiling = chernoff_payoffs([(nodes, masses, copies)], np.geomspace(0.1, 30, 100))
    for threshold in (0.5 * copies, 2.0 * copies, 4.0 * copies):
        exact = float(law @ np.maximum(sums - threshold, 0.0))
        (lower,), (upper,) = at(power.lower, threshold), at(power.upper, threshold)
        assert lower * (1 - 1e-12) <= exact <= upper * (1 + 1e-12)
        if tilt < 1:
            # Far from the saddle of a strong tilt the round-off is all there is.
            assert upper - lower <= 1e-6 * exact + 1e-13
        assert exact <= at(ceiling, threshold)[0]


def test_a_window_that_cuts_is_wider_and_never_wrong() -> None:
    nodes, masses = 0.125 * np.arange(40), np.full(40, 1 / 40)
    law = np.convolve(np.convolve(masses, masses), masses)
    exact = float(law @ np.maximum(0.125 * np.arange(law.size) - 9.0, 0.0))
    narrow = Window(low=7.0, high=11.0, tilt=0.5, below=0.5, above=0.5)
    power = ConvolutionPower([(nodes, masses, 3)], narrow)
    assert at(power.lower, 9.0)[0] <= exact <= at(power.upper, 9.0)[0]
    assert at(power.upper, 9.0)[0] > 1.01 * exact


@pytest.mark.parametrize("threshold", [0.0, 2.0, 5.0])
def test_what_lies_below_the_window_is_paid_for(threshold: float) -> None:
    nodes, masses = 0.125 * np.arange(40), np.full(40, 1 / 40)
    law = np.convolve(np.convolve(masses, masses), masses)
    exact = float(law @ np.maximum(0.125 * np.arange(law.size) - threshold, 0.0))
    above = Window(low=8.0, high=16.0, tilt=0.5, below=2.0, above=2.0)
    power = ConvolutionPower([(nodes, masses, 3)], above)
    assert at(power.lower, threshold)[0] <= exact <= at(power.upper, threshold)[0]


@pytest.mark.ordinary("not 500-*")
@pytest.mark.parametrize(("bins", "rate"), [(3, 1.0), (40, 1.5), (500, 0.7)])
def test_large_terms_enclose_what_sampling_finds(bins: int, rate: float) -> None:
    generator = np.random.Generator(np.random.PCG64(bins))
    cut, ratio, draws = math.exp(1.5 * rate), 1.05, 40_000
    x = np.exp(rate * generator.standard_normal((draws, bins)) - rate**2 / 2)
    gains = np.maximum(x.mean(axis=1) - ratio, 0.0) * (x.max(axis=1) > cut)
    spread = 6 * float(gains.std()) / math.sqrt(draws)
    large = LargeTerms(kinds=((bins, rate),), cut=cut)
    assert at(large.lower, ratio)[0] <= float(gains.mean()) + spread
    assert float(gains.mean()) - spread <= at(large.upper, ratio)[0]


def test_the_shortfall_is_never_below_what_sampling_finds() -> None:
    generator = np.random.Generator(np.random.PCG64(3))
    sums = np.exp(0.8 * generator.standard_normal((50_000, 20)) - 0.32).sum(axis=1)
    reach = np.array([-1.0, 8.0, 12.0, 20.0])
    bounds = shortfall(((21, 0.8),), reach)
    assert bounds[0] == 0
    for item, bound in zip(reach, bounds, strict=True):
        result = np.maximum(item - sums, 0.0)
        assert float(result.mean()) - 5 * float(result.std()) / 223 <= bound


def test_a_cut_lies_at_or_below_the_threshold() -> None:
    loose, tight = (choose_cut(((1000, 1.0),), 1.2, allowed) for allowed in (1e-6, 1e-12))
    assert loose <= tight <= 1200 * (1 + 1e-12)


def test_what_is_no_number_bounds_nothing() -> None:
    unknown = LargeTerms(kinds=((40, 1.5),), cut=math.nan)
    direction = Direction(bins=40, rate=1.5, side="remove")
    curves = direction._join(np.zeros_like, np.zeros_like, unknown, 1.0)
    assert (curves.upper(1.0), curves.lower(1.0)) == (1.0, 0.0)
