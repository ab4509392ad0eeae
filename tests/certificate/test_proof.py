"""A certificate's bound is proved again from its witness, or not at all."""

from __future__ import annotations

import base64
import copy
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from affidavit.assessment import certify
from affidavit.certificate import (
    Certificate,
    issue,
    proof_sources,
    prove_certificate,
    verify,
    with_proof,
)
from affidavit.checker import Unproved
from affidavit.plan import plan_from
from affidavit.trust import SigningKey
from tests.support.trust import trusting

NOW = datetime.now(UTC).replace(microsecond=0)
KEY = SigningKey.generate("test")


def plan_document(**changes: Any) -> dict[str, Any]:
    document: dict[str, Any] = {
        "version": 1,
        "adjacency": "add_remove",
        "dataset": {"size": 10_000},
        "sampling": {"scheme": "poisson", "lot_size": 500},
        "steps": 200,
        "releases": [
            {"name": "body", "clip_norm": 1.0, "noise_multiplier": 3.0, "count": 2},
            {"name": "head", "clip_norm": 0.5, "noise_multiplier": 2.0},
        ],
        "target": {"delta": 1e-5},
    }
    return {**document, **changes}


def certificate(document: dict[str, Any], *, prove: bool = True) -> Certificate:
    assessment = certify(plan_from(document), second_opinion=False)
    if prove:
        assessment = with_proof(assessment)
    return issue(assessment, KEY, requester="me", issued_at=NOW)


@pytest.fixture(scope="module")
def proved() -> Certificate:
    return certificate(plan_document())


def test_the_signed_witness_proves_the_bound_of_the_joint_release(proved: Certificate) -> None:
    """σ_joint of the blocks decides: (2/9 + 1/4)^(-1/2)."""
    predicate = proved.statement["predicate"]
    assert predicate["proof"]["statements"] == ["poisson_add_remove"]
    assert len(json.dumps(predicate["proof"])) < 4096
    proof = prove_certificate(predicate)
    stated = float(predicate["guarantee"]["epsilon"]["upper"])
    assert float(predicate["guarantee"]["epsilon"]["lower"]) < float(proof.epsilon)
    assert float(proof.epsilon) <= stated * (1 + 1e-4)
    assert proof_sources(proof) == ("checker", "poisson-add-remove")


def test_a_certificate_with_a_proof_verifies_like_any_other(proved: Certificate) -> None:
    assert verify(proved.bundle, trusting(KEY.public, at=NOW)).predicate["proof"]


def test_a_certificate_without_a_proof_has_the_same_fields_as_before() -> None:
    document = plan_document(sampling={"scheme": "full_batch"})
    predicate = certificate(document, prove=False).statement["predicate"]
    assert "proof" not in predicate
    # One Gaussian mechanism needs no witness.
    assert prove_certificate(predicate).theorems == ("gaussian",)


@pytest.mark.ordinary("not path1-*", "not path3-*")
@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("guarantee", "epsilon", "upper"), "1"),
        (("guarantee", "delta", "upper"), "1e-9"),
        (("plan", "steps"), 220),
        (("proof", "epsilon"), "1"),
        (("proof", "delta"), "0.5"),
        (("proof", "runs"), []),
        (("proof",), "yes"),
    ],
)
def test_what_does_not_follow_is_not_proved(
    proved: Certificate, path: tuple[str, ...], value: Any
) -> None:
    predicate = copy.deepcopy(proved.statement["predicate"])
    place = predicate
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = value
    with pytest.raises(Unproved) as refusal:
        prove_certificate(predicate)
    assert refusal.value.code in ("not_proved", "bad_witness")


