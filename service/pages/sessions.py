"""Sessions: who is signed in with a browser, and for how long.

Rules it keeps:

- The cookie is 256 random bits, new at every sign-in; the database has its SHA-256.
- A session ends 12 hours after it began, after an hour without a request, when its person
  signs out, and at once when its token is revoked or expires.
- A session by token may do what the token may now, looked up for each request. One by the
  OpenID provider may do what the groups allowed at sign-in, until it ends.
- That a session is still in use is written at most once a minute.
"""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import Engine, delete, insert, select, update

from affidavit.service.database import reader, writer
from affidavit.service.identity.actor import Actor, Scope
from affidavit.service.identity.authentication import Caller, caller_of
from affidavit.service.identity.credentials import AuthenticationError
from affidavit.service.identity.token_repository import TokenRepository
from affidavit.service.pages.session_tables import sessions

LONGEST = timedelta(hours=12)
IDLE = timedelta(hours=1)
SEEN = timedelta(minutes=1)
"""How often it is written down that a session is in use."""


@dataclass(frozen=True, slots=True)
class Begun:
    """A new session: the cookie's value, and when it ends at the latest."""

    cookie: str
    expires_at: datetime


class Sessions:
    """Sessions behind one engine; safe to call from several threads and processes."""

    def __init__(self, engine: Engine, tokens: TokenRepository) -> None:
        self._reader = reader(engine)
        self._writer = writer(engine)
        self._tokens = tokens

    def begin(self, caller: Caller, *, at: datetime, until: datetime | None = None) -> Begun:
        """Begin a session for ``caller``, to end at ``until`` if that is soon; others' ends
        that have come are cleared away."""
        cookie = secrets.token_urlsafe(32)
        ends = min(at + LONGEST, until or at + LONGEST)
        with self._writer.begin() as connection:
            connection.execute(delete(sessions).where(sessions.c.expires_at <= at))
            connection.execute(
                insert(sessions).values(
                    digest=_digest(cookie),
                    actor=caller.actor.name,
                    scopes=" ".join(sorted(caller.actor.scopes)),
                    token_id=caller.token_id,
                    created_at=at,
                    seen_at=at,
                    expires_at=ends,
                )
            )
        return Begun(cookie, ends)

    def find(self, cookie: str, *, at: datetime) -> Caller | None:
        """Who is signed in with ``cookie``; None where nobody is any more."""
        query = select(sessions).where(sessions.c.digest == _digest(cookie))
        with self._reader.connect() as connection:
            row = connection.execute(query).mappings().first()
        if row is None or row["expires_at"] <= at or row["seen_at"] <= at - IDLE:
            return None
        caller = self._caller(row)
        if caller is not None and row["seen_at"] <= at - SEEN:
            self._seen(row["digest"], at)
        return caller

    def end(self, cookie: str) -> None:
        """Sign out."""
        with self._writer.begin() as connection:
            connection.execute(delete(sessions).where(sessions.c.digest == _digest(cookie)))

    def _caller(self, row: Any) -> Caller | None:
        if row["token_id"] is not None:
            try:
                return caller_of(self._tokens.with_id(row["token_id"]))
            except AuthenticationError:
                return None
        known = {item.value for item in Scope}
        scopes = frozenset(Scope(entry) for entry in row["scopes"].split() if entry in known)
        return Caller(Actor(row["actor"], scopes), row["actor"])

    def _seen(self, digest: str, at: datetime) -> None:
        with self._writer.begin() as connection:
            change = update(sessions).where(sessions.c.digest == digest)
            connection.execute(change.values(seen_at=at))


def _digest(cookie: str) -> str:
    return hashlib.sha256(cookie.encode("utf-8", "surrogatepass")).hexdigest()
