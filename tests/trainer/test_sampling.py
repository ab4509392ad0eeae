"""Each sampler draws lots by exactly the law that its certificate assumes.

Where a data set is small enough every possible lot is counted and held against its exact
probability. Keys are fixed; with others a test would fail with probability ``FALSE_ALARM``.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from fractions import Fraction
from functools import partial
from itertools import combinations, permutations, product

import pytest
import torch
from scipy import stats
from torch import Tensor

from affidavit.trainer.noise.chacha import derived_key
from affidavit.trainer.steps.sampling import (
    Sampler,
    UniformIntegers,
    b_min_sep,
    balls_in_bins,
    cyclic,
    cyclic_poisson,
    fixed_size,
    full_batch,
    poisson,
    random_allocation,
    shuffled,
)

KEY = bytes(range(32))
FALSE_ALARM = 1e-6
THIRD = Fraction(1, 3)


def keys(count: int) -> list[bytes]:
    """Keys that were derived from one."""
    return [derived_key(KEY, str(item)) for item in range(count)]


def follows(found: list[Hashable], law: Mapping[Hashable, float]) -> bool:
    """Whether the outcomes are of ``law``, by a χ² test; an impossible one never is."""
    counts = Counter(found)
    if counts.keys() - law.keys():
        return False
    assert math.fsum(law.values()) == pytest.approx(1)
    expected = [len(found) * share for share in law.values()]
    assert min(expected) >= 5, "too few draws for the test"
    seen = [counts[item] for item in law]
    return bool(len(law) == 1 or stats.chisquare(seen, expected).pvalue > FALSE_ALARM)


def lots(sampler: Sampler, steps: int) -> list[tuple[int, ...]]:
    """The first lots."""
    return [tuple(sampler(step).tolist()) for step in range(steps)]


def subsets(size: int) -> list[tuple[int, ...]]:
    """Of 0 ... size - 1, in order."""
    return [
        combination for count in range(size + 1) for combination in combinations(range(size), count)
    ]


def poisson_law(size: int, q: Fraction) -> dict[Hashable, float]:
    """Every subset's probability."""
    return {
        subset: float(q ** len(subset) * (1 - q) ** (size - len(subset)))
        for subset in subsets(size)
    }


def test_poisson_takes_each_record_by_itself() -> None:
    sampler = poisson(KEY, size=4, probability=THIRD)
    assert follows(list(lots(sampler, 4000)), poisson_law(4, THIRD))
    assert not follows(list(lots(sampler, 4000)), poisson_law(4, Fraction(2, 5)))


def test_successive_poisson_lots_are_independent() -> None:
    drawn = lots(poisson(KEY, size=2, probability=THIRD), 4001)
    law = poisson_law(2, THIRD)
    pairs = {(one, two): law[one] * law[two] for one in law for two in law}
    assert follows(list(zip(drawn[:-1:2], drawn[1::2], strict=True)), pairs)


def test_large_poisson_lots_have_binomial_sizes_and_even_inclusion() -> None:
    size, steps, q = 5000, 400, Fraction(1, 50)
    drawn = [poisson(KEY, size=size, probability=q)(step) for step in range(steps)]
    total = sum(map(len, drawn))
    low, high = stats.binom.interval(1 - FALSE_ALARM, size * steps, float(q))
    assert low <= total <= high
    counts = torch.bincount(torch.cat(drawn), minlength=size).double()
    spread = float(((counts - steps * float(q)) ** 2).sum()) / (steps * float(q * (1 - q)))
    assert stats.chi2.sf(spread, size) > FALSE_ALARM
    assert stats.chi2.cdf(spread, size) > FALSE_ALARM


def test_truncated_poisson_cuts_to_a_uniform_subset() -> None:
    law: dict[Hashable, float] = {}
    for item, share in poisson_law(4, THIRD).items():
        cut = list(combinations(item, 2)) if len(item) > 2 else [item]  # type: ignore[arg-type]
        for part in cut:
            law[part] = law.get(part, 0) + share / len(cut)
    sampler = poisson(KEY, size=4, probability=THIRD, max_lot_size=2)
    assert follows(list(lots(sampler, 4000)), law)


@pytest.mark.ordinary("2")
@pytest.mark.parametrize("lot_size", [1, 2, 4])
def test_fixed_size_takes_every_subset_alike(lot_size: int) -> None:
    law = {
        combination: 1 / math.comb(4, lot_size) for combination in combinations(range(4), lot_size)
    }
    assert follows(list(lots(fixed_size(KEY, size=4, lot_size=lot_size), 2000)), law)


def test_shuffled_takes_every_order_of_lots_alike() -> None:
    sampler = shuffled(KEY, size=5, lot_size=2)
    drawn = lots(sampler, 6000)
    epochs = list(zip(drawn[::2], drawn[1::2], strict=True))
    orders = Counter((tuple(sorted(p[:2])), tuple(sorted(p[2:4]))) for p in permutations(range(5)))
    assert follows(list(epochs), {item: count / 120 for item, count in orders.items()})


