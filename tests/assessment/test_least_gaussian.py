"""A stated μ bounds the certified curve at every ε, and policies compare it."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pytest
from scipy.stats import norm

import affidavit
from affidavit.accountants import Bracket, PrivacyCurve
from affidavit.assessment import (
    Assessment,
    certify,
    curves,
    explain_guarantee,
    meaning_of,
    with_gaussian_bound,
)
from affidavit.assessment.assessment import Confidence
from affidavit.certificate.issuance import is_readable, statement
from affidavit.certificate.policy.document import Policy, policy_from
from affidavit.certificate.policy.evaluation import evaluate_policy, policy_floor
from affidavit.certificate.requirements import with_requirements
from affidavit.plan import Plan, plan_from

LEAST = {"schema_version": 1, "name": "toys", "version": 1, "datasets": "default"}


def plan(scheme: str = "poisson", adjacency: str = "add_remove", **changes: Any) -> Plan:
    document = {
        "version": 1,
        "dataset": {"size": 1000},
        "adjacency": adjacency,
        "sampling": {"scheme": scheme, "lot_size": 50},
        "steps": 40,
        "releases": [{"name": "all", "clip_norm": 1, "noise_multiplier": 1}],
        "target": {"delta": 1e-6},
    }
    return plan_from(document | changes)


def policy(**changes: Any) -> Policy:
    return policy_from({**LEAST, **changes})


def gaussian_delta(mu: float, epsilon: float) -> float:
    tail: float = norm.cdf(mu / 2 - epsilon / mu) - np.exp(
        epsilon + norm.logcdf(-mu / 2 - epsilon / mu)
    )
    return tail


@pytest.mark.ordinary("poisson-add_remove")
@pytest.mark.parametrize(
    ("scheme", "adjacency"),
    [
        ("poisson", "add_remove"),
        ("poisson", "replace_one"),
        ("fixed_size", "replace_one"),
        ("balls_in_bins", "add_remove"),
        ("shuffled", "zero_out"),
    ],
)
def test_a_certified_curve_is_below_that_of_its_mu(scheme: str, adjacency: str) -> None:
    tested = plan(scheme, adjacency)
    bound = with_gaussian_bound(certify(tested, second_opinion=False)).gaussian
    assert bound is not None
    curve = affidavit.curve(tested)
    for epsilon in (0.0, 0.3, 1.0, 2.5, 5.0, 9.0, 14.0):
        known: Bracket = curve._curve.delta(epsilon)
        assert known.lower <= gaussian_delta(bound.mu, epsilon) + bound.remainder
    assert 0 < bound.regret < 1


def test_exactly_gaussian_runs_state_their_own_mu() -> None:
    result = with_gaussian_bound(certify(plan("full_batch", sampling={"scheme": "full_batch"})))
    assert result.gaussian is not None
    assert (result.gaussian.mu, result.gaussian.remainder) == (result.mu, 0.0)


def test_a_policy_compares_mu_and_a_verifier_compares_what_was_signed() -> None:
    tested = plan()
    curve = curves(tested)
    assert not isinstance(curve, Assessment)
    assert curve.gaussian_bound is not None
    at = curve.gaussian_bound.mu
    own = policy(mu_cap=at * (1 + 1e-9))
    stated = certify(tested, second_opinion=False)
    result = with_requirements(stated, own)
    assert evaluate_policy(tested, result, own)[0].verdict == "certified"
    strict = policy(mu_cap=at * (1 - 1e-6))
    refused, _ = evaluate_policy(tested, result, strict)
    assert [reason.code for reason in refused.reasons] == ["policy_mu_cap"]
    missing, _ = evaluate_policy(tested, stated, own)
    assert [reason.code for reason in missing.reasons] == ["policy_mu_cap"]

    predicate = json.loads(
        json.dumps(statement(result, requester="me", issued_at=datetime.now(UTC), untrusted=False))
    )["predicate"]
    assert is_readable(predicate)
    assert policy_floor(predicate, own) == ()
    assert [reason.code for reason in policy_floor(predicate, strict)] == ["policy_mu_cap"]
    guarantee = predicate["guarantee"]
    with_mu = explain_guarantee(guarantee)
    point = float(guarantee["epsilon"]["upper"]), float(guarantee["delta"]["upper"])
    assert meaning_of([point], at).recognised < meaning_of([point]).recognised
    assert with_mu != explain_guarantee({**guarantee, "gaussian_bound": None})
    for name, text in (("mu", "-1"), ("remainder", "nan"), ("regret", 0.1), ("mu", "much")):
        changed = {**guarantee["gaussian_bound"], name: text}
        assert not is_readable({**predicate, "guarantee": {**guarantee, "gaussian_bound": changed}})
    assert not is_readable({**predicate, "guarantee": {**guarantee, "gaussian_bound": None}})


def test_what_holds_with_a_confidence_or_not_at_every_epsilon_has_no_mu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    result = certify(plan(), second_opinion=False)
    sampled = replace(result, confidence=Confidence(level=0.99, seed="0"))
    stopped = with_gaussian_bound(sampled)
    assert stopped.gaussian is None
    assert stopped.gaussian_problem is not None
    assert stopped.gaussian_problem.code == "unsupported"

    # A curve that stays at 1e-9 for every ε that was sampled has no remainder below it.
    def coarse(curve: PrivacyCurve, **_: Any) -> Any:
        from affidavit.accountants import TradeOff

        return TradeOff.of(curve, (0.0, 1.0))

    monkeypatch.setattr("affidavit.assessment.least_gaussian.sample_trade_off", coarse)
    unbounded = with_gaussian_bound(result)
    assert unbounded.gaussian is None
    assert unbounded.gaussian_problem is not None
    assert unbounded.gaussian_problem.code == "no_gaussian_bound"
    judged, _ = evaluate_policy(plan(), unbounded, policy(mu_cap=100))
    assert [reason.code for reason in judged.reasons] == ["policy_mu_cap"]
    assert "no_gaussian_bound" in judged.reasons[0].message
