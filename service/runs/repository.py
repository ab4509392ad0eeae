"""The rows of runs: runs with their events, leases, and the records that workers send.

An event is added with its log entry, in the transaction of the connection. A part of a record
follows the part before it and never changes; sent again unchanged, it is accepted again.

>>> Attempt.of(1, {"begun": True, "further": False, "granted": 4, "head": None}).granted
4
>>> Attempt.of(1, {"code": "lease_lost"}).begun
False
"""

from __future__ import annotations

import json
import zlib
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal, Self

from sqlalchemy import Connection, Row, Select, bindparam, func, insert, select, tuple_, update

from affidavit.certificate import SearchOpening
from affidavit.service.errors import DomainError
from affidavit.service.ledger.ledger_tables import reservations
from affidavit.service.log import entries
from affidavit.service.log.log_tables import log_entries
from affidavit.service.runs.run_tables import run_events, run_leases, run_records, runs

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


MOST_RECORD_BYTES = 256 * 1024 * 1024
"""The largest record that is checked here; some 10^5 steps have half of it."""


class UnknownRun(DomainError):
    """No run has this id."""

    code = "not_found"
    status = 404


class RecordRefused(DomainError):
    """The part of a run's record does not follow the one before, or is too large."""

    code = "record_refused"


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """A worker's attempt at a run that another continued, as the service knows it.

    ``granted`` steps were allowed to it and those before it together; ``further`` says that it
    finished one. ``head`` is the digest of a line of its record, as last reported.
    """

    fence: int
    begun: bool
    further: bool
    granted: int
    head: str | None

    @classmethod
    def of(cls, fence: int, body: Mapping[str, Any]) -> Self:
        """The attempt that a ``requeued`` event describes."""
        return cls(
            fence=fence,
            begun=body.get("begun", False),
            further=body.get("further", False),
            granted=body.get("granted", 0),
            head=body.get("head"),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredRun:
    """A run as it stands: what was requested, and what happened since.

    ``outcome`` is the body of the event that ended it. ``steps`` is what its worker reported last,
    of ``certified_steps``, with ``head`` of its record; ``granted`` is how many may have been
    charged by all who held it, ``previous`` the token under which it was last begun. ``search`` is
    secret.
    """

    id: str
    certificate_id: str
    issue: int
    untrusted: bool
    plan_digest: str
    reservation_id: str
    queue: str
    wanted: dict[str, Any]
    requested_by: str
    requested_at: datetime
    state: str
    begun: bool
    cancel_asked: bool
    changed_at: datetime
    worker: str | None
    fence: int
    job: int
    steps: int
    certified_steps: int
    granted: int
    previous: int | None
    head: str | None
    search: SearchOpening | None
    began_at: datetime | None
    attempts: tuple[Attempt, ...]
    outcome: dict[str, Any] | None
    request_digest: str | None

    @property
    def requirements(self) -> dict[str, int]:
        """GPUs, and memory in MiB; a run of an earlier version said only whether it needs a GPU."""
        stored = self.wanted["requirements"]
        return {"gpus": int(stored.get("gpus", stored.get("gpu", 0))), "memory": stored["memory"]}


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
class StoredRunEvent:
    """An event of a run; ``body`` is what the log says of it too."""

    seq: int
    kind: str
    at: datetime
    actor: str
    fence: int | None
    body: dict[str, Any]


# Built once: composing a statement takes as long as running it.
_LEASE = ("worker", "fence", "job", "steps", "granted", "previous", "search", "head")
_WITH_LEASE: Select[Any] = (
    select(*runs.c, *(run_leases.c[name] for name in _LEASE), reservations.c.certified_steps)
    .join_from(runs, run_leases)
    .join_from(runs, reservations)
)
_TOLD = [run_events.c[name].label(f"event_{name}") for name in ("kind", "at", "fence", "body")]
_RUN = (
    _WITH_LEASE.add_columns(*_TOLD)
    .join_from(runs, run_events)
    .where(runs.c.id == bindparam("run"))
    .order_by(run_events.c.seq)
)
"""A run, as often as something happened to it."""
_LOCK = select(run_leases).where(run_leases.c.run_id == bindparam("run")).with_for_update()
_CHANGE = update(run_leases).where(run_leases.c.run_id == bindparam("run"))


def history(connection: Connection, run_id: str) -> list[StoredRunEvent]:
    """The events of a run, in order."""
    query = select(run_events).where(run_events.c.run_id == run_id).order_by(run_events.c.seq)
    return [
        StoredRunEvent(
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
    rows = connection.execute(query.where(run_leases.c.run_id.in_(run_ids)))
    return {run_id: (seq, steps) for run_id, seq, steps in rows}


def find(connection: Connection, run_id: str) -> StoredRun:
    """The run of that id; raises ``UnknownRun``."""
    rows = connection.execute(_RUN, {"run": run_id}).all()
    if not rows:
        raise _unknown(run_id)
    return _run(rows[0], rows)


def page(
    connection: Connection, filters: Filters, after: tuple[datetime, str] | None, limit: int
) -> list[StoredRun]:
    """At most ``limit`` runs that pass ``filters``, latest first, beyond the one ``after``."""
    query = _WITH_LEASE.order_by(runs.c.requested_at.desc(), runs.c.id.desc()).limit(limit)
    for name in ("queue", "certificate_id", "requested_by"):
        if (value := getattr(filters, name)) is not None:
            query = query.where(runs.c[name] == value)
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


def repeated(connection: Connection, actor: str, key: str | None) -> StoredRun | None:
    """The run that this actor's idempotency key led to, if there is one."""
    if key is None:
        return None
    query = _WITH_LEASE.where(runs.c.requested_by == actor, runs.c.idempotency_key == key)
    return next(iter(_read(connection, connection.execute(query).all())), None)


def lock(connection: Connection, run_id: str) -> Row[Any]:
    """The lease of a run, held by this transaction; raises ``UnknownRun``."""
    row = connection.execute(_LOCK, {"run": run_id}).first()
    if row is None:
        raise _unknown(run_id)
    return row


def _unknown(run_id: str) -> UnknownRun:
    return UnknownRun(f"run {run_id} not found.", "GET /v1/runs lists all runs.")


def change_lease(connection: Connection, run_id: str, **values: Any) -> None:
    """Change the lease of a run that this transaction holds."""
    connection.execute(_CHANGE, {"run": run_id, **values})


_NEXT = (
    select(func.coalesce(func.max(run_events.c.seq), 0) + 1)
    .where(run_events.c.run_id == bindparam("run"))
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
        "run": run_id,
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


def log_record(
    connection: Connection, run_id: str, fence: int, head: str, *, actor: str, at: datetime
) -> None:
    """Log the digest of the first line of a record, which commits to data and canaries."""
    body = {"fence": fence, "record": head}
    entries.append(connection, "record", run_id, body, actor=actor, at=at)


def logged_records(connection: Connection, run_id: str) -> frozenset[str]:
    """The digests that ``log_record`` logged of the run."""
    query = select(log_entries.c.content).where(
        log_entries.c.kind == "record", log_entries.c.subject == run_id
    )
    contents = connection.execute(query).scalars()
    return frozenset(str(json.loads(content)["body"]["record"]) for content in contents)


def entry_body(kind: str, seq: int, body: Mapping[str, Any]) -> dict[str, Any]:
    """What the log says of an event."""
    return {"event": kind, "seq": seq, **body}


def _read(connection: Connection, rows: Sequence[Row[Any]]) -> list[StoredRun]:
    ids = [row.id for row in rows]
    happened: dict[str, list[Row[Any]]] = defaultdict(list)
    query = select(run_events.c.run_id, *_TOLD).where(run_events.c.run_id.in_(ids))
    for event in connection.execute(query.order_by(run_events.c.seq)):
        happened[event.run_id].append(event)
    return [_run(row, happened[row.id]) for row in rows]


def _run(row: Row[Any], events: Sequence[Row[Any]]) -> StoredRun:
    kinds = [event.event_kind for event in events]
    ends = [event for event in events if event.event_kind in ENDED]
    moved = [kind for kind in kinds if kind in STATES]
    return StoredRun(
        id=row.id,
        certificate_id=row.certificate_id,
        issue=row.issue,
        untrusted=row.untrusted,
        plan_digest=row.plan_digest,
        reservation_id=row.reservation_id,
        queue=row.queue,
        wanted=json.loads(row.wanted),
        requested_by=row.requested_by,
        requested_at=row.requested_at,
        state=ends[0].event_kind if ends else STATES[moved[-1]],
        begun="running" in kinds,
        cancel_asked="cancel_asked" in kinds,
        changed_at=events[-1].event_at,
        worker=row.worker,
        fence=row.fence,
        job=row.job,
        steps=row.steps,
        certified_steps=row.certified_steps,
        granted=row.granted,
        previous=row.previous,
        head=row.head,
        search=None if row.search is None else SearchOpening.read(json.loads(row.search)),
        began_at=next((event.event_at for event in events if event.event_kind == "running"), None),
        attempts=tuple(
            Attempt.of(event.event_fence, json.loads(event.event_body))
            for event in events
            if event.event_kind == "requeued"
        ),
        outcome=json.loads(ends[0].event_body) if ends else None,
        request_digest=row.request_digest,
    )


# ---- records --------------------------------------------------------------------------


def add_record_part(
    connection: Connection, run_id: str, fence: int, part: int, content: bytes
) -> None:
    """Store a part of a record; raises ``RecordRefused``."""
    where = (run_records.c.run_id == run_id, run_records.c.fence == fence)
    parts, length = connection.execute(
        select(func.count(), func.coalesce(func.sum(run_records.c.length), 0)).where(*where)
    ).one()
    if part <= parts:
        stored = select(run_records.c.content).where(*where, run_records.c.part == part)
        if zlib.decompress(connection.execute(stored).scalar_one()) != content:
            raise RecordRefused(
                f"part {part} of the record was sent before with other content.",
                "Send a part again only unchanged.",
            )
        return
    if part != parts + 1:
        raise RecordRefused(f"part {part} came and {parts + 1} is next.", "Send them in order.")
    if length + len(content) > MOST_RECORD_BYTES:
        raise RecordRefused(
            f"the record has more than {MOST_RECORD_BYTES} bytes.",
            "Report the run without a record; it is charged in full.",
        )
    connection.execute(
        insert(run_records).values(
            run_id=run_id,
            fence=fence,
            part=part,
            content=zlib.compress(content),
            length=len(content),
        )
    )


def records_of(connection: Connection, run_id: str) -> dict[int, list[bytes]]:
    """The parts of every record of a run, by fencing token, compressed."""
    columns = (run_records.c.fence, run_records.c.content)
    query = select(*columns).where(run_records.c.run_id == run_id)
    records: dict[int, list[bytes]] = {}
    for fence, content in connection.execute(
        query.order_by(run_records.c.fence, run_records.c.part)
    ):
        records.setdefault(fence, []).append(bytes(content))
    return records
