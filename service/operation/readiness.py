"""Whether the service can do its work: database, schema at head, signer, and a log that grows.

Nothing is written to find it out: a probe comes every few seconds.

The log is behind when its oldest entry without a place has waited too long. An entry's own time
is that of the request that led to it, which may have been accounted for minutes, or of a
certificate of an earlier release; so what counts is when this process first saw the entry wait.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock

from sqlalchemy import Connection, Engine, func, select, text
from sqlalchemy.exc import SQLAlchemyError

from affidavit.certificate import KeyFailure, PublicKey
from affidavit.plan import Reason
from affidavit.service.keyring import Keyring
from affidavit.service.log.log_tables import log_pending
from affidavit.service.migrate import revision_of

BEHIND_SECONDS = 30.0
"""Entries are taken up within a second; one that waits this long shows that nobody does."""


class LogWatch:
    """What one process has seen of the queue; safe to ask from several threads."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._oldest: int | None = None
        self._since = 0.0

    def waited(self, connection: Connection) -> float:
        """Seconds since the oldest waiting entry was first seen to wait; 0 if none waits."""
        oldest = connection.execute(select(func.min(log_pending.c.entry_id))).scalar_one()
        with self._lock:
            now = time.monotonic()
            if oldest != self._oldest:
                self._oldest, self._since = oldest, now
            return 0.0 if oldest is None else now - self._since


_READ_ONLY = text("SELECT current_setting('transaction_read_only')::boolean")


@dataclass(frozen=True, slots=True)
class Readiness:
    """What was found; the service is ready when there is no reason against it."""

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
    """Look at the database and at the signer; ``suspended`` is why nothing may be written."""
    reasons = list(suspended)
    key: PublicKey | None = None
    revision = None
    try:
        revision = revision_of(engine)
        with engine.connect() as connection:
            if engine.dialect.name == "postgresql" and connection.execute(_READ_ONLY).scalar_one():
                message = "the database takes no writes: it is a standby, or was told to take none."
                reasons.append(
                    _reason("database_read_only", message, "Lead DATABASE_URL to the primary.")
                )
            if revision != head:
                message = f"the schema is at revision {revision}, not {head}."
                reasons.append(_reason("schema_not_at_head", message, "Run: affidavit migrate"))
            elif (seconds := log_watch.waited(connection)) > BEHIND_SECONDS:
                message = f"an entry has waited {seconds:.0f} s for its place in the log."
                reasons.append(_reason("log_behind", message, "The service's log says why."))
    except SQLAlchemyError:
        message = "the database does not answer."
        reasons.append(_reason("database_unavailable", message, "Start it; see DATABASE_URL."))
    try:
        key = signers.all_current()[0].public
    except KeyFailure as failure:
        reasons.append(_reason("signer_unavailable", str(failure), "Fix the key directory."))
    except SQLAlchemyError:
        pass  # which keys are revoked is not known; why not is said above
    return Readiness(revision, key, tuple(reasons))


def _reason(code: str, message: str, remedy: str) -> Reason:
    return Reason(code=code, pointer="", message=message, remedy=remedy)
