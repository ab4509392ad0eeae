"""The lots that attacks are executed on have the law of those that the trainer's samplers draw."""

from __future__ import annotations

import hashlib
from collections import Counter

import numpy as np
import pytest
from scipy.stats import chi2

from affidavit.plan import Plan
from affidavit.trainer.steps.sampling import build_sampler
from tests.assessment.attacks import plans as given
from tests.assessment.attacks.lots import Counts, draw_lots
from tests.assessment.attacks.plans import small
from tests.support.random_seeds import examples, seeded

SIZE, STEPS = 8, 4
SAMPLINGS = {
    "poisson": given.POISSON,
    "truncated_poisson": {**given.TRUNCATED, "max_lot_size": 2},
    "fixed_size": {"scheme": "fixed_size", "lot_size": 3},
    "full_batch": given.FULL,
    "cyclic": {"scheme": "cyclic", "lot_size": 3},
    "shuffled": {"scheme": "shuffled", "lot_size": 3},
    "balls_in_bins": {"scheme": "balls_in_bins", "lot_size": 4},
    "fresh balls_in_bins": {"scheme": "balls_in_bins", "lot_size": 4, "bins_drawn": "each_epoch"},
    "random_allocation": given.ALLOCATED,
    "b_min_sep": {"scheme": "b_min_sep", "lot_size": 2, "separation": 3},
}
OTHERS_OF_RECORDS = "b_min_sep"
"""The scheme of which only the unit's own records are drawn here."""


def drawn_by_the_trainer(plan: Plan, runs: int, records: int) -> Counts:
    """The lots of ``runs`` runs: of the first ``records`` records, and of the others."""
    result = np.zeros((runs, STEPS, 2), dtype=np.int64)
    for run in range(runs):
        key = hashlib.sha256(f"{seeded('lots')} {run}".encode()).digest()
        lot = build_sampler(plan, 0, key)
        for step in range(STEPS):
            members = lot(step).numpy()
            own = int((members < records).sum())
            result[run, step] = own, len(members) - own
    return result


@pytest.mark.by_turns
@pytest.mark.parametrize("records", [pytest.param(1, marks=pytest.mark.soak), 2])
@pytest.mark.parametrize("name", SAMPLINGS)
def test_lots_are_those_of_the_trainer(name: str, records: int) -> None:
    adjacency = "replace_one" if name == "fixed_size" else "zero_out"
    plan = small(SAMPLINGS[name], 1.0, STEPS, size=SIZE, adjacency=adjacency)
    source = np.random.default_rng([int(byte) for byte in str(seeded(name)).encode()])
    theirs = drawn_by_the_trainer(plan, examples(1000), records)
    ours = draw_lots(plan, 0, STEPS, 50_000, source, records=records, places=tuple(range(records)))
    if plan.phases[0].sampling.scheme == OTHERS_OF_RECORDS:
        theirs, ours = theirs[:, :, :1], ours[:, :, :1]
    assert_same_law(theirs[:, :, 0], ours[:, :, 0])
    for step in range(STEPS):
        assert_same_law(theirs[:, step], ours[:, step])


def test_members_of_a_group_are_drawn_alike() -> None:
    plan = small({"scheme": "cyclic_poisson", "lot_size": 2, "groups": 2}, 1.0, STEPS, size=SIZE)
    source = np.random.default_rng(1)
    theirs = drawn_by_the_trainer(plan, examples(1000), 1)[:, :, 0]
    in_either = [
        draw_lots(plan, 0, STEPS, 100_000, source, places=(group,))[:, :, 0] for group in (0, 1)
    ]
    assert_same_law(theirs, np.concatenate(in_either))


def assert_same_law(few: Counts, many: Counts) -> None:
    """By the χ² of the outcomes of ``few`` runs, given their frequencies among ``many``."""
    rare = 5.0
    frequencies = Counter(map(tuple, many.reshape(len(many), -1).tolist()))
    seen = Counter(map(tuple, few.reshape(len(few), -1).tolist()))
    expected = {row: number / len(many) * len(few) for row, number in frequencies.items()}
    common = [row for row, number in expected.items() if number >= rare]
    rest = len(few) - sum(expected[row] for row in common)
    seldom = len(few) - sum(seen[row] for row in common)
    statistic = sum((seen[row] - expected[row]) ** 2 / expected[row] for row in common)
    if rest >= rare:
        statistic += (seldom - rest) ** 2 / rest
    else:
        assert seldom <= rest + 10 * max(1.0, rest) ** 0.5
    assert chi2.sf(statistic, max(1, len(common))) > 1e-6
