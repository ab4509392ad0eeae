"""The checker proves what is true and nothing below it, whatever the witness says."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations, pairwise
from math import comb
from typing import Any

import mpmath
import pytest
from flint import arb

from affidavit.accountants import (
    Bracket,
    FourierAccountant,
    search_witness,
    witness_document,
    witness_from,
)
from affidavit.accountants.checker import (
    DOMINATING_PAIRS,
    Grid,
    Patterns,
    Rule,
    RunWitness,
    Unproved,
    Witness,
    composed,
    laws,
    matrix_sensitivity,
    prove,
)
from affidavit.plan import (
    Composed,
    Event,
    Gaussian,
    Laplace,
    PoissonSubsampledGaussian,
    RandomAllocationGaussian,
    Repeated,
    TruncatedPoissonGaussian,
    WithoutReplacementGaussian,
)
from affidavit.plan.events import Neighbours, SubsampledPair
from tests.accountants.proof_soak import LOOSENESS, numbered_run, outcome

DELTA = 1e-6


def poisson(q: float, sigma: float, steps: int, pair: SubsampledPair = "add_remove") -> Repeated:
    release = PoissonSubsampledGaussian(sampling_probability=q, noise_multiplier=sigma, pair=pair)
    return Repeated(event=release, count=steps)


def fixed_size(size: int, lot: int, sigma: float, steps: int) -> Repeated:
    release = WithoutReplacementGaussian(dataset_size=size, sample_size=lot, noise_multiplier=sigma)
    return Repeated(event=release, count=steps)


def cut(neighbours: Neighbours, steps: int, *, size: int = 2000, lot: int = 30) -> Repeated:
    release = TruncatedPoissonGaussian(
        dataset_size=size,
        sampling_probability=0.01,
        max_lot_size=lot,
        noise_multiplier=1.0,
        neighbours=neighbours,
    )
    return Repeated(event=release, count=steps)


RUNS: dict[str, Event] = {
    "add_remove": poisson(0.2, 4.0, 410),
    "few rare steps": poisson(1e-4, 1.0, 5),
    "phases": Composed(
        events=(
            poisson(0.01, 1.2, 50),
            poisson(0.02, 2.0, 30, "replace_one"),
            Repeated(event=Gaussian(noise_multiplier=20.0), count=3),
        )
    ),
    "fixed size": fixed_size(1000, 10, 2.0, 20),
    "cut": cut("replace_one", 20),
}


SLOW = {"add_remove", "phases", "cut"}


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.soak) if n in SLOW else n for n in RUNS],
)
def test_it_proves_the_engines_bound_within_1e_4(name: str) -> None:
    """The engine and the checker share no code; the bound proved lies above the tight ε."""
    bracket = FourierAccountant().curve(RUNS[name]).epsilon(DELTA)
    witness, found = search_witness(RUNS[name], bracket, DELTA, LOOSENESS)
    proof = prove(witness, RUNS[name])
    assert proof == found
    assert bracket.lower < float(proof.epsilon) <= bracket.upper * (1 + 1e-4)


# What is true, to 30 digits, without the checker's code: one hockey stick of normals on a line.

Weights = dict[int, mpmath.mpf]


def stick(over: Weights, under: Weights, mu: mpmath.mpf, alpha: mpmath.mpf) -> mpmath.mpf:
    """∫ (P - α Q)_+ for mixtures of N(m μ, 1), by quadrature between its zeros."""

    def gap(x: mpmath.mpf) -> mpmath.mpf:
        over_x = sum(w * mpmath.npdf(x, m * mu) for m, w in over.items())
        return over_x - alpha * sum(w * mpmath.npdf(x, m * mu) for m, w in under.items())

    places = [mpmath.mpf(k) / 4 for k in range(-60, 61)]
    edges = [places[0]]
    for left, right in pairwise(places):
        if gap(left) * gap(right) < 0:
            edges.append(mpmath.findroot(gap, (left, right), solver="anderson"))
    edges.append(places[-1])
    parts = pairwise(edges)
    return sum((mpmath.quad(gap, [a, b]) for a, b in parts if gap((a + b) / 2) > 0), mpmath.mpf(0))


def lot_probabilities(others: int, q: mpmath.mpf, lot: int) -> tuple[mpmath.mpf, ...]:
    def term(n: int, k: int) -> mpmath.mpf:
        return comb(n, k) * q**k * (1 - q) ** (n - k)

    u = term(others, lot - 1)
    w = sum((term(others, k) for k in range(lot, others + 1)), mpmath.mpf(0))
    in_a_cut = sum((term(others + 1, k) for k in range(lot + 1, others + 2)), mpmath.mpf(0))
    return u, w, in_a_cut * lot / (others + 1) / w


def one_cut_release(neighbours: Neighbours, alpha: mpmath.mpf, *, removed: bool) -> mpmath.mpf:
    """The bound of docs/theorems/truncated-poisson.md, written out again."""
    q, mu, lot = mpmath.mpf(0.01), mpmath.mpf(1), 30
    u, w, p = lot_probabilities(2000 if neighbours == "add_remove" else 1999, q, lot)
    r = 1 - u - w
    replaced = neighbours == "replace_one"
    away = -1 if replaced else 0
    sampled = {0: r * (1 - q), 1: r * q}, ({0: r * (1 - q), -1: r * q} if replaced else {0: r})

    def full(y: int, x: int, absent: int) -> tuple[Weights, Weights]:
        def mixture(place: int) -> Weights:
            weights: Weights = {}
            for m, weight in ((0, u * (1 - q)), (place, u * q), (y, w * (1 - p)), (place, w * p)):
                weights[m] = weights.get(m, mpmath.mpf(0)) + weight
            return weights

        return mixture(x), mixture(absent)

    if neighbours == "add_remove":
        under = {0: u, -1: w}
        over = {0: u * (1 - q), -1: w * (1 - q), 1: q * (u + w)}
        pairs = [(over, under)]
    else:
        pairs = [full(-1, 1, away), full(1, 1, away)]
    swap: Callable[[tuple[Weights, Weights]], tuple[Weights, Weights]] = (
        (lambda pair: pair) if removed else (lambda pair: pair[::-1])
    )
    most = max(stick(*swap(pair), mu, alpha) for pair in pairs)
    return most + stick(*swap(sampled), mu, alpha)


def proved_delta(event: Event, epsilon: float, direction: int = 0) -> arb:
    """What a coarse witness proves of one direction at ``epsilon``."""
    law = laws(event)[direction]
    sums = Grid(step=2.0**-18, reach=256, scales=24, bits=176, linear=True)
    rules = tuple(Rule(spacing=0.01, reach=12.0, sums=sums if own.bins else None) for own, _ in law)
    run = RunWitness(grid=Grid(step=1e-5, reach=1024, scales=8, bits=128), rules=rules)
    return composed(law, run).delta(arb(epsilon)).upper()


def near(bound: arb, truth: mpmath.mpf, slack: float = 5e-3) -> bool:
    return truth * (1 - mpmath.mpf(10) ** -12) <= mpmath.mpf(float(bound)) <= truth * (1 + slack)


@pytest.mark.parametrize("epsilon", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("direction", [0, 1])
def test_a_single_release_is_bounded_just_above_the_truth(epsilon: float, direction: int) -> None:
    with mpmath.workdps(30):
        q, mu, alpha = mpmath.mpf(0.3), mpmath.mpf(1) / 2, mpmath.exp(epsilon)
        pair = {0: 1 - q, 1: q}, {0: mpmath.mpf(1)}
        truth = stick(*(pair if direction == 0 else pair[::-1]), mu, alpha)
    assert near(proved_delta(poisson(0.3, 2.0, 1), epsilon, direction), truth) or truth < 1e-25


def test_a_fixed_size_sample_is_the_worse_of_both_orders() -> None:
    with mpmath.workdps(30):
        q, mu, alpha = mpmath.mpf(1) / 4, mpmath.mpf(1) / 2, mpmath.exp(0.4)
        truth = stick({0: 1 - q, 2: q}, {0: mpmath.mpf(1)}, mu, alpha)
        reverse = stick({0: mpmath.mpf(1)}, {0: 1 - q, 2: q}, mu, alpha)
    assert truth > reverse
    assert near(proved_delta(fixed_size(8, 2, 2.0, 1), 0.4), truth)


@pytest.mark.parametrize(
    "neighbours",
    [
        pytest.param("add_remove", marks=pytest.mark.soak),
        pytest.param("zero_out", marks=pytest.mark.soak),
        "replace_one",
    ],
)
def test_a_cut_lot_is_the_pair_of_its_theorem(neighbours: Neighbours) -> None:
    for direction in range(1 if neighbours == "replace_one" else 2):
        with mpmath.workdps(25):
            truth = one_cut_release(neighbours, mpmath.exp(0.002), removed=direction == 0)
        assert near(proved_delta(cut(neighbours, 1), 0.002, direction), truth)


def allocated(epsilon: float, *, removed: bool) -> mpmath.mpf:
    """E (S - α)_+ or E (1 - αS)_+ of two bins, σ = 2: one z by quadrature, one in closed form."""
    mu = mpmath.mpf(1) / 2
    alpha = mpmath.exp(epsilon if removed else -epsilon)

    def given(z: mpmath.mpf) -> mpmath.mpf:
        # E (X - k)_+ or E (k - X)_+ of a lognormal X of mean one.
        k = 2 * alpha - mpmath.exp(mu * z - mu * mu / 2)
        if k <= 0:
            return 1 - k if removed else mpmath.mpf(0)
        place = (mpmath.log(k) + mu * mu / 2) / mu
        call = mpmath.ncdf(mu - place) - k * mpmath.ncdf(-place)
        return call if removed else call - 1 + k

    kink = (mpmath.log(2 * alpha) + mu * mu / 2) / mu
    mean = mpmath.quad(lambda z: given(z) * mpmath.npdf(z), [-15, -5, min(kink, 14), 15]) / 2
    return mean if removed else mean / alpha


@pytest.mark.parametrize("removed", [True, False])
def test_two_bins_are_bounded_just_above_the_truth(removed: bool) -> None:
    event = RandomAllocationGaussian(bins=2, noise_multiplier=2.0)
    for epsilon in (0.0, 0.4):
        with mpmath.workdps(25):
            truth = allocated(epsilon, removed=removed)
        assert near(proved_delta(event, epsilon, 0 if removed else 1), truth, 1e-2)


def test_a_pass_that_ends_after_one_of_two_bins_is_a_poisson_sample() -> None:
    event = RandomAllocationGaussian(bins=2, noise_multiplier=2.0, released=1)
    half = {0: mpmath.mpf(1) / 2, 1: mpmath.mpf(1) / 2}
    with mpmath.workdps(25):
        truth = stick(half, {0: mpmath.mpf(1)}, mpmath.mpf(1) / 2, mpmath.exp(0.4))
    assert near(proved_delta(event, 0.4), truth, 1e-2)


def test_two_steps_are_bounded_just_above_the_truth() -> None:
    """One loss by quadrature, the other's curve in closed form."""
    q, mu, epsilon = mpmath.mpf(0.3), mpmath.mpf(1) / 2, mpmath.mpf(1)

    def one(alpha: mpmath.mpf) -> mpmath.mpf:
        if alpha <= 1 - q:
            return 1 - alpha
        place = (mpmath.log((alpha - (1 - q)) / q) + mu**2 / 2) / mu
        mixed = (1 - q) * mpmath.ncdf(-place) + q * mpmath.ncdf(mu - place)
        return mixed - alpha * mpmath.ncdf(-place)

    def given(x: mpmath.mpf) -> mpmath.mpf:
        ratio = 1 - q + q * mpmath.exp(mu * x - mu**2 / 2)
        return ratio * mpmath.npdf(x) * one(mpmath.exp(epsilon) / ratio)

    with mpmath.workdps(20):
        truth = mpmath.quad(given, [-12, -4, 0, 2, 4, 6, 14])
    assert near(proved_delta(poisson(0.3, 2.0, 2), 1.0), truth)


