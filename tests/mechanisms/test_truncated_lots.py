"""Correlated noise over lots that are cut, by enumeration of who is drawn."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from fractions import Fraction
from itertools import combinations, product
from typing import Any

import numpy as np
import pytest
from flint import arb
from numpy.typing import NDArray
from scipy.stats import binom

from affidavit.accountants.fourier_accountant import FourierAccountant, run_curve
from affidavit.accountants.protocol import PrivacyCurve
from affidavit.checker import participation
from affidavit.mechanisms.lowering import Lowered, lower
from affidavit.mechanisms.truncated_lots import truncated_draw_counts
from affidavit.plan import events
from affidavit.plan.parse import plan_from
from tests.support.random_seeds import examples, seeded

STEPS = 3
MATRIX = np.tril(0.8 ** np.abs(np.subtract.outer(range(STEPS), range(STEPS))))


def document(
    adjacency: str, largest: int | None, *, probability: float, steps: int, **dataset: Any
) -> dict[str, Any]:
    """A plan of lots of at most ``largest`` records, with σ = 1."""
    cut = {"scheme": "truncated_poisson", "max_lot_size": largest}
    sampling = {"scheme": "poisson"} if largest is None else cut
    return {
        "version": 1,
        "adjacency": adjacency,
        "dataset": dataset,
        "sampling": {**sampling, "probability": probability},
        "steps": steps,
        "noise": {"kind": "bidiagonal", "lambda": 0.8},
        "releases": [{"name": "all", "clip_norm": 1.0, "noise_multiplier": 1.0}],
        "target": {"delta": 1e-5},
    }


def lowered(adjacency: str, largest: int | None, *, lot: int = 1, **dataset: Any) -> Lowered:
    """Three steps over lots of at most ``largest`` of 12 records, with σ = 1."""
    sizes = {"size": 12, **dataset}
    plan = document(adjacency, largest, probability=lot / 12, steps=STEPS, **sizes)
    return lower(plan_from(plan))


def bounds(run: Lowered) -> list[events.Event]:
    """What bounds ``run``, but for chains of neighbours."""
    members = events.alternatives(run.event())
    return [event.events[0] for event in members if isinstance(event, events.Composed)]


@pytest.mark.parametrize("records", [1, 2])
@pytest.mark.parametrize("adjacency", ["add_remove", "zero_out"])
def test_given_its_cut_lots_no_record_moves_the_run_further(adjacency: str, records: int) -> None:
    run = lowered(adjacency, 7, **_user(records))
    mixtures = [event for event in bounds(run) if isinstance(event, events.GaussianMixture)]
    moved = 2 if adjacency == "add_remove" else 1
    others = 12 if adjacency == "add_remove" else 12 - records
    cut = binom.sf(7 - records, others, 1 / 12)
    chances = binom.pmf(range(records + 1), records, 1 / 12)
    told = [mixture for mixture in mixtures if mixture.weights[0] < 1e-200]
    assert told
    assert len(mixtures) > len(told)
    for mixture in told:
        spacing, weights = 1 / mixture.noise_multiplier, np.array(mixture.weights)
        beyond = weights[::-1].cumsum()[::-1] - weights
        longest = np.linalg.norm(MATRIX[:, 0])
        covered = int(np.argmax(weights > 1e-200) * spacing / longest / moved)
        conceded = 0.0
        # For all draws of the unit into lots that are cut, and none into those that are not.
        for revealed in product(range(records + 1), repeat=STEPS):
            draws = np.array(revealed)
            if draws.sum() > covered:
                drawn = np.where(draws > 0, cut * chances[draws], 1 - cut * (1 - chances[0]))
                conceded += drawn.prod()
                continue
            assert np.all(_tails(moved * draws, chances, spacing, len(beyond)) <= beyond + 1e-12)
        assert conceded <= mixture.conceded


def _user(records: int) -> dict[str, Any]:
    return {"unit": "user", "contributions_per_user": records} if records > 1 else {}


def _tails(
    told: NDArray[np.int_], chances: NDArray[np.float64], spacing: float, size: int
) -> NDArray[np.float64]:
    """P(the run is moved by more than k units), k < ``size``, no other lot being cut."""
    draws = np.array([*product(range(len(chances)), repeat=STEPS)])
    moves = np.where(told > 0, told, draws)
    distances = np.linalg.norm(moves @ MATRIX.T, axis=1)
    places = np.arange(size) * spacing * (1 + 1e-12)
    return np.asarray((distances > places[:, None]) @ chances[draws].prod(axis=1))


EDGE = np.linspace(-11.0, 11.0, 111)
GRID = np.stack(np.meshgrid(EDGE, EDGE, indexing="ij"), axis=-1).reshape(-1, 2)
CELL = float(EDGE[1] - EDGE[0]) ** 2
TWO_STEPS = MATRIX[:2, :2]


def _lots(records: int, q: float, largest: int) -> dict[tuple[int, ...], float]:
    """Every lot with its chance: a Poisson sample, of which ``largest`` are left at random."""
    result: dict[tuple[int, ...], float] = {}
    for number in range(records + 1):
        for sample in combinations(range(records), number):
            parts = [*combinations(sample, min(number, largest))]
            for part in parts:
                chance = q**number * (1 - q) ** (records - number) / len(parts)
                result[part] = result.get(part, 0.0) + chance
    return result


def _density(gradients: NDArray[np.float64], q: float, largest: int) -> NDArray[np.float64]:
    """The density of two steps at σ = 1; a record's gradient by step, shape (records, 2)."""
    result = np.zeros(len(GRID))
    lots = _lots(len(gradients), q, largest).items()
    sums: list[dict[float, float]] = [{}, {}]
    for step, law in enumerate(sums):
        for lot, chance in lots:
            place = round(float(gradients[list(lot), step].sum()), 9)
            law[place] = law.get(place, 0.0) + chance
    for (one, first), (two, second) in product(sums[0].items(), sums[1].items()):
        squares = ((GRID - TWO_STEPS @ [one, two]) ** 2).sum(axis=1)
        result += first * second * np.exp(-squares / 2) / (2 * np.pi)
    return result


