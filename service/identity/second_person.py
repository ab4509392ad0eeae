"""Four eyes: an administrator's change takes effect once enough of them ask for the same.

Budgets, policies, keysets, grants to other teams, and tokens, because whoever makes tokens alone
is two people with the next one. How many is part of the keyset (``administrators``): t of n root
keys sign it, and as many administrators as the one before asks for publish it, so that nobody
loosens it alone. Each administrator sends the same request; the last of them carries it out. What
one asks counts for ``LASTS``, and once. What only takes a right away needs one.

``admin_proposals``
    Each request, who made it, and whether it was the one that was carried out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import (
    Boolean,
    CheckConstraint,
    Column,
    Connection,
    Engine,
    Index,
    String,
    Table,
    insert,
    select,
)

from affidavit.plan import digest_of
from affidavit.service.database import hold, writer
from affidavit.service.identity.actor import Actor
from affidavit.service.log.entries import append
from affidavit.service.problems import Problem
from affidavit.service.tables import Sequence, UtcDateTime, metadata

LASTS = timedelta(days=7)
"""How long a proposal waits for the others."""

admin_proposals = Table(
    "admin_proposals",
    metadata,
    Column("id", Sequence, primary_key=True),
    Column("kind", String(32), nullable=False),
    Column("digest", String(71), nullable=False),
    Column("proposer", String(255), nullable=False),
    Column("at", UtcDateTime, nullable=False),
    Column("carried_out", Boolean, nullable=False),
    CheckConstraint("id > 0", name="admin_proposals_id_positive"),
    Index("admin_proposals_by_digest", "digest", "id"),
)


class SecondPerson:
    """The rule behind one engine; ``administrators`` is how many the newest keyset wants."""

    def __init__(self, engine: Engine, administrators: Callable[[], int]) -> None:
        self._writer = writer(engine)
        self._administrators = administrators

    def require(self, kind: str, content: Mapping[str, Any], actor: Actor, at: datetime) -> None:
        """Return once enough people asked for this; else note it and raise ``Problem``."""
        needed = self._administrators()
        if needed < 2:
            return
        if actor.anonymous:
            raise Problem(403, "missing_scope", "This needs several people, each with a token.")
        digest = digest_of({"kind": kind, **content})
        with self._writer.begin() as connection:
            hold(connection, f"proposal {digest}")
            others = _proposers(connection, digest, at - LASTS) - {actor.name}
            enough = len(others) + 1 >= needed
            row = {"kind": kind, "digest": digest, "proposer": actor.name, "at": at}
            connection.execute(insert(admin_proposals).values(**row, carried_out=enough))
            body = {"kind": kind, "carried_out": enough}
            append(connection, "proposal", digest, body, actor=actor.name, at=at)
        if not enough:
            raise Problem(
                409,
                "second_person_needed",
                f"Your request was noted: {len(others) + 1} of {needed} administrators asked for "
                f"it. It takes effect when {needed - len(others) - 1} more send the same within "
                f"{LASTS.days} days.",
            )


def _proposers(connection: Connection, digest: str, since: datetime) -> set[str]:
    """Who asked for it since it was last carried out."""
    query = (
        select(admin_proposals.c.proposer, admin_proposals.c.carried_out)
        .where(admin_proposals.c.digest == digest, admin_proposals.c.at > since)
        .order_by(admin_proposals.c.id)
    )
    proposers: set[str] = set()
    for proposer, carried_out in connection.execute(query):
        proposers = set() if carried_out else {*proposers, proposer}
    return proposers
