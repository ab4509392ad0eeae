"""Browser sessions and their cookies.

- The cookie contains 256 random bits, new at every sign-in, and the service's signature of the
  session. The database stores the SHA-256 of the bits; write access to it is not enough to sign in.
- A session ends 12 hours after it began, after an hour without a request, when the person signs
  out, and as soon as its token expires or is revoked.
- A session by token has the token's current scopes. A session by the OpenID provider has the
  scopes of the groups at sign-in, until it ends.
- A session acts for one team. Switching teams creates a new cookie, so that forms of the previous
  team's pages are rejected; the expiry does not change.
- The time of the last request is stored at most once a minute.

Over https, cookie names begin with ``__Host-``, so that neighbouring hosts cannot set them, and
cookies are sent over https only. Scripts cannot read them, and forms of other sites do not send
them. ``AFFIDAVIT_PUBLIC_URL`` says whether the scheme is https, because behind a TLS proxy every
request looks like http.

References: RFC 6265bis 4.1.3.2 (cookie name prefixes).
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from fastapi import Request, Response
from sqlalchemy import Engine, RowMapping, delete, insert, select, update

from affidavit.plan import digest_of
from affidavit.service.core.database import (
    Store,
)
from affidavit.service.identity.actor import Actor, AuthenticationError
from affidavit.service.identity.authentication import Caller, caller_of
from affidavit.service.identity.scopes import Scope
from affidavit.service.identity.tokens import TokenRepository
from affidavit.service.keys.keyring import Keyring
from affidavit.service.tables.identity import sessions
from affidavit.trust import KeyRole

MAX_LIFETIME = timedelta(hours=12)
MAX_IDLE_TIME = timedelta(hours=1)
SEEN_INTERVAL = timedelta(minutes=1)
"""Least time between two updates of ``seen_at``."""


NewSession = tuple[str, datetime]
"""The cookie of a new session, and its expiry."""


class Sessions(Store):
    """Begins, finds and ends sessions."""

    def __init__(self, engine: Engine, tokens: TokenRepository, keyring: Keyring) -> None:
        super().__init__(engine)
        self._tokens = tokens
        self._keyring = keyring

    def begin(self, caller: Caller, *, at: datetime) -> NewSession:
        """Begin a session for ``caller``, and delete expired ones.

        Raises ``KeyFailure`` if the service cannot sign.
        """
        roles = [
            {"team": actor.team, "scopes": sorted(actor.scopes)}
            for actor in (caller.actor, *caller.elsewhere)
        ]
        values = {
            "actor": caller.actor.name,
            "roles": roles,
            "token_id": caller.token_id,
            "team": caller.actor.team,
            "created_at": at,
            "seen_at": at,
            "expires_at": at + MAX_LIFETIME,
        }
        row, cookie = self._sign(values)  # before the transaction, because it may be slow
        with self._writer.begin() as connection:
            connection.execute(delete(sessions).where(sessions.c.expires_at <= at))
            connection.execute(insert(sessions).values(row))
        return cookie, row["expires_at"]

    def _sign(self, values: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
        """Return the row of a new session with ``values``, and its cookie."""
        secret = secrets.token_urlsafe(32)
        row = {**values, "digest": _digest(secret)}
        signature = self._keyring.current(KeyRole.STATUS).sign(_signed_bytes(row))
        return row, f"{secret}.{signature.hex()}"

    def find(self, cookie: str, *, at: datetime) -> Caller | None:
        """Return the caller with the session of ``cookie``, or None."""
        query = select(sessions).where(sessions.c.digest == _digest(cookie))
        with self._reader.connect() as connection:
            row = connection.execute(query).mappings().first()
        if row is None or not self._is_valid(row, cookie, at):
            return None
        caller = self._caller(row, at)
        if caller is not None and row["seen_at"] <= at - SEEN_INTERVAL:
            with self._writer.begin() as connection:
                change = update(sessions).where(sessions.c.digest == row["digest"])
                connection.execute(change.values(seen_at=at))
        return caller

    def _is_valid(self, row: RowMapping, cookie: str, at: datetime) -> bool:
        """Return whether a session has not ended and its signature is valid."""
        if row["expires_at"] <= at or row["seen_at"] <= at - MAX_IDLE_TIME:
            return False
        return self._keyring.accepts(KeyRole.STATUS, _signature(cookie), _signed_bytes(row))

    def switch(self, cookie: str, team: str | None, *, at: datetime) -> NewSession | None:
        """Replace the session by one for ``team``; returns None if the person is not in it."""
        with self._writer.begin() as connection:
            deletion = delete(sessions).where(sessions.c.digest == _digest(cookie))
            row = connection.execute(deletion.returning(sessions)).mappings().first()
            # Without this check, a forged row would be signed.
            genuine = row is not None and self._is_valid(row, cookie, at)
            if row is None or not genuine or team not in [role["team"] for role in row["roles"]]:
                connection.rollback()
                return None
            changed, new = self._sign({**row, "team": team})
            connection.execute(insert(sessions).values(changed))
            return new, row["expires_at"]

    def end(self, cookie: str) -> None:
        """End the session."""
        with self._writer.begin() as connection:
            connection.execute(delete(sessions).where(sessions.c.digest == _digest(cookie)))

    def _caller(self, row: Any, at: datetime) -> Caller | None:
        if row["token_id"] is not None:
            try:
                return caller_of(self._tokens.find_by_id(row["token_id"]), at)
            except AuthenticationError:
                return None
        known = {scope.value for scope in Scope}
        actors = {
            role["team"]: Actor(
                row["actor"],
                frozenset(Scope(name) for name in role["scopes"] if name in known),
                role["team"],
            )
            for role in row["roles"]
        }
        acting = actors.pop(row["team"])
        return Caller(acting, row["actor"], elsewhere=tuple(actors.values()))


def _digest(cookie: str) -> str:
    secret = cookie.partition(".")[0]
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()


def _signature(cookie: str) -> bytes:
    try:
        return bytes.fromhex(cookie.partition(".")[2])
    except ValueError:
        return b""


def _signed_bytes(row: Mapping[str, Any] | RowMapping) -> bytes:
    """Return the signed bytes of a session: everything except ``seen_at``."""
    times = {name: row[name].astimezone(UTC).isoformat() for name in ("created_at", "expires_at")}
    names = ("digest", "actor", "roles", "token_id", "team")
    digest = digest_of({**{name: row[name] for name in names}, **times})
    return f"affidavit session {digest}".encode()


# ---- cookies ------------------------------------------------------------------------

SESSION = "affidavit_session"
FORM = "affidavit_form"
"""Binds a form to a browser before anybody is signed in."""
SIGN_IN = "affidavit_sign_in"
"""Secrets of a sign-in attempt at the OpenID provider."""


_COOKIE: Any = {"path": "/", "httponly": True, "samesite": "lax"}


def read_cookie(request: Request, name: str) -> str | None:
    """Return the value of a cookie, or None."""
    return request.cookies.get(_cookie_name(request, name)) or None


def write_cookie(
    request: Request, response: Response, name: str, value: str, until: datetime | None = None
) -> None:
    """Set a cookie until a time, or until the browser is closed."""
    expires = None if until is None else until.astimezone(UTC)
    name = _cookie_name(request, name)
    response.set_cookie(name, value, expires=expires, secure=is_secure(request), **_COOKIE)


def delete_cookie(request: Request, response: Response, name: str) -> None:
    """Delete a cookie from the browser."""
    name = _cookie_name(request, name)
    response.delete_cookie(name, secure=is_secure(request), **_COOKIE)


def is_secure(request: Request) -> bool:
    """Return whether browsers reach this service over https."""
    public_url: str | None = request.app.state.services.public_url
    if public_url is not None:
        return public_url.startswith("https://")
    return request.url.scheme == "https"


def _cookie_name(request: Request, name: str) -> str:
    return f"__Host-{name}" if is_secure(request) else name
