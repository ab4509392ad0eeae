"""Four eyes: a change takes effect once enough administrators have requested it.

This applies to budgets, policies, keysets, grants to other teams, and tokens, because a person who
can create tokens alone can act as two. The keyset sets the number of ``administrators``. It is
signed by t of n root keys and published by as many administrators as the previous keyset requires,
so nobody can lower the number alone.

Each administrator sends the same request. The last one is carried out, in one transaction with its
record. A request counts once, for ``PROPOSAL_LIFETIME``, and until a token of its sender is
revoked, because the token may have been stolen. Changes that only remove a right need one person.
Submitters and approvers may request a budget, which then waits for the administrators and does not
count as one of their requests. One administrator can decline a waiting request. A waiver, which
relaxes a policy, requires as many approvers.

``admin_proposals``
    Each request: its sender, reason and content, and whether it was carried out. The kind of a
    request that does not count ends in ``_request``, the kind of a refusal in ``_declined``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import datetime, timedelta
from typing import Any, TypeVar

from sqlalchemy import Connection, Engine, Row, func, select

from affidavit.client import Proposal, RecordedRequest
from affidavit.plan import digest_of
from affidavit.service.core.database import (
    Store,
    hold,
)
from affidavit.service.core.problems import Problem, Recorded
from affidavit.service.identity.actor import Actor, Approve, approve_alone
from affidavit.service.identity.scopes import Scope
from affidavit.service.log.entries import PENDING_LEAF, insert_logged, logged
from affidavit.service.tables.identity import admin_proposals
from affidavit.service.tables.ledger import ledger_events, ledgers
from affidavit.trust.log import LogEntry

PROPOSAL_LIFETIME = timedelta(days=7)
"""Time for which a proposal waits for others."""
ROLE_NAMES = {Scope.ADMIN: "administrators", Scope.APPROVE: "approvers"}


Result = TypeVar("Result")


class _AgreementChanged(Exception):
    """The number of agreements is not the expected one."""


class FourEyes(Store):
    """The rule for one database.

    ``administrators`` returns the number that the newest keyset requires. ``revocations`` reads the
    leaf index of each person's last token revocation.
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
        """Carry out ``change`` if enough people requested it; else record the request.

        ``change`` calls its argument in its transaction, before it writes. Raises ``Recorded`` if
        others must send the same, and ``Problem`` if the actor has no name.
        """
        required, counts = self._administrators(), actor.may(scope)
        if required < 2 and counts:
            return change(approve_alone)
        if actor.is_anonymous:
            raise Problem(403, "missing_scope", "This requires several people, each with a token.")
        digest = digest_of({"kind": kind, **content})

        def record(connection: Connection, *, to_carry_out: bool) -> int:
            """Insert the request, if ``to_carry_out`` is right; return the agreements."""
            hold(connection, f"proposal {digest}")
            proposers = _valid_proposers(
                connection, digest, at - PROPOSAL_LIFETIME, self._revocations(connection)
            )
            agreed = len(proposers - {actor.name}) + counts
            if (counts and agreed >= required) != to_carry_out:
                raise _AgreementChanged
            entry = {"kind": kind if counts else f"{kind}_request", "carried_out": to_carry_out}
            row = {**entry, "digest": digest, "proposer": actor.name, "at": at, "reason": reason}
            _insert(connection, row, content)
            return agreed

        while True:
            with suppress(_AgreementChanged):
                return change(lambda connection: record(connection, to_carry_out=True))
            with suppress(_AgreementChanged):  # unless somebody agreed meanwhile
                with self._writer.begin() as connection:
                    agreed = record(connection, to_carry_out=False)
                break
        raise Recorded(
            RecordedRequest(
                code="second_person_needed",
                detail=f"Your request is recorded: {agreed} of {required} {ROLE_NAMES[scope]} have "
                f"agreed. It takes effect when {required - agreed} more send the same within "
                f"{PROPOSAL_LIFETIME.days} days.",
                agreed=agreed,
                required=required,
                expires_at=at + PROPOSAL_LIFETIME,
            )
        )

    def decline(self, dataset: str, digest: str, reason: str, actor: Actor, at: datetime) -> bool:
        """Decline a waiting proposal about ``dataset``; return whether there was one."""
        waiting = self.waiting(actor, at, dataset)
        declined = next((proposal for proposal in waiting if proposal.digest == digest), None)
        if declined is None:
            return False
        entry = {"kind": f"{declined.kind}_declined", "carried_out": False}
        row = {**entry, "digest": digest, "proposer": actor.name, "at": at, "reason": reason}
        with self._writer.begin() as connection:
            hold(connection, f"proposal {digest}")
            _insert(connection, row, declined.content)
        return True

    def waiting(
        self, actor: Actor, now: datetime, dataset: str | None = None
    ) -> tuple[Proposal, ...]:
        """Return the waiting budgets and grants that ``actor`` may see, newest first.

        A proposed budget is dropped once another one is set. Teams see proposals about data sets
        whose ledgers they read, and their own. Administrators and auditors see grants.
        """
        kinds = ["budget", "budget_request", "budget_declined"]
        if actor.may(Scope.ADMIN) or actor.may(Scope.AUDIT):
            kinds += ["grant", "grant_declined"]
        query = (
            select(admin_proposals)
            .where(
                admin_proposals.c.at > now - PROPOSAL_LIFETIME, admin_proposals.c.kind.in_(kinds)
            )
            .where(admin_proposals.c.content.is_not(None))
            .order_by(admin_proposals.c.id)
        )
        open_: dict[str, Proposal] = {}
        with self._engine.connect() as connection:
            set_at, revoked = _last_budget_changes(connection), self._revocations(connection)
            for row in connection.execute(query):
                content = json.loads(row.content)
                kind = row.kind.partition("_")[0]
                # An altered row no longer has the digest of its log entry.
                if digest_of({"kind": kind, **content}) != row.digest:
                    continue
                is_open = not row.carried_out and not row.kind.endswith("_declined")
                entries = logged(connection, row.digest)
                if is_open and not _is_valid(row, entries, revoked):
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
            if proposal.kind == "grant"
            or proposal.at > set_at.get(_ledger_scope(proposal), now - PROPOSAL_LIFETIME)
            if actor.visible_team is None
            or proposal.content["dataset"] in seen
            or actor.name in proposal.proposers
        )


