"""The entry types of all tables whose rows are logged.

A new table whose rows are logged needs an entry type here. Entries of a kind without an entry type
are verified in the tree only.

The log does not name the team of a certificate or a run, which has no entry either if its row names
another one: a certificate's id follows from its team, and a run has that of its certificate.
"""

from __future__ import annotations

from datetime import datetime
from functools import lru_cache
from typing import Any

from sqlalchemy import ColumnElement, and_, select

from affidavit.certificate import is_of_team
from affidavit.service.certificates.issue_status import DECISIONS, same_issue
from affidavit.service.core.teams import team_in_id
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
from affidavit.service.runs.repository import test_entry
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
from affidavit.service.tables.runs import run_events, run_tests, runs
from affidavit.trust import statement_in
from affidavit.trust.log import LogEntry

MAX_ISSUES = 64
"""Entries of certificates that are remembered, because a running service compares the newest."""


def _keyset(row: Any) -> LogEntry:
    body = {"version": row.version, "digest": row.digest}
    return _entry("keyset", f"keyset:{row.version}", row.publisher, row.published_at, body)


def _entry(kind: str, subject: str, actor: str, at: datetime, body: Body) -> LogEntry:
    return LogEntry(kind=kind, subject=subject, actor=actor, at=at, body=body)


@lru_cache(MAX_ISSUES)
def _issue(bundle: bytes, team: str) -> LogEntry:
    entry = entry_of(bundle)
    if not is_of_team(statement_in(bundle)["predicate"], team_in_id(team)):
        raise ValueError(f"its id is not one of the team {team}")
    return entry


_OWNER = (
    select(certificates.c.team)
    .where(same_issue(runs))
    .correlate(runs)
    .scalar_subquery()
    .label("owner")
)
"""The team of the certificate of a row of ``runs``."""


def _run_event(row: Any) -> LogEntry:
    if row.owner not in (None, row.team):  # None if the certificate is gone, as its table says
        raise ValueError(f"its run is of the team {row.team}, and its certificate of {row.owner}")
    return run_event_entry(row)


def _about_ledger(subject: str) -> ColumnElement[bool]:
    """Return the condition for the events of a reservation, or for the budgets of a ledger."""
    match subject.rsplit("/", 2):
        case [dataset, unit, adjacency]:
            return and_(
                ledger_events.c.reservation_id.is_(None),
                ledgers.c.dataset == dataset,
                ledgers.c.unit == unit,
                ledgers.c.adjacency == adjacency,
            )
    return ledger_events.c.reservation_id == subject


ENTRY_TYPES = (
    EntryType(
        table=certificates,
        kinds=("certificate", "refusal"),
        entry=lambda row: _issue(bytes(row.bundle), row.team),
        about=lambda subject: certificates.c.id == subject,
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
        about=_about_ledger,
        grows=True,
    ),
    EntryType(
        table=run_events,
        kinds=("run",),
        entry=_run_event,
        joined=(runs.c.team, _OWNER),
        about=lambda subject: run_events.c.run_id == subject,
        grows=True,
    ),
    EntryType(
        table=run_tests,
        kinds=("replay", "audit"),
        entry=test_entry,
        about=lambda subject: run_tests.c.run_id == subject,
        grows=True,
    ),
)
