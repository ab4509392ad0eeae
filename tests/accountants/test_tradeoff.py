"""Trade-off functions are bracketed and tight, and beliefs follow Bayes' rule."""

from __future__ import annotations

import itertools
import math

import mpmath
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import norm

from affidavit.accountants.bracket import Bracket
from affidavit.accountants.fourier_accountant import FourierAccountant
from affidavit.accountants.gaussian import GaussianCurve
from affidavit.accountants.protocol import OutOfReach, PrivacyCurve
from affidavit.accountants.registry import accountant
from affidavit.accountants.tradeoff import (
    MIN_DELTA,
    TOLERANCE,
    TradeOff,
    belief,
    guess_accuracy,
    odds_exponent,
    sample_trade_off,
    type_two_gaps,
)
from affidavit.plan import events
from tests.accountants.events import poisson
from tests.support.random_seeds import examples

ALPHAS = [*(index / 50 for index in range(51)), *(10.0**-k for k in range(2, 13)), 0.999999]


def gaussian_type_two(mu: float, alpha: float) -> float:
    """f(α) = Φ(Φ⁻¹(1 - α) - μ); Dong, Roth and Su, arXiv:1905.02383, (6)."""
    return float(norm.cdf(norm.isf(alpha) - mu))


@pytest.mark.parametrize("mu", [1e-3, 0.1, 0.5, 1.0, 2.0, 4.0, 10.0, 30.0])
def test_a_gaussian_lies_inside_and_the_bracket_is_tight(mu: float) -> None:
    trade = sample_trade_off(GaussianCurve(mu=mu))
    for alpha in ALPHAS:
        result = trade.type_two(alpha)
        assert result.lower <= gaussian_type_two(mu, alpha) * (1 + 1e-9) + 1e-15
        assert result.upper >= gaussian_type_two(mu, alpha) * (1 - 1e-9) - 1e-15
        assert result.width <= 1e-3


@settings(max_examples=examples(60))
@given(
    mu=st.floats(0.05, 8.0),
    epsilons=st.lists(st.floats(0, 30), min_size=1, max_size=12, unique=True),
    looseness=st.floats(0, 0.3),
)
def test_any_points_and_any_looseness_bracket_the_truth(
    mu: float, epsilons: list[float], looseness: float
) -> None:
    exact = [GaussianCurve(mu=mu).delta(epsilon) for epsilon in sorted(epsilons)]
    loose = tuple(
        Bracket(lower=d.lower * (1 - looseness), upper=min(1.0, d.upper * (1 + looseness)))
        for d in exact
    )
    trade = TradeOff(epsilons=tuple(sorted(epsilons)), deltas=loose)
    for alpha in ALPHAS:
        result = trade.type_two(alpha)
        assert result.lower - 1e-12 <= gaussian_type_two(mu, alpha) <= result.upper + 1e-12
    advantage = 2 * norm.cdf(mu / 2) - 1
    assert trade.advantage.lower <= advantage * (1 + 1e-12)
    assert trade.advantage.upper >= advantage * (1 - 1e-12)


def curves() -> dict[str, PrivacyCurve]:
    return {
        "gaussian": GaussianCurve(mu=1.3),
        "poisson": FourierAccountant().curve(poisson(0.02, 0.8, 500)),
        "rare": FourierAccountant().curve(poisson(0.001, 0.6, 100)),
        "rdp": accountant("rdp").curve(poisson(0.02, 0.8, 500)),
    }


@pytest.fixture(scope="module", params=curves())
def trade(request: pytest.FixtureRequest) -> TradeOff:
    return sample_trade_off(curves()[request.param])


@pytest.mark.ordinary("not rare", "not poisson")
def test_the_lower_bound_is_a_trade_off_function(trade: TradeOff) -> None:
    grid = [index / 200 for index in range(201)]
    lower = [trade.type_two(alpha).lower for alpha in grid]
    assert all(f <= 1 - alpha for alpha, f in zip(grid, lower, strict=True))
    assert all(one >= other for one, other in itertools.pairwise(lower))
    for one, middle, other in zip(lower, lower[1:], lower[2:], strict=False):
        assert middle <= (one + other) / 2 + 1e-12
    # Symmetric: f is its own inverse.
    for alpha, f in zip(grid, lower, strict=True):
        if 0.001 < f < 1 - alpha - 1e-9:
            assert trade.type_two(f).lower == pytest.approx(alpha, abs=1e-9)


@pytest.mark.ordinary("not rare")
def test_blind_guessing_ends_both(trade: TradeOff) -> None:
    assert trade.type_two(0.0).upper == 1.0
    assert trade.type_two(1.0) == Bracket(lower=0.0, upper=0.0)
    assert trade.true_positive_rate(1.0).upper == 1.0


