"""Rényi bounds of every release: above the truth, and near it."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from dp_accounting import NeighboringRelation
from dp_accounting.rdp import RdpAccountant as Library
from scipy.integrate import quad
from scipy.stats import norm

from affidavit.accountants.fourier.loss_laws import Kind, NormalMixtureLaw, WorseOfBothLaw
from affidavit.accountants.privacy_filter.renyi_divergences import ORDERS, divergences, log_moments
from affidavit.accountants.rdp import as_dp_event
from affidavit.plan import events

KINDS: tuple[Kind, ...] = ("remove", "add", "replace", "gaussian")


def moment(kind: Kind, q: float, sigma: float, exponent: float, distance: float = 1.0) -> float:
    """log E_P[e^(λL)] by adaptive quadrature of the two densities."""
    mu = distance / sigma
    mixtures = {
        "gaussian": ([(1, mu)], [(1, 0)]),
        "remove": ([(1 - q, 0), (q, mu)], [(1, 0)]),
        "add": ([(1, 0)], [(1 - q, 0), (q, -mu)]),
        "replace": ([(1 - q, 0), (q, mu)], [(1 - q, 0), (q, -mu)]),
    }
    above, below = mixtures[kind]

    def density(z: float, mixture: list[tuple[float, float]]) -> float:
        return math.fsum(w * float(norm.pdf(z - m)) for w, m in mixture)

    def excess(z: float) -> float:
        """q (R^α - 1 - α (R - 1)), whose integral is E_P[R^λ] - 1 and which is never negative."""
        p, q_ = density(z, above), density(z, below)
        if not p or not q_:
            return 0.0
        loss, order = math.log(p / q_), exponent + 1
        if abs(loss) < 1e-4:
            return q_ * order * exponent / 2 * loss**2 * (1 + (order + 1) / 3 * loss)
        return q_ * (math.expm1(order * loss) - order * math.expm1(loss))

    places = sorted({-9.0, 0.0, mu, mu * (1 + exponent), mu * (1 + exponent) + 9.0, 9.0})
    result = math.fsum(
        quad(excess, a, b, limit=200, epsabs=0, epsrel=1e-8)[0] for a, b in pairwise(places)
    )
    return math.log1p(result)


@pytest.mark.ordinary("0.3-0.8-remove", "0.3-0.8-gaussian")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("q", "sigma"), [(0.01, 1.0), (0.3, 0.8), (0.001, 2.0)])
def test_moments_lie_above_the_quadrature_and_near_it(kind: Kind, q: float, sigma: float) -> None:
    exponents = np.array([0.25, 1.0, 3.0, 6.5])
    rate = 1.0 if kind == "gaussian" else q
    law = NormalMixtureLaw(kind=kind, noise_multiplier=sigma, sampling_probability=rate)
    for exponent, result in zip(exponents, log_moments(law, exponents), strict=True):
        true = moment(kind, q, sigma, float(exponent))
        assert true * (1 - 1e-6) <= result <= true * (1 + 1e-3)


def test_what_dominates_both_orders_has_the_larger_moments() -> None:
    remove = NormalMixtureLaw(kind="remove", noise_multiplier=1.0, sampling_probability=0.05)
    add = NormalMixtureLaw(kind="add", noise_multiplier=1.0, sampling_probability=0.05)
    exponents = np.array([0.5, 1.0, 4.0])
    atom = 0.95 * math.erf(0.5 * math.sqrt(0.5))
    both = log_moments(WorseOfBothLaw(remove=remove, add=add, atom=atom), exponents)
    for item in (remove, add):
        assert (log_moments(item, exponents) <= both * (1 + 1e-3)).all()


def by_library(event: events.Event, relation: NeighboringRelation, orders: list[float]) -> Any:
    ledger = Library(orders, relation)
    ledger.compose(as_dp_event(event))  # type: ignore[arg-type]
    return ledger._rdp


@pytest.mark.parametrize(("q", "sigma"), [(0.01, 1.0), (0.0243, 0.72), (0.5, 5.0), (1e-4, 0.6)])
def test_poisson_agrees_with_the_library_at_whole_orders(q: float, sigma: float) -> None:
    event = events.PoissonSubsampledGaussian(sampling_probability=q, noise_multiplier=sigma)
    orders = [item for item in ORDERS if item >= 2 and item.is_integer() and item <= 256]
    result = dict(zip(ORDERS, divergences(event), strict=True))
    library = by_library(event, NeighboringRelation.ADD_OR_REMOVE_ONE, orders)
    for order, theirs in zip(orders, library, strict=True):
        assert theirs * (1 - 1e-9) <= result[order] <= theirs * (1 + 1e-3)


def test_without_replacement_is_below_the_library_where_that_is_looser() -> None:
    event = events.WithoutReplacementGaussian(
        dataset_size=1000, sample_size=20, noise_multiplier=2.0
    )
    result = dict(zip(ORDERS, divergences(event), strict=True))
    library = by_library(event, NeighboringRelation.REPLACE_ONE, [2.0, 4.0, 8.0])
    for order, theirs in zip((2.0, 4.0, 8.0), library, strict=True):
        assert moment("remove", 0.02, 2.0, order - 1, 2.0) / (order - 1) <= result[order]
        assert result[order] <= theirs


def test_laplace_agrees_with_the_library() -> None:
    event = events.Laplace(noise_multiplier=2.0)
    result = divergences(event)
    library = by_library(event, NeighboringRelation.ADD_OR_REMOVE_ONE, list(ORDERS))
    assert result == pytest.approx(library, rel=1e-9)
    assert max(result) <= 0.5 * (1 + 1e-9)


@pytest.mark.parametrize(
    ("event", "gaussian"),
    [
        (events.RandomAllocationGaussian(bins=20, noise_multiplier=1.0), 1.0),
        (events.PoissonSubsampledGaussian(
            sampling_probability=0.1, noise_multiplier=1.0, pair="replace_one"), 0.5),
        (events.TruncatedPoissonGaussian(dataset_size=1000, sampling_probability=0.05,
                                  max_lot_size=60, noise_multiplier=1.0), 0.5),
        (events.BallsInBinsGaussian(
            gram=events.Gram(((4.0, 1.0), (1.0, 1.0))), noise_multiplier=2.0), 1.0),
    ],
)  # fmt: skip
def test_sampling_never_costs_more_than_its_gaussian(event: events.Event, gaussian: float) -> None:
    """And amplification is really taken, except for correlated noise on kept bins."""
    known = divergences(events.Gaussian(noise_multiplier=gaussian))
    result = divergences(event)
    assert all(a <= b * (1 + 1e-9) for a, b in zip(result, known, strict=True))
    if not isinstance(event, events.BallsInBinsGaussian):
        assert result[ORDERS.index(2.0)] < known[ORDERS.index(2.0)] / 3


def test_a_selection_costs_what_papernot_and_steinke_say() -> None:
    run = events.Repeated(event=events.Gaussian(noise_multiplier=10.0), count=4)
    selection = events.RepeatAndSelect(event=run, mean=5.0, shape=1.0)
    library = by_library(selection, NeighboringRelation.ADD_OR_REMOVE_ONE, list(ORDERS))
    assert divergences(selection) == pytest.approx(library, rel=1e-6)
    assert divergences(selection)[20] > divergences(run)[20]


def test_counts_add_up_and_nothing_costs_nothing() -> None:
    one = events.PoissonSubsampledGaussian(sampling_probability=0.01, noise_multiplier=1.0)
    two = events.Laplace(noise_multiplier=3.0)
    parts = np.array(divergences(one)) * 70 + np.array(divergences(two)) * 2
    run = events.Composed(events=(two, events.Repeated(event=one, count=70), two))
    assert divergences(run) == pytest.approx(parts, rel=1e-11)
    assert set(divergences(events.Composed(events=()))) == {0.0}


def test_divergences_grow_with_the_order() -> None:
    for event in (
        events.PoissonSubsampledGaussian(sampling_probability=0.01, noise_multiplier=1.0),
        events.RandomAllocationGaussian(bins=20, noise_multiplier=1.0),
    ):
        result = [divergence for divergence in divergences(event) if math.isfinite(divergence)]
        assert all(a <= b * (1 + 1e-4) for a, b in pairwise(result))
