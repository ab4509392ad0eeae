"""Both ends of a selection: against attacks in high precision, quadrature, sampling and pure DP."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import beta, nbinom, norm, poisson

from affidavit.accountants import (
    Bracket,
    EventCurve,
    GaussianCurve,
    PostProcessedCurve,
    PrivacyCurve,
    Unsupported,
)
from affidavit.accountants.registry import accountant
from affidavit.accountants.selection import SelectionAccountant, SelectionAttacks, SelectionCurve
from affidavit.accountants.selection.repetitions import Repetitions
from affidavit.plan import events
from tests.accountants.events import poisson as sampled

LAWS = [(10.0, 1.0), (10.0, 0.0), (3.0, 0.5), (10.0, math.inf), (200.0, 1.0), (1.0, 1.0)]
laws = pytest.mark.parametrize(("mean", "shape"), LAWS)


def selection(run: events.Event, mean: float = 10.0, shape: float = 1.0) -> events.RepeatAndSelect:
    return events.RepeatAndSelect(event=run, mean=mean, shape=shape)


def upper(event: events.Event, delta: float = 1e-6) -> float:
    return SelectionAccountant().curve(event).epsilon(delta).upper


def lower(event: events.Event, delta: float = 1e-6) -> float:
    return PostProcessedCurve(event=event).epsilon(delta).lower


def of_curve(
    curve: PrivacyCurve, mean: float, shape: float
) -> tuple[SelectionAttacks, SelectionCurve]:
    """Both ends of a selection among runs of which both orders have this ``curve``."""
    law = Repetitions(mean=mean, shape=shape)
    order = ((curve, curve),)
    above = SelectionCurve(run=order, whole=order, repetitions=law, other=None)
    return SelectionAttacks(first=curve, second=curve, repetitions=law), above


# ---- the law of K ------------------------------------------------------------------


def masses(mean: float, shape: float) -> tuple[np.ndarray, np.ndarray]:
    """K and its probabilities, from other people's laws."""
    count = np.arange(0, 20_000)
    if math.isinf(shape):
        return count, poisson.pmf(count, mean)
    gamma = 1 / (1 + Repetitions(mean=mean, shape=shape).odds)
    if shape == 0:
        chance = np.where(
            count > 0, (1 - gamma) ** count / np.maximum(count, 1) / -math.log(gamma), 0.0
        )
        return count, chance
    chance = nbinom.pmf(count, shape, gamma)
    chance[0] = 0.0
    return count, chance / (1 - gamma**shape)


@pytest.mark.parametrize(("mean", "shape"), [*LAWS[:5], (2.0, 30.0), (1.01, 1e-14), (50.0, 1e5)])
def test_the_best_of_k_is_in_a_set_as_often_as_its_law_says(mean: float, shape: float) -> None:
    count, chance = masses(mean, 0.0 if shape < 1e-12 else shape)
    law = Repetitions(mean=mean, shape=shape)
    assert float(chance @ count) == pytest.approx(mean, rel=1e-6)
    for above, mass in ((0.0, 1.0), (0.0, 0.01), (0.3, 1e-3), (0.05, 0.9)):
        expected = float(chance @ ((1 - above) ** count - np.maximum(1 - above - mass, 0) ** count))
        assert float(law.win_probability(above, mass)) == pytest.approx(expected, rel=1e-7)
        slope = float(chance @ (count * (1 - above) ** np.maximum(count - 1, 0)))
        assert float(law.density(above)) == pytest.approx(slope, rel=1e-7)


def test_small_sets_lose_no_digits() -> None:
    for shape in (0.0, 1.0, 1e6, math.inf):
        law = Repetitions(mean=1e5, shape=shape)
        assert float(law.win_probability(0.0, 1e-30)) == pytest.approx(1e5 * 1e-30, rel=1e-9)
    once = Repetitions(mean=1.0, shape=1.0)
    assert float(once.win_probability(0.25, 0.5)) == pytest.approx(0.5, rel=1e-12)


# ---- one Gaussian run, in high precision -------------------------------------------


