"""Upper bounds of k of T steps by conditional moments, against sums over all nodes of few steps."""

from __future__ import annotations

import math
from collections import defaultdict
from itertools import combinations, product

import numpy as np
import pytest

from affidavit.accountants.random_allocation.conditional_moments import (
    Moments,
    Nodes,
    Table,
    Window,
)
from affidavit.accountants.random_allocation.score_attack import Pair
from affidavit.plan import events

CELL, OTHER_CELL = 0.7, 0.4
TILTS = 1.5, 0.5, -0.4


def few_nodes(steps: int, taken: int, cell: float = CELL) -> Nodes:
    record = events.AllocatedRecord(steps=steps, participations=taken, noise_multiplier=1.0)
    return Nodes.of(Pair(record, 1, "remove", 0.8), cell, 1e-9)


def outcomes(nodes: Nodes) -> dict[tuple[int, int], list[tuple[float, float]]]:
    """Ratios and their probabilities at each pair of sums, by all nodes of all steps."""
    steps, taken = nodes.record.steps, nodes.record.participations
    result = defaultdict(list)
    x = np.expm1(nodes.scores) / nodes.weight
    masses = np.exp(nodes.logs[0])
    for places in product(range(nodes.size), repeat=steps):
        ratio = np.mean([math.prod(x[list(some)]) for some in combinations(places, taken)])
        sums = sum(places), sum(int(nodes.excesses[at] / OTHER_CELL) for at in places)
        result[sums].append((float(ratio), math.prod(masses[list(places)])))
    return result


@pytest.mark.parametrize(
    ("steps", "taken"),
    [
        (3, 2),
        pytest.param(3, 1, marks=pytest.mark.soak),
        pytest.param(3, 3, marks=pytest.mark.soak),
        pytest.param(4, 2, marks=pytest.mark.soak),
    ],
)
def test_tables_are_the_moments_of_the_ratio_at_each_pair_of_sums(steps: int, taken: int) -> None:
    nodes = few_nodes(steps, taken)
    exact = outcomes(nodes)
    first, rows = int(taken < 3), steps * nodes.size
    window = Window(first=first, shape=(rows, 64), other_cell=OTHER_CELL)
    tables = [Table.of(nodes, moment, TILTS[moment], window) for moment in range(3)]
    for moment, table in enumerate(tables):
        for (score, other), atoms in exact.items():
            if score < first:
                continue
            row = score - first
            value = sum(mass * ratio**moment for ratio, mass in atoms)
            error = (table.error + table.relative) * table.scale[row, 0]
            assert table.values[row, other] * table.scale[row, 0] == pytest.approx(
                value, rel=1e-11, abs=error
            )
    moments = Moments(nodes=nodes, window=window, tables=tuple(tables), beyond=0.0)
    for epsilon in (1.0, 2.0):
        alpha = math.exp(epsilon)
        atoms = [atom for each in exact.values() for atom in each]
        whole = sum(mass * max(ratio - alpha, 0.0) for ratio, mass in atoms)
        assert whole <= moments.delta(epsilon) <= (1.25 if taken > 1 else 2.0) * whole


def test_nodes_raise_the_mean_of_a_convex_function_a_little() -> None:
    nodes = few_nodes(3, 2, 0.05)
    x, masses = np.expm1(nodes.scores) / nodes.weight, np.exp(nodes.logs[0])
    z = np.linspace(-9.0, 9.0, 4001)
    normal = np.exp(-(z**2) / 2) * (z[1] - z[0]) / math.sqrt(2 * math.pi)
    law = np.exp(z - 0.5)
    for at in (0.0, 0.3, 1.0, 4.0, 20.0):
        convex = float(normal @ np.maximum(law - at, 0.0))
        raised = float(masses @ np.maximum(x - at, 0.0))
        assert convex - nodes.cut - 1e-9 <= raised <= convex + 1e-3 * (1 + at)
