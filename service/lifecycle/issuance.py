"""Sign a certificate as a stored issue, and the result document of an issue.

The result is stored as the text of the first response and not parsed for every response.
What can change later, and what distinguishes issues, is appended to its ``certificate``,
which comes last.

>>> append_to_certificate(
...     '{"verdict": "certified", "certificate": {"id": "x"}}', {"status": "active"}
... )
'{"verdict": "certified", "certificate": {"id": "x", "status": "active"}}'
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any

from affidavit.certificate import (
    Approvals,
    Assessment,
    SigningPort,
    issue,
    issue_approved,
    statement_in,
)
from affidavit.certificate.policy import AS_PROVED, PolicyEvaluation
from affidavit.service.certificate_store import StoredCertificate
from affidavit.service.genuine import signed_columns
from affidavit.service.lifecycle.status import Status
from affidavit.service.teams import DEFAULT, in_id


def sign(
    assessment: Assessment,
    key: SigningPort,
    *,
    requester: str,
    issued_at: datetime,
    former: StoredCertificate | None,
    under: PolicyEvaluation = AS_PROVED,
    ledger: Mapping[str, Any] | None = None,
    team: str = DEFAULT,
) -> StoredCertificate:
    """Sign the assessment of a plan as the issue after ``former``, or as the first.

    ``under`` is what ``judge`` returned together with ``assessment``; ``ledger`` is the
    position of the data set's budget, ``team`` whose certificate it is.
    """
    certificate = issue(
        assessment,
        key,
        requester=requester,
        issued_at=issued_at,
        under=under,
        former=former,
        ledger=ledger,
        team=in_id(team),
    )
    result, predicate = certificate.as_result(assessment), certificate.statement["predicate"]
    approved = Approvals.of(predicate).complete
    return StoredCertificate(
        **signed_columns(predicate),
        status=Status.ACTIVE if approved else Status.AWAITING_APPROVAL,
        epsilon_upper=(result["epsilon"] or {}).get("upper"),
        delta=(result["delta"] or {}).get("upper"),
        created_at=issued_at,
        envelope_digest=certificate.envelope_digest,
        key_id=key.key_id,
        bundle=certificate.bundle,
        result=json.dumps(result, allow_nan=False),
        team=team,
    )


def sign_approved(
    pending: StoredCertificate, approvals: Approvals, key: SigningPort, at: datetime
) -> StoredCertificate:
    """Sign ``pending`` with its ``approvals`` as the next issue."""
    certificate = issue_approved(
        statement_of(pending), key, approvals=approvals, issued_at=at, former=pending
    )
    document = json.loads(pending.result)
    document["certificate"] = {"id": certificate.id, "bundle": json.loads(certificate.bundle)}
    return replace(
        pending,
        **signed_columns(certificate.statement["predicate"]),
        status=Status.ACTIVE,
        created_at=at,
        envelope_digest=certificate.envelope_digest,
        key_id=key.key_id,
        bundle=certificate.bundle,
        result=json.dumps(document, allow_nan=False),
    )


def statement_of(certificate: StoredCertificate) -> dict[str, Any]:
    """The statement that a stored certificate carries in its signed bytes."""
    return statement_in(certificate.bundle)


def result_document(certificate: StoredCertificate) -> str:
    """The result document of an issue, with its number, its digest and its status."""
    return append_to_certificate(
        certificate.result,
        {
            "issue": certificate.issue,
            "envelope_digest": certificate.envelope_digest,
            "status": certificate.status.value,
        },
    )


def append_to_certificate(result: str, more: Mapping[str, Any]) -> str:
    """``result``, whose last field is ``certificate``, with ``more`` at the end of that.

    Raises ``ValueError`` where another field is last.
    """
    if not result.endswith("}}"):
        raise ValueError("this is not a result that ends with its certificate")
    return f"{result[:-2]}, {json.dumps(dict(more))[1:]}}}"