def chance_of_best(low: float, high: float, mu: float, mean: float, shape: float) -> mpmath.mpf:
    """That the best is above ``high``, where what is below ``low`` comes first; N(mu, 1) runs."""
    before, rest = mpmath.ncdf(low - mu), mpmath.ncdf(high - mu) - mpmath.ncdf(low - mu)

    def generating(s: mpmath.mpf) -> mpmath.mpf:
        if math.isinf(shape):
            return mpmath.exp(mean * (s - 1))
        gamma = 1 / (1 + mpmath.mpf(Repetitions(mean=mean, shape=shape).odds))
        if mean == 1:
            return s
        if shape == 0:
            return mpmath.log(1 - (1 - gamma) * s) / mpmath.log(gamma)
        return ((1 - (1 - gamma) * s) ** -shape - 1) / (gamma**-shape - 1)

    return generating(1 - before) - generating(rest)


def best_attack(mu: float, mean: float, shape: float, delta: float) -> float:
    """The ε of the best thresholds: searched in doubles, then evaluated in 40 digits."""
    law = Repetitions(mean=mean, shape=shape)
    at, around = (-2.0, 3.0 + mu), 6.0
    for _ in range(3):
        low, high = (
            np.linspace(at[0] - around, at[0] + around, 401)[:, None],
            np.linspace(at[1] - around, at[1] + around, 401),
        )
        true, false = (
            law.win_probability(norm.cdf(low - centre), norm.sf(high - centre))
            for centre in (mu, 0.0)
        )
        with np.errstate(all="ignore"):
            gained = np.where((true > delta) & (low <= high), np.log((true - delta) / false), 0.0)
        row, column = np.unravel_index(int(np.nanargmax(gained)), gained.shape)
        at, around = (float(low[row, 0]), float(high[column])), around / 50
    with mpmath.workdps(40):
        exact = [chance_of_best(*at, centre, mean, shape) for centre in (mu, 0.0)]
        return float(mpmath.log((exact[0] - delta) / exact[1]))


@pytest.mark.ordinary("2.0-1e-06-*")
@laws
@pytest.mark.parametrize(("sigma", "delta"), [(2.0, 1e-6), (0.5, 1e-10)])
def test_a_gaussian_run_meets_the_best_attack_on_it(
    sigma: float, delta: float, mean: float, shape: float
) -> None:
    event = selection(events.Gaussian(noise_multiplier=sigma), mean, shape)
    exact = best_attack(1 / sigma, mean, shape, delta)
    assert exact * (1 - 2e-3) <= lower(event, delta) <= exact * (1 + 1e-6)
    assert exact <= upper(event, delta) <= exact * 1.02


def score_first(mu: float) -> dict[str, Callable[[np.ndarray], np.ndarray]]:
    """Scores of an output z, which is about 0 or about ``mu``; the largest is the best."""
    return {
        "high": lambda z: z,
        "low": lambda z: -z,
        "far": lambda z: np.abs(z - mu / 2),
        "near": lambda z: -np.abs(z - mu / 2),
        "low, then high": lambda z: np.where(z < mu / 2 - 1, 100 - z, z),
    }


EDGES = np.linspace(-9, 10, 40_001)
CENTRES = (EDGES[1:] + EDGES[:-1]) / 2


def normal_masses(mean: float) -> np.ndarray:
    """What a normal law has between ``EDGES``, of its smaller tail to all digits."""
    return np.where(
        mean > CENTRES, np.diff(norm.cdf(EDGES - mean)), -np.diff(norm.sf(EDGES - mean))
    )


def selected_delta(
    score: np.ndarray, p: np.ndarray, q: np.ndarray, law: Repetitions, epsilon: float
) -> float:
    """δ of the best outcome by ``score``, the larger of both orders."""
    order = np.argsort(-score, kind="stable")

    def best(one: np.ndarray) -> np.ndarray:
        return law.win_probability(np.concatenate(([0.0], np.cumsum(one[order])[:-1])), one[order])

    first, second = best(p), best(q)
    gamma = math.exp(epsilon)
    return max(
        float(np.maximum(first - gamma * second, 0.0).sum()),
        float(np.maximum(second - gamma * first, 0.0).sum()),
    )