def test_one_gaussian_mechanism_is_its_closed_form() -> None:
    event = Repeated(event=Gaussian(noise_multiplier=2.0), count=9)
    with mpmath.workdps(60):
        mu, epsilon = mpmath.mpf(1.5), mpmath.mpf(4)
        truth = mpmath.ncdf(mu / 2 - epsilon / mu)
        truth -= mpmath.exp(epsilon) * mpmath.ncdf(-mu / 2 - epsilon / mu)
        above = mpmath.nstr(truth * (1 + mpmath.mpf(10) ** -20), 30)
        below = mpmath.nstr(truth * (1 - mpmath.mpf(10) ** -20), 30)
    assert prove(Witness(epsilon="4", delta=above, runs=()), event).theorems == ("gaussian",)
    with pytest.raises(Unproved):
        prove(Witness(epsilon="4", delta=below, runs=()), event)


def attack(seed: int, count: int) -> int:
    """Mutate ``count`` witnesses; how many proved a bound, all of them at least the truth."""
    draw = random.Random(seed)
    event = Composed(
        events=(poisson(0.3, 2.0, 2), RandomAllocationGaussian(bins=3, noise_multiplier=3.0))
    )
    single = poisson(0.3, 2.0, 2)
    # The truth lies above the bracket's lower end: nothing may be proved below it.
    bracket = FourierAccountant().curve(single).with_width(1e-6).epsilon(DELTA)
    sums = Grid(step=2.0**-10, reach=64, scales=10, bits=128, linear=True)
    honest = RunWitness(
        grid=Grid(step=0.003, reach=64, scales=6, bits=100),
        rules=(
            Rule(spacing=0.1, reach=9.0),
            Rule(spacing=0.2, reach=8.0, sums=sums),
        ),
    )

    def mutated(run: RunWitness) -> RunWitness:
        factor = 10 ** draw.uniform(-1.5, 1.5)
        wild = draw.choice((0.0, -1.0, float("nan"), float("inf"), 1e-300, 1e300))

        def grid(of: Grid) -> Grid:
            field, value = draw.choice(
                (
                    ("step", of.step * factor),
                    ("step", wild),
                    ("reach", draw.randrange(-2, 200)),
                    ("scales", draw.randrange(-1, 14)),
                    ("bits", draw.randrange(40, 260)),
                )
            )
            return replace(of, **{field: value})  # type: ignore[arg-type]

        def rule(of: Rule) -> Rule:
            cut = replace(
                of,
                **{
                    draw.choice(("spacing", "reach")): draw.choice(
                        (wild, max(0.02, draw.random() * factor))
                    )
                },
            )
            return draw.choice(
                (
                    cut,
                    replace(of, sums=draw.choice((None, of.sums, sums))),
                    replace(of, sums=grid(of.sums) if of.sums else None),
                )
            )

        place = draw.randrange(len(run.rules))
        rules = list(run.rules)
        rules[place] = rule(rules[place])
        return draw.choice((replace(run, grid=grid(run.grid)), replace(run, rules=tuple(rules))))

    proved = 0
    for _ in range(count):
        whole = draw.random() < 0.3
        chosen = honest if whole else replace(honest, rules=honest.rules[:1])
        runs: tuple[RunWitness, ...] = ()
        epsilon = bracket.lower * draw.choice((1 - 1e-9, 0.999, 0.9, 0.5))
        try:
            for _ in range(2):
                run = mutated(chosen)
                runs += (mutated(run) if draw.random() < 0.5 else run,)
            witness = Witness(epsilon=repr(epsilon), delta=repr(DELTA), runs=runs)
            prove(witness, event if whole else single)
        except Unproved:
            pass
        else:
            pytest.fail(f"seed {seed} proved ε ≤ {epsilon}, below {bracket.lower}, by {runs}")
        try:
            wide = Witness(epsilon="9", delta=repr(DELTA), runs=runs)
            prove(wide, event if whole else single)
            proved += 1
        except Unproved:
            continue
    return proved