def proposal_entry(row: Any) -> LogEntry:
    """Build the log entry of a row; its digest covers the content without the reason."""
    reason = {"reason": row.reason} if row.reason else {}
    return LogEntry(
        kind="proposal",
        subject=row.digest,
        actor=row.proposer,
        at=row.at,
        body={"kind": row.kind, "carried_out": bool(row.carried_out), **reason},
    )


def _ledger_scope(proposal: Proposal) -> tuple[str, ...]:
    return tuple(proposal.content[name] for name in ("dataset", "unit", "adjacency"))


def _last_budget_changes(connection: Connection) -> dict[tuple[str, ...], datetime]:
    """Return the time of the last budget of each data set, privacy unit and adjacency."""
    scope = (ledgers.c.dataset, ledgers.c.unit, ledgers.c.adjacency)
    query = (
        select(*scope, func.max(ledger_events.c.at))
        .join(ledger_events, ledger_events.c.ledger_id == ledgers.c.id)
        .where(ledger_events.c.kind == "budget")
        .group_by(*scope)
    )
    return {tuple(row[:3]): row[3] for row in connection.execute(query)}


def _insert(connection: Connection, row: Mapping[str, Any], content: Mapping[str, Any]) -> None:
    """Insert a row and its log entry."""
    text = json.dumps(content, sort_keys=True)
    insert_logged(connection, admin_proposals, {**row, "content": text}, proposal_entry)


def _valid_proposers(
    connection: Connection, digest: str, since: datetime, revoked: Mapping[str, int]
) -> set[str]:
    """Return the valid proposers since the proposal was last carried out or declined."""
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
            if _is_valid(row, entries, {}):
                proposers = set()
        elif _is_valid(row, entries, revoked):
            proposers.add(row.proposer)
    return proposers


def _is_valid(row: Row[Any], entries: Mapping[str, int | None], revoked: Mapping[str, int]) -> bool:
    """Return whether a row is logged after its proposer's last token revocation."""
    content = proposal_entry(row).content.decode()
    if content not in entries:
        return False
    leaf = entries[content]
    return (PENDING_LEAF if leaf is None else leaf) > revoked.get(row.proposer, -1)