@pytest.mark.ordinary("*-10.0-inf", "*-3.0-0.5")
@laws
@pytest.mark.parametrize("name", score_first(1.0))
def test_no_score_costs_more_than_the_upper_end(mean: float, shape: float, name: str) -> None:
    """δ of the best run by this score, on a lattice of outcomes, under both orders."""
    mu, epsilon = 1.0, 5.0
    law = Repetitions(mean=mean, shape=shape)
    pair = normal_masses(mu), normal_masses(0.0)
    true = selected_delta(score_first(mu)[name](CENTRES), *pair, law, epsilon)
    curve = SelectionAccountant().curve(
        selection(events.Gaussian(noise_multiplier=1 / mu), mean, shape)
    )
    assert true <= curve.delta(epsilon).upper * (1 + 1e-9)


CORRELATED = events.BallsInBinsGaussian(
    gram=events.Gram(((1.0, 0.6), (0.6, 1.0))), noise_multiplier=1.0
)


@pytest.mark.by_turns
@pytest.mark.parametrize("sign", [-1, 1])
@pytest.mark.parametrize(
    ("run", "second", "most"),
    [
        (events.RandomAllocationGaussian(bins=2, noise_multiplier=1.0), (0.0, 1.0), 0.01),
        (CORRELATED, (0.6, 0.8), 0.05),
    ],
)
def test_a_run_of_balls_in_bins_costs_no_less_than_its_outcomes(
    run: events.Event, second: tuple[float, float], most: float, sign: int
) -> None:
    """Two bins, on a lattice of what both release."""
    epsilon, law = 3.0, Repetitions(mean=3.0, shape=1.0)
    q, p, other = (
        np.outer(*(np.diff(norm.cdf(EDGES[::200] - mean)) for mean in means)).ravel()
        for means in ((0.0, 0.0), (1.0, 0.0), second)
    )
    p = (p + other) / 2
    true = selected_delta(sign * p / np.maximum(q, 1e-300), p, q, law, epsilon)
    assert true <= SelectionAccountant().curve(selection(run, 3.0)).delta(epsilon).upper < most


def test_bins_that_count_as_known_bound_from_above_alone() -> None:
    moves = events.GaussianMixture(weights=(0.9, 0.1), noise_multiplier=3.0)
    bracket, known = (
        EventCurve(events.Composed(events=(run, moves))).epsilon(1e-6)
        for run in (CORRELATED, events.Gaussian(noise_multiplier=1.0))
    )
    assert 0 < bracket.lower < known.lower <= bracket.upper < known.upper * (1 + 1e-6)


def test_an_attack_on_a_run_of_balls_in_bins_gains_what_it_gains_on_its_outcomes() -> None:
    """Two bins, on a lattice of what both release, which loses a little."""
    epsilon, law = 3.0, Repetitions(mean=3.0, shape=1.0)
    there, empty = (np.diff(norm.cdf(EDGES[::200] - mean)) for mean in (1.0, 0.0))
    q = np.outer(empty, empty).ravel()
    p = (np.outer(there, empty).ravel() + np.outer(empty, there).ravel()) / 2
    best = 0.0
    for true, false in ((p, q), (q, p)):
        order = np.argsort(true / np.maximum(false, 1e-300))
        below = [np.cumsum(mass[order]) for mass in (true, false)]
        places = np.unique(np.linspace(0, order.size - 1, 2000).astype(int))
        first = [np.concatenate(([0.0], mass[places]))[:, None] for mass in below]
        after = [1 - mass[places] for mass in below]
        apart = first[1] + after[1] <= 1
        gains = [law.win_probability(one, other) for one, other in zip(first, after, strict=True)]
        best = max(best, float(np.where(apart, gains[0] - math.exp(epsilon) * gains[1], 0).max()))
    event = selection(events.RandomAllocationGaussian(bins=2, noise_multiplier=1.0), 3.0)
    assert 0.97 * best <= PostProcessedCurve(event=event).delta(epsilon).lower <= 1.03 * best


@pytest.mark.soak
def test_selected_runs_are_above_a_threshold_as_often_as_is_claimed() -> None:
    """Sampled: geometric K, and what is below 0 comes first."""
    source, repeats = np.random.default_rng(20260101), 200_000
    count = source.geometric(0.1, repeats)
    runs = np.split(source.normal(1.0, 1.0, count.sum()), np.cumsum(count)[:-1])
    hits = sum(bool(run.min() > 0 and run.max() > 2.0) for run in runs)
    low = float(beta.ppf(1e-6, hits, repeats - hits + 1))
    high = float(beta.ppf(1 - 1e-6, hits + 1, repeats - hits))
    claimed = Repetitions(mean=10.0, shape=1.0).win_probability(norm.cdf(-1.0), norm.sf(1.0))
    assert low < float(claimed) < high


