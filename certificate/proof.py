"""Proofs of certificates: the witness that is signed, and the checker run on it.

A proof is about the plan that the certificate carries, with what it left open filled in as
certified. It is an addition to the accountants' bracket: the bound that it proves may lie above
the certified one by a ten-thousandth, and says so. Certificates without one can be
proved too, by searching for the witness when asked.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from affidavit.accountants import (
    DOMINATING_PAIRS,
    Bracket,
    Proof,
    Unproved,
    Witness,
    prove,
    search_witness,
    witness_document,
    witness_from,
)
from affidavit.certificate.assessment import Assessment
from affidavit.certificate.execution import PlanNotClosed, certified_plan
from affidavit.certificate.policy.evaluation import AS_PROVED, NONE_NEEDED
from affidavit.certificate.statement import statement
from affidavit.mechanisms import lower
from affidavit.plan import Event, MalformedPlan, Reason, RefusedPlan

LOOSENESS = 1e-4
"""How far the ε of a proof may lie above the certified one, relative to it."""


def proof_document(predicate: Mapping[str, Any]) -> dict[str, Any]:
    """The proof to sign with ``predicate``; raises ``Unproved``.

    It has the witness and the statements of docs/theorems that it rests on.
    """
    witness, proof = _search(predicate)
    _within(proof, predicate)
    return {**witness_document(witness), "statements": list(proof.theorems)}


def with_proof(assessment: Assessment) -> Assessment:
    """``assessment`` with a proof of its bound, or with the reason why there is none."""
    stated = statement(
        assessment,
        requester="",
        issued_at=datetime.now(UTC),
        untrusted=False,
        approvals=NONE_NEEDED,
        under=AS_PROVED,
    )
    try:
        return replace(assessment, proof=proof_document(stated["predicate"]))
    except Unproved as failure:
        problem = Reason(
            code=failure.code, pointer="", message=failure.message, remedy=failure.remedy
        )
        return replace(assessment, proof_problem=problem)


def prove_certificate(predicate: Mapping[str, Any]) -> Proof:
    """Prove ``predicate``'s guarantee from its own witness, or from one that is searched for.

    Raises ``Unproved`` where it cannot be proved, with the code of what is in the way.
    """
    signed = predicate.get("proof")
    if signed is None:
        _, proof = _search(predicate)
    elif isinstance(signed, Mapping):
        proof = prove(witness_from(signed), _event(predicate))
    else:
        raise Unproved("bad_witness", "The proof is no object.", "Ask for a new certificate.")
    return _within(proof, predicate)


def proof_sources(proof: Proof) -> tuple[str, ...]:
    """The pages of docs/theorems that ``proof`` rests on, the checker's own first."""
    return "checker", *sorted({DOMINATING_PAIRS[name].source for name in proof.theorems})


def _event(predicate: Mapping[str, Any]) -> Event:
    guarantee = predicate["guarantee"]
    if guarantee is None:
        raise Unproved("nothing_to_prove", "The certificate states no bound.", "Read its reasons.")
    if "confidence" in guarantee:
        raise Unproved(
            "no_statement",
            "The certificate's bound is sampled and holds with a confidence.",
            "Rest on the accountants of the certificate.",
        )
    try:
        return lower(certified_plan(dict(predicate))).event()
    except (PlanNotClosed, MalformedPlan, RefusedPlan, ValueError) as error:
        raise Unproved(
            "not_lowered", f"The plan has no events: {error}.", "Ask for a new certificate."
        ) from None


def _search(predicate: Mapping[str, Any]) -> tuple[Witness, Proof]:
    event, guarantee = _event(predicate), predicate["guarantee"]
    epsilon, delta = (float(guarantee[name]["upper"]) for name in ("epsilon", "delta"))
    above = Bracket(lower=epsilon, upper=epsilon * (1 + 0.99 * LOOSENESS))
    return search_witness(event, above, delta)


def _within(proof: Proof, predicate: Mapping[str, Any]) -> Proof:
    guarantee = predicate["guarantee"]
    stated = float(guarantee["epsilon"]["upper"]), float(guarantee["delta"]["upper"])
    if float(proof.epsilon) > stated[0] * (1 + LOOSENESS) or float(proof.delta) > stated[1]:
        raise Unproved(
            "not_proved",
            f"The proof is of ε ≤ {proof.epsilon} at δ = {proof.delta}; the certificate states "
            f"{guarantee['epsilon']['upper']} at {guarantee['delta']['upper']}.",
            "Ask for a new certificate.",
        )
    return proof
