"""Every error that the method lists, injected at the size that its bound claims to cover.

Each stage is disturbed in the direction that hurts, by nine tenths of its own bound (what
is left is for the stage's real rounding), and the bound must still hold. The same
disturbance made larger, or the bound taken away, must break it: else the test would say
nothing. The truth is a closed form in 70 digits or a convolution in extended precision.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mpmath
import numpy as np
import pytest
from scipy import fft

from affidavit.accountants.fourier import composed_delta, composed_transform, privacy_loss
from affidavit.accountants.fourier.composed_delta import ComposedTransform
from affidavit.accountants.fourier.discretized_pld import (
    Grid,
    LatticeMeasure,
    LowerRange,
    lower_measure,
    upper_measure,
)
from affidavit.accountants.fourier.loss_laws import NormalMixtureLaw
from affidavit.accountants.fourier.privacy_loss import UNIT_ROUNDOFF, Array, Cells, normal_masses
from affidavit.accountants.fourier.tilting import Window
from affidavit.accountants.fourier_accountant import FourierAccountant
from affidavit.plan import events
from tests.accountants.fourier.closed_forms import distance, one_release

SHARE = 0.9
LAW = NormalMixtureLaw(kind="remove", noise_multiplier=1.0, sampling_probability=0.3)
GRID = Grid(origin=-0.4, step=0.02, size=400)


def exact(epsilon: float) -> mpmath.mpf:
    return one_release("remove", 0.3, distance(1.0), epsilon)


def curve(measure: LatticeMeasure, epsilon: float) -> mpmath.mpf:
    """The hockey-stick curve of a measure on exact nodes."""
    with mpmath.workdps(50):
        total = mpmath.mpf(measure.infinite)
        origin, step = mpmath.mpf(measure.grid.origin), mpmath.mpf(measure.grid.step)
        for index in np.flatnonzero(measure.masses):
            gap = origin + int(index) * step - mpmath.mpf(epsilon)
            if gap > 0:
                total -= mpmath.mpf(float(measure.masses[index])) * mpmath.expm1(-gap)
        return total


@dataclass(frozen=True, kw_only=True, slots=True)
class Disturbed:
    """``LAW`` with its cells changed by ``change``."""

    change: Callable[[Array, Cells], Cells]

    def cells(self, edges: Array) -> Cells:
        return self.change(edges, LAW.cells(edges))


def half_cells(change: Callable[[Array, Cells], Cells], grid: Grid = GRID) -> Cells:
    return grid.cells(Disturbed(change=change))  # type: ignore[arg-type]


def unchanged(_edges: Array, cells: Cells) -> Cells:
    return cells


def rounded(sign: float) -> Callable[[Array, Cells], Cells]:
    """Every P off by its bound one way and every Q by its bound the other way."""

    def change(_edges: Array, cells: Cells) -> Cells:
        return dataclasses.replace(
            cells,
            p=cells.p * (1 + sign * cells.relative_error),
            q=cells.q * (1 - sign * cells.relative_error),
        )

    return change


def moved(sign: float) -> Callable[[Array, Cells], Cells]:
    """Every cell cut at places whose losses are off by their bound."""

    def change(edges: Array, cells: Cells) -> Cells:
        off = edges + sign * np.minimum(cells.edge_error[:-1], cells.edge_error[1:])
        result = LAW.cells(off)
        return dataclasses.replace(cells, p=result.p, q=result.q)

    return change


# At the nodes the chords meet the curve, so that nothing but the rounding bounds is left.
NODES = [float(GRID.origin + GRID.step * index) for index in (19, 25, 60, 150, 300)]


def upper_holds(change: Callable[[Array, Cells], Cells]) -> bool:
    measure = upper_measure(half_cells(change), GRID)
    return all(curve(measure, node) >= exact(node) for node in NODES)


def lower_holds(change: Callable[[Array, Cells], Cells]) -> bool:
    span = LowerRange(first=0, last=GRID.size - 1, open_left=False, open_right=False)
    measure = lower_measure(half_cells(change), GRID, span)
    return all(curve(measure, place) <= exact(place) for place in PLACES)


PLACES = [*NODES, *(node + 0.01 for node in NODES)]


def test_masses_off_by_their_bound_are_covered() -> None:
    assert upper_holds(rounded(-SHARE))
    assert not upper_holds(rounded(-40.0))
    assert lower_holds(rounded(SHARE))
    assert not lower_holds(rounded(1e11))


def test_places_off_by_their_bound_are_covered() -> None:
    assert upper_holds(moved(SHARE))
    assert lower_holds(moved(-SHARE))
    assert not upper_holds(moved(1e13))


@pytest.mark.usefixtures("lattice_alone")
def test_each_normal_mass_is_within_its_bound_and_the_engine_bears_all_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Through the whole engine, in both directions, for a thousand composed releases."""
    for sign in (-1.0, 1.0):

        def disturbed(z: Array, mean: float, sign: float = sign) -> tuple[Array, Array]:
            masses, errors = normal_masses(z, mean)
            bad = sign if mean else -sign
            return masses + SHARE * bad * errors, errors

        with monkeypatch.context() as patch:
            patch.setattr(privacy_loss, "normal_masses", disturbed)
            event = events.Repeated(event=events.Gaussian(noise_multiplier=40.0), count=1000)
            result = FourierAccountant().curve(event).epsilon(1e-9)
            single = events.PoissonSubsampledGaussian(
                sampling_probability=0.3, noise_multiplier=1.0
            )
            one = FourierAccountant().curve(single).epsilon(1e-9)
        mu = math.sqrt(mpmath.mpf(1000)) / 40
        assert one_release("remove", 1.0, mu, result.upper) <= 1e-9
        assert one_release("remove", 1.0, mu, result.lower) >= 1e-9
        assert exact(one.upper) <= 1e-9 <= exact(one.lower)


