"""How far the log is behind: for how long its oldest entry without a place is known to wait.

An entry's own time is that of the request that led to it, which may have been accounted for
minutes, or of a certificate of an earlier release; so what counts is when this process
first saw the entry wait.
"""

from __future__ import annotations

import time
from threading import Lock

from sqlalchemy import Connection, func, select

from affidavit.service.log.log_tables import log_pending

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
