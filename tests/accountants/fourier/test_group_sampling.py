"""Poisson samples of several records of a user, against quadrature, vectors and dp-accounting."""

from __future__ import annotations

import math
import tracemalloc
from itertools import product

import mpmath
import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution as library
from scipy.stats import binom

from affidavit.accountants import FourierAccountant, search_witness
from affidavit.accountants.fourier.group_sampling import (
    ReplacedGroupLaw,
    binomial_weights,
    group_law,
)
from affidavit.accountants.fourier.loss_laws import NormalMixtureLaw
from affidavit.checker import Unproved, Witness, prove
from affidavit.plan import events

RUNS = {
    "pairs": (2, 0.01, 1.0, 1000),
    "often": (4, 0.1, 6.0, 500),
    "many": (30, 0.01, 20.0, 300),
    "rare": (3, 1e-4, 0.8, 2000),
    "hardly ever all": (20, 0.01, 1.0, 30),
}


def leaf(
    records: int, q: float, sigma: float, pair: events.SubsampledPair = "add_remove"
) -> events.PoissonSampledGroupGaussian:
    return events.PoissonSampledGroupGaussian(
        records=records, sampling_probability=q, noise_multiplier=sigma, pair=pair
    )


def run(
    records: int, q: float, sigma: float, steps: int, pair: events.SubsampledPair = "add_remove"
) -> events.Event:
    return events.Repeated(event=leaf(records, q, sigma, pair), count=steps)


def test_numbers_of_records_are_binomial() -> None:
    for records, q in ((2, 0.3), (40, 0.01), (200, 0.5)):
        expected = binom.pmf(np.arange(records + 1), records, q)
        assert binomial_weights(records, q) == pytest.approx(expected, rel=1e-9, abs=1e-299)
    assert min(binomial_weights(200, 1e-6)) > 0


@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("name", RUNS)
def test_a_place_has_the_loss_that_was_asked_for(name: str, added: bool) -> None:
    """In forty digits, within the error that the law states."""
    records, q, sigma, _ = RUNS[name]
    law = group_law(leaf(records, q, sigma), added=added)
    edges = np.concatenate((-np.geomspace(1e-9, 30, 40)[::-1], np.geomspace(1e-9, 30, 40)))
    places = law.inverse_loss(edges)
    allowed = law._edge_roundings(edges, places) * 2.0**-53
    with mpmath.workdps(40):
        for edge, place, most in zip(edges, places, allowed, strict=True):
            if not math.isfinite(place):
                low = mpmath.log(law.weights[0])
                assert (-edge if added else edge) <= low * (1 - 1e-12)
                continue
            z = mpmath.mpf(-place if added else place)
            terms = (
                w * mpmath.exp(k * z / sigma - mpmath.mpf(k) ** 2 / sigma**2 / 2)
                for k, w in enumerate(law.weights)
            )
            exact = mpmath.log(mpmath.fsum(terms))
            assert abs((-exact if added else exact) - edge) <= most
            assert law.loss(np.array([place]))[0] == pytest.approx(edge, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("name", RUNS)
def test_a_place_of_the_symmetric_pair_has_the_loss_that_was_asked_for(name: str) -> None:
    records, q, sigma, _ = RUNS[name]
    law = group_law(leaf(records, q, sigma, "replace_one"), added=False)
    edges = np.concatenate((-np.geomspace(1e-9, 30, 30)[::-1], [0.0], np.geomspace(1e-9, 30, 30)))
    places = law.inverse_loss(edges)
    allowed = law._edge_roundings(edges, places) * 2.0**-53
    with mpmath.workdps(40):
        for edge, place, most in zip(edges, places, allowed, strict=True):
            above, below = (
                mpmath.fsum(
                    w * mpmath.exp(k * side / sigma - mpmath.mpf(k) ** 2 / sigma**2 / 2)
                    for k, w in enumerate(law.weights)
                )
                for side in (mpmath.mpf(place), -mpmath.mpf(place))
            )
            assert abs(mpmath.log(above / below) - edge) <= most


def test_one_replaced_record_is_the_pair_that_has_its_own_law() -> None:
    edges = np.linspace(-4.0, 4.0, 200)
    ours = ReplacedGroupLaw(noise_multiplier=0.8, weights=(0.97, 0.03))
    known = NormalMixtureLaw(kind="replace", noise_multiplier=0.8, sampling_probability=0.03)
    for tails, expected in zip(ours.tails(edges), known.tails(edges), strict=True):
        assert tails == pytest.approx(expected, rel=1e-9)


@pytest.mark.soak
def test_no_replacements_of_a_users_records_exceed_the_symmetric_pair() -> None:
    """On the plane, by quadrature: random vectors, and those of the pair itself."""
    draw = np.random.default_rng(8)
    sigma, q, records = 1.6, 0.3, 3
    axis = np.arange(-13.0, 13.0, 0.1)
    grid = np.stack(np.meshgrid(axis, axis), axis=-1)
    curve = FourierAccountant().curve(leaf(records, q, sigma, "replace_one"))

    def density(vectors: np.ndarray) -> np.ndarray:
        total = np.zeros(grid.shape[:2])
        for drawn in product((0, 1), repeat=records):
            chance = q ** sum(drawn) * (1 - q) ** (records - sum(drawn))
            away = grid - np.array(drawn) @ vectors / sigma
            total += chance * np.exp(-(away**2).sum(-1) / 2) / (2 * np.pi)
        return total * 0.1**2

    def delta(one: np.ndarray, other: np.ndarray, alpha: float) -> float:
        return float(np.maximum(density(one) - alpha * density(other), 0).sum())

    aligned = np.array([[1.0, 0.0]] * records)
    for epsilon in (0.0, 0.4, 1.5):
        bracket, alpha = curve.delta(epsilon), math.exp(epsilon)
        assert delta(aligned, -aligned, alpha) == pytest.approx(bracket.upper, abs=1e-3)
        for _ in range(10):
            one, other = draw.normal(size=(2, records, 2))
            one, other = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in (one, other))
            assert delta(one, other, alpha) <= bracket.upper + 1e-3
            assert delta(aligned, other, alpha) <= bracket.upper + 1e-3


