"""Monte-Carlo accounting: against closed forms and quadrature, and by the laws it rests on."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.special import ndtr
from scipy.stats import binom

from affidavit.accountants.bracket import Bracket
from affidavit.accountants.calibration import (
    CONFIRMED_SLACK,
    MAX_BRACKETS,
    find_confirmed_noise,
)
from affidavit.accountants.fourier_accountant import FourierAccountant
from affidavit.accountants.gaussian import GaussianAccountant
from affidavit.accountants.monte_carlo import MonteCarloAccountant, MonteCarloCurve
from affidavit.accountants.monte_carlo.dominating_pair import Pair, build_pair
from affidavit.accountants.monte_carlo.importance_sampling import DIRECTIONS, Direction, draw, tilts
from affidavit.accountants.monte_carlo.pilot import (
    best_bet,
    log_capital_above,
    log_capital_below,
)
from affidavit.accountants.protocol import NoSolution, OutOfReach, Unsupported
from affidavit.plan import events


def binned(products: object, sigma: float = 1.0) -> events.BallsInBinsGaussian:
    rows = np.asarray(products, dtype=float).tolist()
    return events.BallsInBinsGaussian(
        gram=events.Gram(tuple(tuple(row) for row in rows)), noise_multiplier=sigma
    )


def pair(products: object, sigma: float = 1.0) -> Pair:
    return build_pair(((binned(products, sigma), 1),))


def curve(event: events.Event) -> MonteCarloCurve:
    return MonteCarloAccountant().curve(event)


def contains(bracket: Bracket, value: float) -> bool:
    return bracket.lower <= value <= bracket.upper


def delta_of_two(first: float, second: float, product: float, epsilon: float, side: str) -> float:
    """δ of two bins by quadrature over one normal, the other integrated in closed form."""
    slope = product / math.sqrt(first)
    rest = math.sqrt(second - slope**2)

    def of(z: float) -> float:
        fixed = math.exp(math.sqrt(first) * z - first / 2) / 2
        moving = math.exp(slope * z - second / 2 + rest**2 / 2) / 2
        if side == "remove":
            strike = math.exp(epsilon) - fixed
            if strike <= 0:
                return moving - strike
            d = (math.log(moving / strike) - rest**2 / 2) / rest
            return moving * ndtr(d + rest) - strike * ndtr(d)
        strike = math.exp(-epsilon) - fixed
        if strike <= 0:
            return 0.0
        d = (math.log(moving / strike) - rest**2 / 2) / rest
        return math.exp(epsilon) * (strike * ndtr(-d) - moving * ndtr(-d - rest))

    def density(z: float) -> float:
        return of(z) * math.exp(-z * z / 2) / math.sqrt(2 * math.pi)

    return float(sum(quad(density, a, a + 1, epsabs=1e-14)[0] for a in range(-12, 12)))


# ---- against what is known ----------------------------------------------------------


@pytest.mark.ordinary("2.0-0.001")
@pytest.mark.parametrize("delta", [1e-3, 1e-6, 1e-9])
@pytest.mark.parametrize("sigma", [0.5, 2.0])
def test_one_bin_is_the_gaussian_mechanism(sigma: float, delta: float) -> None:
    exact = GaussianAccountant().curve(events.Gaussian(noise_multiplier=sigma)).epsilon(delta)
    result = curve(binned([[1.0]], sigma)).epsilon(delta)
    assert contains(result, exact.upper)
    assert result.width < 0.02 * exact.upper


@pytest.mark.ordinary("0.3-2.0-*")
@pytest.mark.parametrize(("first", "second", "product"), [(1.0, 1.0, 0.0), (2.0, 1.0, 0.9)])
@pytest.mark.parametrize("epsilon", [0.3, 2.0])
def test_two_bins_agree_with_quadrature(
    first: float, second: float, product: float, epsilon: float
) -> None:
    exact = max(delta_of_two(first, second, product, epsilon, side) for side in DIRECTIONS)
    result = curve(binned([[first, product], [product, second]])).delta(epsilon)
    assert contains(result, exact)
    assert result.width < 0.2 * exact


@pytest.mark.ordinary("1")
@pytest.mark.parametrize("reached", [1, 3])
def test_bins_that_a_short_run_never_reaches_are_a_sampling_probability(reached: int) -> None:
    """One of b bins with a mean, the rest without, is one Poisson-sampled step of rate 1/b."""
    rows = np.zeros((reached + 3, reached + 3))
    rows[:reached, :reached] = 1.0
    rate = reached / (reached + 3)
    step = events.PoissonSubsampledGaussian(sampling_probability=rate, noise_multiplier=0.8)
    exact = FourierAccountant().curve(step).epsilon(1e-5)
    result = curve(binned(rows, 0.8)).epsilon(1e-5)
    assert result.lower <= exact.upper
    assert exact.lower <= result.upper
    assert result.width < 0.05 * exact.upper


@pytest.mark.ordinary("remove")
@pytest.mark.parametrize("side", DIRECTIONS)
def test_runs_simulated_step_by_step_have_the_delta_of_their_gram_matrix(side: str) -> None:
    """Plain Monte Carlo over whole runs of C x + z, without Gram matrix or tilt."""
    bins, steps, sigma, epsilon, runs = 4, 14, 2.0, 0.5, 200_000
    random = np.random.default_rng(11)
    matrix = np.tril(0.6 ** np.abs(np.subtract.outer(np.arange(steps), np.arange(steps))))
    means = np.stack([matrix[:, place::bins].sum(axis=1) for place in range(bins)])
    released = sigma * random.standard_normal((runs, steps))
    if side == "remove":
        released += means[random.integers(bins, size=runs)]
    exponents = (released @ means.T - np.sum(means**2, axis=1) / 2) / sigma**2
    ratio = np.mean(np.exp(exponents), axis=1)
    integrand = np.maximum(0, 1 - np.exp(epsilon) * (1 / ratio if side == "remove" else ratio))
    mean, error = float(np.mean(integrand)), float(np.std(integrand)) / math.sqrt(runs)
    result = curve(binned(means @ means.T, sigma)).delta(epsilon)
    if side == "remove":  # the larger of the two here
        assert abs(mean - (result.lower + result.upper) / 2) < 5 * error + result.width / 2
    assert mean - 5 * error < result.upper


@pytest.mark.soak
def test_bins_with_equal_means_are_one_bin() -> None:
    """Its Gram matrix is singular, and the record's bin says nothing."""
    exact = GaussianAccountant().curve(events.Gaussian(noise_multiplier=1.0)).epsilon(1e-5)
    result = curve(binned(np.ones((5, 5)))).epsilon(1e-5)
    assert contains(result, exact.upper)
    assert result.width < 0.02 * exact.upper