def test_discretisation_is_covered_and_is_there() -> None:
    """All of a cell's mass at its nearer node is no bound on either side; the two measures are."""
    coarse = Grid(origin=-0.4, step=0.1, size=90)
    cells = coarse.cells(LAW)
    nearest = LatticeMeasure(
        grid=coarse, masses=cells.p[1:-1:2] + cells.p[2::2], infinite=float(cells.p[-1])
    )
    span = LowerRange(first=0, last=coarse.size - 1, open_left=False, open_right=False)
    above, below = upper_measure(cells, coarse), lower_measure(cells, coarse, span)
    places = np.linspace(0.0, 3.0, 41)
    gaps = [curve(nearest, float(place)) - exact(float(place)) for place in places]
    assert min(gaps) < 0 < max(gaps)
    for place in map(float, places):
        assert curve(below, place) < exact(place) < curve(above, place)


def test_losses_beyond_the_grid_are_covered_at_both_ends() -> None:
    short = Grid(origin=0.1, step=0.02, size=60)
    cells = short.cells(LAW)
    above = upper_measure(cells, short)
    span = LowerRange(first=0, last=short.size - 1, open_left=False, open_right=False)
    below = lower_measure(cells, short, span)
    for place in (0.0, 0.15, 0.7, 1.25):
        assert curve(below, place) <= exact(place) <= curve(above, place)
    # Without the mass at infinity, or with that below the grid dropped, the bound is gone.
    finite = dataclasses.replace(above, infinite=0.0)
    assert curve(finite, 1.25) < exact(1.25)
    dropped = dataclasses.replace(above, masses=np.concatenate(([0.0], above.masses[1:])))
    assert curve(dropped, -0.2) < exact(-0.2) <= curve(above, -0.2)


STEPS = 7
PART = LatticeMeasure(
    grid=Grid(origin=-0.6, step=0.05, size=41),
    masses=np.exp(-((-0.7 + 0.05 * np.arange(41)) ** 2) / 0.2) / 20,
    infinite=0.0,
)
WIDE = Window(low=-30.013, high=60.013, order=1.5, below=2.0, above=2.0)
SHORT = Window(low=0.3, high=2.6, order=1.5, below=1.0, above=1.0)


def truth(epsilon: float, steps: int = STEPS) -> float:
    """δ of ``PART`` composed, by the definition in extended precision."""
    composed, masses = np.ones(1, dtype=np.longdouble), PART.masses.astype(np.longdouble)
    for _ in range(steps):
        composed = np.convolve(composed, masses)
    step, origin = np.longdouble(PART.grid.step), np.longdouble(PART.grid.origin)
    nodes = origin * steps + step * np.arange(composed.size)
    return composed @ np.maximum(0, -np.expm1(np.longdouble(epsilon) - nodes))


EPSILONS = (0.4, 1.1, 2.3)


def held(window: Window = WIDE, steps: int = STEPS, change: Any = None) -> tuple[bool, bool]:
    """Whether the upper and the lower bound hold at all of ``EPSILONS``."""
    result = ComposedTransform([(PART, steps)], window)
    if change:
        change(result)
    return (
        all(result.upper(epsilon) >= truth(epsilon, steps) for epsilon in EPSILONS),
        all(result.lower(epsilon) <= truth(epsilon, steps) for epsilon in EPSILONS),
    )


def test_nothing_disturbed_everything_holds() -> None:
    assert held() == (True, True)
    assert held(steps=1) == (True, True)


