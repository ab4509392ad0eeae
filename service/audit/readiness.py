"""Readiness of the service: database, schema, signing key, and log. Nothing is written.

The log is behind if its oldest pending entry has waited too long since this process first saw it.
The entry's own time is unsuitable: it is the time of a request, whose accounting may take minutes.

``SafetyWatch`` suspends writes until an operator repairs the service, because signatures and
reservations on top of damaged data would make the damage worse. Every request that changes
something is refused with 503 ``writes_suspended`` while the log is damaged or was rolled back, a
ledger or another table contradicts the log, the disk is nearly full, or this machine's clock
differs from the database's. Reading and changes that only end work continue (``needs(...,
always=True)``).
``/readyz`` gives the same reasons, and ``affidavit_writes_suspended`` counts them.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

from sqlalchemy import Connection, Engine, ExceptionContext, event, func, select, text
from sqlalchemy.exc import InterfaceError, OperationalError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from affidavit.plan import Reason
from affidavit.service.audit.comparison import AuditFinding, LogComparison
from affidavit.service.certificates.integrity import UNREADABLE
from affidavit.service.core.clock import MAX_SKEW, DatabaseClock
from affidavit.service.core.database import snapshot
from affidavit.service.core.errors import LogDamaged
from affidavit.service.core.problems import Problem
from affidavit.service.core.teams import acting_for
from affidavit.service.keys.keyring import Keyring
from affidavit.service.ledger.integrity import LedgerAltered, require_all_unaltered
from affidavit.service.log.stored_tree import (
    StoredCheckpoint,
    last_checkpoint,
    read_frontier,
    require_superset,
)
from affidavit.service.operation.database_admin import revision_of
from affidavit.service.tables.ledger import ledger_events
from affidavit.service.tables.log import log_checkpoints, log_pending
from affidavit.trust import KeyFailure, PublicKey

BEHIND_SECONDS = 30.0
"""Waiting time of a pending entry, normally under a second, at which the log is behind."""


class LogWatch:
    """The oldest pending entry seen by one process; safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._oldest: int | None = None
        self._since = 0.0

    def waited(self, connection: Connection) -> float:
        """Return the seconds since the oldest pending entry was first seen; 0 without one."""
        oldest = connection.execute(select(func.min(log_pending.c.entry_id))).scalar_one()
        with self._lock:
            now = time.monotonic()
            if oldest != self._oldest:
                self._oldest, self._since = oldest, now
            return 0.0 if oldest is None else now - self._since


_READ_ONLY = text("SELECT current_setting('transaction_read_only')::boolean")


@dataclass(frozen=True, slots=True)
class Readiness:
    """The state of the service; it is ready if there are no ``reasons``."""

    revision: str | None
    key: PublicKey | None
    reasons: tuple[Reason, ...]


def check_readiness(
    engine: Engine,
    head: str,
    signers: Keyring,
    suspended: Sequence[Reason],
    log_watch: LogWatch,
) -> Readiness:
    """Check the database and the signing key; ``suspended`` are reasons that suspend writes."""
    reasons = list(suspended)
    key: PublicKey | None = None
    revision = None
    try:
        revision = revision_of(engine)
        with engine.connect() as connection:
            if engine.dialect.name == "postgresql" and connection.execute(_READ_ONLY).scalar_one():
                message = "the database is read-only: it is a standby, or is set to be."
                reasons.append(
                    _reason("database_read_only", message, "Point DATABASE_URL at the primary.")
                )
            if revision != head:
                message = f"the schema is at revision {revision}, not {head}."
                reasons.append(_reason("schema_not_at_head", message, "Run: affidavit migrate"))
            elif (seconds := log_watch.waited(connection)) > BEHIND_SECONDS:
                message = f"an entry has waited {seconds:.0f} s for its place in the log."
                reasons.append(_reason("log_behind", message, "See the service's log."))
    except SQLAlchemyError:
        message = "the database does not answer."
        reasons.append(_reason("database_unavailable", message, "Start it; see DATABASE_URL."))
    try:
        key = signers.all_current()[0].public
    except KeyFailure as failure:
        reasons.append(_reason("signer_unavailable", str(failure), "Fix the key directory."))
    except SQLAlchemyError:
        pass  # the revoked keys are unknown, for the reason above
    return Readiness(revision, key, tuple(reasons))


# ---- suspended writes ------------------------------------------------------------------

MIN_FREE_BYTES = 16 * 1024 * 1024
"""Free space of an SQLite database's file system, below which writes are suspended."""
FULL_SECONDS = 30.0
"""Time for which writes are suspended after PostgreSQL reported a full disk."""
DISK_FULL = "53100"
GRACE_SECONDS = 30.0
"""Time after a comparison for which a database that does not answer leaves its result in force."""
_UNAVAILABLE = (OperationalError, InterfaceError, PoolTimeout)

_LARGEST_TREE = select(func.max(log_checkpoints.c.tree_size))