@pytest.mark.soak
def test_copies_and_gaussians_beside_compose() -> None:
    """Three Gaussians as one bin each and one beside: μ² adds up."""
    event = events.Composed(
        events=(
            events.Repeated(event=binned([[1.0]], 2.0), count=3),
            events.Repeated(event=events.Gaussian(noise_multiplier=4.0), count=4),
        )
    )
    exact = GaussianAccountant().curve(events.Gaussian(noise_multiplier=1.0)).epsilon(1e-6)
    result = curve(event).epsilon(1e-6)
    assert contains(result, exact.upper)
    assert result.width < 0.02 * exact.upper


@pytest.mark.soak
def test_bins_of_twenty_lots_amplify_and_never_cost_more_than_no_bins() -> None:
    products = 0.9 ** np.abs(np.subtract.outer(np.arange(20), np.arange(20)))
    result = curve(binned(products)).epsilon(1e-5)
    alone = GaussianAccountant().curve(events.Gaussian(noise_multiplier=1.0)).epsilon(1e-5)
    mean = GaussianAccountant().curve(
        events.Gaussian(noise_multiplier=1 / math.sqrt(float(products.mean())))
    )
    assert result.upper < 0.9 * alone.lower
    # The mixture is no more private than its own mean direction shows: projecting on the
    # mean of the m_i is post-processing that leaves at least this.
    assert result.upper > mean.epsilon(1e-2).lower > 0


# ---- laws ---------------------------------------------------------------------------


