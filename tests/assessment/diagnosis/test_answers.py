"""A claim holds at the upper end, is refuted below the lower end, and is not decided between."""

from __future__ import annotations

import math
import random
from decimal import ROUND_HALF_EVEN, Decimal
from fractions import Fraction
from typing import Any

import pytest

import affidavit
from affidavit.accountants import Bracket
from affidavit.assessment import certify
from affidavit.assessment.diagnose import diagnose
from affidavit.assessment.diagnosis.claims import answer_to
from affidavit.plan import Claim, plan_from
from tests.support.random_seeds import examples, seeded

CORRELATED = {
    "version": 1,
    "dataset": {"size": 42061},
    "adjacency": "add_remove",
    "sampling": {"scheme": "poisson", "lot_size": 256},
    "steps": 120,
    "noise": {"kind": "bidiagonal", "lambda": 0.9},
    "optimizer": {"name": "dp_corrsgd"},
    "releases": [{"name": "all", "clip_norm": 1.0, "noise_multiplier": 1.377029}],
    "target": {"delta": 1e-5},
}
"""Its bracket is [6.93, 31.13]; at ε = 8, Monte Carlo of an attack gives δ = 9.6e-5."""

SHUFFLED: dict[str, Any] = {
    "version": 1,
    "dataset": {"size": 1000},
    "adjacency": "zero_out",
    "sampling": {"scheme": "shuffled", "lot_size": 100},
    "steps": 10,
    "releases": [{"name": "all", "clip_norm": 1, "noise_multiplier": 2}],
    "target": {"delta": 1e-5},
}
"""Its bracket is [1.489, 1.994]."""


def random_document(rng: random.Random) -> dict[str, Any]:
    """A plan whose bracket is wide (shuffled lots) or narrow (the others)."""
    scheme = rng.choice(["shuffled", "shuffled", "poisson", "cyclic"])
    lots = rng.choice([5, 10, 20])
    return {
        "version": 1,
        "dataset": {"size": lots * 100},
        "adjacency": "zero_out",
        "sampling": {"scheme": scheme, "lot_size": 100},
        "steps": lots * rng.choice([1, 2, 4]),
        "releases": [{"name": "all", "clip_norm": 1, "noise_multiplier": rng.uniform(1.5, 6)}],
        "target": {"delta": rng.choice([1e-4, 1e-5])},
    }


def texts_around(end: float, rng: random.Random) -> list[str]:
    """Decimals of two to nine digits near ``end``: rounded, and one unit to each side."""
    value = Decimal(end)
    digits = rng.sample(range(2, 10), 4)
    units = [Decimal(1).scaleb(value.adjusted() + 1 - count) for count in digits]
    rounded = [(value.quantize(unit, ROUND_HALF_EVEN), unit) for unit in units]
    around = (number + shift * unit for number, unit in rounded for shift in (-1, 0, 1))
    return [f"{number:f}" for number in around if number > 0 and number != int(number)]


def expected_answer(text: str, bounds: Bracket) -> str:
    """The rule, for a text of at least two digits, some of them after its point."""
    places = len(text.partition(".")[2])
    largest = Fraction(text) + Fraction(1, 2 * 10**places)
    if largest >= Fraction(bounds.upper):
        return "holds"
    return "refuted" if largest < Fraction(bounds.lower) else "not_decided"


def is_plain(text: str) -> bool:
    """Whether every written digit counts: not ``94.0``, nor a single digit."""
    digits = text.replace(".", "").lstrip("0")
    return len(digits) > 1 and text.partition(".")[2] != "0"


def test_the_largest_number_that_rounds_to_a_claim_decides() -> None:
    rng = random.Random(seeded(52))
    answers = set()
    for _ in range(500):
        lower = rng.uniform(0.2, 90)
        width = rng.choice([0, 1e-9, 1e-4, 0.1, 1])
        bounds = Bracket(lower=lower, upper=lower * (1 + width))
        for text in texts_around(rng.choice([bounds.lower, bounds.upper]), rng):
            if is_plain(text):
                answer = answer_to(Claim(epsilon=text).largest, bounds)
                assert answer == expected_answer(text, bounds), (text, bounds)
                answers.add(answer)
    assert answers == {"holds", "refuted", "not_decided"}


@pytest.mark.parametrize(
    ("claim", "largest"),
    [("7.98", "7.985"), ("8", "8.05"), (8.0, "8.05"), ("120", "125"), ("94.0", "94.5")],
)
def test_a_half_belongs_to_the_claim(claim: Any, largest: str) -> None:
    """The digits are those by which mistakes agree with a claim."""
    end = float(largest)
    below = end if Fraction(end) <= Fraction(largest) else math.nextafter(end, 0)
    above = math.nextafter(below, math.inf)
    answers = [
        answer_to(Claim(epsilon=claim).largest, Bracket(lower=lower, upper=upper))
        for lower, upper in ((1, below), (1, above), (below, 999), (above, 999))
    ]
    assert answers == ["holds", "not_decided", "not_decided", "refuted"]


