"""Each error term of the engine, switched off: what it then claims is false, and is not proved.

A grid or a window as the engine chooses it is too good to show its term. So a worse one is chosen:
with the term the bound still holds, without it it does not. Roundings are too small to show in ε.
So values are spoilt by more than their term covers; ``test_proof_injected_errors.py`` spoils them
by as much as it covers. No plan can show the rest: what wraps into the window from below and the
rounding of lower measures enter lower ends only, and the checker proves upper ends; 1e-9 in the
logarithm of the mass above the window moves ε by less than a proof resolves; and chords between
many kinds of release begin at more kinds than the checker takes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from scipy import fft

from affidavit.accountants import (
    Bracket,
    FourierAccountant,
    search_witness,
)
from affidavit.accountants.fourier import (
    composed_transform,
    direct_inversion,
    evaluation,
    truncated_poisson,
)
from affidavit.accountants.fourier.composed_delta import ComposedTransform
from affidavit.accountants.fourier.discretized_pld import (
    Grid,
    LatticeMeasure,
    upper_measure,
)
from affidavit.accountants.fourier.dominating_pairs import directions
from affidavit.accountants.fourier.grid_parameters import GridParameters, Laws
from affidavit.accountants.fourier.privacy_loss import Array, Cells, LossLaw, NormalPair
from affidavit.accountants.fourier.quadrature import AnalyticPart
from affidavit.accountants.fourier.refinement import locate, locate_in_strata
from affidavit.accountants.fourier.tilting import Window
from affidavit.checker import Unproved, Witness, prove
from affidavit.plan import events

DELTA = 1e-6
COMMON = events.Repeated(
    event=events.PoissonSubsampledGaussian(sampling_probability=0.05, noise_multiplier=1.0),
    count=40,
)
RARE = events.Repeated(
    event=events.PoissonSubsampledGaussian(sampling_probability=1e-3, noise_multiplier=0.8),
    count=3000,
)
CUT = events.Repeated(
    event=events.TruncatedPoissonGaussian(
        dataset_size=2000,
        sampling_probability=0.01,
        max_lot_size=25,
        noise_multiplier=1.5,
        neighbours="zero_out",
    ),
    count=20,
)
Patch = pytest.MonkeyPatch


@cache
def honest(event: events.Event) -> tuple[Bracket, Witness]:
    """The engine's bracket, and a witness that proves its upper end."""
    bracket = FourierAccountant().curve(event).epsilon(DELTA)
    return bracket, search_witness(event, bracket, DELTA, 1e-4)[0]


@cache
def choices(event: events.Event) -> list[tuple[GridParameters, float]]:
    """Coarse grids for each direction, as the engine chooses them, and about their ε."""
    result = []
    for direction in directions(event, lots="hidden"):
        laws, slope = Laws.of(direction), None
        saddle, guess = locate(laws, DELTA)
        if event == RARE:
            guess, slope = locate_in_strata(laws, saddle, guess, DELTA)
        parameters = evaluation.choose_parameters(laws, saddle, guess, DELTA, 0.1, slope, None)
        result.append((parameters, guess))
    return result


Choice = Callable[[GridParameters, float], GridParameters]


def unchanged(chosen: GridParameters, _: float) -> GridParameters:
    return chosen


def upper_end(event: events.Event, worse: Choice = unchanged) -> float:
    """The upper end of ε by one pass over each direction, on ``worse`` grids."""
    result = 0.0
    both = directions(event, lots="hidden")
    for direction, (parameters, guess) in zip(both, choices(event), strict=True):
        changed = worse(parameters, guess)
        above, _ = evaluation.bounding_curves(Laws.of(direction), changed, lower=False)
        rest = DELTA - direction.conceded
        _, crossed = evaluation.crossing(above.upper, rest, guess, 0.05, 1e-6)
        result = max(result, crossed)
    return result


def is_true(event: events.Event, epsilon: float) -> bool:
    """Whether ``epsilon`` bounds what the engine as it is says, of the dominating pair."""
    bracket = honest(event)[0]
    return epsilon >= (bracket.upper * (1 - 1e-4) if event == CUT else bracket.lower)


def is_caught(event: events.Event, epsilon: float) -> bool:
    """Whether the checker refuses ``epsilon`` with all the room that a proof has above it."""
    claimed = replace(honest(event)[1], epsilon=repr(epsilon * (1 + 1e-4)))
    try:
        prove(claimed, event)
    except Unproved as refusal:
        return refusal.code == "not_proved"
    return False


@pytest.fixture(scope="module", autouse=True)
def before_anything_is_switched_off() -> None:
    for event in (COMMON, RARE, CUT):
        honest(event)
        choices(event)


