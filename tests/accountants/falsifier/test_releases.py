"""One release of each kind is certified for no less than any data set shows.

Here the bound is the product's, so that laws without a row are attacked too: users in lots that are
cut or of a fixed size, replaced records in bins and in shuffled lots, and bins of a last, partial
pass. A direction at α < 1 is the other at 1/α.
"""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from affidavit.accountants.registry import accountant
from affidavit.plan import events
from tests.accountants.falsifier.data_sets import (
    Pair,
    fixed_lots,
    laws,
    poisson_lots,
    random_bins,
    random_data_set,
    random_lots,
)
from tests.accountants.falsifier.hockey_sticks import Law, excesses
from tests.accountants.falsifier.rows import Case, table
from tests.accountants.falsifier.search import RELATIVE, random_release
from tests.support.random_seeds import seeded

ROWS = table()
WITHOUT_A_ROW = (
    "users in cut lots, add_remove",
    "users in cut lots, zero_out",
    "users in cut lots, replace_one",
    "users in fixed lots, zero_out",
    "users in fixed lots, replace_one",
    "replaced in bins",
    "bins of a last, partial pass",
    "in place of another, replace_one",
    "in place of another, zero_out",
)


def random_event(name: str, draw: random.Random) -> tuple[events.Event, Pair, float]:
    """A release of the kind of a row, or of another; what data sets show; and its noise."""
    if name in ROWS:
        case, _, pair = random_release(ROWS[name], draw)
        return event(case), pair, case.sigma
    sigma, records = math.exp(draw.uniform(-0.7, 1.3)), draw.choice((2, 3))
    if name == "replaced in bins":
        case = Case("ReplacedAllocationGaussian", sigma, bins=draw.choice((2, 3)))
        return event(case), random_bins(draw, case, replaced=True), sigma
    if name == "bins of a last, partial pass":
        case = Case("RandomAllocationGaussian", sigma, bins=draw.choice((2, 3)))
        longer, whole = draw.randrange(1, case.bins), draw.choice((1, 2, 5))
        # The sums of a bin over their number's root.
        scale = np.sqrt(np.where(np.arange(case.bins) < longer, whole + 1, whole))
        last = events.RandomAllocationGaussian(
            bins=case.bins,
            noise_multiplier=sigma / math.sqrt(whole + 1),
            attained_at=sigma / math.sqrt(whole),
            longer=longer,
        )
        stretched = (Law(law.centres * scale, law.weights) for law in random_bins(draw, case))
        return last, tuple(stretched), sigma  # type: ignore[return-value]
    if name.startswith("in place of another"):
        place, lot, lots = name.rpartition(" ")[2], draw.choice((1, 2)), draw.choice((1, 2, 2, 3))
        size = min(lot * lots + draw.choice((1, 1, 2)), 7)
        case = Case(
            "ReplacedAllocationGaussian",
            sigma,
            where={"place": place},
            size=size,
            lot=lot,
            bins=min(lots, (size - 1) // lot),
        )
        return event(case), random_lots(draw, case, place), sigma
    neighbours = name.rpartition(" ")[2]
    others = draw.choice((1, 2, 4, 30))
    size = others + (0 if neighbours == "add_remove" else records)
    lot, q = draw.randint(1, max(1, size - 1)), draw.uniform(0.05, 0.9)
    data = random_data_set(draw, records, others, neighbours, draw.choice((1, 1, 1, 2)))
    if name.startswith("users in fixed lots"):
        fixed = events.WithoutReplacementGroupGaussian(
            records=records,
            dataset_size=size,
            sample_size=lot,
            noise_multiplier=sigma,
            zeroed=neighbours == "zero_out",
        )
        return fixed, laws(data, fixed_lots(lot)), sigma
    cut = events.TruncatedPoissonGroupGaussian(
        records=records,
        dataset_size=size,
        sampling_probability=q,
        max_lot_size=lot,
        noise_multiplier=sigma,
        neighbours=neighbours,  # type: ignore[arg-type]
    )
    return cut, laws(data, poisson_lots(q, lot)), sigma


def event(case: Case) -> events.Event:
    """The product's event for a case."""
    noise = {"noise_multiplier": case.sigma, **case.where}
    sampled = {"sampling_probability": case.q, **noise}
    match case.release:
        case "Gaussian":
            return events.Gaussian(**noise)  # type: ignore[arg-type]
        case "PoissonSubsampledGaussian":
            return events.PoissonSubsampledGaussian(**sampled)
        case "PoissonSampledGroupGaussian":
            return events.PoissonSampledGroupGaussian(records=len(case.weights) - 1, **sampled)
        case "GaussianMixture":
            return events.GaussianMixture(weights=case.weights, conceded=case.conceded, **noise)
        case "WithoutReplacementGaussian":
            return events.WithoutReplacementGaussian(
                dataset_size=case.size, sample_size=case.lot, **noise
            )
        case "TruncatedPoissonGaussian":
            return events.TruncatedPoissonGaussian(
                dataset_size=case.size, max_lot_size=case.lot, **sampled
            )
        case "RandomAllocationGaussian":
            return events.RandomAllocationGaussian(
                bins=case.bins, released=case.released or None, **noise
            )
        case "ReplacedAllocationGaussian":
            drawn = case.bins * case.lot / case.size if case.size else 1.0
            return events.ReplacedAllocationGaussian(bins=case.bins, drawn=drawn, **noise)  # type: ignore[arg-type]
        case unknown:
            raise AssertionError(f"no event for a release of the kind {unknown}")


@pytest.mark.by_turns
@pytest.mark.ordinary("not *truncated_*", "not *in cut lots*", "not *fixed lots, replace*")
@pytest.mark.parametrize("name", [*ROWS, *WITHOUT_A_ROW])
def test_no_data_set_shows_more_than_a_release_is_certified_for(name: str) -> None:
    draw = random.Random(seeded(name))
    for _ in range(2):
        release, pair, sigma = random_event(name, draw)
        allocated = events.RandomAllocationGaussian, events.ReplacedAllocationGaussian
        engine = "allocation" if isinstance(release, allocated) else "fourier"
        curve = accountant(engine).curve(release)
        for over, under in (pair, pair[::-1]):
            alphas, truth = excesses(over, under, sigma)
            telling = np.flatnonzero((alphas >= 1) & (alphas < 1e12) & (truth > 1e-8))
            for place in draw.sample(telling.tolist(), min(1, len(telling))):
                bound = curve.delta(math.log(alphas[place])).upper
                assert truth[place] <= bound * (1 + RELATIVE), (release, alphas[place])
