r"""Decisions about a certificate: approve, reject, revoke and reissue.

Approval takes four eyes. An approver names the digest of the envelope that they reviewed, so that
it cannot be replaced in between. A requester of the certificate cannot approve it, under any policy
or waiver, and nobody can approve twice; the database enforces both. With the last required
approval, the same transaction signs the statement again with all approvals in it. One rejection
ends the issue.

A revocation withdraws the current issue and every earlier one. It is a row, a log entry, and a line
in every status list until a day after the validity of the revoked issue. It cannot be undone. A
requester may revoke their own certificate, because revocation takes one person.

Sending the plan again never restores a revoked or rejected certificate, so that a retry in a
pipeline does not undo a person's decision. An approver can reissue it: the plan is accounted again
under the policies in force, and signed as the next issue. The approver then counts as a requester.

>>> DecisionRequest.from_data({"decision": "approve", "envelope": "sha256:1"})
Traceback (most recent call last):
affidavit.service.core.errors.MalformedRequest: invalid_value at /envelope: ...
"""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import datetime
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError
from sqlalchemy import Connection, Engine, Select, Table, select
from starlette.concurrency import run_in_threadpool

from affidavit.certificate import (
    Approval,
    Approvals,
    issue_approved,
)
from affidavit.client import ResponseModel, Revocation, RevocationCode
from affidavit.plan import as_document, canonical_json
from affidavit.service.certificates.certificate_curves import plan_of
from affidavit.service.certificates.integrity import NotGenuine, signed_columns
from affidavit.service.certificates.issue_status import (
    DECIDED,
    DECISIONS,
    approval_entry,
    revocation_entry,
)
from affidavit.service.certificates.store import (
    PlanRequest,
    StoredCertificate,
    current,
    get,
    has_requested,
    insert_issues,
    issues,
    no_such,
)
from affidavit.service.certificates.submit_plan import Submission, SubmitPlan
from affidavit.service.core.database import (
    hold,
    snapshot,
    write,
    writer,
)
from affidavit.service.core.errors import DomainError, LogDamaged
from affidavit.service.core.teams import acting_for
from affidavit.service.core.wire_models import (
    Comment,
    Digest,
    RequestModel,
    Status,
)
from affidavit.service.identity.actor import Actor, CommandContext
from affidavit.service.keys.keyring import Keyring
from affidavit.service.log.entries import insert_logged
from affidavit.service.log.entry_type import is_as_logged
from affidavit.service.policies.store import PolicyStore
from affidavit.service.tables.certificates import approvals, requests, revocations
from affidavit.trust import (
    KeyFailure,
    SigningPort,
    format_instant,
    parse_instant,
    statement_in,
)

DecisionKind = Literal["approve", "reject"]


class DecisionRequest(RequestModel):
    """An approval or a rejection of the envelope with this digest."""

    noun = "a decision"
    error_code = "malformed_decision"

    decision: DecisionKind = "approve"
    envelope: Digest = Field(description="The envelope_digest of the issue that was reviewed.")
    comment: Comment = Field("", description="Required to reject.")

    @model_validator(mode="after")
    def _rejection_has_a_comment(self) -> Self:
        if self.decision == "reject" and not self.comment.strip():
            raise PydanticCustomError("no_reason", "a rejection needs a comment that says why")
        return self


class RevocationRequest(RequestModel):
    """A revocation of the current issue; with ``envelope``, only if it is still current."""

    noun = "a revocation"
    error_code = "malformed_decision"

    code: RevocationCode
    reason: Annotated[Comment, Field(min_length=1)]
    envelope: Digest | None = Field(None, description="Revoke only if this is still current.")


class Decision(ResponseModel):
    """A decision about the issue with this envelope."""

    decision: DecisionKind
    approver: str
    at: datetime
    comment: str
    envelope_digest: Digest


class IssueApprovals(ResponseModel):
    """The approvals that an issue requires, and the decisions about it.

    An issue that was signed with its approvals has those; they name the envelope that was reviewed.
    """

    required: int
    decisions: list[Decision]


class Issue(ResponseModel):
    """An issue of a certificate with its status, decisions and revocation."""

    issue: int = Field(ge=1)
    untrusted: bool
    status: Status
    verdict: str
    envelope_digest: Digest
    key_id: str
    created_at: datetime
    not_after: datetime
    approvals: IssueApprovals
    revocation: Revocation | None


# ---- Approve or reject ---------------------------------------------------------------

REISSUABLE = DECIDED | {Status.EXPIRED, Status.KEY_REVOKED}


class DecisionRefused(DomainError):
    """The certificate's state does not allow the decision; ``code`` is part of the API."""


class DecisionForbidden(DecisionRefused):
    """The actor may not make the decision."""

    status = 403


# ---- Approve or reject ------------------------------------------------------------------


