"""Sign an assessment as a certificate and write its bundle.

A bundle is one JSON document: the DSSE envelope and the name of its format. It is written once and
stored as bytes. Everything in it is either signed or compared with the signed part, so that every
changed byte is detected.

A certificate may be issued more than once: when it has expired, when its key was revoked, or when
approvals were added. Each issue has its number and the digest of the envelope that it supersedes,
so that the issues of an id form a chain.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol

from affidavit.certificate.assessment import Assessment
from affidavit.certificate.dsse import sign_envelope
from affidavit.certificate.keys.key import SigningPort, format_instant, now_in_seconds
from affidavit.certificate.policy.document import BUILT_IN, Policy
from affidavit.certificate.policy.evaluation import BUILT_IN_EVALUATION, Approvals, PolicyEvaluation
from affidavit.certificate.policy.waiver import Waiver
from affidavit.certificate.statement import address, statement
from affidavit.plan import Plan, canonical_json, digest

BUNDLE_TYPE = "application/vnd.affidavit.bundle.v1+json"

UNTRUSTED = {
    "code": "untrusted",
    "message": "UNTRUSTED: signed with a development key that nobody vouches for. Create a key "
    "with `affidavit keys new` and POST the plan again.",
}


class PreviousIssue(Protocol):
    """The superseded issue: its number, counted from 1, and the digest of its envelope."""

    @property
    def issue(self) -> int: ...  # noqa: D102

    @property
    def envelope_digest(self) -> str: ...  # noqa: D102


@dataclass(frozen=True, kw_only=True, slots=True)
class Certificate:
    """A signed statement; ``bundle`` is the exact bytes to store and to distribute."""

    id: str
    statement: dict[str, Any]
    bundle: bytes
    untrusted: bool
    envelope_digest: str

    def as_result(self, assessment: Assessment) -> dict[str, Any]:
        """Return the result document of ``assessment`` with its certificate."""
        predicate = self.statement["predicate"]
        result = assessment.as_result() | {key: predicate[key] for key in ("policy", "waived")}
        if self.untrusted:
            result["warnings"] = [*result["warnings"], UNTRUSTED]
        return {**result, "certificate": {"id": self.id, "bundle": json.loads(self.bundle)}}


def certificate_id(
    plan: Plan, policy: Policy = BUILT_IN, waivers: Iterable[Waiver] = (), team: str | None = None
) -> str:
    """Return the id of the certificate of ``plan`` under ``policy``.

    ``waivers`` are those in force for the plan and the requester, ``team`` a team of the service.
    """
    return address(digest(plan), policy, (waiver.id for waiver in waivers), team)


def issue(
    assessment: Assessment,
    key: SigningPort,
    *,
    requester: str,
    issued_at: datetime,
    evaluation: PolicyEvaluation = BUILT_IN_EVALUATION,
    previous: PreviousIssue | None = None,
    ledger: Mapping[str, Any] | None = None,
    team: str | None = None,
) -> Certificate:
    """Sign the assessment of a plan; a development key makes it ``untrusted``.

    ``evaluation`` is what ``judge`` returned with ``assessment``. A verdict other than
    ``certified`` needs no approval, because such a certificate allows nothing. ``ledger`` is the
    current state of the data set's budget, if it has one. ``team`` is part of the id.
    """
    document = statement(
        assessment,
        requester=requester,
        issued_at=issued_at,
        untrusted=key.public.development,
        approvals=Approvals(
            evaluation.policy.approvals if assessment.verdict == "certified" else 0
        ),
        evaluation=evaluation,
        team=team,
    )
    document["predicate"]["ledger"] = None if ledger is None else dict(ledger)
    if assessment.proof is not None:
        document["predicate"]["proof"] = assessment.proof
    return _sign(document, key, previous)


def issue_here(
    assessment: Assessment,
    key: SigningPort,
    evaluation: PolicyEvaluation = BUILT_IN_EVALUATION,
    requester: str | None = None,
) -> Certificate:
    """Sign the assessment of a plan now, for ``requester`` or the user of this machine."""
    user = requester or f"{os.environ.get('USER') or os.environ.get('LOGNAME') or 'unknown'}@local"
    return issue(assessment, key, requester=user, issued_at=now_in_seconds(), evaluation=evaluation)


def issue_approved(
    pending: Mapping[str, Any],
    key: SigningPort,
    *,
    approvals: Approvals,
    issued_at: datetime,
    previous: PreviousIssue,
) -> Certificate:
    """Sign the statement ``pending`` again with its approvals, as the issue after ``previous``.

    The end of its validity stays the same.
    """
    predicate = pending["predicate"]
    changes = {
        "approvals": approvals.as_document(),
        "validity": {**predicate["validity"], "not_before": format_instant(issued_at)},
        "untrusted": key.public.development,
    }
    return _sign({**pending, "predicate": {**predicate, **changes}}, key, previous)


def _sign(
    document: dict[str, Any], key: SigningPort, previous: PreviousIssue | None
) -> Certificate:
    """Sign ``document`` as the issue after ``previous``, or as the first one.

    A certificate is valid no longer than the window of a key that is for certificates.
    """
    chain = {
        "issue": 1 if previous is None else previous.issue + 1,
        "supersedes": None if previous is None else previous.envelope_digest,
    }
    predicate = document["predicate"]
    validity = dict(predicate["validity"])
    if key.public.roles is not None:
        validity["not_after"] = min(validity["not_after"], format_instant(key.public.not_after))
    document = {**document, "predicate": {**predicate, "validity": validity, **chain}}
    envelope = sign_envelope(canonical_json(document), key)
    return Certificate(
        id=document["predicate"]["certificate_id"],
        statement=document,
        bundle=canonical_json({"bundleType": BUNDLE_TYPE, "envelope": envelope.as_document()}),
        untrusted=key.public.development,
        envelope_digest=envelope.digest,
    )
