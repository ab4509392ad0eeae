"""Every bracket lies inside the wider ones, and a wide one costs less."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest

from affidavit.accountants.bracket import Bracket
from affidavit.accountants.fourier import refinement
from affidavit.accountants.fourier.evaluation import StrataCurve, bounding_curves
from affidavit.accountants.fourier.grid_parameters import GridParameters, Laws
from affidavit.accountants.fourier.refinement import COARSE_WIDTHS, nested
from affidavit.accountants.fourier_accountant import FourierAccountant
from affidavit.plan import events

WIDTHS = (1e-1, 3e-2, 1e-2, 1e-3, 5e-4, 1e-4, 1e-5)
LEAVES: list[tuple[events.Event, int, float]] = [
    (events.PoissonSubsampledGaussian(sampling_probability=0.02, noise_multiplier=1.0), 500, 1e-6),
    (
        events.PoissonSubsampledGaussian(sampling_probability=0.002, noise_multiplier=0.5),
        2000,
        1e-9,
    ),
    (events.PoissonSubsampledGaussian(sampling_probability=1e-4, noise_multiplier=1.0), 50, 1e-6),
    (
        events.WithoutReplacementGaussian(dataset_size=1000, sample_size=30, noise_multiplier=2.0),
        200,
        1e-5,
    ),
    (
        events.TruncatedPoissonGaussian(
            dataset_size=1000, sampling_probability=0.03, max_lot_size=35, noise_multiplier=2.0
        ),
        200,
        1e-5,
    ),
]


pytestmark = pytest.mark.usefixtures("lattice_alone")


@pytest.mark.ordinary("leaf0*")
@pytest.mark.parametrize(("leaf", "steps", "delta"), LEAVES)
def test_a_narrower_bracket_lies_inside_every_wider_one(
    leaf: events.Event, steps: int, delta: float
) -> None:
    event = events.Repeated(event=leaf, count=steps)
    finest = FourierAccountant(relative_width=WIDTHS[-1]).curve(event).epsilon(delta)
    epsilons, deltas = [], []
    for width in WIDTHS:
        curve = FourierAccountant(relative_width=width).curve(event)
        epsilons.append(curve.epsilon(delta))
        deltas.append(curve.delta(finest.upper))
    for result in (epsilons, deltas):
        for outer, inner in itertools.pairwise(result):
            assert outer.lower <= inner.lower <= inner.upper <= outer.upper
    if isinstance(leaf, events.PoissonSubsampledGaussian):
        for width, of_epsilon, of_delta in zip(WIDTHS, epsilons, deltas, strict=True):
            assert of_epsilon.width <= max(width * of_epsilon.upper, 1e-6)
            assert of_delta.width <= width * of_delta.upper


@pytest.mark.soak
def test_a_wide_bracket_takes_fewer_points(monkeypatch: pytest.MonkeyPatch) -> None:
    points: list[int] = []

    def counted(
        laws: Laws, parameters: GridParameters, *, lower: bool = True
    ) -> tuple[StrataCurve, StrataCurve]:
        points.append(parameters.points)
        return bounding_curves(laws, parameters, lower=lower)

    monkeypatch.setattr(refinement, "bounding_curves", counted)
    leaf = events.PoissonSubsampledGaussian(sampling_probability=1e-3, noise_multiplier=0.7)
    totals = []
    for width in (1e-1, 1e-2, 1e-3, 1e-4):
        points.clear()
        curve = FourierAccountant(relative_width=width).curve(
            events.Repeated(event=leaf, count=100_000)
        )
        curve.epsilon(1e-10)
        curve.delta(5.0)
        totals.append(sum(points))
    assert totals == sorted(totals)
    assert 10 * totals[0] < totals[-1]


def test_an_answer_that_breaks_its_promise_is_cut_with_the_coarse_ones() -> None:
    requested: list[tuple[float, ...]] = []

    def stubborn(widths: Sequence[float]) -> Bracket:
        requested.append(tuple(widths))
        wide = 0.3 if widths[-1] <= 1e-4 else widths[-1]
        return Bracket(lower=1.0 - wide / 2, upper=1.0 + wide / 2)

    coarse = [nested(stubborn, width) for width in COARSE_WIDTHS]
    fine = nested(stubborn, 1e-4)
    for outer in coarse:
        assert outer.lower <= fine.lower <= fine.upper <= outer.upper
    assert fine.width <= COARSE_WIDTHS[-1] * 1.001


def test_far_beyond_the_requested_delta_a_nearer_epsilon_bounds_it() -> None:
    step = events.PoissonSubsampledGaussian(sampling_probability=0.02, noise_multiplier=20.0)
    curve = FourierAccountant().curve(events.Repeated(event=step, count=50))
    far, near = curve.delta(4.0), curve.delta(0.09)
    assert far.lower == 0.0
    assert 0.0 < far.upper < 1.1e-26
    assert far.upper <= near.upper
