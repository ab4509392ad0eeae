"""What the pages of approvals show: what waits for a decision, and what would be approved.

An approver decides about an envelope and sees what is new in it: the plan field by field
against the last certificate of the same plan name and data set that may be used, and the
guarantee beside its. Where there is none before it, all of it is new, and the page says so.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, Connection, select, tuple_

from affidavit.accountants import decimal_up
from affidavit.plan import ABSENT, changes, plan_from
from affidavit.service.cursors import cursor_at, read_cursor
from affidavit.service.lifecycle.issuing import statement_of
from affidavit.service.lifecycle.lifecycle_tables import approvals
from affidavit.service.lifecycle.standing import (
    REJECTED,
    REVOKED,
    SUPERSEDED,
    Status,
    key_revoked_at,
)
from affidavit.service.store import StoredCertificate, current
from affidavit.service.tables import certificates, requests

LISTED = 50
DIGITS = 6
MOST_ASKERS = 5
SHOWN = 2000
"""Characters of a value that are shown."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PendingLine:
    """A certificate that waits for approvals; ε is a decimal rounded up."""

    id: str
    untrusted: bool
    name: str | None
    dataset: str | None
    verdict: str
    epsilon: str | None
    delta: str | None
    adjacency: str
    given: int
    required: int
    created_at: datetime
    not_after: datetime