def test_mass_wrapped_around_is_covered_and_is_there() -> None:
    def without(found: ComposedTransform) -> None:
        found._above = found._below = 0.0

    assert held(SHORT) == (True, True)
    # What wraps in from below raises the sum: a lower bound must not count it.
    assert held(SHORT, change=without)[1] is False


def test_mass_above_the_window_is_covered_and_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing wraps where the law is cut to the window first: then what is above is lost."""

    def cut(law: Array, size: int) -> Array:
        index = np.arange(law.size)
        last = math.floor((1.2 - PART.grid.origin) / PART.grid.step)
        return np.resize(np.where(index <= last, law, 0.0), size) * (np.arange(size) < law.size)

    narrow = Window(low=-0.6, high=1.2, order=1.5, below=1.0, above=1.0)
    monkeypatch.setattr(composed_transform, "folded", cut)
    one = ComposedTransform([(PART, 1)], narrow)
    assert one.upper(1.1) >= truth(1.1, 1)
    one._above = 0.0
    assert one.upper(1.1) < truth(1.1, 1)


def transform_disturbed(monkeypatch: pytest.MonkeyPatch, share: float) -> None:
    """Every forward transform off by its bound, all of it where δ is read."""
    true = fft.rfft

    def rfft(law: Array) -> Any:
        size = law.size
        index = np.arange(size)
        gaps = PART.grid.origin + PART.grid.step * index - 0.4
        worst = np.where(gaps > 0, np.exp(-1.5 * gaps) * -np.expm1(-np.maximum(gaps, 0)), 0.0)
        norm = 16 * UNIT_ROUNDOFF * math.log2(size) * math.sqrt(float(law @ law))
        return true(law) + share * norm / math.sqrt(float(worst @ worst)) * true(worst)

    monkeypatch.setattr(fft, "rfft", rfft)


def test_rounding_of_the_transform_is_covered(monkeypatch: pytest.MonkeyPatch) -> None:
    for steps in (1, STEPS):
        for sign, side in ((-1.0, 0), (1.0, 1)):
            with monkeypatch.context() as patch:
                transform_disturbed(patch, sign * SHARE)
                assert held(steps=steps)[side]
            with monkeypatch.context() as patch:
                transform_disturbed(patch, 300 * sign)
                assert not held(steps=steps)[side]


def test_rounding_of_powers_is_covered(monkeypatch: pytest.MonkeyPatch) -> None:
    true = composed_transform.composed

    def disturbed(share: float) -> Callable[..., composed_transform.Spectrum]:
        def composed(*given: Any) -> composed_transform.Spectrum:
            result, laws = true(*given), given[0]
            unit = UNIT_ROUNDOFF * (64 + 16 * sum(law.count for law in laws))
            return dataclasses.replace(result, values=result.values + share * unit * result.values)

        return composed

    for sign, side in ((-1.0, 0), (1.0, 1)):
        monkeypatch.setattr(composed_delta, "composed", disturbed(sign * SHARE))
        assert held()[side]
        monkeypatch.setattr(composed_delta, "composed", disturbed(300 * sign))
        assert not held()[side]


def test_frequencies_left_out_are_covered_and_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(composed_transform, "_NEGLIGIBLE", 1e-3)
    assert held() == (True, True)
    true = composed_transform.composed

    def forgetful(*given: Any) -> composed_transform.Spectrum:
        return dataclasses.replace(true(*given), left_out=0.0)

    monkeypatch.setattr(composed_delta, "composed", forgetful)
    assert held() != (True, True)


def test_the_log_of_the_mass_times_the_steps_is_covered(monkeypatch: pytest.MonkeyPatch) -> None:
    true = composed_delta.TiltedLaw.of

    def disturbed(share: float) -> Callable[..., Any]:
        def of(measure: LatticeMeasure, count: int, order: float, cut: float | None) -> Any:
            law = true(measure, count, order, cut)
            assert law is not None
            off = share * law.relative_error / law.count
            return dataclasses.replace(law, log_total=law.log_total + off)

        return of

    for sign, side in ((-1.0, 0), (1.0, 1)):
        monkeypatch.setattr(composed_delta.TiltedLaw, "of", disturbed(sign * SHARE))
        assert held()[side]
        monkeypatch.setattr(composed_delta.TiltedLaw, "of", disturbed(30 * sign))
        assert not held()[side]


def test_the_place_of_the_composed_nodes_is_covered() -> None:
    def shifted(share: float) -> Callable[[ComposedTransform], None]:
        def change(found: ComposedTransform) -> None:
            found._origin += share * found._placing

        return change

    for sign, side in ((-1.0, 0), (1.0, 1)):
        assert held(change=shifted(sign * SHARE))[side]
        assert not held(change=shifted(sign * 1e3))[side]
