"""Rows of runs: reading them with what happened, and adding an event with its log entry."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from sqlalchemy import Connection, Row, Select, bindparam, func, insert, select, tuple_, update

from affidavit.service.ledger.ledger_tables import reservations
from affidavit.service.log import entries
from affidavit.service.runs.attempts import Attempt
from affidavit.service.runs.refusals import UnknownRun
from affidavit.service.runs.run_tables import run_events, run_leases, runs

Kind = Literal[
    "queued",
    "claimed",
    "requeued",
    "cancel_asked",
    "running",
    "resumed",
    "settled",
    "failed",
    "cancelled",
]
STATES: dict[str, str] = {
    "queued": "queued",
    "requeued": "queued",
    "claimed": "claimed",
    "running": "running",
    "resumed": "running",
    "settled": "settled",
    "failed": "failed",
    "cancelled": "cancelled",
}
"""The state of a run after an event; asking for its end does not change it."""
ENDED = frozenset({"settled", "failed", "cancelled"})
ONCE: dict[str, str] = {
    "queued": "queued",
    "cancel_asked": "cancel_asked",
    "running": "running",
    "settled": "end",
    "failed": "end",
    "cancelled": "end",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """A run as it stands: what was asked for, and what happened since.

    ``outcome`` is the body of the event that ended it. ``steps`` is what its worker said last,
    of ``certified_steps``, with ``head`` of its record; ``granted`` is how many may have been
    charged by all who held it, ``previous`` the token under which it was last begun.
    """

    id: str
    certificate_id: str
    issue: int
    untrusted: bool
    plan_digest: str
    reservation_id: str
    queue: str
    priority: int
    wanted: dict[str, Any]
    requested_by: str
    requested_at: datetime
    state: str
    begun: bool
    cancel_asked: bool
    changed_at: datetime
    worker: str | None
    fence: int
    steps: int
    certified_steps: int
    granted: int
    previous: int | None
    head: str | None
    began_at: datetime | None
    attempts: tuple[Attempt, ...]
    outcome: dict[str, Any] | None
    request_digest: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Filters:
    """Which runs to list; None lets all through. The times themselves are left out."""

    state: str | None = None
    queue: str | None = None
    certificate_id: str | None = None
    requested_by: str | None = None
    requested_after: datetime | None = None
    requested_before: datetime | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Happened:
    """An event of a run; ``body`` is what the log says of it too."""

    seq: int
    kind: str
    at: datetime
    actor: str
    fence: int | None
    body: dict[str, Any]


# Built once, like all that each step of a run asks: putting a statement together takes as long as
# running it.
_HELD = ("worker", "fence", "steps", "granted", "previous", "head")
_WITH_LEASE: Select[Any] = (
    select(*runs.c, *(run_leases.c[name] for name in _HELD), reservations.c.certified_steps)
    .join_from(runs, run_leases)
    .join_from(runs, reservations)
)
_TOLD = [run_events.c[name].label(f"event_{name}") for name in ("kind", "at", "fence", "body")]
_RUN = (
    _WITH_LEASE.add_columns(*_TOLD)
    .join_from(runs, run_events)
    .where(runs.c.id == bindparam("wanted"))
    .order_by(run_events.c.seq)
)
"""A run, as often as something happened to it."""
_LOCK = select(run_leases).where(run_leases.c.run_id == bindparam("wanted")).with_for_update()
_CHANGE = update(run_leases).where(run_leases.c.run_id == bindparam("wanted"))


def history(connection: Connection, run_id: str) -> list[Happened]:
    """The events of a run, in their order."""
    query = select(run_events).where(run_events.c.run_id == run_id).order_by(run_events.c.seq)
    return [
        Happened(
            seq=row.seq,
            kind=row.kind,
            at=row.at,
            actor=row.actor,
            fence=row.fence,
            body=json.loads(row.body),
        )
        for row in connection.execute(query)
    ]


def progress(connection: Connection, run_ids: Collection[str]) -> dict[str, tuple[int, int]]:
    """The number of the last event of each run, and the steps that were reported."""
    last = select(func.max(run_events.c.seq)).where(run_events.c.run_id == run_leases.c.run_id)
    query = select(run_leases.c.run_id, last.scalar_subquery(), run_leases.c.steps)
    found = connection.execute(query.where(run_leases.c.run_id.in_(run_ids)))
    return {run_id: (seq, steps) for run_id, seq, steps in found}


def find(connection: Connection, run_id: str) -> Run:
    """The run of that id; raises ``UnknownRun``."""
    found = connection.execute(_RUN, {"wanted": run_id}).all()
    if not found:
        raise UnknownRun(f"there is no run {run_id}.", "GET /v1/runs lists them.")
    return _run(found[0], found)


def page(
    connection: Connection, filters: Filters, after: tuple[datetime, str] | None, limit: int
) -> list[Run]:
    """At most ``limit`` runs that pass ``filters``, latest first, beyond the one ``after``."""
    query = _WITH_LEASE.order_by(runs.c.requested_at.desc(), runs.c.id.desc()).limit(limit)
    for name in ("queue", "certificate_id", "requested_by"):
        if (wanted := getattr(filters, name)) is not None:
            query = query.where(runs.c[name] == wanted)
    if filters.state in ENDED:
        ended = (run_events.c.once == "end", run_events.c.kind == filters.state)
        query = query.join(run_events, run_events.c.run_id == runs.c.id).where(*ended)
    elif filters.state is not None:
        query = query.where(run_leases.c.state == filters.state)
    if filters.requested_after is not None:
        query = query.where(runs.c.requested_at > filters.requested_after)
    if filters.requested_before is not None:
        query = query.where(runs.c.requested_at < filters.requested_before)
    if after is not None:
        place = tuple_(*after, types=[runs.c.requested_at.type, runs.c.id.type])
        query = query.where(tuple_(runs.c.requested_at, runs.c.id) < place)
    return _read(connection, connection.execute(query).all())


def repeated(connection: Connection, actor: str, key: str | None) -> Run | None:
    """The run that this actor's idempotency key led to, if there is one."""
    if key is None:
        return None
    query = _WITH_LEASE.where(runs.c.requested_by == actor, runs.c.idempotency_key == key)
    found = _read(connection, connection.execute(query).all())
    return found[0] if found else None