def test_a_shuffled_epoch_holds_no_record_twice() -> None:
    sampler = shuffled(KEY, size=1000, lot_size=90)
    for epoch in range(5):
        drawn = torch.cat([sampler(11 * epoch + place) for place in range(11)])
        assert len(drawn.unique()) == 990


def test_cyclic_goes_through_the_data_in_order() -> None:
    assert lots(cyclic(size=7, lot_size=2), 5) == [(0, 1), (2, 3), (4, 5), (0, 1), (2, 3)]


def test_balls_fall_into_bins_by_themselves() -> None:
    drawn: list[Hashable] = [
        tuple(map(tuple, lots(balls_in_bins(key, size=3, bins=2), 2))) for key in keys(1000)
    ]
    law: dict[Hashable, float] = {}
    for bins in product(range(2), repeat=3):
        law[tuple(tuple(i for i in range(3) if bins[i] == b) for b in range(2))] = 1 / 8
    assert follows(drawn, law)


@pytest.mark.ordinary("1", "2")
@pytest.mark.parametrize("taken", [1, 2, 3, 4])
def test_random_allocation_draws_every_set_of_steps_alike_and_records_apart(taken: int) -> None:
    sets = list(combinations(range(4), taken))
    drawn: list[Hashable] = []
    for key in keys(1000):
        by_step = lots(random_allocation(key, size=2, steps=4, participations=taken), 4)
        drawn.append(
            tuple(tuple(t for t in range(4) if record in by_step[t]) for record in range(2))
        )
    assert follows(drawn, {pair: 1 / len(sets) ** 2 for pair in product(sets, repeat=2)})


def test_random_allocation_of_many_records_takes_each_exactly_so_often() -> None:
    sampler = random_allocation(KEY, size=500, steps=90, participations=7)
    drawn = torch.cat([sampler(step) for step in range(90)])
    assert torch.equal(torch.bincount(drawn, minlength=500), torch.full((500,), 7))


def test_bins_are_kept_or_drawn_afresh() -> None:
    stored = balls_in_bins(KEY, size=100, bins=4)
    assert lots(stored, 4) * 3 == lots(stored, 12)
    afresh = balls_in_bins(KEY, size=100, bins=4, each_epoch=True)
    drawn = lots(afresh, 12)
    for first in (0, 4, 8):
        assert sorted(sum(drawn[first : first + 4], ())) == list(range(100))
    assert drawn[:4] != drawn[4:8]
    once: list[Hashable] = [0 in afresh(step).tolist() for step in range(0, 8000, 4)]
    assert follows(once, {True: 1 / 4, False: 3 / 4})


def test_cyclic_poisson_keeps_participations_apart() -> None:
    sampler = cyclic_poisson(KEY, size=60, groups=5, probability=Fraction(1, 2))
    steps_of: dict[int, list[int]] = {}
    for step in range(200):
        for record in sampler(step).tolist():
            steps_of.setdefault(record, []).append(step)
    assert len(steps_of) == 60
    assert all(len({step % 5 for step in steps}) == 1 for steps in steps_of.values())


def test_cyclic_poisson_draws_groups_and_members_by_themselves() -> None:
    law: dict[Hashable, float] = {}
    half = THIRD / 2
    for subset in subsets(2):
        law[subset] = float(half ** len(subset) * (1 - half) ** (2 - len(subset)))
    drawn: list[Hashable] = [
        lots(cyclic_poisson(key, size=2, groups=2, probability=THIRD), 2)[1] for key in keys(2000)
    ]
    assert follows(drawn, law)


def test_b_min_sep_draws_each_record_that_has_waited_long_enough() -> None:
    """From the first step on as after many: in a share p / (1 + (b - 1) p) of the steps."""
    half, rest = Fraction(1, 2), 2.0  # of waits 0, 1 and 2
    law: dict[Hashable, float] = {
        (): (0.5**4 + 0.5 * 0.5**3 + 0.5 * 0.5**2) / rest,
        (0,): 0.5 * 0.5 / rest,
        (0, 3): 0.5 * 0.5 / rest,
        (1,): (0.5**2 + 0.5 * 0.5) / rest,
        (2,): (0.5**3 + 0.5 * 0.5**2 + 0.5 * 0.5) / rest,
        (3,): (0.5**4 + 0.5 * 0.5**3 + 0.5 * 0.5**2) / rest,
    }
    drawn: list[Hashable] = []
    for key in keys(2000):
        sampler = b_min_sep(key, size=1, separation=3, probability=half)
        drawn.append(tuple(step for step in range(4) if len(sampler(step))))
    assert follows(drawn, law)


def test_lots_of_b_min_sep_are_the_same_in_any_order_and_apart() -> None:
    make = partial(b_min_sep, KEY, size=60, separation=5, probability=Fraction(1, 3))
    in_order = lots(make(), 40)
    sampler = make()
    assert [tuple(sampler(step).tolist()) for step in (30, 7, 8)] == [
        in_order[step] for step in (30, 7, 8)
    ]
    for first in range(36):
        near = sum(in_order[first : first + 5], ())
        assert len(set(near)) == len(near)


def test_full_batch_takes_every_record() -> None:
    assert lots(full_batch(size=3), 2) == [(0, 1, 2)] * 2


