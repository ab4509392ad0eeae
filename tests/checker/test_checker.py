"""The checker proves what is true and nothing below it, whatever the witness says."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from fractions import Fraction
from itertools import combinations, pairwise, product
from typing import Any

import mpmath
import numpy as np
import pytest
from flint import arb, ctx
from numpy.typing import NDArray

from affidavit.accountants import (
    Bracket,
    FourierAccountant,
    parse_witness,
    search_witness,
    witness_document,
)
from affidavit.accountants.gaussian import GaussianAccountant
from affidavit.accountants.random_allocation import AllocationAccountant
from affidavit.accountants.random_allocation.replaced import replaced_orders
from affidavit.accountants.witness_search import _spread, _witness
from affidavit.checker import (
    Grid,
    Rule,
    RunWitness,
    Unproved,
    Witness,
    compose,
    conceded_probability,
    conclude,
    dominating_pairs,
    participation,
    prove,
    sensitivity,
)
from affidavit.checker.proof import _excess
from affidavit.mechanisms.strategies import Participation, Tree
from affidavit.plan import events
from tests.checker.proof_soak import LOOSENESS, numbered_run, outcome

DELTA = 1e-6


def poisson(
    q: float, sigma: float, steps: int, pair: events.SubsampledPair = "add_remove"
) -> events.Repeated:
    release = events.PoissonSubsampledGaussian(
        sampling_probability=q, noise_multiplier=sigma, pair=pair
    )
    return events.Repeated(event=release, count=steps)


def fixed_size(size: int, lot: int, sigma: float, steps: int) -> events.Repeated:
    release = events.WithoutReplacementGaussian(
        dataset_size=size, sample_size=lot, noise_multiplier=sigma
    )
    return events.Repeated(event=release, count=steps)


def cut(
    neighbours: events.Neighbours, steps: int, *, size: int = 2000, lot: int = 30
) -> events.Repeated:
    release = events.TruncatedPoissonGaussian(
        dataset_size=size,
        sampling_probability=0.01,
        max_lot_size=lot,
        noise_multiplier=1.0,
        neighbours=neighbours,
    )
    return events.Repeated(event=release, count=steps)


RUNS: dict[str, events.Event] = {
    "add_remove": poisson(0.2, 4.0, 410),
    "few rare steps": poisson(1e-4, 1.0, 5),
    "phases": events.Composed(
        events=(
            poisson(0.01, 1.2, 50),
            poisson(0.02, 2.0, 30, "replace_one"),
            events.Repeated(event=events.Gaussian(noise_multiplier=20.0), count=3),
        )
    ),
    "fixed size": fixed_size(1000, 10, 2.0, 20),
    "cut": cut("replace_one", 20),
    "hidden cut": cut("zero_out", 20, size=10**7, lot=100_300),
    "hidden cut of a private size": cut("add_remove", 20, size=10**7, lot=100_300),
}


SLOW = {"add_remove", "phases", "cut"}


@pytest.mark.ordinary("fixed size", "few rare steps")
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


@pytest.mark.parametrize("place", ["replace_one", "zero_out", None])
def test_sums_of_differences_are_those_of_the_engine(place: Any) -> None:
    """In balls and integers on lattices, where the engine inverts a transform."""
    leaf = events.ReplacedAllocationGaussian(bins=30, noise_multiplier=4.0, drawn=0.9, place=place)
    for (part,), order in zip(dominating_pairs.laws(leaf), replaced_orders(leaf), strict=False):
        (run,) = _witness((part,), _spread(part[0]), 1.0, 64).rules
        for delta in (1e-2, 1e-6):
            epsilon = order.approximate_epsilon(delta)
            proved = _excess(part[0], part[0].pieces, arb(epsilon).exp(), run)
            engine = order.least_upper(epsilon)
            assert 0.98 * engine < float(proved.upper()) < 1.1 * engine


def test_a_record_in_the_place_of_another_has_a_statement() -> None:
    leaf = events.ReplacedAllocationGaussian(
        bins=2, noise_multiplier=4.0, drawn=0.9, place="replace_one"
    )
    run = events.Repeated(event=leaf, count=2)
    upper = AllocationAccountant().curve(run).epsilon(1e-4).upper
    (direction,) = dominating_pairs.laws(run)
    part = _witness(direction, _spread(direction[0][0]), upper, 32)
    witness = Witness(epsilon=repr(2 * upper), delta="1e-4", runs=(part,))
    proof = prove(parse_witness(witness_document(witness)), run)
    assert proof.theorems == ("in_place_replace_one",)
    with pytest.raises(Unproved):
        conclude(
            replace(witness, epsilon=repr(0.9 * upper)), (direction,), [compose(direction, part)]
        )


def test_the_bracket_of_little_noise_is_narrow_and_its_upper_end_proved() -> None:
    run = poisson(0.001, 0.12, 100, "replace_one")
    bracket = FourierAccountant().curve(run).epsilon(DELTA)
    assert bracket.width < 1e-3 * bracket.upper
    _, proof = search_witness(run, bracket, DELTA, 1e-3, 512)
    assert bracket.lower < float(proof.epsilon) <= bracket.upper * (1 + 1e-3)


def test_one_gaussian_mechanism_is_its_closed_form() -> None:
    event = events.Repeated(event=events.Gaussian(noise_multiplier=2.0), count=9)
    with mpmath.workdps(60):
        mu, epsilon = mpmath.mpf(1.5), mpmath.mpf(4)
        truth = mpmath.ncdf(mu / 2 - epsilon / mu)
        truth -= mpmath.exp(epsilon) * mpmath.ncdf(-mu / 2 - epsilon / mu)
        above = mpmath.nstr(truth * (1 + mpmath.mpf(10) ** -20), 30)
        below = mpmath.nstr(truth * (1 - mpmath.mpf(10) ** -20), 30)
    assert prove(Witness(epsilon="4", delta=above, runs=()), event).theorems == ("gaussian",)
    with pytest.raises(Unproved):
        prove(Witness(epsilon="4", delta=below, runs=()), event)


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
        prove(witness, events.Composed(events=(poisson(0.2, 4.0, 1), poisson(0.1, 4.0, 1))))


def test_what_has_no_statement_is_refused() -> None:
    event = events.Composed(events=(poisson(0.2, 4.0, 4), events.Laplace(noise_multiplier=3.0)))
    with pytest.raises(Unproved, match="Laplace") as refusal:
        search_witness(event, Bracket(lower=1.0, upper=1.0), DELTA, LOOSENESS)
    assert refusal.value.code == "no_statement"


def test_a_witness_survives_its_document_and_bad_documents_are_refused() -> None:
    event = events.Composed(
        events=(poisson(0.3, 2.0, 1), events.RandomAllocationGaussian(bins=2, noise_multiplier=3.0))
    )
    sums = Grid(step=2.0**-10, reach=64, scales=10, bits=128, linear=True)
    rule = Rule(spacing=0.1, reach=9.0)
    grid = Grid(step=0.003, reach=64, scales=8, bits=100)
    run = RunWitness(grid=grid, rules=(rule, replace(rule, sums=sums)))
    witness = Witness(epsilon="5.0", delta="1e-6", runs=(run, run))
    document = witness_document(witness)
    assert parse_witness(document) == witness
    assert prove(witness, event).theorems == ("poisson_add_remove", "random_allocation")
    for broken in ({}, document | {"runs": [{}]}, document | {"runs": 3}):
        with pytest.raises(Unproved, match="not a witness"):
            parse_witness(broken)
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

    for row in dominating_pairs.DOMINATING_PAIRS.values():
        assert Path(f"docs/theorems/{row.source}.md").exists()


@pytest.mark.soak
@pytest.mark.parametrize("block", range(20))
def test_a_thousand_random_runs_are_proved_within_1e_4(block: int) -> None:
    outcomes = [outcome(*numbered_run(1, 50 * block + index)) for index in range(50)]
    assert not [line for line in outcomes if line.startswith("failed")]


def test_a_cover_of_as_many_lots_as_there_are_is_proved() -> None:
    """The engine's chances and the checker's differ by their rounding alone."""
    event = events.Repeated(
        event=events.TruncatedPoissonGaussian(
            dataset_size=2000,
            sampling_probability=0.025160764349291532,
            max_lot_size=65,
            noise_multiplier=0.8358753524919457,
            neighbours="add_remove",
        ),
        count=9,
    )
    bracket = FourierAccountant().curve(event).epsilon(1.8e-7)
    witness, _ = search_witness(event, bracket, 1.8e-7, 1e-3, 512)
    assert any(witness.covers)


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
        proved = sensitivity.matrix_sensitivity(
            rows,
            [1.0] * steps,
            sensitivity.Patterns(max_participations=most, separation=apart, fixed_separation=False),
            inverse=False,
        )
        assert proved > worst**0.5 * (1 - 1e-12)
        if not case % 2 and decay >= 0:
            assert proved < worst**0.5 * (1 + 1e-12)


@pytest.mark.parametrize("exactly", [True, False])
def test_trees_have_the_sensitivity_of_their_worst_pattern(exactly: bool) -> None:
    """Every pattern of short runs, in the matrix of the nodes."""
    draw = random.Random(7)
    for _ in range(60):
        steps, most, apart = draw.randrange(2, 12), draw.randrange(1, 5), draw.randrange(1, 5)
        tree = Tree.of(steps, period=draw.randrange(1, steps + 1))
        nodes = tree.strategy_matrix()
        worst = max(
            float((nodes[:, pattern].sum(axis=1) ** 2).sum())
            for size in range(1, most + 1)
            for pattern in combinations(range(steps), size)
            if all(b - a == apart or (b - a > apart and not exactly) for a, b in pairwise(pattern))
        )
        patterns = sensitivity.Patterns(
            max_participations=most, separation=apart, fixed_separation=exactly
        )
        proved = sensitivity.tree_sensitivity(steps, tree.period, patterns)
        assert (proved**2).contains(round(worst))


@pytest.mark.parametrize("exactly", [True, False])
def test_a_tree_of_thousands_of_steps_has_the_sensitivity_of_the_certificate(exactly: bool) -> None:
    at = Participation.fixed_epoch if exactly else Participation.min_separation
    stated = Tree.of(3000).sensitivity(at(participations=6, separation=400)).value
    proved = sensitivity.tree_sensitivity(
        3000,
        3000,
        sensitivity.Patterns(max_participations=6, separation=400, fixed_separation=exactly),
    )
    assert float(proved) == pytest.approx(stated, rel=1e-12)


def test_a_power_series_is_inverted_as_far_as_a_run_is_long() -> None:
    """By ``C N = I``, a step at a time, for signs and sizes that rounding could spoil."""
    noise, steps = [1.0, -0.5, 0.25, -0.125], 3000
    once = sensitivity.Patterns(max_participations=1, separation=1)
    inverse: list[float] = []
    for t in range(steps):
        terms = (noise[i] * inverse[t - i] for i in range(1, min(t, 3) + 1))
        inverse.append(float(t == 0) - sum(terms))
    proved = sensitivity.toeplitz_sensitivity(noise, [1.0] * steps, once, inverse=True)
    assert float(proved) == pytest.approx(sum(c * c for c in inverse) ** 0.5, rel=1e-12)


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
            prove(parse_witness(document), event)


@pytest.mark.soak
@pytest.mark.parametrize("neighbours", ["zero_out", "add_remove"])
def test_any_cover_is_sound_and_none_proves_less_than_what_is_attained(
    neighbours: events.Neighbours,
) -> None:
    """A witness may choose what hides a cut as it likes; what it cannot cover is refused."""
    event, draw = cut(neighbours, 2, size=10**6, lot=10_050), random.Random(9)
    attained = FourierAccountant().curve(event).delta(0.5).lower
    witness, _ = search_witness(event, FourierAccountant().curve(event).epsilon(DELTA), DELTA, 1e-3)
    assert parse_witness(witness_document(witness)) == witness
    (chosen,) = witness.covers
    assert chosen is not None
    proved = []
    for _ in range(4):
        # Under add_remove lots of L - 1 others are no more than those of L that they stand for.
        spent = draw.random() * (0.2 if neighbours == "add_remove" else 1.0)
        cover = dominating_pairs.Cover(
            spent=spent, share=0.9 + 0.1 * draw.random(), crowded=draw.random() ** 3
        )
        directions = dominating_pairs.laws(event, (cover,))
        proved.append(
            max(
                float(
                    (
                        compose(direction, run).delta(arb(0.5)) + conceded_probability(direction)
                    ).lower()
                )
                for direction, run in zip(directions, witness.runs, strict=True)
            )
        )
    assert min(proved) >= attained
    for covers in ((chosen, chosen), (None, None)):
        with pytest.raises(Unproved, match="other releases"):
            prove(replace(witness, covers=covers), event)
    with pytest.raises(Unproved, match=r"above|other releases"):
        prove(replace(witness, covers=(None,)), event)
    document = witness_document(witness)
    for part in ("0x0p+0", "0x1p+1", "nan", "-0x1p-1"):
        broken = [{**document["covers"][0], "spent": part}]
        with pytest.raises(Unproved):
            parse_witness({**document, "covers": broken})
    # Almost nothing is left over, and all that the record does in a full lot would be conceded.
    crowd = dominating_pairs.Cover(spent=1e-9, share=1e-9, crowded=1e-12)
    with pytest.raises(Unproved, match="concedes"):
        dominating_pairs.laws(event, (crowd,))


@pytest.mark.soak
def test_threads_that_prove_at_once_prove_what_each_proves_alone() -> None:
    """Balls have one precision for the whole process, which nothing changes."""
    members = [poisson(0.3, 2.0, 2), fixed_size(100, 10, 2.0, 3), poisson(0.01, 1.0, 9)]
    witnesses = [
        Witness(
            epsilon="1.5",
            delta="0.5",
            runs=tuple(
                RunWitness(
                    grid=Grid(step=0.003, reach=64, scales=8, bits=bits),
                    rules=(Rule(spacing=0.05, reach=9.0),),
                )
                for _ in dominating_pairs.laws(event)
            ),
        )
        for event, bits in zip(members, (64, 128, 192), strict=True)
    ]

    def curve(index: int) -> str:
        measure = compose(dominating_pairs.laws(members[index])[0], witnesses[index].runs[0])
        return str(measure.delta(arb(1)).upper())

    before, alone = ctx.prec, [curve(index) for index in range(3)]
    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(curve, [0, 1, 2] * 6)) == alone * 6
    assert ctx.prec == before


def test_a_selection_among_runs_with_two_bounds_has_no_statement() -> None:
    run = events.EitherBound(
        events=(events.Gaussian(noise_multiplier=2), events.Gaussian(noise_multiplier=3))
    )
    event = events.RepeatAndSelect(event=run, mean=2.0, shape=1.0)
    with pytest.raises(Unproved) as refusal:
        search_witness(event, Bracket(lower=1.0, upper=2.0), 1e-6, 0.1)
    assert refusal.value.code == "no_statement"


def test_a_link_that_no_engine_bounds_is_not_proved(monkeypatch: pytest.MonkeyPatch) -> None:
    searching = "affidavit.accountants.witness_search.certain_accountants"
    monkeypatch.setattr(searching, lambda: iter([GaussianAccountant()]))
    chain = events.ChainOfNeighbours(event=poisson(0.01, 1.0, 100), links=2)
    with pytest.raises(Unproved) as refusal:
        search_witness(chain, Bracket(lower=1.0, upper=2.0), 1e-6, 0.1)
    assert refusal.value.code == "not_proved"


@pytest.mark.parametrize(("stretches", "phases"), [(1, 3), (2, 2), (3, 2)])
def test_large_steps_that_are_told_are_no_more_often_more(stretches: int, phases: int) -> None:
    """Every phase of four blocks, and what their steps meet of each other."""
    draw, length = random.Random(phases), stretches * phases
    products = sorted((draw.randrange(1, 100) for _ in range(length + 1)), reverse=True)
    runs = []
    for drawn in product(range(phases), repeat=4):
        steps = [length * n + phases * i + u for n, u in enumerate(drawn) for i in range(stretches)]
        apart = [[abs(step - other) for other in steps] for step in steps]
        runs.append([sum(products[d] for d in row if d <= length) for row in apart])
    for square in sorted({square for run in runs for square in run}):
        larger = [sum(own > square for own in run) for run in runs]
        for count in range(4 * stretches):
            bound = participation._chance_of_more(count, square, products, 4, stretches, phases)
            assert bound >= sum(number > count for number in larger) / len(runs)
    assert (
        participation._chance_of_more(0, max(map(max, runs)), products, 4, stretches, phases) == 0
    )


@pytest.mark.ordinary("2-2")
@pytest.mark.parametrize(("turn", "matrices"), [(1, 6), (2, 2), (2, 6)])
def test_no_law_below_that_of_enumerated_participations_is_accepted(
    turn: int, matrices: int
) -> None:
    """Random C of six steps, every set of steps of a group."""
    draw, rate, noise = random.Random(turn), Fraction(1, 4), 3.0
    for _ in range(matrices):
        rows = [[draw.uniform(-1, 1) * (j <= i) for j in range(6)] for i in range(6)]
        columns = np.abs(np.array(rows))
        spacing = float(np.linalg.norm(columns)) / 8
        above = np.zeros(60)
        for group in range(turn):
            own = columns[:, group::turn]
            sets = np.array(list(product((0, 1), repeat=own.shape[1])))
            chances = np.where(sets, float(rate), 1 - float(rate)).prod(axis=1)
            sizes = np.linalg.norm(sets @ own.T, axis=1)
            beyond = [chances[sizes > place * spacing].sum() for place in range(60)]
            above = np.maximum(above, beyond)
        products = list(participation.matrix_products(rows, [1.0] * 6, turn, inverse=False))
        draws = participation.Draws(max_draws=-(-6 // turn), probability=rate)

        def accepted(
            law: NDArray[np.float64],
            spacing: float = spacing,
            products: participation.Products = products,
            draws: participation.Draws = draws,
        ) -> bool:
            weights = np.maximum(-np.diff(law, prepend=1.0), 1e-30)
            leaf = events.GaussianMixture(
                weights=tuple(weights / weights.sum()), noise_multiplier=noise / spacing
            )
            return participation.is_participation_covered(
                leaf, [(1, Fraction(noise))], products, draws
            )

        assert not accepted(above * (1 - 1e-9))
        assert not accepted(np.append(above[1:], 0.0))
