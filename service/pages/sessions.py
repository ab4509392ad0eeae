"""Browser sessions, and the cookies that carry them.

- The cookie is 256 random bits, new at every sign-in, of which the database has the SHA-256, and
  the service's signature of the session: nobody signs in by writing a row to the database.
- A session ends 12 hours after it began, after an hour without a request, when its person
  signs out, and at once when its token is revoked or expires.
- A session by token may do what the token may now, looked up for each request. One by the
  OpenID provider may do what the groups allowed at sign-in, until it ends.
- A session acts for one team. Whoever has several switches: that is a new cookie, so that forms
  of pages of the team before are not accepted, and it ends no later than the session before.
- That a session is in use is written at most once a minute.

Over https the names of cookies begin with ``__Host-``, so that no neighbouring host can set
them, and they are sent over https alone. Scripts cannot read them, and other sites' forms do
not send them. ``AFFIDAVIT_PUBLIC_URL`` says whether it is https, for behind a proxy that
ends TLS every request looks like http.

References: RFC 6265bis 4.1.3.2 (cookie name prefixes).
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa
from fastapi import Request, Response
from sqlalchemy import Engine, RowMapping, delete, insert, select, update

from affidavit.certificate import KeyRole
from affidavit.plan import digest_of
from affidavit.service.certificate_tables import UtcDateTime, metadata
from affidavit.service.database import Store
from affidavit.service.identity.actor import Actor, AuthenticationError, Scope
from affidavit.service.identity.authentication import Caller, caller_of
from affidavit.service.identity.tokens import TokenRepository
from affidavit.service.keys import Keyring

if TYPE_CHECKING:
    from affidavit.service.dependencies import Services

LONGEST = timedelta(hours=12)
IDLE = timedelta(hours=1)
SEEN = timedelta(minutes=1)
"""How often the use of a session is written down."""

sessions = sa.Table(
    "sessions",
    metadata,
    sa.Column("digest", sa.String(64), primary_key=True),
    sa.Column("actor", sa.String(255), nullable=False),
    sa.Column("roles", sa.JSON, nullable=False),
    sa.Column("token_id", sa.String(12), sa.ForeignKey("tokens.id")),
    sa.Column("team", sa.String(64)),
    sa.Column("created_at", UtcDateTime, nullable=False),
    sa.Column("seen_at", UtcDateTime, nullable=False),
    sa.Column("expires_at", UtcDateTime, nullable=False),
    sa.CheckConstraint("expires_at > created_at", name="sessions_expire_later"),
    sa.Index("sessions_by_expiry", "expires_at"),
)
"""Who is signed in with a browser, until when, by the SHA-256 of the cookie.

A session by token names the token and not what it allows, which is looked up for each request;
one by the OpenID provider has the team and the scopes of each of the person's ``roles`` when it
began, and acts in that of ``team``.
"""


NewSession = tuple[str, datetime]
"""A new session: the cookie's value, and when it ends at the latest."""