@pytest.mark.by_turns
@pytest.mark.parametrize("records", [1, 2])
@pytest.mark.parametrize("adjacency", ["add_remove", "zero_out", "replace_one"])
def test_no_data_sets_cost_more_where_most_lots_are_cut(adjacency: str, records: int) -> None:
    draw, size, epsilons = random.Random(seeded(20)), 4, (0.05, 0.3, 1.0, 2.5)
    plan = document(adjacency, 1, probability=0.35, steps=2, size=size, **_user(records))
    members = [
        one for one in bounds(lower(plan_from(plan))) if not isinstance(one, events.Repeated)
    ]
    upper: list[PrivacyCurve] = [
        run_curve(one) or FourierAccountant().curve(one) for one in members
    ]
    assert len(upper) >= {"add_remove": 3, "replace_one": 4, "zero_out": 5}[adjacency]
    limits = [[curve.delta(at).upper for curve in upper] for at in epsilons]
    others = size if adjacency == "add_remove" else size - records
    for trial in range(examples(12)):
        signs = (1.0, -1.0) if trial % 2 else (1.0, -1.0, 0.0)
        rest = np.array([[draw.choice(signs) for _ in "ab"] for _ in range(others)])
        if trial < 4:
            rest = np.full((others, 2), [-1.0, -1.0] if trial < 2 else [1.0, -1.0])
        unit = np.array([[draw.choice(signs[:2]) for _ in "ab"] for _ in range(records)])
        unit = np.ones((records, 2)) if trial < 4 else unit
        instead = {"add_remove": unit[:0], "zero_out": 0 * unit, "replace_one": -unit}[adjacency]
        one, other = (_density(np.concatenate([rest, own]), 0.35, 1) for own in (unit, instead))
        for at, most in zip(epsilons, limits, strict=True):
            for p, r in ((one, other), (other, one)):
                truth = float(np.maximum(p - math.exp(at) * r, 0).sum()) * CELL
                assert truth <= min(most) * (1 + 1e-4) + 1e-9


@pytest.mark.parametrize(("adjacency", "distance"), [("add_remove", 2), ("zero_out", 1)])
def test_a_record_that_leaves_makes_place_for_another(adjacency: str, distance: int) -> None:
    """With two records for one place the run without amplification is bounded at this distance."""
    (whole,) = (
        event
        for event in bounds(lowered(adjacency, 4, lot=8))
        if isinstance(event, events.Gaussian)
    )
    sensitivity = float(np.linalg.norm(MATRIX.sum(axis=1)))
    assert whole.noise_multiplier == pytest.approx(1 / (distance * sensitivity))


def test_lots_that_are_hardly_ever_cut_are_poisson_samples() -> None:
    cut, uncut = (lowered("zero_out", largest) for largest in (11, None))
    laws = [
        [event.weights for event in bounds(run) if isinstance(event, events.GaussianMixture)]
        for run in (cut, uncut)
    ]
    assert laws[1][0] in laws[0]
    least, most = (FourierAccountant().curve(run.attained()).delta(1.0) for run in (cut, uncut))
    assert least.lower == pytest.approx(most.lower, rel=1e-4)


def test_the_checker_takes_no_less() -> None:
    lots = participation.CutLots(
        steps=STEPS, probability=Fraction(1, 12), largest=7, records=1, others=12, moved=2
    )

    def is_proved(law: events.GaussianMixture, cut: participation.CutLots | None = lots) -> bool:
        products = participation.toeplitz_products(
            [1.0, 0.8, 0.64], [1.0] * STEPS, 1, inverse=False
        )
        draws = participation.Draws(max_draws=STEPS, probability=Fraction(1, 12))
        return participation.is_participation_covered(law, [(1, Fraction(1))], products, draws, cut)

    laws = bounds(lowered("add_remove", 7))
    first = next(law for law in laws if isinstance(law, events.GaussianMixture))
    assert is_proved(first)
    assert is_proved(first, None)
    # A little less is conceded, or a place less is displaced.
    assert not is_proved(replace(first, conceded=first.conceded * (1 - 1e-6)))
    assert not is_proved(replace(first, weights=first.weights[1:]))


def test_draws_into_cut_lots_are_counted_as_the_checker_does() -> None:
    draw = random.Random(seeded(17))
    for _ in range(examples(8)):
        records, steps = draw.choice((2, 3, 26)), draw.choice((3, 40, 5000))
        others, q = draw.randint(100, 5000), draw.uniform(0.002, 0.02)
        largest = int(others * q + draw.uniform(2, 6) * math.sqrt(others * q)) + records
        leaf = events.TruncatedPoissonGroupGaussian(
            records=records,
            dataset_size=others,
            sampling_probability=q,
            max_lot_size=largest,
            noise_multiplier=1.0,
        )
        lots = participation.CutLots(
            steps=steps,
            probability=Fraction(q),
            largest=largest,
            records=records,
            others=others,
            moved=2,
        )
        for number, more in truncated_draw_counts(leaf, steps).items():
            proved, excess = lots.fewest(arb(more))
            assert proved == number
            assert more * (1 - 1e-6) <= float(excess) <= more