@pytest.mark.ordinary("add")
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_every_tilt_has_the_same_mean_and_keeps_its_range(direction: Direction) -> None:
    result = pair([[1.5, 0.6, 0.2], [0.6, 1.0, 0.6], [0.2, 0.6, 1.5]])
    epsilon, means = 0.7, []
    for tilt in tilts(result, direction)[::5]:
        if tilt.log_range(epsilon) > 3 or tilt.shift > 8:
            continue
        drawn = draw([tilt], 60_000, stream=7)
        values = drawn.values(epsilon)
        assert np.all(values <= math.exp(tilt.log_range(epsilon)) * (1 + 1e-9))
        spread = math.sqrt(np.sum(values**2)) / len(drawn)
        means.append((float(np.sum(values)) / len(drawn), spread))
    assert len(means) >= 5
    best, error = min(means, key=lambda item: item[1])
    assert all(abs(mean - best) < 5 * (spread + error) for mean, spread in means)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_mixture_of_tilts_keeps_its_range(direction: Direction) -> None:
    family = tilts(pair([[1.0, 0.3], [0.3, 1.0]]), direction)
    chosen = [family[30], family[40]]
    least = min(tilt.log_range(1.0) for tilt in chosen)
    values = draw(chosen, 20_000, stream=3).values(1.0)
    assert len(values) > 0
    assert np.max(values) <= 2 * math.exp(least) * (1 + 1e-9)


def test_the_range_alone_bounds_the_curve() -> None:
    exact = GaussianAccountant().curve(events.Gaussian(noise_multiplier=1.0))
    for direction in DIRECTIONS:
        for tilt in tilts(pair([[1.0]]), direction):
            for epsilon in (0.5, 3.0):
                assert tilt.log_range(epsilon) >= math.log(exact.delta(epsilon).lower)
                assert tilt.epsilon(1e-5) >= exact.epsilon(1e-5).lower


def test_values_do_not_increase_in_epsilon() -> None:
    for direction in DIRECTIONS:
        chosen = tilts(pair([[1.0, 0.4], [0.4, 1.0]]), direction)[30:31]
        drawn = draw(chosen, 4096, stream=1)
        sums = [float(np.sum(drawn.values(epsilon))) for epsilon in np.linspace(0, 4, 30)]
        assert all(later <= earlier for earlier, later in pairwise(sums))


@pytest.mark.soak
def test_epsilon_falls_with_noise_and_with_delta() -> None:
    products = [[1.0, 0.5], [0.5, 1.0]]
    by_noise = [curve(binned(products, sigma)).epsilon(1e-5) for sigma in (1.0, 1.25)]
    by_delta = [curve(binned(products)).epsilon(delta) for delta in (1e-7, 1e-5)]
    for family in (by_noise, by_delta):
        assert all(later.upper < earlier.lower for earlier, later in pairwise(family))


def test_what_is_sampled_dominates_the_gram_matrix_entry_by_entry() -> None:
    random = np.random.default_rng(5)
    for bins in (1, 3, 30):
        means = random.random((2 * bins, bins)) * (random.random((2 * bins, bins)) < 0.3)
        means[0] += 1e-3
        products = means.T @ means
        products = (products + products.T) / 2
        for requested in (products, np.ones((bins, bins)), np.eye(bins)):
            (part,) = pair(requested, 0.7).bins
            assert np.all(part.factor @ part.factor.T >= requested / 0.49 * (1 - 1e-15))
            assert part.excess < 1e-9 * np.max(requested)


def test_the_empty_composition_costs_nothing() -> None:
    result = curve(events.Composed(events=()))
    assert result.epsilon(1e-5) == result.delta(0.0) == Bracket(lower=0.0, upper=0.0)


# ---- confidence ---------------------------------------------------------------------


def misses_within(misses: int, repetitions: int, failure: float) -> bool:
    """Whether so many misses are likelier than one in ten thousand if the bound holds."""
    return misses <= binom.ppf(1 - 1e-4, repetitions, failure)