def test_a_dishonest_witness_proves_nothing_below_the_truth() -> None:
    assert attack(seed=1, count=30) > 0


@pytest.mark.soak
def test_ten_thousand_dishonest_witnesses_prove_nothing_below_the_truth() -> None:
    assert attack(seed=2, count=10_000) > 1000


@pytest.mark.parametrize("step", [1e-300, 1e29])
def test_a_witness_of_absurd_steps_is_refused_and_does_not_hang(step: float) -> None:
    run = poisson(0.3, 2.0, 2)
    epsilon = FourierAccountant().curve(run).epsilon(DELTA)
    witness, _ = search_witness(run, epsilon, DELTA, LOOSENESS)
    absurd = tuple(replace(part, grid=replace(part.grid, step=step)) for part in witness.runs)
    with pytest.raises(Unproved):
        prove(replace(witness, runs=absurd), run)


def test_a_witness_for_another_run_does_not_prove_this_one() -> None:
    run = poisson(0.3, 2.0, 2)
    epsilon = FourierAccountant().curve(run).epsilon(DELTA)
    witness, _ = search_witness(run, epsilon, DELTA, LOOSENESS)
    for other in (poisson(0.3, 1.99, 2), poisson(0.3, 2.0, 3), poisson(0.301, 2.0, 2)):
        with pytest.raises(Unproved, match="above"):
            prove(witness, other)
    with pytest.raises(Unproved, match="other releases"):
        prove(witness, Composed(events=(poisson(0.2, 4.0, 1), poisson(0.1, 4.0, 1))))


