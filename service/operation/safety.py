"""What forbids this process to spend budget or to sign: it refuses until an operator repairs it.

A service that knows of damage and goes on makes it worse: what it signs or reserves rests on rows
that are not true. So every request that changes something is refused with 503
``writes_suspended`` while the log is damaged or was rolled back, a ledger is not what the log says
of it, the disk is nearly full, or this machine's clock is not the database's. What only ends work
goes on (``needs(..., always=True)``), and so does reading. ``/readyz`` gives the same reasons, and
``affidavit_writes_suspended`` counts them.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from threading import Lock

from sqlalchemy import Connection, Engine, ExceptionContext, event, func, select
from sqlalchemy.exc import SQLAlchemyError

from affidavit.plan import Reason
from affidavit.service.clock import MOST_SKEW, DatabaseClock
from affidavit.service.ledger.head_check import LedgerAltered, require_all_unaltered
from affidavit.service.log.audit import snapshot
from affidavit.service.log.log_tables import log_checkpoints
from affidavit.service.log.stored_tree import (
    LogDamaged,
    StoredCheckpoint,
    last_checkpoint,
    read_frontier,
    require_superset,
)
from affidavit.service.problems import Problem
from affidavit.service.teams import acting_for

LOOK_SECONDS = 5.0
"""For how long what was found counts; each write looks at its ledger and the log's size besides."""
LEAST_FREE_BYTES = 16 * 1024 * 1024
"""Of the file system of an SQLite database, below which nothing more is begun."""
FULL_SECONDS = 30.0
"""For how long nothing is begun after PostgreSQL reported a full disk."""
DISK_FULL = "53100"

_LARGEST = select(func.max(log_checkpoints.c.tree_size))


class SafetyWatch:
    """What one process knows; safe to ask from several threads.

    ``log_problem`` says what the sequencer met, and ``newest`` the newest checkpoint that it saw.
    """

    def __init__(
        self,
        engine: Engine,
        log_problem: Callable[[], Reason | None],
        newest: Callable[[], StoredCheckpoint | None],
        clock: DatabaseClock | None = None,
    ) -> None:
        self._engine = engine
        self._log_problem = log_problem
        self._newest = newest
        self._clock = clock or DatabaseClock(engine)
        self._place = _place_of(engine)
        self._full_until = 0.0
        self._lock = Lock()
        self._looked_at = -LOOK_SECONDS
        self._fault: Reason | None = None
        event.listen(engine, "begin", self._begin)
        event.listen(engine, "handle_error", self._note_full_disk)

    def _begin(self, connection: Connection) -> None:
        """Let no transaction write into a log that is smaller than the one that was seen."""
        seen = self._newest()
        if seen is None or not connection.get_execution_options().get("affidavit_writes"):
            return
        if (connection.execute(_LARGEST).scalar_one() or 0) < seen.checkpoint.size:
            self._looked_at = -LOOK_SECONDS
            raise LogDamaged("the log has fewer entries than were seen before")

    def reasons(self) -> list[Reason]:
        """Why nothing may be spent or signed; nothing if all is well."""
        log, stored = self._log_problem(), self._stored()
        if log is not None and stored is not None and log.code == stored.code:
            stored = None
        possible = (log, stored, self._disk(), self._skew())
        return [item for item in possible if item is not None]

    def require(self) -> None:
        """Raise the problem of a service that must not write."""
        reasons = self.reasons()
        if reasons:
            raise Problem(
                503,
                "writes_suspended",
                f"The service spends and signs nothing until it is repaired: {reasons[0]}",
                *reasons,
                headers={"Retry-After": "60"},
            )

    def _stored(self) -> Reason | None:
        with self._lock:
            if time.monotonic() < self._looked_at + LOOK_SECONDS:
                return self._fault
            try:
                self._fault = self._look()
            except SQLAlchemyError:
                return self._fault  # the request itself will say that there is no database
            self._looked_at = time.monotonic()
            return self._fault

    def _look(self) -> Reason | None:
        seen = self._newest()  # before the snapshot, which has it then
        try:
            with acting_for(None), snapshot(self._engine) as connection:
                last = last_checkpoint(connection)
                newest = None if last is None else last.checkpoint
                read_frontier(connection, newest)
                if seen is not None and seen.checkpoint != newest:
                    require_superset(connection, seen.checkpoint, newest)
                require_all_unaltered(connection)
        except LedgerAltered as altered:
            return altered.reason
        except LogDamaged as damaged:
            return _reason("log_damaged", f"{damaged}.", "Run: affidavit audit verify")
        return None

    def _skew(self) -> Reason | None:
        skew = self._clock.skew()
        if abs(skew) <= MOST_SKEW:
            return None
        return _reason(
            "clock_skewed",
            f"this machine's clock is {abs(skew.total_seconds()):.1f} s "
            f"{'ahead of' if skew > MOST_SKEW else 'behind'} the database's.",
            "Synchronise it (NTP).",
        )

    def _note_full_disk(self, context: ExceptionContext) -> None:
        if getattr(context.original_exception, "sqlstate", None) == DISK_FULL:
            self._full_until = time.monotonic() + FULL_SECONDS

    def _disk(self) -> Reason | None:
        if time.monotonic() < self._full_until:
            return _reason(
                "disk_full",
                f"PostgreSQL reported a full disk less than {FULL_SECONDS:g} s ago.",
                "Free space on the server's disks.",
            )
        if self._place is None:
            return None
        try:
            free = shutil.disk_usage(self._place).free
        except OSError:
            return None
        if free >= LEAST_FREE_BYTES:
            return None
        return _reason(
            "disk_full",
            f"the database's file system has {free // 1024} KiB left.",
            f"Free at least {LEAST_FREE_BYTES // 1024 // 1024} MiB.",
        )


def _place_of(engine: Engine) -> Path | None:
    """The folder of an SQLite file; only PostgreSQL itself knows how full its disks are."""
    if engine.dialect.name != "sqlite" or not engine.url.database:
        return None
    return Path(engine.url.database).parent


def _reason(code: str, message: str, remedy: str) -> Reason:
    return Reason(code=code, pointer="", message=message, remedy=remedy)
