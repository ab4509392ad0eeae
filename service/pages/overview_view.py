"""What the first page shows: what needs somebody, and whether the log is in order.

Each list has its newest or most urgent few, by an index, and a way to all of them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import ColumnElement, Connection, Select, select

from affidavit.plan import Reason
from affidavit.service.identity.actor import Actor, Scope
from affidavit.service.lifecycle.standing import Status, status_at
from affidavit.service.pages.approval_view import awaiting
from affidavit.service.pages.audit_view import CheckpointShown, checkpoint_of
from affidavit.service.pages.dataset_view import LedgerLine, datasets
from affidavit.service.policies.rulebook import Rulebook
from affidavit.service.runs.run_tables import run_events, runs
from affidavit.service.tables import certificates

FEW = 6
SOON = timedelta(days=30)
LEDGER_PAGES = 4
"""Pages of ledgers that are looked through for budgets at risk."""
LOOKED_AT = 500
"""Certificates that end first, and runs that failed last, that are looked through."""
NOT_CERTIFIED = ("refused", "under_noised", "undecided")


@dataclass(frozen=True, slots=True, kw_only=True)
class CertificateLine:
    """A certificate in one line."""

    id: str
    name: str | None
    dataset: str | None
    verdict: str
    at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedRun:
    """A run that failed; ``code`` says why, ``not_conformant`` that its record does not hold."""

    id: str
    certificate: str
    code: str
    at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """Something that is wrong with the service itself, and what to do."""

    code: str
    message: str
    remedy: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """Anything that needs somebody, in one line, for the table of all of them."""

    what: str
    subject: str
    name: str
    at: datetime | None
    said: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Overview:
    """The page; lists that the actor may not see are empty."""

    sees_certificates: bool
    at_risk: tuple[LedgerLine, ...]
    more_ledgers: bool
    awaiting: tuple[CertificateLine, ...]
    expiring: tuple[CertificateLine, ...]
    more_expiring: bool
    refused: tuple[CertificateLine, ...]
    failed: tuple[FailedRun, ...]
    checkpoint: CheckpointShown | None
    troubles: tuple[Trouble, ...]
    anything: bool

    @property
    def items(self) -> tuple[Item, ...]:
        """All of it as one table."""
        found = [
            Item(
                what="budget",
                subject=item.dataset,
                name=f"{item.unit}, {item.adjacency}",
                at=None,
                said=f"{item.standing}: ε {item.spent} of {item.epsilon} at δ {item.delta}",
            )
            for item in self.at_risk
        ]
        for what, lines in (
            ("awaiting approval", self.awaiting),
            ("expiring", self.expiring),
            ("not certified", self.refused),
        ):
            found += [
                Item(
                    what=what, subject=line.id, name=line.name or "", at=line.at, said=line.verdict
                )
                for line in lines
            ]
        found += [
            Item(what="failed run", subject=entry.id, name="", at=entry.at, said=entry.code)
            for entry in self.failed
        ]
        found += [
            Item(what="service", subject=trouble.code, name="", at=None, said=trouble.message)
            for trouble in self.troubles
        ]
        return tuple(found)


def overview_view(
    connection: Connection,
    rules: Rulebook,
    actor: Actor,
    reasons: tuple[Reason, ...],
    now: datetime,
) -> Overview:
    """What ``actor`` may see of it; ``reasons`` are against the service's being ready."""
    sees = any(actor.may(scope) for scope in (Scope.SUBMIT, Scope.APPROVE, Scope.AUDIT))
    at_risk, more = _at_risk(connection, rules)
    expiring, unseen = _expiring(connection, now) if sees else ((), False)
    return Overview(
        sees_certificates=sees,
        at_risk=at_risk,
        more_ledgers=more,
        awaiting=_awaiting(connection, now) if sees else (),
        expiring=expiring,
        more_expiring=unseen,
        refused=_refused(connection) if sees else (),
        failed=_failed(connection),
        checkpoint=checkpoint_of(connection),
        troubles=tuple(
            Trouble(code=reason.code, message=reason.message, remedy=reason.remedy or "")
            for reason in reasons
        ),
        anything=_anything(connection),
    )


