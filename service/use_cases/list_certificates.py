"""List certificates, newest first, a page at a time (``service.cursors``)."""

from __future__ import annotations

from dataclasses import dataclass

from affidavit.service.cursors import InvalidCursor, cursor_at, read_cursor
from affidavit.service.store import CertificateStore, Filters, Place, Summary

__all__ = ["InvalidCursor", "Page", "cursor_of", "list_certificates", "place_of"]


@dataclass(frozen=True, slots=True)
class Page:
    """Some certificates, and the cursor of the next page unless this is the last."""

    items: list[Summary]
    next: str | None


def list_certificates(
    store: CertificateStore, filters: Filters, cursor: str | None, limit: int
) -> Page:
    """The page after ``cursor``, or the first; raises ``InvalidCursor``."""
    after = None if cursor is None else place_of(cursor)
    found = store.page(filters, after, limit + 1)
    items = found[:limit]
    return Page(items, cursor_of(items[-1]) if len(found) > limit else None)


def cursor_of(row: Summary) -> str:
    """The cursor of a page that ends with ``row``."""
    return cursor_at(row.created_at, row.id, row.untrusted)


def place_of(cursor: str) -> Place:
    """The place that ``cursor`` marks; raises ``InvalidCursor``."""
    return Place(*read_cursor(cursor, str, bool))
