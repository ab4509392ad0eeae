"""A run of a few steps is certified for no less than any data set shows of all its releases.

The bounds of these schemes are of whole runs, so that most have no row in the table. Lots are
enumerated here, without the samplers and without the engine. Outputs of two steps are compared in
cells, and those of more along a line: both are post-processing, and show at most the truth.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np
import pytest
from scipy.stats import binom, hypergeom

from affidavit.accountants.bracketing_curves import FirstAvailableCurve
from affidavit.accountants.column_moments import has_columns, moment_curve
from affidavit.accountants.fourier_accountant import run_curve
from affidavit.accountants.registry import accountant
from affidavit.assessment import certify
from affidavit.mechanisms.lowering import lower
from affidavit.plan import Plan, events
from affidavit.plan.parse import plan_from
from tests.accountants.falsifier.data_sets import poisson_lots
from tests.accountants.falsifier.hockey_sticks import (
    Array,
    Law,
    Line,
    cell_excess,
    cells,
    line_excess,
    merged,
)
from tests.support.random_seeds import seeded

SIZE, DELTA, DRAWS = 8, 0.05, 12
Lots = Mapping[tuple[int, ...], float]
"""How many of a unit's records are in each lot, and the chance of that."""
Draw = Callable[[int, int], Lots]
"""Of a number of records and of steps."""


def independent(of_one: Callable[[int], Iterator[tuple[tuple[int, ...], float]]]) -> Draw:
    """The lots of records that are drawn independently, each as one."""

    def lots(records: int, steps: int) -> Lots:
        return reduce(_both, [dict(of_one(steps))] * records)

    return lots


def _both(first: Lots, second: Lots) -> Lots:
    result: Counter[tuple[int, ...]] = Counter()
    for (one, p), (other, q) in itertools.product(first.items(), second.items()):
        result[tuple(map(sum, zip(one, other, strict=True)))] += p * q
    return result


def in_some(taken: int) -> Draw:
    """In each set of ``taken`` steps alike."""

    def of_one(steps: int) -> Iterator[tuple[tuple[int, ...], float]]:
        for some in itertools.combinations(range(steps), taken):
            yield tuple(int(t in some) for t in range(steps)), 1 / math.comb(steps, taken)

    return independent(of_one)


