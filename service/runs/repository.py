"""The rows of runs: requests and events, which are append-only, and leases.

``runs``
    One row per run, with its whole request. A reservation is for one run.
``run_events``
    The events of a run, numbered from 1, which determine its state. An event is inserted with its
    log entry.
``run_leases``
    The holder of a run, the end of its lease, its fencing token and secret (as a digest), and the
    steps that all holders may have charged (``granted``). ``previous`` is the token under which the
    run was last started, ``job`` counts the engine's jobs for the run, and ``search`` is the secret
    opening of a search, whose digest is in the event ``running``. Only these rows change; the
    events have everything that is needed afterwards.
``run_records``
    The record that a worker sent of a run, part by part (zlib; ``length`` is in bytes before).
    Parts come in order and never change; a part may be sent again unchanged.
``run_tests``
    What a test of the run showed (canonical JSON, zlib), as one person declares: ``replay`` of the
    training script on the plan, or ``audit`` of the run's canaries. There is one of each kind,
    inserted with its log entry, so that none takes its place.

The constraints exclude a run that is queued, started or ended twice (``once`` is unique in a run),
a run that starts without being queued or settles without being started (``follows`` refers to the
earlier event), and two claims under one fencing token.
"""

from __future__ import annotations

import json
import zlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Literal, Self

from sqlalchemy import Connection, Row, Select, func, insert, select, update

from affidavit.client import Run, RunEvent
from affidavit.plan import digest_of_bytes
from affidavit.service.core.database import page_of
from affidavit.service.core.errors import DomainError
from affidavit.service.core.wire_models import Internal
from affidavit.service.identity.actor import CommandContext
from affidavit.service.log import entries
from affidavit.service.tables.ledger import ledgers, reservations
from affidavit.service.tables.runs import run_events, run_leases, run_records, run_tests, runs
from affidavit.trust.log import LogEntry

End = Literal["settled", "failed", "cancelled"]
Kind = End | Literal["queued", "claimed", "requeued", "cancel_asked", "running", "resumed"]
TestKind = Literal["replay", "audit"]
ENDED = frozenset({"settled", "failed", "cancelled"})
STATES: Mapping[str, str] = {
    **{kind: kind for kind in ("queued", "claimed", "running", *ENDED)},
    "requeued": "queued",
    "resumed": "running",
}
"""The state of a run after each kind of event; ``cancel_asked`` does not change it."""
UNIQUE_KINDS = {"queued", "cancel_asked", "running"}
OUTCOME = ("code", "message", "record", "provenance")
"""What the event that ended a run says of it, beside the charged steps."""

STEP_PARTS = 100
"""Parts of a run, in which steps are granted and accounted."""
MAX_RECORD_BYTES = 256 * 1024 * 1024
"""The size of a record, uncompressed; 10^5 steps take about half."""