@pytest.mark.soak
@settings(max_examples=8, deadline=None)
@given(
    mu=st.floats(0.2, 3.0),
    law=st.sampled_from(LAWS[:4]),
    looseness=st.floats(0.0, 0.2),
)
def test_a_looser_curve_gives_looser_ends_never_wrong_ones(
    mu: float, law: tuple[float, float], looseness: float
) -> None:
    exact = GaussianCurve(mu=mu)

    class Loose:
        def delta(self, epsilon: float) -> Bracket:
            known = exact.delta(epsilon)
            return Bracket(
                lower=known.lower * (1 - looseness), upper=min(1.0, known.upper * (1 + looseness))
            )

        def epsilon(self, delta: float) -> Bracket:
            return exact.epsilon(delta)

    tight, loose = of_curve(exact, *law), of_curve(Loose(), *law)
    assert loose[0].epsilon(1e-6).lower <= tight[1].epsilon(1e-6).upper
    assert loose[1].epsilon(1e-6).upper >= tight[0].epsilon(1e-6).lower
    assert loose[0].epsilon(1e-6).lower <= tight[0].epsilon(1e-6).lower * 1.001


# ---- pure DP -----------------------------------------------------------------------


class Response:
    """Randomised response with loss ±ε₀, which dominates everything that is ε₀-DP."""

    def __init__(self, loss: float) -> None:
        self.loss = loss

    def delta(self, epsilon: float) -> Bracket:
        value = max(0.0, math.exp(self.loss) - math.exp(epsilon)) / (1 + math.exp(self.loss))
        return Bracket(lower=value * (1 - 1e-12), upper=value * (1 + 1e-12))

    def epsilon(self, delta: float) -> Bracket:
        value = math.log(max(1.0, math.exp(self.loss) - delta * (1 + math.exp(self.loss))))
        return Bracket(lower=value * (1 - 1e-12), upper=value * (1 + 1e-12))


@pytest.mark.parametrize(("shape", "times"), [(1.0, 3.0), (0.0, 2.0), (2.0, 4.0)])
def test_pure_runs_cost_their_epsilon_as_often_as_is_known(shape: float, times: float) -> None:
    """Liu and Talwar (geometric: thrice); Papernot and Steinke, Theorem 2 ((2 + η) times)."""
    attacked, bounded = of_curve(Response(0.5), 1e5, shape)
    bound = bounded.epsilon(1e-9).upper
    assert attacked.epsilon(1e-9).lower <= bound <= times * 0.5 * (1 + 2e-3)
    # Three outcomes: one puts first what P has less of, and looks for what it has more of.
    law, loss = Repetitions(mean=1e5, shape=shape), math.exp(0.5)
    before, after = 1e-2, 1e-6
    true = float(law.win_probability(before, after))
    false = float(law.win_probability(before * loss, after / loss))
    assert times * 0.5 * 0.98 < math.log(true / false) <= bound


# ---- compositions ------------------------------------------------------------------


@pytest.mark.ordinary("long", "replace one")
@pytest.mark.parametrize(
    ("run", "width"),
    [
        (sampled(0.01, 1.0, 1000), 0.012),
        (sampled(0.3, 1.0, 1), 0.03),
        (sampled(0.02, 1.5, 500, pair="replace_one"), 0.02),
        (
            events.Composed(
                events=(sampled(0.01, 1.0, 300), events.Gaussian(noise_multiplier=5.0))
            ),
            0.02,
        ),
        (
            events.Repeated(
                event=events.WithoutReplacementGaussian(
                    dataset_size=1000, sample_size=10, noise_multiplier=2.0
                ),
                count=100,
            ),
            0.6,
        ),
        (events.RandomAllocationGaussian(bins=100, noise_multiplier=1.0), 0.03),
        (
            events.Repeated(
                event=events.RandomAllocationGaussian(bins=100, noise_multiplier=1.0), count=3
            ),
            0.03,
        ),
    ],
    ids=[
        *("long", "one step", "replace one", "with a metric", "without replacement"),
        *("balls in bins", "bins drawn afresh"),
    ],
)
def test_the_bracket_of_sampled_runs_is_narrow(run: events.Event, width: float) -> None:
    event = selection(run)
    low, high = lower(event), upper(event)
    assert low <= high <= low * (1 + width)
    assert lower(event, 1e-4) < low
    assert upper(event, 1e-4) < high


