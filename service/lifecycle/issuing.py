"""Issues as rows: what is signed, and the columns by which it is found again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from affidavit.certificate import (
    TIME_FORMAT,
    Approvals,
    Assessment,
    Certificate,
    SigningPort,
    approved,
    issue,
    read_envelope,
)
from affidavit.certificate.policy import AS_PROVED, Judgement
from affidavit.plan import Plan
from affidavit.service.lifecycle.standing import Status
from affidavit.service.store import StoredCertificate


def sign(
    plan: Plan,
    assessment: Assessment,
    key: SigningPort,
    *,
    requester: str,
    former: StoredCertificate | None,
    under: Judgement = AS_PROVED,
    ledger: Mapping[str, Any] | None = None,
) -> StoredCertificate:
    """What was found about ``plan``, signed as the issue after ``former`` or as the first.

    ``under`` is what ``judge`` returned together with ``assessment``, and ``ledger`` where the
    data set's budget stands.
    """
    issued_at = datetime.now(UTC)
    certificate = issue(
        assessment,
        key,
        requester=requester,
        issued_at=issued_at,
        under=under,
        former=former,
        ledger=ledger,
    )
    result = certificate.as_result(assessment)
    found = _approvals(certificate.statement)
    return StoredCertificate(
        id=certificate.id,
        untrusted=certificate.untrusted,
        issue=certificate.statement["predicate"]["issue"],
        status=Status.ACTIVE if found.complete else Status.AWAITING_APPROVAL,
        plan_digest=assessment.plan_digest,
        name=plan.name,
        dataset=plan.dataset.name,
        adjacency=plan.adjacency,
        verdict=assessment.verdict,
        epsilon_upper=(result["epsilon"] or {}).get("upper"),
        delta=(result["delta"] or {}).get("upper"),
        created_at=issued_at,
        not_after=not_after(certificate.statement),
        envelope_digest=certificate.envelope_digest,
        approvals_required=found.required,
        approvals_given=len(found.given),
        key_id=key.key_id,
        bundle=certificate.bundle,
        result=json.dumps(result, allow_nan=False),
    )


def sign_approved(
    pending: StoredCertificate, approvals: Approvals, key: SigningPort, at: datetime
) -> StoredCertificate:
    """``pending`` with its ``approvals``, signed as the issue after it."""
    certificate = approved(
        statement_of(pending), key, approvals=approvals, issued_at=at, former=pending
    )
    return replace(
        pending,
        issue=pending.issue + 1,
        untrusted=certificate.untrusted,
        status=Status.ACTIVE,
        created_at=at,
        envelope_digest=certificate.envelope_digest,
        approvals_given=len(approvals.given),
        key_id=key.key_id,
        bundle=certificate.bundle,
        result=_with_bundle(pending.result, certificate),
    )


def statement_of(certificate: StoredCertificate) -> dict[str, Any]:
    """The statement that a stored certificate carries in its signed bytes."""
    envelope = read_envelope(json.loads(certificate.bundle)["envelope"])
    found: dict[str, Any] = json.loads(envelope.payload)
    return found


def not_after(statement: Mapping[str, Any]) -> datetime:
    """The end of a statement's validity."""
    text = statement["predicate"]["validity"]["not_after"]
    return datetime.strptime(text, TIME_FORMAT).replace(tzinfo=UTC)


def _approvals(statement: Mapping[str, Any]) -> Approvals:
    return Approvals.of(statement["predicate"])


def _with_bundle(result: str, certificate: Certificate) -> str:
    document = json.loads(result)
    document["certificate"] = {"id": certificate.id, "bundle": json.loads(certificate.bundle)}
    return json.dumps(document, allow_nan=False)
