"""Issuing: an assessment becomes a signed certificate, and a bundle that travels.

A bundle is one JSON document: the DSSE envelope and the name of its format. It is written
once and kept as bytes. Everything in it is either signed or checked against what is
signed, so that no byte of it can change unnoticed.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from affidavit.certificate.assessment import Assessment
from affidavit.certificate.envelope import seal
from affidavit.certificate.keys import SigningPort
from affidavit.certificate.statement import address, statement
from affidavit.plan.canonical import canonical_json, digest
from affidavit.plan.model import Plan

BUNDLE_TYPE = "application/vnd.affidavit.bundle.v1+json"

UNTRUSTED = {
    "code": "untrusted",
    "message": "UNTRUSTED: signed with a development key that nobody vouches for. Create a key "
    "with `affidavit keys new` and POST the plan again.",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Certificate:
    """A signed statement; ``bundle`` is the exact bytes to keep and to hand out."""

    id: str
    statement: dict[str, Any]
    bundle: bytes
    untrusted: bool

    def as_result(self, assessment: Assessment) -> dict[str, Any]:
        """The result document of ``assessment`` with its certificate."""
        result = assessment.as_result()
        if self.untrusted:
            result["warnings"] = [*result["warnings"], UNTRUSTED]
        return {
            **result,
            "certificate": {"id": self.id, "bundle": json.loads(self.bundle)},
        }


def certificate_id(plan: Plan) -> str:
    """The id that a certificate of ``plan`` has, or will have."""
    return address(digest(plan))


def issue(
    assessment: Assessment,
    key: SigningPort,
    *,
    requester: str,
    issued_at: datetime,
) -> Certificate:
    """Sign what was found about a plan; a development key makes it ``untrusted``."""
    untrusted = key.public.development
    said = statement(assessment, requester=requester, issued_at=issued_at, untrusted=untrusted)
    envelope = seal(canonical_json(said), key)
    bundle = canonical_json({"bundleType": BUNDLE_TYPE, "envelope": envelope.as_document()})
    return Certificate(
        id=address(assessment.plan_digest),
        statement=said,
        bundle=bundle,
        untrusted=untrusted,
    )
