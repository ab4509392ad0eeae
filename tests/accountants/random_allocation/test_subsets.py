"""Records in k of T steps: the law of the partition, the bracket and its attack."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from fractions import Fraction
from itertools import combinations, product
from typing import Any

import numpy as np
import pytest

from affidavit.accountants import GaussianCurve
from affidavit.accountants.random_allocation import AllocationAccountant, ScoreAttack
from affidavit.accountants.random_allocation.score_attack import Lattice, Pair
from affidavit.assessment import certify
from affidavit.mechanisms import lower
from affidavit.plan import (
    Plan,
    RefusedPlan,
    events,
)
from tests.support.random_seeds import seeded

Make = Callable[..., Plan]


def partitions(steps: tuple[int, ...], sizes: tuple[int, ...]) -> Iterator[tuple[Any, ...]]:
    """Ordered partitions of ``steps`` into blocks of the ``sizes``."""
    if not sizes:
        yield ()
        return
    for block in combinations(steps, sizes[0]):
        rest = tuple(step for step in steps if step not in block)
        for others in partitions(rest, sizes[1:]):
            yield (block, *others)


@pytest.mark.parametrize(("steps", "taken"), [(4, 2), (5, 2), (5, 3), (6, 4), (7, 3)])
def test_one_step_of_each_block_of_a_random_partition_is_a_uniform_set(
    steps: int, taken: int
) -> None:
    length, longer = divmod(steps, taken)
    sizes = (length + 1,) * longer + (length,) * (taken - longer)
    law: Counter[frozenset[int]] = Counter()
    drawn = list(partitions(tuple(range(steps)), sizes))
    share = Fraction(1, len(drawn) * math.prod(sizes))
    for blocks in drawn:
        for chosen in product(*blocks):
            law[frozenset(chosen)] += share  # type: ignore[assignment]
    assert law == {
        frozenset(each): Fraction(1, math.comb(steps, taken))
        for each in combinations(range(steps), taken)
    }
    # Blocks that do not move with the partition would not do.
    fixed = Counter(frozenset(chosen) for chosen in product(*drawn[0]))
    assert len(fixed) < math.comb(steps, taken)


def planned(plan_of: Make, taken: int, steps: int, sigma: float = 1.0, **changes: Any) -> Plan:
    return plan_of(
        **{
            "adjacency": "zero_out",
            "sampling": {"scheme": "random_allocation", "participations": taken},
            "steps": steps,
            "releases": [{"name": "all", "clip_norm": 1, "noise_multiplier": sigma}],
            **changes,
        }
    )


def event_of(plan: Plan) -> Any:
    (event,) = lower(plan).event().events
    return event


def test_a_run_is_one_allocation_to_each_block(plan_of: Make) -> None:
    assert event_of(planned(plan_of, 3, 11)) == events.Composed(
        events=(
            events.Repeated(
                event=events.RandomAllocationGaussian(bins=4, noise_multiplier=1.0), count=2
            ),
            events.Repeated(
                event=events.RandomAllocationGaussian(bins=3, noise_multiplier=1.0), count=1
            ),
        )
    )
    assert event_of(planned(plan_of, 9, 11)).events[1] == events.Repeated(
        event=events.Gaussian(noise_multiplier=1.0), count=7
    )


@pytest.mark.parametrize(
    ("adjacency", "sigma"),
    [
        ("zero_out", 0.7),
        pytest.param("add_remove", 0.7, marks=pytest.mark.soak),
        pytest.param("replace_one", 0.7, marks=pytest.mark.soak),
        # The sum of all releases shows more of a replaced record than where it is.
        pytest.param("replace_one", 3.0, marks=pytest.mark.soak),
    ],
)
def test_once_is_balls_in_bins_and_always_is_the_full_batch(
    plan_of: Make, adjacency: str, sigma: float
) -> None:
    changes: dict[str, Any] = {"adjacency": adjacency, "dataset": {"size": 100}}
    once = lower(planned(plan_of, 1, 20, sigma, **changes))
    lots = {"scheme": "balls_in_bins", "lot_size": 5}
    bins = lower(planned(plan_of, 1, 20, sigma, **changes, sampling=lots))
    one, other = (certify(run.plan, second_opinion=False).epsilon for run in (once, bins))
    assert one is not None
    assert other is not None
    assert one.upper == pytest.approx(other.upper, rel=1e-6)
    assert one.lower == pytest.approx(other.lower, rel=1e-6)
    always = planned(plan_of, 20, 20, sigma, **changes)
    full = planned(plan_of, 20, 20, sigma, **changes, sampling={"scheme": "full_batch"})
    assert lower(always).event() == lower(full).event()
    assert lower(always).attained() == lower(full).attained()


def test_replaced_records_and_users_cost_what_known_steps_cost_at_most(plan_of: Make) -> None:
    users = {"size": 1000, "unit": "user", "contributions_per_user": 3}
    for changes, distance in ({"adjacency": "replace_one"}, 2), ({"dataset": users}, 3):
        run = lower(planned(plan_of, 4, 20, 5.0, **changes))
        known, *placed, chain = events.alternatives(run.event())
        assert len(placed) == (distance == 2)  # a record in the place of another has one more
        assert known == events.Composed(
            events=(events.Repeated(event=events.Gaussian(noise_multiplier=5 / distance), count=4),)
        )
        assert chain.links == distance
        (shown,) = run.attained().events
        assert shown.noise_multiplier == pytest.approx(5 * math.sqrt(20) / (4 * distance))


def test_noise_that_is_correlated_is_refused(plan_of: Make) -> None:
    for change in (
        {"noise": {"kind": "bidiagonal", "lambda": 0.5}},
        {"participation": {"schema": "single"}},
        {"clip_schedule": [1.0] * 20},
    ):
        with pytest.raises(RefusedPlan) as caught:
            lower(planned(plan_of, 2, 20, **change))
        (reason,) = caught.value.reasons
        assert (reason.code, reason.pointer) == ("unsupported", "/sampling/scheme")


@pytest.mark.parametrize(
    ("steps", "taken", "sigma", "delta", "width"),
    [
        pytest.param(391, 5, 0.8, 1e-5, 0.01, marks=pytest.mark.soak),
        (500, 50, 2.0, 1e-5, 0.01),
        pytest.param(10_000, 205, 1.42, 1e-5, 0.01, marks=pytest.mark.soak),
        pytest.param(2_000, 655, 20.5, 1e-5, 0.01, marks=pytest.mark.soak),
        pytest.param(100, 50, 5.0, 1e-5, 0.01, marks=pytest.mark.soak),
        pytest.param(1_000, 999, 30.0, 1e-6, 0.01, marks=pytest.mark.soak),
    ],
)
def test_the_bracket_of_a_run_is_narrow(
    plan_of: Make, steps: int, taken: int, sigma: float, delta: float, width: float
) -> None:
    plan = planned(plan_of, taken, steps, sigma, target={"delta": delta})
    bracket = certify(plan, second_opinion=False).epsilon
    assert bracket is not None
    assert 0 < bracket.lower <= bracket.upper <= (1 + width) * bracket.lower
    shown = ScoreAttack(lower(plan).phases[0].attack[0], 1)  # type: ignore[index]
    assert shown.epsilon(delta).lower == pytest.approx(bracket.lower, rel=1e-3)
    at = bracket.lower * 0.98
    assert (
        delta
        <= shown.delta(at).lower
        <= AllocationAccountant().curve(event_of(plan)).delta(at).upper
    )


@pytest.mark.parametrize("sigma", [0.5, 1.0, 4.0])
def test_the_attack_is_all_that_one_bin_and_a_full_batch_show(sigma: float) -> None:
    one = ScoreAttack(events.AllocatedRecord(steps=40, participations=1, noise_multiplier=sigma), 1)
    leaf = events.RandomAllocationGaussian(bins=40, noise_multiplier=sigma)
    exact = AllocationAccountant().curve(leaf).epsilon(1e-5)
    assert 0.96 * exact.lower <= one.epsilon(1e-5).lower <= exact.upper
    every = ScoreAttack(
        events.AllocatedRecord(steps=4, participations=4, noise_multiplier=sigma), 1
    )
    gaussian = GaussianCurve(mu=2 / sigma).epsilon(1e-5)
    assert 0.98 * gaussian.lower <= every.epsilon(1e-5).lower <= gaussian.upper


@pytest.mark.parametrize("side", ["remove", "add"])
@pytest.mark.parametrize("tilt", [0.0, 0.7, 3.0])
def test_rates_bound_those_of_the_sum_of_few_steps(side: Any, tilt: float) -> None:
    record = events.AllocatedRecord(steps=4, participations=2, noise_multiplier=0.8)
    lattice = Lattice.of(Pair(record, 1, side, 0.6).saddle(tilt))
    rates = lattice.rates()
    z = np.concatenate(([-np.inf], lattice.edges[0], [np.inf]))
    sums = []
    for taken in (2, 0) if side == "remove" else (0, 2):
        law = np.ones(1)
        for step in range(4):
            moved = 1.25 * (step < taken)
            one = -np.diff([math.erfc((at - moved) / math.sqrt(2)) / 2 for at in z])
            law = np.convolve(law, one if side == "remove" else one[::-1])
        tails = np.append(np.cumsum(law[::-1])[::-1], np.zeros(rates.thresholds.size))
        sums.append(tails[rates.thresholds])
    assert np.all(rates.true <= sums[0] * (1 + 1e-9))
    assert np.all(rates.true >= sums[0] * 0.999)
    assert np.all(np.exp(rates.log_false) >= sums[1] * (1 - 1e-9))
    resolved = sums[1] > 1e-10
    assert np.all(np.exp(rates.log_false[resolved]) <= sums[1][resolved] * 1.001)


def test_rates_of_two_kinds_of_steps_bound_those_of_their_sum() -> None:
    """Records in two of five bins, of which two are in one epoch more, whichever they are."""
    record = events.AllocatedRecord(
        steps=5, participations=2, noise_multiplier=1.2, longer=2, noise_of_longer=0.8
    )
    lattice = Lattice.of(Pair(record, 1, "remove", 0.6).saddle(0.7))
    rates, sigmas = lattice.rates(), (0.8, 0.8, 1.2, 1.2, 1.2)

    def tails(taken: tuple[int, ...]) -> np.ndarray:
        law = np.ones(1)
        for step, sigma in enumerate(sigmas):
            z = np.concatenate(([-np.inf], lattice.edges[0 if step < 2 else -1], [np.inf]))
            z -= (step in taken) / sigma
            law = np.convolve(law, -np.diff([math.erfc(at / math.sqrt(2)) / 2 for at in z]))
        tail = np.append(np.cumsum(law[::-1])[::-1], np.zeros(rates.thresholds.size))
        return np.asarray(tail[rates.thresholds])

    true = np.mean([tails(some) for some in combinations(range(5), 2)], axis=0)
    assert np.all(rates.true <= true * (1 + 1e-9))
    assert np.all(rates.true >= true * 0.999)
    false, shown = tails(()), np.exp(rates.log_false)
    assert np.all(shown >= false * (1 - 1e-9))
    assert np.all(shown[false > 1e-10] <= false[false > 1e-10] * 1.001)


@pytest.mark.parametrize(
    ("steps", "taken", "sigma", "epsilon"), [(4, 2, 1.0, 1.0), (5, 4, 2.0, 0.5)]
)
def test_neither_end_crosses_the_sampled_likelihood_ratio(
    plan_of: Make, steps: int, taken: int, sigma: float, epsilon: float
) -> None:
    source = np.random.default_rng([int(byte) for byte in str(seeded("subsets")).encode()])
    plan = planned(plan_of, taken, steps, sigma)
    upper = AllocationAccountant().curve(event_of(plan)).delta(epsilon).upper
    record = events.AllocatedRecord(steps=steps, participations=taken, noise_multiplier=sigma)
    least = ScoreAttack(record, 1).delta(epsilon).lower
    sets = np.array(list(combinations(range(steps), taken)))
    ends = []
    for removed in (True, False):
        y = source.normal(size=(50_000, steps)) * sigma
        if removed:
            y[:, :taken] += 1.0
        log_x = (y - 0.5) / sigma**2
        loss = np.log(np.mean([np.exp(log_x[:, each].sum(axis=1)) for each in sets], axis=0))
        gains = -np.expm1(np.minimum(0.0, epsilon - (loss if removed else -loss)))
        ends.append((gains.mean(), 5 * gains.std() / math.sqrt(gains.size)))
    (value, error) = max(ends)
    assert least <= value + error
    assert value - error <= upper
    assert upper <= 1.5 * least