@pytest.mark.soak
def test_one_step_is_below_what_a_lattice_of_its_outcomes_allows() -> None:
    """The worst of some scores of one subsampled step, in both orders, lies inside the bracket."""
    q, sigma, epsilon = 0.3, 1.0, 3.0
    event = selection(sampled(q, sigma, 1))
    law, without = Repetitions(mean=10.0, shape=1.0), normal_masses(0.0)
    with_it = (1 - q) * without + q * normal_masses(1 / sigma)
    worst = max(
        selected_delta(
            np.where(sign * CENTRES < cut, 100 - sign * CENTRES, sign * CENTRES),
            with_it,
            without,
            law,
            epsilon,
        )
        for cut in np.linspace(-3, 3, 25)
        for sign in (1.0, -1.0)
    )
    attacked = PostProcessedCurve(event=event).delta(epsilon).lower
    bound = SelectionAccountant().curve(event).delta(epsilon).upper
    assert worst <= bound <= worst * 1.7
    assert worst * 0.99 <= attacked <= bound


@pytest.mark.soak
@pytest.mark.parametrize(
    "beside", [events.Gaussian(noise_multiplier=10.0), events.Laplace(noise_multiplier=20)]
)
def test_what_is_released_beside_is_composed_with_the_run(beside: events.Event) -> None:
    alone = selection(sampled(0.01, 1.0, 300))
    both = events.Composed(events=(alone, beside))
    inside = selection(events.Composed(events=(sampled(0.01, 1.0, 300), beside)))
    assert upper(alone) < upper(both) < upper(inside)
    assert upper(both) < accountant("rdp").curve(both).epsilon(1e-6).upper
    assert lower(alone) <= lower(both) <= upper(both)


def test_more_repetitions_cost_more() -> None:
    run = events.Gaussian(noise_multiplier=4.0)
    ends = [(lower(event), upper(event)) for event in (selection(run, m) for m in (1, 2, 9, 99))]
    assert all(one[1] < other[0] for one, other in itertools.pairwise(ends))
    assert ends[0][0] <= GaussianCurve(mu=0.25).epsilon(1e-6).upper


def test_a_long_poisson_search_is_never_above_its_renyi_bound() -> None:
    event = selection(events.Gaussian(noise_multiplier=30.0), 1000.0, math.inf)
    assert lower(event) <= upper(event) <= accountant("rdp").curve(event).epsilon(1e-6).upper


@settings(max_examples=8, deadline=None)
@given(epsilon=st.floats(0.0, 700.0), law=st.sampled_from(LAWS))
def test_delta_and_epsilon_are_brackets_of_one_curve(
    epsilon: float, law: tuple[float, float]
) -> None:
    event = selection(events.Gaussian(noise_multiplier=1.0), *law)
    low = PostProcessedCurve(event=event).delta(epsilon).lower
    high = SelectionAccountant().curve(event).delta(epsilon).upper
    assert 0 <= low <= high <= 1
    if low > 1e-15 and high < 1:
        assert lower(event, high) <= epsilon * 1.01 + 1e-3


def test_other_events_are_not_its_own() -> None:
    one = selection(events.Gaussian(noise_multiplier=2.0))
    for event in (
        events.Gaussian(noise_multiplier=2.0),
        events.Repeated(event=one, count=2),
        events.Composed(events=(one, selection(events.Gaussian(noise_multiplier=3.0)))),
        selection(one),
        selection(events.Laplace(noise_multiplier=1.0)),
    ):
        with pytest.raises(Unsupported):
            SelectionAccountant().curve(event)
    assert SelectionAccountant().curve(events.Composed(events=())).epsilon(1e-6).upper == 0.0