class Sessions(Store):
    """The sessions of browsers."""

    def __init__(self, engine: Engine, tokens: TokenRepository, keyring: Keyring) -> None:
        super().__init__(engine)
        self._tokens = tokens
        self._keyring = keyring

    def begin(self, caller: Caller, *, at: datetime) -> NewSession:
        """Begin a session for ``caller``, and delete the expired ones.

        Raises ``KeyFailure`` where the service cannot sign.
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
            "expires_at": at + LONGEST,
        }
        row, cookie = self._sign(values)  # before the transaction, for it may take a while
        with self._writer.begin() as connection:
            connection.execute(delete(sessions).where(sessions.c.expires_at <= at))
            connection.execute(insert(sessions).values(row))
        return cookie, row["expires_at"]

    def _sign(self, values: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
        """The row of a new session of ``values``, and its cookie."""
        secret = secrets.token_urlsafe(32)
        row = {**values, "digest": _digest(secret)}
        signature = self._keyring.current(KeyRole.STATUS).sign(_signed(row))
        return row, f"{secret}.{signature.hex()}"

    def find(self, cookie: str, *, at: datetime) -> Caller | None:
        """Who is signed in with ``cookie``; None if nobody is."""
        query = select(sessions).where(sessions.c.digest == _digest(cookie))
        with self._reader.connect() as connection:
            row = connection.execute(query).mappings().first()
        if row is None or not self._counts(row, cookie, at):
            return None
        caller = self._caller(row, at)
        if caller is not None and row["seen_at"] <= at - SEEN:
            with self._writer.begin() as connection:
                change = update(sessions).where(sessions.c.digest == row["digest"])
                connection.execute(change.values(seen_at=at))
        return caller

    def _counts(self, row: RowMapping, cookie: str, at: datetime) -> bool:
        """Whether a session has not ended, and is as the service signed it."""
        if row["expires_at"] <= at or row["seen_at"] <= at - IDLE:
            return False
        return self._keyring.accepts(KeyRole.STATUS, _signature(cookie), _signed(row))

    def switch(self, cookie: str, team: str | None, *, at: datetime) -> NewSession | None:
        """End the session and begin one for ``team``; None if that is none of the person's."""
        with self._writer.begin() as connection:
            gone = delete(sessions).where(sessions.c.digest == _digest(cookie))
            row = connection.execute(gone.returning(sessions)).mappings().first()
            # What is signed anew was signed before: a row alone may be anybody's.
            genuine = row is not None and self._counts(row, cookie, at)
            if row is None or not genuine or team not in [role["team"] for role in row["roles"]]:
                connection.rollback()
                return None
            changed, new = self._sign({**row, "team": team})
            connection.execute(insert(sessions).values(changed))
            return new, row["expires_at"]

    def end(self, cookie: str) -> None:
        """Sign out."""
        with self._writer.begin() as connection:
            connection.execute(delete(sessions).where(sessions.c.digest == _digest(cookie)))

    def _caller(self, row: Any, at: datetime) -> Caller | None:
        if row["token_id"] is not None:
            try:
                return caller_of(self._tokens.with_id(row["token_id"]), at)
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


def _signed(row: Mapping[str, Any] | RowMapping) -> bytes:
    """What the service signs of a session: all but when it was last seen."""
    times = {name: row[name].astimezone(UTC).isoformat() for name in ("created_at", "expires_at")}
    names = ("digest", "actor", "roles", "token_id", "team")
    digest = digest_of({**{name: row[name] for name in names}, **times})
    return f"affidavit session {digest}".encode()


# ---- cookies ------------------------------------------------------------------------

SESSION = "affidavit_session"
FORM = "affidavit_form"
"""Binds a form to a browser before anybody is signed in."""
SIGN_IN = "affidavit_sign_in"
"""What only this browser knows of a sign-in at the OpenID provider."""


_COOKIE: Any = {"path": "/", "httponly": True, "samesite": "lax"}


def read_cookie(request: Request, name: str) -> str | None:
    """The value of a cookie."""
    return request.cookies.get(_cookie_name(request, name)) or None


def write_cookie(
    request: Request, response: Response, name: str, value: str, until: datetime | None = None
) -> None:
    """Set a cookie until then, or until the browser is closed."""
    expires = None if until is None else until.astimezone(UTC)
    name = _cookie_name(request, name)
    response.set_cookie(name, value, expires=expires, secure=is_secure(request), **_COOKIE)


def delete_cookie(request: Request, response: Response, name: str) -> None:
    """Delete a cookie from the browser."""
    name = _cookie_name(request, name)
    response.delete_cookie(name, secure=is_secure(request), **_COOKIE)


def is_secure(request: Request) -> bool:
    """Whether browsers reach this service over https."""
    services: Services = request.app.state.services
    if services.public_url is not None:
        return services.public_url.startswith("https://")
    return request.url.scheme == "https"


def _cookie_name(request: Request, name: str) -> str:
    return f"__Host-{name}" if is_secure(request) else name