def round_up_steps(steps: int, certified: int) -> int:
    """``steps`` rounded up to a hundredth of ``certified``, in whole steps.

    So a run needs at most a hundred accountings and grants, and no reported ε is too low.

    >>> [round_up_steps(steps, 1000) for steps in (0, 1, 10, 11, 995, 1000, 2000)]
    [0, 10, 10, 20, 1000, 1000, 1000]
    >>> round_up_steps(7, 50)
    7
    """
    part = max(1, certified // STEP_PARTS)
    return min(certified, -(-steps // part) * part)


class UnknownRun(DomainError):
    """No run has this id."""

    code = "not_found"
    status = 404


class NoRecord(DomainError):
    """The run has not ended, or ended without a record."""

    code = "no_record"
    status = 404


class RecordRefused(DomainError):
    """The part of a run's record does not follow the one before, or is too large."""

    code = "record_refused"


class StoredRunEvent(RunEvent):
    """An event of a run, as the API shows it, with what only the service reads.

    ``body`` is what the log has of it, and ``token`` the fencing token under which it happened.
    ``requeued`` ends a worker's attempt. Its body has ``granted``, the steps granted to all
    attempts so far, ``further``, whether the attempt finished a step, and ``head``, the last
    reported digest of a line of its record.
    """

    actor: Internal[str]
    token: Internal[int | None]
    body: Internal[dict[str, Any]]

    @property
    def granted(self) -> int:
        """The steps granted until this attempt ended; 0 from versions without grants."""
        return int(self.body.get("granted", 0))


class StoredRun(Run):
    """A run, as the API shows it, with what only the service reads of its request and its lease.

    ``name`` and ``dataset`` are the plan's. ``claims`` is also the fencing token of the last claim,
    ``previous`` that under which the run was last started, and ``head`` the last reported digest of
    a line of the record. ``search`` is the secret opening of a search; ``secret`` is a digest.
    """

    name: Internal[str | None]
    dataset: Internal[str]
    untrusted: Internal[bool]
    request: Internal[dict[str, Any]]
    request_digest: Internal[str | None]
    secret: Internal[str | None]
    job: Internal[int]
    holder: Internal[str | None]
    seconds: Internal[int | None]
    expires_at: Internal[datetime | None]
    head: Internal[str | None]
    previous: Internal[int | None]
    search: Internal[dict[str, Any] | None]
    events: Internal[tuple[StoredRunEvent, ...]]

    @classmethod
    def of(cls, row: Row[Any], events: Sequence[StoredRunEvent]) -> Self:
        """Build the run of a row of ``_RUNS`` and its ``events``."""
        request, last = json.loads(row.request), events[-1]
        outcome = last.body if last.event in ENDED else {}
        steps = {
            "certified": row.certified_steps,
            "granted": row.granted,
            "reported": row.steps,
            "charged": outcome.get("steps_charged"),
        }
        read = {
            "request": request,
            "search": None if row.search is None else json.loads(row.search),
            "state": last.event if last.event in ENDED else row.state,
            "steps": steps,
            "changed_at": last.at,
            "events": events,
        }
        ended = {name: outcome.get(name) for name in OUTCOME}
        return cls.model_validate({**request, **row._mapping, **ended, **read})

    @property
    def has_ended(self) -> bool:
        """Whether no further event can follow."""
        return self.state in ENDED

    @property
    def began_at(self) -> datetime | None:
        """The time at which the first step was started."""
        return next((event.at for event in self.events if event.event == "running"), None)

    @property
    def attempts(self) -> tuple[StoredRunEvent, ...]:
        """The ``requeued`` events, which end attempts, oldest first."""
        return tuple(event for event in self.events if event.event == "requeued")

    def was_ended_by(self, provenance: dict[str, Any]) -> bool:
        """Return whether a worker's report with this provenance ended the run."""
        return self.has_ended and self.provenance == provenance

    @property
    def has_begun(self) -> bool:
        """Whether the first step was started, which committed the budget."""
        return self.began_at is not None

    @property
    def steps_done(self) -> int:
        """The steps charged to a run that has ended, and those reported of another."""
        return self.steps.reported if self.steps.charged is None else self.steps.charged

    @property
    def made_progress(self) -> bool:
        """Whether the current attempt has finished a step, according to its reports.

        An attempt that charged two steps beyond the earlier grants has finished the first of them.
        """
        granted = self.attempts[-1].granted if self.attempts else 0
        return self.has_begun and self.steps.reported >= granted + 2


_PLAIN = ("id", "issue", "untrusted", "plan_digest", "queue", "request")
_ROW = (
    *(runs.c[name] for name in (*_PLAIN, "requested_by", "requested_at", "request_digest")),
    *(run_leases.c[name] for name in ("state", "secret", "job", "holder", "worker", "seconds")),
    *(run_leases.c[name] for name in ("expires_at", "steps", "granted", "head", "previous")),
    run_leases.c.search,
    runs.c.certificate_id.label("certificate"),
    runs.c.reservation_id.label("reservation"),
    run_leases.c.fence.label("claims"),
    run_leases.c.cancel.label("cancel_asked"),
    reservations.c.certified_steps,
    reservations.c.name,
    ledgers.c.dataset,
)
_RUNS: Select[Any] = (
    select(*_ROW)
    .join_from(runs, run_leases)
    .join_from(runs, reservations)
    .join_from(reservations, ledgers)
)
_EVENTS = select(
    *(run_events.c[name] for name in ("run_id", "seq", "at", "actor", "body")),
    run_events.c.kind.label("event"),
    run_events.c.fence.label("token"),
).order_by(run_events.c.seq)


def find(connection: Connection, run_id: str, *, locked: bool = False) -> StoredRun:
    """Return the run of that id, and lock its lease if ``locked``; raises ``UnknownRun``."""
    query = _RUNS.where(runs.c.id == run_id)
    query = query.with_for_update(of=run_leases) if locked else query
    for run in _load(connection, connection.execute(query).all()):
        return run
    raise UnknownRun(f"run {run_id} not found.", "GET /v1/runs lists all runs.")


def page(
    connection: Connection,
    /,
    cursor: str | None,
    limit: int,
    *,
    state: str | None = None,
    requested_after: datetime | None = None,
    requested_before: datetime | None = None,
    **equal: str | None,
) -> tuple[list[StoredRun], str | None]:
    """Return at most ``limit`` runs after ``cursor``, latest first, and the next page's cursor.

    ``equal`` are required values of columns; None matches all. The times are exclusive. Raises
    ``InvalidCursor``.
    """
    query = _RUNS.where(*(runs.c[name] == value for name, value in equal.items() if value))
    if state in ENDED:
        query = query.join(run_events, run_events.c.run_id == runs.c.id)
        query = query.where(run_events.c.once == "end", run_events.c.kind == state)
    elif state is not None:
        query = query.where(run_leases.c.state == state)
    if requested_after is not None:
        query = query.where(runs.c.requested_at > requested_after)
    if requested_before is not None:
        query = query.where(runs.c.requested_at < requested_before)
    place = (runs.c.requested_at, runs.c.id)
    rows, following = page_of(connection, query, place, cursor, limit)
    return _load(connection, rows), following


def find_repeated(connection: Connection, context: CommandContext) -> StoredRun | None:
    """Return the run of an earlier request with this key; raises ``IdempotencyKeyReused``."""
    if context.idempotency_key is None:
        return None
    key = (runs.c.requested_by == context.actor, runs.c.idempotency_key == context.idempotency_key)
    for earlier in _load(connection, connection.execute(_RUNS.where(*key)).all()):
        context.require_same(earlier.request_digest)
        return earlier
    return None


def _load(connection: Connection, rows: Sequence[Row[Any]]) -> list[StoredRun]:
    """Load the runs of rows of ``_RUNS`` with their events."""
    events: dict[str, list[StoredRunEvent]] = defaultdict(list)
    query = _EVENTS.where(run_events.c.run_id.in_([row.id for row in rows]))
    for row in connection.execute(query).mappings() if rows else ():
        of_run, body = events[row["run_id"]], json.loads(row["body"])
        state = STATES.get(row["event"]) or of_run[-1].state
        event = {**body, **row, "body": body, "state": state}
        of_run.append(StoredRunEvent.model_validate(event))
    return [StoredRun.of(row, events[row.id]) for row in rows]


def change_lease(connection: Connection, run_id: str, **values: Any) -> None:
    """Change the lease of a run that this transaction has locked."""
    connection.execute(update(run_leases).where(run_leases.c.run_id == run_id).values(**values))


def add_event(
    connection: Connection,
    run_id: str,
    kind: Kind,
    body: Mapping[str, Any],
    context: CommandContext,
    *,
    fence: int | None = None,
    begun: bool = False,
) -> None:
    """Insert an event with its log entry; ``begun`` tells whether the run began before."""
    follows = "running" if begun and kind in ("resumed", *ENDED) else "queued"
    last = select(func.max(run_events.c.seq)).where(run_events.c.run_id == run_id)
    seq = (connection.scalar(last) or 0) + 1
    event = {
        "run_id": run_id,
        "seq": seq,
        "kind": kind,
        "once": "end" if kind in ENDED else kind if kind in UNIQUE_KINDS else None,
        "follows": None if kind == "queued" else follows,
        "fence": fence,
        "at": context.at,
        "actor": context.actor,
        "body": json.dumps(body, sort_keys=True),
    }
    entries.insert_logged(connection, run_events, event, event_entry)


def event_entry(event: Any) -> LogEntry:
    """Build the log entry of a row of ``run_events``."""
    body = {"event": event.kind, "seq": event.seq, **json.loads(event.body)}
    return LogEntry(kind="run", subject=event.run_id, actor=event.actor, at=event.at, body=body)


def log_grant(
    connection: Connection, run: StoredRun, granted: int, context: CommandContext
) -> None:
    """Log that steps up to ``granted`` may be charged."""
    body = {"fence": run.claims, "granted": granted}
    entries.append(connection, "steps", run.id, body, actor=context.actor, at=context.at)


# ---- records --------------------------------------------------------------------------


def log_record_head(
    connection: Connection, run: StoredRun, head: str, context: CommandContext
) -> None:
    """Log the digest of a record's first line, which commits to data and canaries."""
    body = {"fence": run.claims, "record": head}
    entries.append(connection, "record", run.id, body, actor=context.actor, at=context.at)


def logged_records(connection: Connection, run_id: str) -> frozenset[str]:
    """Return the digests of the run that ``log_record_head`` logged."""
    logged = (json.loads(content) for content in entries.logged(connection, run_id))
    return frozenset(str(entry["body"]["record"]) for entry in logged if entry["kind"] == "record")


def add_record_part(
    connection: Connection, run_id: str, fence: int, part: int, content: bytes
) -> None:
    """Store a part of a record; raises ``RecordRefused``."""
    where = (run_records.c.run_id == run_id, run_records.c.fence == fence)
    size = select(func.count(), func.sum(run_records.c.length)).where(*where)
    parts, length = connection.execute(size).one()
    if part <= parts:
        stored = select(run_records.c.content).where(*where, run_records.c.part == part)
        if zlib.decompress(connection.scalars(stored).one()) != content:
            raise RecordRefused(
                f"part {part} of the record was sent before with different content.",
                "Resend a part only unchanged.",
            )
        return
    if part != parts + 1:
        raise RecordRefused(f"part {part} arrived before {parts + 1}.", "Send parts in order.")
    if (length or 0) + len(content) > MAX_RECORD_BYTES:
        raise RecordRefused(
            f"the record has more than {MAX_RECORD_BYTES} bytes.",
            "Report the run without a record; it is charged in full.",
        )
    row = {"run_id": run_id, "fence": fence, "part": part, "length": len(content)}
    connection.execute(insert(run_records).values(**row, content=zlib.compress(content)))


def final_record(connection: Connection, run_id: str) -> list[bytes]:
    """Return the compressed parts of the record by which the run was charged.

    Raises ``UnknownRun`` and ``NoRecord``.
    """
    run = find(connection, run_id)
    parts = records_of(connection, run_id).get(run.events[-1].token or 0, [])
    if run.record is None or not parts:
        raise NoRecord(
            f"run {run_id} has {'sent no record' if run.has_ended else 'not ended'}.",
            "Only a run that was reported with a record has one.",
        )
    return parts


def records_of(connection: Connection, run_id: str) -> dict[int, list[bytes]]:
    """Return the compressed parts of every record of a run, by fencing token."""
    columns = (run_records.c.fence, run_records.c.content)
    query = select(*columns).where(run_records.c.run_id == run_id)
    records: dict[int, list[bytes]] = defaultdict(list)
    for fence, content in connection.execute(query.order_by(*run_records.primary_key)):
        records[fence].append(content)
    return dict(records)


# ---- tests ----------------------------------------------------------------------------


def add_test(
    connection: Connection, run_id: str, kind: TestKind, record: bytes, context: CommandContext
) -> Row[Any]:
    """Store the record of a test, in canonical JSON, with its log entry; return the row."""
    row = {
        "run_id": run_id,
        "kind": kind,
        "content": zlib.compress(record),
        "digest": digest_of_bytes(record),
        "verdict": json.loads(record)["verdict"],
        "added_by": context.actor,
        "added_at": context.at,
    }
    return entries.insert_logged(connection, run_tests, row, test_entry)


def test_entry(row: Any) -> LogEntry:
    """Build the log entry of a row of ``run_tests``."""
    body = {"digest": row.digest, "verdict": row.verdict}
    return LogEntry(
        kind=row.kind, subject=row.run_id, actor=row.added_by, at=row.added_at, body=body
    )


def tests_of(connection: Connection, run_id: str) -> dict[str, Row[Any]]:
    """Return the rows of the run's tests, by kind; one that is not logged counts for nothing."""
    rows = connection.execute(select(run_tests).where(run_tests.c.run_id == run_id)).all()
    return {row.kind: row for row in rows if entries.is_logged(connection, test_entry(row))}
