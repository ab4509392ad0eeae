"""Issuing: turn an assessment into a signed certificate and its bundle.

A bundle is one JSON document: the DSSE envelope and the name of its format. It is written
once and kept as bytes. Everything in it is either signed or checked against what is
signed, so that no byte of it can change unnoticed.

One certificate id may be issued more than once: when it has expired, when its key was
revoked, when approvals were added. Each issue carries its number and the digest of the
envelope that it supersedes, so that the issues of an id form a chain.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Protocol

from affidavit.certificate.assessment import Assessment
from affidavit.certificate.dsse import sign_envelope
from affidavit.certificate.keys.key import SigningPort, format_instant
from affidavit.certificate.policy.document import BUILT_IN, Policy
from affidavit.certificate.policy.evaluation import AS_PROVED, Approvals, PolicyEvaluation
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
    """The issue that is superseded: its number and its envelope's digest."""

    @property
    def issue(self) -> int:
        """Its number, counted from 1."""
        ...

    @property
    def envelope_digest(self) -> str:
        """``sha256:`` and the digest of its signed envelope."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Certificate:
    """A signed statement; ``bundle`` is the exact bytes to keep and to hand out."""

    id: str
    statement: dict[str, Any]
    bundle: bytes
    untrusted: bool
    envelope_digest: str

    def as_result(self, assessment: Assessment) -> dict[str, Any]:
        """The result document of ``assessment`` with its certificate."""
        predicate = self.statement["predicate"]
        result = assessment.as_result() | {key: predicate[key] for key in ("policy", "waived")}
        if self.untrusted:
            result["warnings"] = [*result["warnings"], UNTRUSTED]
        return {**result, "certificate": {"id": self.id, "bundle": json.loads(self.bundle)}}


def certificate_id(
    plan: Plan, policy: Policy = BUILT_IN, waivers: Iterable[Waiver] = (), team: str | None = None
) -> str:
    """The id that a certificate of ``plan`` has, or will have, under ``policy``.

    ``waivers`` are those in force for the plan and whoever asks, ``team`` that of a service.
    """
    return address(digest(plan), policy, (waiver.id for waiver in waivers), team)


def issue(
    assessment: Assessment,
    key: SigningPort,
    *,
    requester: str,
    issued_at: datetime,
    under: PolicyEvaluation = AS_PROVED,
    former: PreviousIssue | None = None,
    ledger: Mapping[str, Any] | None = None,
    team: str | None = None,
) -> Certificate:
    """Sign the assessment of a plan; a development key makes it ``untrusted``.

    ``under`` is what ``judge`` returned together with ``assessment``. A verdict other than
    ``certified`` needs no approval: there is nothing in it to use. ``ledger`` is where the
    data set's budget stands as this is issued, where there is one. ``team`` is part of the id.
    """
    document = statement(
        assessment,
        requester=requester,
        issued_at=issued_at,
        untrusted=key.public.development,
        approvals=Approvals(under.policy.approvals if assessment.verdict == "certified" else 0),
        under=under,
        team=team,
    )
    document["predicate"]["ledger"] = None if ledger is None else dict(ledger)
    if assessment.proof is not None:
        document["predicate"]["proof"] = assessment.proof
    return _sign(document, key, former)


def issue_here(
    assessment: Assessment,
    key: SigningPort,
    under: PolicyEvaluation = AS_PROVED,
    requester: str | None = None,
) -> Certificate:
    """Sign now, for ``requester`` or the user of this machine."""
    user = requester or f"{os.environ.get('USER') or os.environ.get('LOGNAME') or 'unknown'}@local"
    now = datetime.now(UTC).replace(microsecond=0)
    return issue(assessment, key, requester=user, issued_at=now, under=under)


def issue_approved(
    pending: Mapping[str, Any],
    key: SigningPort,
    *,
    approvals: Approvals,
    issued_at: datetime,
    former: PreviousIssue,
) -> Certificate:
    """Sign the statement ``pending`` again, with its approvals and as the issue after ``former``.

    It ends when the one that was approved would have ended.
    """
    predicate = pending["predicate"]
    changes = {
        "approvals": approvals.as_document(),
        "validity": {**predicate["validity"], "not_before": format_instant(issued_at)},
        "untrusted": key.public.development,
    }
    return _sign({**pending, "predicate": {**predicate, **changes}}, key, former)


def _sign(document: dict[str, Any], key: SigningPort, former: PreviousIssue | None) -> Certificate:
    """Sign ``document`` as the issue after ``former``, or as the first one."""
    place = {
        "issue": 1 if former is None else former.issue + 1,
        "supersedes": None if former is None else former.envelope_digest,
    }
    predicate = document["predicate"]
    validity = {**predicate["validity"], **_end(predicate["validity"], key)}
    document = {**document, "predicate": {**predicate, "validity": validity, **place}}
    envelope = sign_envelope(canonical_json(document), key)
    return Certificate(
        id=document["predicate"]["certificate_id"],
        statement=document,
        bundle=canonical_json({"bundleType": BUNDLE_TYPE, "envelope": envelope.as_document()}),
        untrusted=key.public.development,
        envelope_digest=envelope.digest,
    )


def _end(validity: Mapping[str, str], key: SigningPort) -> dict[str, str]:
    """The end of the validity: that of the window of a key for certificates, where it is nearer."""
    if key.public.roles is None:
        return {}
    return {"not_after": min(validity["not_after"], format_instant(key.public.not_after))}