def test_each_link_of_a_chain_of_neighbours_is_proved() -> None:
    bins = {"scheme": "balls_in_bins", "lot_size": 500}
    document = plan_document(adjacency="replace_one", sampling=bins, steps=None, epochs=1)
    predicate = certificate(document).statement["predicate"]
    proof = prove_certificate(predicate)
    assert proof_sources(proof) == ("checker", "group-privacy", "random-allocation")
    stated = float(predicate["guarantee"]["epsilon"]["upper"])
    assert float(proof.epsilon) == pytest.approx(stated, rel=1e-3)
    one, other = predicate["proof"]["links"]
    louder = {**document["releases"][0], "noise_multiplier": 2.9}
    for changes in (
        {"proof": {**predicate["proof"], "links": [one]}},
        {"proof": {**predicate["proof"], "links": [one, one, other]}},
        {"proof": {**predicate["proof"], "links": [{**one, "epsilon": "0.001"}, other]}},
        {"proof": {**predicate["proof"], "links": [other, other]}},
        {"plan": {**predicate["plan"], "releases": [louder, document["releases"][1]]}},
    ):
        with pytest.raises(Unproved) as refusal:
            prove_certificate({**predicate, **changes})
        assert refusal.value.code in ("not_proved", "bad_witness")


SEPARATED: dict[str, Any] = {
    "sampling": {"scheme": "b_min_sep", "lot_size": 500, "separation": 2},
    "noise": {"kind": "bsr", "bands": 2},
    "steps": 20,
    "epochs": None,
    "optimizer": {"name": "dp_sgd"},
    "releases": [{"name": "all", "clip_norm": 1, "noise_multiplier": 1.0}],
}


@pytest.fixture(scope="module")
def by_moments() -> Any:
    """A plan whose least bound has no statement."""
    return certify(plan_from(plan_document(**SEPARATED, target={"delta": 1e-6})))


def test_a_larger_bound_that_is_proved_takes_the_place_of_one_that_is_not(
    by_moments: Any,
) -> None:
    """Moments have no statement; without them the verdict is the same, and the bound is proved."""
    assessment = by_moments
    proved = with_proof(assessment)
    assert proved.proof is not None
    assert assessment.epsilon is not None
    assert proved.epsilon is not None
    assert proved.epsilon.upper > 1.1 * assessment.epsilon.upper
    # The second opinion is the same, of what can be proved.
    opinions = [one.accountants[1].epsilon.upper for one in (assessment, proved)]
    assert opinions == pytest.approx([proved.epsilon.upper] * 2, rel=2e-3)


@pytest.mark.soak
def test_a_verdict_that_needs_a_bound_without_a_statement_keeps_it(by_moments: Any) -> None:
    free = by_moments
    assert free.epsilon is not None
    target = {"epsilon": 1.02 * free.epsilon.upper, "delta": 1e-6}
    plan = plan_from(plan_document(**SEPARATED, target=target))
    result = with_proof(certify(plan, second_opinion=False))
    assert (result.verdict, result.proof) == ("certified", None)
    assert result.epsilon == free.epsilon
    assert result.proof_problem is not None


def test_a_release_without_a_statement_is_refused_by_name() -> None:
    metric = {"kind": "laplace", "name": "count", "noise_multiplier": 20.0}
    document = plan_document(extra=[metric])
    assessment = with_proof(certify(plan_from(document), second_opinion=False))
    assert assessment.proof is None
    assert assessment.proof_problem is not None
    assert assessment.proof_problem.code == "no_statement"
    assert "Laplace" in assessment.proof_problem.message


@pytest.mark.soak
def test_an_old_certificate_is_proved_by_a_search() -> None:
    lines = Path("tests/release/0.1.0/bundles.jsonl").read_text().splitlines()
    predicates = []
    for line in lines:
        payload = json.loads(line.partition("\t")[2])["envelope"]["payload"]
        predicates.append(json.loads(base64.b64decode(payload))["predicate"])
    poisson = [
        predicate
        for predicate in predicates
        if predicate["guarantee"] is not None
        and predicate["plan"].get("sampling", {}).get("scheme") == "poisson"
        and "correlation" not in predicate["plan"]
    ]
    proof = prove_certificate(poisson[0])
    assert float(proof.epsilon) > float(poisson[0]["guarantee"]["epsilon"]["lower"])