def test_what_has_no_statement_is_refused() -> None:
    event = Composed(events=(poisson(0.2, 4.0, 4), Laplace(noise_multiplier=3.0)))
    with pytest.raises(Unproved, match="Laplace") as refusal:
        search_witness(event, Bracket(lower=1.0, upper=1.0), DELTA, LOOSENESS)
    assert refusal.value.code == "no_statement"


def test_a_witness_survives_its_document_and_bad_documents_are_refused() -> None:
    event = Composed(
        events=(poisson(0.3, 2.0, 1), RandomAllocationGaussian(bins=2, noise_multiplier=3.0))
    )
    sums = Grid(step=2.0**-10, reach=64, scales=10, bits=128, linear=True)
    rule = Rule(spacing=0.1, reach=9.0)
    grid = Grid(step=0.003, reach=64, scales=8, bits=100)
    run = RunWitness(grid=grid, rules=(rule, replace(rule, sums=sums)))
    witness = Witness(epsilon="5.0", delta="1e-6", runs=(run, run))
    document = witness_document(witness)
    assert witness_from(document) == witness
    assert prove(witness, event).theorems == ("poisson_add_remove", "random_allocation")
    for broken in ({}, document | {"runs": [{}]}, document | {"runs": 3}):
        with pytest.raises(Unproved, match="no witness"):
            witness_from(broken)
    for epsilon in ("nan", "-1", "eight", "[1 +/- 9]", ""):
        with pytest.raises(Unproved):
            prove(replace(witness, epsilon=epsilon), event)


