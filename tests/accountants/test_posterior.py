"""Beliefs about a record: against the Gaussian's own posterior, and by simulation's law."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import norm

from affidavit.accountants.fourier import FourierAccountant
from affidavit.accountants.gaussian import GaussianCurve
from affidavit.accountants.registry import accountant
from affidavit.accountants.tradeoff import belief, guess_accuracy, odds_exponent
from affidavit.plan import PoissonSubsampledGaussian, Repeated
from tests.seeds import examples


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
    step = PoissonSubsampledGaussian(sampling_probability=q, noise_multiplier=sigma)
    t = odds_exponent(FourierAccountant().curve(Repeated(event=step, count=1)), probability)
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
    step = PoissonSubsampledGaussian(sampling_probability=0.02, noise_multiplier=0.8)
    event = Repeated(event=step, count=500)
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