def test_the_interval_covers_a_known_delta_at_99_percent() -> None:
    """200 seeds, one test of level 1 % on each side, and intervals that are not idle."""
    epsilon = 2.0
    exact = GaussianAccountant().curve(events.Gaussian(noise_multiplier=1.0)).delta(epsilon).lower
    log_failure, missed_above, missed_below, narrow = math.log(100), 0, 0, 0
    for seed in range(200):
        one = Pair(bins=pair([[1.0]]).bins, seed=f"{seed:032x}")
        tilt = min(tilts(one, "remove"), key=lambda item: item.log_range(epsilon))
        drawn = draw([tilt], 2000, stream=0)
        top = math.exp(tilt.log_range(epsilon))
        values, mean = drawn.values(epsilon) / top, exact / top
        bet = best_bet(0.3 * mean, len(drawn), log_failure)
        missed_above += log_capital_above(values, len(drawn), mean, bet) >= log_failure
        missed_below += log_capital_below(values, len(drawn), mean, bet) >= log_failure
        narrow += log_capital_above(values, len(drawn), 1.3 * mean, bet) >= log_failure
    assert misses_within(missed_above, 200, 0.01)
    assert misses_within(missed_below, 200, 0.01)
    assert narrow > 100


@pytest.mark.soak
def test_the_bracket_of_epsilon_covers_two_bins_from_two_hundred_seeds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The whole engine, pilots and both directions, with no more draws than it must take."""
    monkeypatch.setattr("affidavit.accountants.monte_carlo.pilot.MAX_DRAWS", 4096)
    monkeypatch.setattr("affidavit.accountants.monte_carlo.pilot.MIN_DRAWS", 4096)
    monkeypatch.setattr("affidavit.accountants.monte_carlo.pilot.PILOT_DRAWS", 1024)
    monkeypatch.setattr("affidavit.accountants.monte_carlo.importance_sampling.MAX_ROWS", 512)
    monkeypatch.setattr("affidavit.accountants.monte_carlo.accountant.MAX_BRACKETS", 1)
    bins, epsilon = pair([[1.0, 0.5], [0.5, 1.0]]).bins, 1.5
    delta = max(delta_of_two(1.0, 1.0, 0.5, epsilon, side) for side in DIRECTIONS)
    missed = 0
    for seed in range(200):
        one = MonteCarloCurve(pair=Pair(bins=bins, seed=f"{seed:032x}"), failure_probability=0.08)
        missed += not contains(one.epsilon(delta), epsilon)
    assert misses_within(missed, 200, 0.08)


def test_bets_reject_what_is_false_and_keep_what_is_true() -> None:
    random = np.random.default_rng(1)
    values = (random.random(20_000) < 0.01).astype(float)
    hits, log_failure = values[values > 0], math.log(1e4)
    bet = best_bet(0.01, 20_000, log_failure)
    assert log_capital_above(hits, 20_000, 0.014, bet) > log_failure
    assert log_capital_below(hits, 20_000, 0.006, bet) > log_failure
    for capital in (log_capital_above, log_capital_below):
        assert capital(hits, 20_000, 0.01, bet) < log_failure
    assert log_capital_above(hits, 20_000, 0.0, bet) == -math.inf
    assert log_capital_below(hits, 20_000, 0.95, 1.0) == -math.inf


@pytest.mark.soak
def test_a_smaller_failure_probability_widens_the_bracket() -> None:
    event = binned([[1.0, 0.5], [0.5, 1.0]])
    loose = MonteCarloAccountant(failure_probability=0.05).curve(event)
    strict = MonteCarloAccountant(failure_probability=1e-12).curve(event)
    assert loose.confidence == 0.95
    assert strict.epsilon(1e-4).upper > loose.epsilon(1e-4).upper


# ---- the seed -----------------------------------------------------------------------


@pytest.mark.soak
def test_the_same_event_gives_the_same_numbers() -> None:
    event = binned([[1.0, 0.5, 0.2], [0.5, 1.0, 0.5], [0.2, 0.5, 1.0]], 0.9)
    one, other = (MonteCarloAccountant().curve(event).epsilon(1e-5) for _ in range(2))
    assert one == other


def test_the_seed_is_the_gram_matrix_s_and_not_the_noise_s() -> None:
    one, other = [[1.0, 0.5], [0.5, 1.0]], [[1.0, 0.25], [0.25, 1.0]]
    seeds = [curve(binned(*item)).seed for item in ((one, 1.0), (one, 2.0), (other, 1.0))]
    assert seeds[0] == seeds[1] != seeds[2]
    assert all(seed is not None and len(seed) == 32 for seed in seeds)


def test_streams_and_chunks_are_independent_of_how_much_is_drawn() -> None:
    chosen = tilts(pair([[1.0, 0.4], [0.4, 1.0]]), "remove")[30:31]
    short, long = (draw(chosen, n, stream=1) for n in (10, 30_000))
    other = draw(chosen, 10, stream=2)
    assert np.array_equal(short.loss, long.loss[: len(short)])
    assert not np.array_equal(short.loss, other.loss)


# ---- refusals -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("event", "kind"),
    [
        (events.Gaussian(noise_multiplier=1.0), Unsupported),
        (
            events.Composed(
                events=(
                    binned([[1.0]]),
                    events.PoissonSubsampledGaussian(
                        sampling_probability=0.1, noise_multiplier=1.0
                    ),
                )
            ),
            Unsupported,
        ),
        (binned([[1.0]], 1e-3), OutOfReach),
        (binned([[1.0, 5.0], [5.0, 1.0]]), Unsupported),
        (events.Repeated(event=binned([[1.0]]), count=1000), OutOfReach),
    ],
)
def test_what_it_does_not_bound_it_refuses(event: events.Event, kind: type[Exception]) -> None:
    with pytest.raises(kind):
        curve(event)


def test_a_delta_that_underflows_is_not_zero() -> None:
    result = curve(binned([[1.0, 0.5], [0.5, 1.0]])).delta(500.0)
    assert 0.0 == result.lower < result.upper < 1e-300


@pytest.mark.ordinary("0.5-0.2", "*-1000.0")
@pytest.mark.parametrize("sigma", [0.05, 0.2, 1000.0])
@pytest.mark.parametrize("delta", [1e-3, 0.5])
def test_extremes_neither_overflow_nor_lie(sigma: float, delta: float) -> None:
    exact = GaussianAccountant().curve(events.Gaussian(noise_multiplier=sigma)).epsilon(delta)
    assert contains(curve(binned([[1.0]], sigma)).epsilon(delta), exact.upper)


def test_delta_and_epsilon_out_of_range_are_refused() -> None:
    result = curve(binned([[1.0]]))
    with pytest.raises(OutOfReach):
        result.epsilon(1e-30)
    with pytest.raises(OutOfReach):
        curve(binned([[1.0]], 0.02)).epsilon(1e-6)
    for call in (lambda: result.epsilon(0.0), lambda: result.delta(-1.0)):
        with pytest.raises(ValueError, match="must"):
            call()
    with pytest.raises(ValueError, match="failure_probability"):
        MonteCarloAccountant(failure_probability=1.0)


# ---- the search ---------------------------------------------------------------------


def test_confirmed_noise_meets_the_target_with_few_looks() -> None:
    looks = []

    def upper(sigma: float) -> float:
        looks.append(sigma)
        return 5 / sigma**1.5 * (1 + 0.003 * math.sin(1000 * sigma))

    result = find_confirmed_noise(upper, 2.0, guess=lambda sigma: 4.9 / sigma**1.5)
    assert upper(result) <= 2.0
    assert result < (5 / 2.0) ** (1 / 1.5) * (1 + 2 * CONFIRMED_SLACK)
    assert len(looks) <= MAX_BRACKETS + 1


def test_confirmed_noise_refuses_rather_than_guess() -> None:
    with pytest.raises(OutOfReach):
        find_confirmed_noise(lambda _: 3.0, 2.0, guess=lambda sigma: 2 / sigma)
    with pytest.raises(NoSolution):
        find_confirmed_noise(lambda _: 3.0, 2.0, guess=lambda _: 3.0)


def test_the_prediction_is_near_the_bound() -> None:
    event = binned([[1.0, 0.5], [0.5, 1.0]])
    about = MonteCarloAccountant().approximate_epsilon(event, 1e-5)
    assert about == pytest.approx(curve(event).epsilon(1e-5).upper, rel=0.02)
