"""The search for a data set on which a release shows more than a row says.

``AFFIDAVIT_DATA_SETS`` is how many pairs of neighbours are drawn for each row.
"""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from tests.accountants.falsifier.data_sets import (
    DataSet,
    Pair,
    fixed_lots,
    laws,
    poisson_lots,
    random_bins,
    random_data_set,
    random_lots,
    random_moves,
)
from tests.accountants.falsifier.hockey_sticks import excesses
from tests.accountants.falsifier.rows import (
    Case,
    Cover,
    Direction,
    Row,
    claimed,
    conceded,
    is_cover,
    letters,
)

DATA_SETS = int(os.environ.get("AFFIDAVIT_DATA_SETS", "8"))
RELATIVE, ABSOLUTE = 1e-6, 1e-14
"""By which a claim may be below what is computed as the truth."""


@dataclass(frozen=True)
class Refutation:
    """A data set whose excess at α, ``truth``, is above what the row claims."""

    case: Case
    data: DataSet | Pair
    direction: Direction
    alpha: float
    truth: float
    claim: float


def refutations(
    row: Row,
    seed: int | str,
    draws: int,
    believed: Callable[[Case], Case] = lambda case: case,
) -> Iterator[Refutation]:
    """Those found among random releases and data sets, at the worst α of each.

    ``row`` is read for the release that a case is ``believed`` to be.
    """
    draw = random.Random(seed)
    for _ in range(draws):
        case, data, pair = random_release(row, draw)
        for direction in ("remove", "add"):
            over, under = pair if direction == "remove" else pair[::-1]
            alphas, truth = excesses(over, under, case.sigma)
            claim = claimed(row, believed(case), direction, alphas)
            wrong = truth - claim * (1 + RELATIVE) - ABSOLUTE
            worst = int(np.argmax(np.where(wrong > 0, truth / np.maximum(claim, 1e-300), 0.0)))
            if wrong[worst] > 0:
                at = float(alphas[worst]), float(truth[worst]), float(claim[worst])
                yield Refutation(case, data, direction, *at)


def random_release(row: Row, draw: random.Random) -> tuple[Case, DataSet | Pair, Pair]:
    """A release that ``row`` covers, with data sets and what it shows of them."""
    where: Mapping[str, str] = row.get("where", {})
    case = Case(row["release"], sigma=math.exp(draw.uniform(-0.9, 1.5)), where=where)
    replaced = where.get("pair") == "replace_one"
    neighbours = "replace_one" if replaced else draw.choice(("add_remove", "zero_out"))
    dimensions = 2 if draw.random() < 0.2 else 1
    q = draw.choice((draw.uniform(0.02, 0.98), 10 ** draw.uniform(-3, -0.5)))
    match case.release:
        case "Gaussian":
            data = DataSet(((1.0,),), ((0.0,),), ())
            return case, data, laws(data, fixed_lots(1))
        case "PoissonSubsampledGaussian":
            case = replace(case, q=q)
            data = random_data_set(draw, 1, draw.choice((0, 0, 1, 4)), neighbours, dimensions)
            return case, data, laws(data, poisson_lots(q))
        case "PoissonSampledGroupGaussian":
            records = draw.choice((2, 3, 4))
            data = random_data_set(draw, records, draw.choice((0, 0, 2)), neighbours, dimensions)
            lots = poisson_lots(q)
            weights = tuple(lots(records, 0)[:, 0].tolist())
            return replace(case, q=q, weights=weights), data, laws(data, lots)
        case "GaussianMixture":
            shares = [draw.random() for _ in range(draw.choice((2, 3, 5)))]
            weights = [share / sum(shares) for share in shares[1:]]
            weights.insert(0, 1 - math.fsum(weights))
            given_up = draw.choice((0.0, 1e-6, 1e-2 * weights[0]))
            case = replace(case, weights=tuple(weights), conceded=given_up)
            moves = random_moves(draw, case, replaced)
            return case, moves, moves
        case "WithoutReplacementGaussian":
            size = draw.choice((2, 3, 5, 8, 40))
            case = replace(case, size=size, lot=draw.randrange(1, size))
            data = random_data_set(draw, 1, size - 1, "replace_one", dimensions)
            return case, data, laws(data, fixed_lots(case.lot))
        case "TruncatedPoissonGaussian":
            case = _cut_lots(row, replace(case, q=q), draw)
            fewest = -(-case.size // 2) if case.cover else 1
            others = case.size - 1
            if case.private_size:
                full = draw.random() < 0.8
                others = case.size if full else draw.randint(fewest, case.size)
            data = random_data_set(draw, 1, others, where["neighbours"], dimensions)
            return case, data, laws(data, poisson_lots(case.q, case.lot))
        case "RandomAllocationGaussian":
            bins = draw.choice((2, 2, 3, 5))
            number = bins if bins < 4 and draw.random() < 0.7 else draw.randrange(1, min(bins, 3))
            case = replace(case, bins=bins, released=0 if number == bins else number)
            thrown = random_bins(draw, case)
            return case, thrown, thrown
        case "ReplacedAllocationGaussian" if place := where.get("place"):
            lot, lots = draw.choice((1, 2)), draw.choice((1, 2, 2, 3))
            size = min(lot * lots + draw.choice((1, 1, 2)), 7)
            case = replace(case, size=size, lot=lot, bins=min(lots, (size - 1) // lot))
            placed = random_lots(draw, case, place)
            return case, placed, placed
        case "ReplacedAllocationGaussian":
            case = replace(case, bins=draw.choice((2, 3)))
            thrown = random_bins(draw, case, replaced=True)
            return case, thrown, thrown
        case unknown:
            raise AssertionError(f"no data sets for a release of the kind {unknown}")


def _cut_lots(row: Row, case: Case, draw: random.Random) -> Case:
    """Lots that are cut often, now and then, or hardly ever; of a hidden row with a cover."""
    hidden = row.get("hidden")
    while True:
        size = draw.choice((60, 150, 400, 1200) if hidden else (2, 3, 8, 30, 100))
        q = draw.uniform(0.03, 0.4) if size > 10 else case.q
        drawn, spread = size * q, (size * q * (1 - q)) ** 0.5
        lot = min(size, max(1, round(drawn + draw.uniform(-2.5, 3) * spread)))
        case = replace(case, size=size, q=q, lot=lot)
        if not hidden:
            return case
        case = replace(case, sigma=draw.uniform(1.2, 5))
        covers = [
            Cover(draw.random(), 1 - draw.random() ** 2, 10 ** draw.uniform(-2, 0))
            for _ in range(20)
        ]
        possible = (replace(case, cover=cover) for cover in covers)
        if sound := [case for case in possible if is_cover(case)]:
            # Mostly one that hides much and concedes little.
            sound.sort(key=lambda case: letters(case)["c"] * (conceded(case) < 1e-8))
            return sound[-1] if draw.random() < 0.7 else draw.choice(sound)
