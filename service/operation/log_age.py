"""How far the log is behind: how long the oldest entry without a place has waited."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import Connection, func, select

from affidavit.service.log.tables import log_entries, log_pending

BEHIND_SECONDS = 30.0
"""Entries are taken up within a second; one that waits this long shows that nobody does."""


def oldest_pending(connection: Connection, now: datetime) -> float:
    """Seconds that the oldest entry without a place in the log has waited; 0 if none has."""
    query = select(func.min(log_entries.c.at)).join(
        log_pending, log_pending.c.entry_id == log_entries.c.id
    )
    since = connection.execute(query).scalar_one()
    return 0.0 if since is None else max(0.0, (now - since).total_seconds())