def in_bins(bins: int, *, fresh: bool = False) -> Draw:
    """In one of ``bins`` lots, in all epochs the same or in each a new one."""

    def of_one(steps: int) -> Iterator[tuple[tuple[int, ...], float]]:
        epochs = -(-steps // bins) if fresh else 1
        result: Counter[tuple[int, ...]] = Counter()
        for places in itertools.product(range(bins), repeat=epochs):
            row = tuple(int(t % bins == places[t // bins % epochs]) for t in range(steps))
            result[row] += bins**-epochs
        yield from result.items()

    return independent(of_one)


def apart(separation: int, p: float) -> Draw:
    """At p after a wait of ``separation``, as after many steps."""

    def of_one(steps: int) -> Iterator[tuple[tuple[int, ...], float]]:
        share = p / (1 + (separation - 1) * p)
        waits = [1 - share * (separation - 1), *[share] * (separation - 1)]
        states = {((), wait): chance for wait, chance in enumerate(waits)}
        for _ in range(steps):
            after: Counter[tuple[tuple[int, ...], int]] = Counter()
            for (row, wait), chance in states.items():
                if not wait:
                    after[(*row, 1), separation - 1] += chance * p
                after[(*row, 0), max(0, wait - 1)] += chance * (1.0 if wait else 1 - p)
            states = dict(after)
        result: Counter[tuple[int, ...]] = Counter()
        for (row, _), chance in states.items():
            result[row] += chance
        yield from result.items()

    return independent(of_one)


def in_each(law: Callable[[int], Array]) -> Draw:
    """As many of the records as ``law`` says in each step, whatever is in the others."""

    def lots(records: int, steps: int) -> Lots:
        chances = law(records)
        return {
            row: math.prod(float(chances[k]) for k in row)
            for row in itertools.product(range(records + 1), repeat=steps)
        }

    return lots


def sampled(q: float) -> Draw:
    """Poisson samples."""
    return in_each(lambda records: np.asarray(binom.pmf(np.arange(records + 1), records, q)))


def cut(q: float, largest: int) -> Draw:
    """Poisson samples, of which ``largest`` records are taken at the most."""
    lots = poisson_lots(q, largest)
    return in_each(lambda records: lots(records, SIZE - records).sum(axis=1))


def of_fixed_size(lot: int) -> Draw:
    """Samples of ``lot`` of all records."""
    return in_each(
        lambda records: np.asarray(hypergeom.pmf(np.arange(records + 1), SIZE, records, lot))
    )


def shuffled(lot: int) -> Draw:
    """In the lots of an order, a new one in each epoch."""

    def lots(records: int, steps: int) -> Lots:
        turn = SIZE // lot
        epochs = []
        for start in range(0, steps, turn):
            length, result = min(turn, steps - start), Counter[tuple[int, ...]]()
            for places in itertools.permutations(range(SIZE), records):
                inside = [place // lot for place in places]
                row = tuple(inside.count(t) for t in range(length))
                result[row] += 1 / math.perm(SIZE, records)
            epochs.append(result)
        return {
            tuple(itertools.chain(*(row for row, _ in rows))): math.prod(p for _, p in rows)
            for rows in itertools.product(*(epoch.items() for epoch in epochs))
        }

    return lots


@dataclass(frozen=True)
class Run:
    """A plan of few steps, the lots of a unit's records, and how wide its bracket may be.

    In a ``full`` lot others stand in for the unit's records. What the run is certified for with
    ``loose`` times as much noise is less than some data set shows.
    """

    sampling: Mapping[str, Any]
    draw: Draw
    sigma: float
    steps: int
    adjacency: str = "zero_out"
    records: int = 1
    shared: int = 1
    column: tuple[float, ...] = (1.0,)
    full: bool = False
    loose: float = 1.6

    def plan(self, noise: float = 1.0) -> Plan:
        """The plan, with ``noise`` times as much noise."""
        unit: dict[str, Any] = {}
        if self.records > 1:
            unit = {"unit": "user", "contributions_per_user": self.records}
        if self.shared > 1:
            unit["users_per_record"] = self.shared
        strategy = {"kind": "toeplitz", "coefficients": [*self.column]}
        release = {"name": "all", "clip_norm": 1, "noise_multiplier": noise * self.sigma}
        return plan_from(
            {
                "version": 1,
                "adjacency": self.adjacency,
                "dataset": {"size": SIZE, **unit},
                "sampling": dict(self.sampling),
                "steps": self.steps,
                "releases": [release],
                **({"noise": strategy} if len(self.column) > 1 else {}),
                "target": {"delta": DELTA},
                "allow_large_delta": "few steps",
            }
        )

    def refutes(self, epsilon: float, draw: random.Random, *, both: bool = True) -> bool:
        """Whether one of some data sets shows more than ``DELTA`` at ``epsilon`` (nats).

        Unless ``both`` orders are bounded, the record is in the first hypothesis.
        """
        return any(self._shown(epsilon, draw, both) > DELTA * (1 + 1e-9) for _ in range(DRAWS))

    def _shown(self, epsilon: float, draw: random.Random, both: bool) -> float:
        present, absent = self._released(draw)
        alphas = np.array([math.exp(epsilon)])
        worst = 0.0
        for over, under in ((present, absent), (absent, present))[: 1 + both]:
            if self.steps == 2:
                shown = cell_excess(*cells(over, under, self.sigma), alphas)
            else:
                lines = (Line(one.centres[:, 0] / self.sigma, one.weights) for one in (over, under))
                shown = line_excess(*lines, alphas)
            worst = max(worst, float(shown[0]))
        return worst

    def _released(self, draw: random.Random) -> tuple[Law, Law]:
        matrix = sum(
            c * np.eye(self.steps, k=-lag)
            for lag, c in enumerate(self.column[: self.steps])
        )  # fmt: skip
        own = np.array([draw.choice((-1.0, 1.0)) for _ in range(self.steps)])
        if draw.random() < 0.5:
            own = np.ones(self.steps)
        elif draw.random() < 0.3:
            own *= [draw.random() for _ in own]
        instead = {"zero_out": 0.0, "add_remove": 0.0}.get(self.adjacency, -1.0) * own
        others = draw.choice((0.0, 0.0, -1.0, 1.0)) * own if self.full else 0.0 * own
        lots = self.draw(self.records, self.steps)
        counts, weights = np.array([*lots]), np.array([*lots.values()])
        present, absent = (counts * (moves - others) @ matrix.T for moves in (own, instead))
        if self.steps > 2:
            along = weights @ (present - absent)
            if draw.random() < 0.5:
                along = along * [draw.uniform(0.5, 1.5) for _ in along]
            along /= np.linalg.norm(along) or 1.0
            present, absent = (present @ along)[:, None], (absent @ along)[:, None]
        return merged(present, weights), merged(absent, weights)


POISSON = {"scheme": "poisson", "probability": 0.3}
CUT = {"scheme": "truncated_poisson", "probability": 0.3, "max_lot_size": 4}
ALLOCATED = {"scheme": "random_allocation", "participations": 2}
BINS = {"scheme": "balls_in_bins", "lot_size": 2}
SEPARATED = {"scheme": "b_min_sep", "lot_size": 2, "separation": 2}
FIXED = {"scheme": "fixed_size", "lot_size": 2}
SHUFFLED = {"scheme": "shuffled", "lot_size": 2}
BANDED = (1.0, 0.5, 0.25)
AT = 0.25 / 0.75
"""The chance after a wait of 2 with which a quarter of the records is in a lot."""
RUNS: dict[str, Run] = {
    "poisson, correlated": Run(POISSON, sampled(0.3), 2.0, 6, column=BANDED),
    "poisson, users, correlated": Run(POISSON, sampled(0.3), 4.0, 4, records=2, column=BANDED),
    "truncated, users": Run(CUT, cut(0.3, 4), 3.0, 3, records=2),
    "truncated, users, correlated": Run(CUT, cut(0.3, 4), 5.0, 4, records=2, column=BANDED),
    "owners": Run(POISSON, sampled(0.3), 2.0, 4, records=3, shared=2),
    "k of T": Run(ALLOCATED, in_some(2), 0.8, 4),
    "k of T, replaced": Run(ALLOCATED, in_some(2), 1.5, 4, "replace_one"),
    "k of T, users": Run(ALLOCATED, in_some(2), 2.0, 4, records=2),
    "bins, users": Run(BINS, in_bins(4), 1.5, 4, records=2),
    "bins, few steps, correlated": Run(BINS, in_bins(4), 1.5, 3, column=BANDED),
    "bins, users, correlated": Run(BINS, in_bins(4), 3.0, 8, records=2, column=BANDED),
    "bins, replaced, correlated": Run(BINS, in_bins(4), 3.0, 6, "replace_one", column=BANDED),
    "fresh bins, users": Run(
        {**BINS, "bins_drawn": "each_epoch"}, in_bins(4, fresh=True), 1.5, 6, records=2
    ),
    "apart": Run(SEPARATED, apart(2, AT), 0.8, 5),
    "apart, few steps": Run(SEPARATED, apart(2, AT), 0.8, 2),
    "apart, replaced": Run(SEPARATED, apart(2, AT), 1.5, 5, "replace_one"),
    "apart, correlated": Run(SEPARATED, apart(2, AT), 1.5, 6, column=BANDED),
    "apart, users": Run(SEPARATED, apart(2, AT), 2.0, 4, records=2),
    "apart, users, correlated": Run(SEPARATED, apart(2, AT), 4.0, 5, records=2, column=BANDED),
    "fixed size, correlated": Run(
        FIXED, of_fixed_size(2), 3.0, 6, "replace_one", column=BANDED, full=True
    ),
    "fixed size, zeroed, correlated": Run(
        FIXED, of_fixed_size(2), 3.0, 6, column=BANDED, full=True, loose=2.2
    ),
    "fixed size, users, correlated": Run(
        FIXED, of_fixed_size(2), 5.0, 4, "replace_one", records=2, column=BANDED, full=True
    ),
    "shuffled, partial": Run(SHUFFLED, shuffled(2), 1.0, 2, full=True),
    "shuffled, replaced": Run(SHUFFLED, shuffled(2), 2.0, 3, "replace_one", full=True),
    "shuffled, users": Run(SHUFFLED, shuffled(2), 2.0, 4, records=2, full=True, loose=3.5),
    "shuffled, correlated": Run(SHUFFLED, shuffled(2), 3.0, 8, column=BANDED, full=True, loose=2.2),
    "shuffled, users, correlated": Run(
        SHUFFLED, shuffled(2), 6.0, 4, records=2, column=BANDED, full=True
    ),
}


def certified(plan: Plan) -> float:
    """The upper end of ε."""
    bracket = certify(plan, second_opinion=False).epsilon
    assert bracket is not None
    return bracket.upper


def bounds(event: events.Event) -> Iterator[tuple[float, bool]]:
    """The ε of each event that bounds the run, and whether it bounds both orders."""
    engines = tuple(map(accountant, ("gaussian", "fourier", "allocation", "largest_bin")))
    for bound in events.alternatives(event):
        columns = has_columns(bound)
        of_first = FirstAvailableCurve(event=bound, engines=engines)
        curve = moment_curve(bound) if columns else run_curve(bound) or of_first
        yield curve.epsilon(DELTA).upper, not columns


@pytest.mark.ordinary("owners", "apart", "bins, few steps, correlated")
@pytest.mark.parametrize("name", RUNS)
def test_no_data_set_shows_more_than_a_run_is_certified_for(name: str) -> None:
    assert not RUNS[name].refutes(certified(RUNS[name].plan()), random.Random(seeded(name)))


@pytest.mark.soak
@pytest.mark.parametrize("name", RUNS)
def test_no_data_set_shows_more_than_any_bound_of_a_run(name: str) -> None:
    run, draw = RUNS[name], random.Random(seeded(name))
    for epsilon, both in bounds(lower(run.plan()).event()):
        assert not run.refutes(epsilon, draw, both=both), epsilon


@pytest.mark.ordinary("owners")
@pytest.mark.parametrize("name", RUNS)
def test_a_run_of_too_little_noise_is_found(name: str) -> None:
    run = RUNS[name]
    assert run.refutes(certified(run.plan(run.loose)), random.Random(name))