@pytest.mark.parametrize("limit", [1, 2, 3, 5, 6])
def test_numbers_below_a_limit_are_uniform(limit: int) -> None:
    drawn: list[Hashable] = UniformIntegers(KEY, 0).below(limit, 3000).tolist()
    assert follows(drawn, dict.fromkeys(range(limit), 1 / limit))


def test_numbers_that_would_be_uneven_are_drawn_again() -> None:
    limit = (1 << 61) + 1  # of 2^62 numbers nearly a half lies above its largest multiple
    drawn = UniformIntegers(KEY, 0).below(limit, 2000)
    assert bool(((drawn >= 0) & (drawn < limit)).all())
    assert stats.kstest(drawn.numpy() / limit, "uniform").pvalue > FALSE_ALARM
    assert (
        stats.kstest(UniformIntegers(KEY, 0).take(2000).numpy() / 2.0**62, "uniform").pvalue
        > FALSE_ALARM
    )


SAMPLERS: dict[str, Callable[[bytes, int], Sampler]] = {
    "poisson": lambda key, size: poisson(key, size=size, probability=THIRD),
    "truncated_poisson": lambda key, size: poisson(
        key, size=size, probability=THIRD, max_lot_size=3
    ),
    "fixed_size": lambda key, size: fixed_size(key, size=size, lot_size=1),
    "shuffled": lambda key, size: shuffled(key, size=size, lot_size=1),
    "cyclic": lambda _, size: cyclic(size=size, lot_size=1),
    "cyclic_poisson": lambda key, size: cyclic_poisson(key, size=size, groups=2, probability=THIRD),
    "b_min_sep": lambda key, size: b_min_sep(key, size=size, separation=2, probability=THIRD),
    "balls_in_bins": lambda key, size: balls_in_bins(key, size=size, bins=2),
    "balls_in_bins, afresh": lambda key, size: balls_in_bins(
        key, size=size, bins=2, each_epoch=True
    ),
    "random_allocation": lambda key, size: random_allocation(
        key, size=size, steps=30, participations=4
    ),
    "full_batch": lambda _, size: full_batch(size=size),
}
NEED_A_RECORD = ("fixed_size", "shuffled", "cyclic")


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_lot_is_sorted_without_repetition_and_a_function_of_key_and_step(name: str) -> None:
    sampler, again = SAMPLERS[name](KEY, 50), SAMPLERS[name](KEY, 50)
    forward = [sampler(step) for step in range(30)]
    for step in (29, 3, 3, 17, 0):
        assert torch.equal(forward[step], again(step))
    for lot in forward:
        assert lot.dtype == torch.int64
        assert torch.equal(lot, lot.unique())
        assert not len(lot) or 0 <= int(lot.min()) <= int(lot.max()) < 50
    other = SAMPLERS[name](bytes(32), 50)
    differ = any(not torch.equal(other(step), lot) for step, lot in enumerate(forward))
    assert differ == (name not in ("cyclic", "full_batch"))


@pytest.mark.parametrize("name", ["poisson", "balls_in_bins", "balls_in_bins, afresh"])
def test_records_do_not_depend_on_those_that_come_after(name: str) -> None:
    fewer, more = SAMPLERS[name](KEY, 40), SAMPLERS[name](KEY, 60)
    for step in range(20):
        lot: Tensor = more(step)
        assert torch.equal(fewer(step), lot[lot < 40])


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_data_set_of_one_record_or_none(name: str) -> None:
    one = {tuple(lot) for lot in lots(SAMPLERS[name](KEY, 1), 50)}
    assert one <= {(), (0,)}
    assert (0,) in one
    if name in NEED_A_RECORD:
        with pytest.raises(ValueError, match="a lot has 1 to 0 records"):
            SAMPLERS[name](KEY, 0)
    else:
        assert lots(SAMPLERS[name](KEY, 0), 5) == [()] * 5


def test_certain_and_impossible_sampling() -> None:
    assert lots(poisson(KEY, size=3, probability=Fraction(1)), 3) == [(0, 1, 2)] * 3
    assert lots(poisson(KEY, size=3, probability=Fraction(0)), 3) == [()] * 3


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: poisson(KEY, size=3, probability=Fraction(4, 3))(0), "4/3 is not a probability"),
        (lambda: poisson(KEY, size=3, probability=Fraction(-1, 3))(0), "not a probability"),
        (lambda: fixed_size(KEY, size=3, lot_size=4), "1 to 3 records, not 4"),
        (lambda: shuffled(KEY, size=3, lot_size=0), "1 to 3 records, not 0"),
        (lambda: balls_in_bins(KEY, size=3, bins=0), "the number of bins must be at least 1"),
        (lambda: cyclic_poisson(KEY, size=3, groups=0, probability=THIRD), "number of groups"),
        (lambda: b_min_sep(KEY, size=3, separation=0, probability=THIRD), "number of steps"),
        (lambda: random_allocation(KEY, size=3, steps=2, participations=3), "in 1 to 2 steps"),
    ],
)
def test_what_is_no_sampler_is_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
