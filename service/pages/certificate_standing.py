"""Where a certificate stands, in words: its issues, who decided what, and what was waived.

What is said here changes after a certificate was signed, except for waivers, which are signed
with it and shown beside the rest because somebody answers for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from affidavit.service.lifecycle.standing import Status
from affidavit.service.store import StoredCertificate


@dataclass(frozen=True, kw_only=True, slots=True)
class WaivedShown:
    """A rule of the policy that this certificate breaks by somebody's leave."""

    code: str
    message: str
    waiver: str
    reason: str
    owner: str
    granted_by: str
    expires: str


@dataclass(frozen=True, kw_only=True, slots=True)
class IssueShown:
    """One issue of this certificate with what was decided about it."""

    issue: int
    untrusted: bool
    status: str
    verdict: str
    envelope_digest: str
    key_id: str
    created_at: str
    not_after: str
    required: int
    decisions: tuple[dict[str, Any], ...]
    revocation: dict[str, Any] | None

    @property
    def rejection(self) -> dict[str, Any] | None:
        """The decision that rejected it."""
        return next(
            (decision for decision in self.decisions if decision["decision"] == "reject"), None
        )


def standing(found: StoredCertificate, issues: tuple[IssueShown, ...]) -> str | None:
    """Why the certificate may not be used at present, and what to do; None where it may."""
    match found.status:
        case Status.AWAITING_APPROVAL:
            given, required = found.approvals_given, found.approvals_required
            return f"{given} of {required} approvals were given; until then nobody may train by it."
        case Status.EXPIRED:
            return f"It ended on {found.not_after:%Y-%m-%d}; send the plan again for a new issue."
        case Status.KEY_REVOKED:
            return "The key that signed it was revoked; send the plan again for a new issue."
        case Status.SUPERSEDED:
            return "A later issue stands in its place."
        case Status.REVOKED:
            return _because(issues, "revocation", "Revoked by {revoked_by}: {reason} ({code}).")
        case Status.REJECTED:
            return _because(issues, "rejection", "Rejected by {approver}: {comment}")
        case Status.ACTIVE:
            return None


def _because(issues: tuple[IssueShown, ...], what: str, words: str) -> str:
    for issue in issues:
        said = issue.revocation if what == "revocation" else issue.rejection
        if said is not None:
            return words.format(**{"comment": "no reason was given", **said})
    return words.split(" by ", maxsplit=1)[0] + "."


def waived_shown(said: Mapping[str, Any]) -> WaivedShown:
    """A waived reason of a statement."""
    waiver = said["waiver"]
    return WaivedShown(
        code=said["code"],
        message=said["message"],
        waiver=waiver["id"],
        **{name: waiver[name] for name in ("reason", "owner", "granted_by", "expires")},
    )


def issue_shown(said: Mapping[str, Any]) -> IssueShown:
    """An issue as the history of a certificate has it."""
    same = {name: said[name] for name in IssueShown.__dataclass_fields__ if name in said}
    approvals = said["approvals"]
    return IssueShown(
        **same, required=approvals["required"], decisions=tuple(approvals["decisions"])
    )
