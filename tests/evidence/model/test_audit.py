"""The bounds on ε from the losses of canaries hold with the stated confidence."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import brentq
from scipy.stats import binom, norm

from affidavit.evidence import (
    Audit,
    BadCanaries,
    Canaries,
    audit_canaries,
    read_canaries,
    read_losses,
)
from affidavit.evidence.model.canary_audit import (
    Inverse,
    is_refuted,
    lower_epsilon,
)

ALARM = 0.05


def inverse_of(epsilon: float, delta: float = 0.0) -> Inverse:
    """Of (ε, δ)-privacy, from its definition: the least x with f(x) at most 1 - y, by bisection."""

    def inverse(y: float) -> float:
        low, high = 0.0, 1.0
        for _ in range(60):
            x = (low + high) / 2
            f = max(0, 1 - delta - math.exp(epsilon) * x, math.exp(-epsilon) * (1 - delta - x))
            low, high = (x, high) if f > 1 - y else (low, x)
        return high

    return inverse


@pytest.mark.parametrize("epsilon", [0.0, 0.5, 1.0, 3.0])
@pytest.mark.parametrize("guesses", [2, 40, 300])
def test_randomised_response_is_refuted_as_often_as_allowed(epsilon: float, guesses: int) -> None:
    """Its right guesses are exactly binomial, so that the level is a tail of that law."""
    inverse = inverse_of(epsilon)
    least = bisect_left(
        range(guesses + 1),
        True,
        key=lambda right: is_refuted(inverse, right, guesses, guesses, ALARM),
    )
    level = binom.sf(least - 1, guesses, math.exp(epsilon) / (1 + math.exp(epsilon)))
    assert level <= ALARM
    if guesses == 300:
        assert level > ALARM / 4  # the test is not empty


@pytest.mark.ordinary("2.0-0.001")
@pytest.mark.parametrize(("std", "delta"), [(0.5, 1e-5), (2.0, 1e-3)])
def test_the_gaussian_mechanism_is_never_shown_to_spend_more_than_it_does(
    std: float, delta: float
) -> None:
    """200 runs; that more than 22 of them exceed ε or μ has probability 1e-4 at the level 0.05."""
    epsilon = _exact_epsilon(std, delta)
    above = sum(
        result.epsilon > epsilon or result.mu > 1 / std for result in audits(std, delta, runs=200)
    )
    assert above <= binom.isf(1e-4, 200, ALARM)


def audits(std: float, delta: float, *, runs: int, count: int = 120) -> Iterator[Audit]:
    """Of the Gaussian mechanism, each of ``count`` canaries by itself; its μ is 1 / ``std``."""
    generator = np.random.default_rng(29)
    for _ in range(runs):
        canaries = Canaries.of(generator.bytes(32), count, None)
        included = np.array(canaries.included)
        yield audit_canaries(
            canaries, list(generator.normal(0, std, count) - included), delta=delta
        )


def test_half_of_the_noise_is_found_by_mu_and_not_by_epsilon() -> None:
    """Certified for σ = 0.8; ε from one point of the curve is too loose to show σ = 0.4."""
    certified = {"mu": "1.25", "epsilon": {"upper": str(_exact_epsilon(0.8, 1e-5))}}
    results = list(audits(0.4, 1e-5, runs=3, count=2000))
    assert all(result.falsifies(certified) for result in results)
    assert not any(result.falsifies({**certified, "mu": None}) for result in results)


def steinke(right: int, guesses: int, canaries: int, epsilon: float, delta: float) -> float:
    """The p-value of arXiv:2305.08846, Theorem 5.2, which is proved in another way."""
    correct = 1 / (1 + math.exp(-epsilon))
    below = np.cumsum(binom.pmf(np.arange(right - 1, -1, -1), guesses, correct))
    alpha = float(np.max(below / np.arange(1, right + 1), initial=0.0))
    return float(binom.sf(right - 1, guesses, correct)) + 2 * canaries * delta * alpha


@pytest.mark.parametrize(
    ("right", "guesses", "canaries", "delta"),
    [(100, 100, 1000, 0.0), (260, 300, 1000, 1e-5), (700, 1000, 1000, 1e-5), (110, 132, 400, 1e-3)],
)
def test_the_bound_is_about_that_of_steinke_nasr_and_jagielski_or_better(
    right: int, guesses: int, canaries: int, delta: float
) -> None:
    bound = lower_epsilon(right=right, guesses=guesses, canaries=canaries, delta=delta)
    other = brentq(lambda e: steinke(right, guesses, canaries, e, delta) - ALARM, 0, 20)
    assert 0.98 * other < bound < 1.15 * other


def _exact_epsilon(std: float, delta: float) -> float:
    """Of the Gaussian mechanism with sensitivity 1: Balle and Wang, arXiv:1805.06530, Thm. 8."""

    def excess(epsilon: float) -> float:
        near, far = 0.5 / std - epsilon * std, -0.5 / std - epsilon * std
        return float(norm.cdf(near) - math.exp(epsilon) * norm.cdf(far) - delta)

    return float(brentq(excess, 0, 100))


def test_an_open_secret_is_proved() -> None:
    canaries = Canaries.generate(1000)
    result = audit_canaries(canaries, [float(not item) for item in canaries.included], delta=1e-5)
    assert result.right == result.guesses
    assert result.epsilon > 4


@given(st.integers(2, 60), st.integers(0, 60), st.floats(0, 4), st.floats(0, 0.2), st.data())
def test_what_refutes_a_trade_off_refutes_every_more_private_one(
    guesses: int, more: int, epsilon: float, delta: float, data: st.DataObject
) -> None:
    right = data.draw(st.integers(0, guesses))
    canaries = guesses + more
    if not is_refuted(inverse_of(epsilon, delta), right, guesses, canaries, ALARM):
        return
    assert is_refuted(inverse_of(epsilon / 2, delta / 2), right, guesses, canaries, ALARM)
    assert is_refuted(inverse_of(epsilon, delta), min(right + 1, guesses), guesses, canaries, ALARM)


def test_a_bound_is_lower_with_more_delta() -> None:
    def bound(delta: float) -> float:
        return lower_epsilon(right=95, guesses=100, canaries=400, delta=delta)

    assert bound(1e-3) < bound(1e-5) < bound(0.0)


def test_coins_are_fair_and_known_from_the_nonce_alone() -> None:
    canaries = Canaries.generate(20_000)
    assert read_canaries(canaries.as_bytes()) == canaries
    assert abs(sum(canaries.included) - 10_000) < 5 * 71  # five standard deviations
    assert Canaries.generate(20_000).included != canaries.included


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
        audit_canaries(Canaries.generate(10), [1.0] * 9, delta=0.0)
