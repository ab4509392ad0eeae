"""b-min-sep sampling: its bounds contain what enumerated participations of a record cost."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from fractions import Fraction
from functools import reduce
from itertools import combinations, combinations_with_replacement, product
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from flint import arb
from numpy.typing import NDArray

from affidavit import delta, epsilon, noise_multiplier
from affidavit.accountants.bracketing_curves import orders_of
from affidavit.accountants.chains import chained_epsilon
from affidavit.accountants.column_moments import (
    BoundedByOrder,
    MomentCurve,
    log_moment,
    moment_of_stretches,
)
from affidavit.accountants.fourier_accountant import FourierAccountant
from affidavit.accountants.gaussian import GaussianCurve
from affidavit.accountants.mean_pattern import without_record
from affidavit.accountants.pattern_pairs import log_moment_of_pairs
from affidavit.accountants.registry import accountant
from affidavit.assessment import certify
from affidavit.checker import dominating_pairs
from affidavit.mechanisms import lower
from affidavit.mechanisms.strategies.disclosed_steps import disclosed_steps
from affidavit.mechanisms.strategies.moves_along_direction import separated_draws_mixture
from affidavit.mechanisms.strategies.participation_mixture import (
    participation_tail,
    separated_mixture,
)
from affidavit.mechanisms.strategies.toeplitz import Toeplitz
from affidavit.plan import (
    RefusedPlan,
    events,
    plan_from,
)

Patterns = list[tuple[float, tuple[int, ...]]]
BIDIAGONAL = {"kind": "toeplitz", "coefficients": [0.8, 0.6]}

SEPARATED = {"scheme": "b_min_sep", "lot_size": 10, "separation": 2}


def plan(**changes: Any) -> dict[str, Any]:
    return {
        "version": 1,
        "adjacency": "add_remove",
        "dataset": {"size": 40},
        "sampling": SEPARATED,
        "steps": 4,
        "noise": BIDIAGONAL,
        "releases": [{"name": "all", "clip_norm": 1, "noise_multiplier": 1.5}],
        "target": {"delta": 1e-2},
        **changes,
    }


def patterns(steps: int, p: float, separation: int, *, warm: bool) -> Patterns:
    """Every pattern of participations with its chance, step by step."""
    rest = 1 + (separation - 1) * p if warm else 1.0
    begun = [(1 / rest, 0)] + [(p / rest, wait) for wait in range(1, separation) if warm]

    def go(chance: float, wait: int, steps: int) -> Iterator[tuple[float, tuple[int, ...]]]:
        if not steps:
            yield chance, ()
            return
        for taken, share in ((0, 1 - p), (1, p)) if wait == 0 else ((0, 1.0),):
            later = separation - 1 if taken else max(0, wait - 1)
            for total, rows in go(chance * share, later, steps - 1):
                yield total, (taken, *rows)

    return [item for chance, wait in begun for item in go(chance, wait, steps)]


def strategy(coefficients: list[float], steps: int) -> NDArray[np.float64]:
    column = np.zeros(steps)
    column[: len(coefficients)] = coefficients[:steps]
    return np.array(
        [[column[i - j] if i >= j else 0.0 for j in range(steps)] for i in range(steps)]
    )


def spent(
    mixture: Patterns,
    matrix: NDArray[np.float64],
    sigma: float,
    at: float,
    *,
    replaced: bool = False,
) -> tuple[float, float]:
    """δ at ε of a record that contributes one vector throughout, and how wrong that may be.

    It is ``replaced`` by one that contributes the opposite vector, or is not there.
    """
    draws = np.random.default_rng(7)
    chances = np.array([chance for chance, _ in mixture])
    means = np.array([matrix @ rows for _, rows in mixture]) / sigma
    noise = draws.standard_normal((100_000, len(matrix)))

    def loss(outputs: NDArray[np.float64]) -> NDArray[np.float64]:
        projected, norms = outputs @ means.T, (means**2).sum(axis=1) / 2
        opposite = np.exp(-projected - norms) @ chances if replaced else 1.0
        return np.asarray(np.log(np.exp(projected - norms) @ chances / opposite))

    taken = draws.choice(len(chances), p=chances / chances.sum(), size=len(noise))
    with_it = np.maximum(0, -np.expm1(at - loss(noise + means[taken])))
    instead = means[taken] if replaced else 0.0
    without = np.maximum(0, -np.expm1(at + loss(noise - instead)))
    estimates = [
        (float(x.mean()), 5 * float(x.std()) / math.sqrt(len(x)) + 1e-4) for x in (with_it, without)
    ]
    return max(estimates)


@pytest.mark.by_turns
@pytest.mark.ordinary("1.5-*-True", "0.5-noise0-*-False")
@pytest.mark.parametrize("warm", [True, False])
@pytest.mark.parametrize(
    ("noise", "coefficients"),
    [(BIDIAGONAL, [0.8, 0.6]), ({"kind": "independent"}, [1.0]), ({"kind": "sqrt"}, None)],
)
@pytest.mark.parametrize("sigma", [0.5, 1.5])
def test_the_bounds_contain_what_enumerated_participations_cost(
    noise: dict[str, Any], coefficients: list[float] | None, sigma: float, warm: bool
) -> None:
    coefficients = coefficients or [1, 1 / 2, 3 / 8, 5 / 16]
    mixture = patterns(4, 1 / 3, 2, warm=warm)
    assert sum(chance for chance, _ in mixture) == pytest.approx(1)
    releases = [{"name": "all", "clip_norm": 1, "noise_multiplier": sigma}]
    for at in (0.1, 0.5, 1.5):
        truth, error = spent(mixture, strategy(coefficients, 4), sigma, at)
        bound = delta(plan(noise=noise, releases=releases), epsilon=at)
        assert bound >= truth - error
        if warm:
            assert bound.lower <= truth + error


@pytest.mark.parametrize(
    ("scheme", "noise", "coefficients"),
    [
        (SEPARATED, BIDIAGONAL, [0.8, 0.6]),
        ({"scheme": "poisson", "lot_size": 10}, {"kind": "sqrt"}, [1, 1 / 2, 3 / 8, 5 / 16]),
    ],
)
def test_each_bound_of_a_replaced_record_contains_what_enumerated_participations_cost(
    scheme: dict[str, Any], noise: dict[str, Any], coefficients: list[float]
) -> None:
    apart = scheme.get("separation", 1)
    mixture = patterns(4, 0.25 / (1 - 0.25 * (apart - 1)), apart, warm=True)
    truth, error = spent(mixture, strategy(coefficients, 4), 1.5, 0.5, replaced=True)
    run = lower(plan_from(plan(adjacency="replace_one", sampling=scheme, noise=noise)))
    bounds, attained = events.alternatives(run.event()), events.alternatives(run.attained())
    assert len(bounds) > 2
    told = events.Gaussian(noise_multiplier=0.01)  # some bounds are computed beside another
    for bound in bounds:
        curve = FourierAccountant().curve(events.EitherBound(events=(told, bound)))
        assert curve.delta(0.5).upper >= truth - error
    for bound in attained:
        assert FourierAccountant().curve(bound).delta(0.5).lower <= truth + error


@pytest.mark.by_turns
@pytest.mark.parametrize("adjacency", ["add_remove", "replace_one"])
@pytest.mark.parametrize(
    ("noise", "coefficients"),
    [(BIDIAGONAL, [0.8, 0.6]), ({"kind": "sqrt"}, [1, 1 / 2, 3 / 8, 5 / 16])],
)
def test_each_bound_of_a_user_contains_what_enumerated_records_cost(
    noise: dict[str, Any], coefficients: list[float], adjacency: str
) -> None:
    """Both records of the user always contribute one vector; each waits for itself."""
    one = patterns(4, 1 / 3, 2, warm=True)
    law: dict[tuple[int, ...], float] = defaultdict(float)
    for (p, rows), (q, others) in product(one, one):
        law[tuple(map(sum, zip(rows, others, strict=True)))] += p * q
    both = [(chance, rows) for rows, chance in law.items()]
    user = {"size": 40, "unit": "user", "contributions_per_user": 2}
    run = lower(plan_from(plan(adjacency=adjacency, noise=noise, dataset=user)))
    bounds = [
        one
        for one in events.alternatives(run.event())
        if not isinstance(one, events.ChainOfNeighbours)
    ]
    assert len(bounds) > 1
    truth, error = spent(
        both, strategy(coefficients, 4), 1.5, 0.6, replaced=adjacency == "replace_one"
    )
    told = events.Gaussian(noise_multiplier=0.01)  # some bounds are computed beside another
    for bound in bounds:
        curve = FourierAccountant().curve(events.EitherBound(events=(told, bound)))
        assert curve.delta(0.6).upper >= truth - error


def futures(history: tuple[int, ...], steps: int, p: float, separation: int) -> Patterns:
    """``history``, the latest step last, with every pattern of the ``steps`` after it."""
    if not steps:
        return [(1.0, history)]
    result = []
    recent = history[-(separation - 1) :] if separation > 1 else ()
    for taken, share in ((0, 1.0),) if any(recent) else ((0, 1 - p), (1, p)):
        rows = futures((*history, taken), steps - 1, p, separation)
        result += [(share * chance, row) for chance, row in rows]
    return result


@pytest.mark.parametrize(
    ("separation", "products"),
    [(3, (1.0, 0.5, 0.3)), (1, (1.0, 0.4)), (2, (0.8, 0.5, 0.3)), (2, ())],
)
@pytest.mark.parametrize("order", [2, 3])
def test_a_moment_is_that_of_enumerated_records_from_the_worst_start(
    separation: int, products: tuple[float, ...], order: int
) -> None:
    steps, p, products = 3, 0.2, products or (1.0,)
    run = events.SampledColumns(
        products=products,
        sampling_probability=p,
        separation=separation,
        steps=steps,
        noise_multiplier=1.0,
    )
    lags = max(separation, len(products)) - 1
    total = lags + steps
    met = np.zeros((total, total))
    for i in range(total):
        for j in range(max(i, lags), total):
            if j - i < len(products):
                met[i, j] = met[j, i] = products[j - i]
    past = {row[steps:] for _, row in futures((0,) * steps, lags, p, separation)}
    starts = [futures(row, steps, p, separation) for row in past]
    truth = 0.0
    for chosen in combinations_with_replacement(starts, order):
        chances = reduce(
            np.multiply.outer, [np.array([chance for chance, _ in one]) for one in chosen]
        )
        rows = [np.array([row for _, row in one]) for one in chosen]
        exponents = np.zeros(chances.shape)
        for a, b in combinations(range(order), 2):
            shape = [len(rows[c]) if c in (a, b) else 1 for c in range(order)]
            exponents += (rows[a] @ met @ rows[b].T).reshape(shape)
        truth = max(truth, float((chances * np.exp(exponents)).sum()))
    assert log_moment(run, order) == pytest.approx(math.log(truth), abs=1e-10)


@pytest.mark.parametrize("order", [2, 3])
@pytest.mark.parametrize("p", [0.15, 0.9])
def test_a_moment_of_stretches_is_above_that_of_enumerated_records(p: float, order: int) -> None:
    steps, separation = 5, 2
    for products, beyond in (((1.0, 0.5, 0.2), 0.0), ((0.6, 0.7, 0.0, 0.3), 0.1), ((1.0,), 0.4)):
        run = events.SampledColumns(
            products=products,
            sampling_probability=p,
            separation=separation,
            steps=steps,
            noise_multiplier=1.0,
            beyond=beyond,
        )
        lags = np.abs(np.subtract.outer(np.arange(steps), np.arange(steps)))
        met = np.append(products, beyond)[np.minimum(lags, len(products))]
        drawn = futures((0,) * separation, steps, p, separation)
        chances = np.array([chance for chance, _ in drawn])
        rows = np.array([row[separation:] for _, row in drawn])
        pair = rows @ met @ rows.T
        every = chances[:, None] * chances * np.exp(pair)
        if order == 3:
            every = np.einsum("ab,bc,ca,b->", np.exp(pair), np.exp(pair), every, chances)
        truth = math.log(every.sum())
        bounds = {
            (width, count, wait): moment_of_stretches(run, order, width, count, wait=wait)
            for width in (1, 2)
            for count in (None, 1, 2, 3)
            for wait in (True, False)
        }
        finite = [bound for bound in bounds.values() if bound < math.inf]
        assert len(finite) >= 4
        assert min(finite) >= truth
        # Pairs of records lose where they are, of which the last products have little.
        assert truth <= log_moment_of_pairs(run, order) <= 3 * truth + 0.1
        # What is lost are products of a record's own parts, and chances that adapt.
        assert log_moment(run, order) <= 2.2 * truth + 0.05


def test_pairs_of_records_that_meet_everywhere_alike_cost_no_more_than_they_do() -> None:
    # With one product r the exponent is r times what pairs of participations there are.
    r, p, separation, steps, order = 0.3, 0.05, 4, 11, 6
    run = events.SampledColumns(
        products=(r,),
        beyond=r,
        sampling_probability=p,
        separation=separation,
        steps=steps,
        noise_multiplier=1.0,
    )
    drawn = futures((0,) * separation, steps, p, separation)
    law = np.bincount([sum(row) for _, row in drawn], [chance for chance, _ in drawn])
    truth = 0.0
    for parts in combinations_with_replacement(range(len(law)), order):
        ways = math.factorial(order) / math.prod(map(math.factorial, Counter(parts).values()))
        met = (sum(parts) ** 2 - sum(part**2 for part in parts)) / 2
        truth += ways * math.prod(law[part] for part in parts) * math.exp(r * met)
    pairs = law @ np.exp((order - 1) * r * np.outer(range(len(law)), range(len(law)))) @ law
    bound = log_moment_of_pairs(run, order)
    assert math.log(truth) <= bound == pytest.approx(order / 2 * math.log(pairs), rel=1e-6)
    assert bound <= 1.5 * math.log(truth)


@pytest.mark.parametrize(("separation", "p"), [(1, 0.3), (3, 0.2), (4, 0.8)])
def test_pairs_of_records_with_a_memory_of_at_most_b_steps_are_exact(
    separation: int, p: float
) -> None:
    run = events.SampledColumns(
        products=(1.0, 0.7, 0.4, 0.2)[:separation],
        sampling_probability=p,
        separation=separation,
        steps=9,
        noise_multiplier=1.0,
    )
    # Of order two there is one pair, whose states the other engine lists.
    assert log_moment_of_pairs(run, 2) == pytest.approx(log_moment(run, 2), rel=1e-10)


def enumerated(records: int) -> tuple[events.SampledColumns, Patterns]:
    """A run of a unit of ``records`` with a memory of more than b steps, and its patterns."""
    run = events.SampledColumns(
        products=(1.0, 0.6, 0.3, 0.1),
        sampling_probability=0.4,
        separation=2,
        steps=5,
        noise_multiplier=1.2,
        records_per_unit=records,
    )
    law: dict[tuple[int, ...], float] = defaultdict(float)
    for several in product(patterns(5, 0.4, 2, warm=True), repeat=records):
        rows = tuple(map(sum, zip(*(rows for _, rows in several), strict=True)))
        law[rows] += math.prod(chance for chance, _ in several)
    return run, [(chance, rows) for rows, chance in law.items()]


def products_of(run: events.SampledColumns) -> NDArray[np.float64]:
    lags = np.abs(np.subtract.outer(np.arange(run.steps), np.arange(run.steps)))
    sizes = np.append(run.products, run.beyond) / run.noise_multiplier**2
    return np.asarray(sizes[np.minimum(lags, len(run.products))])


@pytest.mark.parametrize("records", [1, 2])
def test_moments_of_a_user_are_above_those_of_enumerated_records(records: int) -> None:
    run, law = enumerated(records)
    rows = np.array([row for _, row in law])
    chances = np.array([chance for chance, _ in law])
    pair = np.exp(rows @ products_of(run) @ rows.T)
    two = chances @ pair @ chances
    three = np.einsum("ab,bc,ca,a,b,c->", pair, pair, pair, chances, chances, chances)
    for order, truth in ((2, two), (3, three)):
        assert math.log(truth) <= log_moment_of_pairs(run, order) <= 2.5 * math.log(truth)


@pytest.mark.parametrize("records", [1, 2])
def test_a_missing_unit_costs_no_more_than_its_mean_pattern(records: int) -> None:
    run, law = enumerated(records)
    factor = np.linalg.cholesky(products_of(run)).T
    bound = without_record(run, (accountant("gaussian"),))
    assert bound is not None
    noise = np.random.default_rng(5).standard_normal((100_000, run.steps))
    means = np.array([factor @ row for _, row in law])
    chances = np.array([chance for chance, _ in law])
    losses = -np.log(np.exp(noise @ means.T - (means**2).sum(axis=1) / 2) @ chances)
    for at in (0.1, 0.5, 1.0):
        lost = np.maximum(0.0, -np.expm1(at - losses))
        error = 5 * float(lost.std()) / math.sqrt(len(lost))
        assert float(lost.mean()) - error <= bound.delta(at).upper
    # It is the mean over a record that waits for no step at first, which is no less.
    mean = chances @ means
    gaussian = GaussianCurve(mu=float(np.linalg.norm(mean)))
    more = (float(chances @ (means**2).sum(axis=1)) - float(mean @ mean)) / 2
    upper = gaussian.epsilon(1e-3).upper + more
    assert upper <= bound.epsilon(1e-3).upper <= 1.5 * upper


@pytest.mark.parametrize("unit", [{}, {"unit": "user", "contributions_per_user": 3}])
def test_a_run_shorter_than_the_separation_costs_no_more_than_a_longer_one(
    unit: dict[str, Any],
) -> None:
    ends = [
        certify(
            plan_from(
                plan(
                    adjacency="zero_out",
                    dataset={"size": 100_000, **unit},
                    sampling={"scheme": "b_min_sep", "lot_size": 500, "separation": 12},
                    steps=steps,
                    noise={"kind": "bsr", "bands": 8},
                    target={"delta": 1e-6},
                )
            ),
            second_opinion=False,
        ).epsilon
        for steps in (7, 12)
    ]
    uppers = [end.upper for end in ends if end is not None]
    assert len(uppers) == len(ends)
    assert uppers == sorted(uppers)


@pytest.mark.soak
def test_columns_that_meet_for_long_have_ends_less_than_twice_apart() -> None:
    document: dict[str, Any] = {
        "version": 1,
        "adjacency": "zero_out",
        "dataset": {"size": 1_152_435},
        "sampling": {"scheme": "b_min_sep", "lot_size": 3678, "separation": 98},
        "steps": 393,
        "noise": {"kind": "blt", "buffers": 2},
        "releases": [{"name": "all", "clip_norm": 1.0, "noise_multiplier": 3.95}],
        "target": {"delta": 2.1e-7},
    }
    epsilon = certify(plan_from(document), second_opinion=False).epsilon
    assert epsilon is not None
    # Samples of the pair put the truth at 1.39.
    assert epsilon.lower < 1.39 < epsilon.upper < 1.5 * epsilon.lower


def test_moments_of_one_order_leave_the_other_one_to_other_bounds() -> None:
    run = MomentCurve(
        runs=(
            events.SampledColumns(
                products=(1.0,),
                sampling_probability=0.01,
                separation=1,
                steps=100,
                noise_multiplier=1.0,
            ),
        ),
        others=(),
    )
    both, added = GaussianCurve(mu=10.0), GaussianCurve(mu=5.0)
    whole = BoundedByOrder(both=both, removed=run, added=(added,))
    assert run.epsilon(1e-6).upper < added.epsilon(1e-6).upper == whole.epsilon(1e-6).upper
    assert run.delta(5).upper < added.delta(5).upper == whole.delta(5).upper
    # Of an order that is known to be the lesser one its small ε is not computed.
    with patch.object(GaussianCurve, "epsilon", side_effect=[both.epsilon(1e-6)]):
        below = BoundedByOrder(both=both, removed=run, added=(GaussianCurve(mu=0.1),))
        assert below.epsilon(1e-6) == run.epsilon(1e-6)


def test_a_run_shows_no_less_than_its_first_steps() -> None:
    lower_ends = [
        epsilon(
            plan(
                dataset={"size": 500_000},
                sampling=SEPARATED | {"lot_size": 5000, "separation": 4},
                steps=steps,
                noise={"kind": "bsr", "bands": 4},
                releases=[{"name": "all", "clip_norm": 1, "noise_multiplier": 1}],
                target={"delta": 1e-6},
            )
        ).lower
        for steps in (5, 10, 20)
    ]
    assert sorted(lower_ends) == lower_ends
    assert lower_ends[-1] > 1


def test_moments_halve_a_bound_at_one_clip_norm() -> None:
    halved = plan(
        dataset={"size": 500_000},
        sampling=SEPARATED | {"lot_size": 5000, "separation": 4},
        steps=1000,
        noise={"kind": "bsr", "bands": 4},
        releases=[{"name": "all", "clip_norm": 1, "noise_multiplier": 1}],
        target={"delta": 1e-6},
    )
    assert epsilon(halved) < 6


def test_a_separation_of_one_is_poisson_sampling() -> None:
    apart = plan(sampling={"scheme": "b_min_sep", "lot_size": 10, "separation": 1})
    assert epsilon(apart) == epsilon(plan(sampling={"scheme": "poisson", "lot_size": 10}))


@pytest.mark.parametrize(
    ("changes", "links"),
    [
        ({"adjacency": "replace_one"}, 2),
        ({"dataset": {"size": 40, "unit": "user", "contributions_per_user": 3}}, 3),
    ],
)
def test_a_replaced_record_and_a_user_cost_no_more_than_a_chain_of_records(
    changes: dict[str, Any], links: int
) -> None:
    whole, one = epsilon(plan(**changes)), plan(adjacency="zero_out")
    order = plan(
        sampling={"scheme": "cyclic", "lot_size": 20}, **{"adjacency": "zero_out", **changes}
    )
    assert whole <= epsilon(order) * (1 + 1e-6)  # two participations that share no row
    first = epsilon(one)
    assert first.lower <= whole.lower < whole
    if links == 3:
        assert links * first < whole  # every link has less of δ


def test_a_chain_costs_what_its_links_do_one_after_the_other() -> None:
    users = {"size": 41_832, "unit": "user", "contributions_per_user": 3}
    sampling = SEPARATED | {"lot_size": 1814, "separation": 22}
    noise, releases = (
        {"kind": "bisr", "bands": 2},
        [{"name": "all", "clip_norm": 1, "noise_multiplier": 12.0}],
    )
    run = {"dataset": users, "sampling": sampling, "steps": 110, "noise": noise}
    run |= {"releases": releases, "target": {"delta": 1e-5}}
    replaced = lower(plan_from(plan(adjacency="replace_one", **run))).event()
    chains = [
        bound
        for bound in events.alternatives(replaced)
        if isinstance(bound, events.ChainOfNeighbours)
    ]
    assert [chain.links for chain in chains] == [6, 2]
    engine, (_, chain) = FourierAccountant(), chains
    link = engine.curve(chain.event)
    removed, added = orders_of(link)
    own = chained_epsilon(
        lambda at: removed.epsilon(at).upper,
        1e-5,
        chain.links,
        added=lambda at: added.epsilon(at).upper,
    )
    # A record is removed, and another added: the curve of neighbours is the larger of both.
    assert own < chained_epsilon(lambda at: link.epsilon(at).upper, 1e-5, chain.links)
    told = events.Gaussian(noise_multiplier=0.01)
    bound = engine.curve(events.EitherBound(events=(told, chain)))
    assert bound.epsilon(1e-5).upper == pytest.approx(own)


@pytest.mark.parametrize("lot", [300, 299])
def test_a_record_whose_turns_are_nearly_certain_shows_all_of_them(lot: int) -> None:
    """Nine at least of 2000 steps, and not the one of 200 that an unknown step is."""
    run = plan(
        dataset={"size": 60_000},
        sampling=SEPARATED | {"lot_size": lot, "separation": 200},
        steps=2000,
        noise={"kind": "bsr", "bands": 8},
        target={"delta": 1e-6},
    )
    assert epsilon(run).lower > 1


def test_chances_of_many_draws_are_rounded_up() -> None:
    above = float(participation_tail(np.array([140.0]), 1_000_000, 1e-4, 1)[0])
    assert above >= dominating_pairs.at_least(141, 1_000_000, arb(1e-4))


def test_noise_is_found_for_a_target() -> None:
    target = plan(releases=[{"name": "all", "clip_norm": 1}], target={"epsilon": 2, "delta": 1e-5})
    sigma = noise_multiplier(target)
    releases = [{"name": "all", "clip_norm": 1, "noise_multiplier": float(sigma)}]
    assert 1.99 < epsilon(plan(releases=releases, target={"delta": 1e-5})) <= 2


def test_a_lot_above_what_has_waited_is_refused() -> None:
    above = plan(sampling={"scheme": "b_min_sep", "lot_size": 21, "separation": 2})
    with pytest.raises(RefusedPlan) as refusal:
        lower(plan_from(above))
    assert [reason.code for reason in refusal.value.reasons] == ["lot_above_group"]


@pytest.mark.ordinary("add_remove")
@pytest.mark.parametrize("adjacency", ["add_remove", "replace_one"])
def test_a_strategy_that_forgets_costs_little_more_than_a_banded_one(adjacency: str) -> None:
    steps, sigma, rate = 4, 1.5, 0.04
    noise = {"kind": "toeplitz_inverse", "coefficients": [1, -rate]}
    run = lower(plan_from(plan(adjacency=adjacency, steps=steps, noise=noise)))
    correlation = run.phases[0].correlation
    assert correlation is not None
    at, draws = correlation.at(steps), correlation._sampler.step
    assert draws is not None
    bounds = [*correlation._forgetting(draws.event(sigma), at, sigma)]
    assert bounds
    mixture, replaced = patterns(steps, 1 / 3, 2, warm=True), adjacency == "replace_one"
    matrix = strategy([rate**lag for lag in range(steps)], steps)
    truth, error = spent(mixture, matrix, sigma, 0.5, replaced=replaced)
    told = events.Gaussian(noise_multiplier=0.01)  # moments are computed beside another bound
    costs = [
        FourierAccountant().curve(events.EitherBound(events=(told, bound))).delta(0.5).upper
        for bound in bounds
    ]
    assert truth - error <= min(costs) < 0.5


@pytest.mark.parametrize(("steps", "p", "separation"), [(12, 0.3, 3), (10, 0.05, 4), (9, 0.9, 2)])
def test_laws_of_participations_are_on_their_side_of_the_enumerated_one(
    steps: int, p: float, separation: int
) -> None:
    for warm in (True, False):
        counts = [(chance, sum(rows)) for chance, rows in patterns(steps, p, separation, warm=warm)]
        upper = separated_mixture(1.0, steps, p, separation)
        shown = separated_draws_mixture(
            np.ones(steps),
            probability=Fraction(p),
            separation=separation,
            records=1,
            farthest=math.inf,
        )
        assert shown is not None
        for k in range(1, 6):
            truth = sum(chance for chance, count in counts if count >= k)
            reached = math.sqrt(k) * (1 - 1e-9) / upper.spacing
            assert sum(upper.weights[math.ceil(reached) :]) + upper.conceded >= truth * (1 - 1e-12)
            place = math.ceil(k / shown.spacing * (1 - 1e-9))
            assert sum(shown.weights[place:]) <= truth * (1 + 1e-12)


def patterns_by_stretch(
    steps: int, p: float, separation: int, stretches: int, phases: int
) -> Patterns:
    """Every pattern, with its chance, where record and phases are drawn as Theorem 15 says.

    Asserts that no step is drawn with more than the chance that is stated for it.
    """
    bands = stretches * phases + 1 - (stretches > 1)
    flat = Toeplitz.from_strategy([1.0] * bands, steps=steps)
    stated = disclosed_steps(flat, separation=separation, probability=p, stretches=stretches)
    assert stated is not None
    result: dict[tuple[int, ...], float] = {}

    def go(chance: float, rows: tuple[int, ...], free: int) -> None:
        """From the first step of a block on; the record may take part from the step ``free`` on."""
        first = len(rows)
        if first >= steps:
            result[rows[:steps]] = result.get(rows[:steps], 0.0) + chance
            return
        length = stretches * phases
        for phase in range(phases):
            left = 1.0
            for place in range(first + phase, first + length, phases):
                if place < free:
                    continue
                # What b-min-sep gives this step, of what is left of this phase.
                drawn = phases * p * (1 - p) ** (place - max(free, first)) / left
                assert drawn <= stated.probability
                taken = [0] * length
                taken[place - first] = 1
                go(chance / phases * left * drawn, (*rows, *taken), place + separation)
                left *= 1 - drawn
            go(chance / phases * left, (*rows, *[0] * length), free)

    go(1.0, (), 0)
    return [(chance, rows) for rows, chance in result.items()]


@pytest.mark.parametrize(("separation", "stretches", "phases"), [(3, 1, 3), (5, 2, 2), (6, 3, 2)])
def test_phases_that_are_told_leave_the_law_of_participations(
    separation: int, stretches: int, phases: int
) -> None:
    expected = {rows: chance for chance, rows in patterns(8, 0.08, separation, warm=False)}
    actual = {
        rows: chance for chance, rows in patterns_by_stretch(8, 0.08, separation, stretches, phases)
    }
    assert actual == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize("coefficients", [[1.0, -0.6, 0.5, 0.4, 0.1], [0.2, 0.3, 0.5, 0.7, 1.0]])
@pytest.mark.parametrize(("stretches", "phases"), [(1, 4), (2, 2)])
def test_noise_of_steps_that_are_told_is_inside_the_noise_of_the_run(
    coefficients: list[float], stretches: int, phases: int
) -> None:
    steps, length = 60, stretches * phases
    matrix = strategy(coefficients, steps)
    stated = disclosed_steps(
        Toeplitz.from_strategy(coefficients, steps=steps),
        separation=5,
        probability=0.1,
        stretches=stretches,
    )
    assert stated is not None
    norms = np.repeat(*zip(*stated.norms, strict=True))
    assert len(norms) == steps // phases
    draws = np.random.default_rng(3)
    for _ in range(300):
        start = np.repeat(draws.integers(phases, size=steps // length), stretches)
        columns = matrix[:, np.arange(steps // phases) * phases + start]
        shared = np.sqrt(np.abs(columns.T @ columns).sum(axis=1))
        assert np.linalg.norm(columns / shared, 2) <= 1 + 1e-12
        assert np.all(np.sort(shared)[::-1] <= np.sort(norms)[::-1] * (1 + 1e-12))


@pytest.mark.parametrize("noise", [{"kind": "blt", "buffers": 2}, {"kind": "dense"}])
def test_the_noise_of_a_run_is_that_of_its_links_and_groups(noise: dict[str, Any]) -> None:
    document: dict[str, Any] = {
        "version": 1,
        "adjacency": "zero_out",
        "dataset": {"size": 100, "unit": "user", "contributions_per_user": 3},
        "sampling": {"scheme": "b_min_sep", "lot_size": 5, "separation": 4},
        "steps": 12,
        "noise": noise,
        "releases": [{"name": "all", "clip_norm": 1.0, "noise_multiplier": 8.0}],
        "target": {"delta": 1e-5},
    }
    users = lower(plan_from(document))
    link = users.single_record_run
    assert link is not None
    larger = {**document, "dataset": {**document["dataset"], "contributions_per_user": 7}}
    first, *others = (
        run.phases[0].correlation.at(12).strategy.strategy_matrix().tolist()
        for run in (users, link, lower(plan_from(larger)))
        if run.phases[0].correlation is not None
    )
    assert others == [first, first]
