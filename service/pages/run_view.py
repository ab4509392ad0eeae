"""What the pages of runs show: the queue, how far a run is, how it ended, and what it came to.

A run that failed says so first, with the code of its end. What the worker reported is read
from the provenance that it signed; the service checked the signature before it settled.
"""

from __future__ import annotations

import base64
import binascii
import json
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, select

from affidavit.accountants import decimal_up
from affidavit.service.ledger import document
from affidavit.service.ledger import rows as ledger_rows
from affidavit.service.ledger.rows import Reservation
from affidavit.service.runs import rows
from affidavit.service.runs.rows import Run
from affidavit.service.runs.run_tables import run_events
from affidavit.service.tables import certificates

DIGITS = 6
ENDED_BADLY = frozenset({"failed", "cancelled"})
TELLS = {
    "queued": "asked for, waiting for a worker",
    "claimed": "claimed by a worker",
    "requeued": "given back, waiting again",
    "cancel_asked": "asked to stop",
    "running": "first step begun; its budget is committed",
    "resumed": "gone on with by another worker",
    "settled": "settled: the record conforms to the certificate",
    "failed": "failed",
    "cancelled": "cancelled",
}
"""What each event of a run means, in a few words."""
_WORDS = ("worker", "code", "message", "steps_charged")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunLine:
    """A run in one line; ``steps`` were reported, and ``steps_charged`` of one that ended."""

    id: str
    state: str
    queue: str
    priority: int
    certificate: str
    name: str | None
    dataset: str | None
    worker: str | None
    steps: int
    steps_certified: int
    steps_charged: int | None
    cancel_asked: bool
    code: str | None
    by: str
    requested_at: datetime
    changed_at: datetime


@dataclass(frozen=True, kw_only=True, slots=True)
class Runs:
    """A page of runs; ``next`` is the cursor of the following one."""

    lines: tuple[RunLine, ...]
    next: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class EventLine:
    """Something that happened to a run."""

    seq: int
    kind: str
    tells: str
    at: datetime
    actor: str
    fence: int | None
    worker: str | None
    code: str | None
    message: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class FindingLine:
    """A finding of conformance; a noted one leaves the guarantee as it is."""

    code: str
    line: int
    message: str
    noted: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """What the worker's signed provenance says of the record."""

    digest: str | None
    conformant: bool
    charged: int
    released: int
    to_charge: int
    findings: tuple[FindingLine, ...]
    began: str
    ended: str
    builder: str
    subject: str
    subject_digest: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RunView:
    """One run: how far it is, what happened, what it did, and what the ledger says of it.

    ``so_far`` bounds what the first ``so_far_steps`` steps cost, where that was asked for.
    """

    line: RunLine
    ended: bool
    certified_steps: int
    share: float
    reservation: str
    reservation_state: str
    reserved: str
    charged: str
    steps_charged: int | None
    data: str
    model: str
    output: str
    time_limit: int | None
    message: str | None
    events: tuple[EventLine, ...]
    record: Record | None
    unit: str
    adjacency: str
    so_far: str | None = None
    so_far_steps: int | None = None

    @property
    def percent(self) -> int:
        """How much of the certified steps is done, in whole per cent, rounded down."""
        return int(100 * self.share)


def runs_of(connection: Connection, found: list[Run], cursor: str | None) -> Runs:
    """The page of ``found``, with the names of their certificates' plans."""
    wanted = {item.certificate_id for item in found}
    query = select(certificates.c.id, certificates.c.name, certificates.c.dataset).where(
        certificates.c.id.in_(wanted)
    )
    names = {row.id: (row.name, row.dataset) for row in connection.execute(query)}
    return Runs(
        lines=tuple(
            _line(entry, *names.get(entry.certificate_id, (None, None))) for entry in found
        ),
        next=cursor,
    )


def run_of(connection: Connection, run_id: str) -> tuple[RunView, Reservation]:
    """One run with its reservation; raises ``UnknownRun``."""
    run = rows.find(connection, run_id)
    reservation = ledger_rows.find_reservation(connection, run.reservation_id)
    assert reservation is not None
    query = select(run_events).where(run_events.c.run_id == run_id).order_by(run_events.c.seq)
    events = tuple(_event(row) for row in connection.execute(query))
    outcome = run.outcome or {}
    charged = outcome.get("steps_charged")
    done = run.steps if charged is None else charged
    return RunView(
        line=_line(run, reservation.name, reservation.scope.dataset),
        ended=run.outcome is not None,
        certified_steps=reservation.certified_steps,
        share=min(1.0, done / reservation.certified_steps),
        reservation=reservation.id,
        reservation_state=reservation.state,
        reserved=_epsilon(reservation.cost),
        charged=_epsilon(reservation.charged),
        steps_charged=charged,
        data=run.wanted["data"],
        model=run.wanted["model"],
        output=run.wanted["output"],
        time_limit=run.wanted["time_limit"],
        message=outcome.get("message"),
        events=events,
        record=record_said(outcome.get("provenance")),
        unit=reservation.scope.unit,
        adjacency=reservation.scope.adjacency,
    ), reservation


def _line(run: Run, name: str | None, dataset: str | None) -> RunLine:
    return RunLine(
        id=run.id,
        state=run.state,
        queue=run.queue,
        priority=run.priority,
        certificate=run.certificate_id,
        name=name,
        dataset=dataset,
        worker=run.worker,
        steps=run.steps,
        steps_certified=run.certified_steps,
        steps_charged=(run.outcome or {}).get("steps_charged"),
        cancel_asked=run.cancel_asked,
        code=(run.outcome or {}).get("code"),
        by=run.requested_by,
        requested_at=run.requested_at,
        changed_at=run.changed_at,
    )


def _event(row: Any) -> EventLine:
    body = json.loads(row.body)
    said = {name: body.get(name) for name in _WORDS}
    return EventLine(
        seq=row.seq,
        kind=row.kind,
        tells=TELLS.get(row.kind, row.kind),
        at=row.at,
        actor=row.actor,
        fence=row.fence,
        worker=said["worker"],
        code=said["code"],
        message=said["message"],
    )


def _epsilon(cost: Any) -> str:
    said = document.cost_document(cost)["epsilon"]
    return "not bounded" if said == "Infinity" else decimal_up(float(said), DIGITS)


def record_said(envelope: Any) -> Record | None:
    """What a provenance that was checked when it came says; None where there is none."""
    if envelope is None:
        return None
    try:
        statement = json.loads(base64.b64decode(envelope["payload"], validate=True))
        return _said(statement)
    except (binascii.Error, KeyError, IndexError, TypeError, ValueError):
        return None


def _said(statement: Any) -> Record:
    details = statement["predicate"]["runDetails"]
    subject, found = (
        statement["subject"][0],
        details["byproducts"][0]["annotations"]["conformance"],
    )
    return Record(
        digest=found["head"],
        conformant=found["conformant"],
        charged=found["steps"]["charged"],
        released=found["steps"]["released"],
        to_charge=found["steps"]["to_charge"],
        findings=tuple(
            FindingLine(
                code=str(item["code"]),
                line=int(item["line"]),
                message=str(item["message"]),
                noted=bool(item["noted"]),
            )
            for item in found["findings"]
        ),
        began=str(details["metadata"]["startedOn"]),
        ended=str(details["metadata"]["finishedOn"]),
        builder=str(details["builder"]["id"]),
        subject=str(subject["name"]),
        subject_digest=str(subject["digest"]["sha256"]),
    )
