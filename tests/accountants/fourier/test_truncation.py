"""Truncated Poisson sampling: between plain Poisson, the cut that always happens, and others."""

from __future__ import annotations

import collections
import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from scipy.stats import binom, norm

from affidavit.accountants import accountant
from affidavit.accountants.bracketing_curves import orders_of
from affidavit.accountants.fourier import refinement
from affidavit.accountants.fourier.evaluation import StrataCurve, bounding_curves
from affidavit.accountants.fourier.grid_parameters import GridParameters, Laws
from affidavit.accountants.fourier.truncated_poisson import (
    Cover,
    _draw_probability,
    _LotProbabilities,
    attained_law,
    attained_rate,
    hidden_law,
    truncated_law,
    visible_law,
)
from affidavit.accountants.fourier_accountant import FourierAccountant
from affidavit.accountants.pld import PldAccountant
from affidavit.accountants.protocol import OutOfReach
from affidavit.plan import events

ALL: tuple[events.Neighbours, ...] = ("add_remove", "zero_out", "replace_one")


def cut(
    largest: int,
    neighbours: events.Neighbours = "add_remove",
    *,
    size: int = 1000,
    q: float = 0.05,
    sigma: float = 1.5,
) -> events.TruncatedPoissonGaussian:
    return events.TruncatedPoissonGaussian(
        dataset_size=size,
        sampling_probability=q,
        max_lot_size=largest,
        noise_multiplier=sigma,
        neighbours=neighbours,
    )


def poisson(neighbours: events.Neighbours, q: float = 0.05, sigma: float = 1.5) -> events.Event:
    return events.PoissonSubsampledGaussian(
        sampling_probability=q,
        noise_multiplier=sigma,
        pair="replace_one" if neighbours == "replace_one" else "add_remove",
    )


def run(leaf: events.Event, count: int = 100, delta: float = 1e-6) -> tuple[float, float]:
    result = FourierAccountant().curve(events.Repeated(event=leaf, count=count)).epsilon(delta)
    return result.lower, result.upper


@pytest.mark.parametrize("neighbours", ALL)
def test_a_limit_that_is_never_reached_is_plain_poisson(neighbours: events.Neighbours) -> None:
    lower, upper = run(cut(1000, neighbours))
    plain_lower, plain_upper = run(poisson(neighbours))
    assert lower <= plain_upper
    assert plain_lower <= upper
    assert upper - lower <= 3e-4 * upper


@pytest.mark.ordinary("zero_out")
@pytest.mark.parametrize("neighbours", ALL)
def test_a_tighter_limit_never_costs_less_than_plain_poisson_at_most(
    neighbours: events.Neighbours,
) -> None:
    result = [run(cut(largest, neighbours)) for largest in (200, 80, 70, 60)]
    uppers = [upper for _, upper in result]
    assert all(a <= b * (1 + 1e-4) for a, b in itertools.pairwise(uppers))
    assert uppers[-1] > 1.04 * uppers[0]
    # What is attained is at most what Poisson sampling at the same rate costs.
    assert all(lower <= result[0][1] for lower, _ in result)


@pytest.mark.soak
def test_the_size_that_is_not_private_costs_no_more() -> None:
    """zero_out knows the size of the data set; add_remove must hold for all smaller ones."""
    for largest in (30, 50, 60):
        assert run(cut(largest, "zero_out"))[1] <= run(cut(largest, "add_remove"))[1] * (1 + 1e-4)


@pytest.mark.parametrize("size", [60, 300, 999])
def test_a_smaller_data_set_is_covered(size: int) -> None:
    """With fewer others, at the rate that they leave, no curve is above the law for most."""
    losses = np.linspace(0.0, 3.0, 50)
    p, q = truncated_law(cut(60), "remove").tails(losses)
    high = p - np.exp(losses) * q
    p, q = truncated_law(cut(60, "zero_out", size=size + 1), "remove").tails(losses)
    low = p - np.exp(losses) * q
    assert (low <= high * (1 + 1e-9) + 1e-15).all()


