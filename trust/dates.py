"""The dates of signed documents: every comparison of one with a key, another date or the clock.

A date in a signed document is what the holder of its key wrote. It counts only together with the
key's window and revocation, the dates of what the document contains, and what others saw. A
certificate, its checkpoint and the clock must be in this order, each signed inside its key's
window:

    issued ≤ checkpoint ≤ now

Dates that two clocks wrote may be ``MAX_CLOCK_SKEW`` apart the wrong way round.

>>> from affidavit.trust.key import SigningKey
>>> key = SigningKey.generate().public
>>> fault_of_signature(key, key.not_before, now=key.not_after, seen=key.not_after)
>>> fault_of_signature(key, key.not_before - 9 * MAX_CLOCK_SKEW, now=key.not_after).value
'outside the window'

References: TUF specification 1.0.33, section 5; RFC 5280, section 6.1.3 (validity of a path).
"""

from __future__ import annotations

from datetime import datetime, timedelta
from enum import StrEnum

from affidavit.trust.key import PublicKey

MAX_CLOCK_SKEW = timedelta(minutes=5)
"""The most by which another clock may be ahead of the verifier's."""


class DateFault(StrEnum):
    """Why the date of a signature does not count."""

    REVOKED = "revoked"
    REVOKED_SINCE = "revoked before others saw it"
    OUTSIDE_WINDOW = "outside the window"
    NOT_YET = "in the future"


def fault_of_signature(
    key: PublicKey, at: datetime, *, now: datetime, seen: datetime | None = None
) -> DateFault | None:
    """Return why a signature of ``key`` that is dated ``at`` does not count, or None.

    ``seen`` is when others saw it first; without it nobody did before ``now``, and the key must not
    be revoked yet, because the holder of a stolen key writes any date.
    """
    if key.revoked_at(at):
        return DateFault.REVOKED
    if key.revoked_at(now if seen is None else seen):
        return DateFault.REVOKED_SINCE
    if not key.covers(at):
        return DateFault.OUTSIDE_WINDOW
    return DateFault.NOT_YET if is_ahead(at, now) else None


def fault_today(key: PublicKey, at: datetime, *, now: datetime) -> DateFault | None:
    """Like ``fault_of_signature``, for what counts only while its key may still sign."""
    return fault_of_signature(key, at, now=now) or fault_of_signature(key, now, now=now)


def is_ahead(at: datetime, of: datetime) -> bool:
    """Whether ``at`` lies later than ``of`` by more than two clocks may differ."""
    return at - of > MAX_CLOCK_SKEW  # a sum may lie beyond the last year


def is_stale(hours: int | None, at: datetime, now: datetime) -> bool:
    """Whether ``at`` lies longer ago than ``hours``."""
    return hours is not None and now - at > timedelta(hours=hours)


def fault_of_use(at: datetime, begins: datetime, ends: datetime) -> DateFault | None:
    """Return why what is valid from ``begins`` to ``ends`` is not valid ``at`` a time, or None."""
    if at < begins:
        return DateFault.NOT_YET
    return DateFault.OUTSIDE_WINDOW if at > ends else None


def end_of_validity(key: PublicKey, not_after: datetime) -> datetime:
    """Return the end of what ``key`` signed: no later than the window of a key with roles."""
    return not_after if key.roles is None else min(not_after, key.not_after)
