"""The record of an audit of a run's canaries: canaries, losses, and what they prove.

It follows from the canaries, their losses and the certificate, so that a verifier computes it
again. The first line of the run record commits to the canaries. That the losses are those of the
trained model is declared by the person who adds the record to the run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from affidavit.accountants import decimal_down
from affidavit.assessment import certified_plan
from affidavit.evidence.model.canary_audit import (
    AUDITABLE,
    BadCanaries,
    Canaries,
    audit_canaries,
    losses_of,
    read_canaries,
)
from affidavit.evidence.run_record import START, BrokenLine, decode_line
from affidavit.plan import AuditCanaries, canonical_json, digest_of

RECORD_TYPE = "affidavit.audit/1"


def require_of_run(
    canaries: Canaries, header: Mapping[str, Any], planned: AuditCanaries | None
) -> None:
    """Compare canaries with the first line of the run record and the plan.

    Raises ``BadCanaries``.
    """
    if canaries.commitment != header.get("canaries"):
        raise BadCanaries("these are not the canaries that the run record commits to.")
    if planned is not None and canaries != Canaries.of(
        canaries.nonce, planned.count, planned.guesses
    ):
        raise BadCanaries("the number of canaries or guesses differs from the plan.")


def audit_record(
    canaries: Canaries, losses: Sequence[float], record: bytes, predicate: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the audit of a run with this ``record`` (or its first line) under a certificate.

    Raises ``BadCanaries``, and ``PlanNotClosed`` for a certificate without a plan that can be run.
    """
    try:
        header = decode_line(record.partition(b"\n")[0] + b"\n", START)
    except BrokenLine:
        header = {}
    require_of_run(canaries, header, certified_plan(dict(predicate)).canaries)
    guarantee = predicate["guarantee"]
    if guarantee["adjacency"] not in AUDITABLE:
        raise BadCanaries(f"audits need {' or '.join(sorted(AUDITABLE))}.")
    result = audit_canaries(canaries, losses, delta=float(guarantee["delta"]["upper"]))
    return {
        "type": RECORD_TYPE,
        "verdict": "refuted" if result.falsifies(guarantee) else "not_refuted",
        "plan": digest_of(predicate["plan"]),
        "canaries": json.loads(canaries.as_bytes()),
        "losses": list(losses),
        "right": result.right,
        "confidence": str(result.confidence),
        "epsilon_at_least": decimal_down(result.epsilon),
        "mu_at_least": decimal_down(result.mu),
    }


def is_audit_record(
    document: Mapping[str, Any], record: bytes, predicate: Mapping[str, Any]
) -> bool:
    """Whether ``document`` is what ``audit_record`` makes of its own canaries and losses.

    Raises ``BadCanaries`` and ``PlanNotClosed``.
    """
    canaries = read_canaries(canonical_json(document.get("canaries")))
    again = audit_record(canaries, losses_of(document), record, predicate)
    return canonical_json(again) == canonical_json(document)