@pytest.mark.ordinary("not rare")
def test_the_advantage_is_the_largest_difference_of_rates(trade: TradeOff) -> None:
    best = Bracket(lower=0.0, upper=0.0)
    for index in range(201):
        alpha = index / 200
        rate = trade.true_positive_rate(alpha)
        best = Bracket(
            lower=max(best.lower, rate.lower - alpha), upper=max(best.upper, rate.upper - alpha)
        )
    assert best.lower <= trade.advantage.upper + 1e-11
    assert best.upper <= trade.advantage.upper + 1e-11
    assert best.upper >= trade.advantage.lower - 1e-3


@pytest.mark.ordinary("0.5-3.0")
@pytest.mark.parametrize(("q", "sigma"), [(0.1, 1.0), (0.01, 0.7), (0.5, 3.0)])
def test_one_subsampled_step_meets_its_own_trade_off(q: float, sigma: float) -> None:
    """Against mpmath: f of one step is the convex hull of both orders of the mixture."""
    trade = sample_trade_off(FourierAccountant().curve(poisson(q, sigma, 1)))
    for index in range(1, 12):
        threshold = -3 + index / 2
        # Test "x > threshold", as good as any: the likelihood ratio increases in x.
        false_alarms = float(mpmath.ncdf(-threshold * sigma))
        detected = (1 - q) * false_alarms + q * float(mpmath.ncdf(1 / sigma - threshold * sigma))
        assert trade.type_two(false_alarms).lower <= 1 - detected + 1e-12
        assert trade.true_positive_rate(false_alarms).upper >= detected - 1e-12
    ratio = mpmath.ncdf(0.5 / sigma) - mpmath.ncdf(-0.5 / sigma)
    assert trade.advantage.lower <= float(q * ratio) * (1 + 1e-9)
    assert trade.advantage.upper >= float(q * ratio) * (1 - 1e-9)


def test_the_profile_is_followed_until_delta_is_tiny_and_as_densely_as_is_asked() -> None:
    result = sample_trade_off(GaussianCurve(mu=1.0))
    assert result.epsilons[0] == 0.0
    assert result.deltas[-1].upper <= MIN_DELTA * 1.01
    assert (
        max(type_two_gaps(result.epsilons, [delta.upper for delta in result.deltas])) <= TOLERANCE
    )
    rough = sample_trade_off(GaussianCurve(mu=1.0), tolerance=0.02)
    assert len(rough.epsilons) < len(result.epsilons)


class Refusing:
    """A curve that answers at few ε only."""

    def __init__(self, below: float) -> None:
        self.below, self.exact = below, GaussianCurve(mu=1.0)

    def epsilon(self, delta: float) -> Bracket:
        return self.exact.epsilon(delta)

    def delta(self, epsilon: float) -> Bracket:
        if epsilon > self.below:
            raise OutOfReach("too far")
        return self.exact.delta(epsilon)


def test_what_is_refused_makes_the_bracket_looser_never_wrong() -> None:
    trade = sample_trade_off(Refusing(below=1.0))
    assert trade.epsilons[-1] <= 1.0
    for alpha in ALPHAS:
        result = trade.type_two(alpha)
        assert result.lower - 1e-12 <= gaussian_type_two(1.0, alpha) <= result.upper + 1e-12
    with pytest.raises(OutOfReach):
        sample_trade_off(Refusing(below=-1.0))


def test_errors_are_widened_by_the_stated_rounding() -> None:
    trade = TradeOff(epsilons=(0.0,), deltas=(Bracket(lower=0.2, upper=0.2),))
    result = trade.type_two(0.1)
    assert 0.7 - result.lower == pytest.approx(1e-12, rel=1e-3)
    assert result.upper - 0.7 >= 0.9e-12


def test_losses_beyond_the_doubles_are_no_error() -> None:
    trade = TradeOff.of(GaussianCurve(mu=40.0), (0.0, 500.0, 800.0, 1200.0))
    assert trade.type_two(0.5).upper <= 1e-11
    assert math.isfinite(trade.type_two(1e-300).lower)


@pytest.mark.parametrize("alpha", [-0.1, 1.1, float("nan")])
def test_an_error_that_is_no_probability_is_refused(alpha: float) -> None:
    with pytest.raises(ValueError, match="type I"):
        TradeOff.of(GaussianCurve(mu=1.0), (0.0,)).type_two(alpha)


def test_a_single_known_point_is_an_epsilon_delta_guarantee() -> None:
    """f of (ε, δ)-DP; Wasserman and Zhou, arXiv:0811.2501; Kairouz et al., arXiv:1311.0776."""
    trade = TradeOff(epsilons=(1.0,), deltas=(Bracket(lower=0.0, upper=0.01),))
    for alpha in (0.0, 0.05, 0.3, 0.9):
        lines = (1 - 0.01 - math.e * alpha, (1 - 0.01 - alpha) / math.e, 0.0)
        assert trade.type_two(alpha).lower == pytest.approx(max(lines), abs=1e-11)


