"""A sampled bound has its confidence and its seed wherever it is stated."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest
from rich.console import Console

from affidavit.accountants import accountant
from affidavit.accountants.gaussian import GaussianAccountant
from affidavit.accountants.monte_carlo.accountant import FAILURE_PROBABILITY
from affidavit.assessment import Assessment, certify
from affidavit.certificate.issuance import statement
from affidavit.gate.render import print_assessment
from affidavit.plan import (
    Plan,
    events,
)

BINNED: dict[str, Any] = {
    "dataset": {"name": "toy", "size": 80},
    "sampling": {"scheme": "balls_in_bins", "lot_size": 10},
    "steps": 16,
    "noise": {"kind": "toeplitz", "coefficients": [1.0, 0.5]},
    "releases": [{"name": "all", "clip_norm": 1, "noise_multiplier": 2}],
    "target": {"delta": 1e-4},
}
CONFIDENCE = 0.999999999


Certified = Callable[..., Assessment]


@pytest.fixture(scope="module")
def certified(plan_of: Callable[..., Plan]) -> Certified:
    """Certify ``BINNED`` with some fields changed, by few draws: what is said of them is tested."""

    def certified(**changes: Any) -> Assessment:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("affidavit.accountants.monte_carlo.pilot.MAX_DRAWS", 1 << 16)
            return certify(plan_of(**BINNED | changes))

    return certified


@pytest.fixture(scope="module")
def assessment(certified: Certified) -> Assessment:
    return certified()


def test_the_result_and_its_engine_carry_confidence_and_seed(assessment: Assessment) -> None:
    assert assessment.verdict == "certified"
    assert assessment.confidence is not None
    result = assessment.as_result()
    assert result["confidence"] == CONFIDENCE == 1 - FAILURE_PROBABILITY
    engine, second = result["accountants"]
    assert (engine["name"], engine["confidence"]) == ("monte_carlo", CONFIDENCE)
    assert len(engine["seed"]) == 32
    assert second["name"] == "largest_bin"
    assert "confidence" not in second


def test_proved_bounds_replace_sampled_ones_where_they_are_no_higher(
    plan_of: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As they are where draws are too few for a small δ."""
    for limit in ("MAX_DRAWS", "MIN_DRAWS"):
        monkeypatch.setattr(f"affidavit.accountants.monte_carlo.pilot.{limit}", 4096)
    plan = plan_of(**BINNED | {"target": {"delta": 1e-9}})
    proved, sampled = certify(plan), certify(plan, engine="monte_carlo")
    assert proved.confidence is None
    assert sampled.confidence is not None
    assert proved.epsilon is not None
    assert sampled.epsilon is not None
    assert sampled.epsilon.lower <= proved.epsilon.upper <= sampled.epsilon.upper


def test_the_signed_statement_carries_them(assessment: Assessment) -> None:
    stated = statement(
        assessment, requester="me", issued_at=datetime(2026, 1, 1, tzinfo=UTC), untrusted=False
    )
    guarantee = stated["predicate"]["guarantee"]
    assert guarantee["confidence"] == "0.999999999"
    assert assessment.confidence is not None
    assert guarantee["seed"] == assessment.confidence.seed
    assert stated["predicate"]["accountants"][0]["seed"] == assessment.confidence.seed


@pytest.mark.soak
def test_no_print_leaves_it_out(assessment: Assessment, certified: Certified) -> None:
    missed = certified(target={"epsilon": 0.5, "delta": 1e-4})
    assert missed.verdict == "under_noised"
    for item in (assessment, missed):
        assert "with confidence 0.999999999" in item.headline
        console = Console(record=True, width=200)
        print_assessment(console, "plan", item.reasons, item)
        printed = console.export_text().splitlines()
        lines = [line for line in printed if "ε ≤" in line or "monte_carlo" in line]
        assert len(lines) >= 2
        assert all("with confidence 0.999999999" in line for line in lines)


def test_what_is_certain_has_none(plan_of: Callable[..., Plan]) -> None:
    certain = certify(plan_of(), second_opinion=False)
    assert certain.confidence is None
    assert certain.as_result()["confidence"] is None
    assert "confidence" not in certain.headline
    assert "confidence" not in certain.accountants[0].as_dict()


@pytest.mark.soak
def test_the_same_plan_gives_the_same_numbers(assessment: Assessment, certified: Certified) -> None:
    again = certified()
    assert (again.epsilon, again.confidence) == (assessment.epsilon, assessment.confidence)


def test_bins_help_and_stay_below_the_unamplified_gaussian(assessment: Assessment) -> None:
    assert assessment.epsilon is not None
    assert assessment.sensitivity is not None
    alone = events.Gaussian(noise_multiplier=2 / assessment.sensitivity)
    assert assessment.epsilon.upper < GaussianAccountant().curve(alone).epsilon(1e-4).lower


@pytest.mark.soak
def test_noise_that_is_left_open_is_solved_for_and_confirmed(certified: Certified) -> None:
    target = {"epsilon": 2, "delta": 1e-4}
    solved = certified(target=target, releases=[{"name": "all", "clip_norm": 1}])
    assert solved.verdict == "certified"
    assert solved.epsilon is not None
    assert 2 * 0.98 < solved.epsilon.upper <= 2
    provided = [{"name": "all", "clip_norm": 1, "noise_multiplier": solved.releases[0].required}]
    again = certified(target=target, releases=provided)
    assert (again.verdict, again.epsilon) == ("certified", solved.epsilon)


def test_steps_are_searched_for_by_what_is_certain(plan_of: Callable[..., Plan]) -> None:
    target = {"epsilon": 2, "delta": 1e-4}
    result = certify(plan_of(**BINNED | {"steps": None, "target": target}), second_opinion=False)
    assert result.verdict == "certified"
    assert result.confidence is None
    assert result.epsilon is not None
    assert result.epsilon.upper <= 2


@pytest.mark.soak
@pytest.mark.parametrize("bins", [2, 30])
def test_without_correlation_it_meets_the_engine_that_convolves(bins: int) -> None:
    """Two methods with nothing in common: draws here, transforms of one bin's law there."""
    rows = tuple(tuple(float(i == j) for j in range(bins)) for i in range(bins))
    drawn = events.BallsInBinsGaussian(gram=events.Gram(rows), noise_multiplier=0.8)
    exact = events.RandomAllocationGaussian(bins=bins, noise_multiplier=0.8)
    for delta in (1e-3, 1e-6):
        sampled = accountant("monte_carlo").curve(drawn).epsilon(delta)
        convolved = accountant("allocation").curve(exact).epsilon(delta)
        assert sampled.meets(convolved)
        assert sampled.width < 0.1 * sampled.upper