def test_a_witness_that_would_take_long_is_refused() -> None:
    run = RunWitness(
        grid=Grid(step=1e-6, reach=6000, scales=10, bits=128),
        rules=(Rule(spacing=0.1, reach=9.0),),
    )
    with pytest.raises(Unproved, match="too long"):
        prove(Witness(epsilon="1", delta="1e-6", runs=(run, run)), poisson(0.1, 1.0, 2**90 - 1))


def test_every_statement_has_its_page() -> None:
    from pathlib import Path

    for row in DOMINATING_PAIRS.values():
        assert Path(f"docs/theorems/{row.source}.md").exists()


@pytest.mark.soak
@pytest.mark.parametrize("block", range(20))
def test_a_thousand_random_runs_are_proved_within_1e_4(block: int) -> None:
    outcomes = [outcome(*numbered_run(1, 50 * block + index)) for index in range(50)]
    assert not [line for line in outcomes if line.startswith("failed")]


def test_no_pattern_of_a_least_distance_exceeds_the_sensitivity_proved() -> None:
    """Against every pattern, of matrices with and without structure."""
    draw = random.Random(5)
    for case in range(40):
        steps, most, apart = draw.randrange(1, 9), draw.randrange(1, 5), draw.randrange(1, 5)
        decay = draw.uniform(-1.0, 1.0)
        rows = [
            [
                (draw.uniform(-1, 1) if case % 2 else decay ** (i - j)) if i >= j else 0.0
                for j in range(steps)
            ]
            for i in range(steps)
        ]
        gram = [[abs(sum(r[i] * r[j] for r in rows)) for j in range(steps)] for i in range(steps)]
        worst = max(
            sum(gram[i][j] for i in pattern for j in pattern)
            for size in range(1, most + 1)
            for pattern in combinations(range(steps), size)
            if all(b - a >= apart for a, b in pairwise(pattern))
        )
        proved = matrix_sensitivity(
            rows, [1.0] * steps, Patterns(most=most, apart=apart, exactly=False), inverse=False
        )
        assert proved > worst**0.5 * (1 - 1e-12)
        if not case % 2 and decay >= 0:
            assert proved < worst**0.5 * (1 + 1e-12)


