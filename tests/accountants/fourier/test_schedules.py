"""Runs of very many kinds of release: brackets that hold what each release by itself would give."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from scipy.special import erf, ndtr

from affidavit.accountants.fourier import schedules
from affidavit.accountants.fourier.dominating_pairs import directions
from affidavit.accountants.fourier.loss_laws import NormalMixtureLaw
from affidavit.accountants.fourier.schedules import ExtrapolatedLaw, group_kinds, merge_kinds
from affidavit.accountants.fourier_accountant import FourierAccountant, FourierCurve
from affidavit.accountants.rdp import RdpAccountant
from affidavit.plan import events


def run(sigmas: Any, rates: Any, counts: Any, pair: Any = "add_remove") -> events.Composed:
    """One kind of release for each noise multiplier, rate and count."""
    return events.Composed(
        events=tuple(
            events.Repeated(
                event=events.PoissonSubsampledGaussian(
                    noise_multiplier=float(sigma), sampling_probability=float(q), pair=pair
                ),
                count=int(count),
            )
            for sigma, q, count in zip(sigmas, rates, counts, strict=True)
        )
    )


def in_cells(
    event: events.Composed, kinds: int = schedules.MAX_KINDS, cells: int = schedules.MAX_CELLS
) -> FourierCurve:
    """The curve with more than so many kinds of release brought together."""
    return FourierAccountant()._curve(event).of(directions(event, max_kinds=kinds, max_cells=cells))


def spread(rng: np.random.Generator, kind: str, size: int) -> tuple[Any, Any]:
    """Noise multipliers and rates of a schedule."""
    sigmas = rng.uniform(0.5, 3.0) * np.exp(rng.uniform(0, rng.uniform(0.01, 0.5), size))
    rates = rng.uniform(1e-4, 0.3) * np.exp(rng.uniform(0, rng.uniform(0.01, 0.5), size))
    if kind == "noise":
        rates[:] = rates[0]
    if kind == "rate":
        sigmas[:] = sigmas[0]
    return sigmas, rates


@pytest.mark.by_turns
@pytest.mark.ordinary("*-both", "False-*")
@pytest.mark.parametrize("kind", ["noise", "rate", "both"])
@pytest.mark.parametrize("pair", ["add_remove", "replace_one"])
@pytest.mark.parametrize("lattice", [True, False])
def test_brackets_hold_the_run_taken_release_by_release(
    kind: str, pair: str, lattice: bool
) -> None:
    rng = np.random.default_rng(["noise", "rate", "both"].index(kind))
    sigmas, rates = spread(rng, kind, 8)
    event = run(sigmas, rates, rng.integers(1, 40, 8), pair)
    delta = float(10 ** rng.uniform(-9, -3))
    exact = FourierAccountant().curve(event).epsilon(delta)
    for cells in (1, 4):
        curve = in_cells(event, kinds=2, cells=cells)
        together = curve._epsilon_by_lattice(delta) if lattice else curve.epsilon(delta)
        assert together.lower <= exact.upper
        assert together.upper >= exact.lower
        assert cells == 1 or 0.2 * exact.lower < together.lower
        assert cells == 1 or together.upper < 4 * exact.upper


@pytest.mark.ordinary("noise")
@pytest.mark.parametrize("kind", ["noise", "rate"])
def test_more_cells_and_chords_leave_less_open(kind: str) -> None:
    place = np.linspace(0.0, 0.6, 260)
    sigmas = np.exp(place) if kind == "noise" else np.ones(260)
    rates = 0.01 * np.exp(place) if kind == "rate" else np.full(260, 0.01)
    widths = []
    for cells in (3, 9):
        bracket = in_cells(run(sigmas, rates, np.full(260, 20)), cells=cells).epsilon(1e-6)
        widths.append(bracket.width / bracket.upper)
    # A cell's rounding would cost a fourth of its span in either direction, and so much of ε.
    assert widths[1] < 0.4 * widths[0]
    assert widths[1] < 0.5 * 2 * 0.6 / 9


def curve_of_a_pair(epsilon: Any, mu: Any) -> Any:
    """δ at ε of a Gaussian pair."""
    return ndtr(mu / 2 - epsilon / mu) - np.exp(epsilon) * ndtr(-mu / 2 - epsilon / mu)


def test_the_curve_of_a_gaussian_pair_is_convex_in_its_total_variation() -> None:
    rng = np.random.default_rng(1)
    variations = np.sort(rng.uniform(0.02, 0.95, (2000, 2)), axis=1)
    share, epsilon = rng.uniform(0, 1, 2000), rng.exponential(1.0, 2000)
    middle = variations[:, 0] * (1 - share) + variations[:, 1] * share

    def at(x: Any) -> Any:
        from scipy.special import erfinv

        return curve_of_a_pair(epsilon, 2 * math.sqrt(2) * erfinv(x))

    chord = (1 - share) * at(variations[:, 0]) + share * at(variations[:, 1])
    assert np.all(at(middle) <= chord + 1e-14)
    # In the noise itself, or in μ², it is not: what is checked above could fail.
    mu = np.array([0.5, 1.0, 1.5])
    low, center, high = curve_of_a_pair(0.0, mu)
    assert center > (low + high) / 2
    assert math.isclose(float(erf(0.5 / math.sqrt(8))), low, rel_tol=1e-12)


@pytest.mark.ordinary("noise-add", "rate-remove")
@pytest.mark.parametrize("side", ["remove", "add"])
@pytest.mark.parametrize("kind", ["noise", "rate"])
def test_a_line_through_two_curves_is_below_the_third_by_quadrature(side: Any, kind: str) -> None:
    def law(place: float) -> NormalMixtureLaw:
        sigma, q = (1.0 - place, 0.1) if kind == "noise" else (1.0, 0.1 * (1 + place))
        return NormalMixtureLaw(kind=side, noise_multiplier=sigma, sampling_probability=q)

    def exactly(one: NormalMixtureLaw, alpha: float) -> float:
        z = np.linspace(-12, 14, 200_001)

        def density(mixture: Any) -> Any:
            return sum(w * np.exp(-((z - m) ** 2) / 2) for w, m in mixture) / math.sqrt(2 * math.pi)

        gain = density(one.p_mixture) - alpha * density(one.q_mixture)
        return float(np.trapezoid(np.maximum(0.0, gain), z))

    lower, near, beyond = law(0.0), law(0.02), law(0.04)
    if kind == "noise":
        x = [math.erf(1 / (one.noise_multiplier * math.sqrt(8))) for one in (lower, near, beyond)]
        share = (x[2] - x[1]) / (x[1] - x[0])
    else:
        share = 1.0
    line = ExtrapolatedLaw(lower=lower, near=near, share=share)
    losses = np.linspace(-0.09, 0.6, 7) * (1 if side == "remove" else -1)
    losses.sort()
    p, q = line.tails(losses)
    for place, loss in enumerate(losses):
        alpha = math.exp(loss)
        value = float(p[place] - alpha * q[place])
        expected = (1 + share) * exactly(near, alpha) - share * exactly(lower, alpha)
        assert value == pytest.approx(expected, abs=1e-7)
        assert value <= exactly(beyond, alpha) + 1e-8
    cells = line.cells(losses)
    assert cells.p.sum() == pytest.approx(1.0, abs=1e-12)
    assert cells.q.sum() == pytest.approx(1.0, abs=1e-12)
    assert np.all(cells.p >= 0)


def test_few_kinds_are_taken_one_by_one_and_gaussians_of_many_as_one() -> None:
    few = [(events.Gaussian(noise_multiplier=1.0 + n), 1) for n in range(schedules.MAX_KINDS)]
    assert group_kinds(few) == (few, [])
    many = [
        (events.Gaussian(noise_multiplier=20.0 + n / 10), 3) for n in range(schedules.MAX_KINDS + 1)
    ]
    (one, count), *more = merge_kinds(many)
    assert (count, more) == (1, [])
    assert isinstance(one, events.Gaussian)
    total = sum(3 / leaf.noise_multiplier**2 for leaf, _ in many)
    assert one.noise_multiplier == pytest.approx(total**-0.5, rel=1e-12)
    assert one.noise_multiplier < total**-0.5


def test_every_release_of_a_schedule_is_counted_once() -> None:
    rng, size = np.random.default_rng(2), 700
    sigmas = np.exp(rng.uniform(0, 1.5, size))
    rates = 0.01 * np.exp(rng.uniform(0, 1.0, size))
    counts = rng.integers(1, 9, size)
    event = run(sigmas, rates, counts)
    for direction in directions(event):
        assert sum(count for _, count in direction.laws) == counts.sum()
        assert len(direction.laws) == len(direction.attained) == schedules.MAX_CELLS


@pytest.mark.soak
def test_the_renyi_bound_of_a_schedule_is_above_its_bracket(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(schedules, "MAX_CELLS", 12)
    event = run(np.linspace(1.0, 1.4, 400), np.full(400, 0.02), np.ones(400))
    bracket = FourierAccountant().curve(event).epsilon(1e-6)
    renyi = RdpAccountant().curve(event).epsilon(1e-6)
    assert bracket.width <= 0.05 * bracket.upper
    assert bracket.upper < renyi.upper < 1.5 * bracket.upper


@pytest.mark.soak
@pytest.mark.parametrize("by_lattice", [False, True])
def test_a_long_schedule_is_taken_release_by_release(by_lattice: bool) -> None:
    event = run(np.geomspace(0.7, 1.4, 260), np.full(260, 0.01), np.full(260, 4))
    exact = FourierAccountant().curve(event).epsilon(1e-6)
    assert exact.width < 1e-7
    other = in_cells(event, kinds=1000 if by_lattice else schedules.MAX_KINDS)
    wider = other._epsilon_by_lattice(1e-6)
    assert wider.lower <= exact.lower < exact.upper <= wider.upper


@pytest.mark.soak
def test_runs_of_the_same_cells_have_answers_of_their_own() -> None:
    first, second = (
        FourierAccountant()._curve(run(np.geomspace(0.7, 1.4, 260), np.full(260, q), [4] * 260))
        for q in (0.01, 0.011)
    )
    other = dataclasses.replace(first, finer=second.finer)
    assert first.epsilon(1e-6).upper < other.epsilon(1e-6).lower
