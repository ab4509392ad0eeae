"""The entry types of all tables whose rows are logged.

A new table whose rows are logged needs an entry type here. Entries of a kind without an entry type
are verified in the tree only.
"""

from __future__ import annotations

from datetime import datetime
from functools import lru_cache
from typing import Any

from affidavit.service.certificates.issue_status import DECISIONS
from affidavit.service.identity.tokens import token_entry
from affidavit.service.ledger.integrity import ENTRY_KINDS
from affidavit.service.ledger.integrity import event_entry as ledger_event_entry
from affidavit.service.ledger.repository import grant_entry
from affidavit.service.ledger.state import LedgerScope
from affidavit.service.log.entries import entry_of
from affidavit.service.log.entry_type import Body, EntryType, fields, fields_where
from affidavit.service.operation.four_eyes import proposal_entry
from affidavit.service.policies.store import policy_entry, waiver_entry
from affidavit.service.runs.repository import event_entry as run_event_entry
from affidavit.service.tables.certificates import certificates
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

MAX_ISSUES = 64
"""Entries of certificates that are remembered, because a running service compares the newest."""


def _keyset(row: Any) -> LogEntry:
    body = {"version": row.version, "digest": row.digest}
    return _entry("keyset", f"keyset:{row.version}", row.publisher, row.published_at, body)


def _entry(kind: str, subject: str, actor: str, at: datetime, body: Body) -> LogEntry:
    return LogEntry(kind=kind, subject=subject, actor=actor, at=at, body=body)


_issue = lru_cache(MAX_ISSUES)(entry_of)


ENTRY_TYPES = (
    EntryType(
        table=certificates,
        kinds=("certificate", "refusal"),
        entry=lambda row: _issue(bytes(row.bundle)),
        subject=certificates.c.id,
        grows=True,
    ),
    *DECISIONS,
    EntryType(table=policies, kinds=("policy",), entry=policy_entry),
    EntryType(
        table=waivers,
        kinds=("waiver",),
        entry=waiver_entry,
        comparable=fields_where("event", "granted"),
    ),
    EntryType(
        table=waiver_revocations,
        kinds=("waiver",),
        entry=lambda row: _entry(
            "waiver", row.waiver_id, row.revoked_by, row.at, {"reason": row.reason}
        ),
        comparable=fields_where("event", "revoked", fields("reason")),
    ),
    EntryType(
        table=tokens,
        kinds=("token",),
        entry=token_entry,
        comparable=fields_where("action", "created"),
    ),
    EntryType(
        table=token_revocations,
        kinds=("token",),
        entry=lambda row: _entry(
            "token", row.token_id, row.revoked_by, row.revoked_at, {"reason": row.reason}
        ),
        comparable=fields_where("action", "revoked", fields("reason")),
    ),
    EntryType(
        table=keysets,
        kinds=("keyset",),
        entry=_keyset,
        comparable=fields("version", "digest"),
    ),
    EntryType(table=admin_proposals, kinds=("proposal",), entry=proposal_entry),
    EntryType(table=dataset_grants, kinds=("grant",), entry=grant_entry, ordered_by="dataset"),
    EntryType(
        table=ledger_events,
        kinds=tuple(ENTRY_KINDS.values()),
        entry=lambda row: ledger_event_entry(LedgerScope.of(row), row),
        joined=(ledgers.c.dataset, ledgers.c.unit, ledgers.c.adjacency),
        grows=True,
    ),
    EntryType(
        table=run_events,
        kinds=("run",),
        entry=run_event_entry,
        subject=run_events.c.run_id,
        grows=True,
    ),
)