@pytest.mark.parametrize(("size", "largest", "q"), [(7, 3, 0.25), (12, 4, 0.5), (5, 5, 0.125)])
def test_the_attained_rate_is_counted_exactly(size: int, largest: int, q: float) -> None:
    """By enumeration over how many of the others are drawn."""
    rate = Fraction(0)
    p = Fraction(q)
    for others in range(size):
        weight = math.comb(size - 1, others) * p**others * (1 - p) ** (size - 1 - others)
        rate += p * weight * min(Fraction(1), Fraction(largest, others + 1))
    result = attained_rate(cut(largest, size=size, q=q))
    assert result <= rate
    assert result == pytest.approx(float(rate), rel=1e-9)


@pytest.mark.soak
def test_a_record_alone_moves_a_cut_lot_by_two() -> None:
    """Everybody but the record at -1, the record at +1, no noise to hide behind: sampled.

    The released sum tells whether the record is in; δ at ε = 0 is then its chance, and a
    bound that forgot the displaced record would be below it at an ε that its move reaches.
    """
    leaf = cut(3, "zero_out", size=6, q=0.5, sigma=0.7)
    generator = np.random.Generator(np.random.PCG64(7))
    draws = 200_000

    def sums(value: float) -> np.ndarray:
        drawn = generator.random((draws, 6)) < 0.5
        order = np.where(drawn, generator.random((draws, 6)), 2.0)
        stored = order <= np.partition(order, 2, axis=1)[:, 2:3]
        records = np.array([value, -1, -1, -1, -1, -1])
        clean = ((drawn & stored) * records).sum(axis=1)
        return np.asarray(clean + 0.7 * generator.standard_normal(draws))

    present, absent = sums(1.0), sums(0.0)
    curve = FourierAccountant().curve(leaf)
    for at, edge in ((0.0, -1.0), (1.0, 0.0), (2.0, 0.5)):
        gain = float((present > edge).mean() - math.exp(at) * (absent > edge).mean())
        noise = 6 * (1 + math.exp(at)) / (2 * math.sqrt(draws))
        assert gain - noise <= curve.delta(at).upper


@pytest.mark.ordinary("zero_out")
@pytest.mark.parametrize("neighbours", ["add_remove", "zero_out"])
def test_the_public_library_meets_ours(neighbours: events.Neighbours) -> None:
    event = events.Repeated(event=cut(70, neighbours), count=20)
    ours = FourierAccountant().curve(event).epsilon(1e-6)
    theirs = PldAccountant(interval=1e-3).curve(event).epsilon(1e-6)
    assert ours.meets(theirs, 1e-3)
    assert ours.upper <= theirs.upper * 1.05


@pytest.mark.soak
def test_the_value_of_the_librarys_own_test_is_an_upper_bound_of_what_we_attain() -> None:
    """dp_accounting 0.6.0, ``test_truncated_subsampled_gaussian_basic``: 17.90433 at 1e-6."""
    event = events.Composed(
        events=(
            events.Repeated(event=cut(2, "zero_out", size=4, q=0.5, sigma=1.0), count=3),
            events.Repeated(event=cut(2, "zero_out", size=3, q=0.5, sigma=1.0), count=2),
        )
    )
    ours = FourierAccountant().curve(event).epsilon(1e-6)
    assert ours.lower <= 17.904330
    assert ours.upper <= 17.904330


@pytest.mark.parametrize("probability", [0.4, 1e-2, 1e-4, 1e-9])
def test_the_top_is_exceeded_with_at_most_the_probability_named(probability: float) -> None:
    for largest in (45, 55, 70):
        law = truncated_law(cut(largest), "remove")
        top = law.upper_quantile(probability)
        assert float(law.tails(np.array([top]))[0][0]) <= probability * (1 + 1e-6)


