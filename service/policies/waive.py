"""Grant a waiver and revoke one.

Four eyes: whoever grants a waiver is neither its owner nor one of those who asked for the
plan that it is for, and a waiver never helps with a plan that its granter submits (that is
checked whenever a plan is judged, because a plan may be submitted later). A revoked waiver
takes the certificates that rest on it along: they are revoked in the same transaction.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta

from sqlalchemy import Connection, insert

from affidavit.certificate import SigningPort
from affidavit.certificate.policy import Policy, Waiver, written
from affidavit.service.lifecycle.revoke import withdraw
from affidavit.service.lifecycle.standing import DECIDED, Status
from affidavit.service.log.entries import append
from affidavit.service.policies.activate import Unacceptable
from affidavit.service.policies.policy_tables import waiver_revocations
from affidavit.service.policies.store import (
    KeptWaiver,
    PolicyStore,
    certificates_by,
    change,
    keep_waiver,
)
from affidavit.service.policies.wanted import WantedWaiver
from affidavit.service.store import current, has_asked, hold

LONGEST = timedelta(days=366)


class NotYours(Exception):
    """The granter is the owner, or asked for the plan; another approver must grant it."""


def grant(
    store: PolicyStore, wanted: WantedWaiver, key: SigningPort, *, actor: str, at: datetime
) -> KeptWaiver:
    """The waiver as it is kept; raises ``Unacceptable``, ``NotYours`` and ``Altered``."""
    now = at.replace(microsecond=0)
    with store.writer.begin() as connection:
        change(connection)
        policy = store.rulebook_in(connection).policies.get(wanted.policy)
        waiver = _waiver(wanted, policy, actor, now)
        _require_another(connection, waiver)
        kept = keep_waiver(connection, waiver, key, now)
        body = {"event": "granted", "key_id": key.key_id, "waiver": waiver.as_document()}
        append(connection, "waiver", waiver.id, body, actor=actor, at=now)
        return kept


def revoke(
    store: PolicyStore,
    waiver_id: str,
    reason: str,
    *,
    actor: str,
    at: datetime,
) -> KeptWaiver | None:
    """The waiver, now revoked, with the certificates that rest on it; None if there is none.

    One that was revoked before is answered as it is.
    """
    with store.writer.begin() as connection:
        change(connection)
        kept = store.waiver_in(connection, waiver_id)
        if kept is None or kept.revoked_at is not None:
            return kept
        connection.execute(
            insert(waiver_revocations).values(
                waiver_id=waiver_id, reason=reason, revoked_by=actor, at=at
            )
        )
        resting = certificates_by(connection, waiver_id)
        body = {"event": "revoked", "reason": reason, "certificates": resting}
        append(connection, "waiver", waiver_id, body, actor=actor, at=at)
        for certificate_id in resting:
            because = f"the waiver {waiver_id} was revoked: {reason}"
            _withdraw(connection, certificate_id, because, actor, at)
        return replace(kept, revoked_by=actor, revoked_at=at, revoked_because=reason)


def _waiver(wanted: WantedWaiver, policy: Policy | None, actor: str, now: datetime) -> Waiver:
    if policy is None:
        raise Unacceptable(
            "no_policy",
            "/policy",
            f"there is no active policy {wanted.policy}.",
            "GET /v1/policies lists them; the built-in policy has nothing to waive.",
        )
    if wanted.dataset is not None and not policy.covers(wanted.dataset):
        raise Unacceptable(
            "other_policy",
            "/dataset",
            f"the policy {policy.name} is not for the data set {wanted.dataset}.",
            "Name the policy that its plans come under.",
        )
    ends = wanted.expires
    if not now < ends <= now + LONGEST:
        raise Unacceptable(
            "waiver_expiry",
            "/expires_at",
            f"a waiver ends within {LONGEST.days} days from now, not at {written(ends)}.",
            "Choose a time in the next months.",
        )
    return Waiver(
        rule=wanted.rule,
        policy=policy.digest(),
        plan_digest=wanted.plan_digest,
        dataset=wanted.dataset,
        owner=wanted.owner,
        reason=wanted.reason,
        created_by=actor,
        created_at=written(now),
        expires_at=written(ends),
    )


def _withdraw(
    connection: Connection, certificate_id: str, because: str, actor: str, at: datetime
) -> None:
    """Revoke the current issues of a certificate, of either trust, that still count."""
    hold(connection, certificate_id)
    for untrusted in (False, True):
        found = current(connection, certificate_id, untrusted=untrusted)
        if found is not None and found.status not in DECIDED | {Status.EXPIRED, Status.KEY_REVOKED}:
            withdraw(connection, found, "policy_violation", because, actor=actor, at=at)


def _require_another(connection: Connection, waiver: Waiver) -> None:
    if waiver.owner in (waiver.created_by, waiver.created_by.partition(":")[2]):
        raise NotYours("who answers for a waiver cannot grant it")
    about = waiver.plan_digest
    if about is not None and has_asked(connection, waiver.created_by, about):
        raise NotYours("who asked for a plan cannot grant a waiver for it")