@pytest.mark.ordinary("not many")
@pytest.mark.parametrize("name", RUNS)
def test_one_release_is_its_curve(name: str) -> None:
    """δ of one release in eighty digits, the larger of both directions."""
    records, q, sigma, _ = RUNS[name]
    weights = binomial_weights(records, q)
    epsilon = 0.3
    with mpmath.workdps(80):

        def ratio(z: mpmath.mpf) -> mpmath.mpf:
            return mpmath.fsum(
                w * mpmath.exp(k * z / sigma - mpmath.mpf(k) ** 2 / sigma**2 / 2)
                for k, w in enumerate(weights)
            )

        def cut(level: mpmath.mpf) -> tuple[mpmath.mpf, mpmath.mpf, mpmath.mpf]:
            """P above, P below and Q below the place where the ratio is ``level``.

            Weights are doubles, and add up to one but for rounding.
            """
            low, high = mpmath.mpf(-60), mpmath.mpf(60 + records)
            for _ in range(300):
                z = (low + high) / 2
                low, high = (low, z) if ratio(z) > level else (z, high)
            above, below = (
                mpmath.fsum(
                    w * mpmath.ncdf(side * (z - mpmath.mpf(k) / sigma))
                    for k, w in enumerate(weights)
                )
                for side in (-1, 1)
            )
            return above, below, mpmath.ncdf(z)

        alpha = mpmath.exp(epsilon)
        above, _, q_mass = cut(alpha)
        removed = above - alpha * (1 - q_mass)
        added = mpmath.mpf(0)
        if 1 / alpha > weights[0]:
            _, below, q_mass = cut(1 / alpha)
            added = q_mass - alpha * below
        exact = float(max(removed, added))
    bracket = FourierAccountant().curve(leaf(records, q, sigma)).delta(epsilon)
    assert bracket.lower <= exact * (1 + 1e-9)
    assert exact <= bracket.upper * (1 + 1e-9)


