"""List certificates, newest first, a page at a time.

A page ends with an opaque cursor: the place of its last row. Pages are cut by place and
not by count, so certificates that are added meanwhile neither repeat nor hide a row.
"""

from __future__ import annotations

import base64
import binascii
import json
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from affidavit.service.store import CertificateStore, Filters, Place, Summary

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)


class InvalidCursor(ValueError):
    """A cursor that this service did not make."""


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
    moment = (row.created_at - _EPOCH) // _MICROSECOND
    text = json.dumps([moment, row.id, row.untrusted], separators=(",", ":"))
    return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")


def place_of(cursor: str) -> Place:
    """The place that ``cursor`` marks; raises ``InvalidCursor``."""
    try:
        raw = base64.b64decode(cursor + "=" * (-len(cursor) % 4), altchars=b"-_", validate=True)
        moment, certificate, untrusted = json.loads(raw)
        place = Place(_EPOCH + moment * _MICROSECOND, certificate, untrusted)
    except (binascii.Error, ValueError, TypeError, OverflowError, RecursionError):
        raise InvalidCursor("the cursor is not one of this service") from None
    plain = isinstance(certificate, str) and certificate.isascii() and certificate.isprintable()
    if not plain or not isinstance(untrusted, bool):
        raise InvalidCursor("the cursor is not one of this service")
    return place
