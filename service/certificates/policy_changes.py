"""Change and try out policies: activate a version, grant and revoke waivers, simulate a draft.

An active policy applies to every plan of its data sets as soon as it is stored. Versions of a
policy count up from 1 without gaps, so that two people cannot overwrite each other's changes. One
policy at most covers a data set. Certificates keep the version that they were evaluated by. The
policy is part of the request, so a plan that is sent again gets a new certificate.

Waivers take four eyes: the granter is neither the owner nor a requester of the plan. A waiver never
applies to a plan that its granter submits, which is checked whenever a plan is evaluated. Revoking
a waiver revokes the certificates that rely on it in the same transaction.

A simulation evaluates the stored certificates by a draft policy. It accounts nothing and stores
nothing. It ignores waivers, because each is granted for one version of a policy.

>>> WaiverRequest.from_data({"rule": "under_noised", "policy": "nlg"})
Traceback (most recent call last):
affidavit.service.core.errors.MalformedRequest: invalid_value at /rule: ...
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any, Literal, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError
from sqlalchemy import Connection, insert

from affidavit.certificate.policy import (
    BUILT_IN,
    Explanation,
    Person,
    Policy,
    PolicyFacts,
    WaivableRule,
    Waiver,
    violations,
)
from affidavit.client import (
    Page,
    PolicyDocument,
    PolicyReference,
    PolicyVersion,
    ResponseModel,
)
from affidavit.plan import Name, Reason
from affidavit.service.certificates.decisions import insert_revocation
from affidavit.service.certificates.issue_status import DECIDED
from affidavit.service.certificates.store import (
    CertificateStore,
    StoredCertificate,
    current,
    has_requested,
)
from affidavit.service.core.database import hold
from affidavit.service.core.errors import DomainError, OtherTeam
from affidavit.service.core.problems import Problem
from affidavit.service.core.teams import TeamName, may_see
from affidavit.service.core.wire_models import (
    Digest,
    ProblemReason,
    RequestModel,
    Status,
    Verdict,
)
from affidavit.service.identity.actor import Approve, CommandContext, approve_alone
from affidavit.service.log.entries import append
from affidavit.service.policies.policy_set import PolicyConflict, PolicySet
from affidavit.service.policies.store import (
    PolicyStore,
    StoredPolicy,
    StoredWaiver,
    certificates_with_waiver,
    insert_policy,
    insert_waiver,
    lock_policies,
)
from affidavit.service.tables.policies import waiver_revocations
from affidavit.trust import (
    Instant,
    SigningPort,
    format_instant,
    parse_instant,
    statement_in,
)

WaiverStatus = Literal["in_force", "expired", "revoked"]


def version_of(stored: StoredPolicy, policies: PolicySet) -> PolicyVersion:
    """Return ``stored`` as the API and the pages show it."""
    document = stored.policy.as_document()
    return PolicyVersion(
        **stored.policy.reference(),
        datasets=document["datasets"],
        active=policies.is_active(stored.policy),
        created_by=stored.created_by,
        created_at=stored.created_at,
        policy=PolicyDocument(document),
        envelope=None if stored.envelope is None else json.loads(stored.envelope),
    )


class WaiverRequest(RequestModel):
    """A waiver to grant; the granter and the time follow from the request."""

    noun = "a waiver"
    error_code = "malformed_waiver"

    rule: WaivableRule
    policy: Name
    plan_digest: Digest | None = None
    dataset: Name | None = None
    owner: Person
    reason: Explanation
    expires_at: Instant
    team: TeamName | None = None

    @model_validator(mode="after")
    def _has_one_scope(self) -> Self:
        if (self.plan_digest is None) == (self.dataset is None):
            raise PydanticCustomError("scope", "give either plan_digest or dataset")
        return self

    @property
    def expires(self) -> datetime:
        """The time at which the waiver expires."""
        return parse_instant(self.expires_at)


class WaiverRevocation(ResponseModel):
    """Who revoked a waiver, when and why."""

    by: str
    at: datetime
    reason: str


class WaiverView(ResponseModel):
    """A waiver with its status, its signed envelope and its revocation."""

    id: Digest
    status: WaiverStatus
    waiver: dict[str, Any]
    revoked: WaiverRevocation | None
    envelope: dict[str, Any]

    @classmethod
    def of(cls, stored: StoredWaiver, now: datetime) -> Self:
        """Build the response for ``stored`` at ``now``."""
        revoked = None
        if stored.revoked_at is not None:
            revoked = {
                "by": stored.revoked_by,
                "at": stored.revoked_at,
                "reason": stored.revocation_reason,
            }
        return cls.model_validate(
            {
                "id": stored.waiver.id,
                "status": stored.status_at(now),
                "waiver": stored.waiver.as_document(),
                "revoked": revoked,
                "envelope": json.loads(stored.envelope),
            }
        )


class VerdictChange(ResponseModel):
    """A certificate whose verdict a draft policy would change, with the reasons."""

    certificate_id: Digest
    plan_digest: Digest
    name: str | None
    dataset: str | None
    verdict: Verdict
    would_be: Verdict
    reasons: list[ProblemReason]


class SimulationResult(Page[VerdictChange]):
    """What a draft would change on one page of certificates; ``next`` takes the same body."""

    policy: PolicyReference
    judged: int = Field(
        ge=0, description="Certificates of this page that would come under the policy."
    )


# ---- use cases -----------------------------------------------------------------------

MAX_VALIDITY = timedelta(days=366)
"""Maximum validity of a waiver."""


# ---- Activate a policy ------------------------------------------------------------------


def activate(
    store: PolicyStore,
    policy: Policy,
    key: SigningPort,
    context: CommandContext,
    approve: Approve = approve_alone,
) -> tuple[StoredPolicy, bool]:
    """Activate a version of a policy; return it, and whether this call activated it.

    An active version is returned unchanged. Raises ``PolicyConflict`` and ``PolicyTampered``.
    """
    with store.writing() as connection:
        lock_policies(connection)
        policies = store.policy_set_in(connection)
        last = policies.policies.get(policy.name)
        if last == policy:
            stored = store.version(policy.name, policy.version)
            assert stored is not None
            return stored, False
        _require_next_version(policy, last)
        policies.with_policy(policy)
        approve(connection)
        return insert_policy(connection, policy, key, context), True


def _require_next_version(policy: Policy, last: Policy | None) -> None:
    if policy.name == BUILT_IN.name:
        raise PolicyConflict(
            f"{BUILT_IN.name} is the name of the built-in policy.",
            "Choose another name; datasets: default makes it the default.",
            code="policy_name_reserved",
            pointer="/name",
        )
    version = 1 if last is None else last.version + 1
    if policy.version != version:
        raise PolicyConflict(
            f"The next version of {policy.name} is {version}, not {policy.version}.",
            f"Review the active version, and send your changes as version {version}.",
            code="policy_version",
            pointer="/version",
        )


# ---- Grant and revoke waivers -----------------------------------------------------------


class FourEyesRequired(DomainError):
    """The granter owns the waiver or requested the plan; another approver must grant it."""

    code = "four_eyes"
    status = 403


def grant(
    store: PolicyStore,
    request: WaiverRequest,
    key: SigningPort,
    context: CommandContext,
    team: str,
    approve: Approve = approve_alone,
) -> StoredWaiver:
    """Grant a waiver to ``team``.

    The same request by the same granter in the same second is the same waiver. Raises
    ``PolicyConflict``, ``FourEyesRequired``, ``OtherTeam``, ``PolicyTampered``.
    """
    context = replace(context, at=context.at.replace(microsecond=0))
    with store.writing() as connection:
        lock_policies(connection)
        waiver = _check_request(store, connection, request, context)
        if (granted := store.waiver_in(connection, waiver.id)) is not None:
            if granted.team != team:
                raise PolicyConflict(
                    f"You granted this waiver to the team {granted.team} within the same second.",
                    "Send the request again.",
                    code="granted_to_another_team",
                )
            return granted
        approve(connection)
        return insert_waiver(connection, waiver, team, key, context.at)


def _check_request(
    store: PolicyStore, connection: Connection, request: WaiverRequest, context: CommandContext
) -> Waiver:
    if request.team is not None and not may_see(request.team):
        raise OtherTeam(f"You are not in the team {request.team}.", "Omit `team`.")
    policy = store.policy_set_in(connection).policies.get(request.policy)
    waiver = _waiver(request, policy, context)
    _require_four_eyes(connection, waiver)
    return waiver


def revoke(
    store: PolicyStore, waiver_id: str, reason: str, context: CommandContext
) -> StoredWaiver:
    """Revoke a waiver with the certificates that rely on it.

    A revoked waiver is returned unchanged. Raises ``Problem`` for an unknown waiver.
    """
    with store.writing() as connection:
        lock_policies(connection)
        stored = store.waiver_in(connection, waiver_id)
        if stored is None:
            raise no_such_waiver(waiver_id)
        if stored.revoked_at is not None:
            return stored
        connection.execute(
            insert(waiver_revocations).values(
                waiver_id=waiver_id, reason=reason, revoked_by=context.actor, at=context.at
            )
        )
        certificate_ids = certificates_with_waiver(connection, waiver_id)
        body = {"event": "revoked", "reason": reason, "certificates": certificate_ids}
        append(connection, "waiver", waiver_id, body, actor=context.actor, at=context.at)
        for certificate_id in certificate_ids:
            cause = f"the waiver {waiver_id} was revoked: {reason}"
            _revoke_certificate(connection, certificate_id, cause, context)
        return replace(
            stored, revoked_by=context.actor, revoked_at=context.at, revocation_reason=reason
        )


def no_such_waiver(waiver_id: str) -> Problem:
    """Build the problem of an unknown waiver."""
    message = f"Waiver {waiver_id} not found; GET /v1/waivers lists all waivers."
    return Problem(404, "not_found", message)


def _waiver(request: WaiverRequest, policy: Policy | None, context: CommandContext) -> Waiver:
    if policy is None:
        raise PolicyConflict(
            f"There is no active policy {request.policy}.",
            "GET /v1/policies lists them; the built-in policy has nothing to waive.",
            code="no_policy",
            pointer="/policy",
        )
    if request.dataset is not None and not policy.covers(request.dataset):
        raise PolicyConflict(
            f"The policy {policy.name} does not cover the data set {request.dataset}.",
            "Name the policy that covers its plans.",
            code="other_policy",
            pointer="/dataset",
        )
    expires = request.expires
    if not context.at < expires <= context.at + MAX_VALIDITY:
        raise PolicyConflict(
            f"A waiver must expire within {MAX_VALIDITY.days} days from now, not at "
            f"{format_instant(expires)}.",
            "Choose an earlier time in the future.",
            code="waiver_expiry",
            pointer="/expires_at",
        )
    return Waiver(
        rule=request.rule,
        policy=policy.digest(),
        plan_digest=request.plan_digest,
        dataset=request.dataset,
        owner=request.owner,
        reason=request.reason,
        created_by=context.actor,
        created_at=format_instant(context.at),
        expires_at=format_instant(expires),
    )


def _require_four_eyes(connection: Connection, waiver: Waiver) -> None:
    granter = waiver.created_by
    if waiver.owner in (granter, granter.partition(":")[2]):
        raise FourEyesRequired(
            "The owner of a waiver cannot grant it.", "Ask another approver.", pointer="/owner"
        )
    if waiver.plan_digest is not None and has_requested(connection, granter, waiver.plan_digest):
        raise FourEyesRequired(
            "A requester of a plan cannot grant a waiver for it.",
            "Ask another approver.",
            pointer="/plan_digest",
        )


def _revoke_certificate(
    connection: Connection, certificate_id: str, reason: str, context: CommandContext
) -> None:
    """Revoke the valid current issues of a certificate, trusted and untrusted."""
    hold(connection, certificate_id)
    ended = DECIDED | {Status.EXPIRED, Status.KEY_REVOKED}
    for untrusted in (False, True):
        issue = current(connection, certificate_id, untrusted=untrusted)
        if issue is not None and issue.status not in ended:
            insert_revocation(connection, issue, "policy_violation", reason, context)


# ---- Simulate a draft -------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulatedChange:
    """A certificate whose verdict the draft would change to ``would_be``, with the reasons."""

    certificate: StoredCertificate
    would_be: str
    reasons: tuple[Reason, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Simulation:
    """The changes on one page, the number of evaluated certificates, and the next cursor."""

    judged: int
    changes: tuple[SimulatedChange, ...]
    next: str | None


def simulate(
    policies: PolicyStore,
    certificates: CertificateStore,
    draft: Policy,
    cursor: str | None,
    limit: int,
) -> Simulation:
    """Evaluate the page of certificates after ``cursor``, newest first, by ``draft``.

    Raises ``PolicyConflict`` if the draft could not be activated, ``InvalidCursor`` and
    ``PolicyTampered``.
    """
    draft_set = policies.policy_set().with_policy(draft)
    page, following = certificates.page(cursor, limit)
    judged = 0
    changes = []
    for row in page:
        if draft_set.policy_of(row.dataset) != draft:
            continue
        certificate = certificates.find(row.id)
        if certificate is None:
            continue
        judged += 1
        change = _judge(draft, certificate)
        if change.would_be != certificate.verdict:
            changes.append(change)
    return Simulation(judged=judged, changes=tuple(changes), next=following)


def _judge(draft: Policy, certificate: StoredCertificate) -> SimulatedChange:
    facts = PolicyFacts.from_predicate(statement_in(certificate.bundle)["predicate"], budget="fits")
    reasons = violations(draft, facts) if facts.verdict == "certified" else ()
    would_be = "refused" if reasons else facts.verdict
    return SimulatedChange(certificate=certificate, would_be=would_be, reasons=reasons)