def test_no_grid_is_made_finer_for_a_gap_that_the_laws_leave(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No data set attains the dominating law, and four decades lie between at this ε."""
    points = []

    def counted(
        laws: Laws, parameters: GridParameters, *, lower: bool = True
    ) -> tuple[StrataCurve, StrataCurve]:
        points.append(parameters.points)
        return bounding_curves(laws, parameters, lower=lower)

    monkeypatch.setattr(refinement, "bounding_curves", counted)
    leaf = events.TruncatedPoissonGaussian(
        dataset_size=50_000,
        sampling_probability=0.01,
        max_lot_size=560,
        noise_multiplier=0.8652483,
        neighbours="zero_out",
    )
    result = (
        FourierAccountant(relative_width=1e-7)
        ._curve(events.Repeated(event=leaf, count=1000))
        .delta(8)
    )
    assert 0 < result.lower < 1e-3 * result.upper
    assert sum(points) < 1_000_000


@pytest.mark.soak
@pytest.mark.parametrize("neighbours", ALL)
def test_each_order_of_cut_lots_is_bounded(neighbours: events.Neighbours) -> None:
    """As the best of several runs needs them, which costs at least what one run does."""
    run = events.Repeated(event=cut(58, neighbours), count=50)
    curve = FourierAccountant().curve(run)
    whole = curve.epsilon(1e-5)
    orders = [order.epsilon(1e-5) for order in orders_of(curve)]
    assert max(order.lower for order in orders) == pytest.approx(whole.lower, rel=1e-3)
    assert max(order.upper for order in orders) == pytest.approx(whole.upper, rel=1e-3)
    best = events.RepeatAndSelect(event=run, mean=5.0, shape=1.0)
    result = accountant("selection").curve(best).epsilon(1e-5)
    assert whole.lower < result.upper < 3 * whole.upper


def sums(
    leaf: events.TruncatedPoissonGaussian,
    others: tuple[float, ...],
    record: float,
    *,
    there: bool = True,
) -> dict[float, float]:
    """The law of the sum before the noise, by enumeration of who is drawn and who stays."""
    result: dict[float, float] = collections.defaultdict(float)
    values = (*others, record) if there else others
    for drawn in itertools.product((0, 1), repeat=len(values)):
        inside = [value for value, taken in zip(values, drawn, strict=True) if taken]
        q = leaf.sampling_probability
        chance = q ** len(inside) * (1 - q) ** (len(values) - len(inside))
        lots = list(itertools.combinations(inside, min(len(inside), leaf.max_lot_size)))
        for lot in lots:
            result[round(sum(lot), 9)] += chance / len(lots)
    return result


def enumerated(
    leaf: events.TruncatedPoissonGaussian, others: tuple[float, ...], other: float = -1.0
) -> list[float]:
    """δ of one release at ``EPSILONS`` by its definition.

    The record is at 1, and 0, ``other`` or nobody stands for it.
    """
    sigma = leaf.noise_multiplier
    reach = len(others) + 1 + 12 * sigma
    out = np.linspace(-reach, reach, 8001)

    def density(law: dict[float, float]) -> np.ndarray:
        return np.asarray(
            sum(
                chance * np.exp(-(((out - centre) / sigma) ** 2) / 2)
                for centre, chance in law.items()
            )
        ) / (sigma * math.sqrt(2 * math.pi))

    present = density(sums(leaf, others, 1.0))
    match leaf.neighbours:
        case "add_remove":
            absent = density(sums(leaf, others, 0.0, there=False))
        case "zero_out":
            absent = density(sums(leaf, others, 0.0))
        case "replace_one":
            absent = density(sums(leaf, others, other))
    step = float(out[1] - out[0])
    return [
        max(
            float(np.sum(np.maximum(curve, 0.0))) * step
            for curve in (present - alpha * absent, absent - alpha * present)
        )
        for alpha in map(math.exp, EPSILONS)
    ]


def in_the_plane(leaf: events.TruncatedPoissonGaussian, order: str) -> list[float]:
    """δ of one release at ``EPSILONS``: others at one vector, the record at a right angle to it.

    By enumeration of who is drawn and who stays, and quadrature over the plane.
    """
    size, most, q = leaf.dataset_size, leaf.max_lot_size, leaf.sampling_probability
    there: dict[tuple[int, int], float] = collections.defaultdict(float)
    for drawn in itertools.product((0, 1), repeat=size):
        inside = [index for index, taken in enumerate(drawn) if taken]
        chance = q ** len(inside) * (1 - q) ** (size - len(inside))
        lots = list(itertools.combinations(inside, min(len(inside), most)))
        for lot in lots:
            there[len(lot) - (0 in lot), int(0 in lot)] += chance / len(lots)
    instead: dict[tuple[int, int], float] = collections.defaultdict(float)
    for (number, record), chance in there.items():
        instead[number, -record if leaf.neighbours == "replace_one" else 0] += chance
    sigma = leaf.noise_multiplier
    y, x = np.linspace(-8, most / sigma + 8, 601), np.linspace(-9, 9, 601) + 0.5 / sigma

    def density(law: dict[tuple[int, int], float]) -> np.ndarray:
        terms = (
            chance * np.outer(norm.pdf(y - others / sigma), norm.pdf(x - record / sigma))
            for (others, record), chance in law.items()
        )
        return np.asarray(sum(terms))

    over, under = density(there), density(instead)
    if order == "add":
        over, under = under, over
    cell = float((y[1] - y[0]) * (x[1] - x[0]))
    return [float(np.maximum(over - math.exp(e) * under, 0).sum()) * cell for e in EPSILONS]


EPSILONS = (0.01, 0.5, 1.0, 2.0, 4.0, 8.0)
QUADRATURE = 1e-4
"""Relative error of the sums over ``out``, with room."""


@pytest.mark.by_turns
@pytest.mark.ordinary("2-*-zero_out", "1-*-replace_one")
@pytest.mark.parametrize("neighbours", ALL)
@pytest.mark.parametrize(
    ("largest", "q", "sigma"),
    [
        (1, 0.3, 0.6),
        (2, 0.3, 0.5),
        pytest.param(3, 0.6, 1.0, marks=pytest.mark.soak),
    ],
)
def test_no_data_set_by_enumeration_passes_the_bound(
    neighbours: events.Neighbours, largest: int, q: float, sigma: float
) -> None:
    """Others at every end and in the middle, in every number that may be there."""
    most = 4
    leaf = cut(largest, neighbours, size=most + (neighbours != "add_remove"), q=q, sigma=sigma)
    curve = FourierAccountant().curve(leaf)
    bounds = [curve.delta(epsilon) for epsilon in EPSILONS]
    numbers = range(1, most + 1) if neighbours == "add_remove" else (most,)
    for number in numbers:
        for others in itertools.combinations_with_replacement((-1.0, -0.4, 0.0, 1.0), number):
            for exact, bound in zip(enumerated(leaf, others), bounds, strict=True):
                assert exact <= bound.upper * (1 + QUADRATURE)
    alone = (0.0,) * (leaf.dataset_size - 1)
    attained = [enumerated(leaf, alone)]
    if neighbours != "add_remove":
        attained += [in_the_plane(leaf, order) for order in ("remove", "add")]
    for bound, *worst in zip(bounds, *attained, strict=True):
        assert bound.lower <= max(worst) * (1 + QUADRATURE)


@pytest.mark.ordinary("0.3-*-zero_out")
@pytest.mark.parametrize("neighbours", ["zero_out", "replace_one"])
@pytest.mark.parametrize(
    ("q", "sigma"),
    [(0.3, 0.6), (0.01, 0.3), pytest.param(0.7, 2.0, marks=pytest.mark.soak)],
)
def test_two_records_and_a_lot_of_one_attain_the_bound(
    neighbours: events.Neighbours, q: float, sigma: float
) -> None:
    """No order of drawing is left to hide behind: a smaller bound would be wrong."""
    leaf = cut(1, neighbours, size=2, q=q, sigma=sigma)
    curve = FourierAccountant().curve(leaf)
    pairs = zip(*(enumerated(leaf, (other,)) for other in (-1.0, 1.0)), strict=True)
    for epsilon, pair in zip(EPSILONS, pairs, strict=True):
        worst, upper = max(pair), curve.delta(epsilon).upper
        assert worst * (1 - QUADRATURE) <= upper <= worst * (1 + 1e-3) + 1e-12


@pytest.mark.ordinary("replace_one")
@pytest.mark.parametrize("neighbours", ALL)
def test_the_lower_end_is_at_least_that_of_poisson_at_the_rate_of_the_lot(
    neighbours: events.Neighbours,
) -> None:
    leaf = cut(62, neighbours)
    lower, _ = run(leaf)
    expected, _ = run(poisson(neighbours, q=attained_rate(leaf)))
    if neighbours == "add_remove":
        assert lower == pytest.approx(expected, rel=2e-4)
    else:
        assert lower >= expected * (1 - 2e-4)


@pytest.mark.parametrize("neighbours", ["zero_out", "replace_one"])
@pytest.mark.parametrize(("largest", "q", "sigma"), [(1, 0.3, 0.5), (2, 0.3, 0.3)])
def test_what_others_show_of_a_lot_is_attained(
    neighbours: events.Neighbours, largest: int, q: float, sigma: float
) -> None:
    leaf = cut(largest, neighbours, size=6, q=q, sigma=sigma)
    for order in ("remove", "add"):
        more = []
        for epsilon, exact in zip(EPSILONS, in_the_plane(leaf, order), strict=True):
            seen, unseen = (
                float(p[0] - math.exp(epsilon) * q[0])
                for p, q in (
                    law(leaf, order).tails(np.array([epsilon]))
                    for law in (visible_law, attained_law)
                )
            )
            assert unseen - 1e-12 <= seen <= exact * (1 + QUADRATURE) + 1e-12
            more.append(seen > 1.01 * unseen + 1e-9)
        assert any(more)


@pytest.mark.soak
def test_a_cut_rarer_than_delta_costs_nothing() -> None:
    """At N = 1.27e10 the lot of 525,000 is 9.7 standard deviations from the expected one."""
    size, lot = 12_700_000_000, 517_989
    q = lot / size
    run_of = [
        cut(525_000, "zero_out", size=size, q=q, sigma=0.614),
        poisson("zero_out", q=q, sigma=0.614),
    ]
    truncated, plain = (run(leaf, 100_000, 1.1e-10) for leaf in run_of)
    assert truncated == pytest.approx(plain, rel=1e-4)
    assert truncated[1] - truncated[0] <= 1e-4 * truncated[1]


def test_lots_of_fewer_and_of_more_others_hide_a_full_lot_at_every_place() -> None:
    """Of random others in the plane and of others that are all alike, by enumeration of subsets."""
    leaf = cut(3, "zero_out", size=10, q=0.3, sigma=1.5)
    cover = Cover.of(leaf)
    assert cover is not None
    lots, sigma, n = _LotProbabilities.of(leaf), leaf.noise_multiplier, leaf.dataset_size - 1
    fewer = cover.spent * 0.7 * _draw_probability(leaf, 1)
    more, gained = cover.share * lots.cut, cover.lots.others - lots.others
    apart = math.exp(-1 / sigma**2)
    likely = 2 * cover.crowded * math.sqrt(fewer / (more * apart)) * (n - 2)
    draw = np.random.default_rng(3)
    alike = np.array([[1.0, 0.0]] * n)
    vectors = draw.normal(size=(20, n, 2))
    vectors /= np.maximum(1.0, np.linalg.norm(vectors, axis=2))[:, :, None]
    along = np.stack([np.linspace(-12, 18, 3000), np.zeros(3000)], axis=1)

    def density(z: np.ndarray, others: np.ndarray, number: int) -> np.ndarray:
        centres = [others[list(s)].sum(axis=0) for s in itertools.combinations(range(n), number)]
        squares = ((z[:, None, :] - np.array(centres)[None]) ** 2).sum(axis=2)
        return np.asarray(np.exp(-squares / (2 * sigma**2)).mean(axis=1))

    def hidden(z: np.ndarray, others: np.ndarray) -> np.ndarray:
        """That of two others, the second no more than ``likely`` times likelier than without it."""
        total = np.zeros(len(z))
        for first, second in itertools.permutations(range(n), 2):
            squares = ((z - others[first] - others[second]) ** 2).sum(axis=1)
            without = ((z - others[first]) ** 2).sum(axis=1)
            seen = without - squares <= 2 * sigma**2 * math.log(likely)
            total += np.exp(-squares / (2 * sigma**2)) * seen
        return total / (n * (n - 1))

    least = []
    for others in (alike, *vectors):
        z = along if others is alike else draw.normal(size=(400, 2)) * 5
        above = fewer * density(z, others, 1) + more * density(z, others, 3)
        below = gained * hidden(z, others)
        assert (below <= above * (1 + 1e-9)).all()
        least.append(float((above / np.maximum(below, 1e-300)).min()))
    # All alike are about the worst; what is lost of it is ``crowded`` of the most.
    assert least[0] < 1.01 / (1 - cover.crowded)


@pytest.mark.ordinary("zero_out-3-*", "replace_one-3-*")
@pytest.mark.parametrize(
    ("neighbours", "largest", "q", "sigma"),
    [
        ("zero_out", 3, 0.3, 2.0),
        ("zero_out", 2, 0.3, 1.2),
        ("replace_one", 4, 0.5, 1.5),
        ("replace_one", 3, 0.2, 3.0),
        ("add_remove", 3, 0.1, 3.0),
        ("add_remove", 2, 0.2, 3.0),
    ],
)
def test_no_data_set_by_enumeration_passes_the_bound_of_hidden_cuts(
    neighbours: events.Neighbours, largest: int, q: float, sigma: float
) -> None:
    """On the line, others at both ends, in the middle and between, in every number."""
    private = neighbours == "add_remove"
    leaf = cut(largest, neighbours, size=8, q=q, sigma=sigma)
    out = np.linspace(-9 - 9 * sigma, 9 + 9 * sigma, 1001)

    def densities(others: tuple[float, ...]) -> list[np.ndarray]:
        """With the record at 1, and with what is there instead of it."""
        n = len(others)
        chances = [math.comb(n, m) * q**m * (1 - q) ** (n - m) for m in range(n + 1)]
        chances += [0.0] * (largest + 1 - len(chances))
        full = sum(chances[largest:])
        # The record and M others drawn: it stays with probability L / (M + 1).
        stays = sum(q * chances[m] * largest / (m + 1) for m in range(largest, n + 1))
        drawn = [q * chance for chance in chances[:largest]]
        drawn[-1] += stays
        result = [np.zeros(out.size), np.zeros(out.size)]
        for number in range(min(largest, n) + 1):
            sums = np.array([sum(some) for some in itertools.combinations(others, number)])
            is_full = number == largest

            def shape(moved: float, sums: np.ndarray = sums) -> np.ndarray:
                return np.asarray(norm.pdf((out[:, None] - sums - moved) / sigma).mean(axis=1))

            absent = full - stays if is_full else (1 - q) * chances[number]
            result[0] += absent * shape(0.0)
            if not is_full:
                result[0] += drawn[number] * shape(1.0)
            if private:
                result[1] += (full if is_full else chances[number]) * shape(0.0)
            else:
                result[1] += absent * shape(0.0)
                if not is_full:
                    moved = -1.0 if neighbours == "replace_one" else 0.0
                    result[1] += drawn[number] * shape(moved)
        return [one / sigma for one in result]

    bounds = []
    for side in ("remove", "add"):
        law, conceded = hidden_law(leaf, side)
        assert conceded > 0
        over, under = law.tails(np.array(EPSILONS))
        bounds.append(over - np.exp(EPSILONS) * under + conceded)
    reached, step = 0.0, float(out[1] - out[0])
    for number in range(leaf.dataset_size // 2, leaf.dataset_size + 1) if private else (7,):
        for others in itertools.combinations_with_replacement((-1.0, 0.0, 1.0), number):
            pair = densities(others)
            for bound, (over, under) in zip(bounds, (pair, pair[::-1]), strict=True):
                for limit, epsilon in zip(bound, EPSILONS, strict=True):
                    exact = float(np.maximum(over - math.exp(epsilon) * under, 0).sum()) * step
                    assert exact <= limit * (1 + QUADRATURE) + 1e-12
                    reached = max(reached, exact / limit)
    assert reached > 0.5


@pytest.mark.parametrize(
    ("size", "q", "largest", "sigma", "epsilon", "least"),
    [(400, 0.05, 29, 4.0, 0.03563, 5.59e-8), (2000, 0.3, 641, 1.5, 0.321, 2.4e-5)],
)
def test_others_opposite_to_an_added_record_stay_below_the_bound_of_hidden_cuts(
    size: int, q: float, largest: int, sigma: float, epsilon: float, least: float
) -> None:
    """What half lines distinguish; δ at ``epsilon`` was certified below ``least``."""
    leaf = cut(largest, size=size, q=q, sigma=sigma)
    drawn = np.arange(size + 1)
    chances = binom.pmf(drawn, size, q)
    stays = q * np.minimum(1, largest / (drawn + 1)) * chances
    cut_off = np.minimum(drawn, largest)
    places = np.linspace(-size * q - 12 * sigma - 60, 12 * sigma, 1500)[:, None]

    def above(centres: np.ndarray, masses: np.ndarray) -> np.ndarray:
        return np.asarray(norm.sf((places - centres) / sigma) @ masses)

    kept = np.minimum(drawn, largest - 1)
    without = above(-cut_off, chances)
    with_record = above(-cut_off, chances - stays) + above(1 - kept, stays)
    deltas = []
    for side, (over, under) in (
        ("remove", (with_record, without)),
        ("add", (without, with_record)),
    ):
        law, conceded = hidden_law(leaf, side)
        for loss in (-0.9, -0.2, -0.02, 0.0, 0.01, epsilon, 0.2, 0.5, 2.0):
            p_tail, q_tail = law.tails(np.array([loss]))
            bound = float(p_tail[0] - math.exp(loss) * q_tail[0]) + conceded
            gains = over - math.exp(loss) * under
            exact = max(float(gains.max()), 1 - math.exp(loss) - float(gains.min()))
            assert exact <= bound * (1 + 1e-8) + 1e-14
            deltas.append((loss, exact))
    assert max(exact for loss, exact in deltas if loss == epsilon) >= least


@pytest.mark.parametrize("angle", [0.0, 60.0, 90.0, 101.0, 130.0, 180.0])
def test_many_others_that_are_alike_stay_below_the_bound_of_hidden_cuts(angle: float) -> None:
    """The worst others of the theorem, at an angle to the record, by quadrature over the plane."""
    leaf = cut(520, "zero_out", size=50_000, q=0.01, sigma=1.0)
    q, most = leaf.sampling_probability, leaf.max_lot_size
    lots, turn = _LotProbabilities.of(leaf), math.radians(angle)
    # Places are in deviations of the noise, which is one clip norm.
    along, across = np.arange(-24.0, 12.0, 0.05), np.arange(-8.0, 9.0, 0.05)

    def normal(place: float, record: float) -> np.ndarray:
        """Of a lot of L + ``place`` others, with the part of it that the record is."""
        x = place + record * math.cos(turn)
        return np.outer(norm.pdf(along - x), norm.pdf(across - record * math.sin(turn)))

    def density(record: float) -> np.ndarray:
        total = np.zeros((along.size, across.size))
        for missing in range(1, 24):
            chance = _draw_probability(leaf, most - missing)
            total += chance * (1 - q) * normal(-missing, 0)
            drawn = chance * q if missing > 1 else lots.record
            total += drawn * normal(-missing, record)
        return total + lots.cut * normal(0, 0)

    pair = density(1.0), density(0.0)
    for side, (over, under) in zip(("remove", "add"), (pair, pair[::-1]), strict=True):
        law, conceded = hidden_law(leaf, side)
        p_tails, q_tails = law.tails(np.array(EPSILONS))
        bounds = p_tails - np.exp(EPSILONS) * q_tails + conceded
        for limit, epsilon in zip(bounds, EPSILONS, strict=True):
            exact = float(np.maximum(over - math.exp(epsilon) * under, 0).sum()) * 0.05**2
            assert exact <= limit * (1 + QUADRATURE) + 1e-12


@pytest.mark.parametrize("neighbours", ALL)
def test_what_is_out_of_reach_is_refused_however_lots_are_hidden(
    neighbours: events.Neighbours,
) -> None:
    """δ below the method's, and below what hidden lots concede: another engine has to answer."""
    leaf = cut(520, neighbours, size=50_000, q=0.01, sigma=1.0)
    curve = FourierAccountant().curve(events.Repeated(event=leaf, count=2000))
    with pytest.raises(OutOfReach):
        curve.epsilon(1e-31)


@pytest.mark.ordinary("0.1", "1e-06")
@pytest.mark.parametrize("delta", [1e-1, 3.1622776601683794e-3, 1e-6, 1e-12])
def test_the_quantile_of_a_revealed_mixture_bounds_both_laws_together(delta: float) -> None:
    """Both laws of a revealed mixture can exceed it, and together no more than that."""
    leaf = events.TruncatedPoissonGaussian(
        dataset_size=30,
        sampling_probability=0.05,
        max_lot_size=4,
        noise_multiplier=0.2,
        neighbours="add_remove",
    )
    law = truncated_law(leaf, "remove")
    assert law.tails(np.array([law.upper_quantile(delta)]))[0][0] <= delta * (1 + 1e-9)
    curve = FourierAccountant().curve(leaf)
    # The two brackets are of the same dominating law, so one inverts the other.
    assert curve.delta(curve.epsilon(delta).upper).upper <= delta * (1 + 1e-3)