def test_further_points_only_tighten() -> None:
    curve = FourierAccountant().curve(poisson(0.02, 0.8, 500))
    rough = sample_trade_off(curve.with_width(0.01), tolerance=0.01)
    better = rough.refined({epsilon: curve.delta(epsilon) for epsilon in (0.0, 0.5, 2.0)})
    assert set(better.epsilons) == {*rough.epsilons, 0.0, 0.5, 2.0}
    assert better.advantage.upper == pytest.approx(curve.delta(0.0).upper, rel=1e-14)
    for alpha in ALPHAS:
        one, other = rough.type_two(alpha), better.type_two(alpha)
        assert one.lower <= other.lower + 1e-12
        assert other.upper <= one.upper + 1e-12


# ---- beliefs --------------------------------------------------------------------------


@settings(max_examples=examples(80))
@given(mu=st.floats(0.01, 6.0), prior=st.floats(1e-4, 1 - 1e-4))
def test_the_best_guess_about_a_gaussian_is_its_bayes_rule(mu: float, prior: float) -> None:
    # Guess "in" where the posterior odds, with log-likelihood ratio μ z - μ²/2, pass one.
    threshold = (mu**2 / 2 - math.log(prior / (1 - prior))) / mu
    right = prior * norm.sf(threshold - mu) + (1 - prior) * norm.cdf(threshold)
    result = guess_accuracy(GaussianCurve(mu=mu), prior)
    assert result.lower - 1e-12 <= right <= result.upper + 1e-12
    assert result.width < 1e-10
    assert result.lower >= max(prior, 1 - prior)


@settings(max_examples=examples(80))
@given(mu=st.floats(0.01, 6.0), probability=st.floats(1e-12, 0.3))
def test_a_gaussian_passes_the_odds_no_more_often_than_promised(
    mu: float, probability: float
) -> None:
    t = odds_exponent(GaussianCurve(mu=mu), probability)
    # With the record, the loss is N(μ²/2, μ²).
    assert norm.sf((t - mu**2 / 2) / mu) <= probability


def test_an_epsilon_delta_pair_alone_would_promise_too_much() -> None:
    """P(L > ε(δ)) is above δ, which is why t is not ε."""
    mu, delta = 1.0, 1e-5
    epsilon = GaussianCurve(mu=mu).epsilon(delta).upper
    assert norm.sf((epsilon - mu**2 / 2) / mu) > delta
    assert odds_exponent(GaussianCurve(mu=mu), delta) > epsilon


def test_rare_jumps_pass_the_odds_no_more_often_than_promised() -> None:
    """One subsampled step: L > t where (1 - q) + q e^{(2x - 1)/2σ²} passes e^t."""
    q, sigma, probability = 0.01, 0.7, 1e-3
    step = events.PoissonSubsampledGaussian(sampling_probability=q, noise_multiplier=sigma)
    t = odds_exponent(FourierAccountant().curve(events.Repeated(event=step, count=1)), probability)
    x = sigma**2 * math.log((math.exp(t) - (1 - q)) / q) + 0.5
    beyond = (1 - q) * norm.sf(x / sigma) + q * norm.sf((x - 1) / sigma)
    assert beyond <= probability
    assert beyond > probability / 50


def test_beliefs_follow_bayes_and_end_at_certainty() -> None:
    assert belief(0.5, 0.0) == pytest.approx(0.5)
    assert belief(0.01, math.log(99)) == pytest.approx(0.5)
    assert belief(0.01, math.log(99)) >= 0.5
    assert belief(0.5, math.inf) == 1.0


def test_a_method_without_lower_bounds_says_so() -> None:
    step = events.PoissonSubsampledGaussian(sampling_probability=0.02, noise_multiplier=0.8)
    event = events.Repeated(event=step, count=500)
    loose = guess_accuracy(accountant("rdp").curve(event), 0.3)
    tight = guess_accuracy(FourierAccountant().curve(event), 0.3)
    assert loose.lower == 0.7
    assert tight.upper <= loose.upper


@pytest.mark.parametrize("prior", [0.0, 1.0, -1.0, float("nan")])
def test_a_prior_that_leaves_nothing_to_learn_is_refused(prior: float) -> None:
    with pytest.raises(ValueError, match="prior"):
        guess_accuracy(GaussianCurve(mu=1.0), prior)
    with pytest.raises(ValueError, match="prior"):
        belief(prior, 1.0)
    with pytest.raises(ValueError, match="probability"):
        odds_exponent(GaussianCurve(mu=1.0), prior)