DEEP: list[Any] = []
for _ in range(100_000):
    DEEP = [DEEP]


@pytest.mark.parametrize(
    ("path", "values"),
    [
        ("epsilon", ("nan", "inf", "-1", "1" * 41, "1e9999", "9 ", "９", 9, None, DEEP)),
        ("delta", ("0", "-1e-6", "nan", 1e-6, DEEP)),
        ("runs", ([], None, {}, [{}, {}], DEEP, "ab")),
        ("runs/0/rules", ([], {}, DEEP, [None])),
        ("runs/0/grid/step", ("nan", "inf", "0x0p0", "-0x1p-3", "0x1p-1074", "0x1p9999", 5, DEEP)),
        ("runs/0/grid/reach", (0, -1, 10**30, 1 << 16, "64", 1.5, float("nan"), "9" * 6000, DEEP)),
        ("runs/0/grid/scales", (0, -1, 61, 10**30, "6", None, DEEP)),
        ("runs/0/grid/bits", (0, -1, 193, 10**30, "100", DEEP)),
        ("runs/0/rules/0/spacing", ("nan", "inf", "0x0p0", "0x1p-1074", "-0x1p3", 5, DEEP)),
        ("runs/0/rules/0/reach", ("nan", "inf", "0x1p1023", "-0x1p3", None, DEEP)),
        ("runs/0/rules/0/sums", ({}, None, DEEP)),
    ],
)
def test_a_hostile_document_is_refused_at_once(path: str, values: tuple[Any, ...]) -> None:
    """Nothing else is raised, and nothing is proved."""
    rule = {"spacing": (0.1).hex(), "reach": (9.0).hex()}
    grid = {"step": (0.003).hex(), "reach": 64, "scales": 6, "bits": 100}
    event = poisson(0.3, 2.0, 2)
    for value in values:
        document: Any = {
            "epsilon": "9",
            "delta": "1e-6",
            "runs": [{"grid": dict(grid), "rules": [dict(rule)]} for _ in range(2)],
        }
        place, *parts = document, *path.split("/")
        for part in parts[:-1]:
            place = place[int(part) if part.isdigit() else part]
        place[parts[-1]] = value
        with pytest.raises(Unproved):
            prove(witness_from(document), event)