def test_no_vectors_of_a_users_records_exceed_the_pair() -> None:
    """Both directions in the plane, by quadrature, for random vectors and for aligned ones."""
    draw = np.random.default_rng(3)
    sigma, q, records = 1.3, 0.3, 3
    axis = np.arange(-12.0, 12.0, 0.06)
    grid = np.stack(np.meshgrid(axis, axis), axis=-1)
    density = np.exp(-(grid**2).sum(-1) / 2) / (2 * np.pi) * 0.06**2
    curve = FourierAccountant().curve(leaf(records, q, sigma))

    def worst(vectors: np.ndarray, alpha: float) -> float:
        ratio = np.zeros(grid.shape[:2])
        for drawn in product((0, 1), repeat=records):
            chance = q ** sum(drawn) * (1 - q) ** (records - sum(drawn))
            mean = np.array(drawn) @ vectors / sigma
            ratio += chance * np.exp(grid @ mean - mean @ mean / 2)
        sides = np.maximum(ratio - alpha, 0), np.maximum(1 - alpha * ratio, 0)
        return max(float((density * side).sum()) for side in sides)

    for epsilon in (0.1, 0.7, 1.5):
        bound = curve.delta(epsilon).upper
        for _ in range(8):
            angles, lengths = draw.uniform(0, 2 * np.pi, records), draw.uniform(0, 1, records)
            vectors = lengths[:, None] * np.stack((np.cos(angles), np.sin(angles)), axis=-1)
            assert worst(vectors, math.exp(epsilon)) <= bound * (1 + 1e-6)
        aligned = np.tile([1.0, 0.0], (records, 1))
        assert worst(aligned, math.exp(epsilon)) == pytest.approx(bound, rel=1e-3)


@pytest.mark.soak
def test_dp_accounting_encloses_the_same_run() -> None:
    records, q, sigma, steps, delta = 3, 0.05, 3.0, 20, 1e-5
    bracket = FourierAccountant().curve(run(records, q, sigma, steps)).epsilon(delta)
    pld = library.from_mixture_gaussian_mechanism(
        sigma,
        range(records + 1),
        binom.pmf(range(records + 1), records, q),
        value_discretization_interval=2e-3,
    ).self_compose(steps)
    assert bracket.lower <= pld.get_epsilon_for_delta(delta)
    assert pld.get_epsilon_for_delta(delta) == pytest.approx(bracket.upper, rel=0.02)


@pytest.mark.ordinary("add_remove-pairs")
@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("pair", ["add_remove", "replace_one"])
def test_the_checker_proves_it_and_nothing_below_it(pair: events.SubsampledPair, name: str) -> None:
    event = run(*RUNS[name], pair)
    bracket = FourierAccountant().curve(event).epsilon(1e-6)
    assert bracket.upper <= bracket.lower * 1.001
    witness, proof = search_witness(event, bracket, 1e-6, 1e-3)
    row = "poisson_group" if pair == "add_remove" else "poisson_group_replace_one"
    assert proof.theorems == (row,)
    below = Witness(epsilon=repr(bracket.lower * (1 - 1e-6)), delta="1e-6", runs=witness.runs)
    with pytest.raises(Unproved):
        prove(below, event)


@pytest.mark.ordinary("not rare")
@pytest.mark.parametrize("name", ["pairs", "often", "many", "rare"])
def test_several_records_cost_more_than_one_and_less_than_all_at_once(name: str) -> None:
    records, q, sigma, steps = RUNS[name]
    ours = FourierAccountant().curve(run(records, q, sigma, steps)).epsilon(1e-6)
    any_drawn = -math.expm1(records * math.log1p(-q))

    def poisson(rate: float, noise: float) -> float:
        one = events.PoissonSubsampledGaussian(sampling_probability=rate, noise_multiplier=noise)
        return (
            FourierAccountant().curve(events.Repeated(event=one, count=steps)).epsilon(1e-6).upper
        )

    assert poisson(any_drawn, sigma) <= ours.upper * (1 + 1e-3)
    assert ours.lower <= poisson(any_drawn, sigma / records) * (1 + 1e-3)


@pytest.mark.soak
def test_a_long_grid_of_many_records_needs_no_table_of_both() -> None:
    """Losses are placed as without blocks, and in 40 MiB instead of 300."""
    replaced = group_law(leaf(200, 0.01, 300.0, "replace_one"), added=False)
    group = replaced.one_sided
    losses = np.linspace(0.01, 0.5, 40_000)
    tracemalloc.start()
    try:
        placed = group.inverse_loss(losses)
        slopes = replaced._slope(placed)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 60 * 2**20
    assert group.loss(placed) == pytest.approx(losses, rel=1e-9)
    assert placed[::4000] == pytest.approx(group.inverse_loss(losses[::4000]), rel=1e-9)
    assert slopes[::4000] == pytest.approx(replaced._slope(placed[::4000]), rel=1e-9)