def approve(
    engine: Engine,
    keyring: Keyring,
    certificate_id: str,
    request: DecisionRequest,
    actor: Actor,
    at: datetime,
) -> tuple[StoredCertificate, bool]:
    """Decide about the current issue; return the issue afterwards, and whether it is a new one.

    Raises ``Problem`` for an unknown certificate, ``DecisionRefused``, and ``KeyFailure`` if no key
    can sign.
    """

    def work(connection: Connection) -> tuple[StoredCertificate, bool]:
        hold(connection, certificate_id)
        certificate = get(connection, certificate_id)
        _require_decidable(connection, certificate, request, actor)
        if request.decision == "approve":
            _require_signed_here(keyring, certificate)
        _insert_decision(connection, certificate, request, actor, at)
        issued = None
        if request.decision == "approve":
            issued = _issue(connection, keyring, certificate, at)
        latest = issued or current(connection, certificate_id) or certificate
        return latest, issued is not None

    return write(engine, work)


def _issue(
    connection: Connection, keyring: Keyring, pending: StoredCertificate, at: datetime
) -> StoredCertificate | None:
    """Sign and store the issue with its approvals, if none is missing."""
    required = Approvals.of(statement_in(pending.bundle)["predicate"]).required
    collected = Approvals(required, _approvals_of(connection, pending))
    if not collected.complete:
        return None
    require_logged_decisions(connection, pending.id)
    key = keyring.current()
    if key.public.development is not pending.untrusted:
        raise KeyFailure("a development key cannot sign a trusted certificate, nor the reverse.")
    issued = _sign_approved(pending, collected, key, at)
    insert_issues(connection, [(issued, pending)], key.public.as_record())
    return issued


