"""Revoke: say, for good, that a certificate no longer counts.

A revocation is about the current issue and everything before it. It is a row, an entry in
the log, and from then on a line in every status list until a day after the validity of
what it revokes has ended. Nothing undoes it; issuing the certificate again is a decision
of its own and makes a new issue (``affidavit.service.lifecycle.reissue``).

Whoever may revoke may revoke what they asked for themselves: taking a certificate out of
use needs one pair of eyes, and the sooner the better.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, Engine, insert, select

from affidavit.service.database import writer
from affidavit.service.identity.actor import Actor
from affidavit.service.lifecycle.lifecycle_tables import revocations
from affidavit.service.lifecycle.refusals import Impossible
from affidavit.service.lifecycle.standing import Status
from affidavit.service.lifecycle.wanted import WantedRevocation
from affidavit.service.log.entries import append
from affidavit.service.store import StoredCertificate, audited, current, hold


@dataclass(frozen=True, kw_only=True, slots=True)
class Revocation:
    """A revocation as it is kept."""

    certificate_id: str
    issue: int
    envelope_digest: str
    code: str
    reason: str
    revoked_by: str
    at: datetime


class Revoke:
    """The use case, with what it works on."""

    def __init__(self, engine: Engine) -> None:
        self._writer = writer(engine)

    def __call__(
        self, certificate_id: str, wanted: WantedRevocation, actor: Actor, at: datetime
    ) -> tuple[Revocation, bool] | None:
        """The revocation and whether it is new; None if there is no such certificate.

        One that is revoked already stays revoked as it was. Raises ``Impossible``.
        """
        with self._writer.begin() as connection:
            hold(connection, certificate_id)
            found = current(connection, certificate_id)
            if found is None:
                return None
            if wanted.envelope not in (None, found.envelope_digest):
                raise Impossible(
                    "other_envelope",
                    f"the current issue has the envelope {found.envelope_digest}, not the one "
                    "named; leave envelope out to revoke whatever is current.",
                )
            if found.status is Status.REVOKED:
                return revocation_of(connection, found), False
            withdraw(connection, found, wanted.code, wanted.reason, actor=actor.name, at=at)
            return revocation_of(connection, found), True


def revocation_of(connection: Connection, certificate: StoredCertificate) -> Revocation:
    """The revocation by which ``certificate``, which is revoked, was so first."""
    query = (
        select(*(revocations.c[name] for name in Revocation.__dataclass_fields__))
        .where(
            revocations.c.certificate_id == certificate.id,
            revocations.c.untrusted == certificate.untrusted,
            revocations.c.issue >= certificate.issue,
        )
        .order_by(revocations.c.issue)
    )
    return Revocation(**connection.execute(query).mappings().first() or {})


def withdraw(
    connection: Connection,
    found: StoredCertificate,
    code: str,
    reason: str,
    *,
    actor: str,
    at: datetime,
) -> None:
    """Revoke ``found``, an issue that is current and held, in the transaction of ``connection``."""
    said: dict[str, Any] = {
        "issue": found.issue,
        "envelope": found.envelope_digest,
        "code": code,
        "reason": reason,
    }
    connection.execute(
        insert(revocations).values(
            certificate_id=found.id,
            untrusted=found.untrusted,
            issue=found.issue,
            envelope_digest=found.envelope_digest,
            code=code,
            reason=reason,
            revoked_by=actor,
            at=at,
        )
    )
    append(connection, "revocation", found.id, said, actor=actor, at=at)
    audited(connection, at, actor, "certificate.revoked", found.id, said)