@pytest.mark.soak
def test_what_the_engine_says_is_proved() -> None:
    for event in (COMMON, RARE, CUT):
        bracket, witness = honest(event)
        assert bracket.lower < float(witness.epsilon) <= bracket.upper * (1 + 1e-4)
        assert is_true(event, upper_end(event))
        assert not is_caught(event, upper_end(event))


def measured(patch: Patch, change: Callable[[Cells, LatticeMeasure], LatticeMeasure]) -> None:
    def changed(cells: Cells, grid: Grid) -> LatticeMeasure:
        return change(cells, upper_measure(cells, grid))

    patch.setattr(evaluation, "upper_measure", changed)


def rounded_down(cells: Cells, measure: LatticeMeasure) -> LatticeMeasure:
    """The losses between two nodes at the lower one, where chords divide them."""
    masses = np.zeros(measure.grid.size)
    masses[:-1] = cells.p[2:-2:2] + cells.p[3:-1:2]
    masses[0] += cells.p[0] + cells.p[1]
    return replace(measure, masses=masses)


def no_chords(patch: Patch) -> None:
    measured(patch, rounded_down)


def no_infinite_mass(patch: Patch) -> None:
    measured(patch, lambda _, measure: replace(measure, infinite=0.0))


def nothing_below(patch: Patch) -> None:
    def dropped(_: Cells, measure: LatticeMeasure) -> LatticeMeasure:
        return replace(measure, masses=np.append(0.0, measure.masses[1:]))

    measured(patch, dropped)


def transformed(patch: Patch, change: Callable[[ComposedTransform], None]) -> None:
    true = ComposedTransform._transform

    def _transform(self: ComposedTransform, *given: Any) -> None:
        true(self, *given)
        change(self)

    patch.setattr(ComposedTransform, "_transform", _transform)


def nothing_above_the_window(patch: Patch) -> None:
    transformed(patch, lambda found: setattr(found, "_above", 0.0))


def nothing_left_out(patch: Patch) -> None:
    true = composed_transform.composed
    patch.setattr(
        "affidavit.accountants.fourier.composed_delta.composed",
        lambda *given: replace(true(*given), left_out=0.0),
    )


def shorter(chosen: GridParameters, epsilon: float) -> GridParameters:
    def grid(of: Grid) -> Grid:
        return replace(of, size=max(2, int((0.5 * epsilon - of.origin) / of.step)))

    return replace(chosen, grids=tuple(map(grid, chosen.grids)))


def begun_above_zero(chosen: GridParameters, _: float) -> GridParameters:
    def grid(of: Grid) -> Grid:
        first = max(0, int(-of.origin / of.step) + 1)
        return replace(of, origin=of.origin + first * of.step, size=of.size - first)

    return replace(chosen, grids=tuple(map(grid, chosen.grids)))


def narrow(chosen: GridParameters, epsilon: float) -> GridParameters:
    def window(of: Window) -> Window:
        return replace(of, high=epsilon + 0.2, above=0.5)

    return replace(chosen, windows=tuple(map(window, chosen.windows)))


@pytest.mark.ordinary("unchanged-*")
@pytest.mark.parametrize(
    ("worse", "off"),
    [
        (unchanged, no_chords),
        (shorter, no_infinite_mass),
        (begun_above_zero, nothing_below),
        (narrow, nothing_above_the_window),
    ],
)
def test_a_term_switched_off_is_caught(
    worse: Choice,
    off: Callable[[Patch], None],
    monkeypatch: Patch,
) -> None:
    held = upper_end(COMMON, worse)
    assert is_true(COMMON, held)
    assert not is_caught(COMMON, held)
    off(monkeypatch)
    claimed = upper_end(COMMON, worse)
    assert not is_true(COMMON, claimed)
    assert is_caught(COMMON, claimed)


def test_frequencies_left_out_are_caught(monkeypatch: Patch) -> None:
    monkeypatch.setattr(composed_transform, "_NEGLIGIBLE", 0.3)
    held = upper_end(COMMON)
    assert is_true(COMMON, held)
    nothing_left_out(monkeypatch)
    claimed = upper_end(COMMON)
    assert not is_true(COMMON, claimed)
    assert is_caught(COMMON, claimed)


@pytest.mark.ordinary("0")
@pytest.mark.parametrize("stratum", [0, 1])
def test_a_stratum_left_out_is_caught(stratum: int, monkeypatch: Patch) -> None:
    """The losses that one rare release makes, or those that all make together."""
    true = evaluation.StrataCurve.upper

    def without(self: evaluation.StrataCurve, epsilon: float) -> float:
        return true(replace(self, strata=self.strata[stratum : stratum + 1]), epsilon)

    monkeypatch.setattr(evaluation.StrataCurve, "upper", without)
    claimed = upper_end(RARE)
    assert not is_true(RARE, claimed)
    assert is_caught(RARE, claimed)