def _anything(connection: Connection) -> bool:
    """Whether there is a certificate; in the order of an index, or the table is read through."""
    first = select(certificates.c.id).order_by(certificates.c.id).limit(1)
    return connection.execute(first).first() is not None


def _at_risk(connection: Connection, rules: Rulebook) -> tuple[tuple[LedgerLine, ...], bool]:
    """Budgets that are used up or nearly, fullest first, and whether some were not looked at."""
    found: list[LedgerLine] = []
    cursor = None
    for _ in range(LEDGER_PAGES):
        page = datasets(connection, rules, cursor)
        found += [item for item in page.lines if item.standing != "within budget"]
        cursor = page.next
        if cursor is None:
            break
    found.sort(key=lambda line: line.share, reverse=True)
    return tuple(found[:FEW]), cursor is not None


def _expiring(connection: Connection, now: datetime) -> tuple[tuple[CertificateLine, ...], bool]:
    """Certificates in use that end soon, the soonest first, and whether some were not seen."""
    some = (
        _lines(certificates.c.not_after.label("at"))
        .add_columns(status_at(now).label("status"))
        .where(certificates.c.not_after > now, certificates.c.not_after <= now + SOON)
        .order_by(certificates.c.not_after)
        .limit(LOOKED_AT)
        .subquery()
    )
    rows = connection.execute(select(some).order_by(some.c.at)).all()
    found = [
        _certificate(row)
        for row in rows
        if row.status == Status.ACTIVE.value and row.verdict == "certified"
    ]
    return tuple(found[:FEW]), len(rows) == LOOKED_AT and len(found) < FEW


def _awaiting(connection: Connection, now: datetime) -> tuple[CertificateLine, ...]:
    """The newest certificates that nobody can use before others have approved them."""
    query = _lines(certificates.c.created_at.label("at")).where(*awaiting(now))
    return _read(connection, query.order_by(certificates.c.created_at.desc()).limit(FEW))


def _refused(connection: Connection) -> tuple[CertificateLine, ...]:
    """The newest plans that were not certified; each verdict by its index."""
    found: list[CertificateLine] = []
    for verdict in NOT_CERTIFIED:
        query = (
            _lines(certificates.c.created_at.label("at"))
            .where(certificates.c.verdict == verdict)
            .order_by(certificates.c.created_at.desc())
            .limit(FEW)
        )
        found += _read(connection, query)
    return tuple(sorted(found, key=lambda line: line.at, reverse=True)[:FEW])


def _failed(connection: Connection) -> tuple[FailedRun, ...]:
    """Of the runs that failed last, those whose record does not conform first."""
    query = (
        select(run_events.c.run_id, run_events.c.at, run_events.c.body, runs.c.certificate_id)
        .join(runs)
        .where(run_events.c.kind == "failed")
        .order_by(run_events.c.at.desc())
        .limit(LOOKED_AT)
    )
    found = [
        FailedRun(
            id=row.run_id,
            certificate=row.certificate_id,
            code=str(json.loads(row.body).get("code") or "failed"),
            at=row.at,
        )
        for row in connection.execute(query)
    ]
    return tuple(sorted(found, key=lambda run: run.code != "not_conformant")[:FEW])


def _lines(at: ColumnElement[datetime]) -> Select[Any]:
    table = certificates.c
    return select(table.id, table.name, table.dataset, table.verdict, at)


def _read(connection: Connection, query: Select[Any]) -> tuple[CertificateLine, ...]:
    return tuple(_certificate(row) for row in connection.execute(query))


def _certificate(row: Any) -> CertificateLine:
    return CertificateLine(
        id=row.id, name=row.name, dataset=row.dataset, verdict=row.verdict, at=row.at
    )
