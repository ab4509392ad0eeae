"""Entry types: the table that each kind of log entry records, and how to compare the two.

An entry type builds the entry that a row must have: kind, subject, actor, time, and the fields of
the body that the row has too. The same fields are taken from the logged entry. Both must be equal,
with times compared to the second.

A new table whose rows are logged needs an entry type here. Entries of a kind without an entry type
are verified in the tree only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import Select, Table, select

from affidavit.plan import canonical_json
from affidavit.service.certificates.issue_status import approval_entry, revocation_entry
from affidavit.service.identity.tokens import token_entry
from affidavit.service.ledger.integrity import ENTRY_KINDS
from affidavit.service.ledger.integrity import event_entry as ledger_event_entry
from affidavit.service.ledger.repository import grant_entry
from affidavit.service.ledger.state import LedgerScope
from affidavit.service.log.entries import entry_of
from affidavit.service.operation.four_eyes import proposal_entry
from affidavit.service.policies.store import policy_entry, waiver_entry
from affidavit.service.runs.repository import event_entry as run_event_entry
from affidavit.service.tables.certificates import approvals, certificates, revocations
from affidavit.service.tables.identity import admin_proposals, token_revocations, tokens
from affidavit.service.tables.keys import keysets
from affidavit.service.tables.ledger import (
    dataset_grants,
    ledger_events,
    ledgers,
)
from affidavit.service.tables.policies import (
    policies,
    waiver_revocations,
    waivers,
)
from affidavit.service.tables.runs import run_events
from affidavit.trust.log import LogEntry

Body = Mapping[str, Any]
Projection = Callable[[Body], Body | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class EntryType:
    """A table and the kinds of entries that record its rows.

    ``entry`` builds the entry that a row must have. ``comparable`` takes the same fields from a
    logged body, or returns None if the entry records another table's row.
    """

    table: Table
    kinds: tuple[str, ...]
    entry: Callable[[Any], LogEntry]
    comparable: Projection = dict

    @property
    def query(self) -> Select[Any]:
        """The query for all rows, with the columns of other tables that ``entry`` needs."""
        columns = [*self.table.columns]
        if self.table is ledger_events:
            columns += [ledgers.c.dataset, ledgers.c.unit, ledgers.c.adjacency]
            return select(*columns).join(ledgers).order_by(*self.table.primary_key)
        return select(*columns).order_by(*self.table.primary_key)

    def where(self, row: Any) -> str:
        """Return the name of a row."""
        keys = (str(getattr(row, column.name)) for column in self.table.primary_key)
        return f"{self.table.name} {', '.join(keys)}"

    def of_row(self, row: Any) -> bytes:
        """Return the canonical bytes of the entry that a row must have."""
        entry = self.entry(row)
        return _canonical(entry.kind, entry.subject, entry.actor, entry.at, entry.body)

    def of_entry(self, content: Mapping[str, Any]) -> bytes | None:
        """Return the canonical bytes of an entry, or None if it records another table's row."""
        body = self.comparable(content["body"]) if content["kind"] in self.kinds else None
        if body is None:
            return None
        at = datetime.fromisoformat(content["at"])
        return _canonical(content["kind"], content["subject"], content["actor"], at, body)


def _canonical(kind: str, subject: str, actor: str, at: datetime, body: Body) -> bytes:
    second = at.astimezone(UTC).isoformat(timespec="seconds")
    return canonical_json([kind, subject, actor, second, dict(body)])


def _fields(*names: str) -> Projection:
    """Select these fields of a body, with None for missing ones."""
    return lambda body: {name: body.get(name) for name in names}


def _where(field: str, value: str, projection: Projection = dict) -> Projection:
    """Apply ``projection`` to bodies whose ``field`` is ``value``; others give None."""
    return lambda body: projection(body) if body.get(field) == value else None


def _keyset(row: Any) -> LogEntry:
    body = {"version": row.version, "digest": row.digest}
    return _entry("keyset", f"keyset:{row.version}", row.publisher, row.published_at, body)


def _entry(kind: str, subject: str, actor: str, at: datetime, body: Body) -> LogEntry:
    return LogEntry(kind=kind, subject=subject, actor=actor, at=at, body=body)


ENTRY_TYPES = (
    EntryType(
        table=certificates,
        kinds=("certificate", "refusal"),
        entry=lambda row: entry_of(bytes(row.bundle)),
    ),
    EntryType(table=approvals, kinds=("approval",), entry=approval_entry),
    EntryType(table=revocations, kinds=("revocation",), entry=revocation_entry),
    EntryType(table=policies, kinds=("policy",), entry=policy_entry),
    EntryType(
        table=waivers,
        kinds=("waiver",),
        entry=waiver_entry,
        comparable=_where("event", "granted"),
    ),
    EntryType(
        table=waiver_revocations,
        kinds=("waiver",),
        entry=lambda row: _entry(
            "waiver", row.waiver_id, row.revoked_by, row.at, {"reason": row.reason}
        ),
        comparable=_where("event", "revoked", _fields("reason")),
    ),
    EntryType(
        table=tokens,
        kinds=("token",),
        entry=token_entry,
        comparable=_where("action", "created"),
    ),
    EntryType(
        table=token_revocations,
        kinds=("token",),
        entry=lambda row: _entry(
            "token", row.token_id, row.revoked_by, row.revoked_at, {"reason": row.reason}
        ),
        comparable=_where("action", "revoked", _fields("reason")),
    ),
    EntryType(
        table=keysets,
        kinds=("keyset",),
        entry=_keyset,
        comparable=_fields("version", "digest"),
    ),
    EntryType(table=admin_proposals, kinds=("proposal",), entry=proposal_entry),
    EntryType(table=dataset_grants, kinds=("grant",), entry=grant_entry),
    EntryType(
        table=ledger_events,
        kinds=tuple(ENTRY_KINDS.values()),
        entry=lambda row: ledger_event_entry(LedgerScope.of(row), row),
    ),
    EntryType(table=run_events, kinds=("run",), entry=run_event_entry),
)
