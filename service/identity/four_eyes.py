"""Four eyes: a change takes effect once enough administrators ask for the same.

Budgets, policies, keysets, grants to other teams, and tokens, because whoever makes tokens alone
is two people with the next one. How many is part of the keyset (``administrators``): t of n root
keys sign it, and as many administrators as the one before asks for publish it, so that nobody
loosens it alone. Each administrator sends the same request. That of the last is carried out, in one
transaction with the note that it was. A request counts for ``LASTS``, and once, and no longer than
until a token of whoever made it is revoked: it may have been stolen. What only takes a right away
needs one. Whoever submits or approves plans may ask for a budget too: it waits for the
administrators, and is none of theirs. One administrator can decline what waits. A waiver, which
loosens a policy for a plan, takes as many approvers.

``admin_proposals``
    Each request, who made it and why, what it asks for, and whether it was the one that was
    carried out. The kind of those that do not count ends in ``_request``, and that of an
    administrator's refusal in ``_declined``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import datetime, timedelta
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy import Connection, Engine, Row, func, select

from affidavit.certificate.log import LogEntry
from affidavit.client import Proposal
from affidavit.plan import digest_of
from affidavit.service.certificate_tables import UtcDateTime, numbered
from affidavit.service.database import Store, hold
from affidavit.service.identity.actor import Actor, Scope
from affidavit.service.ledger.state import ledger_events, ledgers
from affidavit.service.log.entries import WAITING, insert_logged, logged
from affidavit.service.problems import Problem

LASTS = timedelta(days=7)
"""How long a proposal waits for the others."""
_PEOPLE = {Scope.ADMIN: "administrators", Scope.APPROVE: "approvers"}

admin_proposals = numbered(
    "admin_proposals",
    sa.Column("kind", sa.String(32), nullable=False),
    sa.Column("digest", sa.String(71), nullable=False),
    sa.Column("proposer", sa.String(255), nullable=False),
    sa.Column("at", UtcDateTime, nullable=False),
    sa.Column("carried_out", sa.Boolean, nullable=False),
    sa.Column("content", sa.Text),
    sa.Column("reason", sa.Text),
    sa.Index("admin_proposals_by_digest", "digest", "id"),
)


Approve = Callable[[Connection], object]
"""What a change calls in its transaction, which ends where others have to agree first."""
Result = TypeVar("Result")


def alone(_: Connection) -> None:
    """The approval of a change that one person makes."""


class _Otherwise(Exception):
    """More people have to agree, or enough have."""


class SecondPerson(Store):
    """The rule behind one engine; ``administrators`` is how many the newest keyset wants.

    ``revocations`` reads after which leaf of the log a token of each person was revoked last.
    """

    def __init__(
        self,
        engine: Engine,
        administrators: Callable[[], int],
        revocations: Callable[[Connection], Mapping[str, int]],
    ) -> None:
        super().__init__(engine)
        self._administrators = administrators
        self._revocations = revocations

    def carry_out(
        self,
        kind: str,
        content: Mapping[str, Any],
        actor: Actor,
        at: datetime,
        change: Callable[[Approve], Result],
        *,
        reason: str = "",
        scope: Scope = Scope.ADMIN,
    ) -> Result:
        """The result of ``change`` once enough people of ``scope`` asked for this; else note it.

        ``change`` calls what it gets in its transaction, before it writes. Raises ``Problem``.
        """
        needed, counts = self._administrators(), actor.may(scope)
        if needed < 2 and counts:
            return change(alone)
        if actor.anonymous:
            raise Problem(403, "missing_scope", "This requires several people, each with a token.")
        digest = digest_of({"kind": kind, **content})

        def note(connection: Connection, *, to_carry_out: bool) -> int:
            """Store the request if it is, or is not, the last one needed; how many agree."""
            hold(connection, f"proposal {digest}")
            proposers = _proposers(connection, digest, at - LASTS, self._revocations(connection))
            agreed = len(proposers - {actor.name}) + counts
            if (counts and agreed >= needed) != to_carry_out:
                raise _Otherwise
            entry = {"kind": kind if counts else f"{kind}_request", "carried_out": to_carry_out}
            row = {**entry, "digest": digest, "proposer": actor.name, "at": at, "reason": reason}
            _store(connection, row, content)
            return agreed

        while True:
            with suppress(_Otherwise):
                return change(lambda connection: note(connection, to_carry_out=True))
            with suppress(_Otherwise):  # somebody agreed meanwhile
                with self._writer.begin() as connection:
                    agreed = note(connection, to_carry_out=False)
                break
        raise Problem(
            409,
            "second_person_needed",
            f"Your request is recorded: {agreed} of {needed} {_PEOPLE[scope]} have agreed. It "
            f"takes effect when {needed - agreed} more send the same within {LASTS.days} days.",
        )

    def decline(self, dataset: str, digest: str, reason: str, actor: Actor, at: datetime) -> bool:
        """End the wait of a proposal about ``dataset``; return whether it waited."""
        waiting = self.waiting(actor, at, dataset)
        declined = next((proposal for proposal in waiting if proposal.digest == digest), None)
        if declined is None:
            return False
        entry = {"kind": f"{declined.kind}_declined", "carried_out": False}
        row = {**entry, "digest": digest, "proposer": actor.name, "at": at, "reason": reason}
        with self._writer.begin() as connection:
            hold(connection, f"proposal {digest}")
            _store(connection, row, declined.content)
        return True

    def waiting(
        self, actor: Actor, now: datetime, dataset: str | None = None
    ) -> tuple[Proposal, ...]:
        """Budgets and grants that wait, newest first, as far as ``actor`` may know of them.

        A budget waits no longer once another one was set. Teams see requests about data sets whose
        ledgers they read, and their own; grants are for administrators and auditors.
        """
        kinds = ["budget", "budget_request", "budget_declined"]
        if actor.may(Scope.ADMIN) or actor.may(Scope.AUDIT):
            kinds += ["grant", "grant_declined"]
        query = (
            select(admin_proposals)
            .where(admin_proposals.c.at > now - LASTS, admin_proposals.c.kind.in_(kinds))
            .where(admin_proposals.c.content.is_not(None))
            .order_by(admin_proposals.c.id)
        )
        open_: dict[str, Proposal] = {}
        with self._engine.connect() as connection:
            set_at, revoked = _set_at(connection), self._revocations(connection)
            for row in connection.execute(query):
                content = json.loads(row.content)
                kind = row.kind.partition("_")[0]
                # What was altered in the table is no longer what its log entry is about.
                if digest_of({"kind": kind, **content}) != row.digest:
                    continue
                is_open = not row.carried_out and not row.kind.endswith("_declined")
                entries = logged(connection, row.digest)
                if is_open and not _counts(row, entries, revoked):
                    continue
                earlier = open_.pop(row.digest, None)
                if is_open and dataset in (None, content["dataset"]):
                    proposers = [] if earlier is None else earlier.proposers
                    open_[row.digest] = Proposal(
                        digest=row.digest,
                        kind=kind,
                        content=content,
                        proposers=list(dict.fromkeys((*proposers, row.proposer))),
                        reason=row.reason or (earlier.reason if earlier else ""),
                        at=row.at,
                    )
        seen = {scope[0] for scope in set_at}
        return tuple(
            proposal
            for proposal in reversed(open_.values())
            if proposal.kind == "grant" or proposal.at > set_at.get(_scope(proposal), now - LASTS)
            if actor.sees is None
            or proposal.content["dataset"] in seen
            or actor.name in proposal.proposers
        )


def proposal_entry(row: Any) -> LogEntry:
    """The log entry of a row; the digest is of what it asks for, its reason apart."""
    reason = {"reason": row.reason} if row.reason else {}
    return LogEntry(
        kind="proposal",
        subject=row.digest,
        actor=row.proposer,
        at=row.at,
        body={"kind": row.kind, "carried_out": bool(row.carried_out), **reason},
    )


def _scope(proposal: Proposal) -> tuple[str, ...]:
    return tuple(proposal.content[name] for name in ("dataset", "unit", "adjacency"))


def _set_at(connection: Connection) -> dict[tuple[str, ...], datetime]:
    """When the budget of each data set, privacy unit and adjacency was last set."""
    scope = (ledgers.c.dataset, ledgers.c.unit, ledgers.c.adjacency)
    query = (
        select(*scope, func.max(ledger_events.c.at))
        .join(ledger_events, ledger_events.c.ledger_id == ledgers.c.id)
        .where(ledger_events.c.kind == "budget")
        .group_by(*scope)
    )
    return {tuple(row[:3]): row[3] for row in connection.execute(query)}


def _store(connection: Connection, row: Mapping[str, Any], content: Mapping[str, Any]) -> None:
    """A row and its log entry."""
    text = json.dumps(content, sort_keys=True)
    insert_logged(connection, admin_proposals, {**row, "content": text}, proposal_entry)


def _proposers(
    connection: Connection, digest: str, since: datetime, revoked: Mapping[str, int]
) -> set[str]:
    """Who has agreed since it was last carried out or declined, by rows that were logged."""
    query = (
        select(admin_proposals)
        .where(admin_proposals.c.digest == digest, admin_proposals.c.at > since)
        .where(~admin_proposals.c.kind.endswith("_request", autoescape=True))
        .order_by(admin_proposals.c.id)
    )
    entries = logged(connection, digest)
    proposers: set[str] = set()
    for row in connection.execute(query):
        if row.carried_out or row.kind.endswith("_declined"):
            if _counts(row, entries, {}):
                proposers = set()
        elif _counts(row, entries, revoked):
            proposers.add(row.proposer)
    return proposers


def _counts(row: Row[Any], entries: Mapping[str, int | None], revoked: Mapping[str, int]) -> bool:
    """Whether a row is in the log, after the leaf of its proposer's last ``revoked`` token."""
    content = proposal_entry(row).content.decode()
    if content not in entries:
        return False
    leaf = entries[content]
    return (WAITING if leaf is None else leaf) > revoked.get(row.proposer, -1)