def spoilt_masses(patch: Patch) -> None:
    true = Grid.cells

    def cells(self: Grid, law: LossLaw) -> Cells:
        result = true(self, law)
        return replace(result, p=result.p * (1 - 1e-2))

    patch.setattr(Grid, "cells", cells)


def spoilt_places(patch: Patch) -> None:
    true = NormalPair.cells
    patch.setattr(NormalPair, "cells", lambda self, edges: true(self, edges + 1e-2))


def spoilt_transform(patch: Patch) -> None:
    true = fft.rfft
    patch.setattr(fft, "rfft", lambda law: true(law) * (1 - 1e-2))


def spoilt_powers(patch: Patch) -> None:
    true = composed_transform.composed

    def composed(*given: Any) -> composed_transform.Spectrum:
        result = true(*given)
        return replace(result, values=result.values * 0.5)

    patch.setattr("affidavit.accountants.fourier.composed_delta.composed", composed)


def spoilt_tilt(patch: Patch) -> None:
    def less(found: ComposedTransform) -> None:
        found._log_total -= 0.5

    transformed(patch, less)


def spoilt_nodes(patch: Patch) -> None:
    def lower(found: ComposedTransform) -> None:
        found._placing -= 2e-2

    transformed(patch, lower)


@pytest.mark.ordinary("spoilt_tilt", "spoilt_nodes", "spoilt_powers")
@pytest.mark.parametrize(
    "spoilt",
    [spoilt_masses, spoilt_places, spoilt_transform, spoilt_powers, spoilt_tilt, spoilt_nodes],
)
def test_a_rounding_that_no_term_covers_is_caught(
    spoilt: Callable[[Patch], None], monkeypatch: Patch
) -> None:
    spoilt(monkeypatch)
    claimed = upper_end(COMMON)
    assert not is_true(COMMON, claimed)
    assert is_caught(COMMON, claimed)


def test_a_wrong_probability_of_a_full_lot_is_caught(monkeypatch: Patch) -> None:
    true = truncated_poisson._draw_probability
    with monkeypatch.context() as spoilt:
        spoilt.setattr(truncated_poisson, "_draw_probability", lambda *given: true(*given) * 1.5)
        truncated_poisson.Cover.of.cache_clear()
        claimed = upper_end(CUT)
    truncated_poisson.Cover.of.cache_clear()
    assert not is_true(CUT, claimed)
    assert is_caught(CUT, claimed)


def fewer_places(patch: Patch, *, counted: bool) -> None:
    """Places that hold all but some 1e-8 of a release."""
    true = AnalyticPart.of.__func__  # type: ignore[attr-defined]
    patch.setattr(AnalyticPart, "of", classmethod(lambda cls, law, _: true(cls, law, 1e-8)))
    if not counted:
        patch.setattr(AnalyticPart, "outside", (0.0, 0.0))


def coarse_rule(patch: Patch, *, counted: bool) -> None:
    """A rule of 32 intervals, too few for a bound of its error to be of use."""
    log_error = 3.0 if counted else -60.0

    def log_errors(_: AnalyticPart, orders: Array, *__: object) -> tuple[Array, int]:
        return np.full(orders.size, log_error), 32

    patch.setattr(AnalyticPart, "log_errors", log_errors)


def early_end(patch: Patch, *, counted: bool) -> None:
    """A fifth of the frequencies, and what the rest may add."""
    true = direct_inversion._last_frequency

    def end(
        releases: direct_inversion.Releases, log_moments: list[float], order: float, *rest: float
    ) -> tuple[float, float]:
        theta = 0.2 * true(releases, log_moments, order, *rest)[0]
        added = -math.log(math.pi * theta)
        for (law, count), log_moment in zip(releases, log_moments, strict=True):
            halves, weights = law.layers(order, log_moment)
            added += count * math.log1p(
                -(1 - direct_inversion._sinc_bound(theta * halves)) @ weights
            )
        return theta, added if counted else -math.inf

    patch.setattr(direct_inversion, "_last_frequency", end)


@pytest.mark.ordinary("fewer_places")
@pytest.mark.parametrize("worse", [fewer_places, coarse_rule, early_end])
def test_a_term_of_the_inversion_switched_off_is_caught(
    worse: Callable[..., None], monkeypatch: Patch
) -> None:
    both = directions(COMMON)
    with monkeypatch.context() as patch:
        worse(patch, counted=True)
        held = direct_inversion.invert_epsilon(both, DELTA)
    assert held is None or is_true(COMMON, held.upper)
    worse(monkeypatch, counted=False)
    claimed = direct_inversion.invert_epsilon(both, DELTA)
    assert claimed is not None
    assert not is_true(COMMON, claimed.upper)
    assert is_caught(COMMON, claimed.upper)
