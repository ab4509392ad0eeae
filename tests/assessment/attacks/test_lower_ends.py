"""Every lower end is attained: its attack is executed, and shows what the lower end says.

The same runs test the upper end: no attack shows more than it allows. The plans are small,
and what makes their lower ends makes those of large plans.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest

from affidavit.accountants import ENGINE_NAMES, CountingAttack, GaussianCurve, parts
from affidavit.assessment import certify
from affidavit.mechanisms import attacks_of, lower
from affidavit.plan import (
    Plan,
    events,
)
from affidavit.plan.vocabulary import NO_EPOCHS
from tests.assessment.attacks import plans as given
from tests.assessment.attacks.execution import Executed, Execution
from tests.assessment.attacks.plans import RUNS, execute, phase, small, strongest_attack
from tests.support.random_seeds import examples, seeded

REPLACED = {"adjacency": "replace_one"}
ADDED = {"adjacency": "add_remove"}
DICE = {"name": "dp_dice", "error_clip_norm": 0.1}
FORGETFUL_DICE = {**DICE, "pre_clip_norm": 2}
LARGE_DICE = {**DICE, "error_clip_norm": 0.5}


def selection(distribution: str, mean: float) -> dict[str, object]:
    one = {"kind": "repeat_and_select", "name": "search"}
    return {"extra": [{**one, "distribution": distribution, "mean": mean}]}


METRICS = [
    {"kind": "gaussian", "name": "loss", "noise_multiplier": 2.0},
    {"kind": "laplace", "name": "count", "noise_multiplier": 3.0},
]
SAMPLED_METRIC = [
    {"kind": "gaussian", "name": "a", "noise_multiplier": 1, "sampling_probability": 0.3}
]
QUANTILE = [{"kind": "adaptive_clipping_quantile", "name": "norm", "noise_std": 1.0}]


def diagonal(*entries: float) -> dict[str, object]:
    """Noise of other sizes in other steps, independent between them."""
    rows = [[entry * (i == j) for j in range(len(entries))] for i, entry in enumerate(entries)]
    return {"kind": "matrix", "rows": rows}


REMEMBERED = {"kind": "toeplitz", "coefficients": [1, 0.9]}
EARLY, LATE = diagonal(0.3, 1, 1, 1), diagonal(1, 1, 0.3, 1)

CASES: dict[str, Callable[[], Plan]] = {
    "poisson": lambda: small(given.POISSON, 1.0, 4),
    "poisson, added": lambda: small(given.POISSON, 1.0, 4, **ADDED),
    "poisson, replaced": lambda: small(given.POISSON, 2.0, 5, **REPLACED),
    "poisson, users": lambda: small(
        given.POISSON,
        2.5,
        4,
        dataset={
            "size": 20,
            "unit": "user",
            "contributions_per_user": 3,
            "users_per_record": 2,
        },
    ),
    "poisson, users, replaced": lambda: small(given.POISSON, 4.0, 3, records=2, **REPLACED),
    "poisson, in blocks": lambda: small(
        {"scheme": "poisson", "probability": 0.1}, 1.0, 8, noise=REMEMBERED
    ),
    "poisson, little noise": lambda: small(
        {"scheme": "poisson", "probability": 0.1}, 0.15, 2, delta=0.1
    ),
    "fixed size, zeroed": lambda: small(given.FIXED_SIZE, 1.0, 4),
    "fixed size, zeroed, little noise": lambda: small(given.FIXED_SIZE, 0.3, 1),
    "fixed size, zeroed users": lambda: small(given.FIXED_SIZE, 1.5, 3, records=3),
    "fixed size, zeroed, correlated": lambda: small(
        given.FIXED_SIZE, 1.5, 4, noise=given.BIDIAGONAL
    ),
    "fixed size, zeroed among opposites": lambda: small(
        given.FIXED_SIZE, 2.0, 5, noise={"kind": "toeplitz_inverse", "coefficients": [1.0, -0.9]}
    ),
    "one shuffled lot": lambda: small(given.SHUFFLED, 1.0, 1),
    "shuffled in two phases": lambda: small(
        phases=[phase(given.SHUFFLED, 0.5, 4), phase(given.SHUFFLED, 0.5, 8)]
    ),
    "truncated": lambda: small(given.TRUNCATED, 1.0, 3),
    "truncated, added": lambda: small(given.TRUNCATED, 1.0, 3, **ADDED),
    "truncated, replaced": lambda: small(given.TRUNCATED, 2.0, 3, **REPLACED),
    "truncated, others are seen": lambda: small({**given.TRUNCATED, "max_lot_size": 3}, 0.5, 2),
    "truncated, others are seen, replaced": lambda: small(
        {**given.TRUNCATED, "max_lot_size": 3}, 0.7, 2, **REPLACED
    ),
    "truncated, users": lambda: small(given.TRUNCATED, 3.0, 3, records=2),
    "truncated, users of more than a lot": lambda: small(
        {**given.TRUNCATED, "max_lot_size": 2}, 1.0, 3, records=4
    ),
    "fixed size, replaced": lambda: small(given.FIXED_SIZE, 2.0, 4, **REPLACED),
    "fixed size, users": lambda: small(given.FIXED_SIZE, 4.0, 3, records=3, **REPLACED),
    "fixed size, users of more than a lot": lambda: small(
        {"scheme": "fixed_size", "lot_size": 2}, 4.0, 3, records=5, **REPLACED
    ),
    "full batch": lambda: small(given.FULL, 2.0, 3),
    "full batch, users, replaced": lambda: small(given.FULL, 9.0, 3, records=3, **REPLACED),
    "allocated": lambda: small(given.ALLOCATED, 0.7, 5),
    "allocated, added": lambda: small(given.ALLOCATED, 2.0, 5, **ADDED),
    "allocated, replaced": lambda: small(given.ALLOCATED, 1.5, 5, **REPLACED),
    "allocated in two phases": lambda: small(
        phases=[phase(given.ALLOCATED, 0.7, 4), phase(given.ALLOCATED, 0.7, 4)]
    ),
    "allocated, users": lambda: small(given.ALLOCATED, 2.5, 5, records=2),
    "allocated once": lambda: small({**given.ALLOCATED, "participations": 1}, 0.7, 5, **ADDED),
    "allocated once, replaced": lambda: small(
        {**given.ALLOCATED, "participations": 1}, 1.5, 5, **REPLACED
    ),
    "cyclic": lambda: small(given.CYCLIC, 1.5, 6),
    "cyclic, users": lambda: small(given.CYCLIC, 5.0, 6, records=3),
    "cyclic, users of more than a lot": lambda: small(
        {"scheme": "cyclic", "lot_size": 2}, 6.0, 14, records=5
    ),
    "cyclic, users of more than a lot, replaced": lambda: small(
        {"scheme": "cyclic", "lot_size": 3}, 8.0, 7, records=7, **REPLACED
    ),
    "cyclic, two phases": lambda: small(
        phases=[
            phase(given.CYCLIC, 2.0, 4),
            phase({"scheme": "cyclic", "lot_size": 10}, 2.0, 3),
        ]
    ),
    "cyclic, phases that differ": lambda: small(
        phases=[
            phase(given.CYCLIC, 3.0, 4, noise=LATE),
            phase(given.CYCLIC, 3.0, 4, noise=EARLY),
        ]
    ),
    "cyclic, users in phases that differ": lambda: small(
        phases=[
            phase(given.CYCLIC, 9.0, 4, noise=LATE),
            phase({"scheme": "cyclic", "lot_size": 4}, 9.0, 4, noise=EARLY),
        ],
        records=3,
    ),
    "cyclic, users of more than a lot in two phases": lambda: small(
        phases=[
            phase({"scheme": "cyclic", "lot_size": 2}, 6.0, 10, noise=given.BIDIAGONAL),
            phase({"scheme": "cyclic", "lot_size": 3}, 6.0, 6),
        ],
        records=4,
    ),
    "cyclic, users of more than a lot in equal phases": lambda: small(
        phases=[
            phase({"scheme": "cyclic", "lot_size": 2}, 6.0, 12),
            phase({"scheme": "cyclic", "lot_size": 3}, 6.0, 6),
        ],
        records=5,
    ),
    "shuffled": lambda: small(given.SHUFFLED, 2.0, 6),
    "shuffled, largest sums": lambda: small(given.SHUFFLED, 1.0, 8, delta=0.15),
    "shuffled, largest sums, replaced": lambda: small(
        given.SHUFFLED, 1.2, 4, delta=0.1, **REPLACED
    ),
    "shuffled, replaced": lambda: small(given.SHUFFLED, 3.0, 6, **REPLACED),
    "shuffled, left out": lambda: small({"scheme": "shuffled", "lot_size": 6}, 1.5, 5),
    "shuffled, users": lambda: small(given.SHUFFLED, 1.5, 6, records=3),
    "shuffled, users of more than a lot": lambda: small(
        {"scheme": "shuffled", "lot_size": 4}, 1.5, 5, records=6
    ),
    "bins": lambda: small(given.BINS, 1.0, 4),
    "bins, kept": lambda: small(given.BINS, 1.5, 8),
    "bins, a partial epoch": lambda: small(given.BINS, 1.0, 6),
    "bins, fresh": lambda: small(given.FRESH_BINS, 1.0, 6),
    "bins, replaced": lambda: small(given.BINS, 1.5, 8, **REPLACED),
    "bins, users": lambda: small(given.BINS, 1.5, 8, records=3),
    "bins, users, scores": lambda: small(
        {"scheme": "balls_in_bins", "lot_size": 1}, 0.9, 130, records=2, size=60, delta=0.01
    ),
    "bins, users, scores, fresh": lambda: small(
        {"scheme": "balls_in_bins", "lot_size": 1, "bins_drawn": "each_epoch"},
        *(0.7, 130),
        records=2,
        size=60,
        delta=0.01,
    ),
    "groups": lambda: small(given.GROUPS, 1.5, 8),
    "groups, replaced": lambda: small(given.GROUPS, 3.0, 8, **REPLACED),
    "groups, users": lambda: small(given.GROUPS, 3.0, 8, records=2),
    "apart": lambda: small(given.APART, 0.7, 6),
    "apart, replaced": lambda: small(given.APART, 1.5, 6, **REPLACED),
    "apart, users": lambda: small(given.APART, 1.5, 6, records=2),
    "noise in phases": lambda: small(
        phases=[
            phase(given.POISSON, 2.0, 2),
            phase(given.FULL, 3.0, 2, noise=given.BIDIAGONAL),
        ]
    ),
    "shuffled and poisson": lambda: small(
        phases=[phase(given.SHUFFLED, 2.0, 5), phase(given.POISSON, 2.0, 2)]
    ),
    "metrics": lambda: small(given.FULL, 3.0, 1, extra=METRICS),
    "sampled metric": lambda: small(given.POISSON, 1.5, 3, extra=SAMPLED_METRIC),
    "quantile": lambda: small(given.POISSON, 1.0, 3, extra=QUANTILE),
    "geometric selection": lambda: small(given.FULL, 2.0, 1, **selection("geometric", 3)),
    "poisson selection": lambda: small(given.FULL, 2.0, 1, **selection("poisson", 3)),
    "logarithmic selection": lambda: small(given.POISSON, 1.0, 2, **selection("logarithmic", 2.5)),
    "selection of bins": lambda: small(given.BINS, 1.0, 4, **selection("geometric", 2)),
    "dice": lambda: small(given.CYCLIC, 3.0, 5, optimizer=DICE),
    "dice, poisson": lambda: small({"scheme": "poisson", "lot_size": 5}, 1.0, 4, optimizer=DICE),
    "dice, large error": lambda: small(
        {"scheme": "poisson", "lot_size": 5}, 4.0, 6, optimizer=LARGE_DICE
    ),
    "dice, shuffled": lambda: small(given.SHUFFLED, 8.0, 8, optimizer=LARGE_DICE, **REPLACED),
    "dice, clipped before": lambda: small(given.CYCLIC, 3.0, 5, optimizer=FORGETFUL_DICE),
    "dice, full batch, users": lambda: small(given.FULL, 9.0, 4, optimizer=DICE, records=2),
}
_NOISE = {
    "bidiagonal": given.BIDIAGONAL,
    "signed": given.SIGNED,
    "tree": given.TREE,
    "restarted tree": {"kind": "tree", "restart": True},
    "banded": given.BANDED,
    "sqrt": given.ROOT,
    "bifr": {"kind": "bifr", "bands": 3, "gamma": 0.7},
    "blt": given.BLT,
    "alternating": {"kind": "toeplitz", "coefficients": [1, -0.6, 0.2]},
}
_ROOM = {  # noise that makes ε about 1
    "full batch": (given.FULL, 6.0, 6, {}),
    "full batch, replaced": (given.FULL, 12.0, 6, REPLACED),
    "cyclic": (given.CYCLIC, 3.0, 8, {}),
    "cyclic, users": (given.CYCLIC, 9.0, 8, {"records": 3}),
    "cyclic, users of more than a lot": (
        {"scheme": "cyclic", "lot_size": 2},
        12.0,
        14,
        {"records": 5},
    ),
    "poisson": (given.POISSON, 2.0, 5, {}),
    "poisson, replaced": (given.POISSON, 4.0, 5, REPLACED),
    "poisson, users": (given.POISSON, 5.0, 4, {"records": 2}),
    "fixed size": (given.FIXED_SIZE, 4.0, 5, REPLACED),
    "fixed size, users": (given.FIXED_SIZE, 8.0, 4, {"records": 2, **REPLACED}),
    "fixed size, zeroed users": (given.FIXED_SIZE, 4.0, 4, {"records": 3}),
    "truncated": (given.TRUNCATED, 2.0, 5, {}),
    "truncated, replaced": (given.TRUNCATED, 3.0, 5, REPLACED),
    "truncated, users": (given.TRUNCATED, 4.0, 4, {"records": 2}),
    "truncated, users, added": (given.TRUNCATED, 4.0, 4, {"records": 3, **ADDED}),
    "truncated, users of more than a lot": (
        {**given.TRUNCATED, "max_lot_size": 2},
        2.0,
        4,
        {"records": 4},
    ),
    "shuffled": (given.SHUFFLED, 1.0, 4, {}),
    "shuffled, replaced": (given.SHUFFLED, 2.0, 4, REPLACED),
    "shuffled, users": (given.SHUFFLED, 4.0, 6, {"records": 3}),
    "shuffled, users, replaced": (given.SHUFFLED, 8.0, 6, {"records": 3, **REPLACED}),
    "shuffled, users of small lots": (
        {"scheme": "shuffled", "lot_size": 2},
        3.0,
        7,
        {"records": 3, "size": 13},
    ),
    "bins": (given.BINS, 2.0, 8, {}),
    "bins, replaced": (given.BINS, 2.0, 8, REPLACED),
    "bins, users": (given.BINS, 5.0, 8, {"records": 3}),
    "bins, users, replaced": (given.BINS, 9.0, 7, {"records": 3, **REPLACED}),
    "bins, users, added": (given.BINS, 5.0, 6, {"records": 2, **ADDED}),
    "groups": (given.GROUPS, 2.0, 8, {}),
    "groups, replaced": (given.GROUPS, 4.0, 8, REPLACED),
    "groups, users": (given.GROUPS, 4.0, 8, {"records": 2}),
    "apart": (given.APART, 2.0, 6, {}),
    "apart, replaced": (given.APART, 3.0, 6, REPLACED),
    "apart, users": (given.APART, 4.0, 6, {"records": 2}),
    "apart, users, replaced": (given.APART, 8.0, 7, {"records": 3, **REPLACED}),
}
CASES |= {
    f"{kind}, {room}": lambda noise=noise, at=at: small(*at[:3], noise=noise, **at[3])
    for kind, noise in _NOISE.items()
    for room, at in _ROOM.items()
    if not (noise.get("restart") and at[0]["scheme"] in NO_EPOCHS)
}

TIGHT = (
    *("poisson", "poisson, users", "fixed size, users", "full batch", "cyclic, users"),
    *("shuffled, largest sums", "bins, fresh", "bins, kept", "groups", "metrics"),
    *("noise in phases", "dice", "bidiagonal, cyclic"),
)
"""Lower ends that are the whole ε of their two data sets: a tenth more is refuted."""
ORDINARY = {
    *TIGHT,
    *(
        "poisson, in blocks",
        "truncated, others are seen",
        "cyclic, users of more than a lot, replaced",
    ),
    *("cyclic, two phases", "cyclic, phases that differ", "shuffled, replaced", "apart"),
    *("shuffled, left out", "banded, groups"),
    *("geometric selection", "dice, poisson", "signed, full batch", "tree, poisson"),
    *("fixed size, zeroed users", "shuffled in two phases"),
    *("bidiagonal, cyclic, users of more than a lot", "bidiagonal, bins, users"),
}
"""The cases of ``make test``; all others are soak."""


@pytest.mark.by_turns
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ORDINARY else pytest.mark.soak, id=name)
        for name in CASES
    ],
)
def test_the_lower_end_is_attained_by_its_attack(name: str) -> None:
    plan = CASES[name]()
    bracket, attack, epsilon = strongest_attack(plan)
    # What is printed is the ε of an attack that can be described and executed.
    assert epsilon >= bracket.lower * (1 - 1e-6)
    runs = RUNS if name in TIGHT else examples(RUNS)
    executed, delta = execute(plan, attack, seeded(name), runs), plan.target.delta
    assert delta is not None
    assert executed.least(bracket.upper) <= delta
    assert executed.most(bracket.lower) >= delta or bracket.lower == 0
    if name in TIGHT:
        assert executed.most(1.1 * bracket.lower) < delta


def test_every_kind_of_release_that_a_record_attains_is_executed() -> None:
    attained = {
        type(leaf)
        for name, make in CASES.items()
        if not name.startswith(tuple(_NOISE)) or name.startswith("bidiagonal")
        for attack in attacks_of(lower(make()))
        for part, _ in parts(attack.event)
        for leaf, _ in (
            parts(part.event) if isinstance(part, events.RepeatAndSelect) else [(part, 1)]
        )
    }
    # A replaced record in bins is bounded from above alone.
    assert attained == set(get_args(events.Leaf)) - {events.ReplacedAllocationGaussian}


def test_a_record_has_one_place_in_all_phases() -> None:
    bracket, _, _ = strongest_attack(CASES["cyclic, phases that differ"]())
    # μ² = (1 / 0.09 + 1) / 9 at the best place, and 2 / 0.09 / 9 at a place of each phase's own.
    assert bracket.lower == pytest.approx(GaussianCurve(mu=1.16004).epsilon(0.05).upper, rel=1e-4)
    assert bracket.upper == pytest.approx(GaussianCurve(mu=1.57135).epsilon(0.05).upper, rel=1e-4)


@pytest.mark.parametrize(
    "name",
    [
        "full batch",
        *(
            pytest.param(name, marks=pytest.mark.soak)
            for name in (
                *("poisson", "fixed size, replaced", "bins, kept", "shuffled, replaced"),
                *("truncated", "metrics", "geometric selection", "bidiagonal, bins"),
            )
        ),
    ],
)
def test_the_lower_end_of_each_engine_is_attained(name: str) -> None:
    plan = CASES[name]()
    _, attack, _ = strongest_attack(plan)
    executed = execute(plan, attack, seeded(name), examples(RUNS))
    answers = [certify(plan, engine=engine, second_opinion=False) for engine in ENGINE_NAMES]
    lower_ends = [answer.epsilon.lower for answer in answers if answer.epsilon is not None]
    assert len(lower_ends) > 1
    assert plan.target.delta is not None
    assert executed.most(max(lower_ends)) >= plan.target.delta


@pytest.mark.parametrize("name", ["poisson", "fixed size, replaced"])
def test_releases_that_are_counted_show_what_the_count_says(name: str) -> None:
    plan = CASES[name]()
    attack, *_ = attacks_of(lower(plan))
    ((leaf, times),) = parts(attack.event)
    assert isinstance(leaf, events.PoissonSubsampledGaussian | events.WithoutReplacementGaussian)
    counting, delta = CountingAttack(leaf, times), 0.05
    alone = replace(attack, phases=(replace(attack.phases[0], others="nothing"),))
    words = [int(byte) for byte in str(seeded(name)).encode()]
    (part,) = Execution(alone, np.random.default_rng(words)).phases
    threshold, count = counting.test(delta)
    counts = [
        (part.release(RUNS, present)[:, :, 0] > threshold * part.sigma).sum(axis=1)
        for present in (True, False)
    ]
    epsilon = counting.epsilon(delta).lower
    executed = Executed(*counts, threshold=count)
    assert epsilon > 0
    assert executed.most(epsilon) >= delta
    # The opposite record exceeds a threshold less often than one that contributes nothing.
    assert executed.most(1.15 * epsilon) < delta or plan.adjacency == "replace_one"
