"""What the trainer's samplers draw of one privacy unit is what both ends of a bracket count.

The laws below draw lots as a run draws them, or list all allocations of a user's records to lots in
the sampler's own words. A planted fault in what is derived breaks one of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from fractions import Fraction
from itertools import combinations, product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from affidavit.accountants.gaussian import GaussianCurve
from affidavit.assessment import certify
from affidavit.assessment.plan_summary import sensitivity_of
from affidavit.certificate import certificate_proof
from affidavit.mechanisms import sampling_schemes
from affidavit.mechanisms.lowering import lower
from affidavit.mechanisms.strategies import epoch_patterns as bounds
from affidavit.mechanisms.strategies import participation as derived
from affidavit.mechanisms.strategies import sensitivity as signs
from affidavit.mechanisms.strategies.bidiagonal import Bidiagonal, NormalizedBidiagonal
from affidavit.mechanisms.strategies.blt import Blt
from affidavit.mechanisms.strategies.dense import Dense
from affidavit.mechanisms.strategies.participation import Participation
from affidavit.mechanisms.strategies.scheduled import Scheduled
from affidavit.mechanisms.strategies.strategy import Strategy
from affidavit.mechanisms.strategies.toeplitz import (
    Toeplitz,
    banded_inverse_root,
    identity,
    square_root,
)
from affidavit.mechanisms.strategies.tree import Tree
from affidavit.plan import (
    FRESH_LOTS,
    Plan,
    RefusedPlan,
    as_document,
    events,
    plan_from,
)
from affidavit.trainer.noise.chacha import derived_key
from affidavit.trainer.steps.sampling import LotSampler
from tests.support.random_seeds import examples, seeded

Make = Callable[..., Plan]
SAMPLING: dict[str, dict[str, Any]] = {
    "poisson": {"lot_size": 2},
    "truncated_poisson": {"lot_size": 2, "max_lot_size": 2},
    "fixed_size": {"lot_size": 2},
    "shuffled": {"lot_size": 2},
    "cyclic": {"lot_size": 2},
    "balls_in_bins": {"lot_size": 2},
    "cyclic_poisson": {"lot_size": 1, "groups": 3},
    "b_min_sep": {"lot_size": 1, "separation": 3},
    "full_batch": {},
}
SIZE, STEPS, RECORDS = 7, 8, 3
RUNS = examples(200)


def planned(plan_of: Make, scheme: str, **changes: Any) -> Plan:
    """A short run whose user has more records than a lot of its scheme holds."""
    document = {
        "adjacency": "add_remove" if scheme in ("cyclic_poisson", "b_min_sep") else "replace_one",
        "dataset": {"size": SIZE, "unit": "user", "contributions_per_user": RECORDS},
        "sampling": {"scheme": scheme, **SAMPLING[scheme]},
        "steps": STEPS,
        "noise": {"kind": "bidiagonal", "lambda": 0.9},
        "target": {"delta": 0.01},
    }
    return plan_of(**{**document, **changes})


def drawn(plan: Plan, run: int) -> np.ndarray[Any, Any]:
    """Whether each record is in each lot of one run, shape (steps, records)."""
    key = derived_key(bytes(32), str(seeded(run)))
    sampler = LotSampler(plan, 0, key)
    result = np.zeros((plan.phases[0].steps, plan.dataset.size), dtype=bool)
    for step in range(len(result)):
        result[step, sampler.of(step, derived_key(key, f"step {step}")).numpy()] = True
    return result


def is_pattern(steps: list[int], at: Participation) -> bool:
    """Whether the schema's own words allow these steps."""
    gaps = np.diff(steps)
    match at.schema:
        case "fixed_epoch":
            right = bool(np.all(gaps % at.separation == 0))
        case "one_per_epoch":
            right = len({step // at.turn for step in steps}) == len(steps)
        case _:
            right = bool(np.all(gaps >= at.separation))
    return right and len(steps) <= at.participations


def every_draw_is_derived(plan_of: Make) -> None:
    """Law: no run of a sampler leaves what is derived for it, and some run reaches it."""
    for scheme in SAMPLING:
        plan = planned(plan_of, scheme)
        at = derived.sampler_participation(plan, 0, STEPS)
        cap = derived.records_per_lot(plan, 0)
        squares, fullest, patterns = 0, 0, set()
        for run in range(RUNS):
            lots = drawn(plan, run)
            for record in range(SIZE):
                steps = np.flatnonzero(lots[:, record]).tolist()
                assert is_pattern(steps, at), scheme
                patterns.add(tuple(steps))
            for user in combinations(range(SIZE), RECORDS):
                counts = lots[:, user].sum(axis=1)
                assert max(counts) <= cap, scheme
                fullest = max(fullest, *counts)
                squares = max(squares, int(counts @ counts))
        assert fullest == cap, scheme
        most = at.max_participations(STEPS)
        if scheme not in FRESH_LOTS | {"b_min_sep"}:
            # Others are in as many lots as they may be with hardly any chance.
            assert max(map(len, patterns)) == most, scheme
        if scheme in ("shuffled", "cyclic"):
            assert squares == at.squares(STEPS) * cap**2, scheme
        if scheme == "shuffled":
            every = set(product(*(range(first, min(first + 3, STEPS)) for first in (0, 3, 6))))
            assert every <= patterns


def allocations(steps: int, at: Participation, cap: int) -> Iterator[np.ndarray[Any, Any]]:
    """Every allocation of a user's records to lots that fills as many as it can, in lots."""
    records, turn = int(at.lots_filled * cap), at.turn
    of_epoch = [n for n in product(range(cap + 1), repeat=turn) if sum(n) <= records]
    of_epoch = [n for n in of_epoch if sum(n) == min(records, cap * turn)]
    epochs = 1 if at.schema == "fixed_epoch" else -(-steps // turn)
    for chosen in product(of_epoch, repeat=epochs):
        whole = chosen * -(-steps // turn) if epochs == 1 else chosen
        yield np.concatenate(whole)[:steps] / cap


def truth(strategy: Strategy, at: Participation, cap: int) -> float:
    """√ of the largest Σ s_i s_j n_i n_j X_ij over all allocations and signs."""
    gram, best = strategy.strategy_matrix().T @ strategy.strategy_matrix(), 0.0
    for weights in allocations(strategy.steps, at, cap):
        taken = np.flatnonzero(weights)
        block = gram[np.ix_(taken, taken)] * np.outer(weights[taken], weights[taken])
        if np.all(block >= 0):
            best = max(best, float(block.sum()))
            continue
        every = np.array(list(product([1.0, -1.0], repeat=len(taken))))
        best = max(best, float(np.max(((every @ block) * every).sum(axis=1))))
    return math.sqrt(best)


def strategies(steps: int, rng: np.random.Generator) -> list[Strategy]:
    """Strategies of each class over ``steps``, with and without negative entries."""
    signed = rng.normal(size=steps).round(2)
    signed[0] = 1.0
    lowered = np.tril(rng.normal(size=(steps, steps)).round(2), -1) + np.eye(steps)
    return [
        Bidiagonal.of(0.9, steps),
        Bidiagonal.of(-1.0, steps),
        NormalizedBidiagonal.of(0.7, steps),
        Blt.of([0.9, 0.5], [0.4, 0.3], steps),
        square_root(steps),
        identity(steps),
        Toeplitz.from_strategy(signed, steps),
        Toeplitz.from_noise([1.0, 0.0, 0.9], steps),
        Dense.from_strategy(lowered),
        Dense.from_strategy(np.abs(lowered)),
        Scheduled.of(square_root(steps), rng.uniform(0.5, 2, steps)),
        Tree.of(steps),
    ]


PATTERNS = [
    (Participation.one_per_epoch(participations=3, epoch=3), 7, 1),
    (Participation.one_per_epoch(participations=2, epoch=4), 8, 1),
    (Participation.one_per_epoch(participations=2, epoch=3, lots_filled=Fraction(3, 2)), 6, 2),
    (Participation.one_per_epoch(participations=2, epoch=3, lots_filled=Fraction(2)), 5, 1),
    (Participation(schema="fixed_epoch", participations=3, separation=3), 8, 1),
    (
        Participation(
            schema="fixed_epoch", participations=3, separation=3, lots_filled=Fraction(5, 2)
        ),
        8,
        2,
    ),
]
"""A participation, the steps of the run, and the records of a lot."""


def every_allocation_is_bounded() -> None:
    """Law: the truth over all allocations and signs lies between both ends, and meets them."""
    rng = np.random.default_rng(seeded(5))  # type: ignore[arg-type]
    for at, steps, cap in PATTERNS:
        for strategy in strategies(steps, rng):
            result, found = bounds.pattern_sensitivity(strategy, at), truth(strategy, at, cap)
            name = f"{strategy.kind} {at}"
            assert result.attained <= found * (1 + 1e-12), name
            assert result.value >= found * (1 - 1e-12), name
            if strategy.kind == "independent":
                assert result.exact, name
            if at.lots_filled == 1 and at.max_participations(steps) < 3 and strategy.is_nonnegative:
                assert result.value == pytest.approx(found, rel=1e-9), name
            if at.lots_filled > 1 and strategy.kind != "tree":
                assert result.attained >= 0.9 * found, name
                assert result.value <= 1.25 * found or not strategy.is_nonnegative, name


def signs_are_found() -> None:
    """Law: the search reaches the largest Σ s_i s_j X_ij of nearly all blocks, and passes none."""
    rng = np.random.default_rng(seeded(6))  # type: ignore[arg-type]
    missed = 0
    for _ in range(RUNS):
        matrix = rng.normal(size=(8, 8))
        gram = matrix.T @ matrix
        chosen = signs.best_signs(gram)
        every = np.array(list(product([1.0, -1.0], repeat=8)))
        best = float(np.max(((every @ gram) * every).sum(axis=1)))
        reached = float(chosen @ gram @ chosen)
        assert set(chosen) <= {1.0, -1.0}
        missed += reached < best * (1 - 1e-9)
    assert missed <= RUNS / 20


def test_every_draw_of_a_sampler_is_derived_and_some_reach_the_bound(plan_of: Make) -> None:
    every_draw_is_derived(plan_of)


def test_every_allocation_lies_between_both_ends() -> None:
    every_allocation_is_bounded()


def test_signs_of_small_blocks_are_nearly_always_the_best() -> None:
    signs_are_found()


def _without_cap(plan: Plan, index: int) -> int:
    del index
    return plan.dataset.records_per_unit


def _in_one_order(plan: Plan, index: int, steps: int) -> Participation:
    at = DERIVED(plan, index, steps)
    if at.epoch is None:
        return at
    return Participation(
        schema="fixed_epoch",
        participations=at.participations,
        separation=at.epoch,
        lots_filled=at.lots_filled,
    )


def _shifted(by: int) -> Callable[[Plan, int, int], Participation]:
    def shifted(plan: Plan, index: int, steps: int) -> Participation:
        at = DERIVED(plan, index, steps)
        if at.epoch is not None:
            return replace(at, epoch=at.epoch + by)
        return replace(at, separation=max(1, at.separation + by))

    return shifted


DERIVED = derived.sampler_participation
FAULTS: dict[str, tuple[Any, str, Any]] = {
    "cap ignored": (derived, "records_per_lot", _without_cap),
    "orders of epochs ignored": (derived, "sampler_participation", _in_one_order),
    "separation too large": (derived, "sampler_participation", _shifted(1)),
    "separation too small": (derived, "sampler_participation", _shifted(-1)),
    "one lot for all records": (derived, "lots_filled", lambda *_: Fraction(1)),
    "last lot forgotten": (derived, "squares_of", lambda w, lots: min(math.floor(w), lots)),
    "equal signs": (signs, "best_signs", lambda gram: np.ones(len(gram))),
    "neighbouring epochs forgotten": (
        bounds,
        "_worst_chain",
        lambda size, epoch: (CHAIN(np.diag(np.diagonal(size)), epoch)[0], CHAIN(size, epoch)[1]),
    ),
    "a row holds one lot": (
        bounds,
        "_filled",
        lambda values, at: FILLED(values, replace(at, lots_filled=Fraction(1))),
    ),
    "allocation above its lots": (bounds, "_shares", lambda scores, _: np.ones(len(scores))),
}
LAWS = {bounds: every_allocation_is_bounded, signs: signs_are_found}
CHAIN, FILLED = bounds._worst_chain, bounds._filled


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_breaks_a_law(
    plan_of: Make, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, name, replacement = FAULTS[fault]
    monkeypatch.setattr(module, name, replacement)
    with pytest.raises(AssertionError):
        every_draw_is_derived(plan_of) if module is derived else LAWS[module]()


def fixed_order(plan_of: Make, **changes: Any) -> Plan:
    """One epoch of 156 lots of 64 of 10,000 records, 200 of them of one user."""
    document = {
        "adjacency": "zero_out",
        "dataset": {"size": 10_000, "unit": "user", "contributions_per_user": 200},
        "sampling": {"scheme": "cyclic", "lot_size": 64},
        "steps": 156,
        "releases": [{"name": "g", "clip_norm": 1, "noise_multiplier": 100}],
        "target": {"delta": 1e-6},
    }
    return plan_of(**{**document, **changes})


@pytest.mark.parametrize("adjacency", ["zero_out", "replace_one"])
@pytest.mark.parametrize("scheme", ["cyclic", "shuffled"])
@pytest.mark.parametrize(
    ("steps", "squares"),
    [
        (156, 3 * 64**2 + 8**2),
        (312, 2 * (3 * 64**2 + 8**2)),
        (158, 5 * 64**2 + 8**2),
        (2, 2 * 64**2),
    ],
)
def test_a_user_of_more_records_than_a_lot_costs_the_lots_that_they_fill(
    plan_of: Make, scheme: str, adjacency: str, steps: int, squares: int
) -> None:
    plan = fixed_order(
        plan_of, adjacency=adjacency, steps=steps, sampling={"scheme": scheme, "lot_size": 64}
    )
    distance = 2 if adjacency == "replace_one" else 1
    mu = distance * math.sqrt(squares) / 100
    lowered = lower(plan)
    same = lower(replace_noise(plan, {"kind": "toeplitz", "coefficients": [1.0]}))
    for event in (lowered.event(), same.event()):
        # Beside it, a chain of neighbours may be a bound.
        (whole,) = events.alternatives(event)[0].events
        assert isinstance(whole, events.Gaussian)
        assert whole.noise_multiplier == pytest.approx(1 / mu, rel=1e-9)
    assert sensitivity_of(lowered) == pytest.approx(distance * math.sqrt(squares))
    if scheme == "shuffled":
        return
    result = certify(plan, second_opinion=False)
    expected = GaussianCurve(mu=mu).epsilon(1e-6).upper
    assert result.epsilon is not None
    assert result.epsilon.upper == pytest.approx(expected, rel=1e-9)
    assert result.epsilon.lower == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    ("changes", "most"),
    [
        ({}, 5.513081110354897),
        (
            {
                "dataset": {"size": 100, "unit": "user", "contributions_per_user": 3},
                "sampling": {"scheme": "cyclic", "lot_size": 1},
                "steps": 100,
                "releases": [{"name": "g", "clip_norm": 1, "noise_multiplier": 1}],
            },
            9.254265908225973,
        ),
    ],
)
def test_no_lower_end_of_a_user_is_above_what_is_proved(
    plan_of: Make, changes: dict[str, Any], most: float
) -> None:
    """By Σ n_t² ≤ k (⌊m/B⌋ B² + (m mod B)²) and the Gaussian mechanism, in high precision."""
    result = certify(fixed_order(plan_of, **changes), second_opinion=False)
    assert result.epsilon is not None
    assert result.epsilon.lower <= most
    assert result.epsilon.upper == pytest.approx(most, rel=1e-9)


def replace_noise(plan: Plan, noise: dict[str, Any]) -> Plan:
    """The plan with other noise."""
    return plan_from({**as_document(plan), "noise": noise})


def test_records_that_fill_no_last_lot_are_left_out(plan_of: Make) -> None:
    """Of 10 records of one user in lots of 4, two are in no lot."""
    users = {"size": 10, "unit": "user", "contributions_per_user": 10}
    plan = fixed_order(
        plan_of,
        dataset=users,
        sampling={"scheme": "cyclic", "lot_size": 4},
        steps=2,
        target={"delta": 0.01},
    )
    (event,) = lower(plan).event().events
    assert event.noise_multiplier == pytest.approx(100 / math.sqrt(32))


@pytest.mark.parametrize("scheme", SAMPLING)
def test_a_user_of_more_records_than_the_data_set_is_refused(plan_of: Make, scheme: str) -> None:
    users = {"size": SIZE, "unit": "user", "contributions_per_user": SIZE + 1}
    with pytest.raises(RefusedPlan) as caught:
        lower(planned(plan_of, scheme, dataset=users))
    (reason,) = caught.value.reasons
    assert reason.code == "user_above_data_set"
    assert reason.pointer == "/dataset/contributions_per_user"


@pytest.mark.parametrize("scheme", ["fixed_size", "truncated_poisson"])
def test_a_lot_holds_no_more_of_a_user_than_its_size(plan_of: Make, scheme: str) -> None:
    """Both ends at a high rate are below those of all records in every lot."""
    plan = planned(plan_of, scheme)
    assert sampling_schemes.lot_distance(plan, 0) == 4
    assert lower(plan).phases[0].correlation.at(STEPS).distance == 4  # type: ignore[union-attr]


@pytest.mark.by_turns
@pytest.mark.parametrize(
    "at",
    [case[0] for case in PATTERNS]
    + [
        Participation.one_per_epoch(participations=3, epoch=1000),
        Participation.one_per_epoch(participations=3, epoch=1000, lots_filled=Fraction(7, 2)),
    ],
)
def test_the_checker_bounds_the_same_patterns_by_itself(at: Participation) -> None:
    rng = np.random.default_rng(7)
    steps = at.turn * at.participations - 1
    made = strategies(steps, rng) if steps < 100 else [banded_inverse_root(steps, bands=4)]
    for strategy in made:
        run = SimpleNamespace(strategy=strategy, participation=at, route="gaussian", turn=at.turn)
        checked = float(certificate_proof._sensitivity(run))  # type: ignore[arg-type]
        engine = bounds.pattern_sensitivity(strategy, at).value
        assert engine * (1 - 1e-9) <= checked <= engine, strategy.kind


def test_the_bound_of_long_epochs_is_near_a_pattern_that_attains_it() -> None:
    """Any 20 steps cost 19.96, a bound row by row 9.92 and a search finds 8.47."""
    at = Participation.one_per_epoch(participations=20, epoch=100)
    strategy = banded_inverse_root(2000, bands=16)
    result = bounds.pattern_sensitivity(strategy, at)
    assert 8.46 < result.attained <= result.value < 8.48
    assert strategy.sensitivity(at.by_separation).value == pytest.approx(19.9587, abs=1e-4)
    longer = replace(at, epoch=200)
    assert bounds.pattern_sensitivity(banded_inverse_root(4000, bands=16), longer).value < 8.6


def test_shuffled_lots_need_no_participation_and_one_given_changes_nothing(plan_of: Make) -> None:
    changes: dict[str, Any] = {
        "adjacency": "zero_out",
        "dataset": {"size": 1000},
        "sampling": {"scheme": "shuffled", "lot_size": 100},
        "steps": 30,
        "noise": {"kind": "bidiagonal", "lambda": 0.9},
        "target": {"delta": 1e-6},
    }
    covering = {"schema": "min_separation", "participations": 3, "separation": 1}
    result = certify(plan_of(**changes), second_opinion=False)
    given = certify(plan_of(**changes, participation=covering), second_opinion=False)
    assert result.epsilon == given.epsilon
    # By brute force over the 1000 patterns.
    assert result.strategies[0]["sensitivity"] == pytest.approx(5.519799781325516, rel=1e-9)
    assert result.strategies[0]["participation"] == {
        "schema": "one_per_epoch",
        "participations": 3,
        "separation": 1,
        "epoch": 10,
    }
    told = {warning.code for warning in given.warnings} - {
        warning.code for warning in result.warnings
    }
    assert told == {"participation_not_drawn"}


@pytest.mark.parametrize(
    ("noise", "steps", "least", "most"),
    [
        # Signs by one-flip ascent from the leading eigenvector; upper end by the SDP's dual.
        ([1.0, 0.0, 0.95], 40, 54.327260662265935, 54.32726066226594),
        ([1.0, 0.0, 0.95], 400, 370.1434773, 370.1434774),
    ],
)
def test_signed_strategies_are_attained_by_signs(
    noise: list[float], steps: int, least: float, most: float
) -> None:
    every = Participation.fixed_epoch(participations=steps, separation=1)
    result = Toeplitz.from_noise(noise, steps).sensitivity(every)
    assert least <= result.value * (1 + 1e-12)
    assert result.attained <= most
    assert result.exact


def test_signed_strategies_hold_what_enumeration_and_semidefinite_programmes_prove() -> None:
    """Two public cases, whose truth over vectors of all patterns is known by a dual."""
    five = Participation.fixed_epoch(participations=5, separation=1)
    result = Toeplitz.from_strategy([1.0, -0.715, -0.398, 0.567, 0.0], 5).sensitivity(five)
    assert result.attained <= 3.9458547840377642 <= result.value
    eight = Participation.fixed_epoch(participations=8, separation=1)
    exact = banded_inverse_root(8, bands=3, momentum=0.5).sensitivity(eight)
    assert exact.attained <= 8.277428024519164 * (1 + 1e-12)
    assert exact.value == pytest.approx(8.277428024519164, rel=1e-12)
