"""Where an issue stands at a moment: one word, worked out by the database.

==================  ==================================================================
``active``          the certificate of this id, whatever its verdict
``awaiting_approval``  signed, and not usable before others have approved it
``expired``         its validity is over; asked again, it is issued again
``superseded``      a later issue stands in its place
``rejected``        an approver refused it
``revoked``         withdrawn, with every issue before it
``key_revoked``     a published keyset revokes the key that signed it; asked again, it is
                    issued again
==================  ==================================================================

``revoked`` and ``rejected`` are people's decisions and end only by a person's decision to
issue again (``affidavit.service.lifecycle.decisions``); time does not turn them into
``expired``. They hold for the issue that they are about; a revocation also for all issues
before it.
"""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Any

from sqlalchemy import ColumnElement, and_, case, exists, select

from affidavit.service.keysets import revoked_keys
from affidavit.service.lifecycle.lifecycle_tables import approvals, revocations
from affidavit.service.tables import certificates


class Status(StrEnum):
    """Where an issue stands; the words are part of the API."""

    ACTIVE = "active"
    AWAITING_APPROVAL = "awaiting_approval"
    EXPIRED = "expired"
    SUPERSEDED = "superseded"
    REJECTED = "rejected"
    REVOKED = "revoked"
    KEY_REVOKED = "key_revoked"


DECIDED = frozenset({Status.REVOKED, Status.REJECTED})
"""What a person decided, and only a person ends."""

_later = certificates.alias("later")

SUPERSEDED: ColumnElement[bool] = exists(
    select(1).where(
        _later.c.id == certificates.c.id,
        _later.c.untrusted == certificates.c.untrusted,
        _later.c.issue > certificates.c.issue,
    )
)
"""Whether a row of ``certificates`` has a later issue beside it."""


def of_the_same(table: Any) -> ColumnElement[bool]:
    """Whether a row of ``table`` is about the certificate of a row of ``certificates``."""
    return and_(
        table.c.certificate_id == certificates.c.id, table.c.untrusted == certificates.c.untrusted
    )


REVOKED: ColumnElement[bool] = exists(
    select(1).where(of_the_same(revocations), revocations.c.issue >= certificates.c.issue)
)
"""Whether a row of ``certificates`` was revoked, itself or by a later issue."""

REJECTED: ColumnElement[bool] = exists(
    select(1).where(
        of_the_same(approvals),
        approvals.c.issue == certificates.c.issue,
        approvals.c.decision == "reject",
    )
)


def key_revoked_at(now: datetime | ColumnElement[datetime]) -> ColumnElement[bool]:
    """Whether the key that signed a row of ``certificates`` is revoked at ``now``.

    What it signed before the instant that the keyset names may still count for a verifier who
    holds the log; nobody should begin anything by it here, where it can be issued anew.
    """
    return exists(
        select(1).where(revoked_keys.c.key_id == certificates.c.key_id, revoked_keys.c.since <= now)
    )


def status_at(now: datetime | ColumnElement[datetime]) -> ColumnElement[str]:
    """The status of a row of ``certificates`` at ``now``, for a query to select or compare."""
    return case(
        (REVOKED, Status.REVOKED.value),
        (SUPERSEDED, Status.SUPERSEDED.value),
        (REJECTED, Status.REJECTED.value),
        (key_revoked_at(now), Status.KEY_REVOKED.value),
        (certificates.c.not_after < now, Status.EXPIRED.value),
        (
            certificates.c.approvals_given < certificates.c.approvals_required,
            Status.AWAITING_APPROVAL.value,
        ),
        else_=Status.ACTIVE.value,
    )
