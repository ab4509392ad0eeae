"""Correlated noise over lots that are cut, by enumeration of who is drawn."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from itertools import product
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.stats import binom

from affidavit.accountants.checker import (
    CutLots,
    Draws,
    is_participation_covered,
    toeplitz_products,
)
from affidavit.accountants.fourier import FourierAccountant
from affidavit.mechanisms.lowering import Lowered, lower
from affidavit.plan import Composed, Event, Gaussian, GaussianMixture, alternatives
from affidavit.plan.parse import plan_from

STEPS = 3
MATRIX = np.tril(0.8 ** np.abs(np.subtract.outer(range(STEPS), range(STEPS))))


def lowered(adjacency: str, largest: int | None, *, lot: int = 1, **dataset: Any) -> Lowered:
    """Three steps over lots of at most ``largest`` of 12 records, with σ = 1."""
    cut = {"scheme": "truncated_poisson", "lot_size": lot, "max_lot_size": largest}
    document = {
        "version": 1,
        "adjacency": adjacency,
        "dataset": {"size": 12, **dataset},
        "sampling": {"scheme": "poisson", "lot_size": lot} if largest is None else cut,
        "steps": STEPS,
        "noise": {"kind": "bidiagonal", "lambda": 0.8},
        "releases": [{"name": "all", "clip_norm": 1.0, "noise_multiplier": 1.0}],
        "target": {"delta": 1e-5},
    }
    return lower(plan_from(document))


def bounds(run: Lowered) -> list[Event]:
    """What bounds ``run``, but for chains of neighbours."""
    events = alternatives(run.event())
    return [event.events[0] for event in events if isinstance(event, Composed)]


@pytest.mark.parametrize(
    ("adjacency", "records", "displaced"),
    [("add_remove", 1, 2), ("zero_out", 1, 1), ("add_remove", 2, 4), ("zero_out", 2, 2)],
)
def test_given_its_cut_lots_no_record_moves_the_run_further(
    adjacency: str, records: int, displaced: int
) -> None:
    user = {"unit": "user", "contributions_per_user": records} if records > 1 else {}
    run = lowered(adjacency, 7, **user)
    mixtures = [event for event in bounds(run) if isinstance(event, GaussianMixture)]
    others = 12 if adjacency == "add_remove" else 12 - records
    cut = binom.sf(7 - records, others, 1 / 12)
    chances = binom.pmf(range(records + 1), records, 1 / 12)
    farthest = displaced * np.linalg.norm(MATRIX[:, 0])
    assert len(mixtures) > 1
    for mixture in mixtures:
        spacing, weights = 1 / mixture.noise_multiplier, np.array(mixture.weights)
        beyond = weights[::-1].cumsum()[::-1] - weights
        covered = int(np.argmax(weights > 1e-299) * spacing / farthest)
        conceded = 0.0
        for hit in product((False, True), repeat=STEPS):
            # For each set of steps in which a lot is cut and the record drawn.
            told = np.array(hit)
            if told.sum() > covered:
                conceded += (cut * (1 - chances[0])) ** told.sum() * (
                    1 - cut * (1 - chances[0])
                ) ** (STEPS - told.sum())
                continue
            assert np.all(_tails(told, displaced, chances, spacing, len(beyond)) <= beyond + 1e-12)
        assert conceded <= mixture.conceded


def _tails(
    told: NDArray[np.bool_], displaced: int, chances: NDArray[np.float64], spacing: float, size: int
) -> NDArray[np.float64]:
    """P(the run is moved by more than k units), k < ``size``, no other lot being cut."""
    draws = np.array([*product(range(len(chances)), repeat=STEPS)])
    moves = np.where(told, displaced, draws)
    distances = np.linalg.norm(moves @ MATRIX.T, axis=1)
    places = np.arange(size) * spacing * (1 + 1e-12)
    return np.asarray((distances > places[:, None]) @ chances[draws].prod(axis=1))


@pytest.mark.parametrize(("adjacency", "distance"), [("add_remove", 2), ("zero_out", 1)])
def test_a_record_that_leaves_makes_place_for_another(adjacency: str, distance: int) -> None:
    """With two records for one place the run without amplification is bounded at this distance."""
    (whole,) = (
        event for event in bounds(lowered(adjacency, 4, lot=8)) if isinstance(event, Gaussian)
    )
    sensitivity = float(np.linalg.norm(MATRIX.sum(axis=1)))
    assert whole.noise_multiplier == pytest.approx(1 / (distance * sensitivity))


def test_lots_that_are_hardly_ever_cut_are_poisson_samples() -> None:
    cut, uncut = (lowered("zero_out", largest) for largest in (11, None))
    laws = [
        [event.weights for event in bounds(run) if isinstance(event, GaussianMixture)]
        for run in (cut, uncut)
    ]
    assert laws[1][0] in laws[0]
    least, most = (FourierAccountant().curve(run.attained()).delta(1.0) for run in (cut, uncut))
    assert least.lower == pytest.approx(most.lower, rel=1e-4)


def test_the_checker_takes_no_less() -> None:
    lots = CutLots(
        steps=STEPS, probability=Fraction(1, 12), largest=7, records=1, others=12, moved=2
    )

    def is_proved(law: GaussianMixture, cut: CutLots | None = lots) -> bool:
        products = toeplitz_products([1.0, 0.8, 0.64], [1.0] * STEPS, 1, inverse=False)
        draws = Draws(max_draws=STEPS, probability=Fraction(1, 12))
        return is_participation_covered(law, [(1, Fraction(1))], products, draws, cut)

    laws = bounds(lowered("add_remove", 7))
    first = next(law for law in laws if isinstance(law, GaussianMixture))
    assert is_proved(first)
    assert is_proved(first, None)
    # A little less is conceded, or a place less is displaced.
    assert not is_proved(replace(first, conceded=first.conceded * (1 - 1e-6)))
    assert not is_proved(replace(first, weights=first.weights[1:]))
