"""What would break: a draft policy against the certificates that are there.

Every certificate of a data set that would come under the draft is judged anew by what it
says, without accounting anything again. Nothing is kept. Waivers are left aside, because
they are granted against one version of a policy and would not hold under the draft.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from affidavit.certificate.policy import Facts, Policy, violations
from affidavit.plan import Reason
from affidavit.service.lifecycle.issuing import statement_of
from affidavit.service.policies.store import PolicyStore
from affidavit.service.store import CertificateStore, Filters, StoredCertificate, list_certificates


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """A certificate whose verdict would be another, and why."""

    certificate: StoredCertificate
    verdict: str
    reasons: tuple[Reason, ...]

    def as_dict(self) -> dict[str, Any]:
        """The change as it is answered."""
        return {
            "certificate_id": self.certificate.id,
            "plan_digest": self.certificate.plan_digest,
            "name": self.certificate.name,
            "dataset": self.certificate.dataset,
            "verdict": self.certificate.verdict,
            "would_be": self.verdict,
            "reasons": [reason.as_dict() for reason in self.reasons],
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Simulated:
    """What changes on one page of certificates: how many were judged, and the next cursor."""

    judged: int
    changes: tuple[Change, ...]
    next: str | None


def simulate(
    policies: PolicyStore,
    certificates: CertificateStore,
    draft: Policy,
    cursor: str | None,
    limit: int,
) -> Simulated:
    """The page of certificates after ``cursor``, newest first, under ``draft``.

    Raises ``Overlap`` if the draft could not be activated, ``InvalidCursor``, ``Altered``.
    """
    rulebook = policies.rulebook().with_policy(draft)
    page = list_certificates(certificates, Filters(), cursor, limit)
    judged = 0
    changes = []
    for row in page.items:
        if rulebook.policy_of(row.dataset) != draft:
            continue
        certificate = certificates.find(row.id)
        if certificate is None:
            continue
        judged += 1
        change = _under(draft, certificate)
        if change.verdict != certificate.verdict:
            changes.append(change)
    return Simulated(judged=judged, changes=tuple(changes), next=page.next)


def _under(draft: Policy, certificate: StoredCertificate) -> Change:
    facts = Facts.said_in(statement_of(certificate)["predicate"], budget="fits")
    reasons = violations(draft, facts) if facts.verdict == "certified" else ()
    verdict = "refused" if reasons else facts.verdict
    return Change(certificate=certificate, verdict=verdict, reasons=reasons)