def lock(connection: Connection, run_id: str) -> Row[Any]:
    """The lease of a run, held by this transaction; raises ``UnknownRun``."""
    row = connection.execute(_LOCK, {"wanted": run_id}).first()
    if row is None:
        raise UnknownRun(f"there is no run {run_id}.", "GET /v1/runs lists them.")
    return row


def change_lease(connection: Connection, run_id: str, **values: Any) -> None:
    """Change the lease of a run that this transaction holds."""
    connection.execute(_CHANGE, {"wanted": run_id, **values})


_NEXT = (
    select(func.coalesce(func.max(run_events.c.seq), 0) + 1)
    .where(run_events.c.run_id == bindparam("wanted"))
    .scalar_subquery()
)
_EVENT = insert(run_events).values(seq=_NEXT).returning(run_events.c.seq)


def add_event(
    connection: Connection,
    run_id: str,
    kind: Kind,
    body: Mapping[str, Any],
    *,
    actor: str,
    at: datetime,
    fence: int | None = None,
    follows: str | None = "queued",
) -> None:
    """Write what happened, with its log entry, in the transaction of ``connection``."""
    event = {
        "wanted": run_id,
        "run_id": run_id,
        "kind": kind,
        "once": ONCE.get(kind),
        "follows": follows,
        "fence": fence,
        "at": at,
        "actor": actor,
        "body": json.dumps(body, sort_keys=True),
    }
    seq = int(connection.execute(_EVENT, event).scalar_one())
    entries.append(connection, "run", run_id, entry_body(kind, seq, body), actor=actor, at=at)


def entry_body(kind: str, seq: int, body: Mapping[str, Any]) -> dict[str, Any]:
    """What the log says of an event."""
    return {"event": kind, "seq": seq, **body}


def _read(connection: Connection, rows: Sequence[Row[Any]]) -> list[Run]:
    ids = [row.id for row in rows]
    happened: dict[str, list[Row[Any]]] = defaultdict(list)
    query = select(run_events.c.run_id, *_TOLD).where(run_events.c.run_id.in_(ids))
    for event in connection.execute(query.order_by(run_events.c.seq)):
        happened[event.run_id].append(event)
    return [_run(row, happened[row.id]) for row in rows]


def _run(row: Row[Any], events: Sequence[Row[Any]]) -> Run:
    kinds = [event.event_kind for event in events]
    ends = [event for event in events if event.event_kind in ENDED]
    moved = [kind for kind in kinds if kind in STATES]
    return Run(
        id=row.id,
        certificate_id=row.certificate_id,
        issue=row.issue,
        untrusted=row.untrusted,
        plan_digest=row.plan_digest,
        reservation_id=row.reservation_id,
        queue=row.queue,
        priority=row.priority,
        wanted=json.loads(row.wanted),
        requested_by=row.requested_by,
        requested_at=row.requested_at,
        state=ends[0].event_kind if ends else STATES[moved[-1]],
        begun="running" in kinds,
        cancel_asked="cancel_asked" in kinds,
        changed_at=events[-1].event_at,
        worker=row.worker,
        fence=row.fence,
        steps=row.steps,
        certified_steps=row.certified_steps,
        granted=row.granted,
        previous=row.previous,
        head=row.head,
        began_at=next((event.event_at for event in events if event.event_kind == "running"), None),
        attempts=tuple(
            Attempt.of(event.event_fence, json.loads(event.event_body))
            for event in events
            if event.event_kind == "requeued"
        ),
        outcome=json.loads(ends[0].event_body) if ends else None,
        request_digest=row.request_digest,
    )
