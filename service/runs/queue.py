"""The queue of runs in the service's own tables: leases, fencing, and a reaper.

Every change is one transaction: the lease's row is locked, what is claimed of it checked, and
the lease, the event, its log entry and what the ledger must say of it are written together
(``locked_run``).
A worker claims the oldest run of its queue, or the one that an engine handed it; two that ask at
once skip what the other has locked (``FOR UPDATE SKIP LOCKED``; SQLite has one writer at a time).
Each claim has a secret of its own: a worker reports on its run under ``fence`` and ``secret``.

The dispatcher takes back leases. A run that is over without a record is charged in full.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Concatenate, ParamSpec, TypeVar

from sqlalchemy import Connection, Engine, select

from affidavit.service.cursors import cursor_at, read_cursor
from affidavit.service.database import reader, writer
from affidavit.service.errors import DomainError
from affidavit.service.identity.actor import CommandContext
from affidavit.service.runs import repository
from affidavit.service.runs.locked_run import HELD, LockedRun
from affidavit.service.runs.models import RunClaimRequest, StartRequest
from affidavit.service.runs.repository import StoredRun
from affidavit.service.runs.run_tables import run_leases

_lease = run_leases.c

P = ParamSpec("P")
T = TypeVar("T")


class RunNotStarted(DomainError):
    """The run may not begin any more, and is over."""

    code = "run_not_started"


class RunQueue:
    """The queue behind one engine; safe to use from several threads and processes."""

    def __init__(self, engine: Engine) -> None:
        self._reader = reader(engine)
        self._writer = writer(engine)

    def transaction(self) -> AbstractContextManager[Connection]:
        """A transaction that writes."""
        return self._writer.begin()

    def read(
        self, query: Callable[Concatenate[Connection, P], T], *values: P.args, **named: P.kwargs
    ) -> T:
        """The result of ``query`` on a connection of its own."""
        with self._reader.connect() as connection:
            return query(connection, *values, **named)

    def change(
        self,
        run_id: str,
        call: CommandContext,
        change: Callable[Concatenate[LockedRun, P], T],
        *values: P.args,
        **named: P.kwargs,
    ) -> T:
        """The result of ``change`` in a transaction that holds the run; raises ``UnknownRun``."""
        with self._writer.begin() as connection:
            locked = LockedRun(connection, repository.find(connection, run_id, locked=True), call)
            return change(locked, *values, **named)

    def find(self, run_id: str) -> StoredRun:
        """The run of that id; raises ``UnknownRun``."""
        return self.read(repository.find, run_id)

    def page(
        self, cursor: str | None, limit: int, **filters: Any
    ) -> tuple[list[StoredRun], str | None]:
        """Runs, latest first, and the cursor of the next page; raises ``InvalidCursor``."""
        after = None if cursor is None else read_cursor(cursor, str)
        runs = self.read(repository.page, after, limit + 1, **filters)
        if len(runs) <= limit:
            return runs, None
        last = runs[limit - 1]
        return runs[:limit], cursor_at(last.requested_at, last.id)

    def claim(
        self, queue: str, request: RunClaimRequest, call: CommandContext
    ) -> tuple[StoredRun, str] | None:
        """The oldest run, or the one named, under a new fencing token; and the claim's secret."""
        query = select(_lease.run_id).where(_lease.queue == queue, _lease.state == "queued")
        if request.run is not None:
            query = query.where(_lease.run_id == request.run)
        query = query.order_by(_lease.requested_at, _lease.run_id).limit(1)
        with self._reader.connect() as connection:
            if connection.scalar(query) is None:
                return None  # without a lock, for workers that poll
        with self._writer.begin() as connection:
            run_id = connection.scalar(query.with_for_update(skip_locked=True))
            if run_id is None:
                return None
            locked = LockedRun(connection, repository.find(connection, run_id), call)
            secret = secrets.token_hex(32)
            return locked.claim(request.worker, request.lease, secret), secret

    def start(self, run_id: str, request: StartRequest, call: CommandContext) -> StoredRun:
        """Start or continue a run; raises ``RunNotStarted`` once it was ended instead."""
        run = self.change(run_id, call, LockedRun.start, request)
        if run.outcome is not None:
            why = f"{run.outcome['code']}: {run.outcome['message']}"
            raise RunNotStarted(why, "Claim another run.")
        return run

    def reap(self, call: CommandContext) -> int:
        """Take back expired leases, each in a transaction; returns how many."""
        expired = _lease.state.in_(HELD) & (_lease.expires_at < call.at)
        with self._reader.connect() as connection:
            leases = connection.execute(select(_lease.run_id, _lease.fence).where(expired)).all()
        why, lose = "did not renew its lease.", LockedRun.lose
        return sum(self.change(run, call, lose, fence, why, expired=True) for run, fence in leases)