def test_plan_and_diagnosis_answer_by_the_bracket_that_they_show() -> None:
    rng = random.Random(seeded(7))
    for _ in range(examples(20)):
        document = random_document(rng)
        plan = plan_from(document)
        known = certify(plan, second_opinion=False).epsilon
        assert known is not None
        ends = [known.lower, known.upper, (known.lower + known.upper) / 2]
        text = rng.choice([text for text in texts_around(rng.choice(ends), rng) if is_plain(text)])
        result = certify(plan_from({**document, "claim": text}), second_opinion=False)
        diagnosis = affidavit.diagnose(document, claimed_epsilon=text)
        assert result.epsilon is not None
        assert known.lower <= result.epsilon.lower <= result.epsilon.upper <= known.upper
        answer = expected_answer(text, result.epsilon)
        assert diagnosis.certified.epsilon == result.epsilon
        assert (diagnosis.answer, diagnosis.holds) == (answer, answer == "holds"), (document, text)
        none = {"mistakes": ["none"]} in diagnosis.as_result()["explanations"]
        assert none == (answer == "holds")
        verdicts = {
            "holds": ("certified", ()),
            "refuted": ("under_noised", ("claim_below_certified",)),
            "not_decided": ("unproved", ("claim_not_decided",)),
        }
        assert (result.verdict, result.codes[:1]) == verdicts[answer]


def test_what_is_merely_not_contradicted_does_not_hold() -> None:
    result = certify(plan_from({**CORRELATED, "claim": 8}), second_opinion=False)
    assert result.epsilon is not None
    assert result.epsilon.lower < 7.95
    assert result.epsilon.upper > 8.05
    assert (result.verdict, result.codes) == ("unproved", ("claim_not_decided",))


def test_the_noise_with_which_an_undecided_claim_holds_is_given() -> None:
    result = diagnose(plan_from(SHUFFLED), Claim(epsilon="1.8"))
    assert (result.answer, result.explanations) == ("not_decided", ())
    assert result.corrected is not None
    assert result.corrected.epsilon is not None
    assert result.corrected.epsilon.upper <= 1.8
    noise = result.corrected.releases[0].given
    assert diagnose(result.plan.with_noise_multipliers(lambda *_: noise), result.claim).holds


def test_a_bracket_around_a_claim_is_narrowed() -> None:
    document = SHUFFLED | {
        "dataset": {"size": 50000},
        "sampling": {"scheme": "poisson", "lot_size": 50},
        "steps": 3,
        "releases": [{"name": "all", "clip_norm": 1, "noise_multiplier": 0.5}],
    }
    wide = certify(plan_from(document), second_opinion=False).epsilon
    assert wide is not None
    middle = repr((wide.lower + wide.upper) / 2)
    for narrow in (
        diagnose(plan_from(document), Claim(epsilon=middle)).certified.epsilon,
        certify(plan_from(document | {"claim": middle}), second_opinion=False).epsilon,
    ):
        assert narrow is not None
        assert wide.lower <= narrow.lower <= narrow.upper <= wide.upper
        assert narrow.width < wide.width / 2


def test_a_derivation_that_gives_a_claim_inside_the_bracket_is_named() -> None:
    """The Poisson value of shuffled lots; that it is wrong does not refute the claim."""
    release = {"name": "all", "clip_norm": 1, "noise_multiplier": 6.0}
    document = SHUFFLED | {"releases": [release]}
    lots = {**document["sampling"], "scheme": "poisson"}
    value = certify(plan_from(document | {"sampling": lots}), second_opinion=False).epsilon
    assert value is not None
    result = diagnose(plan_from(document), Claim(epsilon=f"{value.upper:.6g}"))
    assert result.answer == "not_decided"
    assert [item.mistakes for item in result.explanations] == [("poisson_for_shuffle",)]
    assert "poisson_for_shuffle" in result.summary


@pytest.mark.parametrize(
    ("target", "sigma", "answer"),
    [(2.1, "2.00", "holds"), (1.7, "2.00", "not_decided"), (1.4, "2.00", "refuted")],
)
def test_a_claimed_noise_multiplier_is_answered_by_its_bracket(
    target: float, sigma: str, answer: str
) -> None:
    """Of 10 shuffled lots with σ = 2, ε lies in [1.489, 1.994]."""
    document = SHUFFLED | {
        "releases": [{"name": "all", "clip_norm": 1}],
        "target": {"epsilon": target, "delta": 1e-5},
    }
    assert affidavit.diagnose(document, claimed_noise_multiplier=sigma).answer == answer


def test_the_largest_noise_that_rounds_to_the_claimed_one_decides() -> None:
    """ε of one Gaussian release falls from 1.9998 to 1.9894 between σ = 1.994 and 2.004."""
    document = SHUFFLED | {
        "sampling": {"scheme": "full_batch"},
        "steps": 1,
        "releases": [{"name": "all", "clip_norm": 1}],
        "target": {"epsilon": 1.994, "delta": 1e-5},
    }
    answers = [
        affidavit.diagnose(document, claimed_noise_multiplier=sigma).answer
        for sigma in ("2.0", "1.99", "1.990", "2.00")
    ]
    assert answers == ["holds", "refuted", "refuted", "holds"]


@pytest.mark.parametrize(
    ("target", "claim", "verdict", "codes"),
    [
        (1.7, "1.8", "unproved", ("unproved", "claim_not_decided")),
        (3.0, "1.8", "unproved", ("claim_not_decided",)),
        (1.7, "3.0", "unproved", ("unproved",)),
        (1.2, "1.8", "under_noised", ("under_noised", "claim_not_decided")),
    ],
)
def test_a_target_stays_what_it_is_beside_a_claim(
    target: float, claim: str, verdict: str, codes: tuple[str, ...]
) -> None:
    document = SHUFFLED | {
        "target": {"epsilon": target, "delta": 1e-5},
        "claim": claim,
    }
    result = certify(plan_from(document), second_opinion=False)
    assert (result.verdict, result.codes) == (verdict, codes)