_LINE = tuple(PendingLine.__dataclass_fields__)
_COLUMNS = {
    "epsilon": "epsilon_upper",
    "given": "approvals_given",
    "required": "approvals_required",
}
"""Names of the store that are others than a line's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pending:
    """A page of what waits; ``next`` is the cursor of the following one."""

    lines: tuple[PendingLine, ...]
    next: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class FieldChange:
    """A field that differs; None where it is not there on that side."""

    pointer: str
    before: str | None
    after: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class DecisionLine:
    """A decision that was made about an issue of this certificate."""

    issue: int
    decision: str
    approver: str
    at: datetime
    comment: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Guarantee:
    """What a certificate says, in the words that a comparison needs."""

    id: str
    verdict: str
    epsilon: str | None
    delta: str | None
    adjacency: str
    unit: str
    noise: str | None
    created_at: datetime


@dataclass(frozen=True, kw_only=True, slots=True)
class ToDecide:
    """One certificate with everything that a decision about it rests on."""

    line: PendingLine
    envelope: str
    issue: int
    status: str
    guarantee: Guarantee
    base: Guarantee | None
    changes: tuple[FieldChange, ...]
    decisions: tuple[DecisionLine, ...]
    asked_by: tuple[str, ...]
    policy: str
    waivers: tuple[str, ...]
    warnings: tuple[str, ...]


def pending(connection: Connection, now: datetime, cursor: str | None) -> Pending:
    """What waits for approvals, latest first; raises ``InvalidCursor``."""
    place = (certificates.c.created_at, certificates.c.id, certificates.c.untrusted)
    columns = [certificates.c[_COLUMNS.get(name, name)].label(name) for name in _LINE]
    query = select(*columns).where(*awaiting(now)).order_by(*(item.desc() for item in place))
    if cursor is not None:
        after = tuple_(*read_cursor(cursor, str, bool), types=[entry.type for entry in place])
        query = query.where(tuple_(*place) < after)
    found = connection.execute(query.limit(LISTED + 1)).mappings().all()
    lines = tuple(_line(dict(row)) for row in found[:LISTED])
    more = len(found) > LISTED
    last = lines[-1] if more else None
    return Pending(
        lines=lines,
        next=None if last is None else cursor_at(last.created_at, last.id, last.untrusted),
    )


def awaiting(now: datetime) -> tuple[ColumnElement[bool], ...]:
    """The conditions of a row of ``certificates`` that waits for approvals at ``now``."""
    return (
        certificates.c.approvals_given < certificates.c.approvals_required,
        certificates.c.not_after >= now,
        ~SUPERSEDED,
        ~REVOKED,
        ~REJECTED,
        ~key_revoked_at(now),
    )


def to_decide(connection: Connection, certificate_id: str) -> ToDecide | None:
    """One certificate as it stands now, with its diff; None if there is none of that id."""
    found = current(connection, certificate_id)
    if found is None:
        return None
    base = _base(connection, found)
    said = statement_of(found)["predicate"]
    return ToDecide(
        line=_line({name: getattr(found, _COLUMNS.get(name, name)) for name in _LINE}),
        envelope=found.envelope_digest,
        issue=found.issue,
        status=found.status.value,
        guarantee=_guarantee(found),
        base=None if base is None else _guarantee(base),
        changes=() if base is None else differences(base, found),
        decisions=_decisions(connection, found),
        asked_by=_asked_by(connection, found),
        policy=f"{said['policy']['name']} v{said['policy']['version']}",
        waivers=tuple(f"{item['code']}: {item['waiver']['reason']}" for item in said["waived"]),
        warnings=tuple(entry["message"] for entry in said["warnings"]),
    )


def differences(before: StoredCertificate, after: StoredCertificate) -> tuple[FieldChange, ...]:
    """The plans of two certificates, field by field where they differ."""
    first, second = (plan_from(statement_of(item)["predicate"]["plan"]) for item in (before, after))
    return tuple(
        FieldChange(
            pointer=change.pointer, before=_shown(change.before), after=_shown(change.after)
        )
        for change in changes(first, second)
    )


def _base(connection: Connection, found: StoredCertificate) -> StoredCertificate | None:
    """The last usable certificate of that plan name and data set before ``found``, if any."""
    if found.name is None:
        return None
    query = (
        select(certificates.c.id)
        .where(
            certificates.c.name == found.name,
            certificates.c.dataset == found.dataset,
            certificates.c.id != found.id,
            certificates.c.created_at < found.created_at,
            certificates.c.verdict == "certified",
            certificates.c.approvals_given >= certificates.c.approvals_required,
            ~SUPERSEDED,
            ~REVOKED,
        )
        .order_by(certificates.c.created_at.desc())
        .limit(1)
    )
    known = connection.execute(query).scalar()
    return None if known is None else current(connection, known)


def _guarantee(found: StoredCertificate) -> Guarantee:
    said = statement_of(found)["predicate"]
    noise = (said.get("noise_multiplier") or {}).get("joint")
    return Guarantee(
        id=found.id,
        verdict=found.verdict,
        epsilon=_up(found.epsilon_upper),
        delta=_up(found.delta),
        adjacency=found.adjacency,
        unit=said["plan"]["dataset"]["unit"],
        noise=None if noise is None else f"{float(noise):.6g}",
        created_at=found.created_at,
    )


def _line(row: dict[str, Any]) -> PendingLine:
    return PendingLine(**{**row, "epsilon": _up(row["epsilon"]), "delta": _up(row["delta"])})


def _decisions(connection: Connection, found: StoredCertificate) -> tuple[DecisionLine, ...]:
    query = (
        select(*(approvals.c[name] for name in DecisionLine.__dataclass_fields__))
        .where(
            approvals.c.certificate_id == found.id,
            approvals.c.untrusted == found.untrusted,
        )
        .order_by(approvals.c.id)
    )
    return tuple(DecisionLine(**row) for row in connection.execute(query).mappings())


def _asked_by(connection: Connection, found: StoredCertificate) -> tuple[str, ...]:
    query = (
        select(requests.c.requester)
        .where(requests.c.certificate_id == found.id)
        .distinct()
        .limit(MOST_ASKERS)
    )
    return tuple(sorted(connection.execute(query).scalars()))


def is_pending(found: ToDecide) -> bool:
    """Whether a decision can still be made."""
    return found.status == Status.AWAITING_APPROVAL.value


def _up(value: float | None) -> str | None:
    return None if value is None else decimal_up(value, DIGITS)


def _shown(value: Any) -> str | None:
    """A value as text, a long one cut; the certificate has all of it."""
    if value is ABSENT:
        return None
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 1]}…"