def _sign_approved(
    pending: StoredCertificate, approvals: Approvals, key: SigningPort, at: datetime
) -> StoredCertificate:
    """Sign ``pending`` with its ``approvals`` as the next issue."""
    certificate = issue_approved(
        statement_in(pending.bundle), key, approvals=approvals, issued_at=at, previous=pending
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


def _require_signed_here(keyring: Keyring, pending: StoredCertificate) -> None:
    """Raise ``NotGenuine`` unless a key of this service signed the issue.

    Somebody may have inserted an issue with a key of their own, and the last approval would sign
    its statement under a trusted key.
    """
    # An untrusted issue proves nothing, with any signature.
    if not pending.untrusted and not keyring.signed(pending.bundle):
        raise NotGenuine(
            "No key of this service signed the issue as it is stored.",
            "Tell the operator, and have the certificate reissued.",
        )


def require_logged_decisions(connection: Connection, certificate_id: str) -> None:
    """Raise ``LogDamaged`` unless the stored decisions are the logged ones."""
    for entry_type in DECISIONS:
        if not is_as_logged(connection, entry_type, certificate_id):
            raise LogDamaged(f"the decisions about {certificate_id} are not the logged ones")


def _require_decidable(
    connection: Connection, certificate: StoredCertificate, request: DecisionRequest, actor: Actor
) -> None:
    if actor.is_anonymous:
        raise DecisionForbidden(
            "Anonymous callers cannot approve.", "Send a token.", code="anonymous_approver"
        )
    if request.envelope != certificate.envelope_digest:
        raise DecisionRefused(
            f"The current issue has the envelope {certificate.envelope_digest}, not the named one.",
            "Review the current issue, then decide about it.",
            code="other_envelope",
        )
    if certificate.status is not Status.AWAITING_APPROVAL:
        raise DecisionRefused(
            f"The certificate is {certificate.status.value}.",
            "Only certificates that await approval can be approved or rejected.",
            code="not_awaiting_approval",
        )
    if has_requested(connection, actor.name, certificate.plan_digest):
        raise DecisionForbidden(
            f"{actor.name} requested this plan.",
            "Ask another approver to decide.",
            code="own_request",
        )
    anonymous = select(requests.c.id).where(
        requests.c.certificate_id == certificate.id,
        requests.c.issue == certificate.issue,
        requests.c.requester.like("anonymous@%"),
    )
    if connection.execute(anonymous.limit(1)).first() is not None:
        raise DecisionRefused(
            "The issue was requested without a token, so four eyes cannot be guaranteed.",
            "Have it reissued by a person with a token.",
            code="anonymous_request",
        )
    if any(approval.name == actor.name for approval in _approvals_of(connection, certificate)):
        raise DecisionRefused(
            f"{actor.name} has already approved this issue.",
            "Ask another approver.",
            code="already_decided",
        )


def _insert_decision(
    connection: Connection,
    certificate: StoredCertificate,
    request: DecisionRequest,
    actor: Actor,
    at: datetime,
) -> None:
    decision = {"decision": request.decision, "approver": actor.name, "comment": request.comment}
    row = {**_row_of(certificate), **decision, "at": at}
    insert_logged(connection, approvals, row, approval_entry)


def _approvals_of(connection: Connection, pending: StoredCertificate) -> tuple[Approval, ...]:
    query = _rows_of(approvals, pending).where(approvals.c.decision == "approve")
    return tuple(
        Approval(row.approver, format_instant(row.at), row.comment, row.envelope_digest)
        for row in connection.execute(query.order_by(approvals.c.id))
    )


def _row_of(issue: StoredCertificate) -> dict[str, Any]:
    """Return the columns that name the issue of a decision."""
    return {
        "certificate_id": issue.id,
        "untrusted": issue.untrusted,
        "issue": issue.issue,
        "envelope_digest": issue.envelope_digest,
    }


def _rows_of(table: Table, issue: StoredCertificate) -> Select[tuple[object, ...]]:
    return select(table).where(
        table.c.certificate_id == issue.id,
        table.c.untrusted == issue.untrusted,
        table.c.issue == issue.issue,
    )


# ---- Revoke -----------------------------------------------------------------------------


def revoke(
    engine: Engine, certificate_id: str, request: RevocationRequest, actor: Actor, at: datetime
) -> tuple[Revocation, bool]:
    """Revoke the current issue; return the first revocation, and whether it is new.

    Raises ``Problem`` for an unknown certificate, and ``DecisionRefused``.
    """
    with writer(engine).begin() as connection:
        hold(connection, certificate_id)
        certificate = get(connection, certificate_id)
        if request.envelope not in (None, certificate.envelope_digest):
            raise DecisionRefused(
                f"The current issue has the envelope {certificate.envelope_digest}, "
                "not the named one.",
                "Omit envelope to revoke the current issue.",
                code="other_envelope",
            )
        new = certificate.status is not Status.REVOKED
        if new:
            context = CommandContext(actor=actor.name, at=at)
            insert_revocation(connection, certificate, request.code, request.reason, context)
        return _revocation_of(connection, certificate), new


def insert_revocation(
    connection: Connection,
    certificate: StoredCertificate,
    code: str,
    reason: str,
    context: CommandContext,
) -> None:
    """Revoke ``certificate``, a current issue that this transaction has locked."""
    row = {"code": code, "reason": reason, "revoked_by": context.actor, "at": context.at}
    insert_logged(connection, revocations, {**_row_of(certificate), **row}, revocation_entry)


def _revocation_of(connection: Connection, certificate: StoredCertificate) -> Revocation:
    """Return the first revocation that covers ``certificate``, which is revoked."""
    query = (
        select(revocations)
        .where(
            revocations.c.certificate_id == certificate.id,
            revocations.c.untrusted == certificate.untrusted,
            revocations.c.issue >= certificate.issue,
        )
        .order_by(revocations.c.issue)
    )
    return Revocation.model_validate(connection.execute(query).first())


# ---- Reissue, and list issues -----------------------------------------------------------


async def reissue(
    policies: PolicyStore,
    submit_plan: SubmitPlan,
    certificate: StoredCertificate,
    actor: Actor,
    at: datetime,
) -> Submission:
    """Reissue ``certificate``, which was revoked or rejected or has expired.

    Raises ``DecisionRefused`` and what ``SubmitPlan`` raises.
    """
    if not _is_reissuable(certificate):
        raise DecisionRefused(
            f"The certificate is {certificate.status.value}.",
            "Revoke it first.",
            code="still_valid",
        )
    plan, team = plan_of(certificate), certificate.team
    reissued = await run_in_threadpool(policies.certification_request, plan, actor.name, team)
    if reissued.id != certificate.id:
        raise DecisionRefused(
            f"Under the policies in force, this plan's certificate is {reissued.id}.",
            "Send the plan again.",
            code="rules_changed",
        )
    request = PlanRequest(
        requester=actor.name,
        received_at=at,
        content_type="application/json",
        body=canonical_json(as_document(plan)),
        team=team,
    )
    with acting_for(team):
        return await submit_plan.certify(reissued, request, _is_reissuable)


def _is_reissuable(certificate: StoredCertificate) -> bool:
    return certificate.status in REISSUABLE


def history(engine: Engine, certificate_id: str) -> list[Issue]:
    """Return every issue of a certificate, latest first, trusted before untrusted ones.

    Raises ``Problem`` for an unknown certificate, and ``LogDamaged`` for tampered decisions.
    """
    with snapshot(engine) as connection:
        stored = issues(connection, certificate_id)
        if not stored:
            raise no_such(certificate_id)
        require_logged_decisions(connection, certificate_id)
        return [_with_decisions(connection, issue) for issue in stored]


def _with_decisions(connection: Connection, issue: StoredCertificate) -> Issue:
    rows = connection.execute(_rows_of(approvals, issue).order_by(approvals.c.id))
    signed = [
        Decision(
            decision="approve",
            approver=approval.name,
            at=parse_instant(approval.at),
            comment=approval.comment,
            envelope_digest=approval.envelope,
        )
        for approval in Approvals.of(statement_in(issue.bundle)["predicate"]).given
    ]
    revoked = issue.status is Status.REVOKED
    facts = {name: getattr(issue, name) for name in Issue.model_fields if hasattr(issue, name)}
    return Issue(
        **facts,
        approvals=IssueApprovals(
            required=issue.approvals_required,
            decisions=[*signed, *map(Decision.model_validate, rows)],
        ),
        revocation=_revocation_of(connection, issue) if revoked else None,
    )