class SafetyWatch:
    """The faults that suspend writes in one process; safe to use from several threads.

    ``log_problem`` returns the sequencer's problem, ``newest`` the newest checkpoint that it saw.
    A comparison of the tables with the log is valid for ``seconds``; each write also checks its
    ledger and the log's size.
    """

    def __init__(
        self,
        engine: Engine,
        log_problem: Callable[[], Reason | None],
        newest: Callable[[], StoredCheckpoint | None],
        clock: DatabaseClock,
        seconds: float,
    ) -> None:
        self._engine = engine
        self._log_problem = log_problem
        self._newest = newest
        self._clock = clock
        self._folder = _database_folder(engine)
        self._full_until = 0.0
        self._lock = Lock()
        self._seconds = seconds
        self._comparison = LogComparison()
        self._checked_at: float | None = None
        self._faults: list[Reason] = []
        event.listen(engine, "begin", self._begin)
        event.listen(engine, "handle_error", self._note_full_disk)

    def _begin(self, connection: Connection) -> None:
        """Refuse to write into a log that is smaller than the newest seen checkpoint."""
        seen = self._newest()
        if seen is None or not connection.get_execution_options().get("affidavit_writes"):
            return
        if (connection.execute(_LARGEST_TREE).scalar_one() or 0) < seen.checkpoint.size:
            self._checked_at = None
            raise LogDamaged("the log has fewer entries than were seen before")

    def reasons(self) -> list[Reason]:
        """Return the reasons why nothing may be spent or signed."""
        log, stored = self._log_problem(), self._database_faults()
        if log is not None:
            stored = [log, *(item for item in stored if item.code != log.code)]
        possible = (*stored, self._disk_fault(), self._clock_fault())
        return [item for item in possible if item is not None]

    def require(self) -> None:
        """Raise ``Problem`` while writes are suspended."""
        reasons = self.reasons()
        if reasons:
            raise Problem(
                503,
                "writes_suspended",
                f"The service spends and signs nothing until it is repaired: {reasons[0]}",
                *reasons,
                headers={"Retry-After": "60"},
            )

    def _database_faults(self) -> list[Reason]:
        with self._lock:
            at = self._checked_at
            if at is not None and time.monotonic() < at + self._seconds:
                return self._faults
            started = time.monotonic()
            try:
                self._faults = self._check_database()
            except _UNAVAILABLE:
                if at is not None and started < at + GRACE_SECONDS:
                    return self._faults  # the request itself reports the missing database
                return [*self._faults, _not_compared("the database does not answer")]
            except (SQLAlchemyError, *UNREADABLE) as error:
                self._faults = [_not_compared(type(error).__name__)]
            self._checked_at = started
            return self._faults

    def _check_database(self) -> list[Reason]:
        seen = self._newest()  # read before the snapshot, which then includes it
        try:
            with acting_for(None), snapshot(self._engine) as connection:
                last = last_checkpoint(connection)
                newest = None if last is None else last.checkpoint
                read_frontier(connection, newest)
                if seen is not None and seen.checkpoint != newest:
                    require_superset(connection, seen.checkpoint, newest)
                altered = self._comparison.contradictions(connection)
                reasons = {table: _rows_altered(table, item) for table, item in altered.items()}
                try:
                    require_all_unaltered(connection)
                except LedgerAltered as ledger:
                    reasons[ledger_events.name] = _ledger_altered(ledger.code)
        except LogDamaged as damaged:
            return [_reason("log_damaged", f"{damaged}.", "Run: affidavit audit verify")]
        return list(reasons.values())

    def _clock_fault(self) -> Reason | None:
        skew = self._clock.skew()
        if abs(skew) <= MAX_SKEW:
            return None
        return _reason(
            "clock_skewed",
            f"this machine's clock is {abs(skew.total_seconds()):.1f} s "
            f"{'ahead of' if skew > MAX_SKEW else 'behind'} the database's.",
            "Synchronise it (NTP).",
        )

    def _note_full_disk(self, context: ExceptionContext) -> None:
        if getattr(context.original_exception, "sqlstate", None) == DISK_FULL:
            self._full_until = time.monotonic() + FULL_SECONDS

    def _disk_fault(self) -> Reason | None:
        if time.monotonic() < self._full_until:
            return _reason(
                "disk_full",
                f"PostgreSQL reported a full disk less than {FULL_SECONDS:g} s ago.",
                "Free space on the server's disks.",
            )
        if self._folder is None:
            return None
        try:
            free = shutil.disk_usage(self._folder).free
        except OSError:
            return None
        if free >= MIN_FREE_BYTES:
            return None
        return _reason(
            "disk_full",
            f"the database's file system has {free // 1024} KiB left.",
            f"Free at least {MIN_FREE_BYTES // 1024 // 1024} MiB.",
        )


def _database_folder(engine: Engine) -> Path | None:
    """Return the folder of an SQLite file; PostgreSQL's disks are unknown."""
    if engine.dialect.name != "sqlite" or not engine.url.database:
        return None
    return Path(engine.url.database).parent


# Everybody reads these, and so they name nobody and no data set.


def _rows_altered(table: str, finding: AuditFinding) -> Reason:
    return _reason(
        "rows_altered",
        f"the table {table} contradicts the log ({finding.code}).",
        "Run: affidavit audit verify, which names the rows, and restore them from a newer backup.",
    )


def _ledger_altered(code: str) -> Reason:
    remedy = "Run: affidavit audit verify, which names it, and restore its rows."
    return _reason(code, "a ledger does not match the log.", remedy)


def _reason(code: str, message: str, remedy: str) -> Reason:
    return Reason(code=code, message=message, remedy=remedy)


def _not_compared(why: str) -> Reason:
    message = f"the rows could not be compared with the log: {why}."
    return _reason("rows_not_compared", message, "Run: affidavit audit verify")
