"""Approve or reject: four eyes on a certificate before anybody may use it.

An approver names the digest of the envelope that they saw, so that nothing can be slipped
in between. Nobody decides about what they asked for, now or at any time before, nor twice;
the database refuses that by itself too, for whoever can write to it (revision 0017). Who asked
for the same plan before, under other rules or waivers, asked for it too. With
the last approval that is needed, the statement is signed anew with all of them in it, in
the same transaction: there is no moment at which a certificate is approved and not issued.
One rejection ends it.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import Connection, Engine, insert, select
from sqlalchemy.exc import IntegrityError

from affidavit.certificate import TIME_FORMAT, Approval, Approvals, KeyFailure, SigningPort
from affidavit.service.database import writer
from affidavit.service.identity.actor import Actor
from affidavit.service.keyring import Keyring
from affidavit.service.lifecycle.issuing import sign_approved
from affidavit.service.lifecycle.lifecycle_tables import approvals
from affidavit.service.lifecycle.refusals import Impossible
from affidavit.service.lifecycle.standing import Status
from affidavit.service.lifecycle.wanted import WantedDecision
from affidavit.service.log.entries import append
from affidavit.service.store import StoredCertificate, audited, current, has_asked, hold, keep
from affidavit.service.tables import requests


@dataclass(frozen=True, slots=True)
class Decided:
    """The current issue after a decision, and whether the decision made it."""

    certificate: StoredCertificate
    issued: bool


class Approve:
    """The use case, with what it works on."""

    def __init__(self, engine: Engine, signers: Keyring) -> None:
        self._writer = writer(engine)
        self._signers = signers

    def __call__(
        self, certificate_id: str, wanted: WantedDecision, actor: Actor, at: datetime
    ) -> Decided | None:
        """Keep the decision of ``actor``; None if there is no such certificate.

        Raises ``Impossible``, and ``KeyFailure`` when nothing can be signed now.
        """
        try:
            return self._decide(certificate_id, wanted, actor, at)
        except IntegrityError:
            # Another process was quicker to keep the key; that, or what made this
            # impossible meanwhile, is there to be seen now.
            return self._decide(certificate_id, wanted, actor, at)

    def _decide(
        self, certificate_id: str, wanted: WantedDecision, actor: Actor, at: datetime
    ) -> Decided | None:
        with self._writer.begin() as connection:
            hold(connection, certificate_id)
            found = current(connection, certificate_id)
            if found is None:
                return None
            _require_possible(connection, found, wanted, actor)
            _keep(connection, found, wanted, actor, at)
            issued = self._issue(connection, found, at) if wanted.decision == "approve" else None
            return Decided(issued or current(connection, certificate_id) or found, bool(issued))

    def _issue(
        self, connection: Connection, pending: StoredCertificate, at: datetime
    ) -> StoredCertificate | None:
        """The issue with its approvals, if that was the last one needed."""
        given = Approvals(pending.approvals_required, _given(connection, pending))
        if not given.complete:
            return None
        key = self._signers.current()
        _require_as_trusted(key, pending)
        issued = sign_approved(pending, given, key, at)
        keep(connection, issued, key.public.as_record(), pending)
        details = {"envelope": issued.envelope_digest, "issue": issued.issue}
        audited(connection, at, given.given[-1].name, "certificate.approved", issued.id, details)
        return issued


def decisions(connection: Connection, certificate_id: str) -> list[dict[str, object]]:
    """Every decision about any issue of a certificate, oldest first."""
    query = select(approvals).where(approvals.c.certificate_id == certificate_id)
    return [dict(row) for row in connection.execute(query.order_by(approvals.c.id)).mappings()]


def _require_possible(
    connection: Connection, found: StoredCertificate, wanted: WantedDecision, actor: Actor
) -> None:
    if actor.anonymous:
        raise Impossible("anonymous_approver", "nobody in particular cannot approve; send a token.")
    if wanted.envelope != found.envelope_digest:
        raise Impossible(
            "other_envelope",
            f"the current issue has the envelope {found.envelope_digest}, not the one named; "
            "look at it, then decide about that.",
        )
    if found.status is not Status.AWAITING_APPROVAL:
        raise Impossible("not_awaiting_approval", f"this certificate is {found.status.value}.")
    if has_asked(connection, actor.name, found.plan_digest):
        raise Impossible(
            "own_request", f"{actor.name} asked for this plan; somebody else must decide."
        )
    unknown = select(requests.c.id).where(
        requests.c.certificate_id == found.id,
        requests.c.issue == found.issue,
        requests.c.requester.like("anonymous@%"),
    )
    if connection.execute(unknown.limit(1)).first() is not None:
        raise Impossible(
            "anonymous_request",
            "nobody knows who asked for this issue, so nobody is known to be somebody else; "
            "have it issued again by a person with a token.",
        )
    if any(item.name == actor.name for item in _given(connection, found)):
        raise Impossible("already_decided", f"{actor.name} has approved this issue already.")


def _keep(
    connection: Connection,
    found: StoredCertificate,
    wanted: WantedDecision,
    actor: Actor,
    at: datetime,
) -> None:
    connection.execute(
        insert(approvals).values(
            certificate_id=found.id,
            untrusted=found.untrusted,
            issue=found.issue,
            envelope_digest=wanted.envelope,
            decision=wanted.decision,
            approver=actor.name,
            at=at,
            comment=wanted.comment,
        )
    )
    said = {"issue": found.issue, **wanted.model_dump()}
    append(connection, "approval", found.id, said, actor=actor.name, at=at)
    audited(connection, at, actor.name, f"certificate.{wanted.decision}", found.id, said)


def _given(connection: Connection, pending: StoredCertificate) -> tuple[Approval, ...]:
    query = select(approvals).where(
        approvals.c.certificate_id == pending.id,
        approvals.c.untrusted == pending.untrusted,
        approvals.c.issue == pending.issue,
        approvals.c.decision == "approve",
    )
    rows = connection.execute(query.order_by(approvals.c.id))
    return tuple(
        Approval(row.approver, row.at.strftime(TIME_FORMAT), row.comment, row.envelope_digest)
        for row in rows
    )


def _require_as_trusted(key: SigningPort, pending: StoredCertificate) -> None:
    """A development key must not sign in the place of a real one, nor the reverse."""
    if key.public.development is not pending.untrusted:
        raise KeyFailure("the key that signs now is not of the kind that signed what is approved.")
