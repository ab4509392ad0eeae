"""What the losses of canaries prove about ε holds with the confidence that is stated."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from scipy.optimize import brentq
from scipy.stats import binom, norm

from affidavit.certificate import BadCanaries, Canaries, audit_canaries, read_canaries, read_losses
from affidavit.certificate.evidence.audit import lower_epsilon, p_value

ALARM = 0.05


@pytest.mark.parametrize("epsilon", [0.0, 0.5, 1.0, 3.0])
@pytest.mark.parametrize("guesses", [2, 40, 300])
def test_randomised_response_is_rejected_as_often_as_allowed(epsilon: float, guesses: int) -> None:
    """Its right guesses are exactly binomial, so that the level is a sum of its probabilities."""
    correct = math.exp(epsilon) / (1 + math.exp(epsilon))
    level = sum(
        binom.pmf(right, guesses, correct)
        for right in range(guesses + 1)
        if p_value(right, guesses, guesses, epsilon, 0.0) < ALARM
    )
    assert level <= ALARM
    if guesses == 300:
        assert level > ALARM / 2  # the test is not empty


@pytest.mark.parametrize(("std", "delta"), [(0.5, 1e-5), (2.0, 1e-3)])
def test_the_gaussian_mechanism_is_never_shown_to_spend_more_than_it_does(
    std: float, delta: float
) -> None:
    """200 runs; that more than 22 of them exceed ε has probability 1e-4 at the level 0.05."""
    epsilon = _exact_epsilon(std, delta)
    generator, above = np.random.default_rng(29), 0
    for _ in range(200):
        canaries = Canaries.fresh(300)
        included = np.array(canaries.included)
        result = audit_canaries(
            canaries, list(generator.normal(0, std, 300) - included), delta=delta
        )
        above += result.epsilon > epsilon
    assert above <= binom.isf(1e-4, 200, ALARM)


def _exact_epsilon(std: float, delta: float) -> float:
    """Of the Gaussian mechanism with sensitivity 1: Balle and Wang, arXiv:1805.06530, Thm. 8."""

    def excess(epsilon: float) -> float:
        near, far = 0.5 / std - epsilon * std, -0.5 / std - epsilon * std
        return float(norm.cdf(near) - math.exp(epsilon) * norm.cdf(far) - delta)

    return float(brentq(excess, 0, 100))


def test_an_open_secret_is_proved() -> None:
    canaries = Canaries.fresh(1000)
    result = audit_canaries(canaries, [float(not item) for item in canaries.included], delta=1e-5)
    assert result.right == result.guesses
    assert result.epsilon > 4


def test_the_p_value_rises_with_epsilon_and_falls_with_right_guesses() -> None:
    for delta in (0.0, 1e-5, 1e-2):
        for right in (30, 45, 60):
            steps = [p_value(right, 60, 200, e, delta) for e in np.linspace(0, 5, 60)]
            assert all(before <= after + 1e-12 for before, after in pairwise(steps))
        rates = [p_value(right, 60, 200, 1.0, delta) for right in range(61)]
        assert all(before >= after - 1e-12 for before, after in pairwise(rates))


def test_a_bound_is_lower_with_more_delta_and_more_confidence() -> None:
    def bound(delta: float = 1e-5, confidence: float = 0.95) -> float:
        return lower_epsilon(
            right=95, guesses=100, canaries=400, delta=delta, confidence=confidence
        )

    assert bound(1e-3) < bound(1e-5) < bound(0.0)
    assert bound(confidence=0.999) < bound()


def test_coins_are_fair_and_known_from_the_nonce_alone() -> None:
    canaries = Canaries.fresh(20_000)
    assert read_canaries(canaries.as_bytes()) == canaries
    assert abs(sum(canaries.included) - 10_000) < 5 * 71  # five standard deviations
    assert Canaries.fresh(20_000).included != canaries.included


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"[]",
        b"{}",
        b'{"count":10,"guesses":4,"nonce":"00","version":1}',
        b'{"count":1e9,"guesses":4,"nonce":"' + 64 * b"0" + b'","version":1}',
        b'{"count":10,"guesses":3,"nonce":"' + 64 * b"0" + b'","version":1}',
        b'{"count":10,"guesses":12,"nonce":"' + 64 * b"0" + b'","version":1}',
        b'{"count":10,"guesses":4,"nonce":"' + 64 * b"0" + b'","version":1} ',
        b'{"count":10,"guesses":4,"nonce":"' + 64 * b"0" + b'","version":2}',
    ],
)
def test_files_that_are_no_canaries_are_refused(raw: bytes) -> None:
    with pytest.raises(BadCanaries):
        read_canaries(raw)


@pytest.mark.parametrize("raw", [b"", b"[]", b'{"losses":[NaN]}', b'{"losses":["1"]}', b"{}"])
def test_losses_that_are_no_numbers_are_refused(raw: bytes) -> None:
    with pytest.raises(BadCanaries):
        read_losses(raw)


def test_losses_of_another_number_of_canaries_are_refused() -> None:
    with pytest.raises(BadCanaries):
        audit_canaries(Canaries.fresh(10), [1.0] * 9, delta=0.0)
